"""Workers that die, hang or compute nonsense."""

import inspect
import math
import os
import signal
import sqlite3
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray.train
import torch
import torch.distributed as dist
import torchvision
from torch import nn

from app.config import Config
from app.data.splits import Splits
from app.models.mnist_cnn import MnistCnn
from tests.common import tiny_splits
from tests.faults.common import CHECKPOINT_EVERY, STEPS, Fit, SlowNet, assert_same_run, slow_config, worker_pids
from tests.faults.conftest import Figures

pytestmark = [
    pytest.mark.faults,
    pytest.mark.usefixtures("local_ray"),
    pytest.mark.filterwarnings("ignore"),  # ray's, mlflow's and alembic's own
]


@pytest.fixture(scope="module")
def undisturbed(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Fit:
    run = Fit(slow_config(tmp_path_factory.mktemp("undisturbed")))
    summary, exit_code = run.result()
    assert (exit_code, summary.step) == (0, STEPS)
    return run


@pytest.mark.parametrize("how_many", [pytest.param("one worker", marks=pytest.mark.ci), "all workers"])
def test_killed_workers(
    how_many: str, undisturbed: Fit, tmp_path: Path, figures: Figures, capsys: pytest.CaptureFixture[str]
) -> None:
    database = tmp_path / "mlflow.db"
    run = Fit(slow_config(tmp_path, tracking_uri=f"sqlite:///{database}"))
    step = run.wait_for_step(10)
    killed_at = time.time()
    for pid in worker_pids()[-1:] if how_many == "one worker" else worker_pids():
        os.kill(pid, signal.SIGKILL)
    summary, exit_code = run.result()
    output = capsys.readouterr().out
    assert (exit_code, summary.status, summary.step) == (0, "finished", STEPS)
    assert "died: its process was killed or crashed" in output
    assert_same_run(run, undisturbed)
    lost = run.steps_lost(step, output)
    assert lost <= CHECKPOINT_EVERY
    start_s, recovery_s = run.seconds_to_first_step(), run.seconds_to_step_after(step, killed_at)
    number = "1." if how_many == "one worker" else "2."
    figures(f"{number} SIGKILL of {how_many}", "recovered, bit-identical", lost, start_s, recovery_s)

    # 20. One MLflow run, strictly increasing steps.
    with sqlite3.connect(database) as connection:
        assert connection.execute("select count(*) from runs").fetchone() == (1,)
        rows = connection.execute(
            "select step from metrics where key = 'train/loss' order by timestamp, step"
        ).fetchall()
    assert [step for (step,) in rows] == list(range(1, STEPS + 1))
    figures("20. One MLflow run through all of it", "1 run id; steps 1 to 48, each once, in order")


def slowed(network: nn.Module) -> nn.Module:
    network.register_forward_pre_hook(lambda *_: time.sleep(0.1))
    return network


def slow_mnist_cnn(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return slowed(MnistCnn(input_shape, num_classes))


def slow_resnet18(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return slowed(torchvision.models.resnet18(num_classes=num_classes))


THREE_WORKERS: dict[str, Any] = {"num_workers": 3, "dataset": "synthetic", "synthetic_samples": 60, "image_size": 12}
THREE_WORKERS |= {"batch_size": 12, "epochs": 3, "augment": "none"}  # 15 steps


@pytest.mark.parametrize("network", ["mnist_cnn", "resnet18"])  # one bucket, several
def test_a_killed_worker_of_three(
    network: str, tmp_path: Path, figures: Figures, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sum over three workers depends on the order of gradients, which must be the same in restarted processes."""
    settings = {**THREE_WORKERS, "model": f"tests.faults.test_workers:slow_{network}"}
    undisturbed = Fit(slow_config(tmp_path / "undisturbed", **settings))
    assert undisturbed.result()[1] == 0
    run = Fit(slow_config(tmp_path, **settings))
    run.wait_for_step(5)
    os.kill(worker_pids()[-1], signal.SIGKILL)
    summary, exit_code = run.result()
    assert (exit_code, summary.status, summary.step) == (0, "finished", 15)
    assert "died: its process was killed or crashed" in capsys.readouterr().out
    assert_same_run(run, undisturbed)
    figures(f"1.1 SIGKILL of one of three workers, {network}", "recovered, bit-identical")


def is_rank_1_for_the_first_time_at_step_10(network: nn.Module) -> bool:
    """Counts the calls in training; a file in the run's folder tells a restarted worker that it was there."""
    network.calls = getattr(network, "calls", 0) + network.training  # type: ignore[assignment]  # a number is no Module
    context = ray.train.get_context()
    if network.calls != 10 or context.get_world_rank() != 1:
        return False
    storage: Any = context.get_storage()
    marker = Path(storage.experiment_fs_path) / "it-happened"
    if marker.exists():
        return False
    marker.write_text(str(time.time()))
    return True


class Hanging(SlowNet):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if is_rank_1_for_the_first_time_at_step_10(self):
            threading.Event().wait()
        return super().forward(images)


class Failing(SlowNet):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if is_rank_1_for_the_first_time_at_step_10(self):
            raise RuntimeError("a cosmic ray")
        return super().forward(images)


@pytest.mark.ci
def test_a_rank_that_hangs(undisturbed: Fit, tmp_path: Path, figures: Figures, capsys: pytest.CaptureFixture) -> None:
    run = Fit(slow_config(tmp_path, model="tests.faults.test_workers:Hanging", hang_timeout_s=8))
    summary, exit_code = run.result()
    output = capsys.readouterr().out
    assert (exit_code, summary.step) == (0, STEPS)
    assert_same_run(run, undisturbed)
    assert "rank 1 made no step for 8 s and was ended in forward (" in output
    stacks = (run.folder / "tracking" / "stacks.txt").read_text()
    assert "threading.Event().wait()" in stacks  # where it stood
    hung_at = float((run.folder / "it-happened").read_text())
    lost, recovery_s = run.steps_lost(9, output), run.seconds_to_step_after(9, hung_at + 8)
    outcome = "ended after --hang-timeout-s, its stack in the log; recovered, bit-identical"
    figures("19. A rank that hangs (time after the timeout)", outcome, lost, run.seconds_to_first_step(), recovery_s)


def is_rank_1() -> bool:
    return dist.is_initialized() and dist.get_rank() == 1


def load_that_hangs_once(config: Config) -> Splits:
    marker = Path(config.output_dir) / "it-happened"
    if is_rank_1() and not marker.exists():
        marker.touch()
        threading.Event().wait()
    return tiny_splits(config)


def load_that_hangs(config: Config) -> Splits:
    if is_rank_1():
        threading.Event().wait()
    return tiny_splits(config)


def load_that_writes_for_long(config: Config) -> Splits:
    """As a download does, for longer than --setup-timeout-s, of which the other rank sees nothing."""
    if is_rank_1():
        began = time.monotonic()
        with tempfile.TemporaryFile() as file:
            while time.monotonic() - began < 1.3 * config.setup_timeout_s:
                file.write(bytes(2**20))
                time.sleep(0.2)
    return tiny_splits(config)


def test_a_setup_that_hangs(undisturbed: Fit, tmp_path: Path, figures: Figures, capsys: pytest.CaptureFixture) -> None:
    own = {"dataset": f"{__name__}:load_that_hangs_once", "setup_timeout_s": 15, "max_failures": 1}
    run = Fit(slow_config(tmp_path, **own))
    assert run.result()[1] == 0
    output = capsys.readouterr().out
    assert_same_run(run, undisturbed)
    line = inspect.getsourcelines(load_that_hangs_once)[1] + 4
    assert f"rank 1 was ended in load_that_hangs_once ({__file__}:{line})" in output
    assert "rank 0 was ended" not in output  # it waited
    assert "threading.Event().wait()" in (run.folder / "tracking" / "stacks.txt").read_text()
    outcome = "ended after --setup-timeout-s, with its place in the user's file; recovered, bit-identical"
    figures("19.1 A load() of the user's that hangs on one rank", outcome)


@pytest.mark.ci
def test_a_setup_that_hangs_at_every_start(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    own = {"dataset": f"{__name__}:load_that_hangs", "setup_timeout_s": 15, "max_failures": 0}
    summary, exit_code = Fit(slow_config(tmp_path, **own)).result()
    output = capsys.readouterr().out
    assert (exit_code, summary.status, summary.step) == (1, "failed", 0)
    line = inspect.getsourcelines(load_that_hangs)[1] + 2
    assert f"rank 1 was ended in load_that_hangs ({__file__}:{line}): its setup made no progress for 15 s" in output


@pytest.mark.ci
def test_a_setup_that_takes_long_on_one_rank_and_writes(undisturbed: Fit, tmp_path: Path) -> None:
    own = {"dataset": f"{__name__}:load_that_writes_for_long", "setup_timeout_s": 15, "max_failures": 0}
    run = Fit(slow_config(tmp_path, **own))
    assert run.result()[1] == 0
    assert_same_run(run, undisturbed)


def test_an_error_in_one_worker_is_retried(undisturbed: Fit, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = Fit(slow_config(tmp_path, model="tests.faults.test_workers:Failing", max_failures=1))
    assert run.result()[1] == 0
    assert "a cosmic ray" in capsys.readouterr().out
    assert_same_run(run, undisturbed)


class Infinite(SlowNet):
    value = math.inf

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        bad = is_rank_1_for_the_first_time_at_step_10(self)
        logits = super().forward(images)
        return logits * torch.tensor([[-self.value, 1.0, 1.0, 1.0]]) if bad else logits


class NotANumber(Infinite):
    value = math.nan


@pytest.mark.parametrize(("number", "model", "loss"), [(13, "NotANumber", "nan"), (14, "Infinite", "inf")])
def test_a_loss_that_is_no_number_on_one_rank(
    number: int, model: str, loss: str, undisturbed: Fit, tmp_path: Path, figures: Figures
) -> None:
    run = Fit(slow_config(tmp_path, model=f"tests.faults.test_workers:{model}"))
    summary, exit_code = run.result()
    assert (exit_code, summary.status, summary.step) == (1, "failed", 9)
    assert summary.error is not None
    assert "at step 10: training stopped before its update" in summary.error
    assert [loss for _, loss, _ in run.losses()] == [loss for _, loss, _ in undisturbed.losses()][:9]
    assert all(tensor.isfinite().all() for tensor in run.weights().values())
    figures(f"{number}. {loss} on one rank", "all ranks stop before the update, exit 1; the last checkpoint is good")

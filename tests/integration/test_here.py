"""One worker on a Ray of this machine: it is the command's own process, and all else is as with Ray's workers."""

import inspect
import os
import re
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from app.checkpoint import load_checkpoint
from app.config import Config
from app.data.splits import Splits
from app.setup import is_fast_at_bf16
from app.storage import Storage
from tests.common import PlainNet, tiny_splits
from tests.faults.common import Command, Fit, assert_same_run, slow_config, wait_until

pytestmark = [
    pytest.mark.usefixtures("local_ray"),
    pytest.mark.filterwarnings("ignore"),  # ray's, mlflow's and alembic's own
]

# 12 steps: checkpoints after the 4th, the 6th, which ends an epoch, the 8th and the 12th.
ONE = {"num_workers": 1, "epochs": 2, "model": "tests.integration.test_here:Net"}


PHASES = ["the settings are read", "the data is there", "Ray is up", "what trains is imported"]
PHASES += ["the workers are started", "a worker begins", "a worker has its data", "a worker has its model"]
PHASES += ["the first step is made"]


class Net(PlainNet):
    """Says which process it is in, and does what the environment asks for in its 7th step or TEST_STEP, once."""

    steps = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if folder := os.environ.get("TEST_FOLDER"):
            self.steps += self.training
            (Path(folder) / "pid").write_text(str(os.getpid()))
            once = Path(folder) / "done"
            if self.steps == int(os.environ.get("TEST_STEP", "7")) and not once.exists():
                once.touch()
                if os.environ["TEST_FAULT"] == "fails":
                    raise RuntimeError("no luck")
                if os.environ["TEST_FAULT"] == "needs too much memory":
                    raise MemoryError("no more")
                if os.environ["TEST_FAULT"] == "hangs":
                    threading.Event().wait()
        return super().forward(images)


class Insatiable(PlainNet):
    """Runs out of memory in every training step."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise MemoryError("no more")
        return super().forward(images)


class SlowToMake(Net):
    """Is still being made, in torch's code, when the command has long ended."""

    def __init__(self, num_classes: int, input_shape: tuple[int, int, int]) -> None:
        super().__init__(num_classes, input_shape)
        (Path(os.environ["TEST_FOLDER"]) / "making").touch()
        tensor = torch.rand(500, 500)
        while True:
            tensor = (tensor @ tensor).sigmoid()


def load_that_hangs(config: Config) -> Splits:
    if dist.is_initialized():
        threading.Event().wait()
    return tiny_splits(config)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Fit:
    """By a worker of Ray's: this process is connected to a cluster that it does not own."""
    run = Fit(slow_config(tmp_path_factory.mktemp("undisturbed"), **ONE))
    assert run.result()[1] == 0
    return run


def command(tmp_path: Path, fault: str = "", *flags: str, **settings: object) -> Command:
    environment = {"TEST_FOLDER": str(tmp_path), "TEST_FAULT": fault}
    return Command(slow_config(tmp_path, **ONE | settings), tmp_path, *flags, **environment)


def test_it_makes_the_steps_of_a_worker_of_rays_in_the_commands_process(tmp_path: Path, undisturbed: Fit) -> None:
    run = command(tmp_path, "", "-v")
    summary, exit_code = run.result()
    assert (exit_code, summary["status"], summary["step"]) == (0, "finished", 12), run.output()
    assert (tmp_path / "pid").read_text() == str(run.process.pid)
    assert_same_run(run, undisturbed)
    assert 0 < summary["train_seconds"] < summary["seconds"]
    losses = [loss for _, loss, _ in run.losses()]
    for (step, loss, accuracy), of_epoch in zip(run.epochs(), (losses[:6], losses[6:]), strict=True):
        assert step in (6, 12)
        assert loss == pytest.approx((10 * sum(of_epoch[:5]) + 7 * of_epoch[5]) / 57)
        assert f"epoch {step // 6}/2  step {step}/12  loss {loss:.4f}  accuracy {accuracy:.4f}" in run.output()
    stamps = re.findall(r"^ *(\d+\.\d) s  (.+)$", run.output(), re.MULTILINE)
    assert [float(seconds) for seconds, _ in stamps] == sorted(float(seconds) for seconds, _ in stamps)
    assert [phase for _, phase in stamps] == PHASES


def test_a_failure_is_counted_and_the_training_goes_on_from_its_checkpoint(tmp_path: Path, undisturbed: Fit) -> None:
    run = command(tmp_path, "fails", max_failures=1)
    assert run.result()[1] == 0, run.output()
    assert "rank 0 failed: no luck" in run.output()
    [stacks] = re.findall("the traceback is in (.*)", run.output())
    assert 'raise RuntimeError("no luck")' in Path(stacks).read_text()
    assert "Traceback" not in run.output()
    assert run.steps_lost(6, run.output()) == 0
    assert_same_run(run, undisturbed)


@pytest.mark.slow
@pytest.mark.ci
def test_after_out_of_memory_it_continues_with_smaller_micro_batches(
    tmp_path: Path, undisturbed: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_STEP", "11")  # so that it continues in mid-epoch
    run = command(tmp_path, "needs too much memory", max_failures=1)
    assert run.result()[1] == 0, run.output()
    assert "out of memory at 10 samples per forward pass on 1 worker: continuing with 5" in run.output()
    assert "rank 0 ran out of memory (no more)" in run.output()
    assert run.steps_lost(10, run.output()) == 2
    assert_same_run(run, undisturbed, exact=False)


@pytest.mark.slow
@pytest.mark.ci
def test_out_of_memory_before_any_checkpoint_ends_the_run(tmp_path: Path) -> None:
    summary, exit_code = command(tmp_path, model="tests.integration.test_here:Insatiable", max_failures=3).result()
    assert (exit_code, summary["status"], summary["step"]) == (1, "failed", 0)
    assert summary["error"] == (
        "out of memory at 10 samples per forward pass on 1 worker (no more); lower --micro-batch-size or --batch-size"
    )


@pytest.mark.slow
@pytest.mark.ci
def test_a_failure_too_many_ends_the_run(tmp_path: Path) -> None:
    summary, exit_code = command(tmp_path, "fails", max_failures=0).result()
    assert (exit_code, summary["status"], summary["step"]) == (1, "failed", 6)
    assert summary["error"] == "training failed: rank 0 failed: no luck"


@pytest.mark.slow
@pytest.mark.ci
def test_a_hang_ends_the_run_in_order_and_the_same_command_goes_on(tmp_path: Path, undisturbed: Fit) -> None:
    summary, exit_code = command(tmp_path, "hangs", hang_timeout_s=2.0).result()
    assert (exit_code, summary["status"], summary["step"]) == (1, "failed", 6)
    assert summary["error"].startswith("rank 0 made no step for 2 s and was ended in forward (")
    again = command(tmp_path, "hangs")
    assert again.result()[1] == 0, again.output()
    assert_same_run(again, undisturbed)


@pytest.mark.slow
@pytest.mark.ci
def test_a_setup_that_hangs_ends_the_run_in_order(tmp_path: Path) -> None:
    run = command(tmp_path, "hangs", dataset="tests.integration.test_here:load_that_hangs", setup_timeout_s=3.0)
    summary, exit_code = run.result()
    assert (exit_code, summary["status"], summary["step"]) == (1, "failed", 0)
    line = inspect.getsourcelines(load_that_hangs)[1] + 2
    assert summary["error"].startswith(f"rank 0 was ended in load_that_hangs ({__file__}:{line}): its setup made no")
    assert "--setup-timeout-s" in summary["error"]
    assert "Traceback" not in run.output()


@pytest.mark.slow
@pytest.mark.ci
def test_ctrl_c_twice_leaves_at_once_and_in_order(tmp_path: Path) -> None:
    run = command(tmp_path, "hangs", hang_timeout_s=600.0)  # so that the first has no effect
    run.wait_for_step(6)
    wait_until((tmp_path / "done").exists)
    run.interrupt()
    wait_until(lambda: "stopping after a checkpoint" in run.output())
    run.interrupt()
    summary, exit_code = run.result()
    assert (exit_code, summary["status"], summary["step"]) == (130, "killed", 6)
    assert "Traceback" not in run.output()
    assert "fatal" not in run.output().lower()


@pytest.mark.slow
@pytest.mark.ci
def test_ctrl_c_before_the_first_step_leaves_at_once_and_in_order(tmp_path: Path) -> None:
    run = command(tmp_path, "", "-v", model="tests.integration.test_here:SlowToMake")
    wait_until((tmp_path / "making").exists)
    run.interrupt()
    summary, exit_code = run.result()
    assert (exit_code, summary["status"], summary["step"]) == (130, "killed", 0)
    assert "Traceback" not in run.output()
    assert "fatal" not in run.output().lower()


@pytest.mark.slow
@pytest.mark.ci
def test_what_auto_came_to_is_kept_by_the_checkpoints_and_after_a_failure(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = command(tmp_path / "whole", precision="auto")
    assert whole.result()[1] == 0, whole.output()
    run = command(tmp_path, "fails", max_failures=1, precision="auto")
    assert run.result()[1] == 0, run.output()
    assert_same_run(run, whole)
    came_to = "bf16" if is_fast_at_bf16(torch.device("cpu")) else "fp32"
    storage = Storage(str(run.folder / "checkpoints"))
    assert {load_checkpoint(storage, folder.name).config.precision for folder in run.checkpoints()} == {came_to}
    assert f"--precision auto: {came_to}" in run.output()


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path: Path, undisturbed: Fit) -> None:
    slow = {"model": "tests.faults.common:slow_net"}
    whole = Fit(slow_config(tmp_path / "whole", **ONE | slow))
    assert whole.result()[1] == 0
    run = command(tmp_path, **slow)
    step = run.wait_for_step(3)
    run.interrupt()
    summary, exit_code = run.result()
    assert (exit_code, summary["status"]) == (130, "killed")
    assert step <= summary["step"] < 12
    again = command(tmp_path, **slow)
    assert again.result()[1] == 0, again.output()
    assert_same_run(again, whole)

"""Checkpoints that are damaged, hostile or cannot be written."""

import hashlib
import json
import os
import pickle
import resource
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from app.checkpoint import problem_with
from app.config import Config
from app.errors import BadInput
from app.evaluate import main as evaluate
from tests.faults.common import CHECKPOINT_EVERY, Command, Fit, SlowNet, slow_config
from tests.faults.conftest import Figures

pytestmark = [
    pytest.mark.faults,
    pytest.mark.usefixtures("local_ray"),
    pytest.mark.filterwarnings("ignore"),  # ray's own
]

LENGTHS = {"schedule": "constant", "max_steps": 16}


@pytest.fixture(scope="module")
def sixteen_steps(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with checkpoints after 8, 12 and 16 steps, and the best."""
    run = Fit(slow_config(tmp_path_factory.mktemp("prepared"), **LENGTHS))
    assert run.result()[1] == 0
    assert [path.name[-2:] for path in run.checkpoints()][-3:] == ["08", "12", "16"]
    return run.folder


def copied(sixteen_steps: Path, tmp_path: Path, **settings) -> Config:
    shutil.copytree(sixteen_steps, tmp_path / "runs" / "r")
    return slow_config(tmp_path, **{**LENGTHS, **settings})


def truncate(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 100)


def flip_a_byte(checkpoint: Path) -> None:
    data = bytearray((checkpoint / "trainer.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (checkpoint / "trainer.pt").write_bytes(data)


def truncate_rays_snapshot(checkpoint: Path) -> None:
    (checkpoint.parents[1] / "checkpoint_manager_snapshot.json").write_text('{"ray_version": "2.60.0", "checkp')


DAMAGES = {
    "6. Newest checkpoint truncated": (truncate, "model.safetensors has", 4),
    "7. One byte of the newest checkpoint flipped": (flip_a_byte, "trainer.pt was changed after it was written", 4),
    "8. Newest checkpoint's folder deleted": (shutil.rmtree, "", 4),
    "9. Ray's own snapshot file truncated": (truncate_rays_snapshot, "", 0),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=pytest.mark.ci if "6." in name else ()) for name in DAMAGES]
)
def test_damaged_files(
    fault: str, sixteen_steps: Path, tmp_path: Path, figures: Figures, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, said, lost = DAMAGES[fault]
    config = copied(sixteen_steps, tmp_path, max_steps=20)
    damage(tmp_path / "runs" / "r" / "checkpoints" / "checkpoint-000000016")
    run = Fit(config)
    summary, exit_code = run.result()
    output = capsys.readouterr().out
    assert (exit_code, summary.step) == (0, 20)
    assert said in output
    assert run.steps_lost(16, output) == lost <= 2 * CHECKPOINT_EVERY
    assert [step for step, _, _ in run.losses()] == list(range(1, 21))  # none missing, none repeated
    figures(fault, "goes on from the newest good one" + (", says which is not" if said else ""), lost)


class FillsTheDisk(SlowNet):
    """From its 10th step on, the process may write files of up to half of what a checkpoint needs."""

    def __init__(self, num_classes: int, input_shape: tuple[int, int, int]):
        super().__init__(num_classes, input_shape)
        self.ballast = nn.Parameter(torch.zeros(500_000))
        self.calls = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls == 10:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
        return super().forward(images) + 0 * self.ballast.sum()


@pytest.mark.ci
def test_a_full_disk(tmp_path: Path, figures: Figures) -> None:
    run = Fit(slow_config(tmp_path, model="tests.faults.test_storage:FillsTheDisk"))
    summary, exit_code = run.result()
    assert (exit_code, summary.status) == (1, "failed")
    assert summary.error is not None
    assert "a checkpoint could not be saved to" in summary.error
    assert "File too large" in summary.error
    assert "the earlier ones are untouched" in summary.error
    assert [path.name[-2:] for path in run.checkpoints()] == ["00", "04", "06", "08"]  # at each 4th step, and the best
    assert [problem_with(path) for path in run.checkpoints()] == [None] * 4
    assert not list((run.folder / "checkpoints").glob(".unfinished-*"))
    figures("10. Disk full while saving", "exit 1 with the reason; the earlier checkpoints stay good")


# What each process of a command runs at its start, if it lies in a folder of PYTHONPATH.
STALE_READS = """
import errno, pathlib
read_bytes, left = pathlib.Path.read_bytes, [2]

def stale(path):
    if path.name == "manifest.json" and left[0]:
        left[0] -= 1
        raise OSError(errno.ESTALE, "Stale file handle")
    return read_bytes(path)

pathlib.Path.read_bytes = stale
"""
# From the first try on, {seconds} long; the time is shared by all processes.
NO_RENAMES = """
import errno, os, pathlib, time
rename, since = os.rename, pathlib.Path({since!r})

def failing(source, target, **options):
    if str(target).endswith("checkpoint-000000008"):
        if not since.exists():
            since.touch()
        if time.time() < since.stat().st_mtime + {seconds}:
            raise OSError(errno.EIO, "Input/output error")
    return rename(source, target, **options)

os.rename = failing
"""


@pytest.mark.ci
def test_a_stale_file_handle_at_resume(sixteen_steps: Path, tmp_path: Path, figures: Figures) -> None:
    config = copied(sixteen_steps, tmp_path, max_steps=20)
    (tmp_path / "sitecustomize.py").write_text(STALE_READS)
    run = Command(config, tmp_path, PYTHONPATH=str(tmp_path))
    summary, exit_code = run.result()
    assert (exit_code, summary["step"]) == (0, 20), run.output()
    assert run.steps_lost(16, run.output()) == 0
    assert [step for step, _, _ in run.losses()] == list(range(1, 21))
    figures("32. A stale file handle while checkpoints are read", "read again; resumes from the newest one", 0)


def test_a_disk_that_does_not_take_a_checkpoint_for_longer_than_the_retries(tmp_path: Path, figures: Figures) -> None:
    config = slow_config(tmp_path, **LENGTHS)
    since = tmp_path / "since"
    (tmp_path / "sitecustomize.py").write_text(NO_RENAMES.format(since=str(since), seconds=40))
    run = Command(config, tmp_path, PYTHONPATH=str(tmp_path))
    summary, exit_code = run.result()
    assert (exit_code, summary["status"], summary["step"]) == (0, "finished", 16), run.output()
    assert "a checkpoint could not be saved to" in run.output()
    assert "Input/output error" in run.output()
    assert [step for step, _, _ in run.losses()] == list(range(1, 17))
    figures("33. EIO for 40 s while saving", "retried for 30 s, then the attempt fails and is repeated; same curve")


@pytest.mark.ci
def test_no_checkpoint_is_valid(
    sixteen_steps: Path, tmp_path: Path, figures: Figures, capsys: pytest.CaptureFixture[str]
) -> None:
    config = copied(sixteen_steps, tmp_path, max_steps=20)
    folders = sorted((tmp_path / "runs" / "r" / "checkpoints").iterdir())
    for folder in folders:
        truncate(folder)
    with pytest.raises(BadInput, match="no checkpoint of this run is valid") as refused:
        Fit(config).result()
    for folder in folders:
        assert str(folder) in str(refused.value)
        assert folder.is_dir()
    assert "with --start-over" in str(refused.value)
    before = json.loads((tmp_path / "runs" / "r" / "run.json").read_text())
    run = Command(config, tmp_path, "--start-over")
    summary, exit_code = run.result()
    assert (exit_code, summary["step"], before["config"]["run_name"]) == (0, 20, "r"), run.output()
    assert [step for step, _, _ in run.losses()] == list(range(1, 21))
    figures("29. Every checkpoint damaged", "refused with the list, exit 2; nothing deleted; --start-over trains anew")


class Bomb:
    def __init__(self, canary: Path):
        self.canary = canary

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.canary),)


@pytest.mark.ci
def test_a_malicious_pickle(sixteen_steps: Path, tmp_path: Path, figures: Figures) -> None:
    """With a manifest that fits, as who puts it there would make one."""
    config = copied(sixteen_steps, tmp_path, max_steps=20)
    checkpoint, canary = tmp_path / "runs" / "r" / "checkpoints" / "checkpoint-000000016", tmp_path / "canary"
    (checkpoint / "trainer.pt").write_bytes(pickle.dumps({"optimizer": Bomb(canary)}))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    data = (checkpoint / "trainer.pt").read_bytes()
    manifest["trainer.pt"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    for use in (lambda: Fit(config).result(), lambda: evaluate([str(checkpoint)])):
        with pytest.raises(BadInput, match="checkpoint-000000016 is no checkpoint of ours: UnpicklingError"):
            use()
    assert not canary.exists()
    os.rmdir(pickle.loads(data)["optimizer"] or canary)  # it does what it should not, where it is let
    figures("17. A checkpoint that is a malicious pickle", "rejected, exit 2; its code did not run")


@pytest.mark.ci
@pytest.mark.parametrize("name", ["../up", "a/../b", "..", "a..b"])
def test_names_that_lead_elsewhere(name: str, tmp_path: Path, figures: Figures) -> None:
    with pytest.raises(BadInput, match="--run-name"):
        slow_config(tmp_path, run_name=name)
    for path in (f"runs/{name}/x", f"s3://bucket/{name}/x"):
        if ".." in path.split("/"):
            with pytest.raises(BadInput, match=r"without '\.\.'"):
                evaluate([path])
    figures("18. '..' in a run's name or a checkpoint's path", "refused, exit 2")

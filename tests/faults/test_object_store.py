"""Runs whose files lie in an object store: the same as on a disk, also where the store fails now and then."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.spool import read_records
from app.storage import Storage
from tests.common import write_images
from tests.faults.conftest import Figures
from tests.faulty import FaultyProxy, faulty

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore")]  # ray's own

ROOT = Path(__file__).parents[2]
FLAGS = {
    "dataset": "tests.common:tiny_splits",
    "model": "tests.common:PlainNet",
    "batch_size": 10,
    "num_workers": 1,
    "schedule": "constant",
    "checkpoint_every": 2,
    "log_every": 1,
    "tracking_uri": "none",
    "run_name": "r",
}
# The time for which a store is asked again, shortened for a test.
QUICK = """
from app import retry
from app.cli import run_main
from app.train import main
retry.RETRY_S = 3.0
run_main(main)
"""


def run(folder: Path, root: str, start: tuple[str, ...] = ("-m", "app.train"), **flags: Any) -> tuple[int, str]:
    """The exit code and the output of app.train, started in this folder."""
    settings = {**FLAGS, "output_dir": root, **flags}
    words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return command(folder, *start, *words)


def command(folder: Path, *words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        check=False,
    )
    return done.returncode, done.stdout


def result(folder: Path, root: str) -> tuple[list[tuple[int, float]], dict[str, str]]:
    """The losses of all steps, and the SHA-256 of the weights of all checkpoints that are kept."""
    [tracking] = (Path(root) / "r" if "://" not in root else folder / "runs" / "r").glob("tracking*")
    records = [record for record, _ in read_records(tracking, 0) if record["kind"] == "metrics"]
    losses = [(r["step"], r["values"]["train/loss"]) for r in records if "train/loss" in r["values"]]
    storage, weights = Storage(f"{root}/r/checkpoints"), {}
    for name in storage.names(""):
        manifest = json.loads(storage.read(f"{name}/manifest.json") or b"")
        weights[name] = manifest["model.safetensors"]["sha256"]
        assert weights[name] == hashlib.sha256(storage.read(f"{name}/model.safetensors") or b"").hexdigest()
    return losses, weights


@pytest.fixture(scope="module")
def on_a_disk(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[int, float]], dict[str, str]]:
    """What three epochs on a disk come to."""
    folder = tmp_path_factory.mktemp("disk")
    code, output = run(folder, str(folder / "root"), epochs=3)
    assert code == 0, output
    return result(folder, str(folder / "root"))


@pytest.fixture
def proxy(root: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with faulty(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


@pytest.mark.ci
@pytest.mark.parametrize("root", ["rclone", "moto"], indirect=True)
def test_train_resume_evaluate_and_predict(root: str, on_a_disk: Any, tmp_path: Path) -> None:
    assert run(tmp_path, root, epochs=2)[0] == 0
    code, output = run(tmp_path, root, epochs=3)
    assert code == 0, output
    assert "after step 12" in output
    assert result(tmp_path, root) == on_a_disk
    code, output = command(tmp_path, "-m", "app.evaluate", f"{root}/r")
    assert code == 0, output
    assert json.loads(output.splitlines()[-1])["checkpoint"].startswith(f"{root}/r/checkpoints/checkpoint-")
    write_images(tmp_path / "images", {"new": 3}, (8, 8))
    code, output = command(tmp_path, "-m", "app.predict", f"{root}/r", str(tmp_path / "images"))
    assert code == 0, output
    assert run(tmp_path, root, epochs=3)[0] == 0  # finished: nothing is trained again


@pytest.mark.ci
@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_one_request_in_ten_fails(
    root: str, proxy: FaultyProxy, on_a_disk: Any, tmp_path: Path, figures: Figures
) -> None:
    proxy.one_in(10)
    code, output = run(tmp_path, root, epochs=3)
    assert code == 0, output
    assert result(tmp_path, root) == on_a_disk
    failed = proxy.counts.total() - proxy.counts[None]
    assert failed > 10
    figures("27. One request in ten to the object store fails", f"the same losses and weights ({failed} failed)")


@pytest.mark.ci
@pytest.mark.parametrize("root", ["rclone"], indirect=True)
def test_an_outage(root: str, proxy: FaultyProxy, on_a_disk: Any, tmp_path: Path, figures: Figures) -> None:
    proxy.fault = lambda method, path: (
        "busy" if any("checkpoint-000000008" in line for line in proxy.requests) else None
    )
    code, output = run(tmp_path, root, epochs=3, max_failures=0, start=("-c", QUICK))
    assert code == 1, output
    assert "failed for 3 s" in output
    assert "Traceback" not in output
    proxy.fault = lambda method, path: None
    code, output = run(tmp_path, root, epochs=3)
    assert code == 0, output
    assert "after step 6" in output
    assert result(tmp_path, root) == on_a_disk
    figures("28. Object store away for longer than it is asked", "exit 1 with the reason; the same command resumes")


@pytest.mark.slow
@pytest.mark.parametrize("root", ["rclone", "moto"], indirect=True)
@pytest.mark.parametrize("words", [(), ("--scheduler", "pbt", "--perturb-epochs", "1")])
def test_a_sweep(root: str, words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text("lr: {loguniform: [1e-3, 1e-1]}\n")
    flags = {name: value for name, value in FLAGS.items() if name not in ("run_name", "checkpoint_every")}
    flags |= {"output_dir": root, "epochs": 3, "sweep_name": "s", "space": "space.yaml", "num_trials": 2}
    given = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    code, output = command(tmp_path, "-m", "tune.sweep", *given, "--cpus-per-worker", "0.5", *words)
    assert code == 0, output
    assert {"trial-0000", "trial-0001"} <= set(Storage(f"{root}/s").names(""))
    assert Storage(f"{root}/s/trial-0001/checkpoints").names("")

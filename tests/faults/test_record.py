"""A machine that is lost with its disk, where the run's files are in an object store: another one resumes the run."""

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from app.config_file import to_yaml
from app.runs import step_of
from app.storage import Storage
from tests.faults.common import COMMANDS, free_port, slow_config, wait_until
from tests.faults.conftest import Figures
from tests.faults.test_tracking import mlflow_server

pytestmark = [pytest.mark.faults]

# 120 steps that improve nothing: checkpoints are far enough apart that MLflow has steps that none of them has.
LONG = {"epochs": 20, "lr": 1e-30, "checkpoint_every": 20, "num_workers": 1}
STEPS, EPOCH = 120, 6


class Machine:
    """The command in a folder of its own, which is all that it has beside the store."""

    def __init__(self, tmp_path: Path, root: str, name: str, tracking_uri: str):
        self.folder, self._out = tmp_path / name, tmp_path / f"{name}.txt"
        self.folder.mkdir()
        config = slow_config(tmp_path, **LONG, tracking_uri=tracking_uri, output_dir=root)
        (self.folder / "settings.yaml").write_text(to_yaml(config))
        argv = [sys.executable, "-m", "app.train", "--config", "settings.yaml"]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        with self._out.open("w") as out:
            options: dict[str, Any] = {"stdout": out, "stderr": out, "cwd": self.folder, "env": environment}
            self.process = subprocess.Popen(argv, start_new_session=True, **options)
        COMMANDS.append(self.process)

    def output(self) -> str:
        return self._out.read_text()

    def recorded(self) -> int:
        """The last step in its spool."""
        lines = "".join(path.read_text() for path in self.folder.glob("runs/r/tracking*/records.jsonl")).splitlines()
        return max((json.loads(line).get("step", 0) for line in lines[:-1] if "train/loss" in line), default=0)

    def wait_until(self, condition: Any) -> None:
        def holds() -> bool:
            assert self.process.poll() is None, self.output()
            return condition()

        wait_until(holds)

    def lose(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.folder)


def metrics(database: Path) -> list[tuple[str, int]]:
    """Every (key, step) that MLflow has."""
    if not database.exists():
        return []
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return connection.execute("SELECT key, step FROM metrics").fetchall()


def saved(root: str) -> int:
    """The step of the newest checkpoint that is whole and has a record."""
    storage = Storage(f"{root}/r/checkpoints")
    found = [name for name in storage.names("") if {"record.jsonl", "manifest.json"} <= set(storage.names(name))]
    return max(map(step_of, found), default=0)


def assert_each_step_once(database: Path) -> None:
    found = metrics(database)
    assert [pair for pair, count in Counter(found).items() if count > 1] == []
    for key, every in (("train/loss", 1), ("lr", 1), ("perf/step_s", 1), ("val/loss", EPOCH)):
        assert sorted(step for name, step in found if name == key) == list(range(every, STEPS + 1, every))
    with contextlib.closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT count(*), min(status) FROM runs").fetchall() == [(1, "FINISHED")]


@pytest.mark.ci
def test_a_run_resumed_on_another_machine_has_each_step_once_in_mlflow(
    tmp_path: Path, object_root: str, figures: Figures
) -> None:
    database = tmp_path / "mlflow.db"
    first = Machine(tmp_path, object_root, "first", f"sqlite:///{database}")
    delivered = lambda: max((step for key, step in metrics(database) if key == "train/loss"), default=0)  # noqa: E731
    first.wait_until(lambda: saved(object_root) and delivered() > saved(object_root) + 4)
    first.lose()
    step = saved(object_root)
    assert delivered() > step
    second = Machine(tmp_path, object_root, "second", f"sqlite:///{database}")
    assert second.process.wait(timeout=280) == 0, second.output()
    assert f"after step {step}\n" in second.output()
    assert_each_step_once(database)
    figures("12.1 The driver's machine lost, files in an object store", "another resumes; each step once in MLflow")


def test_records_that_mlflow_never_got_are_delivered_by_another_machine(
    tmp_path: Path, object_root: str, figures: Figures
) -> None:
    port = free_port()
    first = Machine(tmp_path, object_root, "first", f"http://127.0.0.1:{port}")
    first.wait_until(lambda: saved(object_root) and first.recorded() > saved(object_root) + 4)
    first.lose()
    with mlflow_server(port, tmp_path):
        second = Machine(tmp_path, object_root, "second", f"http://127.0.0.1:{port}")
        assert second.process.wait(timeout=280) == 0, second.output()
    assert_each_step_once(tmp_path / "server.db")
    figures("12.2 The same, and MLflow down until then", "its records are in the checkpoint; each step once in MLflow")

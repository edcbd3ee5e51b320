"""Sweeps that are killed or interrupted, and gone on with; and trials that need more room than there is at once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.runs import checkpoint_names, step_of
from app.storage import Storage
from tests.faults.common import COMMANDS, SLOW, wait_until
from tests.faults.conftest import Figures
from tune.ledger import Trial, read_trials
from tune.sweep import main

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore")]  # ray's own

ROOT = Path(__file__).parents[2]
# 57 samples in batches of 10, six steps an epoch of a tenth of a second: 4 s a trial.
SETTINGS: dict[str, Any] = SLOW | {"epochs": 6, "cpus_per_worker": 0.5, "schedule": "constant"}
del SETTINGS["num_workers"], SETTINGS["checkpoint_every"]

TRAINABLE = "ResourceTrainable"  # what Ray Tune calls a trial's class


class Sweep:
    """python -m tune.sweep in a process of its own."""

    def __init__(self, folder: Path, *words: str, **settings: Any):
        self.folder = folder / "runs" / "s"
        flags = [
            word
            for name, value in (SETTINGS | settings).items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        command = [
            sys.executable,
            "-m",
            "tune.sweep",
            "--space",
            str(folder / "space.yaml"),
            "--sweep-name",
            "s",
            *words,
        ]
        command += ["--output-dir", str(folder / "runs"), *flags]
        self.output = folder / "output.txt"
        with self.output.open("a") as file:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, start_new_session=True)
        COMMANDS.append(self.process)

    def trials(self) -> dict[int, Trial]:
        return read_trials(self.folder / "tracking" / "trials")

    def wait_for(self, ended: int, step: int) -> None:
        """Until so many trials have ended, and another one has come to this step."""

        def arrived() -> bool:
            assert self.process.poll() is None, self.output.read_text()
            trials = self.trials().values()
            running = [trial.steps for trial in trials if trial.status == "running"]
            return len(trials) - len(running) >= ended and max(running, default=0) >= step

        wait_until(arrived)

    def processes(self, kind: str) -> list[psutil.Process]:
        """Of Ray's actors of this class."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if child.cmdline()[0].startswith(f"ray::{kind}")]

    def kill(self) -> None:
        """With what it had started, which ends by itself."""
        started = self.processes(TRAINABLE) + self.processes("SweepTracker")
        self.process.kill()
        self.process.wait()
        wait_until(lambda: not any(process.is_running() for process in started))

    def result(self, code: int = 0) -> dict[str, Any]:
        assert self.process.wait(timeout=280) == code, self.output.read_text()
        return json.loads(self.output.read_text().splitlines()[-1])


def write_space(folder: Path, count: int) -> None:
    folder.mkdir(exist_ok=True)
    rates = ", ".join(f"{0.002 * (number + 1):.3f}" for number in range(count))
    (folder / "space.yaml").write_text(f"lr: {{grid: [{rates}]}}\n")


def validations(trials: dict[int, Trial]) -> dict[int, list[dict[str, Any]]]:
    return {number: [dict(each) for each in trial.validations] for number, trial in sorted(trials.items())}


@pytest.mark.ci
def test_a_sweep_that_is_killed_goes_on(tmp_path: Path, figures: Figures, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("undisturbed", "killed"):
        write_space(tmp_path / name, 3)
    words = ("--search", "grid", "--max-concurrent", "1")
    undisturbed = Sweep(tmp_path / "undisturbed", *words)
    expected = undisturbed.result()
    assert expected["counts"]["finished"] == 3

    sweep = Sweep(tmp_path / "killed", *words)
    sweep.wait_for(ended=1, step=12)
    before = sweep.trials()
    assert main(["--show", "s", "--output-dir", str(sweep.folder.parent)]) == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (shown["status"], shown["counts"]["running"], shown["best_trial"]) == ("running", 1, 0)
    sweep.kill()
    assert main(["--show", "s", "--output-dir", str(sweep.folder.parent)]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["status"] == "killed"
    steps = {number: trial.steps for number, trial in before.items()}
    first_files = sorted((sweep.folder / "trial-0000" / "checkpoints").rglob("*"))
    written = {path: path.stat().st_mtime_ns for path in first_files}

    again = Sweep(tmp_path / "killed", *words)
    found = again.result()
    assert found["counts"] == expected["counts"]
    assert (found["best_trial"], found["best_value"]) == (expected["best_trial"], expected["best_value"])
    # The same numbers, to the last bit, each once.
    assert validations(again.trials()) == validations(undisturbed.trials())
    # The finished one was not run again, the other one went on from its checkpoint.
    assert {path: path.stat().st_mtime_ns for path in first_files} == written
    assert steps[0] == 36
    assert again.trials()[0].train_seconds == before[0].train_seconds
    summary = json.loads((sweep.folder / "trial-0001" / "run.json").read_text())["summary"]
    trained_again = round(summary["samples_per_s"] * again.trials()[1].train_seconds)
    assert summary["samples_seen"] == 6 * 57
    assert trained_again <= 6 * 57 - 2 * 57
    figures("21. A sweep killed", "finished trials stay, the running one goes on, the same numbers")


def test_a_population_that_is_killed_goes_on(tmp_path: Path, figures: Figures) -> None:
    (tmp_path / "space.yaml").write_text("lr: {loguniform: [1e-6, 3e-2]}\n")
    # Room for one, so that they take turns.
    words, settings = ("--scheduler", "pbt", "--num-trials", "3"), {"cpus_per_worker": os.cpu_count()}
    sweep = Sweep(tmp_path, *words, **settings)

    def exploited() -> list[Trial]:
        assert sweep.process.poll() is None, sweep.output.read_text()
        return [trial for trial in sweep.trials().values() if trial.exploits]

    wait_until(lambda: bool(exploited()))
    before = exploited()[0]
    sweep.kill()
    again = Sweep(tmp_path, *words, **settings)
    assert again.result()["counts"]["finished"] == 3
    trials = again.trials()
    for trial in trials.values():
        assert [validation["step"] for validation in trial.validations] == [6, 12, 18, 24, 30, 36]
    assert trials[before.number].exploits[: len(before.exploits)] == before.exploits
    figures("21.3 A population killed", "its trials go on from their own checkpoints, with the settings they had")


def test_a_trial_whose_checkpoints_are_gone_is_not_started_from_zero(tmp_path: Path, figures: Figures) -> None:
    write_space(tmp_path, 2)
    words = ("--search", "grid", "--max-concurrent", "1")
    sweep = Sweep(tmp_path, *words)
    sweep.wait_for(ended=1, step=12)
    sweep.kill()
    folder = sweep.folder / "trial-0001" / "checkpoints"
    for name in checkpoint_names(Storage(str(folder))):
        (folder / name / "model.safetensors").write_bytes(b"damaged")
    again = Sweep(tmp_path, *words)
    found = again.result()
    assert found["counts"] == {"finished": 1, "stopped": 0, "failed": 1, "killed": 0, "running": 0}
    assert "no good checkpoint any more to go on from" in str(again.trials()[1].error)
    figures(
        "21.1 A trial's checkpoints damaged while its sweep is away", "that trial fails and says why, the others stay"
    )


def test_a_trial_whose_process_dies_goes_on(tmp_path: Path, figures: Figures) -> None:
    write_space(tmp_path, 2)
    sweep = Sweep(tmp_path, "--search", "grid", "--max-concurrent", "1")
    sweep.wait_for(ended=0, step=12)
    [trial] = sweep.processes(TRAINABLE)
    trial.kill()
    found = sweep.result()
    assert found["counts"]["finished"] == 2
    steps = [validation["step"] for validation in sweep.trials()[0].validations]
    assert steps == [6, 12, 18, 24, 30, 36]
    figures("21.2 SIGKILL of a trial's process", "it goes on from its checkpoint")


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_ends_a_sweep_with_what_is_known(tmp_path: Path, workers: int, figures: Figures) -> None:
    write_space(tmp_path, 3)
    words = ("--search", "grid", "--workers-per-trial", str(workers), "--max-concurrent", "1")
    sweep = Sweep(tmp_path, *words, epochs=20, batch_size=3)
    sweep.wait_for(ended=0, step=19)
    began = time.monotonic()
    sweep.process.send_signal(signal.SIGINT)
    found = sweep.result(130)
    assert found["status"] == "killed"
    assert found["counts"]["killed"] == 1
    assert found["best_trial"] == 0
    trial = sweep.trials()[0]
    names = checkpoint_names(Storage(str(sweep.folder / "trial-0000" / "checkpoints")))
    assert trial.steps < step_of(names[-1]) < trial.steps + 19  # what was trained since the last epoch is saved
    figures(
        f"22. SIGINT to a sweep, {workers} workers a trial",
        "saves, ranks what is known, exit 130",
        None,
        None,
        time.monotonic() - began,
    )


def test_more_trials_and_workers_than_there_is_room_for(tmp_path: Path, figures: Figures) -> None:
    """Four trials of two workers, and CPUs for two of them: none waits for what another one holds."""
    write_space(tmp_path, 4)
    sweep = Sweep(
        tmp_path, "--search", "grid", "--workers-per-trial", "2", epochs=1, cpus_per_worker=(os.cpu_count() or 1) / 4
    )
    assert sweep.result()["counts"]["finished"] == 4
    figures("23. Four trials of two workers, and room for two", "two at a time")

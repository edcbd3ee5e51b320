"""What Ray Tune tells of the trials, written down: in the ledger, in MLflow, and for the terminal."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from ray import cloudpickle
from ray.exceptions import RayTaskError
from ray.tune import Callback

from app.failures import why_a_worker
from app.fit import MLFLOW_STATUS
from app.interrupt import Interrupt
from app.progress import Display
from app.runs import Run, Summary, write_run
from tune.ledger import ENDED, Ledger, Status, Trial, best_checkpoint, ranked
from tune.report import described, shown
from tune.search import Source
from tune.space import Value
from tune.tracker import PARENT, TrackerOf
from tune.trial import Task


class Recorder(Callback):
    """Writes down what Ray Tune tells of the trials."""

    def __init__(self, ledger: Ledger, source: Source, task: Task, metric: str, display: Display, interrupt: Interrupt):
        self._ledger, self._source, self._task, self._metric = ledger, source, task, metric
        self._display, self._interrupt = display, interrupt
        self._began: dict[int, float] = {}
        self._lock = threading.Lock()
        self._closed = False

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        number, settings = _named(trial.config)
        with self._lock:
            known = self._ledger.trials.get(number)
            self._began.setdefault(number, time.monotonic())
            if not self._closed and (known is None or known.status == "killed"):
                self._ledger.begin(number, settings)

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict[str, Any], **info: Any) -> None:
        number, settings = _named(trial.config)
        with self._lock:
            if self._closed:
                return
            if result.get("exploited"):
                self._ledger.exploit(number, settings, **result["exploited"])
            if result.get("validation"):
                self._ledger.validation(number, result["validation"])
            if result.get("outcome") and self._ledger.trials[number].status == "running":
                self._end(number, **result["outcome"])

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Also where the scheduler gave it up."""
        self._given_up(_named(trial.config)[0], "killed" if self._interrupt.count else "stopped")

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Its process died more often than is put up with."""
        self._given_up(_named(trial.config)[0], "failed", _why(trial))

    def __reduce__(self) -> Any:  # as of StopAll
        return Callback, ()

    def stop_training(self) -> None:
        """Ray Tune stops a trial at its next validation, which may be an hour away; this at its next step."""
        for trial in self.running():
            TrackerOf(self._task.tracker, trial.name).request_stop.remote("killed")

    def running(self) -> list[Trial]:
        return [trial for trial in list(self._ledger.trials.values()) if trial.status == "running"]

    def close(self) -> None:
        """Those that still run were interrupted."""
        for trial in self.running():
            self._given_up(trial.number, "killed")
        with self._lock:
            self._closed = True

    def line(self, count: int) -> str:
        """How the sweep stands."""
        running = len(self.running())
        text = f"{len(self._ledger.trials) - running} of {count} trials ended, {running} running"
        best = self._best()
        return (
            text
            if best is None
            else f"{text}; best {self._metric} {best.value(self._metric):.4f} of trial {best.number}"
        )

    def _best(self) -> Trial | None:
        order = ranked(dict(self._ledger.trials), self._metric)
        return order[0] if order and order[0].best is not None else None

    def _given_up(self, number: int, status: Status, error: str | None = None) -> None:
        with self._lock:
            trial = self._ledger.trials.get(number)
            if self._closed or trial is None or trial.status != "running":
                return
            seconds = time.monotonic() - self._began.get(number, time.monotonic())
            self._end(number, status, error, seconds, 0.0)
            # What the trial itself cannot write down.
            config = self._task.config(number, trial.settings)
            TrackerOf(self._task.tracker, trial.name).finish.remote(MLFLOW_STATUS[status], None)
            best = trial.best
            summary = Summary(
                run_name=trial.name,
                run_id=None,
                status=status,
                checkpoint=best_checkpoint(self._task.root, trial),
                epoch=0 if best is None else int(np.ceil(trial.validations[-1]["epochs"])),
                step=trial.steps,
                samples_seen=0,
                samples_per_s=None,
                seconds=seconds,
                metrics={} if best is None else best["metrics"],
                error=error,
            )
            write_run(Run(config, summary.status, summary))

    def _end(self, number: int, status: Status, error: str | None, seconds: float, train_seconds: float) -> None:
        self._ledger.end(number, status, error, seconds, train_seconds)
        trial = self._ledger.trials[number]
        TrackerOf(self._task.tracker, trial.name).tags.remote({"trial_status": status})
        self._source.tell(trial)
        value = trial.value(self._metric)
        text = f"trial {number} {status}: " + (f"{self._metric} {shown(value)}, " if value is not None else "")
        text += described(trial.settings) + (f": {error}" if error else "")
        self._display.event(text)
        best, ended = self._best(), sum(each.status in ENDED for each in self._ledger.trials.values())
        if best is not None and status in ENDED:
            values = {f"best/{self._metric}": best.value(self._metric)}
            TrackerOf(self._task.tracker, PARENT).metrics.remote(ended, values)


def _why(trial: Any) -> str:
    """Why a trial's process ended, from what Ray Tune has written down of it."""
    pickled = Path(trial.pickled_error_file) if trial.pickled_error_file else None
    if pickled is not None and pickled.exists():
        error = cloudpickle.loads(pickled.read_bytes())  # this process has written it
        return why_a_worker(error.cause if isinstance(error, RayTaskError) else error)[0]
    text = Path(trial.error_file).read_text() if trial.error_file and Path(trial.error_file).exists() else ""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "its process died")


def _named(config: dict[str, Any]) -> tuple[int, dict[str, Value]]:
    return config["number"], {name: value for name, value in config.items() if name != "number"}

"""One Tracker for a sweep: the parent's record and each trial's, written to MLflow by one process."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.spool import SPOOL, sent_offset
from app.tracking import DeliveryState, Tracker

PARENT = ""


class SweepTracker:
    """An actor that is the Tracker of many runs: the sweep's, called PARENT, and its trials'."""

    def __init__(
        self,
        directory: str,
        root: str,
        tracking_uri: str | None,
        experiment: str,
        sweep_name: str,
        environment: dict[str, str] | None = None,
    ):
        self._root, self._uri, self._experiment = root, tracking_uri, experiment
        self._directory = Path(directory)
        self._parent = Tracker(directory, root, tracking_uri, experiment, sweep_name, environment)
        self._trials: dict[str, Tracker] = {}
        self._finished: set[str] = set()
        for spool in self._directory.parent.glob(f"*/{self._directory.name}/{SPOOL}"):
            if tracking_uri is not None and sent_offset(spool.parent) < spool.stat().st_size:
                self._of(spool.parent.parent.name)  # an earlier start could not deliver all of it

    def call(self, run: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """A method of the run's Tracker. Pictures are not drawn for each trial: they would cost more than it."""
        if run != PARENT and method == "pictures":
            return None
        if method in ("begin", "finish"):
            (self._finished.add if method == "finish" else self._finished.discard)(run)
        return getattr(self._parent if run == PARENT else self._of(run), method)(*args, **kwargs)

    def delivery_state(self) -> DeliveryState:
        """Of all of them; run_id is the parent's."""
        states = [self._parent.delivery_state(), *(tracker.delivery_state() for tracker in self._trials.values())]
        errors = [state.error for state in states if state.error]
        return DeliveryState(states[0].run_id, all(state.all_sent for state in states), errors[0] if errors else "")

    def store_rest(self) -> str | None:
        """Of all of them; what is wrong with the first that cannot be stored."""
        problems = [tracker.store_rest() for tracker in (self._parent, *self._trials.values())]
        return next(filter(None, problems), None)

    def _of(self, run: str) -> Tracker:
        if run not in self._trials:
            self._close_finished()  # each has a thread and an open file
            directory = self._directory.parent / run / self._directory.name
            self._trials[run] = Tracker(
                str(directory), f"{self._root}/{run}", self._uri, self._experiment, run, parent=self._parent.target
            )
        return self._trials[run]

    def _close_finished(self) -> None:
        for run in self._finished & self._trials.keys():
            if self._trials[run].delivery_state().all_sent:
                self._trials.pop(run).close()


@dataclass(frozen=True)
class TrackerOf:
    """The actor as the Tracker of one run: its methods are called as an actor's are."""

    actor: Any
    run: str

    def __getattr__(self, method: str) -> "_Method":
        if method.startswith("_"):
            raise AttributeError(method)
        return _Method(self.actor, self.run, method)


@dataclass(frozen=True)
class _Method:
    actor: Any
    run: str
    name: str

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        return self.actor.call.remote(self.run, self.name, *args, **kwargs)

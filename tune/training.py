"""A training that goes on when it is asked to: from one validation to the next, in a thread of this process."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from app.attempts import train
from app.cluster import Cluster
from app.config import Config
from app.errors import Unavailable
from app.here import train_here
from app.interrupt import Interrupt
from app.outcome import Outcome
from app.progress import Display
from app.tracking import Validation
from tune.tracker import TrackerOf


class Stopped(Exception):
    """Raised in a training that is not to go on."""


class Training:
    """next() lets it go on to its next validation, or to its end; stop() ends it.

    With one worker the loop runs here, and waits at each validation until it is asked to go on. With several
    it runs in workers of Ray Train, which go on by themselves.
    """

    def __init__(self, config: Config, cluster: Cluster, tracker: TrackerOf):
        self._config, self._cluster, self._tracker = config, cluster, tracker
        self._events: queue.SimpleQueue[Validation | Outcome | BaseException] = queue.SimpleQueue()
        self._going_on, self._interrupt = threading.Semaphore(0), Interrupt()
        self._thread = threading.Thread(target=self._run, name="training", daemon=True)
        self._thread.start()

    def next(self) -> Validation | Outcome:
        """Raises what the training raised."""
        self._going_on.release()
        event = self._events.get()
        if isinstance(event, BaseException):
            raise event
        return event

    def stop(self) -> None:
        """With one worker where it waits, with several after a checkpoint."""
        self._interrupt.count += 1
        self._going_on.release()
        self._thread.join()

    def _run(self) -> None:
        try:
            if self._config.max_workers == 1:
                self._wait()
                self._events.put(self._here())
            else:
                handing = HandingOn(self._events.put)
                self._events.put(train(self._config, self._cluster, self._tracker, handing, self._interrupt))
        except Stopped:
            pass
        except BaseException as error:  # raised again by next()
            self._events.put(error)

    def _here(self) -> Outcome:
        try:
            tracker = HereTracker(self._tracker, self._pause)
            return train_here({"config": self._config.model_dump(), "tracker": tracker})
        except (Stopped, Unavailable):  # after the latter Ray Tune starts the trial again
            raise
        except Exception as error:
            known = ray.get(self._tracker.failure.remote())
            return Outcome("failed", error=known[0] if known else f"{type(error).__name__}: {error}", exit_code=1)

    def _pause(self, validation: Validation) -> None:
        self._events.put(validation)
        self._wait()

    def _wait(self) -> None:
        self._going_on.acquire()
        if self._interrupt.count:
            raise Stopped


class HandingOn(Display):
    """In place of a terminal: validations are handed on, nothing is shown."""

    def __init__(self, hand_on: Callable[[Validation], None]):
        super().__init__()
        self._hand_on = hand_on

    def validated(self, validation: Validation) -> None:
        self._hand_on(validation)

    def event(self, text: str) -> None: ...

    def epoch_ended(self, live: Any) -> None: ...

    def show(self, live: Any) -> None: ...


class HereTracker:
    """A run's Tracker for the training in this process, whose validations stay here."""

    def __init__(self, tracker: TrackerOf, validated: Callable[[Validation], None]):
        self._tracker, self.validated = tracker, Here(validated)

    def __getattr__(self, method: str) -> Any:
        return getattr(self._tracker, method)


@dataclass(frozen=True)
class Here:
    """A function in the place of an actor's method."""

    remote: Callable[[Validation], None]

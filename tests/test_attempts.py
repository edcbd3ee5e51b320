"""What is told of workers that died, and when they are started anew."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.train import FailureConfig
from ray.train.v2._internal.exceptions import (
    UserExceptionWithTraceback,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from app import attempts
from app.attempts import ClusterWatch, is_here
from app.cluster import Cluster
from app.config import Config
from app.failures import LESS_MEMORY, TellFailures, why, why_lost
from app.interrupt import Interrupt
from app.outcome import Outcome
from app.progress import Display
from app.tracking import Live, Progress

DIED = WorkerHealthCheckFailedError("a long text", RayActorError())
CUT_OFF = RuntimeError("[/__w/pytorch/third_party/gloo/pair.cc:545] Connection reset by peer")


@pytest.mark.parametrize(
    ("failures", "told"),
    [
        ({1: DIED}, "rank 1 died: its process was killed or crashed"),
        ({0: CUT_OFF, 1: DIED}, "rank 1 died: its process was killed or crashed"),  # the cause, not what follows
        ({0: CUT_OFF}, "rank 0 lost the connection to another worker"),
        ({2: ValueError("one\ntwo")}, "rank 2 failed: two"),
        ({0: MemoryError()}, f"rank 0 ran out of memory (MemoryError); {LESS_MEMORY}"),
        (
            {
                0: CUT_OFF,
                1: UserExceptionWithTraceback(torch.OutOfMemoryError("CUDA"), "at line 1\nCUDA out of memory"),
            },
            f"rank 1 ran out of memory (CUDA out of memory); {LESS_MEMORY}",
        ),
        (
            {0: WorkerHealthCheckFailedError("", OutOfMemoryError("killed"))},
            f"rank 0 was killed because its node ran out of memory; {LESS_MEMORY}",
        ),
    ],
)
def test_the_cause_of_a_failed_attempt(failures: dict[int, Exception], told: str) -> None:
    assert why(WorkerGroupError("", failures)) == told


@pytest.mark.parametrize(
    ("failure", "for_memory"), [(OutOfMemoryError("killed"), True), (RayActorError(), False), (MemoryError(), False)]
)
def test_the_tracker_is_told_of_a_worker_that_was_killed_for_memory(failure: Exception, for_memory: bool) -> None:
    """What a worker raises it tells itself."""
    told: list[Any] = []
    tracker = SimpleNamespace(workers_lost=SimpleNamespace(remote=lambda *args: told.append(args)))
    TellFailures(tracker).after_exception(None, {0: CUT_OFF, 1: WorkerHealthCheckFailedError("", failure)})
    assert [args[1:] for args in told] == [(True, for_memory)]


def test_workers_that_could_not_be_started() -> None:
    assert why(ControllerError(OutOfMemoryError("killed"))).startswith(
        "the workers could not be started: one was killed because its node ran out of memory"
    )


def test_a_driver_that_cannot_go_on_says_what_it_lost() -> None:
    assert why_lost(OutOfMemoryError("Task was killed due to the node running low on memory.\nmore")) == (
        f"the run's Tracker was killed because its node ran out of memory; {LESS_MEMORY}"
    )
    lost = why_lost(RayActorError(error_msg="The actor died\nand more"))
    assert lost == "the Ray cluster was lost (RayActorError: The actor died)"


class Tracker:
    """As much of one as train() and the screen need; a call returns what ray.get() hands through."""

    def __init__(self) -> None:
        self.state = Progress(None, [], 0, frozenset())
        self.known: tuple[str, int] | None = None
        self.attempts: list[int] = []

    def __getattr__(self, name: str) -> SimpleNamespace:
        calls = {
            "progress": lambda *_: self.state,
            "failure": lambda: self.known,
            "start_attempt": lambda num_workers, _: self.attempts.append(num_workers),
        }
        return SimpleNamespace(remote=calls[name])


def outcome_of(script: list[Any], monkeypatch: pytest.MonkeyPatch, tracker: Tracker, **settings: Any) -> Outcome:
    """train() whose attempts do one after the other what the script says: return an Outcome, or raise."""
    steps = iter(script)
    budgets.clear()

    def attempt(*args: Any) -> Outcome:
        budgets.append(args[3].max_failures)
        what = next(steps)
        if isinstance(what, WorkerGroupError):  # as the Tracker is told of it
            tracker.state = replace(tracker.state, failures=tracker.state.failures + 1)
        if isinstance(what, Exception):
            raise what
        return what

    monkeypatch.setattr(attempts.ray, "get", lambda value: value)
    monkeypatch.setattr(attempts, "attempt", attempt)
    monkeypatch.setattr(attempts, "wait_for_places", lambda config, *_: config.max_workers)
    cluster = Cluster(use_gpu=False, num_nodes=1, notes=())
    return attempts.train(Config(**settings), cluster, tracker, Display(), Interrupt())


budgets: list[int] = []
FINISHED, PAUSED = Outcome("finished"), Outcome("paused")
LOST, UNSTARTED = WorkerGroupError("", {1: DIED}), ControllerError(RuntimeError("no such module"))
NO_ROOM = ControllerError(WorkerGroupStartupTimeoutError(2))


@pytest.mark.parametrize(
    ("workers", "script", "status", "given"),
    [
        (2, [FINISHED], "finished", [1]),
        (2, [PAUSED, PAUSED, FINISHED], "finished", [1, 1, 1]),  # a node that goes is no failure
        (2, [NO_ROOM, NO_ROOM, FINISHED], "finished", [1, 1, 1]),  # nor is a cluster that is full
        (2, [UNSTARTED, FINISHED], "finished", [1, 0]),
        (2, [UNSTARTED, UNSTARTED, FINISHED], "failed", [1, 0]),
        ("1:2", [LOST, FINISHED], "finished", [0, 0]),  # counted here, and not by Ray
        ("1:2", [LOST, PAUSED, LOST, FINISHED], "failed", [0, 0, 0]),
    ],
)
def test_how_often_it_is_tried_again(
    workers: int | str, script: list[Any], status: str, given: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = Tracker()
    outcome = outcome_of(script, monkeypatch, tracker, num_workers=workers, max_failures=1)
    assert outcome.status == status
    assert budgets == given
    assert len(tracker.attempts) == len(given)


def test_what_is_known_to_fail_again_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker()
    tracker.known = ("no data on rank 1", 2)
    outcome = outcome_of([LOST], monkeypatch, tracker, num_workers="1:2")
    assert (outcome.status, outcome.error, outcome.exit_code) == ("failed", "no data on rank 1", 2)


class Room:
    """Stands for Places: has what it is told to have."""

    has, made, released = 0, 0, 0

    def __init__(self, count: int, resources: dict[str, float]):
        Room.made += 1

    def ready(self) -> int:
        return Room.has

    def settled(self) -> bool:
        return True

    def release(self) -> None:
        Room.released += 1


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> ClusterWatch:
    Room.has = Room.made = Room.released = 0
    monkeypatch.setattr(attempts, "Places", Room)
    monkeypatch.setattr(attempts, "CLUSTER_EVERY_S", 0.0)
    monkeypatch.setattr(attempts, "draining_nodes", set)
    return ClusterWatch(Config(num_workers="1:3", resize_after_s=0), Cluster(False, 2, ()), 2)


def at(step: int, *nodes: str) -> Progress:
    live = Live(step=step, total_steps=10, epoch=1, epochs=1, metrics={})
    return Progress(live, [], 0, frozenset(nodes))


def test_more_room_is_a_reason_to_pause(watch: ClusterWatch) -> None:
    assert watch.reason_to_pause(at(1, "a")) is None
    Room.has = 1
    assert watch.reason_to_pause(at(2, "a")) == "there is room for 1 more worker"
    assert watch.reason_to_pause(at(10, "a")) is None  # all steps are made: only the test is left


def test_nothing_is_asked_for_while_ray_starts_workers_again(watch: ClusterWatch) -> None:
    Room.has = 1
    assert watch.reason_to_pause(Progress(None, [], 0, frozenset())) is None
    assert Room.made == 0
    watch.reason_to_pause(at(1, "a"))
    watch.reason_to_pause(Progress(None, [], 0, frozenset()))  # they need the places themselves
    assert (Room.made, Room.released) == (1, 1)


def test_a_node_of_ours_that_goes_is_a_reason_to_pause(watch: ClusterWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "draining_nodes", lambda: {"c"})
    assert watch.reason_to_pause(at(1, "a", "b")) is None
    monkeypatch.setattr(attempts, "draining_nodes", lambda: {"b", "c"})
    assert watch.reason_to_pause(at(2)) == "1 of 2 nodes with workers is to go"  # a new Tracker knows no nodes


def test_a_cluster_that_does_not_answer_is_no_reason(watch: ClusterWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable() -> set[str]:
        raise RuntimeError("GCS")

    monkeypatch.setattr(attempts, "draining_nodes", unreachable)
    assert watch.reason_to_pause(at(1, "a")) is None


@pytest.mark.parametrize(
    ("workers", "is_own", "use_gpu", "has_gpu", "wanted"),
    [
        (1, True, False, False, True),
        (1, True, True, True, False),  # a broken context of CUDA's ends with a process, which must not be this one
        (1, True, False, True, False),  # --device cpu: this process would take the GPU all the same
        (1, False, False, False, False),  # a cluster's nodes are others
        (2, True, False, False, False),
        ("1:2", True, False, False, False),
    ],
)
def test_one_worker_on_this_machine_is_this_process(
    workers: int | str, is_own: bool, use_gpu: bool, has_gpu: bool, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    cluster = Cluster(use_gpu=use_gpu, num_nodes=1, notes=(), is_own=is_own)
    assert is_here(Config(num_workers=workers), cluster) is wanted


def test_training_in_this_process_is_told_when_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal before the first step: there is nothing to save."""
    ended: list[bool] = []

    def attempt_here(task: dict[str, Any]) -> Outcome:
        ended.append(task["left"].wait(10))
        return Outcome("finished")

    monkeypatch.setattr("app.here.attempt_here", attempt_here)
    monkeypatch.setattr(attempts, "is_here", lambda *_: True)
    screen: Any = SimpleNamespace(update=lambda: Progress(None, [], 0, frozenset()), phases=lambda _: None)
    tracker = SimpleNamespace(request_stop=SimpleNamespace(remote=lambda _: None))
    interrupt = Interrupt()
    interrupt.count = 1
    cluster = Cluster(use_gpu=False, num_nodes=1, notes=(), is_own=True)
    outcome = attempts.attempt(Config(), cluster, 1, FailureConfig(), tracker, screen, interrupt)
    assert (outcome.status, ended) == ("killed", [True])

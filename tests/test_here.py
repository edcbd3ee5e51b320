"""Training in the command's own process, and what is left of it there."""

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ray.train.v2.api.exceptions import WorkerGroupError

from app import here
from app.distributed import World
from app.generators import seed_generators
from app.here import attempt_here
from app.outcome import Outcome
from app.reporter import Left, Reporter
from tests.common import generator_states

FINISHED = Outcome("finished")
TASK = {"config": {"run_name": "r", "output_dir": "runs"}}


class Tracker:
    """Knows what it was called with."""

    def __init__(self) -> None:
        self.called: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *arguments: self.called.append((name, *arguments)))


def trainer_of(loop: Any) -> Any:
    """In the place of TorchTrainer, whose workers run the loop."""

    def trainer(_: Any, train_loop_config: dict[str, Any], scaling_config: Any, run_config: Any) -> SimpleNamespace:
        assert (scaling_config.num_workers, run_config.name) == (0, "r")
        return SimpleNamespace(fit=lambda: SimpleNamespace(return_value=loop(train_loop_config)))

    return trainer


def test_the_network_is_in_a_process_group_and_the_caller_afterwards_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loop(_: dict[str, Any]) -> Outcome:
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        seed_generators(1)
        torch.set_num_threads(before + 1)
        torch.use_deterministic_algorithms(True)
        return FINISHED

    before, states = torch.get_num_threads(), generator_states()
    monkeypatch.setattr(here, "TorchTrainer", trainer_of(loop))
    assert attempt_here(TASK) == FINISHED
    assert not dist.is_initialized()
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (before, False)
    assert generator_states() == states


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_a_failure_is_told_and_leaves_nothing_of_the_training(
    is_waited_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    networks = []

    def loop(_: dict[str, Any]) -> Outcome:
        network = torch.nn.Linear(2, 2)
        networks.append(weakref.ref(network))
        try:
            raise KeyError("before")
        except KeyError:
            raise ValueError("one\ntwo") from None

    tracker, left = Tracker(), threading.Event()
    if not is_waited_for:
        left.set()
    monkeypatch.setattr(here, "TorchTrainer", trainer_of(loop))
    gc.disable()  # nor does it take long
    try:
        with pytest.raises(WorkerGroupError) as failed:
            attempt_here(TASK | {"tracker": tracker, "left": left})
        assert networks[0]() is None
    finally:
        gc.enable()
    assert str(failed.value.worker_failures[0]) == "one\ntwo"
    assert tracker.called == ([("workers_lost", "rank 0 failed: two", True)] if is_waited_for else [])
    assert not dist.is_initialized()


def test_training_that_nobody_waits_for_ends_when_it_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.reporter.ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "n"))
    monkeypatch.setattr("app.reporter.ray.get", lambda _: None)
    left = threading.Event()
    with Reporter(Tracker(), "r", World(), 0, 0, 600, left, setup_timeout_s=600) as reporter:
        reporter.alive()
        reporter.flush()
        left.set()
        for call in (reporter.alive, reporter.flush):
            with pytest.raises(Left):
                call()


@pytest.mark.parametrize("left", [None, threading.Event()])
def test_a_hang_ends_the_process_unless_that_is_the_commands(
    left: threading.Event | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial of a sweep has a process of its own, which Ray Tune starts again: train_here() is given no event."""
    given: list[bool] = []
    monkeypatch.setattr("app.reporter.Watchdog", lambda *_, ends_process: given.append(ends_process))
    Reporter(Tracker(), "r", World(), 0, 0, 600, left, setup_timeout_s=600)
    assert given == [left is None]

"""Where the time of a step goes: a delay is found in the part that it was put into, and in no other."""

import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from app import checkpoint, loop, worker
from app.clock import PARTS, Span, StepClock, StepTimes
from app.config import Config
from app.data.samples import InMemory
from app.distributed import current_world
from app.reporter import Reporter
from app.runs import Run, write_run
from app.setup import compress_gradients
from tests.common import PlainNet, build_training, loader_for, on_ranks, tiny_splits

# Long beside what a busy machine adds to a step.
DELAY_S = 0.25
SPAN = Span(warmup=2, steps=6)
# 57 samples in batches of 4: 15 steps an epoch, so nothing is validated or saved in the span unless that is asked for.
BASE = {"dataset": "tests.common:tiny_splits", "model": "tests.common:PlainNet", "batch_size": 4, "lr": 0.01}


def delayed(function: Callable[..., Any]) -> Callable[..., Any]:
    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(DELAY_S)
        return function(*args, **kwargs)

    return slow


class NoTracker:
    """Takes every call, as an actor does."""

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *args, **kwargs: None)


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # torch's own has *args
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(DELAY_S)
        return gradient


def slow_training_data(ids: np.ndarray, plain: Callable[..., torch.Tensor], self: InMemory) -> torch.Tensor:
    time.sleep(DELAY_S * (len(self.labels) == 57))
    return plain(self, ids)


def slow_in_training(plain: Callable[..., torch.Tensor], where: str) -> Callable[..., torch.Tensor]:
    """PlainNet.forward with a delay, in the forward or in the backward pass."""

    def forward(self: PlainNet, images: torch.Tensor) -> torch.Tensor:
        if self.training and where == "forward":
            time.sleep(DELAY_S)
        logits = plain(self, images)
        return SlowBackward.apply(logits) if self.training and where == "backward" else logits  # type: ignore[return-value]

    return forward


# What is slow, each by the part it belongs to.
PATCHES: dict[str, Callable[[], Any]] = {
    "data": lambda: patch.object(
        InMemory, "inputs", lambda self, ids, plain=InMemory.inputs: slow_training_data(ids, plain, self)
    ),
    "forward": lambda: patch.object(PlainNet, "forward", slow_in_training(PlainNet.forward, "forward")),
    "backward": lambda: patch.object(PlainNet, "forward", slow_in_training(PlainNet.forward, "backward")),
    "update": lambda: patch.object(torch.optim.AdamW, "step", delayed(torch.optim.AdamW.step)),
    "clipping": lambda: patch.object(loop.nn.utils, "clip_grad_norm_", delayed(loop.nn.utils.clip_grad_norm_)),
    "evaluation": lambda: patch.object(worker, "evaluate", delayed(worker.evaluate)),
    "copying for a checkpoint": lambda: patch.object(checkpoint, "snapshot", delayed(checkpoint.snapshot)),
    "writing of a checkpoint": lambda: patch.object(checkpoint, "write_folder", delayed(checkpoint.write_folder)),
    "records": lambda: patch.object(Reporter, "metrics", delayed(Reporter.metrics)),
    "live line": lambda: patch.object(Reporter, "live", delayed(Reporter.live)),
    "all-reduce": lambda: patch.object(default_hooks, "_allreduce_fut", delayed(default_hooks._allreduce_fut)),
    "all-reduce in bf16": lambda: patch.object(default_hooks, "_compress_hook", delayed(default_hooks._compress_hook)),
    "sums of a step": lambda: patch.object(loop.PendingSum, "result", delayed(loop.PendingSum.result)),
}


@contextlib.contextmanager
def without_ray() -> Iterator[None]:
    """A worker in a process that Ray has not started."""

    def wrapped(network: nn.Module, parallel_strategy_kwargs: dict[str, Any]) -> nn.Module:
        several = current_world().size > 1
        return nn.parallel.DistributedDataParallel(network, **parallel_strategy_kwargs) if several else network

    with (
        patch("ray.train.torch.get_device", lambda: torch.device("cpu")),
        patch("ray.train.torch.prepare_model", wrapped),
        patch("ray.train.torch.prepare_data_loader", lambda loader, add_dist_sampler: loader),
        patch("app.reporter.ray.get", lambda value, **_: value),
    ):
        yield


def step_ms(settings: dict[str, Any], slow: str | None = None, on_rank: int | None = None) -> list[dict[str, float]]:
    """By rank, the milliseconds of a step by part: of the worker as it is, with what is slow on this or all ranks."""
    torch.set_num_threads(1)
    world = current_world()
    with tempfile.TemporaryDirectory() as folder, without_ray(), contextlib.ExitStack() as stack:
        # Rank 0 alone writes; what the others read of it does not matter to the clock.
        config = Config(**{**BASE, **settings}, run_name="r", output_dir=folder)
        write_run(Run(config, "running"))
        if slow is not None and on_rank in (None, world.rank):
            stack.enter_context(PATCHES[slow]())
        reporter = Reporter(NoTracker(), "r", world, 0, 0, hang_timeout_s=600, setup_timeout_s=600)
        try:
            outcome = worker.run(config, reporter, span=SPAN)
        finally:
            reporter.__exit__(None, None, None)
    assert (outcome.status, outcome.step) == ("killed", SPAN.warmup + SPAN.steps + 1)  # one more, to end with
    times = outcome.step_times
    assert times is not None
    assert (times.steps, times.samples) == (SPAN.steps, SPAN.steps * 4)
    return [{part: 1000 * seconds / times.steps for part, seconds in parts.items()} for parts in times.by_rank]


def grown(settings: dict[str, Any], slow: str, on_rank: int | None = None) -> list[dict[str, float]]:
    """How much longer each part takes, in delays."""
    plain, slowed = step_ms(settings), step_ms(settings, slow, on_rank)
    return [
        {part: (after[part] - before[part]) / (1000 * DELAY_S) for part in PARTS}
        for before, after in zip(plain, slowed, strict=True)
    ]


def expect(found: dict[str, float], part: str | None, times: float = 1) -> None:
    """The delay, `times` a step, is in this part alone; None: in none."""
    for name, growth in found.items():
        if name == part:
            assert 0.8 * times < growth < 1.5 * times, (name, found)
        else:
            assert abs(growth) < 0.5, (name, found)


@pytest.mark.parametrize(
    ("slow", "settings", "part"),
    [
        ("data", {}, "data_wait"),
        ("forward", {}, "forward_backward"),
        ("backward", {}, "forward_backward"),
        ("update", {}, "optimizer"),
        ("clipping", {"grad_clip": 1.0}, "optimizer"),
        ("evaluation", {"validate_every": 1, "checkpoint_every": 1000}, "validation"),
        ("copying for a checkpoint", {"checkpoint_every": 1}, "checkpoint"),
        ("writing of a checkpoint", {"checkpoint_every": 1}, "checkpoint"),  # which the next one waits for
        ("records", {"log_every": 1}, "tracking"),
        ("live line", {}, "tracking"),
        ("sums of a step", {}, "all_reduce"),
    ],
)
def test_a_delay_is_in_the_part_that_it_was_put_into(slow: str, settings: dict[str, Any], part: str) -> None:
    (found,) = grown(settings, slow)
    expect(found, part)


@pytest.mark.parametrize("settings", [{}, {"micro_batch_size": 2}, {"grad_compression": "bf16"}])
def test_a_slow_exchange_of_gradients_is_all_reduce_on_every_rank(settings: dict[str, Any]) -> None:
    slow = "all-reduce in bf16" if settings.get("grad_compression") else "all-reduce"
    for found in on_ranks(2, grown, settings, slow)[0]:
        expect(found, "all_reduce")


@pytest.mark.parametrize(
    ("slow", "part"), [("forward", "forward_backward"), ("data", "data_wait"), ("update", "optimizer")]
)
def test_who_waits_for_a_slower_rank_waits_in_all_reduce(slow: str, part: str) -> None:
    fast, slowed = on_ranks(2, grown, {}, slow, 1)[0]
    expect(slowed, part)
    expect(fast, "all_reduce")


def losses(timed: bool) -> tuple[list[float], StepTimes | None]:
    config = Config(**{**BASE, "epochs": 1})
    splits = tiny_splits(config)
    training = build_training(config, splits)
    training.clock = StepClock(training.device, SPAN if timed else None)
    compress_gradients(training.model, config, training.clock)
    found = [result.loss for result in loop.train(training, loader_for(training, splits))]
    return found, training.clock.times()


def test_a_clock_changes_no_loss() -> None:
    for (plain, none), (timed, times) in zip(on_ranks(2, losses, False), on_ranks(2, losses, True), strict=True):
        assert timed == plain
        assert len(timed) == 15
        assert none is None
        assert times is not None
        assert times.steps == SPAN.steps


def test_the_parts_of_steps_add_up_to_what_the_loop_itself_measures() -> None:
    config = Config(**{**BASE, "epochs": 1})
    splits = tiny_splits(config)
    training = build_training(config, splits)
    training.clock = StepClock(training.device, SPAN)
    with PATCHES["update"](), PATCHES["forward"]():  # for seconds enough to compare
        results = list(loop.train(training, loader_for(training, splits)))
    times = training.clock.times()
    assert times is not None
    expected = sum(result.seconds for result in results[SPAN.warmup : SPAN.warmup + SPAN.steps])
    assert times.seconds - times.parts["rest"] == pytest.approx(expected, rel=0.02)


class Stopwatch(StepClock):
    """Whose time goes on by a second at each look."""

    def __init__(self, span: Span | None):
        super().__init__(span=span)
        self._seconds = itertools.count()

    def _now(self) -> float:
        return next(self._seconds)


def test_every_moment_between_the_first_and_the_last_step_is_in_one_part() -> None:
    clock = Stopwatch(Span(warmup=1, steps=2))
    full = []
    for _ in range(4):
        clock.begin_step()
        full.append(clock.is_full)
        assert (clock.times() is not None) is full[-1]
        clock.enter("forward_backward")
        with clock.part("all_reduce"):
            clock.enter("optimizer")
        clock.end_step(samples=10)
    assert full == [False, False, False, True]
    times = clock.times()
    assert times is not None
    assert (times.samples, times.seconds) == (20, 12)  # six looks a step
    shares = {"data_wait": 2, "forward_backward": 4, "all_reduce": 2, "optimizer": 2, "rest": 2}
    assert times.parts == dict.fromkeys(PARTS, 0) | shares


def test_on_a_gpu_events_are_put_into_the_stream_and_read_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as that can be told without one."""
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self) -> None:
            self.at_ms = 250.0 * len(done)
            done.append("recorded")

        def elapsed_time(self, later: "Event") -> float:
            assert "waited" in done
            return later.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))
    clock = StepClock(torch.device("cuda"), Span(warmup=1, steps=3))
    for _ in range(5):
        clock.begin_step()
        clock.enter("forward_backward")
        clock.end_step(samples=10)
    assert "waited" not in done
    times = clock.times()
    assert times is not None
    assert done == ["recorded"] * 10 + ["waited"]  # three each step, and the end
    assert times.parts == dict.fromkeys(PARTS, 0.0) | {"data_wait": 0.75, "forward_backward": 0.75, "rest": 0.75}


def test_without_a_span_it_never_looks() -> None:
    clock = Stopwatch(None)
    clock.begin_step()
    with clock.part("checkpoint"):
        clock.end_step(samples=10)
    assert (clock.is_on, clock.is_full, clock.times(), clock._now()) == (False, False, None, 0)

"""Where the time of training steps goes: each moment between the first counted step and the last is one part's.

On a CPU the host's clock tells the time. On a GPU the host runs ahead of it: there events are put into the stream, and
their times are read once, at the end. So no step is held up, and what the GPU did not wait for is in no part.
"""

import functools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from app.distributed import gather_texts

PARTS = (
    "data_wait",
    "forward_backward",
    "all_reduce",
    "optimizer",
    "validation",
    "checkpoint",
    "tracking",
    "rest",
)


@dataclass(frozen=True)
class Span:
    """The steps to count: `steps` of them, after the first `warmup`."""

    warmup: int
    steps: int


@dataclass(frozen=True)
class StepTimes:
    """What the counted steps took. by_rank: of each rank, the seconds of each of PARTS in all of them."""

    steps: int
    samples: int
    by_rank: list[dict[str, float]]

    @property
    def parts(self) -> dict[str, float]:
        """Rank 0's, which saves and records beside training: what it waits for other ranks is in all_reduce."""
        return self.by_rank[0]

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


class StepClock:
    """Told what is being done, it adds up the time of each part. Without a span it is off, which costs a step a few
    microseconds."""

    def __init__(self, device: torch.device | None = None, span: Span | None = None):
        self._span, self._on_gpu = span, device is not None and device.type == "cuda"
        self._begun = self._samples = 0
        self._counting, self._part = False, "rest"
        self._marks: list[tuple[str, Any]] = []  # each part, and when it began; at the end, when the last ended

    @property
    def is_on(self) -> bool:
        return self._span is not None

    @property
    def is_full(self) -> bool:
        """Whether all steps of the span are counted, with what came between them: one more step has begun."""
        return self._span is not None and self._begun > self._span.warmup + self._span.steps

    def begin_step(self) -> None:
        """The next batch is about to be waited for."""
        if self._span is None:
            return
        self._begun += 1
        if self._begun == self._span.warmup + 1:
            self._counting = True
        self.enter("data_wait")
        if self.is_full:
            self._counting = False

    def end_step(self, samples: int) -> None:
        """The update of a global batch of so many samples is made; what follows is no part of a step's work."""
        self._samples += samples if self._counting else 0
        self.enter("rest")

    def enter(self, part: str) -> None:
        """From now on, this is what is done."""
        if self._counting:
            self._part = part
            self._marks.append((part, self._now()))

    def part(self, part: str) -> AbstractContextManager[None]:
        """This, and then again what was done before."""
        return self._within(part) if self._counting else nullcontext()

    @contextmanager
    def _within(self, part: str) -> Iterator[None]:
        before = self._part
        self.enter(part)
        try:
            yield
        finally:
            self.enter(before)

    def on_last_bucket(self, hook: Callable[..., torch.futures.Future[torch.Tensor]]) -> Callable[..., Any]:
        """DDP's communication hook, which then tells the clock that all gradients are there: what is left of the
        backward pass is the wait for their sums."""

        @functools.wraps(hook)  # DDP looks at a hook's name
        def timed(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[reportPrivateImportUsage]  # torch's stubs
            if bucket.is_last():  # they are exchanged in order, so the others are on their way
                self.enter("all_reduce")
            return hook(group, bucket)

        return timed

    def times(self) -> StepTimes | None:
        """None unless the clock is full. Every rank must call it, and all get the same."""
        if self._span is None or not self.is_full:
            return None
        if self._on_gpu:
            torch.cuda.synchronize()
        found: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        for (part, begun), (_, ended) in pairwise(self._marks):
            found[part] += begun.elapsed_time(ended) / 1000 if self._on_gpu else ended - begun
        by_rank = [json.loads(text) for text in gather_texts([json.dumps(found)])]
        return StepTimes(self._span.steps, self._samples, by_rank)

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

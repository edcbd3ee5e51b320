"""A worker's line to the Tracker: fire and forget, so that recording never slows a step.

Only rank 0 sends records, since all ranks hold the same sums; the first rank of each node sends its
node's system metrics.
"""

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

import numpy as np
import psutil
import ray
from ray.util.metrics import Gauge

from app.data.cache import progress
from app.data.loader import Batch
from app.data.sampling import Schedule
from app.distributed import World
from app.micro_batches import ForwardPass
from app.spool import SYSTEM, SYSTEM_EVERY_S
from app.tracking import LIVE_EVERY_S, Live, Stop, Validation
from app.watchdog import Watchdog

STOP_POLL_S = 0.5
# What Prometheus gets from Ray, with the run's name as a label: docs/observability.md has queries.
GAUGES = {
    "perf/samples_per_s": ("evenkeel_samples_per_s", "Training samples in a second, over all workers."),
    "perf/step_s": ("evenkeel_step_s", "Seconds of a step, data included."),
    "perf/data_wait_share": ("evenkeel_data_wait_share", "Share of a step that waits for data, 0 to 1."),
    "perf/checkpoint_s": (
        "evenkeel_checkpoint_s",
        "Seconds that writing the last checkpoint took, beside the training.",
    ),
}


class Left(Exception):
    """The command has ended without waiting for the training in its process."""


class Reporter:
    def __init__(
        self,
        tracker: Any,
        run_name: str,
        world: World,
        node_rank: int,
        local_rank: int,
        hang_timeout_s: float,
        left: threading.Event | None = None,
        *,
        setup_timeout_s: float,
    ):
        """left: in the driver's process, which sets it when it no longer waits for the training."""
        self._left, self._actor = left, tracker
        self._node_rank, self._local_rank = node_rank, local_rank
        self.is_rank_zero = world.rank == 0
        self._gauges = {
            key: Gauge(*GAUGES[key], tag_keys=("run",)).set_default_tags({"run": run_name}) for key in GAUGES
        }
        timeouts = (setup_timeout_s, hang_timeout_s)
        self._watchdog = Watchdog(*timeouts, f"rank {world.rank}", self._hung, ends_process=left is None)
        self._live_at = 0.0
        self._is_training = False
        self._metrics: dict[str, float] = {}
        self.stop: Stop | None = None  # on rank 0; the loop tells the others
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        self._watchdog.start()
        progress.set(self._watchdog.beat)  # in this thread's context, which ends with the training
        if self.is_rank_zero:
            threading.Thread(target=self._poll_stop, name="stop-poll", daemon=True).start()
        self._tracker.joined.remote(ray.get_runtime_context().get_node_id())
        if self._local_rank == 0:
            threading.Thread(target=self._sample_system, name="system-metrics", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._closed.set()
        self._watchdog.close()

    @property
    def _tracker(self) -> Any:
        """Raises Left."""
        self._refuse_left()
        return self._actor

    def _refuse_left(self) -> None:
        if self._left is not None and self._left.is_set():
            raise Left

    def alive(self) -> None:
        """Record a step: to be called more often than every hang_timeout_s, from the first step on. Raises Left."""
        self._refuse_left()
        self._watchdog.step()

    def begin_training(self) -> None:
        """Record that the first step is about to be computed: the setup's last sign of life."""
        self._is_training = True
        self._watchdog.beat()

    def waiting(self) -> AbstractContextManager[None]:
        """Expect nothing within: this rank waits for others, which may take longer to get there."""
        return self._watchdog.resting()

    def rest(self) -> None:
        """Until alive() is called again, nothing is to be expected."""
        self._watchdog.rest()

    def watched(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.alive()
            yield batch

    def _hung(self, text: str, stacks: str) -> None:
        ray.get(self._tracker.hung.remote(text, stacks, self._left is not None), timeout=5)

    def metrics(self, step: int, values: dict[str, float]) -> None:
        if self.is_rank_zero:
            self._tracker.metrics.remote(step, values)
            self._metrics.update(values)
            for name in GAUGES.keys() & values.keys():
                self._gauges[name].set(values[name])

    def saved(self, step: int, seconds: float) -> None:
        """A checkpoint, and how long it took beside the training."""
        self.metrics(step, {"perf/checkpoint_s": seconds})
        if step:
            self._tracker.saved.remote()

    def live(self, step: int, schedule: Schedule, epoch_ended: bool) -> None:
        """Where the run stands, for the terminal: at each epoch's end, and else as often as it is looked at."""
        if not self.is_rank_zero or not (epoch_ended or time.perf_counter() - self._live_at > LIVE_EVERY_S):
            return
        self._live_at = time.perf_counter()
        self._tracker.live.remote(
            Live(
                step=step,
                total_steps=schedule.total_steps,
                epoch=schedule.epochs_begun(step),
                epochs=schedule.epochs_begun(schedule.total_steps),
                metrics=self._metrics,
            ),
            epoch_ended,
        )

    def validated(self, step: int, schedule: Schedule, metrics: dict[str, float]) -> None:
        """A measurement, once what is to be saved of it is on its way: the place for a sweep to end the trial."""
        if self.is_rank_zero:
            self.rest()  # a trial may have to wait here for the others
            self._tracker.validated.remote(
                Validation(step=step, epochs=step / schedule.steps_per_epoch, metrics=metrics)
            )
            self.alive()

    def event(self, text: str) -> None:
        if self.is_rank_zero:
            self._tracker.event.remote(text)

    def precision(self, precision: str) -> None:
        """What --precision auto came to."""
        if self.is_rank_zero:
            self._tracker.tags.remote({"precision": precision})
            self.event(f"--precision auto: {precision}")

    def unreadable(self, texts: list[str]) -> None:
        """Samples that could not be read, and what is wrong; all ranks hold the same."""
        if self.is_rank_zero and texts:
            self._tracker.unreadable.remote(texts)

    def pictures(self, **arrays: np.ndarray) -> None:
        if self.is_rank_zero:
            ray.get(self._tracker.pictures.remote(**arrays))

    def flush(self) -> None:
        """Return when everything sent before is on the Tracker's disk."""
        ray.get(self._tracker.flush.remote())

    def snapshot(self) -> bytes | None:
        """As flush(), and return what a checkpoint keeps of the record (app/record.py); None on a disk."""
        return ray.get(self._tracker.snapshot.remote())

    def fail(self, message: str, exit_code: int) -> None:
        """From any rank: starting the workers again would not help."""
        ray.get(self._tracker.fail.remote(message, exit_code))

    def micro_batch_size(self) -> int | None:
        """The most samples in a forward pass, since an earlier one ran out of memory."""
        return ray.get(self._tracker.micro_batch_size.remote())

    def forward_pass(self, forward_pass: ForwardPass) -> None:
        """What a step will compute at a time: known to the Tracker before it can run out of memory."""
        ray.get(self._tracker.forward_pass.remote(forward_pass))

    def out_of_memory(self, reason: str) -> None:
        """From any rank. Smaller micro-batches help only where samples are computed: from the first step on."""
        if self._is_training:
            ray.get(self._tracker.out_of_memory.remote(reason))
        else:
            advice = "use a smaller --model, lower --in-memory-mb, or use fewer workers on a node"
            self.fail(f"out of memory before the first step ({reason}); {advice}", 1)

    def raised(self, rank: int, stack: str) -> None:
        """From any rank: an exception, after which the workers are started again."""
        self._tracker.raised.remote(f"rank {rank} raised", stack)

    def failure(self) -> tuple[str, int] | None:
        return ray.get(self._tracker.failure.remote())

    def asked_to_stop(self) -> bool:
        return self.stop is not None

    def _poll_stop(self) -> None:
        with contextlib.suppress(Left):
            while not self._closed.wait(STOP_POLL_S):
                self.stop = ray.get(self._tracker.stop_requested.remote()) or self.stop

    def _sample_system(self) -> None:
        import torch

        psutil.cpu_percent()  # the first call starts the measurement
        while not self._closed.wait(SYSTEM_EVERY_S):
            memory = psutil.virtual_memory()
            values = {
                "cpu_utilization_percentage": psutil.cpu_percent(),
                "system_memory_usage_megabytes": memory.used / 1e6,
                "system_memory_usage_percentage": memory.percent,
            }
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                free, total = torch.cuda.mem_get_info()
                values["gpu_memory_usage_percentage"] = 100 * (1 - free / total)
            prefixed = {f"{SYSTEM}node_{self._node_rank}/{key}": value for key, value in values.items()}
            with contextlib.suppress(Left):
                self._tracker.system_metrics.remote(prefixed)

"""Which samples make up which step: an order per epoch, cut into global batches, sliced by rank.

Takes the place of torch's RandomSampler, BatchSampler and DistributedSampler. The difference that
matters: the order and the batches know nothing of the number of workers, which enters in one place
only (rank_slice), so the samples of a step are the same on any cluster, and resuming needs nothing
but a step number.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from app.distributed import World


def shuffled_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of the sample ids 0..num_samples-1 as int64, a function of its arguments alone."""
    # Philox is counter-based: (seed, epoch) keys an independent stream without drawing the earlier ones.
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(num_samples)


def rank_slice(global_batch: np.ndarray, world: World) -> np.ndarray:
    """The part of a global batch that a rank computes: contiguous, the first ranks one larger if uneven.

    The concatenation over ranks is the global batch; with fewer samples than ranks the last are empty.
    """
    share, rest = divmod(len(global_batch), world.size)
    start = world.rank * share + min(world.rank, rest)
    return global_batch[start : start + share + (world.rank < rest)]


@dataclass(frozen=True)
class Request:
    """What a rank asks of its data set for one step.

    ids: (n,) int64 sample ids. The last num_counted of them are the rank's share of the step; one
    before them is a mixing partner or a stand-in, there to be read and not to be counted.
    """

    step: int
    epoch: int
    ids: np.ndarray
    num_counted: int
    global_count: int


@dataclass(frozen=True)
class Schedule:
    """Where every step of a run lies: a run of total_steps steps, each a global batch of an epoch."""

    num_samples: int
    batch_size: int
    epochs: int
    max_steps: int | None = None

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_samples // self.batch_size)

    @property
    def smallest_batch(self) -> int:
        return (self.num_samples - 1) % self.batch_size + 1

    @property
    def total_steps(self) -> int:
        return min(self.epochs * self.steps_per_epoch, self.max_steps or self.epochs * self.steps_per_epoch)

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def epochs_begun(self, step: int) -> int:
        """Epochs of which at least one of the steps 0..step-1 is a part."""
        return -(-step // self.steps_per_epoch)

    def samples_before(self, step: int) -> int:
        """Samples in the steps 0..step-1: the last batch of an epoch may be smaller."""
        epochs, batches = divmod(step, self.steps_per_epoch)
        return epochs * self.num_samples + batches * self.batch_size


class TrainingBatches:
    """A batch sampler over the rest of a run: one Request per step, from start_step to the last.

    One stream over all epochs, so that a loader reads ahead across an epoch's end.

    with_partner: put the sample before the rank's slice (cyclically in the global batch) in front of
    it. Mixing the batch with itself rolled by one then gives each sample the same partner at every
    world size.
    """

    def __init__(self, schedule: Schedule, seed: int, world: World, start_step: int = 0, with_partner: bool = False):
        self.schedule, self.seed, self.world = schedule, seed, world
        self.start_step, self.with_partner = start_step, with_partner

    def __len__(self) -> int:
        return max(0, self.schedule.total_steps - self.start_step)

    def __iter__(self) -> Iterator[Request]:
        order_of, order = -1, np.empty(0, np.int64)
        for step in range(self.start_step, self.schedule.total_steps):
            epoch, index = divmod(step, self.schedule.steps_per_epoch)
            if epoch != order_of:
                order_of, order = epoch, shuffled_order(self.schedule.num_samples, self.seed, epoch)
            batch = order[index * self.schedule.batch_size : (index + 1) * self.schedule.batch_size]
            yield self._request(step, epoch, batch)

    def _request(self, step: int, epoch: int, batch: np.ndarray) -> Request:
        positions = rank_slice(np.arange(len(batch)), self.world)
        counted = len(positions)
        if self.with_partner:
            first = positions[0] if counted else 0
            positions = np.concatenate([[(first - 1) % len(batch)], positions]).astype(np.int64)
        # A rank without a share still takes part in the step's collectives: it reads a sample that
        # does not count. (A partner is dropped after mixing, so it cannot be the stand-in.)
        if counted == 0:
            positions = np.concatenate([positions, [0]]).astype(np.int64)
        return Request(step, epoch, batch[positions], counted, len(batch))


class EvaluationBatches:
    """A batch sampler over a data set, once, in order: each sample on exactly one rank, none padded."""

    def __init__(self, num_samples: int, batch_size: int, world: World):
        self.ids = rank_slice(np.arange(num_samples, dtype=np.int64), world)
        # batch_size is global here too, so that memory does not grow with the number of workers.
        self.batch_size = max(1, batch_size // world.size)

    def __len__(self) -> int:
        return -(-len(self.ids) // self.batch_size)

    def __iter__(self) -> Iterator[Request]:
        for start in range(0, len(self.ids), self.batch_size):
            ids = self.ids[start : start + self.batch_size]
            yield Request(step=0, epoch=0, ids=ids, num_counted=len(ids), global_count=len(ids))

"""Which samples make up which step: an order per epoch, cut into global batches, sliced by rank.

An order is an array of sample ids, a pure function of the seed, the epoch and facts about the data
(Order). Schedule says where it is cut into global batches, TrainingBatches cuts it, and rank_slice
gives each rank its part. Only the last knows of the number of workers, so the samples of a step are
the same on any cluster, and resuming needs nothing but a step number.

Together they take the place of torch's samplers, BatchSampler and DistributedSampler:

    shuffled         RandomSampler: each sample once, in random order
    sequential       SequentialSampler: each sample once, as the data set has them
    subset           SubsetRandomSampler: a fixed part of the samples, each once, in random order
    weighted         WeightedRandomSampler: as many draws as samples, with replacement
    balanced         WeightedRandomSampler with 1 / class frequency: all classes are equally likely
    length-bucketed  BucketIterator and its kin: batches of similar length, so that little is padded
    aspect-grouped   GroupedBatchSampler of torchvision's detection reference: batches of one shape

Data that is read in blocks (Parquet's row groups) is shuffled by streamed_order, so that a rank goes
through few of them at a time.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from app.config import Config
from app.errors import BadInput
from app.retry import retry

if TYPE_CHECKING:
    from app.distributed import World

# Samples that are sorted by length at a time, in batches: more means less padding and less chance.
POOL_BATCHES = 100

Ids = TypeVar("Ids", np.ndarray, range)


@dataclass(frozen=True, eq=False)
class Facts:
    """What is known of each of N samples beside its label; None where the data does not say.

    weights: (N,) float64, 0 or more, the relative chance of being drawn. lengths: (N,) int64, of a
    sequence. groups: (N,) int64; samples of one group have one shape, and only they share a batch.
    blocks: (n,) int64, the numbers of samples that lie together and are read as one; such sets have no parts.
    """

    weights: np.ndarray | None = None
    lengths: np.ndarray | None = None
    groups: np.ndarray | None = None
    blocks: np.ndarray | None = None

    def of(self, ids: np.ndarray) -> "Facts":
        """The facts of some of the samples, in the order of ids."""
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        return Facts(**{name: None if values is None else values[ids] for name, values in known.items()})


def _generator(seed: int, epoch: int) -> np.random.Generator:
    # Philox is counter-based: (seed, epoch) keys an independent stream without drawing the earlier ones.
    return np.random.Generator(np.random.Philox(key=[seed, epoch]))


def sort_keys(values: np.ndarray) -> np.ndarray:
    """Integers that sort as the values (n,) do, of 16 bits if these will do: NumPy sorts those by radix, stably,
    in a fifth of the time."""
    low, high = int(values.min(initial=0)), int(values.max(initial=0))
    return (values - low).astype(np.uint16) if high - low < 2**16 else values


def by_value(values: np.ndarray) -> list[np.ndarray]:
    """For each different value of (n,) integers, in their order, its places in ascending order, int64."""
    keys = sort_keys(values)
    places = np.argsort(keys, kind="stable")
    found = keys[places]
    return np.split(places, np.flatnonzero(found[1:] != found[:-1]) + 1) if len(values) else []


def shuffled_order(num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of the sample ids 0..num_samples-1 as int64, a function of its arguments alone."""
    return _generator(seed, epoch).permutation(num_samples)


class Draws:
    """As many draws with replacement as there are samples, made as they are asked for: draws[a:b] gives int64 ids.

    Making 10^7 of them at once would keep an epoch's first step waiting for 12 s. bounds: (N,), rising to 1; a
    sample is drawn by random numbers from the bound before its own up to its own.
    """

    def __init__(self, bounds: np.ndarray, seed: int, epoch: int):
        self._bounds = bounds
        self._philox = np.random.Philox(key=[seed, epoch])  # as _generator has it
        self._made = 0  # fours of numbers: Philox makes four at a time

    def __len__(self) -> int:
        return len(self._bounds)

    def __getitem__(self, part: slice) -> np.ndarray:
        return np.searchsorted(self._bounds, self._numbers(part), side="right")

    def counts(self, stop: int) -> np.ndarray:
        """How often each of the N samples is among the first `stop` draws, int64 (N,).

        Of sorted random numbers, 10^7 are counted in 1 s; finding the samples of unsorted ones takes 8 s.
        """
        if stop == 0:
            return np.zeros(len(self), np.int64)
        return np.diff(np.searchsorted(np.sort(self._numbers(slice(stop))), self._bounds), prepend=0)

    def _numbers(self, part: slice) -> np.ndarray:
        """A part of the epoch's N random numbers, made without those before it."""
        start, stop, _ = part.indices(len(self))
        self._philox.advance(start // 4 - self._made)
        numbers = np.random.Generator(self._philox).random(start % 4 + max(0, stop - start))
        self._made = start // 4 + -(-len(numbers) // 4)
        return numbers[start % 4 :]


def weighted_order(weights: np.ndarray, seed: int, epoch: int) -> Draws:
    """As many draws as there are weights (N,), with replacement, each sample as likely as its weight says."""
    bounds = np.cumsum(weights / weights.max())  # divided first: the sum of large ones would overflow
    bounds /= bounds[-1]
    return Draws(bounds, seed, epoch)


def bucketed_order(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Each sample once; those of a full batch have similar lengths (N,).

    Pools of the shuffled order are sorted by length and cut into batches, and the batches shuffled.
    What fills no batch comes last and is of any length: were it the longest of a pool, drop_last would
    never train on those.
    """
    order = shuffled_order(len(lengths), seed, epoch)
    num_full = len(order) // batch_size
    full, rest = np.split(order, [num_full * batch_size])
    keys = sort_keys(lengths)[full]
    for start in range(0, len(full), POOL_BATCHES * batch_size):
        pool = slice(start, start + POOL_BATCHES * batch_size)
        full[pool] = full[pool][np.argsort(keys[pool], kind="stable")]
    # A stream beside those that the epochs' permutations are drawn from.
    batches = _generator(seed, epoch + 2**32).permutation(num_full)
    return np.concatenate([full.reshape(num_full, batch_size)[batches].reshape(-1), rest])


def grouped_order(groups: np.ndarray, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Each sample once, batches of one group (N,): first the full ones, as the shuffled order fills them,
    then what is left over of each group, by its number."""
    order = shuffled_order(len(groups), seed, epoch)
    full, rest = [], []
    for places in by_value(sort_keys(groups)[order]):  # in the shuffled order
        batches, left = np.split(places, [len(places) // batch_size * batch_size])
        full.append(batches.reshape(-1, batch_size))
        rest.append(left)
    batches = np.concatenate(full)
    batches = batches[np.argsort(batches[:, -1])]  # full as soon as its last sample is there
    return order[np.concatenate([batches.reshape(-1), *rest])]


def streamed_order(blocks: np.ndarray, lanes: int, batch_size: int, seed: int, epoch: int) -> np.ndarray:
    """Each sample once, out of blocks (n,) of consecutive ids which are read as a whole.

    The blocks are shuffled, and the samples in each; this sequence is cut into lanes, and a batch is filled from
    all of them: lane by lane, from each as many as from the others or one more. So a batch is drawn from about as
    many blocks as there are lanes, and a rank, whose part of a batch is some of the lanes, goes through blocks of
    its own. A batch that is smaller than `lanes` has a lane for each of its samples.
    """
    generator, starts = _generator(seed, epoch), np.cumsum(blocks) - blocks
    shuffled = [starts[block] + generator.permutation(blocks[block]) for block in generator.permutation(len(blocks))]
    lanes, places = min(lanes, batch_size), np.arange(blocks.sum())
    full, rest = np.split(places, [len(places) // batch_size * batch_size])
    # The places in the order that each lane fills: its columns of the full batches, and its part of the last one.
    columns = np.array_split(full.reshape(-1, batch_size), lanes, axis=1)
    parts = zip(columns, np.array_split(rest, lanes), strict=True)
    order = np.empty_like(places)
    order[np.concatenate([part.reshape(-1) for pair in parts for part in pair])] = np.concatenate(shuffled)
    return order


def stratified_split(labels: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Sorted ids (kept, held_out): each class gives round(fraction * n) samples, at least 1 of 2 or more.

    A function of the labels and the fraction alone, not of the run's seed: runs with different seeds
    are then measured on the same samples.
    """
    generator = np.random.Generator(np.random.Philox(key=0))
    held_out = []
    for ids in map(generator.permutation, by_value(labels)):
        count = min(max(round(fraction * len(ids)), 1), len(ids) - 1)
        held_out.append(ids[:count])
    held = np.sort(np.concatenate(held_out))
    return np.setdiff1d(np.arange(len(labels)), held), held


def stratified_part(labels: np.ndarray, fraction: float) -> np.ndarray:
    """Sorted ids of round(fraction * n) samples of each class, at least 1; the same for every seed."""
    generator = np.random.Generator(np.random.Philox(key=1))
    permuted = map(generator.permutation, by_value(labels))
    return np.sort(np.concatenate([ids[: max(round(fraction * len(ids)), 1)] for ids in permuted]))


def read_subset(path: str) -> np.ndarray:
    """Sample ids (n,) from a text file, one a line. Raises BadInput, naming the line, for anything else."""
    try:
        lines = retry(lambda: Path(path).read_text(encoding="utf-8-sig"), f"reading --subset-file {path}").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise BadInput(f"--subset-file {path}: {reason}") from None
    ids: dict[int, int] = {}  # each with its line
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text:
            continue
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise BadInput(f"--subset-file {path}, line {number}: {text[:40]!r} is no sample id: a number from 0 on")
        if (first := ids.setdefault(int(text), number)) != number:
            raise BadInput(f"--subset-file {path}, line {number}: {text} stands in line {first} already")
    if not ids:
        raise BadInput(f"--subset-file {path} has no sample ids in it: write one a line")
    return np.array(list(ids), np.int64)


@dataclass(frozen=True, eq=False)
class Order:
    """The order of the samples in each epoch: a slice of order(epoch) gives their ids, int64.

    labels (N,) and facts are those of the data set's N training samples; subset: the ids that are
    trained on, None for all. build_order() makes one.
    """

    sampler: str
    batch_size: int
    seed: int
    labels: np.ndarray
    facts: Facts
    subset: np.ndarray | None = None
    lanes: int = 1

    def __call__(self, epoch: int) -> np.ndarray | Draws:
        seed, facts = self.seed, self.facts
        if self.sampler == "sequential":
            return np.arange(len(self.labels))
        if self.subset is not None:
            return self.subset[shuffled_order(len(self.subset), seed, epoch)]
        if facts.weights is not None:
            return weighted_order(facts.weights, seed, epoch)
        if facts.lengths is not None:
            return bucketed_order(facts.lengths, self.batch_size, seed, epoch)
        if facts.groups is not None:
            return grouped_order(facts.groups, self.batch_size, seed, epoch)
        if facts.blocks is not None:
            return streamed_order(facts.blocks, self.lanes, self.batch_size, seed, epoch)
        return shuffled_order(len(self.labels), seed, epoch)

    @property
    def num_samples(self) -> int:
        """Samples of an epoch."""
        return len(self.labels if self.subset is None else self.subset)

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Samples of an epoch that are batched together, for each group."""
        if self.facts.groups is None:
            return (self.num_samples,)
        return tuple(np.unique(self.facts.groups, return_counts=True)[1].tolist())

    @property
    def digest(self) -> str:
        """SHA-256 of all that the order depends on beside the settings: it tells whether a step number still
        means the same samples."""
        digest = hashlib.sha256(self.sampler.encode())
        facts = self.facts
        known = [self.labels, facts.weights, facts.lengths, facts.groups, self.subset]
        for values in known if facts.blocks is None else [*known, facts.blocks]:
            digest.update(b"none" if values is None else f"{values.dtype.name} {len(values)} ".encode())
            digest.update(b"" if values is None else np.ascontiguousarray(values).data)
        return digest.hexdigest()


def build_order(config: Config, labels: np.ndarray, facts: Facts) -> Order:
    """The order that --sampler names, over training samples with these labels (N,) and facts.

    Raises BadInput for facts that the sampler needs and the data does not have, or that cannot be used,
    and where no batch would be left.
    """
    needed = {"weighted": "weights", "length-bucketed": "lengths", "aspect-grouped": "groups"}.get(config.sampler)
    # What the order does not go by is left out: it may change without harm.
    facts = Facts(**{needed: getattr(facts, needed)}) if needed else Facts(blocks=facts.blocks)
    if needed and getattr(facts, needed) is None:
        raise BadInput(
            f"--sampler {config.sampler} needs the {needed} of the samples, which --dataset {config.dataset} does not "
            "give (app.data.splits.from_arrays takes weights and lengths); use another sampler"
        )
    if not len(labels):
        raise BadInput(f"--dataset {config.dataset} has no training samples")
    if needed:
        facts = Facts(**{needed: _one_number_each(getattr(facts, needed), needed, len(labels), config)})
    if facts.weights is not None:
        facts = replace(facts, weights=_usable_weights(facts.weights, config))
    elif config.sampler == "balanced":
        _, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
        facts = Facts(weights=1 / counts[classes])
    numbers = np.asarray(labels, np.int64)
    subset = _chosen(config, numbers) if config.sampler == "subset" else None
    order = Order(config.sampler, config.batch_size, config.seed, numbers, facts, subset, config.lanes)
    if not build_schedule(config, order).steps_per_epoch:
        raise BadInput(
            f"--drop-last leaves nothing of {order.num_samples} samples, which fill no batch of --batch-size "
            f"{config.batch_size}; lower the one or leave out the other"
        )
    return order


def _one_number_each(values: Any, name: str, num_samples: int, config: Config) -> np.ndarray:
    whole = name != "weights" and isinstance(values, np.ndarray) and values.dtype == np.int64  # then held once only
    try:
        numbers = values if whole else np.asarray(values, np.float64)
    except (ValueError, TypeError) as error:
        raise BadInput(f"--dataset {config.dataset}: {name} must be numbers ({error})") from None
    if numbers.shape != (num_samples,):
        raise BadInput(f"--dataset {config.dataset}: {name} has the shape {numbers.shape} for {num_samples} samples")
    if whole or name == "weights":
        return numbers
    if not (np.isfinite(numbers) & (numbers == np.round(numbers))).all():
        raise BadInput(f"--dataset {config.dataset}: {name} must be whole numbers")
    return numbers.astype(np.int64)


def _usable_weights(weights: np.ndarray, config: Config) -> np.ndarray:
    if bad := np.flatnonzero(~np.isfinite(weights) | (weights < 0)).tolist():
        raise BadInput(
            f"--dataset {config.dataset}: the weight of sample {bad[0]} is {weights[bad[0]]}; "
            "weights are finite numbers, 0 or more"
        )
    if not weights.any():
        raise BadInput(f"--dataset {config.dataset}: the weights of all training samples are 0; give some a chance")
    return weights


def _chosen(config: Config, labels: np.ndarray) -> np.ndarray:
    ids = np.arange(len(labels))
    if config.subset_file is not None:
        ids = read_subset(config.subset_file)
        if (largest := int(ids.max())) >= len(labels):
            raise BadInput(
                f"--subset-file {config.subset_file}: there is no sample {largest}, "
                f"the training samples are 0 to {len(labels) - 1}"
            )
    if config.subset_fraction is not None:
        ids = ids[stratified_part(labels[ids], config.subset_fraction)]
    return ids


def rank_slice(global_batch: Ids, world: "World") -> Ids:
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
    before them is a mixing partner or a stand-in, there to be read and not to be counted. occurrences:
    (n,) int64, how often each of them was drawn before in this epoch, by any rank; None if each sample is
    drawn once. In an evaluation, step is the first id: it tells batches apart.
    """

    step: int
    epoch: int
    ids: np.ndarray
    num_counted: int
    global_count: int
    occurrences: np.ndarray | None = None


@dataclass(frozen=True)
class Schedule:
    """Where every step of a run lies: a run of total_steps steps, each a global batch of an epoch.

    The sizes of an epoch's batches are the same in every epoch: first the full ones, then what is left
    over of each group. group_sizes: samples of an epoch in each group that is batched by itself.
    """

    group_sizes: tuple[int, ...]
    batch_size: int
    epochs: int
    max_steps: int | None = None
    drop_last: bool = False

    @property
    def num_full(self) -> int:
        """Full batches of an epoch."""
        return sum(size // self.batch_size for size in self.group_sizes)

    @property
    def leftovers(self) -> tuple[int, ...]:
        """The sizes of an epoch's batches that are not full; none with drop_last."""
        rests = [size % self.batch_size for size in self.group_sizes]
        return () if self.drop_last else tuple(rest for rest in rests if rest)

    @property
    def steps_per_epoch(self) -> int:
        return self.num_full + len(self.leftovers)

    @property
    def smallest_batch(self) -> int:
        return min(self.leftovers, default=self.batch_size)

    @property
    def total_steps(self) -> int:
        return min(self.epochs * self.steps_per_epoch, self.max_steps or self.epochs * self.steps_per_epoch)

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def epochs_begun(self, step: int) -> int:
        """Epochs of which at least one of the steps 0..step-1 is a part."""
        return -(-step // self.steps_per_epoch)

    def samples_before(self, step: int) -> int:
        """Samples in the steps 0..step-1."""
        epochs, batches = divmod(step, self.steps_per_epoch)
        return epochs * self._samples_of(self.steps_per_epoch) + self._samples_of(batches)

    def _samples_of(self, num_batches: int) -> int:
        """Samples in the first batches of an epoch."""
        full = min(num_batches, self.num_full)
        return full * self.batch_size + sum(self.leftovers[: num_batches - full])

    def batch_of(self, step: int) -> slice:
        """The place of a step's global batch in its epoch's order."""
        index = step % self.steps_per_epoch
        return slice(self._samples_of(index), self._samples_of(index + 1))


def build_schedule(config: Config, order: Order) -> Schedule:
    return Schedule(order.group_sizes, config.batch_size, config.epochs, config.max_steps, config.drop_last)


def count_draws(ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """How often each of the drawn ids (n,) was drawn before, int64 (n,); counts (N,) of each sample is updated."""
    places = np.argsort(ids, kind="stable")
    found = ids[places]
    starts = np.flatnonzero(np.concatenate([[True], found[1:] != found[:-1]]))
    lengths = np.diff(starts, append=len(found))
    before = np.empty(len(ids), np.int64)
    before[places] = counts[found] + np.arange(len(found)) - np.repeat(starts, lengths)
    counts[found[starts]] += lengths
    return before


class TrainingBatches:
    """A batch sampler over the rest of a run: one Request per step, from start_step to the last.

    One stream over all epochs, so that a loader reads ahead across an epoch's end. order(epoch) gives
    the ids of an epoch's samples, which are cut into global batches here and nowhere else.

    with_partner: put the sample before the rank's slice (cyclically in the global batch) in front of
    it. Mixing the batch with itself rolled by one then gives each sample the same partner at every
    world size.
    """

    def __init__(
        self,
        order: Callable[[int], np.ndarray | Draws],
        schedule: Schedule,
        world: "World",
        start_step: int = 0,
        with_partner: bool = False,
    ):
        self.order, self.schedule, self.world = order, schedule, world
        self.start_step, self.with_partner = start_step, with_partner

    def __len__(self) -> int:
        return max(0, self.schedule.total_steps - self.start_step)

    def __iter__(self) -> Iterator[Request]:
        order_of, order, counts = -1, None, None
        for step in range(self.start_step, self.schedule.total_steps):
            epoch = self.schedule.epoch_of(step)
            place = self.schedule.batch_of(step)
            if epoch != order_of:
                order = counts = None  # not held beside the next ones
                order_of, order = epoch, self.order(epoch)
                counts = order.counts(place.start) if isinstance(order, Draws) else None
            assert order is not None
            batch = order[place]
            yield self._request(step, epoch, batch, None if counts is None else count_draws(batch, counts))

    def _request(self, step: int, epoch: int, batch: np.ndarray, occurrences: np.ndarray | None) -> Request:
        positions = rank_slice(np.arange(len(batch)), self.world)
        counted = len(positions)
        if self.with_partner:
            first = positions[0] if counted else 0
            positions = np.concatenate([[(first - 1) % len(batch)], positions]).astype(np.int64)
        # A rank without a share still takes part in the step's collectives: it reads a sample that
        # does not count. (A partner is dropped after mixing, so it cannot be the stand-in.)
        if counted == 0:
            positions = np.concatenate([positions, [0]]).astype(np.int64)
        drawn = None if occurrences is None else occurrences[positions]
        return Request(step, epoch, batch[positions], counted, len(batch), drawn)


class EvaluationBatches:
    """A batch sampler over a data set, once: each sample on exactly one rank, none padded.

    In order; with groups (N,), group by group, and no batch has samples of two.
    """

    def __init__(self, num_samples: int, batch_size: int, world: "World", groups: np.ndarray | None = None):
        share = rank_slice(range(num_samples), world)
        cuts, self._ids = [share.start, share.stop], None
        if groups is not None:
            self._ids = np.argsort(sort_keys(groups), kind="stable")[share.start : share.stop]
            cuts = [0, *(np.flatnonzero(np.diff(groups[self._ids])) + 1).tolist(), len(share)]
        # batch_size is global here too, so that memory does not grow with the number of workers.
        size = max(1, batch_size // world.size)
        starts = [np.arange(start, end, size) for start, end in pairwise(cuts)]
        self._starts = np.concatenate([*starts, cuts[-1:]]).astype(np.int64)  # and where the last one ends

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __iter__(self) -> Iterator[Request]:
        for start, end in pairwise(self._starts):
            ids = np.arange(start, end) if self._ids is None else self._ids[start:end]
            yield Request(step=int(ids[0]), epoch=0, ids=ids, num_counted=len(ids), global_count=len(ids))

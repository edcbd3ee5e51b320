"""The same samples in the same steps at every world size, each once, from any step on."""

from collections import Counter
from collections.abc import Iterable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from app.data.sampling import EvaluationBatches, Request, Schedule, TrainingBatches, rank_slice, shuffled_order
from app.distributed import World

schedules = st.builds(
    Schedule,
    num_samples=st.integers(1, 60),
    batch_size=st.integers(1, 25),
    epochs=st.integers(1, 3),
    max_steps=st.none() | st.integers(1, 40),
)
world_sizes = st.integers(1, 9)
seeds = st.integers(0, 2**32 - 1)


def all_ranks(schedule: Schedule, seed: int, size: int, start: int = 0, partner: bool = False) -> list[list[Request]]:
    return [list(TrainingBatches(schedule, seed, World(rank, size), start, partner)) for rank in range(size)]


def counted(request: Request) -> list[int]:
    return request.ids[len(request.ids) - request.num_counted :].tolist()


def joined(requests: Iterable[Request]) -> list[int]:
    return [sample for request in requests for sample in counted(request)]


@given(schedules, seeds, world_sizes)
def test_each_step_has_the_same_samples_in_the_same_order_at_every_world_size(schedule, seed, size):
    alone = [counted(request) for request in all_ranks(schedule, seed, 1)[0]]
    together = [joined(step) for step in zip(*all_ranks(schedule, seed, size), strict=True)]
    assert together == alone


@given(schedules, seeds, world_sizes)
def test_each_sample_counts_exactly_once_an_epoch(schedule, seed, size):
    whole = Schedule(schedule.num_samples, schedule.batch_size, schedule.epochs)
    seen: dict[int, Counter] = {}
    for rank in all_ranks(whole, seed, size):
        for request in rank:
            seen.setdefault(request.epoch, Counter()).update(counted(request))
    assert seen == {epoch: Counter(range(whole.num_samples)) for epoch in range(whole.epochs)}


@given(schedules, seeds, world_sizes, st.data())
def test_starting_at_a_step_gives_the_tail(schedule, seed, size, data):
    start = data.draw(st.integers(0, schedule.total_steps))
    for rank, resumed in enumerate(all_ranks(schedule, seed, size, start)):
        whole = list(TrainingBatches(schedule, seed, World(rank, size)))
        assert [(r.step, r.epoch, r.ids.tolist()) for r in resumed] == [
            (r.step, r.epoch, r.ids.tolist()) for r in whole[start:]
        ]


@given(schedules, seeds, world_sizes)
def test_every_rank_reads_something_in_every_step_and_knows_the_global_count(schedule, seed, size):
    for step in zip(*all_ranks(schedule, seed, size), strict=True):
        assert all(len(request.ids) for request in step)
        assert {request.global_count for request in step} == {sum(request.num_counted for request in step)}


@given(schedules, seeds, world_sizes)
def test_a_mixing_partner_is_the_sample_before_in_the_global_batch(schedule, seed, size):
    alone = [counted(request) for request in all_ranks(schedule, seed, 1)[0]]
    for batch, step in zip(alone, zip(*all_ranks(schedule, seed, size, partner=True), strict=True), strict=True):
        before = {sample: batch[index - 1] for index, sample in enumerate(batch)}
        for request in step:
            ids = request.ids.tolist()
            for index in range(len(ids) - request.num_counted, len(ids)):
                assert ids[index - 1] == before[ids[index]]
        assert joined(step) == batch


@given(schedules)
def test_samples_before_a_step_adds_up_the_batches(schedule):
    sizes = [request.global_count for request in TrainingBatches(schedule, 0, World())]
    assert [schedule.samples_before(step) for step in range(len(sizes) + 1)] == np.cumsum([0, *sizes]).tolist()


@given(st.integers(0, 40), st.integers(1, 30), world_sizes)
def test_evaluation_covers_each_sample_once_in_order(num_samples, batch_size, size):
    ranks = [list(EvaluationBatches(num_samples, batch_size, World(rank, size))) for rank in range(size)]
    assert [sample for rank in ranks for sample in joined(rank)] == list(range(num_samples))


@given(st.integers(0, 50), world_sizes)
def test_slices_differ_by_one_at_most(count, size):
    lengths = [len(rank_slice(np.arange(count), World(rank, size))) for rank in range(size)]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else():
    order = shuffled_order(1000, seed=3, epoch=5)
    assert sorted(order.tolist()) == list(range(1000))
    assert np.array_equal(order, shuffled_order(1000, seed=3, epoch=5))
    assert not np.array_equal(order, shuffled_order(1000, seed=3, epoch=6))
    assert not np.array_equal(order, shuffled_order(1000, seed=4, epoch=5))
    # Written down once: another release of numpy must not change a run that is resumed under it.
    assert shuffled_order(8, seed=0, epoch=0).tolist() == FIRST_ORDER


FIRST_ORDER = [5, 0, 6, 1, 7, 2, 4, 3]

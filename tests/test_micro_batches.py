"""A share of a batch, cut into micro-batches."""

import pytest

from app.data.sampling import rank_slice
from app.distributed import World
from app.micro_batches import ForwardPass, num_micro_batches, samples_per_pass, smallest_pass


@pytest.mark.parametrize(
    ("global_count", "world_size", "size", "parts", "most", "fewest"),
    [
        (128, 1, None, 1, 128, 128),
        (128, 4, None, 1, 32, 32),
        (128, 1, 32, 4, 32, 32),
        (128, 4, 32, 1, 32, 32),
        (129, 1, 128, 2, 65, 64),  # as even as can be: 128 and 1 would be hard on batch norm
        (10, 3, 3, 2, 2, 1),  # shares of 4, 3 and 3 samples, two passes each
        (1, 3, 2, 1, 1, 0),
    ],
)
def test_passes_of_a_step(
    global_count: int, world_size: int, size: int | None, parts: int, most: int, fewest: int
) -> None:
    assert num_micro_batches(global_count, world_size, size) == parts
    assert samples_per_pass(global_count, world_size, size) == most
    assert smallest_pass(global_count, world_size, size) == fewest


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_no_pass_is_larger_than_asked_for(size: int) -> None:
    for global_count in range(1, 40):
        for world_size in (1, 2, 3, 5):
            parts = num_micro_batches(global_count, world_size, size)
            for rank in range(world_size):
                share = len(rank_slice(range(global_count), World(rank, world_size)))
                assert -(-share // parts) <= samples_per_pass(global_count, world_size, size) <= size


@pytest.mark.parametrize(("samples", "trained", "smaller"), [(128, 32, 32), (128, 128, 64), (32, 128, 16), (1, 0, 0)])
def test_what_is_tried_after_it_ran_out_of_memory(samples: int, trained: int, smaller: int) -> None:
    assert ForwardPass(samples, 1, trained).smaller == smaller

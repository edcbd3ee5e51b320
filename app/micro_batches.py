"""Cut a worker's share of a batch into micro-batches, one for each forward and backward pass.

Knows neither torch nor Ray: the loop, the worker and the Tracker use it.
"""

from dataclasses import dataclass


def num_micro_batches(global_count: int, world_size: int, micro_batch_size: int | None) -> int:
    """Return the number of forward passes in a step of global_count samples.

    It is the same on every rank, even where shares differ by a sample: synchronized batch norm is a collective in
    each pass.
    """
    return 1 if micro_batch_size is None else -(-_largest_share(global_count, world_size) // micro_batch_size)


def samples_per_pass(global_count: int, world_size: int, micro_batch_size: int | None) -> int:
    """Return the most samples that a rank computes in one forward pass of a step."""
    parts = num_micro_batches(global_count, world_size, micro_batch_size)
    return -(-_largest_share(global_count, world_size) // parts)


def smallest_pass(global_count: int, world_size: int, micro_batch_size: int | None) -> int:
    """Return the fewest samples that a rank computes in one forward pass of a step."""
    return global_count // world_size // num_micro_batches(global_count, world_size, micro_batch_size)


def _largest_share(global_count: int, world_size: int) -> int:
    return -(-global_count // world_size)


@dataclass(frozen=True)
class ForwardPass:
    """The forward passes of the workers that train now.

    samples: the most in one pass. trained: those in one pass of the steps that the newest checkpoint holds, on whatever
    workers made them; 0 if it holds none.
    """

    samples: int
    num_workers: int
    trained: int

    def __str__(self) -> str:
        return (
            f"{self.samples} sample{'s' * (self.samples > 1)} per forward pass on {self.num_workers} "
            f"worker{'s' * (self.num_workers > 1)}"
        )

    @property
    def smaller(self) -> int:
        """The samples of a pass to try next, after this one ran out of memory; 0 if there are no fewer."""
        return self.trained if 0 < self.trained < self.samples else self.samples // 2

"""Seeds: each a function of its key."""

import numpy as np
import pytest

from app.distributed import derive_seed, derive_seeds

LAST = np.concatenate([np.arange(1000), np.random.default_rng(0).integers(0, 2**32, 1000), [2**32 - 1]])


@pytest.mark.parametrize("key", [(), (7,), (0, 0), (2**32 - 1, 5), (2**32, 0), (2**63 - 1, 2**33, 1)])
def test_seeds_made_together_are_those_made_one_by_one(key: tuple[int, ...]) -> None:
    expected = [derive_seed("augment", *key, each) for each in LAST.tolist()]
    assert derive_seeds("augment", key, LAST).tolist() == expected
    assert len(set(expected)) == len(set(LAST.tolist()))


def test_a_part_of_the_key_may_differ() -> None:
    parts = np.array([0, 1, 5, 2**32 - 1])
    for last in (np.array([7, 7, 0, 8]), np.array([7, 7, 0, 2**33])):
        expected = [derive_seed("augment", 3, part, each) for part, each in zip(parts.tolist(), last, strict=True)]
        assert derive_seeds("augment", (3, parts), last).tolist() == expected


def test_seeds_of_keys_beyond_32_bits() -> None:
    last = np.array([1, 2**32 - 1, 2**32, 2**50])
    assert derive_seeds("mix", (3,), last).tolist() == [derive_seed("mix", 3, each) for each in last.tolist()]
    assert derive_seeds("mix", (3,), last[:0]).tolist() == []

"""Ranks, seeds and sums: the little that the loop needs to know of torch.distributed.

Everything here also works in a process without a process group, which is then rank 0 of 1.
"""

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class World:
    """A rank's place among the ranks."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size


def current_world() -> World:
    import torch.distributed as dist

    if not dist.is_initialized():
        return World()
    return World(dist.get_rank(), dist.get_world_size())


def loopback() -> str:
    """Return the name of the loopback interface, for gloo and NCCL to listen on."""
    [name] = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]  # of Linux, of macOS
    return name


# What a random number is for: keeps the streams of one seed apart.
PURPOSES = {"weights": 0, "step": 1, "augment": 2, "mix": 3, "read": 4, "evaluation": 5}


def derive_seed(purpose: str, *key: int) -> int:
    """A 63-bit seed, a function of the purpose and the key alone, unrelated for neighbouring keys.

    Randomness is a function and not a state: what happens in a step depends on (seed, step, rank),
    so a resumed run draws the same numbers without anything saved.
    """
    return int(np.random.SeedSequence((PURPOSES[purpose], *key)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def derive_seeds(purpose: str, key: tuple[int | np.ndarray, ...], last: np.ndarray) -> np.ndarray:
    """derive_seed(purpose, *key, each) for each of `last` (n,), int64: done together each takes a tenth
    of the time. Of an array (n,) in the key, of numbers below 2**32, each has its own.

    NumPy's SeedSequence (after O'Neill 2015, https://www.pcg-random.org/posts/developing-a-seed_seq-alternative.html)
    of a pool of four words, whose constants and order of operations NumPy promises to keep.
    """
    if len(last) and int(last.max()) >= 2**32:  # which make two words
        columns = [np.broadcast_to(part, last.shape).tolist() for part in key]
        return np.array([derive_seed(purpose, *each) for each in zip(*columns, last.tolist(), strict=True)], np.int64)
    words: list[Any] = []
    for part in (PURPOSES[purpose], *key):
        if isinstance(part, np.ndarray):
            words.append(part.astype(np.uint32))
        else:
            numbers = [part >> shift & 0xFFFFFFFF for shift in range(0, max(part.bit_length(), 1), 32)]
            words += [np.full(len(last), number, np.uint32) for number in numbers]
    words.append(last.astype(np.uint32))
    constant = 0x43B0D7E5

    def hashed(word: np.ndarray, factor: int) -> np.ndarray:
        nonlocal constant
        word = word ^ constant
        constant = constant * factor & 0xFFFFFFFF
        word = word * constant
        return word ^ (word >> 16)

    def mixed(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        one = one * 0xCA01F9DD - hashed(other, 0x931E8875) * 0x4973F715
        return one ^ (one >> 16)

    nothing = np.zeros(len(last), np.uint32)
    pool = [hashed(word, 0x931E8875) for word in (words + [nothing] * 3)[:4]]
    for source in range(4):
        for place in range(4):
            if place != source:
                pool[place] = mixed(pool[place], pool[source])
    for word in words[4:]:
        pool = [mixed(each, word) for each in pool]
    constant = 0x8B51F9DD
    low, high = (hashed(word, 0x58F38DED).astype(np.uint64) for word in pool[:2])
    return ((high << 32 | low) >> 1).astype(np.int64)


class PendingSum:
    """A sum over ranks under way, read later on the host: the step goes on while it travels.

    values: a 1-D tensor on the device; summed in place.
    """

    def __init__(self, values: "torch.Tensor"):
        import torch
        import torch.distributed as dist

        self._values, self._ready = values, None
        self._work = dist.all_reduce(values, async_op=True) if dist.is_initialized() else None
        if values.is_cuda:
            # Copied and marked at this point of the stream: result() then waits for what was queued
            # before, not for the backward pass queued after.
            if self._work is not None:
                self._work.wait()
            self._values = values.to("cpu", non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()

    def result(self) -> list[float]:
        """The summed values. Waits for them: the only point of a step where the host waits."""
        if self._ready is not None:
            self._ready.synchronize()
        elif self._work is not None:
            self._work.wait()
        return self._values.tolist()


def sum_over_ranks(values: "torch.Tensor") -> "torch.Tensor":
    """values summed over all ranks, in place; every rank must call it."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def broadcast_from_rank_zero(tensors: "list[torch.Tensor]") -> None:
    """Overwrite the tensors of all ranks with rank 0's; every rank must call it."""
    import torch.distributed as dist

    if dist.is_initialized():
        for tensor in tensors:
            dist.broadcast(tensor, src=0)


def gather_rows(rows: "torch.Tensor") -> "torch.Tensor":
    """The rows (n, m) of all ranks below each other (world size * n, m); n must be the same on each."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        return rows
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows)
    return torch.cat(parts)


def gather_texts(texts: list[str]) -> list[str]:
    """The texts of all ranks, rank by rank; every rank must call it."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return texts
    parts: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, texts)
    return [text for part in parts for text in part]


def from_rank_zero(text: str | None) -> str | None:
    """Rank 0's text on every rank, so that all act on one decision; every rank must call it."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return text
    box = [text]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def any_rank(flag: bool, device: "torch.device") -> bool:
    """Whether the flag is set on any rank; every rank must call it."""
    import torch

    return bool(sum_over_ranks(torch.tensor([float(flag)], device=device)).item())

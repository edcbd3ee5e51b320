"""Have glibc keep the memory that torch frees: a step's tensors are those of the last one, page by page.

Left alone, it gives large tensors back to the system at once, which hands out and clears each page anew: a tenth of a
small network's step on a CPU. All of it is decided before a process has threads: malloc gives each an arena of its own,
too small for large tensors. Other systems' malloc is left as it is.
"""

import ctypes
import os

# The names in malloc.h, and those that a process reads from its environment when it starts.
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8
NEVER = 2**31 - 1
VARIABLES = {"MALLOC_TRIM_THRESHOLD_": str(NEVER), "MALLOC_MMAP_MAX_": "0", "MALLOC_ARENA_MAX": "1"}


def keep_memory() -> None:
    """In this process: to be called before anything starts a thread."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not _users():
        mallopt(M_TRIM_THRESHOLD, NEVER)
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_ARENA_MAX, 1)


def variables() -> dict[str, str]:
    """For the environment of processes to come; what the user has set there stays."""
    return {} if _users() else VARIABLES


def _users() -> bool:
    """Whether the user has settings of malloc's."""
    return bool(VARIABLES.keys() & os.environ.keys()) or "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")

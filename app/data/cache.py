"""Data that every node needs, fetched once a node: by one of its processes, the others wait.

What is fetched appears whole or not at all: it is written beside its place, then renamed. What was broken
off goes on where it stopped.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import IO

from app.config import Config
from app.errors import BadInput
from app.storage import File, Storage

MIB = 2**20
THREADS = 16
# How often a process that waits for another one to fetch looks whether it has.
POLL_S = 0.2
# Called in a process that waits for another one of its node to fetch, whenever that has fetched more.
progress: ContextVar[Callable[[], None]] = ContextVar("progress", default=lambda: None)
# Files that are waited for at a time: what waits for a thread takes memory.
BATCH = 1024


def on_this_node(config: Config) -> Config:
    """The config with the path of this node's copy, where --data-dir is a URI. Raises BadInput.

    Not of data that is read where it lies, nor for a function of the user's own, which decides by itself.
    """
    if config.data_dir is None or "://" not in config.data_dir or config.dataset == "parquet" or ":" in config.dataset:
        return config
    return config.model_copy(update={"data_dir": str(local_copy(config.data_dir, config.cache_dir))})


def local_copy(uri: str, cache_dir: str | Path | None = None) -> Path:
    """The path of this node's copy of a folder or a file. Raises BadInput if it cannot be had.

    Its name follows from the names, sizes and times of what lies at the URI: what has changed there is
    fetched anew.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    cache, flag = Path(cache_dir or os.path.join(home, "evenkeel")), f"--data-dir {uri}"
    source = Storage(uri, "--data-dir")
    files = source.files()
    if not files:
        raise BadInput(f"{flag}: there are no files" if source.exists() else f"{flag}: no such file or directory")
    if outside := [file.path for file in files if ".." in file.path.split("/")]:  # an object's name may have it
        raise BadInput(f"{flag}: {outside[0]} would be written outside of the copy: rename it")
    name = hashlib.sha256(repr((uri, files)).encode()).hexdigest()[:16]
    called = source.root.rpartition("/")[2]
    copy, unfinished = cache / name / called, cache / f".{name}" / called

    def fetch(file: File) -> None:
        fetch_file(source, file, unfinished / file.path if file.path else unfinished)

    with alone(cache / f"{name}.lock", flag, unfinished.parent):
        if copy.exists():
            return copy
        size = sum(file.size for file in files) - size_of(unfinished.parent)
        if (free := shutil.disk_usage(cache).free) < size:
            raise BadInput(
                f"{flag}: {size // MIB:,} MiB are to be fetched, and there is room for {free // MIB:,} in {cache}: "
                "give a --cache-dir with more"
            )
        print(f"fetching {uri}: {len(files):,} files, {size // MIB:,} MiB, into {copy}", flush=True)
        try:
            # The threads have ended before another process may go on.
            with ThreadPoolExecutor(THREADS) as pool:
                for first in range(0, len(files), BATCH):
                    list(pool.map(fetch, files[first : first + BATCH]))
            copy.parent.mkdir(exist_ok=True)
            os.rename(unfinished, copy)
            unfinished.parent.rmdir()
        except OSError as error:
            raise BadInput(
                f"{flag} could not be fetched into {cache}: {error}; the same command goes on with what is there"
            ) from None
    return copy


def fetch_file(source: Storage, file: File, target: Path) -> None:
    """Fetch what the target lacks of a file. Raises OSError if it cannot be written, or is another file by now."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.touch()  # an empty one needs no request
    if target.stat().st_size < file.size:
        source.fetch(file.path, target, file.size)
    if (size := target.stat().st_size) != file.size:
        raise OSError(f"{source.uri(file.path)} has {size:,} bytes, and had {file.size:,}: it changed meanwhile")


@contextlib.contextmanager
def alone(lock: Path, flag: str, growing: Path) -> Iterator[None]:
    """One process of this node at a time; the lock of one that is killed ends with it. Raises BadInput.

    growing: the folder that the process which has the lock writes to. While it grows, the others make progress too.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("a")
    except OSError as error:
        raise BadInput(f"{flag}: {lock.parent} cannot be written to ({error.strerror})") from None
    with file:
        size = None
        while not _is_locked(file):
            began, before, size = time.monotonic(), size, size_of(growing)
            if size != before:
                progress.get()()
            time.sleep(max(POLL_S, 20 * (time.monotonic() - began)))  # of many files it takes long to find the size
        yield


def _is_locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder, which another process may be writing to; 0 if there is none."""
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # it has been renamed meanwhile
                total += os.stat(os.path.join(directory, name)).st_size
    return total

"""Temporary folders that do not outlive their process: what a killed process leaves, the next one removes."""

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import IO

PREFIX, OWNER = "evenkeel-", ".owner"

# The folder of this process, and the file in it whose lock says that the process is alive.
_own: tuple[Path, IO[str]] | None = None
_one_at_a_time = threading.Lock()


def scratch_folder() -> Path:
    """Return a new empty folder in the system's temporary directory. It is removed when the process exits; if the
    process is killed, the next process that asks for one removes it."""
    global _own
    with _one_at_a_time:
        if _own is None:
            _remove_abandoned()
            _own = _claim()
            atexit.register(_remove_own)
    return Path(tempfile.mkdtemp(dir=_own[0]))


def _claim() -> tuple[Path, IO[str]]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        file = (folder / OWNER).open("w")
        fcntl.flock(file, fcntl.LOCK_EX)
        if (folder / OWNER).exists():
            return folder, file
        file.close()  # another process took the folder for an abandoned one before it was locked


def _remove_own() -> None:
    assert _own is not None
    shutil.rmtree(_own[0], ignore_errors=True)
    _own[1].close()


def _remove_abandoned() -> None:
    """Remove the folders of this user whose owner is gone: nobody holds the lock."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(
            OSError
        ):  # another user's, without an owner's file, or being removed by another process
            if folder.lstat().st_uid != os.geteuid():
                continue
            with (folder / OWNER).open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises BlockingIOError while the owner is alive
                shutil.rmtree(folder)


def _forget() -> None:
    """In a forked process: it has a copy of the owner's file, which would keep the lock when the owner is gone."""
    global _own, _one_at_a_time
    _one_at_a_time = threading.Lock()  # another thread may have held it
    if _own is not None:
        _own[1].close()
        atexit.unregister(_remove_own)  # the folder is the parent's
        _own = None


os.register_at_fork(after_in_child=_forget)

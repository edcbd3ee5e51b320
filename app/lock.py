"""One job at a time for a run's name."""

import contextlib
import fcntl
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from app.errors import BadInput
from app.storage import Storage

LOCK = "run.lock"
# An object store has no locks: there the holder renews its note, and one that is not renewed is stale.
RENEW_S, STALE_S = 5.0, 15.0


# A process that is forked, as a DataLoader's are, has the files too, and would hold them when this one is gone.
_files: set[IO[str]] = set()
os.register_at_fork(after_in_child=lambda: [file.close() for file in _files])


@contextlib.contextmanager
def held(storage: Storage, run_name: str) -> Iterator[None]:
    """Hold a run's folder against a second job. Raises BadInput, saying who holds it.

    A holder whose process is gone blocks nobody: the system's lock on a file ends with the process, and
    a note in an object store is no longer renewed, which takes STALE_S to find out.
    """
    me = f"process {os.getpid()} on {socket.gethostname()}"
    with _locked(storage.local, run_name, me) if storage.local else _noted(storage, run_name, me):
        yield


def is_held(storage: Storage) -> bool:
    """Whether a job has it now; of an object store that takes up to STALE_S to find out."""
    if storage.local:
        if not (storage.local / LOCK).exists():
            return False
        with open(storage.local / LOCK) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False
    found, deadline = storage.read(LOCK), time.monotonic() + STALE_S
    while found is not None and time.monotonic() < deadline:
        time.sleep(RENEW_S / 10)
        if storage.read(LOCK) not in (found, None):
            return True
    return False


@contextlib.contextmanager
def _locked(folder: Path, run_name: str, me: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise _refusal(run_name, file.read().strip() or "another process") from None
        except OSError as error:
            raise BadInput(f"--output-dir: {folder} cannot be locked ({error.strerror}); choose another one") from None
        file.truncate(0)
        file.write(me + "\n")
        file.flush()
        _files.add(file)
        try:
            yield
        finally:
            _files.discard(file)


@contextlib.contextmanager
def _noted(storage: Storage, run_name: str, me: str) -> Iterator[None]:
    def note() -> bytes | None:
        return storage.read(LOCK)

    def write() -> bytes:
        # Another one each time: clocks of two machines may differ, so nobody compares times.
        content = json.dumps({"holder": me, "renewed": secrets.token_hex(8)}).encode()
        storage.write(LOCK, content)
        return content

    found, deadline = note(), time.monotonic() + STALE_S
    while found is not None and time.monotonic() < deadline:
        time.sleep(RENEW_S / 10)
        if (now := note()) not in (found, None):
            raise _refusal(run_name, _holder(now))
        found = now
    mine = write()
    time.sleep(RENEW_S / 2)
    if (now := note()) != mine:  # two came at the same moment, and the other one was later
        raise _refusal(run_name, _holder(now))

    ended = threading.Event()

    def renew() -> None:
        nonlocal mine
        while not ended.wait(RENEW_S):
            try:
                if (now := note()) not in (mine, None):
                    print(f"--run-name {run_name} has been taken over by {_holder(now)}: stopping", file=sys.stderr)
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
                mine = write()
            except Exception as error:  # the store does not answer: the next time it may
                print(f"{storage.uri(LOCK)} could not be renewed ({error})", file=sys.stderr)

    thread = threading.Thread(target=renew, name="lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(OSError):  # a note that stays is stale soon
            if note() == mine:
                storage.delete(LOCK)


def _holder(note: bytes | None) -> str:
    try:
        return str(json.loads(note or b"")["holder"])
    except (ValueError, KeyError, TypeError):
        return "another process"


def _refusal(run_name: str, holder: str) -> BadInput:
    return BadInput(
        f"--run-name {run_name} is being trained right now by {holder}; "
        "wait for it, stop it, or choose another --run-name"
    )

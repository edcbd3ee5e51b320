"""One job at a time for a run's name."""

import contextlib
import dataclasses
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

from app.errors import BadInput, TrainingFailed
from app.object_store import ObjectStore
from app.storage import Storage

LOCK = "run.lock"
# An object store has no locks: there the holder renews a note, and one that is not renewed is stale.
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
    note = _Note(storage.remote, me)
    note.take(run_name)
    # A renewal is given up before the next one: the note must not become stale behind a request that hangs.
    note.store = dataclasses.replace(storage.remote, retry_s=RENEW_S)
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(RENEW_S):
            try:
                other = note.renew()
            except Exception as error:  # the store does not answer: the next time it may
                print(f"{storage.uri(LOCK)} could not be renewed ({error})", file=sys.stderr)
                continue
            if other is not None:
                print(f"--run-name {run_name} has been taken over by {_holder(other)}: stopping", file=sys.stderr)
                os.kill(os.getpid(), signal.SIGTERM)
                return

    thread = threading.Thread(target=renew, name="lock", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(BadInput, TrainingFailed):  # a note that stays is stale soon
            note.release()


class _Note:
    """The note of a holder in an object store.

    Each of its writes is conditional on what was read before, so that of two jobs that write at the same moment, or
    of which one's request is slow, one is refused. Where a store does not check conditions, a job that has written
    waits and looks whether its note is still there.
    """

    def __init__(self, store: ObjectStore, me: str):
        self.store, self._me = store, me
        self._written: list[bytes] = []  # the newest last; of one whose request failed it is not known if it arrived
        self._conditional = True

    def take(self, run_name: str) -> None:
        """Raises BadInput if another job holds the name."""
        found, deadline = self.store.get(LOCK), time.monotonic() + STALE_S
        while found is not None and time.monotonic() < deadline:
            time.sleep(RENEW_S / 10)
            now = self.store.get(LOCK)
            if now is not None and now[0] != found[0]:
                raise _refusal(run_name, _holder(now[0]))
            found = now
        version, mine = found[1] if found else None, self._new()
        taken = self.store.put_if(LOCK, mine, version)
        if taken and not self.store.checks_versions(LOCK, mine, version):
            self._conditional = False
            print(
                f"{self.store.uri} has no conditional writes: two jobs named {run_name} that are started within "
                f"{RENEW_S:g} s can overlap for some seconds",
                file=sys.stderr,
            )
            time.sleep(RENEW_S / 2)
            now = self.store.get(LOCK)
            taken = now is not None and now[0] == mine
        if not taken:
            now = self.store.get(LOCK)
            raise _refusal(run_name, _holder(now[0] if now else None))

    def renew(self) -> bytes | None:
        """Return the note of another job that has taken over, if there is one."""
        while True:
            now = self.store.get(LOCK)
            if now is not None and now[0] not in self._written:
                return now[0]
            new = self._new()
            if not self._conditional:
                self.store.put(LOCK, new)
                return None
            if self.store.put_if(LOCK, new, now[1] if now else None):
                return None

    def release(self) -> None:
        now = self.store.get(LOCK)
        if now is not None and now[0] in self._written:
            self.store.delete(LOCK)

    def _new(self) -> bytes:
        # Another one each time: clocks of two machines may differ, so nobody compares times.
        content = json.dumps({"holder": self._me, "renewed": secrets.token_hex(8)}).encode()
        self._written = [*self._written[-100:], content]
        return content


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

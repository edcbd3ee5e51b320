"""One job at a time for a run's name, on a disk and in object stores."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app import lock
from app.errors import BadInput
from app.lock import held, is_held
from app.object_store import open_bucket
from app.storage import Storage
from tests.faulty import FaultyProxy, faulty

ON_STORES = pytest.mark.parametrize("root", ["rclone", "moto"], indirect=True)
# What has conditional writes.
ON_MOTO = pytest.mark.parametrize("root", ["moto"], indirect=True)

# Holds the name until a line is written to it, or says why it is refused.
HOLD = """
import sys
from app import lock
from app.errors import BadInput
from app.storage import Storage
lock.RENEW_S, lock.STALE_S = 0.2, 1.0
try:
    with lock.held(Storage(sys.argv[1]), "r"):
        print("held", flush=True)
        sys.stdin.readline()
except BadInput as error:
    print(error, flush=True)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "RENEW_S", 0.2)
    monkeypatch.setattr(lock, "STALE_S", 1.0)


@pytest.fixture
def storage(root: str) -> Storage:
    return Storage(root)


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the holder is sent SIGTERM."""
    event = threading.Event()
    monkeypatch.setattr(lock.os, "kill", lambda pid, number: number == signal.SIGTERM and event.set())
    return event


@pytest.fixture
def proxy(root: str, moto: str) -> Iterator[FaultyProxy]:
    with faulty(moto) as proxy:
        yield proxy


@pytest.fixture
def another(root: str) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start another job on the same name, with variables of its own."""
    processes: list[subprocess.Popen[str]] = []

    def start(**environment: str) -> "subprocess.Popen[str]":
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes.append(
            subprocess.Popen([sys.executable, "-c", HOLD, root], env={**os.environ, **environment}, **pipes)
        )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def said(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_second_job_on_a_name_is_refused_and_told_who_holds_it(storage: Storage) -> None:
    with (
        held(storage, "r"),
        pytest.raises(BadInput, match=f"--run-name r is being trained right now by process {os.getpid()}"),
        held(storage, "r"),
    ):
        pass
    assert not is_held(storage)
    with held(storage, "r"):  # free again, at once
        assert is_held(storage)


def test_a_dead_holder_does_not_block(storage: Storage, another: Callable[[], "subprocess.Popen[str]"]) -> None:
    holder = another()
    assert said(holder) == "held"
    holder.kill()
    holder.wait()
    with held(storage, "r"):
        pass


@pytest.mark.parametrize("root", ["disk", "moto"], indirect=True)
def test_of_several_that_start_at_once_one_gets_it(storage: Storage, stopped: threading.Event) -> None:
    assert at_once(storage) == ["held", *["refused"] * 3]


@ON_MOTO
def test_of_several_that_wait_for_a_dead_holder_one_gets_it(storage: Storage, stopped: threading.Event) -> None:
    storage.write(lock.LOCK, b'{"holder": "a dead one"}')
    assert at_once(storage) == ["held", *["refused"] * 3]


def at_once(storage: Storage) -> list[str]:
    """What becomes of four jobs that want the name at the same moment."""
    start, all_done, outcomes = threading.Barrier(4), threading.Barrier(4), []

    def job() -> None:
        start.wait()
        try:
            with held(storage, "r"):
                outcomes.append("held")
                all_done.wait()
        except BadInput:
            outcomes.append("refused")
            all_done.wait()

    threads = [threading.Thread(target=job) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(outcomes)


@ON_MOTO
def test_a_slow_write_does_not_take_the_name_from_its_holder(
    storage: Storage, another: Callable[..., "subprocess.Popen[str]"], proxy: FaultyProxy, stopped: threading.Event
) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def wait(method: str, path: str) -> None:
        if method == "PUT":
            writing.set()
            go_on.wait()

    proxy.fault = wait
    slow = another(AWS_ENDPOINT_URL=proxy.endpoint)
    assert writing.wait(30)  # it has seen that the name is free
    with held(storage, "r"):
        go_on.set()
        assert f"is being trained right now by process {os.getpid()}" in said(slow)
    assert not stopped.is_set()


@ON_MOTO
def test_a_holder_that_could_not_renew_stops_when_it_was_overtaken(
    storage: Storage,
    another: Callable[..., "subprocess.Popen[str]"],
    proxy: FaultyProxy,
    stopped: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    direct = os.environ["AWS_ENDPOINT_URL"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    open_bucket.cache_clear()
    with held(storage, "r"):
        proxy.fault = lambda method, path: "busy"
        other = another(AWS_ENDPOINT_URL=direct)
        assert said(other) == "held"
        assert not stopped.is_set()
        proxy.fault = lambda method, path: None
        assert stopped.wait(30)
    with pytest.raises(BadInput, match=f"by process {other.pid} on"), held(storage, "r"):
        pass


@ON_MOTO
def test_a_holder_keeps_the_name_on_a_network_that_loses_answers(
    storage: Storage, proxy: FaultyProxy, stopped: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    monkeypatch.setattr(lock, "RENEW_S", 0.02)
    open_bucket.cache_clear()
    puts, renewed = [], threading.Event()

    def fault(method: str, path: str) -> str | None:
        """The answers to the first, the third, the fifth, ... write are lost."""
        if method != "PUT":
            return None
        puts.append(path)
        if len(puts) == 20:
            renewed.set()
        return "lost" if len(puts) % 2 else None

    proxy.fault = fault
    with held(storage, "r"):
        assert renewed.wait(60)
        assert not stopped.is_set()


def test_what_a_store_without_conditional_writes_cannot_do_is_said(
    storage: Storage, root: str, rclone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with held(storage, "r"):
        on_rclone = os.environ.get("AWS_ENDPOINT_URL") == rclone
    assert (f"{root} has no conditional writes: two jobs named r" in capsys.readouterr().err) == on_rclone


def test_processes_that_the_holder_has_forked_do_not_hold_it(tmp_path: Path) -> None:
    """Those of a DataLoader, which outlive a holder that is killed by seconds."""
    code = (
        "import os, signal; from app.lock import held; from app.storage import Storage\n"
        f"with held(Storage({str(tmp_path)!r}), 'r'):\n"
        "    there, here = os.pipe()\n"
        "    if os.fork() == 0: os.write(here, b'.'), signal.pause()\n"
        "    os.read(there, 1)\n"
        "    os._exit(9)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    try:
        assert holder.wait() == 9
        with held(Storage(str(tmp_path)), "r"):
            pass
    finally:
        os.killpg(holder.pid, signal.SIGKILL)  # the one that was forked


@ON_STORES
def test_a_note_of_another_program_is_stale_too(storage: Storage) -> None:
    storage.write(lock.LOCK, b"?")
    with held(storage, "r"):
        assert b"process" in (storage.read(lock.LOCK) or b"")
    assert storage.read(lock.LOCK) is None


@ON_STORES
def test_a_holder_that_was_overtaken_stops_and_leaves_the_others_note(
    storage: Storage, stopped: threading.Event
) -> None:
    with held(storage, "r"):
        storage.write(lock.LOCK, b'{"holder": "process 1 on another machine"}')
        assert stopped.wait(10)
    assert b"another machine" in (storage.read(lock.LOCK) or b"")


@ON_STORES
def test_a_note_that_was_deleted_is_written_again(storage: Storage, stopped: threading.Event) -> None:
    with held(storage, "r"):
        storage.delete(lock.LOCK)
        while storage.read(lock.LOCK) is None:
            assert not stopped.is_set()
        assert is_held(storage)

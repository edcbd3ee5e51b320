"""One job at a time for a run's name, on a disk and in an object store."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from app import lock
from app.errors import BadInput
from app.lock import held
from app.storage import Storage


@pytest.fixture(params=["disk", "object store"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    monkeypatch.setattr(lock, "RENEW_S", 0.2)
    monkeypatch.setattr(lock, "STALE_S", 1.0)
    return Storage(str(tmp_path) if request.param == "disk" else f"file://{tmp_path}")


def test_a_second_job_on_a_name_is_refused_and_told_who_holds_it(storage: Storage) -> None:
    with (
        held(storage, "r"),
        pytest.raises(BadInput, match=f"--run-name r is being trained right now by process {os.getpid()}"),
        held(storage, "r"),
    ):
        pass
    began = time.monotonic()
    with held(storage, "r"):  # free again, at once
        assert time.monotonic() - began < lock.STALE_S


def test_a_dead_holder_does_not_block(storage: Storage) -> None:
    code = (
        "import os; from app.lock import held; from app.storage import Storage\n"
        f"with held(Storage({storage.root!r}), 'r'): os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    with held(storage, "r"):
        pass


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


def test_a_note_of_another_program_is_stale_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "STALE_S", 0.2)
    (tmp_path / "run.lock").write_text("?")
    with held(Storage(f"file://{tmp_path}"), "r"):
        assert "process" in (tmp_path / "run.lock").read_text()
    assert not (tmp_path / "run.lock").exists()


def test_a_holder_that_was_overtaken_stops_and_leaves_the_others_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "RENEW_S", 0.1)
    stopped = threading.Event()
    monkeypatch.setattr(lock.os, "kill", lambda pid, number: stopped.set())
    with held(Storage(f"file://{tmp_path}"), "r"):
        (tmp_path / "run.lock").write_text('{"holder": "process 1 on another machine"}')
        assert stopped.wait(10)
    assert "another machine" in (tmp_path / "run.lock").read_text()

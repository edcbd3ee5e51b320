"""Temporary folders that a killed process leaves are removed, and those of a living one are not."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

TAKE = """
import os, signal, sys
from app.scratch import scratch_folder
folder = scratch_folder()
(folder / "file").touch()
print(folder, flush=True)
"""
WAIT = "sys.stdin.readline()"
# A child that outlives its parent, as a loader's process does by some seconds.
FORK = """
child = os.fork()
if not child: os.setsid(), signal.pause()
print(child, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@contextlib.contextmanager
def process(code: str = WAIT) -> Iterator[tuple[Path, "subprocess.Popen[str]"]]:
    """A process that has a folder, until it is left."""
    command = [sys.executable, "-c", TAKE + code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        yield Path(line(started)), started
        started.kill()


def line(started: "subprocess.Popen[str]") -> str:
    assert started.stdout is not None
    return started.stdout.readline().strip()


def test_what_a_killed_process_left_is_removed_by_the_next(temporary: Path) -> None:
    with process() as (left, _):
        pass
    assert (left / "file").exists()
    with process() as (used, _):
        assert not left.parent.exists()
        assert (used / "file").exists()


def test_what_a_living_process_uses_stays(temporary: Path) -> None:
    with process() as (used, _):
        with process("") as (gone, ended):
            ended.wait()
        assert (used / "file").exists()
        assert not gone.parent.exists()  # it has removed its own at its end
        assert os.listdir(temporary) == [used.parent.name]


def test_a_forked_process_does_not_keep_it(temporary: Path) -> None:
    with process(FORK) as (left, killed):
        child = int(line(killed))
    try:
        with process():
            assert not left.parent.exists()
    finally:
        os.kill(child, signal.SIGKILL)


def test_folders_of_other_programs_stay(temporary: Path) -> None:
    other = Path(tempfile.mkdtemp(prefix="evenkeel-", dir=temporary))
    with process():
        assert other.exists()

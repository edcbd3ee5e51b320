"""End a worker that no longer makes progress, after reporting where it hangs."""

import contextlib
import faulthandler
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

# After the report: the other ranks, which wait for this one, come to the same end and report too.
GRACE_S = 2.0
# Bytes written to disk that count as progress of the setup, if they are written within this share of its timeout (less
# than that may be a log), and how often they are counted, as a share of that.
PROGRESS_BYTES, PROGRESS_SHARE, LOOK_SHARE = 2**20, 1 / 4, 1 / 5
ROOT = Path(__file__).parents[1]
APPLICATION = (f"{ROOT / 'app'}{os.sep}", f"{ROOT / 'tune'}{os.sep}")


class Watchdog:
    """Watches the thread that calls start(), until close(): its setup up to the first step(), then its steps.

    In the setup, bytes that this process and its children write to disk are signs of life, as is beat(). A rank that
    hangs makes all the others wait in a collective: in a step each finds this out by itself. The process ends with exit
    code 1, since a thread that hangs cannot be ended in another way; Ray Train then starts the workers again. A process
    that has more to do than the training ends itself when it is reported.
    """

    def __init__(
        self,
        setup_timeout_s: float,
        hang_timeout_s: float,
        name: str,
        report: Callable[[str, str], None],
        ends_process: bool = True,
    ):
        """report(text, stacks) is called once before the end: one line, and the stacks of all threads."""
        self._ends_process = ends_process
        self._timeout_s, self._hang_timeout_s = setup_timeout_s, hang_timeout_s
        self._name, self._report = name, report
        self._interval_s = min(1.0, setup_timeout_s / 10, hang_timeout_s / 10)
        self._thread_id, self._at = 0, 0.0
        self._in_setup, self._is_resting = True, False
        self._closed = threading.Event()

    def start(self) -> None:
        self._at = time.monotonic()
        self._thread_id = threading.get_ident()
        self._arm(self._timeout_s)
        threading.Thread(target=self._watch, args=(Written(),), name="watchdog", daemon=True).start()

    def beat(self) -> None:
        """Record a sign of life, from any thread."""
        self._at = time.monotonic()

    def step(self) -> None:
        """Record a step, and end a rest. From the first step on the timeout is that of steps."""
        self.beat()
        self._is_resting = False
        if self._in_setup:
            self._in_setup, self._timeout_s = False, self._hang_timeout_s
            self._arm(self._timeout_s)

    def rest(self) -> None:
        """Expect nothing until step() is called."""
        self._is_resting = True

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Expect nothing within: the thread waits for other ranks, which have watchdogs of their own."""
        rested, self._is_resting = self._is_resting, True
        yield
        self.beat()
        self._is_resting = rested

    def close(self) -> None:
        self._closed.set()

    def _watch(self, written: "Written") -> None:
        while not self._closed.wait(self._interval_s):
            if self._in_setup and written.grew(self._timeout_s * PROGRESS_SHARE):
                self.beat()
            left = self._timeout_s - (time.monotonic() - self._at)
            if self._is_resting:
                left = self._timeout_s
            if left < 0:
                self._end()
                return
            self._arm(left)
        faulthandler.cancel_dump_traceback_later()

    def _arm(self, left_s: float) -> None:
        """Where the watching thread gets no turn, since code in C holds the interpreter's lock, the process
        ends all the same, with the stacks in the worker's log."""
        faulthandler.dump_traceback_later(left_s + 10 * self._interval_s, file=2, exit=True)

    def _end(self) -> None:
        frames, names = sys._current_frames(), {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = "\n".join(
            f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
            for ident, frame in sorted(frames.items(), key=lambda item: item[0] != self._thread_id)
        )
        text = self._message(_place(traceback.extract_stack(frames[self._thread_id])))
        try:
            print(f"{text}\n{stacks}", file=sys.stderr, flush=True)
            self._report(text, stacks)
            if self._ends_process:
                time.sleep(GRACE_S)
            else:
                faulthandler.cancel_dump_traceback_later()
        finally:  # whatever the report came to
            if self._ends_process:
                os._exit(1)

    def _message(self, where: str) -> str:
        if not self._in_setup:
            return f"{self._name} made no step for {self._timeout_s:g} s and was ended in {where}"
        return (
            f"{self._name} was ended in {where}: its setup made no progress for {self._timeout_s:g} s "
            "(--setup-timeout-s). If it does not hang but computes for longer without writing files, raise "
            "--setup-timeout-s"
        )


class Written:
    """Bytes written to disk by this process and the children it has started since, with their own children."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        # Those of before are not the user's: a local Ray's, where training is in the command's process.
        self._others = {child.pid for child in self._process.children()}
        self._before, self._since, self._looked_at = self._count(), time.monotonic(), time.monotonic()

    def grew(self, within_s: float) -> bool:
        """Return True if PROGRESS_BYTES have been written in less than that time; then it begins again."""
        now = time.monotonic()
        if now - self._looked_at < within_s * LOOK_SHARE:  # looking for children reads a file for each process
            return False
        self._looked_at, count = now, self._count()
        grew = count - self._before >= PROGRESS_BYTES
        if grew or count < self._before or now - self._since > within_s:  # less: a child has ended
            self._before, self._since = count, now
        return grew

    def _count(self) -> int:
        if not hasattr(self._process, "io_counters"):  # macOS: what is written there is unknown
            return 0
        children = [child for child in self._process.children() if child.pid not in self._others]
        return sum(_written_by(each) for each in [self._process, *children]) + sum(
            _written_by(each) for child in children for each in _descendants(child)
        )


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:  # it has ended
        return []


def _written_by(process: Any) -> int:
    try:
        counters = process.io_counters()
    except psutil.Error:  # it has ended, or is another user's
        return 0
    return max(counters.write_bytes, getattr(counters, "write_chars", 0))


def _place(stack: traceback.StackSummary) -> str:
    """Return the innermost place in a stack, and who called it in the user's own files.

    The lock or file that a thread waits in is Python's own; who waits for it tells more.
    """
    shown = [frame for frame in stack if not _is_standard_library(frame.filename)]
    own = [each for each in shown if not each.filename.startswith(APPLICATION) and "site-packages" not in each.filename]
    innermost = f"{shown[-1].name} ({shown[-1].filename}:{shown[-1].lineno})"
    if not own or own[-1] is shown[-1]:
        return innermost
    return f"{innermost}, called from {own[-1].name} ({own[-1].filename}:{own[-1].lineno})"


def _is_standard_library(filename: str) -> bool:
    return filename.startswith((sysconfig.get_path("stdlib"), "<frozen ")) and "site-packages" not in filename

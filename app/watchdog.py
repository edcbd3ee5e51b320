"""Ends a worker that makes no steps any more, after it has said where it stands."""

import faulthandler
import math
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable

# After the report: the other ranks, which wait for this one, come to the same end and report too.
GRACE_S = 2.0


class Watchdog:
    """Watches the thread that calls alive(), from its first call on, until close().

    A rank that hangs makes all the others wait in a collective: each finds this out by itself. The
    process ends with exit code 1, since a thread that hangs cannot be ended in another way; Ray Train
    then starts the workers again. A process that has more to do than the training ends itself when it is reported.
    """

    def __init__(self, timeout_s: float, name: str, report: Callable[[str, str], None], ends_process: bool = True):
        """report(text, stacks) is called once before the end: one line, and the stacks of all threads."""
        self._ends_process = ends_process
        self._timeout_s, self._name, self._report = timeout_s, name, report
        self._interval_s = min(1.0, timeout_s / 10)
        self._thread_id, self._at = 0, 0.0
        self._closed = threading.Event()

    def alive(self) -> None:
        self._at = time.monotonic()
        if not self._thread_id:
            self._thread_id = threading.get_ident()
            self._arm(self._timeout_s)
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def rest(self) -> None:
        """Expect nothing until alive() is called again."""
        self._at = math.inf

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(self._interval_s):
            left = self._timeout_s - (time.monotonic() - self._at)
            if left < 0:
                self._end()
                return
            self._arm(min(left, self._timeout_s))
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
        stack = traceback.extract_stack(frames[self._thread_id])
        # The lock or file that it waits in is Python's own; who waits for it tells more.
        innermost = [frame for frame in stack if not _is_standard_library(frame.filename)][-1]
        where = f"{innermost.name} ({innermost.filename}:{innermost.lineno})"
        text = f"{self._name} made no step for {self._timeout_s:g} s and was ended in {where}"
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


def _is_standard_library(filename: str) -> bool:
    return filename.startswith(sysconfig.get_path("stdlib")) and "site-packages" not in filename

"""Ctrl-C and SIGTERM as requests: first to end in order, then to leave."""

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

# The name of the thread that trains in the command's process.
TRAINING_HERE = "training"


class Interrupt:
    """Counts the signals while it is entered: once asks to save and end, twice to end without waiting
    for that. The third time ends the process on the spot."""

    def __init__(self) -> None:
        self.signal, self.count = 0, 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self.listen()
        return self

    def listen(self) -> None:
        """To be called again after ray.init(), which puts a handler of its own in the place of SIGTERM's."""
        if threading.current_thread() is threading.main_thread():  # only there can they be caught
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.signal(number, self._caught)
                self._before.setdefault(number, before)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self.signal, self.count = number, self.count + 1
        if self.count > 2:
            os._exit(128 + number)


def exit_with(code: int) -> NoReturn:
    """End the process, also where training goes on that nobody waits for: Python, which takes itself down first,
    would crash under it."""
    sys.stdout.flush()
    sys.stderr.flush()
    if any(thread.name == TRAINING_HERE for thread in threading.enumerate()):
        os._exit(code)
    sys.exit(code)

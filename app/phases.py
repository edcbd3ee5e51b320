"""Where the seconds before the first step go: time stamps on stderr, which -v shows."""

import sys
import time
from dataclasses import dataclass
from typing import Self

import psutil


@dataclass(frozen=True)
class Phases:
    """began: when the command did, in seconds since 1970; workers are handed it. None: nothing is shown."""

    began: float | None = None

    @classmethod
    def of_this_process(cls) -> Self:
        return cls(psutil.Process().create_time())

    def __call__(self, text: str) -> None:
        if self.began is not None:
            print(f"{time.time() - self.began:6.1f} s  {text}", file=sys.stderr, flush=True)


NO_PHASES = Phases()

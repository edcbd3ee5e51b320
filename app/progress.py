"""What the person sees while a run goes on: one live line in a terminal, plain lines in a pipe."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live as RichLive
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from app.phases import NO_PHASES, Phases
from app.tracking import Live, Validation

PLAIN_EVERY_S = 10.0
# How often the driver looks for what there is to show.
LOOK_EVERY_S = 0.2


class Display:
    """Show progress: epoch_ended() prints a line; show() is called often and draws one in place, or prints one at an
    interval."""

    def __init__(self, phases: Phases = NO_PHASES) -> None:
        self.console, self.phases = console(), phases
        self._live = RichLive(console=self.console, auto_refresh=False, transient=True)
        self._began, self._printed_at = time.monotonic(), 0.0
        self._printed: Live | None = None
        self._first_step: tuple[float, int] | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._live.stop()

    def event(self, text: str) -> None:
        self.console.print(Text(text))

    def validated(self, validation: Validation) -> None:
        """Shown with the live line; a sweep's trial hands it on."""

    def epoch_ended(self, live: Live) -> None:
        """Print a line with the numbers of the whole epoch."""
        self._printed, self._printed_at = live, time.monotonic()
        self.console.print(Text(self._line(live, self._printed_at, "train/epoch_")))

    def waiting(self, text: str) -> None:
        """For a terminal only: what is being waited for."""
        if self.console.is_terminal:
            self._live.update(Text(text), refresh=True)

    def show(self, live: Live | None) -> None:
        now = time.monotonic()
        if live is None:
            if self._first_step is not None:  # these are other workers
                self._began, self._first_step = now, None
            self.waiting(f"starting workers, {now - self._began:.0f} s")
            return
        if self._first_step is None:
            self._first_step = (now, live["step"])
        line = Text(self._line(live, now))
        if self.console.is_terminal:
            self._live.update(line, refresh=True)
            return
        if live != self._printed and (self._printed is None or now - self._printed_at >= PLAIN_EVERY_S):
            self._printed, self._printed_at = live, now
            self.console.print(line)

    def _line(self, live: Live, now: float, train: str = "train/") -> str:
        """train: what the keys of the training metrics to show begin with."""
        metrics = live["metrics"]
        parts = [f"epoch {live['epoch']}/{live['epochs']}", f"step {live['step']}/{live['total_steps']}"]
        for key, name, form in (
            (f"{train}loss", "loss", ".4f"),
            (f"{train}accuracy", "accuracy", ".4f"),
            ("val/accuracy", "val", ".4f"),
            ("perf/samples_per_s", "samples/s", ",.0f"),
        ):
            if key in metrics:
                parts.append(f"{name} {metrics[key]:{form}}")
        started, first = self._first_step or (now, live["step"])
        if live["step"] > first:
            left = (now - started) / (live["step"] - first) * (live["total_steps"] - live["step"])
            parts.append(f"{int(left // 60)}:{int(left % 60):02d} left")
        return "  ".join(parts)


@contextlib.contextmanager
def counting(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Shows on stderr how many are done of a total that may not be known; call what it gives with each number more."""
    output = Console(stderr=True, highlight=False, soft_wrap=not sys.stderr.isatty())
    began = printed_at = time.monotonic()
    done = 0
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rate]}"))
    columns = (*columns, TimeElapsedColumn(), TimeRemainingColumn())
    # Left to itself it sends stdout there too.
    bar = Progress(*columns, console=output, transient=True, redirect_stdout=False)
    task = bar.add_task(what, total=total, rate="")

    def advance(number: int) -> None:
        nonlocal done, printed_at
        done += number
        now = time.monotonic()
        rate = f"{done:,} {what}, {done / (now - began):,.0f} a second"
        bar.update(task, completed=done, rate=rate)
        if not output.is_terminal and now - printed_at >= PLAIN_EVERY_S:
            printed_at = now
            output.print(Text(rate if total is None else f"{rate}, of {total:,}"))

    with bar if output.is_terminal else contextlib.nullcontext():
        yield advance


def print_table(rows: dict[str, str]) -> None:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")  # a path is of no use with its end cut off
    for name, value in rows.items():
        table.add_row(name, Text(value))  # a path may look like markup
    console().print(table)


def console() -> Console:
    """stdout; lines are not broken where they go to a file."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=not sys.stdout.isatty())

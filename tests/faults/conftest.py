"""The figures that the fault tests measure, as a table at the end: uv run pytest -m faults --faults-table FILE"""

import os
import platform
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.common import COMMANDS

Figures = Callable[..., None]
COLUMNS = ("fault", "outcome", "steps lost", "start to first step, s", "fault to next step, s")
HEAD = """# Faults, and what came of them

Each is injected for real: processes are killed, nodes removed, files cut off, servers taken away. Steps lost are
those that were computed again. A start is counted from fit() to the first step, a recovery from the fault to the first
new step. Made on {cores} cores of {processor} by

    uv run pytest -m faults --faults-table docs/faults.md

"""
ROWS = pytest.StashKey[list[tuple[str, ...]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    """Record what came of a fault: steps that were computed again, and seconds."""

    def record(
        fault: str,
        outcome: str,
        steps_lost: int | None = None,
        start_s: float | None = None,
        recovery_s: float | None = None,
    ) -> None:
        seconds = ["" if value is None else f"{value:.1f}" for value in (start_s, recovery_s)]
        request.config.stash[ROWS].append((fault, outcome, "" if steps_lost is None else str(steps_lost), *seconds))

    return record


@pytest.fixture(autouse=True)
def no_command_is_left() -> Iterator[None]:
    yield
    while COMMANDS:
        process = COMMANDS.pop()
        if process.poll() is None:  # the test failed
            process.kill()
            process.wait()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("faults"):
            item.add_marker(pytest.mark.timeout(900))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    path = config.getoption("--faults-table")
    if not config.stash[ROWS]:
        return
    # Rows of tests that were not run now stay as they are.
    unique = {row[0]: row for row in [*(rows_in(Path(path)) if path else ()), *config.stash[ROWS]]}
    rows = sorted(unique.values(), key=lambda row: float(row[0].split()[0]))
    lines = ["| " + " | ".join(row) + " |" for row in (COLUMNS, ("---",) * len(COLUMNS), *rows)]
    terminalreporter.write_line("\n".join(["", *lines]))
    if path:
        Path(path).write_text(HEAD.format(cores=os.cpu_count(), processor=processor()) + "\n".join(lines) + "\n")


def rows_in(path: Path) -> list[tuple[str, ...]]:
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines if line.startswith("| ")]
    return [row for row in rows if row[0][0].isdigit()]


def processor() -> str:
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.machine()

"""The figures that the fault tests measure, as a table at the end: uv run pytest -m faults --faults-table FILE"""

from collections.abc import Callable
from pathlib import Path

import pytest

Figures = Callable[..., None]
COLUMNS = ("fault", "outcome", "steps lost", "start to first step, s", "fault to next step, s")
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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    unique = {row[0]: row for row in config.stash[ROWS]}
    rows = sorted(unique.values(), key=lambda row: float(row[0].split()[0]))
    if not rows:
        return
    lines = ["| " + " | ".join(row) + " |" for row in (COLUMNS, ("---",) * len(COLUMNS), *rows)]
    terminalreporter.write_line("\n".join(["", *lines]))
    if path := config.getoption("--faults-table"):
        Path(path).write_text("\n".join(lines) + "\n")

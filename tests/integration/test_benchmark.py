"""The benchmark on a local Ray: whole, interrupted, and with a number of workers that fails."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from app import benchmark
from app.clock import PARTS, StepTimes

pytestmark = [
    pytest.mark.usefixtures("local_ray"),
    pytest.mark.filterwarnings("ignore"),  # ray's, mlflow's and alembic's own
]

WORDS = ["--dataset", "tests.common:tiny_splits", "--model", "tests.common:PlainNet", "--batch-size", "8"]
WORDS += ["--num-workers", "1,2", "--cpus-per-worker", "0.5", "--out", "table"]


@pytest.mark.slow
@pytest.mark.ci
def test_a_table_that_adds_up_and_nothing_else_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # Eight steps an epoch, of which the last has one sample.
    words = [*WORDS, "--warmup", "8", "--steps", "16", "--checkpoint-every", "4", "--log-every", "2"]
    assert benchmark.main(words) == 0
    output = capsys.readouterr().out
    told = json.loads(output.splitlines()[-1])
    assert (told["scaling"], told["device"], told["interrupted"], told["error"]) == ("strong", "cpu", False, None)
    assert [row["workers"] for row in told["rows"]] == [1, 2]
    for row in told["rows"]:
        assert sum(row["parts_ms"].values()) == pytest.approx(row["step_ms"], rel=0.02)
        assert row["samples_per_s"] * row["step_ms"] / 1000 == pytest.approx(57 / 8)
        assert all(row["parts_ms"][part] > 0 for part in PARTS)
    assert f"{told['rows'][1]['samples_per_s']:,.0f}" in output  # the table
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table.json", "table.png"]
    written = json.loads((tmp_path / "table.json").read_text())
    by_rank = written.pop("parts_ms_by_rank")
    assert written == told
    assert [len(ranks) for ranks in by_rank.values()] == [1, 2]
    assert by_rank["2 workers"][0] == told["rows"][1]["parts_ms"]
    assert by_rank["2 workers"][1]["checkpoint"] < by_rank["2 workers"][0]["checkpoint"]  # rank 0 saves


def measured_once(then: tuple[Any, str | None, int], number: int = 0) -> Any:
    """Stands for benchmark.measure: one row, and then this, with a signal before it if there is a number."""
    times = StepTimes(10, 100, [dict.fromkeys(PARTS, 0.1)])

    def measure(config: Any, *_: Any) -> tuple[Any, str | None, int]:
        benchmark.run_storage(config).write("run.json", b"{}")
        if config.num_workers == 1:
            return benchmark.Row(1, 8, times), None, 0
        if number:
            os.kill(os.getpid(), number)
        return then

    return measure


@pytest.mark.parametrize(
    ("then", "number", "exit_code", "error"),
    [
        ((None, None, 0), signal.SIGINT, 130, None),
        ((None, None, 0), signal.SIGTERM, 143, None),
        ((None, "2 workers: out of memory", 1), 0, 1, "2 workers: out of memory"),
    ],
)
def test_what_was_measured_is_told_when_it_ends_early(
    then: tuple[Any, str | None, int],
    number: int,
    exit_code: int,
    error: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark, "measure", measured_once(then, number))
    assert benchmark.main(WORDS) == exit_code
    output = capsys.readouterr()
    told = json.loads(output.out.splitlines()[-1])
    assert ([row["workers"] for row in told["rows"]], told["interrupted"], told["error"]) == ([1], number > 0, error)
    assert "Traceback" not in output.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["table.json", "table.png"]


def test_more_workers_than_the_cluster_has_room_for_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark, "measure", measured_once((None, None, 0)))
    with pytest.raises(benchmark.BadInput, match="room for 4 such workers"):
        benchmark.main([*WORDS, "--num-workers", "1,5", "--cpus-per-worker", "1"])
    assert list(tmp_path.iterdir()) == []

"""The benchmark's command line, as far as it goes without Ray, and what it makes of what was measured."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.benchmark import (
    NAMES,
    Command,
    Row,
    checked_out,
    configs_to_measure,
    draw,
    files_at,
    main,
    numbers,
    print_table,
)
from app.clock import PARTS, StepTimes
from app.config import Config
from app.errors import BadInput


@pytest.mark.parametrize("text", ["0", "a", "1,1", "", "1,", "1:4", "-1", "1.5", "2,0", "1 2", "9" * 10])
def test_a_bad_list_of_workers_is_refused(text: str) -> None:
    with pytest.raises(BadInput) as refused:
        main([f"--num-workers={text}"])
    assert f"--num-workers {text!r}" in str(refused.value)
    assert "such as 1,2,4" in str(refused.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--num-workers", "1,9", "--batch-size", "8"], ["--batch-size 8", "--num-workers 9"]),
        (["--steps", "0"], ["--steps 0", "at least 1"]),
        (["--warmup", "-1"], ["--warmup -1", "at least 0"]),
        (["--out", "nowhere/table"], ["--out nowhere/table", "cannot be written"]),
        (["--lr", "0"], ["--lr 0", "greater than 0"]),
    ],
)
def test_what_cannot_work_is_refused(
    words: list[str], said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput) as refused:
        main(words)
    for word in said:
        assert word in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_refusal_is_one_line_with_exit_code_2_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    began = time.monotonic()
    words = [sys.executable, "-m", "app.benchmark", "--num-workers", "1,1"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert time.monotonic() - began < 8  # as in test_train.py
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_a_list_of_workers() -> None:
    assert numbers("4, 1,2") == [4, 1, 2]


@pytest.mark.parametrize(("scaling", "batches"), [("strong", [12, 12, 12]), ("weak", [12, 24, 48])])
def test_a_run_for_each_number_of_workers(scaling: str, batches: list[int]) -> None:
    config = Config(batch_size=12, lr=0.5, epochs=3, max_steps=7, early_stop_patience=1, run_name="mine")
    configs = configs_to_measure(config, Command(num_workers="1,2,4", scaling=scaling))  # type: ignore[arg-type]  # a str
    assert [each.num_workers for each in configs] == [1, 2, 4]
    assert [each.batch_size for each in configs] == batches
    assert len({each.run_name for each in configs} - {"mine"}) == 3
    for each in configs:  # neither their end nor a restart cuts the measurement short
        assert (each.lr, each.max_steps, each.early_stop_patience, each.max_failures) == (0.5, None, None, 0)


def test_the_files_are_named_with_or_without_an_ending(tmp_path: Path) -> None:
    for name in ("table", "table.json", "table.png"):
        assert checked_out(str(tmp_path / name)) == tmp_path / "table"
    (tmp_path / "table.png").mkdir()
    with pytest.raises(BadInput, match=r"table\.png cannot be written"):
        checked_out(str(tmp_path / "table"))


def row(workers: int, seconds: float) -> Row:
    return Row(workers, 100, StepTimes(10, 1000, [{part: seconds / len(PARTS) for part in PARTS}] * workers))


def test_speed_up_and_efficiency_are_those_against_the_first_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(2, 4.0), row(8, 2.0), row(1, 10.0)]
    told = [each.told(rows[0]) for each in rows]
    assert [each["samples_per_s"] for each in told] == [250, 500, 100]
    assert [each["speedup"] for each in told] == pytest.approx([1, 2, 0.4])
    assert [each["efficiency"] for each in told] == pytest.approx([1, 0.5, 0.8])
    assert [each["step_ms"] for each in told] == [400, 200, 1000]
    for each in told:
        assert sum(each["parts_ms"].values()) == pytest.approx(each["step_ms"])
    ends_an_epoch = row(8, 2.0)
    ends_an_epoch.times.parts["validation"] += 3.0
    assert ends_an_epoch.told(rows[0])["samples_per_s"] == 200
    assert ends_an_epoch.told(rows[0])["efficiency"] == pytest.approx(0.5)  # as without it
    print_table(told, "a title")
    shown = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    cells = {words[0].strip(): [word.strip() for word in words[1:]] for words in shown}
    assert cells["efficiency"] == ["100%", "50%", "80%"]
    assert cells["all-reduce"] == ["50.0  12%", "25.0  12%", "125.0  12%"]
    assert tuple(NAMES) == PARTS
    _, picture = files_at(tmp_path / "table")
    draw(told, "a title", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")

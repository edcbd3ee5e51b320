"""A pipe gets one plain line an interval, and each epoch's numbers at its end."""

import pytest

from app.progress import Display, print_table
from app.tracking import Live


def live(step: int, epoch: int) -> Live:
    metrics = {"train/loss": 0.5, "train/accuracy": 0.75, "val/accuracy": 0.8, "perf/samples_per_s": 1234.5}
    return Live(step=step, total_steps=20, epoch=epoch, epochs=2, metrics=metrics)


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Display() as display:
        display.show(None)
        for step in range(1, 21):
            display.show(live(step, epoch=1 + (step > 10)))
            display.show(live(step, epoch=1 + (step > 10)))
            if step % 10 == 0:
                ended = live(step, epoch=step // 10)
                ended["metrics"] |= {"train/epoch_loss": 0.6, "train/epoch_accuracy": 0.7}
                display.epoch_ended(ended)
        display.event("an event")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    expected = "epoch 1/2  step 1/20  loss 0.5000  accuracy 0.7500  val 0.8000  samples/s 1,234"
    assert lines[0].startswith(expected)
    assert lines[1].startswith("epoch 1/2  step 10/20  loss 0.6000  accuracy 0.7000  val 0.8000")
    assert lines[1].endswith(" left")
    assert lines[2].startswith("epoch 2/2  step 20/20  loss 0.6000")
    assert lines[3] == "an event"


def test_the_time_left_is_that_of_the_workers_that_train_now(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.progress.PLAIN_EVERY_S", 0.0)
    display = Display()
    display.show(live(1, epoch=1))
    display.show(None)  # they were lost
    display.show(live(11, epoch=2))  # the first of the new ones: nothing is known of their speed yet
    assert not capsys.readouterr().out.splitlines()[1].endswith(" left")


def test_the_table_cuts_nothing_off(capsys: pytest.CaptureFixture[str]) -> None:
    path = "/".join(["a-long-folder-name"] * 8)
    print_table({"best checkpoint": path})
    lines = capsys.readouterr().out.splitlines()
    assert "".join(line.split("│")[2].strip() for line in lines if "│" in line) == path


def test_a_path_that_looks_like_markup_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    print_table({"best checkpoint": "/tmp/runs[v2]/a[/b]"})
    assert "/tmp/runs[v2]/a[/b]" in capsys.readouterr().out


def test_a_long_line_is_not_broken_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    Display().event("x" * 500)
    assert capsys.readouterr().out == "x" * 500 + "\n"

"""What a sweep reports."""

import pytest

from app.config import Config
from tests.tune.test_ledger import validation
from tune.ledger import Trial
from tune.report import best_so_far, draw, share_saved


def test_the_share_of_steps_that_was_saved() -> None:
    ten_epochs = Trial(0, {}, "finished", [validation(50, 0.5), validation(100, 0.6)])
    two_epochs = Trial(1, {}, "stopped", [validation(20, 0.1)])
    nothing = [Trial(2, {}, "failed", [validation(10, 0.1)]), Trial(3, {}, "killed"), Trial(4, {})]
    assert share_saved([ten_epochs, *nothing], Config(epochs=10)) == 0
    assert share_saved([ten_epochs, two_epochs, *nothing], Config(epochs=10)) == pytest.approx(1 - 120 / 200)
    assert share_saved([two_epochs], Config(epochs=10, max_steps=40)) == pytest.approx(0.5)
    assert share_saved([], Config()) == 0


def test_the_best_so_far_follows_the_end_of_the_trials() -> None:
    accuracies = {0: (0.7, 3), 1: (0.2, 1), 2: (0.5, 2), 3: (0.9, None)}  # the last one still runs
    trials = [
        Trial(number, {}, validations=[validation(10, accuracy)], ended=ended)
        for number, (accuracy, ended) in accuracies.items()
    ]
    assert best_so_far(trials, "val/accuracy") == ([0.2, 0.5, 0.7], [0.2, 0.5, 0.7])
    assert best_so_far(trials[::-1], "val/loss") == ([1.0] * 3, [1.0] * 3)


def test_pictures_of_whatever_settings_there_are() -> None:
    """Numbers, words, a setting that only some trials have, and one trial alone."""
    trials = {
        0: Trial(0, {"lr": 1e-4, "optimizer": "sgd", "momentum": 0.9}, "finished", [validation(10, 0.5)]),
        1: Trial(1, {"lr": 1e-1, "optimizer": "adamw"}, "stopped", [validation(10, 0.7)]),
        2: Trial(2, {"lr": 1e-2, "optimizer": "sgd", "momentum": 0.8}, "failed"),
    }
    for some in (trials, {0: trials[0]}):
        for metric in ("val/accuracy", "val/loss"):
            pictures = draw(some, metric, ["lr", "optimizer", "momentum"])
            assert sorted(pictures) == [
                f"pictures/{name}.png" for name in ("best_so_far", "by_setting", "parallel_coordinates")
            ]
            assert all(content.startswith(b"\x89PNG") for content in pictures.values())
    assert draw({2: trials[2]}, "val/accuracy", ["lr"]) == {}

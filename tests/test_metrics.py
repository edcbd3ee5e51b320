"""Sums, counts and what is divided from them."""

import numpy as np
import pytest
import torch
from sklearn.metrics import precision_recall_fscore_support

from app.metrics import Evaluation, EvaluationSums, Window


def test_per_class_numbers_are_scikit_learns() -> None:
    generator = torch.Generator().manual_seed(0)
    targets, guesses = (torch.randint(0, 4, (60,), generator=generator) for _ in range(2))
    sums = EvaluationSums(5, torch.device("cpu"))  # class 4 is never there: a share of nothing is 0
    logits = torch.nn.functional.one_hot(guesses, 5).float()
    for part in range(0, 60, 7):
        rows = slice(part, part + 7)
        sums.add(torch.ones(len(targets[rows])), logits[rows], targets[rows], torch.arange(60)[rows])
    result = sums.result()
    expected = precision_recall_fscore_support(targets, guesses, labels=range(5), zero_division=0.0)  # type: ignore[arg-type]  # scikit-learn's own hint is wrong
    for found, theirs in zip(result.per_class(), np.array(expected).T, strict=True):
        assert [found["precision"], found["recall"], found["f1"], found["support"]] == pytest.approx(theirs)
    assert result.accuracy == pytest.approx((targets == guesses).float().mean().item())
    assert result.loss == 1.0


def test_the_worst_mistakes_come_first_and_right_answers_are_none() -> None:
    sums = EvaluationSums(2, torch.device("cpu"), num_worst=2)
    logits = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    sums.add(torch.tensor([9.0, 2.0, 3.0, 1.0]), logits, torch.tensor([0, 1, 1, 0]), torch.tensor([10, 11, 12, 13]))
    assert [(m.sample_id, m.target, m.prediction, m.loss) for m in sums.result().worst] == [
        (12, 1, 0, 3.0),
        (11, 1, 0, 2.0),
    ]


def test_a_total_of_parts_is_the_whole() -> None:
    parts = [Evaluation(2.0, [[1, 0], [1, 1]]), Evaluation(5.0, [[0, 1], [0, 0]])]
    whole = Evaluation.total(parts)
    assert whole.confusion == [[1, 1], [1, 1]]
    assert whole.loss == (2.0 * 3 + 5.0 * 1) / 4


def test_a_window_is_a_mean_over_samples_not_over_steps() -> None:
    window = Window()
    window.add(loss=10.0, correct=5, count=10, seconds=1.0, data_seconds=0.25)
    window.add(loss=1.0, correct=0, count=1, seconds=1.0, data_seconds=0.25)
    assert window.epoch_metrics() == {"train/epoch_loss": 1.0, "train/epoch_accuracy": 5 / 11}
    assert window.metrics() == {
        "train/loss": 1.0,
        "train/accuracy": 5 / 11,
        "perf/samples_per_s": 5.5,
        "perf/step_s": 1.0,
        "perf/data_wait_share": 0.25,
    }

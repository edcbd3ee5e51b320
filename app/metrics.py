"""Sums and counts, added over all ranks, then divided: the same number at every world size."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from app.distributed import gather_rows, gather_texts, sum_over_ranks


@dataclass(frozen=True)
class Mistake:
    """A sample of the split that was predicted wrongly."""

    sample_id: int
    target: int
    prediction: int
    loss: float


@dataclass(frozen=True)
class Evaluation:
    """What one pass over a split gave. confusion[i][j]: samples of class i predicted as j.

    worst: the mistakes with the largest loss, as many as were asked for. unreadable: of each sample that
    could not be read and is in none of the numbers, what is wrong.
    """

    loss: float
    confusion: list[list[int]]
    worst: list[Mistake] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)

    @classmethod
    def total(cls, shares: "list[Evaluation]") -> "Evaluation":
        """Of the whole, from evaluations of its parts."""
        size = range(len(shares[0].confusion))
        confusion = [[sum(share.confusion[i][j] for share in shares) for j in size] for i in size]
        count = sum(share.num_samples for share in shares)
        loss = sum(share.loss * share.num_samples for share in shares) / max(1, count)
        return cls(loss, confusion, unreadable=[text for share in shares for text in share.unreadable])

    @property
    def num_samples(self) -> int:
        return sum(map(sum, self.confusion))

    @property
    def accuracy(self) -> float:
        return sum(row[i] for i, row in enumerate(self.confusion)) / max(1, self.num_samples)

    def metrics(self, split: str) -> dict[str, float]:
        return {f"{split}/loss": self.loss, f"{split}/accuracy": self.accuracy}

    def per_class(self) -> list[dict[str, float]]:
        """precision, recall, f1 and support of each class; a share of nothing is 0."""
        rows = []
        for i, row in enumerate(self.confusion):
            hits, support = row[i], sum(row)
            predicted = sum(other[i] for other in self.confusion)
            precision = hits / predicted if predicted else 0.0
            recall = hits / support if support else 0.0
            f1 = 2 * precision * recall / (precision + recall) if hits else 0.0
            rows.append({"precision": precision, "recall": recall, "f1": f1, "support": support})
        return rows


class EvaluationSums:
    """Adds up a rank's batches on its device; result() adds up the ranks."""

    def __init__(self, num_classes: int, device: torch.device, num_worst: int = 0):
        self._loss = torch.zeros(1, dtype=torch.float64, device=device)
        self._confusion = torch.zeros(num_classes * num_classes, dtype=torch.int64, device=device)
        self._num_classes = num_classes
        # Rows of (loss, sample id, target, prediction), the worst first; a loss of -1 is an empty row.
        self._worst = torch.full((num_worst, 4), -1.0, dtype=torch.float64, device=device)

    def add(self, losses: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, ids: torch.Tensor) -> None:
        """losses, targets and ids: (n,); logits: (n, num_classes)."""
        predictions = logits.argmax(dim=1)
        self._loss += losses.double().sum()
        self._confusion += torch.bincount(targets * self._num_classes + predictions, minlength=len(self._confusion))
        if len(self._worst):
            rows = torch.stack([losses.double(), ids.double(), targets.double(), predictions.double()], dim=1)
            self._worst = self._largest(torch.cat([self._worst, rows[predictions != targets]]))

    def result(self, unreadable: Sequence[str] = ()) -> Evaluation:
        """Every rank must call it, with what it could not read; all get the same."""
        loss, confusion = sum_over_ranks(self._loss), sum_over_ranks(self._confusion)
        rows = confusion.view(self._num_classes, self._num_classes).tolist()
        worst = [row for row in self._largest(gather_rows(self._worst)).tolist() if row[0] >= 0]
        mistakes = [Mistake(int(sample), int(target), int(guess), loss) for loss, sample, target, guess in worst]
        return Evaluation(loss.item() / max(1, int(confusion.sum())), rows, mistakes, gather_texts(list(unreadable)))

    def _largest(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[rows[:, 0].argsort(descending=True, stable=True)[: len(self._worst)]]


@dataclass
class Window:
    """Sum up the steps since the last record of train metrics, or of an epoch.

    Saved in checkpoints: a resumed run's next record then covers the steps of the uninterrupted one's.
    """

    loss: float = 0.0
    correct: float = 0.0
    count: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    data_seconds: float = 0.0

    def add(self, loss: float, correct: float, count: float, seconds: float, data_seconds: float) -> None:
        self.loss += loss
        self.correct += correct
        self.count += count
        self.steps += 1
        self.seconds += seconds
        self.data_seconds += data_seconds

    def epoch_metrics(self) -> dict[str, float]:
        """Return the means over all samples of the epoch, each in the state of training in which it was seen."""
        return {"train/epoch_loss": self.loss / self.count, "train/epoch_accuracy": self.correct / self.count}

    def metrics(self) -> dict[str, float]:
        return {
            "train/loss": self.loss / self.count,
            "train/accuracy": self.correct / self.count,
            "perf/samples_per_s": self.count / self.seconds,
            "perf/step_s": self.seconds / self.steps,
            "perf/data_wait_share": self.data_seconds / self.seconds,
        }

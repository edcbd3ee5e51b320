"""What a sweep knows of its trials: each thing that happens is a line in a file, written by the driver alone."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from app.runs import checkpoint_name, checkpoint_names, tracking_directory
from app.spool import SPOOL, Spool, read_records
from app.storage import Storage
from app.tracking import Validation
from tune.space import Value

# stopped: given up by the scheduler; killed: interrupted, to be gone on with
Status = Literal["running", "finished", "stopped", "failed", "killed"]
METRICS = {"val/accuracy": "max", "val/loss": "min"}
ENDED = ("finished", "stopped", "failed")


@dataclass
class Trial:
    """settings: what it has that the base config has not, as they are now. ended: as which of the trials, from 1."""

    number: int
    settings: dict[str, Value]
    status: Status = "running"
    validations: list[Validation] = field(default_factory=list)
    exploits: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    seconds: float = 0.0
    train_seconds: float = 0.0
    ended: int | None = None

    @property
    def name(self) -> str:
        return trial_name(self.number)

    @property
    def best(self) -> Validation | None:
        """Of its best checkpoint, which is chosen as in every run: by accuracy, then by loss."""
        key = lambda validation: (validation["metrics"]["val/accuracy"], -validation["metrics"]["val/loss"])  # noqa: E731
        return max(self.validations, key=key, default=None)

    def value(self, metric: str) -> float | None:
        return None if self.best is None else self.best["metrics"][metric]

    @property
    def steps(self) -> int:
        return max((validation["step"] for validation in self.validations), default=0)


def best_checkpoint(root: str, trial: Trial) -> str | None:
    """The folder of its best checkpoint, or of the newest where that stayed with the trial it came from."""
    storage = Storage(f"{root}/{trial.name}/checkpoints")
    names = checkpoint_names(storage)
    best = checkpoint_name(trial.best["step"]) if trial.best else None
    return storage.uri(best if best in names else names[-1]) if best is not None and names else None


def ledger_directory(storage: Storage) -> Path:
    return tracking_directory(storage.root) / "trials"


def trial_name(number: int) -> str:
    return f"trial-{number:04d}"


class Ledger:
    """The file, and what it says. Reading it again gives the same trials."""

    def __init__(self, directory: Path):
        self._spool = Spool(directory)
        self.trials = read_trials(directory)

    def close(self) -> None:
        self._spool.close()

    def begin(self, number: int, settings: dict[str, Value]) -> None:
        self._append("trial", number, settings=settings)

    def validation(self, number: int, validation: Validation) -> None:
        last = self.trials[number].validations[-1:]
        if not last or validation["step"] > last[0]["step"]:  # what was computed again is the same
            self._append("validation", number, validation=validation)

    def exploit(self, number: int, settings: dict[str, Value], **donor: Any) -> None:
        """The trial goes on from a donor's weights, with other settings."""
        self._append("exploit", number, settings=settings, donor=donor)

    def end(self, number: int, status: Status, error: str | None, seconds: float, train_seconds: float) -> None:
        self._append("end", number, status=status, error=error, seconds=seconds, train_seconds=train_seconds)

    def _append(self, kind: str, number: int, **content: Any) -> None:
        self._spool.append(kind, number=number, **content)
        _take(self.trials, {"kind": kind, "number": number, **content})


def read_trials(directory: Path) -> dict[int, Trial]:
    """By number; empty where nothing has begun."""
    trials: dict[int, Trial] = {}
    if (directory / SPOOL).exists():
        for record, _ in read_records(directory, 0):
            _take(trials, record)
    return trials


def _take(trials: dict[int, Trial], record: dict[str, Any]) -> None:
    number = record["number"]
    if record["kind"] == "trial":
        known = trials.get(number)
        if known is None:
            trials[number] = Trial(number, record["settings"])
        else:
            known.status, known.error, known.ended = "running", None, None
        return
    trial = trials[number]
    if record["kind"] == "validation":
        trial.validations.append(record["validation"])
    elif record["kind"] == "exploit":
        trial.settings = record["settings"]
        trial.exploits.append(record["donor"])
        # From here on its weights are the donor's, and so are the measurements up to here.
        donors = trials[record["donor"]["donor"]].validations
        trial.validations = [each for each in donors if each["step"] <= record["donor"]["step"]]
    else:
        assert record["kind"] == "end"
        trial.status, trial.error = record["status"], record["error"]
        trial.ended = 1 + max((each.ended or 0 for each in trials.values()), default=0)
        trial.seconds += record["seconds"]
        trial.train_seconds += record["train_seconds"]


def ranked(trials: dict[int, Trial], metric: str) -> list[Trial]:
    """The best first; those without a measurement last."""
    sign = 1 if METRICS[metric] == "max" else -1

    def key(trial: Trial) -> tuple[bool, float, int]:
        value = trial.value(metric)
        return value is None, 0.0 if value is None else -sign * value, trial.number

    return sorted(trials.values(), key=key)

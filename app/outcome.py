"""How a training ended. Apart from the training, since who waits for it need not import torch."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from app.runs import Status

if TYPE_CHECKING:
    from app.clock import StepTimes


@dataclass(frozen=True)
class Outcome:
    """How the training ended, or paused to go on with new workers. metrics are the best checkpoint's.

    train_seconds: in training steps since this start of the workers; run_train_seconds: since the run's beginning, each
    step counted once. error and exit_code are set when it failed, step_times when they were asked for and all steps
    were made.
    """

    status: Status
    checkpoint: str | None = None
    epoch: int = 0
    step: int = 0
    samples_seen: int = 0
    samples_per_s: float | None = None
    train_seconds: float = 0.0
    run_train_seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    exit_code: int = 0
    step_times: "StepTimes | None" = None

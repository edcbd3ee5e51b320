"""What fit() says of a run whose workers could not say it."""

from pathlib import Path

import pytest
import torch

from app.checkpoint import MODEL, Best, CheckpointWriter, Position
from app.config import Config
from app.fit import as_far_as_saved
from app.outcome import Outcome
from app.runs import checkpoint_storage
from tests.common import PlainNet
from tests.test_checkpoint import INFO


@pytest.mark.parametrize(
    ("is_damaged", "step", "metrics"), [(False, 6, {"val/accuracy": 0.5, "val/loss": 1.0}), (True, 12, {})]
)
def test_val_metrics_are_those_of_the_checkpoint_that_is_named(
    is_damaged: bool, step: int, metrics: dict[str, float], tmp_path: Path
) -> None:
    config = Config(run_name="r", output_dir=str(tmp_path))
    network, storage = PlainNet(), checkpoint_storage(config)
    with CheckpointWriter(storage, config, INFO) as writer:
        for saved in (6, 12):
            writer.save(Position(saved, Best(6, 0.5, 1.0)), network, torch.optim.SGD(network.parameters()))
    if is_damaged:
        Path(storage.root, "checkpoint-000000006", MODEL).write_bytes(b"damaged")
    outcome = as_far_as_saved(config, Outcome("failed"))
    assert outcome.checkpoint == storage.uri(f"checkpoint-{step:09d}")
    assert (outcome.step, outcome.metrics) == (12, metrics)

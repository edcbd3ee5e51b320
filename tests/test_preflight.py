"""What --dry-run finds out about a run, on every kind of data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from app.config import Config
from app.data.splits import Splits, from_arrays
from app.errors import BadInput
from app.preflight import check
from tests.common import generator_states

pytestmark = [
    pytest.mark.usefixtures("local_ray"),
    pytest.mark.filterwarnings("ignore"),  # Ray's own, as everywhere where Ray runs
]


def load_features(config: Config) -> Splits:
    return from_arrays((torch.randn(40, 5), np.arange(40) % 2), class_names=("a", "b"), val_fraction=0.2)


def build_linear(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    return nn.Linear(input_shape[0], num_classes)


FEATURES: dict[str, Any] = {
    "dataset": "tests.test_preflight:load_features",
    "model": "tests.test_preflight:build_linear",
}


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({}, ["10 classes, images of 1x"]),
        ({"dataset": "stdlib-docs", "model": "text-lstm", "bidirectional": True}, ["note: texts:", "texts of up to"]),
        ({"dataset": "stdlib-docs", "model": "text-transformer", "tokenizer": "bpe"}, ["texts of up to 128"]),
        (FEATURES, ["float32 features of 5", "12 parameters"]),
    ],
)
def test_a_run_that_can_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict, parts: list[str]
) -> None:
    config = Config(run_name="r", output_dir=str(tmp_path), batch_size=8, tracking_uri="none", **settings)
    states = generator_states()
    assert check(config, verbose=False) == 0
    assert generator_states() == states
    said = capsys.readouterr().out
    assert [line.split(":")[0] for line in said.splitlines() if line.startswith("ok")] == [
        f"ok  {subject}" for subject in ("settings", "storage", "data", "model", "length", "tracking", "cluster")
    ]
    for part in parts:
        assert part in said
    assert not list(tmp_path.iterdir())


def load_infinite(config: Config) -> Splits:
    return from_arrays((torch.full((40, 5), 3e38), np.arange(40) % 2), class_names=("a", "b"), val_fraction=0.2)


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    settings: dict[str, Any] = FEATURES | {"dataset": "tests.test_preflight:load_infinite"}
    config = Config(run_name="r", output_dir=str(tmp_path), batch_size=8, tracking_uri="none", **settings)
    with pytest.raises(BadInput, match="before the first step: its logits or the inputs are not finite"):
        check(config, verbose=False)

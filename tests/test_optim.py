"""The learning rate as a function of the step."""

import pytest
import torch

from app.config import Config
from app.data.sampling import Schedule
from app.optim import build_optimizer, learning_rate

SCHEDULE = Schedule(group_sizes=(100,), batch_size=10, epochs=10)  # 10 steps an epoch, 100 in all


def rates(**settings) -> list[float]:
    config = Config(lr=1.0, epochs=10, batch_size=10, **settings)
    return [learning_rate(step, config, SCHEDULE) for step in range(SCHEDULE.total_steps)]


def test_warm_up_rises_to_the_peak_and_never_starts_at_zero() -> None:
    found = rates(schedule="constant", warmup_epochs=1.0)
    assert found[:10] == pytest.approx([step / 11 for step in range(1, 11)])
    assert found[10:] == [1.0] * 90


def test_raising_the_length_leaves_the_steps_done_as_they_were() -> None:
    config = Config(lr=1.0, schedule="constant", warmup_epochs=1.0)
    short, long = (Schedule(group_sizes=(100,), batch_size=10, epochs=10, max_steps=steps) for steps in (5, 50))
    assert [learning_rate(step, config, short) for step in range(5)] == [
        learning_rate(step, config, long) for step in range(5)
    ]


def test_cosine_is_torchs_own() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    expected = []
    for _ in range(100):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    assert rates(schedule="cosine", warmup_epochs=0) == pytest.approx(expected, abs=1e-6)


def test_linear_falls_to_zero_after_the_last_step() -> None:
    assert rates(schedule="linear", warmup_epochs=0) == pytest.approx([1 - step / 100 for step in range(100)])


def test_step_drops_by_the_factor() -> None:
    found = rates(schedule="step", warmup_epochs=0, step_epochs=4, step_factor=0.5)
    assert found == [1.0] * 40 + [0.5] * 40 + [0.25] * 20


def test_step_has_defaults() -> None:
    config = Config(schedule="step", lr=1.0, warmup_epochs=0)
    assert learning_rate(105, config, SCHEDULE) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("settings", "kind", "expected"),
    [
        ({"optimizer": "sgd"}, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        ({"optimizer": "sgd", "momentum": 0.0}, torch.optim.SGD, {"momentum": 0.0, "nesterov": False}),
        ({"optimizer": "adam", "weight_decay": 0.0}, torch.optim.Adam, {"lr": 0.002, "weight_decay": 0.0}),
        ({"optimizer": "adamw"}, torch.optim.AdamW, {"weight_decay": 0.01}),
    ],
)
def test_optimizers(settings: dict, kind: type, expected: dict) -> None:
    optimizer = build_optimizer(Config(**settings), [torch.nn.Parameter(torch.zeros(2))])
    assert type(optimizer) is kind
    assert {key: optimizer.param_groups[0][key] for key in expected} == expected

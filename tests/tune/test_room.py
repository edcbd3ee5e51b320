"""How many trials run at once."""

import pytest
import ray

from app.config import Config
from app.errors import BadInput
from tune.room import at_once

NODES = [
    {"Alive": True, "Resources": {"CPU": 4.0, "GPU": 1.0}},
    {"Alive": True, "Resources": {"CPU": 3.0}},
    {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}},
]


@pytest.fixture(autouse=True)
def nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: NODES)
    monkeypatch.setattr("app.cluster.autoscaling_limits", dict)


@pytest.mark.parametrize(
    ("workers", "cpus", "use_gpu", "wanted", "expected"),
    [
        (1, 1.0, False, None, 7),
        (1, 2.0, False, None, 3),  # 2 on the first node, 1 on the second
        (2, 2.0, False, None, 1),
        (1, 1.0, True, None, 1),
        (1, 1.0, False, 4, 4),
    ],
)
def test_as_many_as_there_is_room_for(
    workers: int, cpus: float, use_gpu: bool, wanted: int | None, expected: int
) -> None:
    assert at_once(Config(num_workers=workers, cpus_per_worker=cpus), use_gpu, wanted) == expected


def test_an_autoscaler_makes_room_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.cluster.autoscaling_limits", lambda: {"CPU": 32.0, "GPU": 4.0})
    assert at_once(Config(num_workers=2), False, None) == 16
    assert at_once(Config(num_workers=2), True, 2) == 2


def test_more_than_fit_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(BadInput, match=r"--max-concurrent 4: .* room for 7 workers \(CPUs\).* has 2: at most 3 at"):
        at_once(Config(num_workers=2), False, 4)

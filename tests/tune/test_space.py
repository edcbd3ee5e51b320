"""Search spaces: what may stand in them, and what is drawn from them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.config import Config
from app.errors import BadInput
from tune.space import Chance, Space, read_space

BASE = Config()


def space_of(tmp_path: Path, text: str, base: Config = BASE) -> Space:
    (tmp_path / "space.yaml").write_text(text)
    return read_space(str(tmp_path / "space.yaml"), base)


def drawn(space: Space, count: int = 300, base: Config = BASE) -> list[dict[str, Any]]:
    chance = Chance(np.random.default_rng(0))
    return [space.sample(base, chance) for _ in range(count)]


@pytest.mark.parametrize(
    ("line", "least", "most", "on"),
    [
        ("lr: {uniform: [0.1, 0.9]}", 0.1, 0.9, None),
        ("lr: {loguniform: [1e-4, 1]}", 1e-4, 1.0, None),
        ("lr: {quniform: [0.2, 1.0, 0.2]}", 0.2, 1.0, 0.2),
        ("label_smoothing: {quniform: [0, 0.4, 0.1]}", 0.0, 0.4, 0.1),
        ("lr: {qloguniform: [0.01, 1, 0.01]}", 0.01, 1.0, 0.01),
        ("batch_size: {randint: [3, 6]}", 3, 6, 1),
        ("batch_size: {lograndint: [1, 1000]}", 1, 1000, 1),
        ("batch_size: {qrandint: [32, 128, 32]}", 32, 128, 32),
    ],
)
def test_ranges_include_both_ends_and_keep_to_their_quantum(
    tmp_path: Path, line: str, least: float, most: float, on: float | None
) -> None:
    name = line.partition(":")[0]
    values: list[Any] = [settings[name] for settings in drawn(space_of(tmp_path, line))]
    assert least <= min(values) <= max(values) <= most
    assert all(isinstance(value, type(least)) for value in values)
    if on is not None and "log" not in line:
        np.testing.assert_allclose(np.array(values) / on, np.round(np.array(values) / on), atol=1e-9)
        assert {least, most} <= set(np.round(values, 9).tolist())
    for settings in drawn(space_of(tmp_path, line), 5):
        Config(**settings)


def test_logarithms_and_lists_are_drawn_evenly(tmp_path: Path) -> None:
    space = space_of(
        tmp_path,
        "lr: {loguniform: [1e-4, 1]}\nbatch_size: {randint: [1, 4]}\noptimizer: {choice: [sgd, adam, adamw]}\n",
    )
    settings = drawn(space, 2000)
    below = np.mean([each["lr"] < 1e-2 for each in settings])
    assert 0.45 < below < 0.55
    for name, count in (("batch_size", 4), ("optimizer", 3)):
        _, counts = np.unique([str(each[name]) for each in settings], return_counts=True)
        assert len(counts) == count
        assert counts.min() > 0.8 * 2000 / count


def test_what_applies_under_a_condition_only(tmp_path: Path) -> None:
    space = space_of(
        tmp_path,
        "momentum: {uniform: [0.8, 0.99], when: {optimizer: sgd, schedule: [step, cosine]}}\n"
        "step_factor: {choice: [0.1, 0.5], when: {schedule: step}}\n"
        "optimizer: {choice: [sgd, adamw]}\n"
        "schedule: {choice: [step, linear]}\n",
    )
    for settings in drawn(space):
        assert ("momentum" in settings) == (settings["optimizer"] == "sgd" and settings["schedule"] == "step")
        assert ("step_factor" in settings) == (settings["schedule"] == "step")
        Config(**settings)
    # Where schedule does not vary it is the base config's, to which a condition may refer.
    nested = "schedule: {choice: [step, linear], when: {optimizer: sgd}}\noptimizer: {choice: [sgd, adamw]}\n"
    space_of(tmp_path, nested + f"warmup_epochs: {{choice: [1, 2], when: {{schedule: {BASE.schedule}}}}}")
    with pytest.raises(BadInput, match=r"line 1: momentum applies when optimizer is sgd, which never is: it is adamw"):
        space_of(tmp_path, "momentum: {uniform: [0.8, 0.99], when: {optimizer: sgd}}")
    assert space_of(tmp_path, "momentum: {uniform: [0.8, 0.99], when: {optimizer: sgd}}", Config(optimizer="sgd"))


def test_the_points_of_a_grid(tmp_path: Path) -> None:
    space = space_of(
        tmp_path, "batch_size: {grid: [64, 128]}\noptimizer: {grid: [sgd, adam]}\nlr: {uniform: [0.1, 0.2]}"
    )
    points = list(space.points())
    assert points[:2] == [{"batch_size": 64, "optimizer": "sgd"}, {"batch_size": 64, "optimizer": "adam"}]
    assert len(points) == 4
    assert space.sample(BASE, Chance(np.random.default_rng(0)), points[3]).items() >= points[3].items()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has nothing to vary: write lines such as lr"),
        ("- lr", "has nothing to vary"),
        ("lr: [", "is no YAML"),
        ("epochz: {choice: [1, 2]}", r"line 1: epochz is no setting; did you mean epochs\?"),
        ("lr: {uniform: [0.1, 0.2]}\n\nrun_name: {choice: [a, b]}", "line 3: run_name is the same for all trials"),
        ("epochs: {choice: [1, 2]}", "line 1: epochs is the same for all trials: give it as a flag"),
        ("lr: 0.1", r"line 1: lr: 0\.1 must be one of uniform, loguniform, .* choice, grid"),
        ("lr: {normal: [0, 1]}", "line 1: lr: .*normal.* must be one of uniform"),
        ("lr: {uniform: [0, 1], choice: [1]}", "must be one of uniform"),
        ("lr: {uniform: 0.1}", r"line 1: lr: uniform takes a list, not 0\.1"),
        ("lr: {uniform: [0.1]}", r"lr: uniform \[0\.1\] must be \[low, high\], finite numbers"),
        ("lr: {uniform: [0.1, many]}", r"must be \[low, high\], finite numbers"),
        ("lr: {uniform: [0.1, .inf]}", r"must be \[low, high\], finite numbers"),
        ("lr: {quniform: [0.1, 0.2]}", r"must be \[low, high, quantum\]"),
        ("lr: {uniform: [0.2, 0.1]}", r"0\.2 must be less than 0\.1"),
        ("lr: {loguniform: [0, 0.1]}", "a logarithm needs a low end above 0"),
        ("lr: {quniform: [0.1, 0.2, 0.5]}", r"the quantum must be above 0, and at most 0\.1"),
        ("lr: {quniform: [0.1, 0.9, 0.2]}", "both ends must be multiples of the quantum"),
        ("lr: {choice: [2020-13-45, 1]}", "line 1: "),
        ("lr: {choice: [!!int x, 1]}", "line 1: "),
        ("lr: {{}: 1}", "line 1: "),
        ("lr: {uniform: [0.1, 1], when: {[1]: 2}}", "line 1: "),
        ("lr: {uniform: [0, 0.1]}", r"line 1: --lr 0\.0: must be greater than 0"),
        ("batch_size: {uniform: [1, 10]}", "batch_size takes int: use choice, grid or randint, not uniform"),
        ("batch_size: {randint: [1.5, 10]}", "must be integers"),
        ("batch_size: {choice: [64, 0]}", "line 1: --batch-size 0: must be at least 1"),
        ("bidirectional: {randint: [0, 1]}", "bidirectional takes bool: use choice, grid or randint, not randint"),
        ("batch_size: {choice: [64]}", "needs two or more different values"),
        ("batch_size: {choice: [64, 64]}", "needs two or more different values"),
        ("optimizer: {choice: [sgd, adamx]}", "line 1: --optimizer 'adamx': allowed are 'sgd', 'adam' or 'adamw'"),
        ("lr: {uniform: [0.1, 0.2]}\nlr: {uniform: [0.1, 0.3]}", "line 2: lr is given twice"),
        ("lr: {uniform: [0.1, 0.2], when: sgd}", "line 1: lr: when sgd must be settings"),
        ("lr: {uniform: [0.1, 0.2], when: {optimiser: sgd}}", "when optimiser: is no setting; did you mean optimizer"),
        (
            "seed: {choice: [1, 2]}\noptimizer: {choice: [sgd, adam]}\nlr: {grid: [1, 2], when: {optimizer: adamw}}",
            "line 3: lr applies when optimizer is adamw, which never is: it varies by line 2",
        ),
        (
            "mixup: {grid: [0, 1], when: {cutmix: 1}}\ncutmix: {grid: [0, 1], when: {mixup: 1}}",
            "line 1: mixup, cutmix wait for one another in their 'when'",
        ),
    ],
)
def test_a_space_gone_wrong_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        space_of(tmp_path, text)


def test_a_space_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--space none\.yaml: No such file or directory"):
        read_space("none.yaml", BASE)
    (tmp_path / "space.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match="is no YAML"):
        read_space(str(tmp_path / "space.yaml"), BASE)


@pytest.mark.parametrize("path", sorted(Path("configs/spaces").glob("*.yaml")))
def test_the_ready_spaces_are_of_use(path: Path) -> None:
    texts = "text" in path.stem
    base = Config(dataset="stdlib-docs", model="text-lstm") if texts else Config()
    for settings in drawn(read_space(str(path), base), 50, base):
        Config(**{**base.model_dump(), **settings})

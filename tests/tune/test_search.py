"""Where settings come from: a function of the seed, or learnt from the trials before."""

from pathlib import Path

import pytest

from app.config import Config
from app.errors import BadInput
from app.tracking import Validation
from tests.tune.test_space import BASE, space_of
from tune.ledger import Status, Trial
from tune.search import Optuna
from tune.space import Value, planned


def ended(number: int, settings: dict[str, Value], accuracy: float, status: Status = "finished") -> Trial:
    validation = Validation(step=5, epochs=1.0, metrics={"val/accuracy": accuracy, "val/loss": 1 - accuracy})
    return Trial(number, settings, status, [validation])


def test_chance_is_a_function_of_the_seed_and_the_number(tmp_path: Path) -> None:
    space = space_of(tmp_path, "lr: {loguniform: [1e-4, 1]}\noptimizer: {choice: [sgd, adam]}")
    first = planned(space, BASE, "random", 8)
    assert planned(space, BASE, "random", 12)[:8] == first
    assert len({each["lr"] for each in first}) == 8
    assert planned(space, Config(seed=1), "random", 8) != first


def test_a_grid_has_each_point_once_and_chance_has_it_as_often_as_asked(tmp_path: Path) -> None:
    lists = "optimizer: {grid: [sgd, adamw]}\nbatch_size: {grid: [16, 32]}\n"
    space = space_of(tmp_path, lists + "momentum: {grid: [0.5, 0.9], when: {optimizer: sgd}}")
    found = planned(space, BASE, "grid", 99)
    assert len(found) == 6  # momentum is of sgd alone
    assert {"optimizer": "adamw", "batch_size": 16} in found
    mixed = space_of(tmp_path, "batch_size: {grid: [16, 32]}\nlr: {uniform: [0.1, 0.2]}")
    sizes = [each["batch_size"] for each in planned(mixed, BASE, "random", 3)]
    assert sizes == [16, 32] * 3
    choices = space_of(tmp_path, "batch_size: {choice: [16, 32]}\nseed: {choice: [1, 2, 3]}")
    assert len(planned(choices, BASE, "grid", 1)) == 6


def test_settings_that_do_not_fit_together_are_found_before_anything_starts(tmp_path: Path) -> None:
    space = space_of(tmp_path, "mixup: {choice: [0.0, 0.2]}\ncutmix: {choice: [0.0, 0.2]}")
    with pytest.raises(BadInput, match=r"space\.yaml: trial \d would have .*exclude each other"):
        planned(space, BASE, "grid", 1)


def test_optuna_is_seeded_and_learns(tmp_path: Path) -> None:
    space = space_of(
        tmp_path, "lr: {loguniform: [1e-4, 1]}\noptimizer: {choice: [sgd, adam]}\nbatch_size: {randint: [16, 64]}"
    )

    def run(known: list[Trial], seed: int = 0) -> list[Trial]:
        base = BASE.model_copy(update={"seed": seed})
        source, trials = Optuna(space, base, "val/accuracy", known), list(known)
        for number in range(len(known), 40):
            settings = source.settings(number)
            lr = settings["lr"]
            assert isinstance(lr, float)
            trial = ended(number, settings, max(0.0, 1 - abs(lr - 0.01) * 20))
            source.tell(trial)
            source.tell(trial)  # twice does no harm
            trials.append(trial)
        return trials

    studies = [run([], seed) for seed in range(5)]
    first = studies[0]
    assert [trial.settings for trial in run([])] == [trial.settings for trial in first]
    assert first[0].settings != studies[1][0].settings
    early, late = (
        sum(trial.value("val/accuracy") or 0 for study in studies for trial in study[part])
        for part in (slice(10), slice(-10, None))
    )
    assert late > early + len(studies)
    assert {trial.settings["batch_size"] for trial in first} <= set(range(16, 65))
    # One that goes on is the one that was not interrupted.
    assert [trial.settings for trial in run(first[:25])] == [trial.settings for trial in first]


def test_optuna_keeps_to_a_quantum(tmp_path: Path) -> None:
    source = Optuna(space_of(tmp_path, "batch_size: {qrandint: [16, 64, 16]}"), BASE, "val/accuracy", [])
    assert {source.settings(number)["batch_size"] for number in range(60)} == {16, 32, 48, 64}


def test_optuna_goes_on_from_what_is_known(tmp_path: Path) -> None:
    text = "lr: {loguniform: [1e-4, 1]}\nmomentum: {uniform: [0.1, 0.9], when: {optimizer: sgd}}\n"
    space = space_of(tmp_path, text + "optimizer: {choice: [sgd, adam]}")
    known = [
        ended(0, {"optimizer": "sgd", "lr": 0.01, "momentum": 0.5}, 0.9),
        ended(1, {"optimizer": "adam", "lr": 0.5}, 0.1, "stopped"),
        ended(2, {"optimizer": "adam", "lr": 0.9}, 0.1, "failed"),
        Trial(3, {"optimizer": "sgd", "lr": 0.2, "momentum": 0.7}, "killed"),
    ]
    source = Optuna(space, BASE, "val/accuracy", known)
    told = source._study.trials
    assert [trial.params for trial in told] == [trial.settings for trial in known]
    assert [trial.state.name for trial in told] == ["COMPLETE", "COMPLETE", "FAIL", "RUNNING"]
    assert told[0].value == 0.9
    source.tell(ended(3, known[3].settings, 0.8))
    assert source._study.best_value == 0.9


def test_optuna_lowers_a_loss(tmp_path: Path) -> None:
    space = space_of(tmp_path, "lr: {loguniform: [1e-4, 1]}")
    source = Optuna(space, BASE, "val/loss", [ended(0, {"lr": 0.1}, 0.9), ended(1, {"lr": 0.2}, 0.5)])
    assert source._study.best_params == {"lr": 0.1}

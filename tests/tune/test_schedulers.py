"""Who is given up, and what a clone goes on with."""

from pathlib import Path
from typing import Any

import pytest
from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler

from app.config import Config
from app.interrupt import Interrupt
from tests.tune.test_space import space_of
from tune.schedulers import Population, scheduler
from tune.spec import Options


class Controller:
    """As much of Ray Tune's as a scheduler asks for."""

    search_alg = None

    def __init__(self, *trials: Trial):
        self.trials = trials

    def get_live_trials(self) -> list[Trial]:
        return []

    def get_trials(self) -> tuple[Trial, ...]:
        return self.trials

    def pause_trial(self, trial: Trial, should_checkpoint: bool) -> None:
        trial.set_status(Trial.PAUSED)

    def _schedule_trial_save(self, trial: Trial, result: Any) -> str:
        return f"checkpoint of {trial.trial_id}"


def judged(tmp_path: Path, name: str, *results: tuple[str, float, float | None], epochs: int = 9) -> list[str]:
    """What the scheduler says of each (trial, epochs, accuracy); without an accuracy the trial has failed."""
    space = space_of(tmp_path, "lr: {loguniform: [1e-4, 1]}")
    judge = scheduler(Options(scheduler=name), space, Config(epochs=epochs), Interrupt())  # type: ignore[arg-type]  # a name of them
    judge.set_search_properties("val/accuracy", "max")
    controller: Any = Controller()
    trials: dict[str, Any] = {}
    said = []
    for word, at, accuracy in results:
        if word not in trials:
            trials[word] = Trial("__fake", stub=True, trial_id=word)
            judge.on_trial_add(controller, trials[word])
        if accuracy is None:
            judge.on_trial_complete(controller, trials[word], {"done": True})
        else:
            said.append(judge.on_trial_result(controller, trials[word], {"epochs": at, "val/accuracy": accuracy}))
    return said


@pytest.mark.parametrize("name", ["asha", "median"])
def test_the_worst_is_given_up_also_after_a_trial_that_failed(tmp_path: Path, name: str) -> None:
    good = [(word, 2.0, 0.9) for word in "abc"] + [(word, 3.0, 0.9) for word in "abc"]
    said = judged(tmp_path, name, ("failed", 0, None), *good, ("bad", 3.0, 0.1))
    assert said[:3] == [TrialScheduler.CONTINUE] * 3
    assert said[-1] == TrialScheduler.STOP


def test_a_trial_that_has_come_to_its_end_is_not_given_up(tmp_path: Path) -> None:
    """Nine epochs are a rung of 1, 3 and 9."""
    ends = [(word, 9.0, 0.9) for word in "abc"] + [("bad", 9.0, 0.1)]
    assert judged(tmp_path, "asha", *ends) == [TrialScheduler.CONTINUE] * 4
    assert judged(tmp_path, "asha", *ends, epochs=10)[-1] == TrialScheduler.STOP


def population_of_two(tmp_path: Path) -> tuple[Population, Any, list[Trial]]:
    population = Population(space_of(tmp_path, "lr: {uniform: [0.01, 0.02]}"), Config(), 1.0, Interrupt())
    population.set_search_properties("val/accuracy", "max")
    trials = [Trial("__fake", stub=True, trial_id=name, config={"number": 0, "lr": 0.01}) for name in "ab"]
    controller: Any = Controller(*trials)
    for trial in trials:
        population.on_trial_add(controller, trial)
        trial.set_status(Trial.RUNNING)
    return population, controller, trials


def test_a_trial_goes_on_from_a_better_one_and_not_from_an_equal(tmp_path: Path) -> None:
    population, controller, (first, second) = population_of_two(tmp_path)
    for at, accuracy in ((1.0, 0.9), (2.0, 0.9)):
        for trial in (first, second):
            population.on_trial_result(controller, trial, {"epochs": at, "val/accuracy": accuracy})
    assert (first.status, second.status) == (Trial.RUNNING, Trial.RUNNING)
    population.on_trial_result(controller, second, {"epochs": 3.0, "val/accuracy": 0.95})
    population.on_trial_result(controller, first, {"epochs": 3.0, "val/accuracy": 0.9})
    assert (first.status, second.status) == (Trial.PAUSED, Trial.RUNNING)
    manager: Any = first.run_metadata.checkpoint_manager
    assert manager._latest_checkpoint_result.checkpoint == "checkpoint of b"


def test_of_those_that_are_equally_far_the_one_that_waited_longest_goes_on(tmp_path: Path) -> None:
    """Else one that goes on from another one's checkpoint, again and again, would never let that one go on."""
    population, controller, (first, second) = population_of_two(tmp_path)
    for at, trial, accuracy in ((1.0, first, 0.1), (1.0, second, 0.9), (2.0, first, 0.1)):
        population.on_trial_result(controller, trial, {"epochs": at, "val/accuracy": accuracy})
    assert first.status == Trial.PAUSED  # it is where the second one is
    second.set_status(Trial.PAUSED)
    assert population.choose_trial_to_run(controller) is second


def test_a_clone_stays_itself_and_within_the_space(tmp_path: Path) -> None:
    space = space_of(
        tmp_path, "lr: {uniform: [0.01, 0.011]}\nmixup: {choice: [0.0, 0.2]}\ncutmix: {choice: [0.0, 0.2]}"
    )
    population = Population(space, Config(), 1.0, Interrupt())
    clone, donor = (Trial("__fake", stub=True) for _ in range(2))
    clone.config = {"number": 3, "lr": 0.011, "mixup": 0.0, "cutmix": 0.0}
    donor.config = {"number": 5, "lr": 0.0105, "mixup": 0.2, "cutmix": 0.0}
    found = [population._get_new_config(clone, donor)[0] for _ in range(200)]
    assert {each["number"] for each in found} == {3}
    assert all(0.01 <= each["lr"] <= 0.011 for each in found)
    assert len({each["lr"] for each in found}) > 2
    # Together they are refused.
    assert {(each["mixup"], each["cutmix"]) for each in found} == {(0.2, 0.0), (0.0, 0.0), (0.0, 0.2)}

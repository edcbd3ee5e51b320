"""Which trials are given up, or go on from better ones."""

import itertools
from typing import Any

import numpy as np
from ray.tune.experiment import Trial
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)

from app.config import Config
from app.errors import BadInput
from app.interrupt import Interrupt
from tune.space import Chance, Space
from tune.spec import Options


def scheduler(options: Options, space: Space, base: Config, interrupt: Interrupt) -> TrialScheduler:
    if options.scheduler == "asha":
        return Asha(base.epochs, options.grace_epochs, options.reduction_factor)
    if options.scheduler == "median":
        return Median(time_attr="epochs", grace_period=options.grace_epochs, min_samples_required=3)
    if options.scheduler == "pbt":
        return Population(space, base, options.perturb_epochs, interrupt)
    return FIFOScheduler()


class Asha(AsyncHyperBandScheduler):
    """Asynchronous successive halving (Li et al. 2018). A trial that has come to its end is not given up."""

    def __init__(self, epochs: int, grace_epochs: float, reduction_factor: float):
        self._epochs = epochs
        super().__init__(
            time_attr="epochs",
            max_t=epochs + 1,  # which is never reached: a trial ends by itself
            grace_period=grace_epochs,  # type: ignore[arg-type]  # any number will do
            reduction_factor=reduction_factor,
        )

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        if result["epochs"] >= self._epochs:
            return TrialScheduler.CONTINUE
        return super().on_trial_result(tune_controller, trial, result)


class Median(MedianStoppingRule):
    """The median stopping rule (Golovin et al. 2017)."""

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """The last result is the outcome, not a measurement; a trial that failed may have none."""

    def _on_insufficient_samples(self, tune_controller: Any, trial: Any, time: float) -> str:
        return TrialScheduler.CONTINUE  # Ray's own would have trials take turns, each time through a checkpoint


class Population(PopulationBasedTraining):
    """Population based training (Jaderberg et al. 2017) that keeps each setting within its range."""

    def __init__(self, space: Space, base: Config, perturb_epochs: float, interrupt: Interrupt):
        chance = Chance(np.random.default_rng([base.seed, 2**31]))
        self._base, self._interrupt = base, interrupt
        self._turns, self._last_turn = itertools.count(1), dict[Any, int]()
        self._dimensions = {dimension.name: dimension for dimension in space.dimensions}
        super().__init__(
            time_attr="epochs",
            perturbation_interval=perturb_epochs,
            hyperparam_mutations={
                name: list(dimension.values)
                if dimension.is_list
                else (lambda dimension=dimension: chance.number(dimension))
                for name, dimension in self._dimensions.items()
            },
            log_config=False,
        )

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        self._last_turn[trial] = next(self._turns)
        return super().on_trial_result(tune_controller, trial, result)

    def choose_trial_to_run(self, tune_controller: Any) -> Any:
        """The one that is least far, and of these the one that has waited longest. Ray's own takes the first of
        these: a trial that goes on from another one's checkpoint, again and again, would leave it no turn."""
        if self._interrupt.count:
            return None
        waiting = [trial for trial in tune_controller.get_trials() if trial.status in (Trial.PENDING, Trial.PAUSED)]
        return min(waiting, key=self._next_first, default=None)

    def _next_first(self, trial: Any) -> tuple[float, int]:
        return self._trial_state[trial].last_train_time, self._last_turn.get(trial, 0)

    def _exploit(self, tune_controller: Any, trial: Any, trial_to_clone: Any) -> None:
        own, donors = self._trial_state[trial].last_score, self._trial_state[trial_to_clone].last_score
        assert own is not None, "else it would be in no quantile"
        assert donors is not None
        if donors > own:
            super()._exploit(tune_controller, trial, trial_to_clone)

    def _get_new_config(self, trial: Any, trial_to_clone: Any) -> tuple[dict, dict]:
        config, operations = super()._get_new_config(trial, trial_to_clone)
        for name, dimension in self._dimensions.items():
            if not dimension.is_list:
                config[name] = dimension.fitted(config[name])
        own = {"number": trial.config["number"]}  # it is still itself
        try:
            Config(**{**self._base.model_dump(), **{name: config[name] for name in self._dimensions}})
        except BadInput:  # settings that exclude each other: it goes on with the donor's
            return trial_to_clone.config | own, {}
        return config | own, operations

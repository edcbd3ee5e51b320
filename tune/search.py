"""Where a sweep's settings come from: a grid, chance, or Optuna, which learns from the trials before."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from ray.tune.search import Searcher

from app.config import Config
from app.interrupt import Interrupt
from tune.ledger import ENDED, METRICS, Trial
from tune.space import Dimension, Space, Value


class Source(Protocol):
    """Settings for a trial, and what became of it."""

    def settings(self, number: int) -> dict[str, Value]: ...

    def tell(self, trial: Trial) -> None: ...


class Planned:
    def __init__(self, settings: Sequence[dict[str, Value]]):
        self._settings = settings

    def settings(self, number: int) -> dict[str, Value]:
        return self._settings[number]

    def tell(self, trial: Trial) -> None: ...


class Optuna:
    """Tree-structured Parzen estimators (Bergstra et al. 2011).

    What is suggested for a trial is a function of the seed, its number and what was told before: a study
    that knows the trials of an earlier one goes on as that would have.
    """

    def __init__(self, space: Space, base: Config, metric: str, known: Iterable[Trial]):
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        direction = "maximize" if METRICS[metric] == "max" else "minimize"
        self._study = optuna.create_study(direction=direction)
        self._space, self._base, self._metric = space, base, metric
        self._asked: dict[int, Any] = {}
        for trial in known:
            self._study.enqueue_trial(trial.settings)
            self.settings(trial.number)
            if trial.status in ENDED:
                self.tell(trial)

    def settings(self, number: int) -> dict[str, Value]:
        from optuna.samplers import TPESampler

        seed = int(np.random.default_rng([self._base.seed, number]).integers(2**31))
        # constant_liar: trials that run at the same time are not suggested the same.
        self._study.sampler = TPESampler(seed=seed, constant_liar=True)
        trial = self._study.ask()
        self._asked[number] = trial
        return self._space.sample(self._base, Asking(trial))

    def tell(self, trial: Trial) -> None:
        import optuna

        asked = self._asked.pop(trial.number, None)
        if asked is None:  # told before
            return
        value = trial.value(self._metric)
        failed = trial.status == "failed" or value is None
        state = optuna.trial.TrialState.FAIL if failed else optuna.trial.TrialState.COMPLETE
        self._study.tell(asked, None if failed else value, state)


class Asking:
    """Values from a trial of Optuna's."""

    def __init__(self, trial: Any):
        self._trial = trial

    def number(self, dimension: Dimension) -> float | int:
        name, low, high, log = dimension.name, dimension.low, dimension.high, dimension.is_log
        if dimension.is_integer:
            value = self._trial.suggest_int(name, int(low), int(high), step=int(dimension.quantum or 1), log=log)
        else:  # Optuna has no quantum for logarithms
            value = self._trial.suggest_float(name, low, high, step=None if log else dimension.quantum, log=log)
        return dimension.fitted(value)

    def choice(self, dimension: Dimension) -> Value:
        return self._trial.suggest_categorical(dimension.name, dimension.values)


class Proposals(Searcher):
    """Ray Tune's view of a source. Trials that are known keep their settings."""

    def __init__(self, source: Source, count: int, trials: dict[int, Trial], interrupt: Interrupt):
        super().__init__()
        self._source, self._count, self._trials, self._interrupt = source, count, trials, interrupt
        self._numbers: dict[str, int] = {}

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict, **spec: Any) -> bool:
        return True

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override]  # Ray's hint has no FINISHED
        number = len(self._numbers)
        if number == self._count or self._interrupt.count:
            return Searcher.FINISHED
        self._numbers[trial_id] = number
        known = self._trials.get(number)
        return {"number": number, **(self._source.settings(number) if known is None else known.settings)}

    def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False) -> None:
        """The source is told by the driver, when it is in the ledger."""

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the ledger has all there is to know."""

    def __reduce__(self) -> Any:  # Ray Tune writes it down all the same
        return Searcher, ()

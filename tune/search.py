"""Where a sweep's settings come from: a grid, chance, or Optuna, which learns from the trials before."""

import warnings
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np
from ray.tune.search import Searcher

from app.config import Config
from app.errors import BadInput
from tune.ledger import ENDED, METRICS, Trial
from tune.space import Chance, Dimension, Space, Value


def planned(space: Space, base: Config, search: str, num_trials: int) -> list[dict[str, Value]]:
    """The settings of each trial of a grid or of chance, a function of the space and the seed alone.

    A grid has each of its points once, for chance num_trials times. Raises BadInput for settings that do
    not fit together.
    """
    points = list(space.points(of_all_lists=search == "grid"))
    repeats = 1 if search == "grid" else num_trials
    found = []
    for number in range(len(points) * repeats):
        chance = Chance(np.random.default_rng([base.seed, number]))
        found.append(space.sample(base, chance, points[number % len(points)]))
    if search == "grid":  # points that differ only where a `when` leaves them out are one
        found = list({repr(settings): settings for settings in found}.values())
    for number, settings in enumerate(found):
        try:
            Config(**{**base.model_dump(), **settings})
        except BadInput as error:
            raise BadInput(f"--space {space.path}: trial {number} would have {settings}: {error}") from None
    return found


class Source(Protocol):
    """Settings for a trial, and what became of it."""

    def settings(self, number: int) -> dict[str, Value]: ...

    def tell(self, trial: Trial) -> None: ...


class Planned:
    def __init__(self, settings: list[dict[str, Value]]):
        self._settings = settings

    def settings(self, number: int) -> dict[str, Value]:
        return self._settings[number]

    def tell(self, trial: Trial) -> None: ...


class Optuna:
    """Tree-structured Parzen estimators (Bergstra et al. 2011), seeded; known trials are learnt from first."""

    def __init__(self, space: Space, base: Config, metric: str, known: Iterable[Trial]):
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
        known = list(known)
        # The same seed again would begin with the same suggestions again.
        seed = int(np.random.default_rng([base.seed, len(known)]).integers(2**31))
        # constant_liar: trials that run at the same time are not suggested the same.
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        direction = "maximize" if METRICS[metric] == "max" else "minimize"
        self._study = optuna.create_study(sampler=sampler, direction=direction)
        self._space, self._base, self._metric = space, base, metric
        self._asked: dict[int, Any] = {}
        for trial in known:
            self._study.enqueue_trial(trial.settings)
            self.settings(trial.number)
            if trial.status in ENDED:
                self.tell(trial)

    def settings(self, number: int) -> dict[str, Value]:
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
        if dimension.is_integer:
            value = self._trial.suggest_int(
                dimension.name, int(dimension.low), int(dimension.high), log=dimension.is_log
            )
        else:
            value = self._trial.suggest_float(dimension.name, dimension.low, dimension.high, log=dimension.is_log)
        return dimension.fitted(value)

    def choice(self, dimension: Dimension) -> Value:
        return self._trial.suggest_categorical(dimension.name, dimension.values)


class Proposals(Searcher):
    """Ray Tune's view of a source. Trials that are known keep their settings."""

    def __init__(self, source: Source, count: int, trials: dict[int, Trial]):
        super().__init__()
        self._source, self._count, self._trials = source, count, trials
        self._numbers: dict[str, int] = {}

    def set_search_properties(self, metric: str | None, mode: str | None, config: dict, **spec: Any) -> bool:
        return True

    def suggest(self, trial_id: str) -> dict[str, Any] | str | None:  # type: ignore[override]  # Ray's hint has no FINISHED
        number = len(self._numbers)
        if number == self._count:
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

"""A sweep on Ray Tune: trials started, reported, given up or gone on with, and written down as they are."""

import random
import threading
import time
from typing import Any

import numpy as np
import ray
from ray import tune
from ray.tune import Callback, FailureConfig, PlacementGroupFactory, RunConfig, Stopper, TuneConfig, Tuner
from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search import BasicVariantGenerator

from app.config import Config
from app.errors import BadInput, TrainingFailed
from app.fit import MLFLOW_STATUS
from app.interrupt import Interrupt
from app.progress import LOOK_EVERY_S, Display
from app.runs import Run, Summary, write_run
from tune.ledger import METRICS, Ledger, Status, Trial, best_checkpoint, ranked
from tune.report import described, shown
from tune.search import Proposals, Source
from tune.space import Chance, Space, Value
from tune.spec import Options
from tune.tracker import TrackerOf
from tune.trial import SweepTrial, Task

# Ray Tune's own files: written, never read.
TUNE_FILES = "tune"
# A resource that the head's node has 1 of, and how much of it Ray Train's own actor takes.
HEAD, FOR_RAY_TRAIN = "node:__internal_head__", 0.001


def conduct(
    options: Options,
    space: Space,
    source: Source,
    count: int,
    task: Task,
    ledger: Ledger,
    display: Display,
    interrupt: Interrupt,
) -> None:
    """Run the trials to the end, or until it is interrupted. Raises TrainingFailed where Ray Tune gives up."""
    base = Config(**task.base)
    most = at_once(base, task.cluster.use_gpu, options.max_concurrent)
    # Ray Tune's choices (whom to clone, how to perturb) are the seed's too.
    random.seed(base.seed)
    np.random.seed(base.seed)
    recorder = Recorder(ledger, source, task, options.metric, display, interrupt)
    population = options.scheduler == "pbt"
    settings = [ledger.trials[n].settings if n in ledger.trials else source.settings(n) for n in range(count)]
    search = (
        BasicVariantGenerator(points_to_evaluate=[{"number": n, **each} for n, each in enumerate(settings)])
        if population
        else Proposals(source, count, ledger.trials)
    )
    tuner = Tuner(
        tune.with_resources(tune.with_parameters(SweepTrial, task=task), resources(base, task.cluster.use_gpu, most)),
        param_space={name: tune.choice([None]) for name in settings[0]} | {"number": tune.choice([None])}
        if population
        else {},
        tune_config=TuneConfig(
            metric=options.metric,
            mode=METRICS[options.metric],
            search_alg=search,
            scheduler=scheduler(options, space, base),
            num_samples=count,
            max_concurrent_trials=None if population else most,
            reuse_actors=True,
        ),
        run_config=RunConfig(
            name=TUNE_FILES,
            storage_path=task.root,
            verbose=0,
            callbacks=[recorder],
            stop=StopAll(interrupt),
            failure_config=FailureConfig(max_failures=base.max_failures),
        ),
    )
    failure: list[BaseException] = []

    def work() -> None:
        try:
            tuner.fit()
        except BaseException as error:  # told below
            failure.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    told = False
    while thread.is_alive() and interrupt.count < 2:
        if interrupt.count and not told:
            told = True
            display.event("ending the trials; once more to leave at once")
        display.waiting(recorder.line(count))
        thread.join(LOOK_EVERY_S)
    recorder.close()
    if failure:
        raise TrainingFailed(f"the sweep ended: {failure[0]}; the same command goes on with it") from failure[0]


def at_once(base: Config, use_gpu: bool, wanted: int | None) -> int:
    """How many trials run at the same time. Raises BadInput for more than there is room for."""
    places = 0
    for node in ray.nodes():
        if node["Alive"]:
            have = node["Resources"]
            here = int(have.get("CPU", 0) / base.cpus_per_worker + 1e-9)
            places += min(here, int(have.get("GPU", 0))) if use_gpu else here
    fit = max(1, places // base.max_workers)
    if wanted is not None and wanted > fit:
        what = "GPUs" if use_gpu else "CPUs"
        raise BadInput(
            f"--max-concurrent {wanted}: the cluster has room for {places} workers ({what}), and a trial has "
            f"{base.max_workers}: at most {fit} at once"
        )
    return fit if wanted is None else wanted


def resources(base: Config, use_gpu: bool, most: int) -> PlacementGroupFactory:
    """Of a trial's own process. One with several workers has none itself: they have; the head's node counts
    how many there are, and has room for what Ray Train starts there, which is counted as the trial's."""
    if base.max_workers == 1:
        return PlacementGroupFactory([{"CPU": base.cpus_per_worker, **({"GPU": 1.0} if use_gpu else {})}])
    share = int(10_000 / most) / 10_000
    return PlacementGroupFactory([{"CPU": 0.0, HEAD: share - 2 * FOR_RAY_TRAIN}, {"CPU": 0.0, HEAD: FOR_RAY_TRAIN}])


def scheduler(options: Options, space: Space, base: Config) -> TrialScheduler:
    if options.scheduler == "asha":
        return AsyncHyperBandScheduler(
            time_attr="epochs",
            max_t=base.epochs + 1,  # which is never reached: a trial ends by itself
            grace_period=options.grace_epochs,  # type: ignore[arg-type]  # any number will do
            reduction_factor=options.reduction_factor,
        )
    if options.scheduler == "median":
        return MedianStoppingRule(time_attr="epochs", grace_period=options.grace_epochs, min_samples_required=3)
    if options.scheduler == "pbt":
        return Population(space, base, options.perturb_epochs)
    return FIFOScheduler()


class Population(PopulationBasedTraining):
    """Population based training (Jaderberg et al. 2017) that keeps each setting within its range."""

    def __init__(self, space: Space, base: Config, perturb_epochs: float):
        chance = Chance(np.random.default_rng([base.seed, 2**31]))
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

    def _get_new_config(self, trial: Any, trial_to_clone: Any) -> tuple[dict, dict]:
        config, operations = super()._get_new_config(trial, trial_to_clone)
        for name, dimension in self._dimensions.items():
            if not dimension.is_list:
                config[name] = dimension.fitted(config[name])
        return config | {"number": trial.config["number"]}, operations  # it is still itself


class StopAll(Stopper):
    def __init__(self, interrupt: Interrupt):
        self._interrupt = interrupt

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._interrupt.count > 0

    def __reduce__(self) -> Any:
        """What Ray Tune writes down to go on with is never read: the ledger is."""
        return FIFOScheduler, ()


class Recorder(Callback):
    """Writes down what Ray Tune tells of the trials."""

    def __init__(self, ledger: Ledger, source: Source, task: Task, metric: str, display: Display, interrupt: Interrupt):
        self._ledger, self._source, self._task, self._metric = ledger, source, task, metric
        self._display, self._interrupt = display, interrupt
        self._began: dict[int, float] = {}
        self._lock = threading.Lock()
        self._closed = False

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        number, settings = _named(trial.config)
        known = self._ledger.trials.get(number)
        self._began.setdefault(number, time.monotonic())
        if known is None or known.status == "killed":
            self._ledger.begin(number, settings)

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict[str, Any], **info: Any) -> None:
        number, settings = _named(trial.config)
        with self._lock:
            if self._closed:
                return
            if result.get("exploited"):
                self._ledger.exploit(number, settings, **result["exploited"])
            if result.get("validation"):
                self._ledger.validation(number, result["validation"])
            if result.get("outcome") and self._ledger.trials[number].status == "running":
                self._end(number, **result["outcome"])

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Also where the scheduler gave it up."""
        self._given_up(_named(trial.config)[0], "killed" if self._interrupt.count else "stopped")

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        """Its process died more often than is put up with."""
        lines = str(trial.get_error() or "its process died").strip().splitlines()
        self._given_up(_named(trial.config)[0], "failed", lines[-1])

    def __reduce__(self) -> Any:  # as of StopAll
        return Callback, ()

    def close(self) -> None:
        """Those that still run were interrupted."""
        for number, trial in self._ledger.trials.items():
            if trial.status == "running":
                self._given_up(number, "killed")
        with self._lock:
            self._closed = True

    def line(self, count: int) -> str:
        """How the sweep stands."""
        trials = list(self._ledger.trials.values())
        running = sum(trial.status == "running" for trial in trials)
        text = f"{len(trials) - running} of {count} trials ended, {running} running"
        best = self._best()
        return (
            text
            if best is None
            else f"{text}; best {self._metric} {best.value(self._metric):.4f} of trial {best.number}"
        )

    def _best(self) -> Trial | None:
        order = ranked(dict(self._ledger.trials), self._metric)
        return order[0] if order and order[0].best is not None else None

    def _given_up(self, number: int, status: Status, error: str | None = None) -> None:
        with self._lock:
            trial = self._ledger.trials.get(number)
            if self._closed or trial is None or trial.status != "running":
                return
            seconds = time.monotonic() - self._began.get(number, time.monotonic())
            self._end(number, status, error, seconds, 0.0)
            # What the trial itself cannot write down.
            config = self._task.config(number, trial.settings)
            TrackerOf(self._task.tracker, trial.name).finish.remote(MLFLOW_STATUS[status], None)
            best = trial.best
            summary = Summary(
                run_name=trial.name,
                run_id=None,
                status=status,
                checkpoint=best_checkpoint(self._task.root, trial),
                epoch=0 if best is None else int(np.ceil(trial.validations[-1]["epochs"])),
                step=trial.steps,
                samples_seen=0,
                samples_per_s=None,
                metrics={} if best is None else best["metrics"],
                error=error,
            )
            write_run(Run(config, summary.status, summary))

    def _end(self, number: int, status: Status, error: str | None, seconds: float, train_seconds: float) -> None:
        self._ledger.end(number, status, error, seconds, train_seconds)
        trial = self._ledger.trials[number]
        TrackerOf(self._task.tracker, trial.name).tags.remote({"trial_status": status})
        self._source.tell(trial)
        value = trial.value(self._metric)
        text = f"trial {number} {status}: " + (f"{self._metric} {shown(value)}, " if value is not None else "")
        text += described(trial.settings) + (f": {error}" if error else "")
        self._display.event(text)
        best = self._best()
        if best is not None:
            ended = sum(each.status != "running" for each in self._ledger.trials.values())
            TrackerOf(self._task.tracker, "").metrics.remote(ended, {f"best/{self._metric}": best.value(self._metric)})


def _named(config: dict[str, Any]) -> tuple[int, dict[str, Value]]:
    return config["number"], {name: value for name, value in config.items() if name != "number"}

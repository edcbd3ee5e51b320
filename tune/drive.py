"""A sweep on Ray Tune: the trials from the first to the last."""

import random
import threading
from typing import Any

import numpy as np
from ray import tune
from ray.tune import CheckpointConfig, FailureConfig, RunConfig, Stopper, TuneConfig, Tuner
from ray.tune.execution import class_cache
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import BasicVariantGenerator

from app.errors import TrainingFailed
from app.interrupt import Interrupt
from app.progress import LOOK_EVERY_S, Display
from app.storage import Storage
from tune.ledger import METRICS, Ledger
from tune.recorder import Recorder
from tune.room import resources
from tune.schedulers import scheduler
from tune.search import Optuna, Planned, Proposals, Source
from tune.spec import Plan
from tune.trial import SweepTrial, Task

# Ray Tune's own files: written, never read.
TUNE_FILES = "tune"
# Copies of a trial's checkpoints, for others to go on from, that are kept.
HANDED_ON = 4


def conduct(
    plan: Plan,
    most: int,
    task: Task,
    ledger: Ledger,
    display: Display,
    interrupt: Interrupt,
) -> None:
    """Run the trials, `most` at once, to the end or until interrupted. Raises TrainingFailed if Ray Tune gives up."""
    options, base, count = plan.options, plan.base, plan.count
    source: Source = (
        Optuna(plan.space, base, options.metric, ledger.trials.values())
        if plan.settings is None
        else Planned(plan.settings)
    )
    # Ray Tune's choices (whom to clone, how to perturb) are the seed's too.
    random.seed(base.seed)
    np.random.seed(base.seed)
    recorder = Recorder(ledger, source, task, options.metric, display, interrupt)
    param_space: dict[str, Any] = {}
    if options.scheduler == "pbt":  # which takes no Searcher
        known = {number: trial.settings for number, trial in ledger.trials.items()}
        settings = [known.get(number) or source.settings(number) for number in range(count)]
        search: Any = BasicVariantGenerator([{"number": number, **each} for number, each in enumerate(settings)])
        param_space = {name: tune.choice([None]) for name in ("number", *settings[0])}
    else:
        search = Proposals(source, count, ledger.trials, interrupt)
    # Ray would send the object store's keys to each trial's process, through its logs and the dashboard. They are in
    # the environment of the nodes.
    class_cache.ENV_VARS_TO_PROPAGATE = {
        name for name in class_cache.ENV_VARS_TO_PROPAGATE if not name.startswith("AWS_")
    }
    tuner = Tuner(
        tune.with_resources(tune.with_parameters(SweepTrial, task=task), resources(base, task.cluster.use_gpu, most)),
        param_space=param_space,
        tune_config=TuneConfig(
            metric=options.metric,
            mode=METRICS[options.metric],
            search_alg=search,
            scheduler=scheduler(options, plan.space, base, interrupt),
            num_samples=count,
            max_concurrent_trials=most if not param_space else None,
            reuse_actors=True,
        ),
        run_config=RunConfig(
            name=TUNE_FILES,
            **_tune_storage(task.root),
            verbose=0,
            callbacks=[recorder],
            stop=StopAll(interrupt, recorder),
            failure_config=FailureConfig(max_failures=base.max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=HANDED_ON),
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
        if interrupt.count:
            recorder.stop_training()  # again and again: a trial may begin meanwhile
            if not told:
                told = True
                display.event("ending the trials after a checkpoint; once more to leave at once")
        display.waiting(recorder.line(count))
        thread.join(LOOK_EVERY_S)
    recorder.close()
    if failure:
        reason = str(failure[0]).strip().splitlines()[-1:] or [type(failure[0]).__name__]
        raise TrainingFailed(f"Ray Tune ended: {reason[0]}; the same command goes on with the sweep") from failure[0]


def _tune_storage(root: str) -> dict[str, Any]:
    """Where Ray Tune keeps its own files, as its RunConfig has it."""
    if (local := Storage(root).local) is not None:
        return {"storage_path": str(local)}
    from app.arrow_store import arrow_filesystem

    filesystem, path = arrow_filesystem(root)
    return {"storage_path": path, "storage_filesystem": filesystem}


class StopAll(Stopper):
    """Once it is interrupted, and no trial is left that saves what it has: Ray Tune ends them by force."""

    def __init__(self, interrupt: Interrupt, recorder: Recorder):
        self._interrupt, self._recorder = interrupt, recorder

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._interrupt.count > 1 or (self._interrupt.count == 1 and not self._recorder.running())

    def __reduce__(self) -> Any:
        """What Ray Tune writes down to go on with is never read: the ledger is."""
        return FIFOScheduler, ()

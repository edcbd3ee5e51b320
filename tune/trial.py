"""A trial, as Ray Tune sees it: the same run as app.train's, in a process that is reused for the next one."""

import gc
import json
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune

from app.checkpoint import MANIFEST, MODEL, find_good, problem_with, put_record
from app.cluster import Cluster
from app.config import TEXT_DATASETS, Config
from app.config_file import to_yaml
from app.data.datasets import check_data
from app.errors import BadInput, TrainingFailed, Unavailable, plain_message
from app.fit import MLFLOW_STATUS, begin, concluded, parameters, tags
from app.outcome import Outcome
from app.runs import checkpoint_names, checkpoint_storage, open_run, step_of, tokenizer_to_go_on_with
from app.storage import Storage
from app.tracking import DeliveryState, Validation
from tune.ledger import ENDED, Trial, trial_name
from tune.space import Value
from tune.tracker import TrackerOf
from tune.training import Training

# What a checkpoint that is handed from trial to trial consists of.
FILES, FROM = "checkpoint", "trial.json"
SAVED_WITHIN_S = 300.0


@dataclass(frozen=True)
class Task:
    """What all trials share. past: what was known of each when the command was started.

    mutates: settings change while a trial goes on.
    """

    base: dict[str, Any]
    root: str
    tracker: Any
    cluster: Cluster
    mutates: bool = False
    past: dict[int, Trial] = field(default_factory=dict)

    def config(self, number: int, settings: dict[str, Value]) -> Config:
        """Raises BadInput for settings that do not fit together."""
        return Config(**{**self.base, **settings, "run_name": trial_name(number), "output_dir": self.root})


class SweepTrial(tune.Trainable):
    """Each step is a validation; the last one, which is done, has the outcome.

    A trial that fails says so and is done: Ray Tune sees errors only where processes die, and starts
    these trials again, from their checkpoints.
    """

    def setup(self, config: dict[str, Any], task: Task) -> None:  # type: ignore[override]  # see tune.with_parameters
        self._task = task
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.cleanup()
        self._begin(new_config)
        return True

    def _begin(self, config: dict[str, Any]) -> None:
        self._began = time.perf_counter()
        self._number = config["number"]
        self._settings = {name: value for name, value in config.items() if name != "number"}
        self._tracker = TrackerOf(self._task.tracker, trial_name(self._number))
        self._training: Training | None = None
        self._latest: Validation | None = None
        self._known: list[Validation] | None = None
        self._exploited: dict[str, Any] | None = None

    def cleanup(self) -> None:
        if self._training is not None:
            self._training.stop()
            self._training = None
        if self._task.base["compile"]:
            torch.compiler.reset()  # it compiles a network's code a few times only, whichever network it is
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the next trial may need all there is

    def step(self) -> dict[str, Any]:
        try:
            # Where it now stands is said before it goes on, so that it is known if it dies on the way.
            event = self._latest if self._exploited is not None else self._next()
        except Unavailable:  # storage or data may be back when Ray Tune starts the trial again (--max-failures)
            raise
        except (BadInput, TrainingFailed) as error:
            event = Outcome("failed", error=plain_message(error))
        outcome = None
        if isinstance(event, Outcome):
            outcome = {
                "status": event.status,
                "error": event.error,
                "seconds": time.perf_counter() - self._began,
                "train_seconds": event.train_seconds,
            }
        elif event is not None:
            self._latest = event
        result: dict[str, Any] = {"number": self._number, "outcome": outcome, "done": outcome is not None}
        if self._latest is not None:
            result |= {"validation": self._latest, "epochs": self._latest["epochs"], **self._latest["metrics"]}
        result["exploited"], self._exploited = self._exploited, None
        return result

    def _next(self) -> Validation | Outcome:
        """What an earlier command or process has seen comes first, so that the scheduler knows it too."""
        past = self._task.past.get(self._number)
        if self._known is None:
            self._known = self._seen_before(past)
        if self._known:
            return self._known.pop(0)
        if past is not None and past.status in ENDED:
            return Outcome(past.status, error=past.error)
        if self._training is None:
            done = self._prepare()
            if done is not None:
                return done
            self._training = Training(self._config, self._task.cluster, self._tracker)
        event = self._training.next()
        if isinstance(event, Outcome):
            self._tracker.finish.remote(MLFLOW_STATUS[event.status], None)
            state: DeliveryState = ray.get(self._tracker.delivery_state.remote())  # type: ignore[assignment]  # ray's stubs
            concluded(self._config, event, state.run_id, time.perf_counter() - self._began)
        return event

    @property
    def _config(self) -> Config:
        return self._task.config(self._number, self._settings)

    def _seen_before(self, past: Trial | None) -> list[Validation]:
        """Raises BadInput for a trial that had begun and has nothing to go on from."""
        if past is not None and past.status in ENDED:
            # Of a population's others it would be taken for one that is still to be changed.
            return [] if self._task.mutates else list(past.validations)
        told = past.validations if past is not None else []
        last_told = told[-1]["step"] if told else 0
        if not told and not checkpoint_names(checkpoint_storage(self._config)):
            return []
        good = self._goes_on_from(last_told)
        missed = self._recorded(last_told, good)
        known = [each for each in told if each["step"] <= good]
        if self._task.mutates:  # what it was compared with then is gone: only where it stands counts
            self._latest = known[-1] if known else None
            return missed
        return known + missed

    def _goes_on_from(self, told: int) -> int:
        """The step of its newest good checkpoint. Raises BadInput if there is none."""
        storage = checkpoint_storage(self._config)
        try:
            good = find_good(storage, warn=print)
        except BadInput:  # none is valid
            good = None
        if good is None:
            come_to = max([told, *map(step_of, checkpoint_names(storage))])
            raise BadInput(
                f"it had come to step {come_to}, and {storage.root} has no good checkpoint any more to go on from; "
                "it is not started from the beginning under the same name"
            )
        return step_of(good)

    def _recorded(self, after: int, to: int) -> list[Validation]:
        """By an earlier process, or by workers that went on meanwhile: nobody has been told of these."""
        recorded: Any = ray.get(self._tracker.validations.remote())
        return [each for each in recorded if after < each["step"] <= to]

    def _prepare(self) -> Outcome | None:
        """Begin the run, or go on with it. Its outcome, if it is finished."""
        config = self._config
        if not self._task.mutates:
            run = open_run(config)
            if run.status == "finished" and run.summary is not None:
                return Outcome("finished")
        tokenizer = None
        if config.dataset in TEXT_DATASETS:
            tokenizer = check_data(config, tokenizer_to_go_on_with(config)).tokenizer
        begin(config, tokenizer)
        self._tracker.begin.remote(parameters(config), tags(config, self._task.cluster), to_yaml(config))
        return None

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """The checkpoint of the latest validation, for this trial or another one to go on from."""
        storage, deadline = checkpoint_storage(self._config), time.monotonic() + SAVED_WITHIN_S
        step = 0 if self._latest is None else self._latest["step"]
        # It is written beside the training, and has its name when it is whole.
        while (name := _copy_first(storage, step, Path(checkpoint_dir, FILES))) is None:
            if time.monotonic() > deadline:
                raise TrainingFailed(f"{storage.root}: no checkpoint of step {step} in {SAVED_WITHIN_S:g} s")
            time.sleep(0.05)
        origin = {"number": self._number, "name": name, "validation": self._latest}
        Path(checkpoint_dir, FROM).write_text(json.dumps(origin))

    def load_checkpoint(self, checkpoint_dir: str) -> None:  # type: ignore[override]  # Ray's hint says dict
        """Go on from what save_checkpoint() has written, in place of what this trial has itself."""
        source, origin = Path(checkpoint_dir, FILES), json.loads(Path(checkpoint_dir, FROM).read_text())
        if problem := problem_with(source):
            raise TrainingFailed(f"the checkpoint of {trial_name(origin['number'])} cannot be gone on from: {problem}")
        self._latest, self._known = origin["validation"], []
        if origin["number"] == self._number:  # it has it still, and may have come further
            step = 0 if self._latest is None else self._latest["step"]
            self._known = self._recorded(step, self._goes_on_from(step))
            return
        # In this order: killed in between, it has something to go on from.
        storage, name = checkpoint_storage(self._config), origin["name"]
        if name in (own := checkpoint_names(storage)):
            storage.delete_folder(name)
        copy = storage.new_folder()
        shutil.copytree(source, copy, dirs_exist_ok=True)
        self._tracker.go_back.remote(step_of(name))
        record: Any = ray.get(self._tracker.snapshot.remote())
        if record is not None:
            put_record(copy, record)  # in place of the donor's
        storage.put_folder(copy, name, last=MANIFEST)
        for other in own:
            if other != name:
                storage.delete_folder(other)
        sha256 = json.loads((source / MANIFEST).read_text())[MODEL]["sha256"]
        self._exploited = {"donor": origin["number"], "step": step_of(origin["name"]), "sha256": sha256}
        told = f"goes on from {trial_name(origin['number'])} with {json.dumps(self._settings)}"
        self._tracker.tags.remote({f"exploited_at_step_{step_of(origin['name'])}": told})


def _copy_first(storage: Storage, step: int, target: Path) -> str | None:
    """Copy the first checkpoint that is not before the step. Its name, or None if there is none now."""
    name = next((name for name in checkpoint_names(storage) if step_of(name) >= step), None)
    if name is None:
        return None
    try:
        with storage.local_folder(name) as folder:
            shutil.copytree(folder, target)
    except (FileNotFoundError, shutil.Error):
        # Workers that train on have removed it meanwhile: there is a newer one.
        shutil.rmtree(target, ignore_errors=True)
        return None
    return name

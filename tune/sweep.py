"""python -m tune.sweep --space FILE.yaml [--num-trials N] [--search random|grid|optuna] [--scheduler asha] ...

Try out settings: trials of the same run as app.train's, by Ray Tune, in one MLflow tree. The last line on
stdout is one JSON object. The same command goes on with a sweep that was interrupted.
"""

import contextlib
import importlib
import json
import os
import secrets
import shlex
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import Field

from app.cli import parse_config, run_main
from app.cluster import Cluster, connected, set_environment
from app.config import Config, flag
from app.config_file import to_yaml
from app.data.datasets import check_data
from app.deliver import mlflow_environment
from app.errors import BadInput, TrainingFailed
from app.interrupt import Interrupt
from app.lock import held, is_held
from app.nodes import look_around
from app.progress import Display
from app.runs import SWEEP, absolute, resolved, run_storage, tracking_directory
from app.storage import Storage, without_credentials
from app.user_code import import_own
from tune.ledger import Ledger, Trial, best_checkpoint, ledger_directory, ranked, read_trials
from tune.report import counts, draw, print_ranking, share_saved
from tune.space import read_space
from tune.spec import Options, Plan, end_sweep, make_plan, open_sweep, read_sweep, refuse_lost_records

BEST, OF_THE_BEST = "best.yaml", "-best"
# Flags of a run that a sweep has in another form.
INSTEAD = {"run_name": "--sweep-name", "num_workers": "--workers-per-trial"}


class Command(Options):
    """What to try out, and how."""

    space: str | None = Field(None, description="YAML file of the settings that vary, and how.")
    sweep_name: str | None = Field(
        None, description="The sweep's identity: the same name goes on. Generated if absent."
    )
    workers_per_trial: int = Field(1, description="Training processes of each trial.")
    show: str | None = Field(None, description="Print the sweep of this name, finished or running, and exit.")
    config: str | None = Field(None, description="YAML file with the settings that do not vary; flags override it.")
    verbose: bool = Field(False, description="Show Ray's own messages too (-v).")


def main(argv: Sequence[str]) -> int:
    argv = ["--verbose" if word == "-v" else word for word in argv]
    config, command = parse_config(argv, Command, "python -m tune.sweep", "Try out settings with Ray Tune.")
    if command.show is not None:
        return show(command.show, config.output_dir)
    if command.space is None:
        raise BadInput("--space FILE.yaml is missing: it says which settings vary, such as configs/spaces/digits.yaml")
    for name, instead in INSTEAD.items():
        if getattr(config, name) != Config.model_fields[name].default:
            raise BadInput(f"{flag(name)} is each trial's own: use {instead}")
    name = command.sweep_name or f"sweep-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    options = Options(**{field: getattr(command, field) for field in Options.model_fields})
    try:
        base = resolved(Config(**config.model_dump() | {"run_name": name, "num_workers": command.workers_per_trial}))
        Config(run_name=f"{name}{OF_THE_BEST}")  # is to be a name too
        space = read_space(command.space, base)
        return sweep(make_plan(options, space, base), command.verbose)
    except BadInput as error:  # a run's flag, where the person has given the sweep's
        text = str(error)
        for name, instead in INSTEAD.items():
            text = text.replace(flag(name), instead)
        raise BadInput(text) from error


def sweep(plan: Plan, verbose: bool = False) -> int:
    """Try out, or go on with, the sweep that the plan's base config names. Returns the exit code.

    Raises TrainingFailed, after telling what is known, if Ray Tune gave up.
    """
    display = Display()
    uri = None if plan.base.tracking_uri == "none" else plan.base.tracking_uri
    base = plan.base.model_copy(update={"tracking_uri": without_credentials(plan.base.tracking_uri or "")})
    plan, storage = replace(plan, base=base), run_storage(base)
    import_own(base)
    for note in check_data(base).notes:
        display.event(note)
    storage.check_writable()
    display.event(f"sweep {base.run_name} in {storage.root}")

    set_tune_environment()
    set_environment()
    # It takes seconds to import: beside Ray's start, not after it.
    threading.Thread(target=importlib.import_module, args=("tune.drive",), daemon=True).start()
    with (
        held(storage, str(base.run_name)),
        Interrupt() as interrupt,
        display,
        connected(base, verbose, has_trials=True) as cluster,
    ):
        interrupt.listen()
        look_around(base, cluster, uri, display.event)
        from tune.room import at_once

        most = at_once(base, cluster.use_gpu, plan.options.max_concurrent)
        with contextlib.closing(Ledger(ledger_directory(storage))) as ledger:
            refuse_lost_records(storage, ledger.trials, str(base.run_name))
            open_sweep(plan.options, plan.space, base)
            ended = try_out(plan, most, uri, cluster, ledger, display, interrupt)
    report(plan.options.metric, base, ledger.trials, ended.status, ended.run_id)
    if ended.error is not None:
        raise TrainingFailed(ended.error)
    return 128 + interrupt.signal if ended.status == "killed" else 0


@dataclass(frozen=True)
class Ended:
    """How a sweep ended; run_id is MLflow's."""

    status: Literal["finished", "killed", "failed"]
    error: str | None
    run_id: str | None


def try_out(
    plan: Plan,
    most: int,
    uri: str | None,
    cluster: Cluster,
    ledger: Ledger,
    display: Display,
    interrupt: Interrupt,
) -> Ended:
    """The trials from the first to the last, `most` at once, and what is written of them."""
    import ray

    from app.fit import MLFLOW_STATUS, actor_here, parameters, tags, wait_for_delivery
    from tune.drive import TUNE_FILES, conduct
    from tune.tracker import PARENT, SweepTracker, TrackerOf
    from tune.trial import Task

    options, space, base, error = plan.options, plan.space, plan.base, None
    storage = run_storage(base)
    directory = str(tracking_directory(storage.root))
    where = (directory, storage.root, uri, base.experiment, base.run_name)
    actor = actor_here(SweepTracker, *where, mlflow_environment())
    parent = TrackerOf(actor, PARENT)
    described = {name: str(value) for name, value in options.model_dump().items()}
    about = tags(base, cluster) | {"sweep": "parent", "mlflow.source.name": "tune.sweep"}
    parent.begin.remote(parameters(base) | described, about, to_yaml(base))
    parent.artifact.remote("space.yaml", space.text.encode())

    task = Task(base.model_dump(), storage.root, actor, cluster, options.scheduler == "pbt", dict(ledger.trials))
    if storage.local:
        shutil.rmtree(storage.local / TUNE_FILES, ignore_errors=True)  # Ray Tune's notes of an earlier start
    try:
        conduct(plan, most, task, ledger, display, interrupt)
    except TrainingFailed as failure:
        error = str(failure)
    status = "failed" if error else "killed" if interrupt.count else "finished"

    names = [dimension.name for dimension in space.dimensions]
    for file, content in draw(ledger.trials, options.metric, names).items():
        parent.artifact.remote(file, content)
    known = read_sweep(storage)
    registered = known["registered"] if known is not None else None
    if (best := best_config(base, ledger.trials, options.metric)) is not None:
        content = to_yaml(best).encode()
        storage.write(BEST, content)
        parent.artifact.remote(BEST, content)
        first = ranked(ledger.trials, options.metric)[0]
        checkpoint = best_checkpoint(storage.root, first)
        if status == "finished" and checkpoint is not None and registered != [checkpoint, options.register_as]:
            tracker = TrackerOf(actor, first.name)
            tracker.model.remote(checkpoint, options.register_as)
            tracker.finish.remote(MLFLOW_STATUS[first.status], None)  # which MLflow takes for finished
            registered = [checkpoint, options.register_as]
    end_sweep(storage, status, registered)
    parent.finish.remote(MLFLOW_STATUS[status], None)
    state = wait_for_delivery(actor, storage.root, display, interrupt)
    ray.kill(actor)  # the task that Ray Tune has put into its object store would keep it
    return Ended(status, error, state.run_id)


def best_config(base: Config, trials: dict[int, Trial], metric: str) -> Config | None:
    """Settings to train the best trial's in full, as a run of its own."""
    order = ranked(trials, metric)
    if not order or order[0].best is None:
        return None
    return Config(**{**base.model_dump(), **order[0].settings, "run_name": f"{base.run_name}{OF_THE_BEST}"})


def report(metric: str, base: Config, trials: dict[int, Trial], status: str, run_id: str | None) -> None:
    """The table, the command that trains the best in full, and as stdout's last line the JSON object."""
    from app.progress import console

    print_ranking(str(base.run_name), trials, metric)
    best, root = best_config(base, trials, metric), run_storage(base).root
    first = ranked(trials, metric)[0] if best is not None else None
    saved = share_saved(trials.values(), base)
    if saved:
        console().print(f"steps saved by giving trials up: {saved:.1%} of those of running each to its end")
    if best is not None:
        file = shlex.quote(f"{root}/{BEST}")
        console().print(f"train the best in full: python -m app.train --config {file}", markup=False, soft_wrap=True)
    content = {
        "sweep_name": base.run_name,
        "run_id": run_id,
        "status": status,
        "metric": metric,
        "best_trial": None if first is None else first.number,
        "best_value": None if first is None else first.value(metric),
        "config": None if best is None else best.model_dump(),
        "checkpoint": None if first is None else best_checkpoint(root, first),
        "counts": counts(trials),
        "steps": sum(trial.steps for trial in trials.values()),
        "steps_saved": saved,
    }
    print(json.dumps(content, allow_nan=False), flush=True)


def show(name: str, output_dir: str) -> int:
    """Print a sweep again, as it stands."""
    storage = Storage(name if "://" in name or "/" in name else f"{absolute(output_dir)}/{name}")
    known = read_sweep(storage)
    if known is None:
        raise BadInput(f"--show {name}: {storage.root} is no sweep's folder (no {SWEEP} in it)")
    base, options = known["config"], known["options"]
    trials = read_trials(ledger_directory(storage))
    noted = json.loads(storage.read("mlflow.json") or b"{}")
    status = "killed" if known["status"] == "running" and not is_held(storage) else known["status"]
    report(options.metric, base, trials, status, noted.get("run_id"))
    return 0


def set_tune_environment() -> None:
    """Before ray is imported: no signal handler, no loggers and no files beside ours."""
    for name, value in {
        "TUNE_DISABLE_SIGINT_HANDLER": "1",
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a trial that fails has none
        "TUNE_WARN_THRESHOLD_S": "60",
        "RAY_AIR_NEW_OUTPUT": "0",
    }.items():
        os.environ.setdefault(name, value)


if __name__ == "__main__":
    run_main(main)

"""python -m tune.sweep --space FILE.yaml [--num-trials N] [--search random|grid|optuna] [--scheduler asha] ...

Try out settings: trials of the same run as app.train's, by Ray Tune, in one MLflow tree. The last line on
stdout is one JSON object. The same command goes on with a sweep that was interrupted.
"""

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from app.cli import parse_config, run_main
from app.cluster import Cluster, connected, set_environment
from app.config import Config
from app.config_file import to_yaml
from app.data.datasets import check_data
from app.deliver import without_credentials
from app.errors import BadInput
from app.interrupt import Interrupt
from app.lock import held
from app.progress import Display
from app.runs import SWEEP, absolute, resolved, run_storage, tracking_directory
from app.storage import Storage
from app.user_code import import_own
from tune.ledger import Ledger, Trial, best_checkpoint, ranked, read_trials
from tune.report import counts, draw, print_ranking
from tune.space import Space, read_space
from tune.spec import Options, check_options, open_sweep, read_sweep

BEST = "best.yaml"


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
    for name, instead in (("run_name", "--sweep-name"), ("num_workers", "--workers-per-trial")):
        if getattr(config, name) != Config.model_fields[name].default:
            raise BadInput(f"--{name.replace('_', '-')} is each trial's own: use {instead}")
    name = command.sweep_name or f"sweep-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    base = resolved(Config(**config.model_dump() | {"run_name": name, "num_workers": command.workers_per_trial}))
    options = Options(**{field: getattr(command, field) for field in Options.model_fields})
    space = read_space(command.space, base)
    check_options(options, space, base)
    return sweep(options, space, base, command.verbose)


def sweep(options: Options, space: Space, base: Config, verbose: bool = False) -> int:
    """Try out, or go on with, the sweep that base names. Returns the exit code."""
    display = Display()
    uri = None if base.tracking_uri == "none" else base.tracking_uri
    base = base.model_copy(update={"tracking_uri": without_credentials(base.tracking_uri or "")})
    storage = run_storage(base)
    import_own(base)
    for note in check_data(base).notes:
        display.event(note)
    storage.check_writable()
    display.event(f"sweep {base.run_name} in {storage.root}")

    set_tune_environment()
    set_environment()
    with (
        held(storage, str(base.run_name)),
        Interrupt() as interrupt,
        display,
        connected(base, verbose) as cluster,
    ):
        interrupt.listen()
        open_sweep(options, space, base)
        with contextlib.closing(Ledger(tracking_directory(storage.root) / "trials")) as ledger:
            status, run_id = try_out(options, space, base, uri, cluster, ledger, display, interrupt)
    report(options.metric, base, ledger.trials, status, run_id)
    return 128 + interrupt.signal if interrupt.count else 0


def try_out(
    options: Options,
    space: Space,
    base: Config,
    uri: str | None,
    cluster: Cluster,
    ledger: Ledger,
    display: Display,
    interrupt: Interrupt,
) -> tuple[str, str | None]:
    """The trials from the first to the last, and what is written of them. Returns how it ended, and MLflow's run."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from app.fit import MLFLOW_STATUS, parameters, tags, wait_for_delivery
    from tune.drive import TUNE_FILES, conduct
    from tune.search import Optuna, Planned, planned
    from tune.tracker import PARENT, SweepTracker, TrackerOf
    from tune.trial import Task

    storage = run_storage(base)
    if options.search == "optuna":
        count = options.num_trials or 10
        source: Any = Optuna(space, base, options.metric, ledger.trials.values())
    else:
        settings = planned(space, base, options.search, options.num_trials or 10)
        source, count = Planned(settings), len(settings)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor_options = {"num_cpus": 0, "max_restarts": 3, "max_task_retries": 3, "scheduling_strategy": here}
    actor = ray.remote(SweepTracker).options(**actor_options).remote(storage.root, uri, base.experiment, base.run_name)  # type: ignore[attr-defined]  # ray's stubs
    parent = TrackerOf(actor, PARENT)
    described = {name: str(value) for name, value in options.model_dump().items()}
    parent.begin.remote(parameters(base) | described, tags(base, cluster) | {"sweep": "parent"}, to_yaml(base))
    parent.artifact.remote("space.yaml", space.text.encode())

    task = Task(base.model_dump(), storage.root, actor, cluster, options.scheduler == "pbt", dict(ledger.trials))
    if storage.local:
        shutil.rmtree(storage.local / TUNE_FILES, ignore_errors=True)  # Ray Tune's notes of an earlier start
    conduct(options, space, source, count, task, ledger, display, interrupt)

    names = [dimension.name for dimension in space.dimensions]
    for file, content in draw(ledger.trials, options.metric, names).items():
        parent.artifact.remote(file, content)
    status = "killed" if interrupt.count else "finished"
    if (best := best_config(base, ledger.trials, options.metric)) is not None:
        content = to_yaml(best).encode()
        storage.write(BEST, content)
        parent.artifact.remote(BEST, content)
        first = ranked(ledger.trials, options.metric)[0]
        checkpoint = best_checkpoint(storage.root, first)
        if status == "finished" and checkpoint is not None:
            tracker = TrackerOf(actor, first.name)
            tracker.model.remote(checkpoint, options.register_as)
            tracker.finish.remote(MLFLOW_STATUS[first.status], None)  # which MLflow takes for finished
    parent.finish.remote("KILLED" if interrupt.count else "FINISHED", None)
    state = wait_for_delivery(actor, storage.root, display, interrupt)
    return status, state.run_id


def best_config(base: Config, trials: dict[int, Trial], metric: str) -> Config | None:
    """Settings to train the best trial's in full, as a run of its own."""
    order = ranked(trials, metric)
    if not order or order[0].best is None:
        return None
    return Config(**{**base.model_dump(), **order[0].settings, "run_name": f"{base.run_name}-best"})


def report(metric: str, base: Config, trials: dict[int, Trial], status: str, run_id: str | None) -> None:
    """The table, the command that trains the best in full, and as stdout's last line the JSON object."""
    from app.progress import console

    print_ranking(str(base.run_name), trials, metric)
    best, root = best_config(base, trials, metric), run_storage(base).root
    first = ranked(trials, metric)[0] if best is not None else None
    if best is not None:
        console().print(f"train the best in full: python -m app.train --config {root}/{BEST}", markup=False)
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
    }
    print(json.dumps(content, allow_nan=False), flush=True)


def show(name: str, output_dir: str) -> int:
    """Print a sweep again, as it stands."""
    storage = Storage(name if "://" in name or "/" in name else f"{absolute(output_dir)}/{name}")
    known = read_sweep(storage)
    if known is None:
        raise BadInput(f"--show {name}: {storage.root} is no sweep's folder (no {SWEEP} in it)")
    base, options = known["config"], known["options"]
    trials = read_trials(tracking_directory(storage.root) / "trials")
    noted = json.loads(storage.read("mlflow.json") or b"{}")
    running = any(trial.status == "running" for trial in trials.values())
    status = "running" if running else "killed" if counts(trials)["killed"] else "finished"
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

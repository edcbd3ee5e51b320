"""fit(config): a run from its name to its summary, on Ray. What the command, sweeps and tests call."""

import getpass
import importlib
import os
import platform
import shutil
import subprocess
import threading
import time
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from app.cluster import Cluster, connected, set_environment
from app.config import Config
from app.config_file import to_yaml
from app.data.datasets import check_data
from app.deliver import Target, deliver, mlflow_environment
from app.errors import BadInput, TrainingFailed, Unavailable
from app.interrupt import Interrupt
from app.lock import held
from app.nodes import look_around
from app.phases import NO_PHASES, Phases
from app.progress import LOOK_EVERY_S, Display
from app.record import snapshot, store_rest
from app.runs import (
    LENGTH_DEPENDENT_SCHEDULES,
    Run,
    Summary,
    checkpoint_name,
    checkpoint_storage,
    discard_run,
    forget_if_not_begun,
    open_run,
    remove_leftovers,
    resolved,
    run_storage,
    store_tokenizer,
    tokenizer_to_go_on_with,
    tracking_directory,
    write_run,
)
from app.spool import Spool
from app.storage import without_credentials
from app.tracking import DeliveryState, Tracker
from app.user_code import import_own

if TYPE_CHECKING:
    from app.outcome import Outcome

MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED", "killed": "KILLED"}
# How long a finished run waits for its records to be delivered: while MLflow answers, and once it does not.
DELIVERY_S, UNREACHABLE_S = 180.0, 5.0


def fit(
    config: Config, verbose: bool = False, start_over: bool = False, began: float | None = None
) -> tuple[Summary, int]:
    """Train, or continue, the run that the config names. Return how it ended and the exit code.

    start_over: discard what there is of the run first. began: when the command did, in seconds since 1970, for the
    summary; default: now. Raises BadInput for anything that cannot work; nothing of an earlier run is lost by it.
    """
    began = time.time() if began is None else began
    phases = Phases.of_this_process() if verbose else NO_PHASES
    phases("the settings are read")
    display = Display(phases)
    config = resolved(config)
    tracking_uri = None if config.tracking_uri == "none" else config.tracking_uri
    # From here on the config is written down and sent around: passwords stay here.
    config = config.model_copy(update={"tracking_uri": without_credentials(config.tracking_uri or "")})
    if not start_over and (done := finished_before(config, display)):
        return done, 0
    import_own(config)
    found = check_data(config, None if start_over else tokenizer_to_go_on_with(config))
    for note in found.notes:
        display.event(note)
    run_storage(config).check_writable()
    display.event(f"run {config.run_name} in {run_storage(config).root}")

    phases("the data is there")
    set_environment()  # before the first import of ray, which reads it
    threading.Thread(target=import_beside, args=(config,), daemon=True).start()
    with (
        held(run_storage(config), str(config.run_name)),
        Interrupt() as interrupt,
        display,
        connected(config, verbose) as cluster,
    ):
        phases("Ray is up")
        interrupt.listen()
        if start_over:
            discard_run(config)
        if done := finished_before(config, display):  # by the job that held its name until now
            return done, 0
        look_around(config, cluster, tracking_uri, display.event)
        forget_if_not_begun(config)
        begin(config, found.tokenizer)
        tracker = start_tracker(config, tracking_uri)
        tracker.begin.remote(parameters(config), tags(config, cluster), to_yaml(config))
        from ray.exceptions import RayError

        from app.attempts import train
        from app.failures import why_lost

        phases("what trains is imported")
        try:
            outcome = train(config, cluster, tracker, display, interrupt)
            summary = finish(config, outcome, tracker, display, interrupt, began)
        except RayError as error:  # not a worker's, which Ray Train handles: the Tracker's, which is on this node
            close_without_tracker(config, tracking_uri)
            raise TrainingFailed(f"{why_lost(error)}; the same command goes on from the last checkpoint") from error
        except Exception:  # a bug, shown as one
            close_without_tracker(config, tracking_uri)
            raise
    if outcome.exit_code == 2:
        raise BadInput(outcome.error or "")
    return summary, 128 + interrupt.signal if interrupt.count and summary.status == "killed" else outcome.exit_code


def import_beside(config: Config) -> None:
    """What takes seconds to import: beside Ray's start, not after it."""
    importlib.import_module("app.attempts")
    if "RAY_ADDRESS" in os.environ:
        importlib.import_module("app.worker")
    elif config.max_workers == 1:  # which trains here: torch's optimizers import its compiler, used or not
        importlib.import_module("app.here")
        importlib.import_module("torch._dynamo")


def begin(config: Config, tokenizer: str | None) -> None:
    """Write down what is about to be trained."""
    remove_leftovers(config)
    write_run(Run(config, "running"))
    if tokenizer is not None:
        store_tokenizer(config, tokenizer)


def finished_before(config: Config, display: Display) -> Summary | None:
    """Its summary, if the run has nothing left to do. Raises BadInput for settings that are not the run's."""
    run = open_run(config)
    if run.status != "finished" or run.summary is None:
        return None
    longer = "" if config.schedule in LENGTH_DEPENDENT_SCHEDULES else "raise --epochs to go on, or "
    display.event(f"run {config.run_name} is finished; {longer}choose another --run-name to start afresh")
    return run.summary


def close_without_tracker(config: Config, tracking_uri: str | None) -> None:
    """Mark the run as failed where no Tracker is left to do it."""
    write_run(Run(config, "failed"))
    root = run_storage(config).root
    storage, directory = run_storage(config), tracking_directory(root)
    spool = Spool(directory)
    spool.append("status", status="FAILED")
    spool.sync()
    if tracking_uri is not None:
        try:
            deliver(directory, Target(tracking_uri, config.experiment, str(config.run_name), storage))
        except Exception as error:  # whatever a server that is not ours does
            print(f"MLflow was not told ({type(error).__name__}); do it with: python -m app.deliver {root}")
            if not storage.local:
                store_rest(storage, snapshot(spool, str(config.run_name)))


def start_tracker(config: Config, tracking_uri: str | None) -> Any:
    """The run's Tracker as an actor."""
    root = run_storage(config).root
    where = (str(tracking_directory(root)), root, tracking_uri, config.experiment, config.run_name)
    return actor_here(Tracker, *where, mlflow_environment())


def actor_here(actor_class: type, *arguments: Any) -> Any:
    """On this node, with no CPU of its own; it comes back if its process dies."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "max_restarts": 3, "max_task_retries": 3, "scheduling_strategy": here}
    return ray.remote(actor_class).options(**options).remote(*arguments)  # type: ignore[attr-defined]  # ray's stubs


def parameters(config: Config) -> dict[str, str]:
    return {name: without_credentials(str(value)) for name, value in config.model_dump().items()}


def tags(config: Config, cluster: Cluster) -> dict[str, str]:
    found = {
        "mlflow.user": getpass.getuser(),
        "mlflow.source.name": "app.train",
        "mlflow.source.type": "LOCAL",
        "device": "cuda" if cluster.use_gpu else "cpu",
        "host_count": str(cluster.num_nodes),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "torchvision", "ray", "mlflow")},
    }
    if shutil.which("git"):
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        if commit.returncode == 0:  # started inside a checkout
            found["mlflow.source.git.commit"] = commit.stdout.strip()
    return found


def as_far_as_saved(config: Config, outcome: "Outcome") -> "Outcome":
    """Return the outcome with what the newest good checkpoint tells; as it is if there is none that can be read."""
    from app.checkpoint import find_good, load_checkpoint

    storage = checkpoint_storage(config)

    def ignore(_: str) -> None:
        """The workers have said which checkpoints are damaged."""

    try:
        name = find_good(storage, ignore)
        if name is None:
            return outcome
        position = load_checkpoint(storage, name).position
        named = checkpoint_name(position.best.step)
        best = find_good(storage, ignore, prefer=named) or name
    except (BadInput, Unavailable):  # the outcome's own error says why the run ended
        return outcome
    return replace(
        outcome,
        checkpoint=storage.uri(best),
        epoch=position.epoch,
        step=position.step,
        samples_seen=position.samples_seen,
        run_train_seconds=position.train_seconds,
        # of another checkpoint than the best, which is lost, nobody can measure them here
        metrics=position.best.metrics() if best == named else {},
    )


def finish(
    config: Config, outcome: "Outcome", tracker: Any, display: Display, interrupt: Interrupt, began: float
) -> Summary:
    """Close the MLflow run and wait for its records to be delivered."""
    import ray

    best = outcome.checkpoint if outcome.status == "finished" else None
    ray.get(tracker.finish.remote(MLFLOW_STATUS[outcome.status], best))
    state = wait_for_delivery(tracker, run_storage(config).root, display, interrupt)
    return concluded(config, outcome, state.run_id, time.time() - began)


def wait_for_delivery(tracker: Any, root: str, display: Display, interrupt: Interrupt) -> DeliveryState:
    """Until all is in MLflow, or does not come to be: what is left over is told how to deliver."""
    import ray

    began = unreachable_since = time.monotonic()
    while True:
        state: DeliveryState = ray.get(tracker.delivery_state.remote())  # type: ignore[assignment]  # ray's stubs
        now = time.monotonic()
        display.waiting(f"writing the rest to MLflow, {now - began:.0f} s")
        unreachable_since = unreachable_since if state.error else now
        if interrupt.count > 1 or state.all_sent or now - began > DELIVERY_S or now - unreachable_since > UNREACHABLE_S:
            break
        time.sleep(LOOK_EVERY_S)
    problem: Any = ray.get(tracker.store_rest.remote())
    if problem is not None:
        display.event(problem)
    if not state.all_sent:
        display.event(f"not everything is in MLflow yet; deliver it with: python -m app.deliver {root}")
    return state


def concluded(config: Config, outcome: "Outcome", run_id: str | None, seconds: float) -> Summary:
    """Write down how the run ended, after so many seconds of the command."""
    if outcome.checkpoint is None:  # the workers could not say
        outcome = as_far_as_saved(config, outcome)
    summary = Summary(
        run_name=config.run_name or "",
        run_id=run_id,
        status=outcome.status,
        checkpoint=outcome.checkpoint,
        epoch=outcome.epoch,
        step=outcome.step,
        samples_seen=outcome.samples_seen,
        samples_per_s=outcome.samples_per_s,
        seconds=seconds,
        train_seconds=outcome.run_train_seconds,
        metrics=outcome.metrics,
        error=outcome.error,
    )
    write_run(Run(config, outcome.status, summary))
    return summary

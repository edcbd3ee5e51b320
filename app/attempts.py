"""Training from the first worker to the last: attempts, each a TorchTrainer on the workers there is room for.

Within an attempt Ray Train starts workers that died again. A new attempt is made where the number of
workers is to change, and where a node is about to go. Either way training goes on from the newest
checkpoint, with the same samples in the same steps. One worker on a Ray of this machine is this process.

torch is imported where it is needed alone: workers start the sooner for each process that does without.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError

from app.cluster import Cluster
from app.config import Config
from app.distributed import loopback
from app.failures import TellFailures, why
from app.interrupt import TRAINING_HERE, Interrupt
from app.memory import variables
from app.nodes import look_here
from app.outcome import Outcome
from app.places import Places, draining_nodes
from app.progress import LOOK_EVERY_S, Display
from app.scratch import scratch_folder
from app.storage import Storage
from app.tracking import LIVE_EVERY_S, Progress

if TYPE_CHECKING:
    from app.clock import Span

with contextlib.suppress(ImportError):  # raised again in build_trainer(), which does without
    import app.own_ray  # noqa: F401  # imported early, while Ray starts

# How often the cluster is asked for nodes that are to go, and for more places.
CLUSTER_EVERY_S = 1.0
# How long training in this process that nobody waits for any more may take to end: the process ends without it then
# (interrupt.exit_with).
LEAVE_S = 2.0
# How long collectives wait, beyond --setup-timeout-s: a rank waits in one while another one fetches its data, which may
# take hours. What hangs is ended long before, by its rank's watchdog.
COLLECTIVE_S = 4 * 3600


def train(
    config: Config,
    cluster: Cluster,
    tracker: Any,
    display: Display,
    interrupt: Interrupt,
    span: "Span | None" = None,
) -> Outcome:
    """Train to the end, until it is interrupted or fails for good, or until the steps of the span are measured."""
    screen = Screen(tracker, display)
    here, elastic = is_here(config, cluster), config.max_workers > config.min_workers
    counted_here = here or elastic
    failed_starts = 0
    while True:
        num_workers = 1 if here else wait_for_places(config, cluster, screen, interrupt)
        if num_workers == 0:
            return Outcome("killed")
        ray.get(tracker.start_attempt.remote(num_workers, elastic))
        failures_left = config.max_failures - failed_starts - screen.update().failures
        budget = FailureConfig(
            # Ray waits for the number of workers it had: what an elastic run goes on with is decided here.
            max_failures=0 if counted_here else failures_left,
            max_preemption_failures=0 if counted_here else -1,
            # It also starts for ever what cannot be started.
            controller_failure_limit=0,
        )
        try:
            outcome = attempt(config, cluster, num_workers, budget, tracker, screen, interrupt, span)
        except TrainingFailedError as error:
            if known := ray.get(tracker.failure.remote()):
                return Outcome("failed", error=known[0], exit_code=known[1])
            no_room = isinstance(error, ControllerError) and isinstance(
                error.controller_failure, WorkerGroupStartupTimeoutError
            )
            failed_starts += isinstance(error, ControllerError) and not no_room
            if failed_starts + screen.update().failures > config.max_failures:
                return Outcome("failed", error=f"training failed: {why(error)}", exit_code=1)
        else:
            if outcome.status != "paused":
                return outcome


class Screen:
    """What the Tracker has to tell, shown on the terminal."""

    def __init__(self, tracker: Any, display: Display):
        self._tracker, self._display = tracker, display
        self._events_seen = self._validations_seen = self._epochs_seen = 0
        self.phases = display.phases

    def update(self) -> Progress:
        seen = (self._events_seen, self._validations_seen, self._epochs_seen)
        progress: Progress = ray.get(self._tracker.progress.remote(*seen))
        for event in progress.events:
            self._display.event(event)
        for validation in progress.validations:
            self._display.validated(validation)
        for live in progress.epochs:
            self._display.epoch_ended(live)
        self._events_seen, self._validations_seen = progress.events_seen, progress.validations_seen
        self._epochs_seen = progress.epochs_seen
        self._display.show(progress.live)
        return progress

    def event(self, text: str) -> None:
        self._display.event(text)


def wait_for_places(config: Config, cluster: Cluster, screen: Screen, interrupt: Interrupt) -> int:
    """The number of workers to start: as many as there is room for, at least the least. 0: interrupted."""
    resources = resources_per_worker(config, cluster)
    places = Places(config.max_workers, resources, least=config.min_workers)
    began, told = time.monotonic(), False
    try:
        while not interrupt.count:
            if screen.update().stop == "killed":  # a sweep's, which has no terminal to hear it from
                return 0
            if (ready := places.ready()) >= config.min_workers and places.settled():
                return ready
            if not told and time.monotonic() - began > 10:
                told = True
                each = " and ".join(f"{amount:g} {name}" for name, amount in resources.items())
                screen.event(f"waiting for room for {config.min_workers} workers of {each}")
            time.sleep(LOOK_EVERY_S)
        return 0
    finally:
        places.release()


def resources_per_worker(config: Config, cluster: Cluster) -> dict[str, float]:
    return {"CPU": config.cpus_per_worker} | ({"GPU": 1} if cluster.use_gpu else {})


def attempt(
    config: Config,
    cluster: Cluster,
    num_workers: int,
    budget: FailureConfig,
    tracker: Any,
    screen: Screen,
    interrupt: Interrupt,
    span: "Span | None" = None,
) -> Outcome:
    """Run Ray Train in a thread; meanwhile show its progress, hear signals and watch the cluster.

    Raises Ray's TrainingFailedError.
    """
    task = {"config": config.model_dump(), "tracker": tracker, "phases": screen.phases, "span": span}
    here, left = is_here(config, cluster), threading.Event()
    if here:
        from app.here import attempt_here

        run = partial(attempt_here, task | {"left": left})
    else:
        task["here"] = None if cluster.is_own else look_here(config)
        run = in_workers(task, config, cluster, num_workers, budget, screen.event)
    training: Future[Outcome] = Future()

    def work() -> None:
        try:
            training.set_result(run())
        except BaseException as error:  # raised again where the result is asked for
            training.set_exception(error)

    screen.phases("the workers are started")
    thread = threading.Thread(target=work, name=TRAINING_HERE if here else "ray-train", daemon=True)
    thread.start()
    watch = ClusterWatch(config, cluster, num_workers)
    told = ""
    try:
        while True:
            ended = not thread.is_alive()
            progress = screen.update()
            if ended:
                return training.result()
            if progress.hung is not None:  # in this process, where nothing else can end it
                return Outcome("failed", error=progress.hung, exit_code=1)
            if interrupt.count:
                tracker.request_stop.remote("killed")
                if progress.live is None or interrupt.count > 1:  # there is nothing new to save
                    return Outcome("killed")
                if told != "killed":
                    told = "killed"
                    screen.event("stopping after a checkpoint; once more to leave at once")
            elif reason := watch.reason_to_pause(progress):
                tracker.request_stop.remote("paused")
                if told != "paused":
                    told = "paused"
                    screen.event(f"{reason}: starting the workers anew after a checkpoint")
            thread.join(LOOK_EVERY_S if progress.live is None else LIVE_EVERY_S)
    finally:
        watch.close()
        if here:  # what it reports from now on ends it
            left.set()
            thread.join(LEAVE_S)


def is_here(config: Config, cluster: Cluster) -> bool:
    """Whether the command's process is the worker: there is none to wait for. What has gone wrong on a GPU ends with
    the process that has it, so there it is one of Ray's."""
    if not (cluster.is_own and config.max_workers == 1 and not cluster.use_gpu):
        return False
    import torch

    # Ray Train's local mode takes a GPU where there is one, whatever --device says.
    return not torch.cuda.is_available()


def in_workers(
    task: dict[str, Any],
    config: Config,
    cluster: Cluster,
    num_workers: int,
    budget: FailureConfig,
    tell: Callable[[str], None],
) -> Callable[[], Outcome]:
    """Training in processes that Ray starts."""
    given: dict[str, Any] = {
        "train_loop_config": task,
        "scaling_config": ScalingConfig(
            num_workers=num_workers,
            use_gpu=cluster.use_gpu,
            resources_per_worker=resources_per_worker(config, cluster),
            placement_strategy="SPREAD",  # over the nodes: each one's memory and disks serve fewer workers
        ),
        # Checkpoints are ours (checkpoint.py), so Ray has no record of them that could be damaged or
        # contradict what lies in the run's folder.
        "run_config": RunConfig(
            name=config.run_name,
            # Ray writes a folder's marker, and a list of its own checkpoints: none are for an object store.
            storage_path=str(Storage(config.output_dir).local or scratch_folder()),
            failure_config=budget,
            callbacks=[TellFailures(task["tracker"])],
            worker_runtime_env={} if cluster.use_gpu else {"env_vars": variables()},
        ),
    }
    trainer = build_trainer(given, COLLECTIVE_S + math.ceil(config.setup_timeout_s), cluster.is_own, tell)
    return lambda: cast(Outcome, trainer.fit().return_value)


def build_trainer(given: dict[str, Any], timeout_s: int, is_own: bool, tell: Callable[[str], None]) -> Any:
    """Return Ray's TorchTrainer; on a local Ray own_ray's, which starts sooner, if it fits this version of Ray.

    timeout_s: of collectives.
    """
    if is_own:
        try:
            from app.own_ray import LocalTrainer, check_internals

            check_internals()
            return LocalTrainer(timeout_s, **given)
        except ImportError as error:
            tell(f"Ray {ray.__version__} differs from the versions that are known ({error}): a start takes longer")
        environment = given["run_config"].worker_runtime_env
        interfaces = {"GLOO_SOCKET_IFNAME": loopback(), "NCCL_SOCKET_IFNAME": loopback()}
        environment["env_vars"] = environment.get("env_vars", {}) | interfaces
    from ray.train.torch import TorchConfig, TorchTrainer

    from app.worker import train_loop_per_worker

    return TorchTrainer(train_loop_per_worker, torch_config=TorchConfig(timeout_s=timeout_s), **given)


class ClusterWatch:
    """Finds out while workers train whether it is better to start them anew."""

    def __init__(self, config: Config, cluster: Cluster, num_workers: int):
        self._resize_after_s = config.resize_after_s
        self._wanted, self._resources = config.max_workers - num_workers, resources_per_worker(config, cluster)
        self._more: Places | None = None
        self._nodes: frozenset[str] = frozenset()
        self._training_since = self._looked_at = 0.0

    def reason_to_pause(self, progress: Progress) -> str | None:
        now = time.monotonic()
        if progress.live is None:  # Ray starts the workers again, and needs the places itself
            self.close()
            self._nodes, self._training_since = frozenset(), 0.0
            return None
        self._nodes |= progress.nodes
        self._training_since = self._training_since or now
        if now - self._looked_at < CLUSTER_EVERY_S or progress.live["step"] == progress.live["total_steps"]:
            return None
        self._looked_at = now
        try:
            return self._why_now(now - self._training_since)
        except Exception:  # whatever a cluster raises that does not answer: the next time it may
            return None

    def _why_now(self, training_s: float) -> str | None:
        if going := draining_nodes() & self._nodes:
            return f"{len(going)} of {len(self._nodes)} nodes with workers {'is' if len(going) == 1 else 'are'} to go"
        if training_s < self._resize_after_s:
            return None
        if self._more is None:
            # They stay as long as the attempt: so the cluster is asked for more, and says that it has it.
            self._more = Places(self._wanted, self._resources)
        more = self._more.ready()
        return f"there is room for {more} more worker{'s' * (more > 1)}" if more and self._more.settled() else None

    def close(self) -> None:
        if self._more is not None:
            self._more.release()
            self._more = None

"""Ray: a local one that starts and stops with the command, or the cluster that RAY_ADDRESS names."""

import contextlib
import json
import logging
import math
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from app.config import Config
from app.errors import BadInput, TrainingFailed
from app.user_code import packed

CONNECT_S = 10.0
# What a worker finds in its environment of torchrun, or of another program that starts one for each GPU.
LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What all processes of a Ray of one machine would send while training goes on, and nothing reads.
UNREAD = {"enable_metrics_collection": False, "task_events_report_interval_ms": 0}


@dataclass(frozen=True)
class Cluster:
    """What the run gets: use_gpu is --device auto decided; notes are for the person; is_own: Ray ends with the run."""

    use_gpu: bool
    num_nodes: int
    notes: tuple[str, ...]
    is_own: bool = False


@contextlib.contextmanager
def connected(config: Config, verbose: bool, has_trials: bool = False) -> Iterator[Cluster]:
    """Connect to Ray, check that the run fits, and disconnect at the end. Raises BadInput.

    has_trials: for a sweep, where an actor of Ray Train's for each trial of several workers expects an API server.
    """
    refuse_launcher()
    address = os.environ.get("RAY_ADDRESS")
    set_environment()
    import ray
    import ray._private.worker as messages

    notes: list[str] = []
    options: dict[str, Any] = {"logging_level": logging.INFO if verbose else logging.ERROR, "log_to_driver": verbose}
    already_connected = ray.is_initialized()  # by a program that calls fit(), a sweep or a test
    if address is None and not already_connected:
        cores = os.cpu_count() or 1
        needed = math.ceil(config.min_workers * config.cpus_per_worker)
        if needed > cores:
            # People try DDP on laptops: slower, and the same numbers.
            notes.append(f"{config.min_workers} workers share {cores} CPU cores: slower than on as many cores")
        try:
            with without_mlflow_passwords(), without_needless_processes(verbose, has_trials):
                options |= {"include_dashboard": False, "_system_config": UNREAD}
                ray.init(address="local", num_cpus=max(cores, needed), **options)
        except Exception as error:  # a bare one, where a machine has no time or no memory left for it
            raise TrainingFailed(f"Ray did not start on this machine: {error}") from error
    elif address is not None and not already_connected:
        with packed(config) as modules:
            try:
                host, _, port = address.rpartition("://")[2].rpartition(":")
                if port.isdigit():  # Ray itself tries for minutes where nobody answers
                    socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
                ray.init(address=address, runtime_env=runtime_env(modules), **options)
            except (OSError, ValueError, RuntimeError) as error:
                raise BadInput(f"RAY_ADDRESS {address}: no cluster answers there: {error}") from None
    print_messages = messages.print_to_stdstream
    if not verbose and not already_connected:
        # Ray prints what it calls errors on stdout, whatever log_to_driver says: pages of a raylet's log
        # where a node goes. What it means for the run is told by attempts.py.
        messages.print_to_stdstream = lambda *args, **kwargs: None
    try:
        use_gpu = check_fits(config)
        if not use_gpu and config.device == "auto" and (gpus := ray.cluster_resources().get("GPU", 0)):
            notes.append(f"{gpus:g} GPUs are too few for {config.min_workers} workers: training on CPUs")
        num_nodes = sum(node["Alive"] for node in ray.nodes())
        yield Cluster(use_gpu, num_nodes, tuple(notes), is_own=address is None and not already_connected)
    finally:
        if not already_connected:
            ray.shutdown()
            messages.print_to_stdstream = print_messages


def refuse_launcher() -> None:
    """Raise BadInput where something else starts the workers: each would be a run of its own."""
    if all(name in os.environ for name in LAUNCHERS):
        raise BadInput(
            f"{', '.join(LAUNCHERS)} are set, as torchrun sets them: Ray starts the workers, so start this command "
            "once and by itself, with --num-workers; or, if nothing else starts it, unset them"
        )


@contextlib.contextmanager
def without_mlflow_passwords() -> Iterator[None]:
    """Ray's processes keep the environment that Ray is started in. Of this one only the Tracker needs MLflow's."""
    own = {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_")}
    for name in own:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(own)


@contextlib.contextmanager
def without_needless_processes(verbose: bool, has_trials: bool) -> Iterator[None]:
    """Ray starts without its autoscaler, what sends on what workers print (verbose has use for it) and the API server.
    ray.init() has no parameters for it; each takes seconds of the cores that workers start on, and a little of them
    later."""
    from ray._private import ray_constants
    from ray._private.node import Node

    def without_api_server(node: Node, **_: Any) -> None:
        # Ray's agent looks for the address each second, and logs that there is none.
        where = (ray_constants.DASHBOARD_ADDRESS.encode(), b"127.0.0.1:0", True, ray_constants.KV_NAMESPACE_DASHBOARD)
        client = node.get_gcs_client()
        assert client is not None  # it is what was started before
        client.internal_kv_put(*where)

    instead: dict[str, Callable[..., None]] = {"start_monitor": lambda _: None}
    if not verbose:
        instead["start_log_monitor"] = lambda _: None
    if not has_trials:
        instead["start_api_server"] = without_api_server
    kept = {name: getattr(Node, name) for name in instead}
    for name, method in instead.items():
        setattr(Node, name, method)
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(Node, name, method)


def runtime_env(modules: list[str]) -> dict[str, Any]:
    """What Ray is to send to every node: these modules, beside those that a submitted job has named itself."""
    if not modules:
        return {}
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")).get("runtime_env") or {}
    return {"py_modules": [*(job.get("py_modules") or ()), *modules]}


def set_environment() -> None:
    """Ray's settings in the environment, but for those that the user has set there."""
    settings = {
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else Ray makes a second environment for its workers
        # Polls of the workers' health, which take time of theirs: also how soon a dead one or the end is noticed.
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1",
        "RAY_CHDIR_TO_TRIAL_DIR": "0",  # workers find the user's modules where the command was started
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",  # then attempts.py looks how many have room
        "RAY_OVERRIDE_JOB_RUNTIME_ENV": "1",  # else it refuses a job with modules of its own, see runtime_env()
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # attempts.py watches: Ray's is an actor, heard through a barrier
    }
    if "RAY_ADDRESS" in os.environ:
        settings["RAY_TRAIN_ENABLE_STATE_TRACKING"] = "1"  # the dashboard's Train view
    else:
        settings |= {
            "RAY_TRAIN_METRICS_ENABLED": "0",  # nothing scrapes them
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # a Ray of one machine listens on loopback, as it does there
        }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def check_fits(config: Config) -> bool:
    """Whether the workers get GPUs. Raises BadInput if the cluster cannot hold them, now or after scaling up."""
    import ray

    have, limits = ray.cluster_resources(), autoscaling_limits()
    most = {name: max(have.get(name, 0), limits.get(name, 0)) for name in ("CPU", "GPU")}
    use_gpu = config.device == "cuda" or (config.device == "auto" and most["GPU"] >= config.min_workers)
    if config.sync_batchnorm and not use_gpu:
        raise BadInput("--sync-batchnorm needs GPUs, and this run has none: leave it out")
    if use_gpu and most["GPU"] < config.min_workers:
        raise BadInput(
            f"--device cuda with --num-workers {config.num_workers} needs as many GPUs, "
            f"and the cluster has {most['GPU']:g}: use fewer workers or --device cpu"
        )
    places = room(config, use_gpu=False)
    if places < config.min_workers:
        raise BadInput(
            f"--num-workers {config.num_workers} x --cpus-per-worker {config.cpus_per_worker:g} needs "
            f"{config.min_workers * config.cpus_per_worker:g} CPUs, and the cluster has {most['CPU']:g}, "
            f"which is room for {places} such workers: lower one of them"
        )
    return use_gpu


def room(config: Config, use_gpu: bool) -> int:
    """How many of the run's workers the cluster can hold, now or after scaling up."""
    import ray

    def workers(have: dict[str, float]) -> int:
        cpus = int(have.get("CPU", 0) / config.cpus_per_worker + 1e-9)
        return min(cpus, int(have.get("GPU", 0))) if use_gpu else cpus

    # A worker's CPUs are all on one node.
    now = sum(workers(node["Resources"]) for node in ray.nodes() if node["Alive"])
    return max(now, workers(autoscaling_limits()))


def autoscaling_limits() -> dict[str, float]:
    """The most of each resource that the cluster's autoscaler is configured to have; empty without one."""
    from ray._private.state import state  # the only place that knows them

    return dict(state.get_max_resources_from_cluster_config() or {})

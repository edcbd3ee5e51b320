"""Training in this process: of the command's own one worker, and of a sweep's trial.

The command itself is the worker where it starts a Ray of its own, has one worker and computes on the CPU: there is no
process to wait for. What has gone wrong on a GPU ends with the process that has it, so there it is one of Ray's.
"""

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.api.exceptions import WorkerGroupError
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch's stubs

from app.cluster import Cluster
from app.config import Config
from app.failures import why
from app.own_ray import loopback
from app.worker import Outcome, train_loop_per_worker

# How long training that nobody waits for any more is given to end; the process ends without it then (cli.run_main).
LEAVE_S = 2.0


def is_here(config: Config, cluster: Cluster) -> bool:
    """Whether the command's process is the worker."""
    # Ray Train's local mode takes a GPU where there is one, whatever --device says.
    return cluster.is_own and config.max_workers == 1 and not cluster.use_gpu and not torch.cuda.is_available()


def train_here(task: dict[str, Any]) -> Outcome:
    """Training in this process, by Ray Train's local mode: on this process's device."""
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config=task,
        scaling_config=ScalingConfig(num_workers=0),
    )
    return cast(Outcome, trainer.fit().return_value)


def attempt_here(task: dict[str, Any]) -> Outcome:
    """train_here() in the command's process, as by a worker of Ray's: failures are raised, and told to the Tracker,
    as its are, and nothing of the training is left for the next attempt or for the caller's own program."""
    try:
        with group_of_one(), as_before():
            return train_here(task)
    except Exception as error:
        failure = WorkerGroupError("", {0: without_frames(error)})
    gc.collect()  # of what refers to itself
    if not task["left"].is_set():
        task["tracker"].workers_lost.remote(why(failure), True)
    raise failure


def leave(thread: threading.Thread, left: threading.Event) -> None:
    """Wait no longer for the thread that trains: what it reports from now on ends it."""
    left.set()
    thread.join(LEAVE_S)


@contextlib.contextmanager
def group_of_one() -> Iterator[None]:
    """A process group, as each of Ray's workers is in one: a user's network may ask for its rank."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback())
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        if dist.is_initialized():  # Ray Train's local mode ends it, unless the training failed
            dist.destroy_process_group()


@contextlib.contextmanager
def as_before() -> Iterator[None]:
    """torch's settings and random numbers, which a training has its own of, are afterwards what they were."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads(threads)
        if torch.are_deterministic_algorithms_enabled() != deterministic:
            torch.use_deterministic_algorithms(deterministic)


def without_frames(error: BaseException) -> Any:
    """The error without what held the training's tensors and loaders: the frames that it passed through."""
    each: BaseException | None = error
    while each is not None:
        each.__traceback__ = None
        each = each.__cause__ or each.__context__
    return error

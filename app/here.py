"""Training in this process: of the command's own one worker, and of a sweep's trial.

The command itself is the worker where there is one, on a Ray of this machine and a CPU (attempts.is_here).
"""

import contextlib
import gc
import os
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.api.exceptions import WorkerGroupError
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch's stubs

from app.distributed import loopback
from app.failures import why
from app.generators import generators_kept
from app.outcome import Outcome
from app.worker import train_loop_per_worker


def train_here(task: dict[str, Any]) -> Outcome:
    """Training in this process, by Ray Train's local mode: on this process's device."""
    config = task["config"]
    trainer = TorchTrainer(
        train_loop_per_worker,
        train_loop_config=task,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name=config["run_name"], storage_path=config["output_dir"]),  # for the user's own code
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
    """Leave torch's settings and all random number generators, which training changes, as they were."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        with generators_kept():
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

"""Ray's public APIs in a user's data set and model: what works on a cluster works on a local Ray too."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.data
import ray.train
import ray.train.collective
import torch
import torch.distributed as dist
from ray._private.state import actors
from ray.util.metrics import Gauge

from app.config import Config
from app.data.splits import Splits
from tests.common import PlainNet, tiny_splits
from tests.faults.common import Command, slow_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ci,
    pytest.mark.filterwarnings("ignore"),  # ray's own
]


@ray.remote
def double(number: int) -> int:
    return 2 * number


@ray.remote
class Doubler:
    def double(self, number: int) -> int:
        return 2 * number


def of_an_actor() -> int:
    actor: Any = Doubler.remote()
    return ray.get(actor.double.remote(2))


def reported_checkpoint() -> str:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "notes.txt").write_text("hello")
        ray.train.report({"a": 3.0}, checkpoint=ray.train.Checkpoint.from_directory(folder))
        checkpoint = ray.train.get_checkpoint()
        assert checkpoint is not None
        with checkpoint.as_directory() as directory:
            return (Path(directory) / "notes.txt").read_text()


def places() -> list[Any]:
    context = ray.train.get_context()
    return [context.get_world_size(), context.get_local_world_size(), context.get_node_rank()]


# Each gives the same on every rank.
CALLS: dict[str, Callable[[], Any]] = {
    "barrier": ray.train.collective.barrier,
    "broadcast": lambda: ray.train.collective.broadcast_from_rank_zero(ray.train.get_context().get_world_rank()),
    "report nothing": lambda: ray.train.report({}),
    "report metrics": lambda: ray.train.report({"a": 1.0}),
    "report a checkpoint": reported_checkpoint,
    "preemption": ray.train.get_preemption_info,
    "context": places,
    "experiment": lambda: ray.train.get_context().get_experiment_name(),
    "object": lambda: ray.get(ray.put(3)),
    "task": lambda: ray.get(double.remote(2)),
    "actor": of_an_actor,
    "data": lambda: ray.data.from_items([{"x": 1}, {"x": 2}]).take(),
    "data map": lambda: ray.data.from_items([1, 2]).map(lambda row: {"x": 2 * row["item"]}).take(),
    "gauge": lambda: Gauge("mine").set(1.0),
    "nodes": lambda: len(ray.nodes()),
}


def synchronization_actors() -> list[str]:
    """The states of Ray Train's actors behind report() and collectives."""
    return [each["State"] for each in actors().values() if each["ActorClassName"] == "SynchronizationActor"]


def call_all(where: str) -> None:
    before = synchronization_actors()
    dist.barrier()  # all ranks have looked before one of them uses it
    done = {"before": before, **{name: call() for name, call in CALLS.items()}, "after": synchronization_actors()}
    file = f"{where}-{ray.train.get_context().get_world_rank()}.json"
    (Path(os.environ["TEST_FOLDER"]) / file).write_text(json.dumps(done))


def load(config: Config) -> Splits:
    if dist.is_initialized():  # not where the command looks at the data before it starts
        call_all("load")
    return tiny_splits(config)


class Net(PlainNet):
    is_called = False

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training and dist.is_initialized() and not self.is_called:
            self.is_called = True
            call_all("forward")
        return super().forward(images)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_what_works_on_a_cluster_works_on_a_local_ray(num_workers: int, tmp_path: Path) -> None:
    own = {"dataset": "tests.integration.test_ray_apis:load", "model": "tests.integration.test_ray_apis:Net"}
    run = Command(
        slow_config(tmp_path, **own, num_workers=num_workers, epochs=1, max_failures=0),
        tmp_path,
        TEST_FOLDER=str(tmp_path),
    )
    assert run.result()[1] == 0, run.output()
    expected = {
        "barrier": None,
        "broadcast": 0,
        "report nothing": None,
        "report metrics": None,
        "report a checkpoint": "hello",
        "preemption": None,
        "context": [num_workers, num_workers, 0],
        "experiment": "r",
        "object": 3,
        "task": 4,
        "actor": 4,
        "data": [{"x": 1}, {"x": 2}],
        "data map": [{"x": 2}, {"x": 4}],
        "gauge": None,
        "nodes": 1,
    }
    for where in ("load", "forward"):
        for rank in range(num_workers):
            done = json.loads((tmp_path / f"{where}-{rank}.json").read_text())
            started = ["ALIVE"] if num_workers > 1 else []
            unstarted = ["DEPENDENCIES_UNREADY"] if num_workers > 1 else []
            assert done.pop("before") == (unstarted if where == "load" else started)  # no process until it is used
            assert done.pop("after") == started
            assert done == expected

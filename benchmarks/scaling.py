"""python -m benchmarks.scaling [--link-gbit-s 10] [--latency-us 50] [--compute-speedup 1] [any flag of app.train]

How long a step takes on N workers: a model of its parts, fitted to what this machine can measure, checked
against two workers here, and what it says of 8, 64 and 512. docs/scaling.md explains it.
"""

import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from pydantic import BaseModel, Field
from rich.table import Table
from torch import nn

from app.checkpoint import snapshot
from app.cli import parse_config, run_main
from app.config import Config
from app.data.datasets import check_data, load_splits
from app.data.sampling import build_order, build_schedule
from app.data.splits import Splits
from app.distributed import World
from app.errors import BadInput
from app.loop import Training, train
from app.models.build import preprocessing
from app.optim import build_optimizer
from app.progress import console
from app.setup import build_network, ddp_options, set_up_ddp, training_loader

CPU, ONE = torch.device("cpu"), World(0, 1)
WORKERS = (1, 2, 8, 64, 512)
# What is still called linear.
LINEAR = 0.9
# DDP sums the first gradients while the rest of the backward pass is computed, which is two thirds of a step.
OVERLAP = 2 / 3
STEPS = 12
SIZES = (4, 8, 16, 32, 64, 128)
FLOATS = (2**12, 2**16, 2**20, 2**22)


class Command(BaseModel):
    """The cluster that is asked about."""

    config: str | None = Field(None, description="YAML file with settings; flags override it.")
    link_gbit_s: float = Field(10.0, description="Speed of a node's link, Gbit/s.")
    latency_us: float = Field(50.0, description="Of a message from node to node, microseconds.")
    compute_speedup: float = Field(1.0, description="How many times as fast as this machine a worker computes.")


@dataclass(frozen=True)
class Link:
    """bytes_per_s and latency_s of a message from one worker to the next."""

    bytes_per_s: float
    latency_s: float

    def all_reduce_s(self, size: float, workers: int) -> float:
        """Of a ring (Patarasuk and Yuan 2009): 2 (N - 1) messages of size / N bytes."""
        return 2 * (workers - 1) * (self.latency_s + size / workers / self.bytes_per_s)


@dataclass(frozen=True)
class StepModel:
    """What a step consists of, in seconds, and of how many bytes its gradients are.

    overhead: of a step, whatever its batch; sample: of each sample's computing; data: of each sample's
    loading, by one process; loaders: processes that load beside a worker, 0 where it does so itself;
    checkpoint: a step's share of copying the weights for a checkpoint.
    """

    overhead: float
    sample: float
    data: float
    loaders: int
    checkpoint: float
    gradient_bytes: float

    def step_s(self, batch: float, workers: int, link: Link) -> float:
        """Of a global batch on N workers. Most of the all-reduce goes on beside the computing, and so do loaders."""
        share = batch / workers
        compute = self.overhead + self.sample * share
        exchange = link.all_reduce_s(self.gradient_bytes, workers)
        exposed = max(exchange - OVERLAP * compute, 0) if workers > 1 else 0.0
        data = self.data * share
        busy = max(compute + exposed, data / self.loaders) if self.loaders else compute + exposed + data
        return busy + self.checkpoint

    def efficiency(self, batch: float, workers: int, link: Link, per_worker: bool) -> float:
        """Samples/s of N workers over N times those of one; per_worker: each has the whole batch."""
        on_all = batch * workers if per_worker else batch
        return on_all / self.step_s(on_all, workers, link) / workers / (batch / self.step_s(batch, 1, link))


def build(config: Config, splits: Splits, world: World) -> tuple[Training, Any]:
    """The training of one process or rank, and its loader."""
    order = build_order(config, splits.train.labels, splits.train.facts)
    schedule = build_schedule(config, order)
    network = build_network(config, splits.info, None)
    model = network if world.size == 1 else nn.parallel.DistributedDataParallel(network, **ddp_options(config))
    set_up_ddp(model, config)
    optimizer = build_optimizer(config, list(network.parameters()))
    training = Training(config, schedule, world, CPU, network, model, preprocessing(splits.info), optimizer)
    return training, training_loader(config, splits, order, schedule, world, 0, CPU)


def measure_steps(config: Config, splits: Splits, world: World = ONE) -> tuple[float, float]:
    """Seconds of the computing of a step, and of the loading, in the same process: of the least disturbed steps."""
    training, loader = build(config.model_copy(update={"loader_workers": 0}), splits, world)
    found = [step for step, _ in zip(train(training, loader), range(STEPS + 2), strict=False)][2:]
    return min(step.seconds - step.data_seconds for step in found), min(step.data_seconds for step in found)


def measure_checkpoint(config: Config, splits: Splits) -> float:
    """Seconds for which a checkpoint keeps the training: its tensors are copied, then written beside it."""
    training, _ = build(config, splits, ONE)
    began = time.perf_counter()
    snapshot(training.network.state_dict())
    snapshot(training.network.state_dict())  # the optimizer's two moments are each as large
    snapshot(training.network.state_dict())
    return time.perf_counter() - began


def on_two_ranks(rank: int, address: str, config: Config, splits: Splits, results: Any) -> None:
    """Of two workers of this machine, each with half of its threads: the times of all-reduces of FLOATS, of the parts
    of a step by itself, beside the other one, and of a step together."""
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    seconds = []
    for size in FLOATS:
        tensor, times = torch.ones(size), []
        for _ in range(12):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - began)
        seconds.append(min(times))
    half = config.model_copy(update={"batch_size": config.batch_size // 2})
    alone = measure_steps(half, splits, ONE)
    results[rank] = (seconds, alone, sum(measure_steps(config, splits, World(rank, 2))))
    dist.destroy_process_group()


def fitted_link(seconds: Sequence[float]) -> Link:
    """Of two workers: an all-reduce takes 2 latencies, and the time of its bytes."""
    per_byte, twice = np.polyfit([4 * size for size in FLOATS], seconds, 1)
    return Link(1 / max(per_byte, 1e-12), max(twice / 2, 1e-7))


def main(argv: Sequence[str]) -> int:
    config, command = parse_config(argv, Command, "python -m benchmarks.scaling", "Predict the time of a step.")
    for name, value in (("link-gbit-s", command.link_gbit_s), ("compute-speedup", command.compute_speedup)):
        if not 0 < value < math.inf:
            raise BadInput(f"--{name} {value}: it must be above 0")
    if not 0 <= command.latency_us < math.inf:
        raise BadInput(f"--latency-us {command.latency_us}: it must be at least 0")
    # As many steps as are measured, all of them full ones.
    config = config.model_copy(update={"max_steps": None, "epochs": STEPS + 2, "drop_last": True})
    splits = load_splits(config, check_data(config).tokenizer)
    sizes = [size for size in SIZES if size <= len(splits.train.labels) // 2]
    if len(sizes) < 2:
        raise BadInput(f"the data has {len(splits.train.labels)} training samples: too few to measure batches of")
    parts = [measure_steps(config.model_copy(update={"batch_size": size}), splits) for size in sizes]
    sample, overhead = np.polyfit(sizes, [compute for compute, _ in parts], 1)
    if sample <= 0:
        raise BadInput("larger batches take no longer: this machine is too busy to measure anything on it")
    steps_per_epoch = build(config, splits, ONE)[0].schedule.steps_per_epoch
    parameters = sum(parameter.numel() for parameter in build_network(config, splits.info, None).parameters())
    model = StepModel(
        overhead=max(float(overhead), 0.0),
        sample=float(sample),
        data=min(data / size for size, (_, data) in zip(sizes, parts, strict=True)),
        loaders=config.loader_workers or 0,
        checkpoint=measure_checkpoint(config, splits) / (config.checkpoint_every or steps_per_epoch),
        gradient_bytes=4 * parameters / (2 if config.grad_compression == "bf16" else 1),
    )
    pair = config.model_copy(update={"batch_size": 2 * sizes[-1]})
    with tempfile.TemporaryDirectory() as folder, multiprocessing.Manager() as manager:
        results = manager.dict()
        multiprocessing.spawn(on_two_ranks, (f"file://{folder}/store", pair, splits, results), nprocs=2)  # type: ignore[attr-defined]  # torch's stubs
        (seconds, (compute, data), measured), _ = results[0], results[1]
    here = fitted_link(seconds)
    tell_fit(config, model, here)
    # Two workers of this machine: each has what it takes beside the other, loads by itself, and saves nothing.
    beside = replace(model, overhead=compute, sample=0.0, data=data / sizes[-1], loaders=0, checkpoint=0.0)
    predicted = beside.step_s(pair.batch_size, 2, here)
    console().print(
        f"a batch of {pair.batch_size} on two workers here: {1e3 * predicted:.0f} ms predicted, "
        f"{1e3 * measured:.0f} ms measured"
    )
    tell_prediction(config, model, command)
    return 0


def tell_fit(config: Config, model: StepModel, here: Link) -> None:
    output, gradients = console(), model.gradient_bytes / 1e6
    compute = f"{1e3 * model.overhead:.1f} ms + {1e3 * model.sample:.3f} ms a sample"
    output.print(f"{config.model} on {config.dataset}: {gradients:.2f} MB of gradients")
    output.print(
        f"computing {compute}; loading {1e3 * model.data:.3f} ms a sample; "
        f"checkpoints {1e3 * model.checkpoint:.2f} ms a step"
    )
    output.print(f"two workers here: {1e6 * here.latency_s:.0f} us and {here.bytes_per_s * 8 / 1e9:.1f} Gbit/s")


def tell_prediction(config: Config, here: StepModel, command: Command) -> None:
    link, speedup = Link(command.link_gbit_s * 1e9 / 8, command.latency_us * 1e-6), command.compute_speedup
    model = replace(here, overhead=here.overhead / speedup, sample=here.sample / speedup)
    half, batch = replace(model, gradient_bytes=model.gradient_bytes / 2), config.batch_size
    columns = {
        f"{batch} in all": (model, batch, False),
        f"{batch} each": (model, batch, True),
        "half the bytes": (half, batch, True),
        f"{8 * batch} each": (model, 8 * batch, True),
    }
    table = Table(
        title=f"efficiency: samples/s over N times those of one worker, {speedup:g} times as fast as this machine; "
        f"{command.link_gbit_s:g} Gbit/s and {command.latency_us:g} us from worker to worker"
    )
    table.add_column("workers", justify="right")
    for column in columns:
        table.add_column(column, justify="right")

    def efficiencies(workers: int) -> list[float | None]:
        return [
            each.efficiency(size, workers, link, per_worker) if per_worker or size >= workers else None
            for each, size, per_worker in columns.values()
        ]

    for workers in WORKERS:
        table.add_row(f"{workers}", *("" if found is None else f"{found:.2f}" for found in efficiencies(workers)))
    linear = [[(found or 0) >= LINEAR for found in efficiencies(workers)] for workers in range(1, WORKERS[-1] + 1)]
    table.add_section()
    table.add_row(f"{LINEAR:g} up to", *(f"{[*column, False].index(False)}" for column in zip(*linear, strict=True)))
    console().print(table)


if __name__ == "__main__":
    run_main(main)

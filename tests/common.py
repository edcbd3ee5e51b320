"""Small data, small networks and several ranks: what the tests are made of."""

import atexit
import copy
import dataclasses
import functools
import multiprocessing
import random
import re
import struct
import tempfile
from collections.abc import Callable, Iterable
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.nn import functional as F

from app.config import Config
from app.data.samples import InMemory
from app.data.sampling import build_order, build_schedule
from app.data.splits import Splits, from_arrays
from app.distributed import current_world
from app.loop import Training, train
from app.models.build import preprocessing
from app.optim import build_optimizer
from app.setup import build_ema, ddp_options, set_up_ddp, training_loader


class PlainNet(nn.Module):
    """No dropout, no batch norm: what is left must not depend on the number of ranks."""

    def __init__(self, num_classes: int = 4, input_shape: tuple[int, int, int] = (1, 8, 8)):
        super().__init__()
        self.conv = nn.Conv2d(input_shape[0], 8, 3)
        self.fc = nn.Linear(8 * (input_shape[1] - 2) * (input_shape[2] - 2), num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.fc(F.relu(self.conv(images)).flatten(1))


class ClassicNet(nn.Module):
    """The network as PyTorch's classic MNIST scripts write it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(1600, 500)
        self.fc2 = nn.Linear(500, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.view(-1, 1600)))
        return self.fc2(F.dropout(x, training=self.training))


def tiny_splits(config: Config) -> Splits:
    """57 + 11 + 11 images of 8x8 in 4 classes, with weights and lengths; usable as --dataset too, by its name."""
    generator = np.random.default_rng(5)
    patterns = generator.integers(0, 256, (4, 1, 8, 8))

    def split(count: int) -> tuple[torch.Tensor, np.ndarray]:
        labels = np.arange(count) % 4
        noise = generator.integers(0, 256, (count, 1, 8, 8))
        return torch.from_numpy(((patterns[labels] + noise) // 2).astype(np.uint8)), labels

    return from_arrays(
        split(57),
        split(11),
        split(11),
        val_fraction=config.val_fraction,
        class_names=("a", "b", "c", "d"),
        mean=(0.5,),
        std=(0.25,),
        weights=np.arange(57) % 3,
        lengths=np.arange(57) * 7 % 31,
    )


def with_unreadable(splits: Splits, **ids: list[int]) -> Splits:
    """The splits, of which these samples (by split) cannot be read, as in an image-folder held in memory."""
    damaged = {
        name: InMemory(
            splits[name].inputs(np.arange(len(splits[name].labels))),
            splits[name].labels,
            splits[name].facts,
            {i: f"{name}/{i}.png is no readable image" for i in bad},
        )
        for name, bad in ids.items()
    }
    return dataclasses.replace(splits, **damaged)


def build_training(config: Config, splits: Splits, network: nn.Module | None = None) -> Training:
    """As the worker does it, in this process, wrapped in DDP if there is a process group."""
    torch.manual_seed(0)
    network = network or PlainNet()
    world = current_world()
    model = nn.parallel.DistributedDataParallel(network, **ddp_options(config)) if world.size > 1 else network
    set_up_ddp(model, config)
    return Training(
        config=config,
        schedule=build_schedule(config, build_order(config, splits.train.labels, splits.train.facts)),
        world=world,
        device=torch.device("cpu"),
        network=network,
        model=model,
        preprocess=preprocessing(splits.info),
        optimizer=build_optimizer(config, list(network.parameters())),
        ema=build_ema(config, network, None),
    )


def loader_for(training: Training, splits: Splits, start_step: int = 0):
    order = build_order(training.config, splits.train.labels, splits.train.facts)
    return training_loader(
        training.config, splits, order, training.schedule, training.world, start_step, training.device
    )


def generator_states() -> tuple[Any, ...]:
    """Of Python's, NumPy's and torch's global generators, to compare."""
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


def bits_of(splits: Splits, build: Callable[[], Training], stop_at: int | None) -> list[tuple[list[float], bytes]]:
    """Losses and final bits of a run; broken off at stop_at and resumed by another Training, as in a new process."""

    def fresh() -> Training:
        torch.manual_seed(1)
        return build()

    training, losses, start = fresh(), [], 0
    if stop_at is not None:
        for result in train(training, loader_for(training, splits)):
            losses.append(result.loss)
            if result.step + 1 == stop_at:
                break
        again = fresh()
        again.network.load_state_dict(training.network.state_dict())
        again.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
        if again.ema is not None and training.ema is not None:
            again.ema.load_state_dict(training.ema.state_dict())
        training, start = again, stop_at
    losses += [result.loss for result in train(training, loader_for(training, splits, start))]
    weights = [*training.network.state_dict().values(), *training.evaluated.state_dict().values()]
    return [(losses, b"".join(tensor.numpy().tobytes() for tensor in weights))]


MAX_RANKS = 4


@functools.cache
def _processes() -> Pool:
    """Kept for all tests: importing torch takes seconds in each."""
    pool = multiprocessing.get_context("spawn").Pool(MAX_RANKS)
    atexit.register(pool.terminate)
    return pool


def on_ranks(world_size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """work(*args) in world_size processes joined by gloo; what each returned, by rank."""
    assert world_size <= MAX_RANKS
    with tempfile.TemporaryDirectory() as folder:
        # Each rank waits for the others, so that each is a process of its own.
        calls = [(f"file://{folder}/store", rank, world_size, work, args) for rank in range(world_size)]
        return _processes().starmap(_joined, calls, chunksize=1)


def _joined(address: str, rank: int, world_size: int, work: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    try:
        return work(*args)
    finally:
        dist.destroy_process_group()


class Failing:
    """Takes the place of a function and raises the first errors it is given, one in each call; then calls it.

    concerns(*args): whether a call is one of those that fail; default: each.
    """

    def __init__(
        self, function: Callable[..., Any], errors: Iterable[Exception], concerns: Callable[..., bool] | None = None
    ):
        self._function, self._errors, self._concerns = function, iter(errors), concerns
        self.raised = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._concerns is None or self._concerns(*args, **kwargs):
            for error in self._errors:
                self.raised += 1
                raise error
        return self._function(*args, **kwargs)

    def __get__(self, instance: Any, owner: type) -> Any:  # as functions in a class have it
        return functools.partial(self, instance) if instance is not None else self


def write_mnist(root: Path, images: np.ndarray, labels: np.ndarray, train: bool) -> None:
    """Files as MNIST has them: IDX, big-endian, uncompressed."""
    folder, part = root / "MNIST" / "raw", "train" if train else "t10k"
    folder.mkdir(parents=True, exist_ok=True)
    header = struct.pack(">HBB", 0, 8, 3) + struct.pack(">III", *images.shape)
    (folder / f"{part}-images-idx3-ubyte").write_bytes(header + images.astype(np.uint8).tobytes())
    header = struct.pack(">HBB", 0, 8, 1) + struct.pack(">I", len(labels))
    (folder / f"{part}-labels-idx1-ubyte").write_bytes(header + labels.astype(np.uint8).tobytes())


def write_images(root: Path, classes: dict[str, int], size: tuple[int, int] = (12, 10)) -> None:
    """PNG files of noise, as many as said for each class folder."""
    generator = np.random.default_rng(0)
    for name, count in classes.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = generator.integers(0, 256, (size[1], size[0], 3), np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number:03d}.png")


DOCS = Path(__file__).parents[1] / "docs"


def write_examples(page: str, folder: Path) -> list[list[str]]:
    """Write the page's example files there. Returns its commands: the words after python -m app.train."""
    text = (DOCS / page).read_text()
    for name, code in re.findall(r"`(\w+\.py)`(?:(?!```)[^\n])*\n\n```python\n(.*?)```", text, re.S):
        (folder / name).write_text(code)
    return [line.split() for line in re.findall(r"^    python -m app.train (.*)", text, re.M)]

"""What the scripts have in common: their arguments, their network and transforms, and what they write down."""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn
from torchvision import transforms

from app.models.mnist_cnn import MnistCnn

LR, EVALUATED = 1e-3, 1000


@dataclass(frozen=True)
class Task:
    """data: a folder that torchvision reads, MNIST of mnist-cnn and an ImageFolder of resnet18. batch_size: of one
    worker. record: the file for what is measured."""

    data: str
    model: str
    epochs: int
    batch_size: int
    workers: int
    record: str
    channels_last: bool
    bf16: bool
    keep_memory: bool

    @property
    def num_classes(self) -> int:
        return 10

    def network(self) -> nn.Module:
        if self.model == "mnist-cnn":
            return MnistCnn((1, 28, 28), self.num_classes)
        return torchvision.models.resnet18(num_classes=self.num_classes)

    def dataset(self, train: bool) -> torch.utils.data.Dataset:
        if self.model == "mnist-cnn":
            steps = [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
            return torchvision.datasets.MNIST(self.data, train=train, transform=transforms.Compose(steps))
        steps = [transforms.ToTensor(), transforms.Normalize((0.5,) * 3, (0.25,) * 3)]
        folder = Path(self.data) / ("train" if train else "test")
        return torchvision.datasets.ImageFolder(str(folder), transforms.Compose(steps))


def parse() -> Task:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", choices=("mnist-cnn", "resnet18"), default="mnist-cnn")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--record", required=True)
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--keep-memory", action="store_true")
    return Task(**vars(parser.parse_args()))


class Record:
    """Lines of JSON, by rank 0: the first step, each epoch with its samples and seconds, each test accuracy."""

    def __init__(self, task: Task, rank: int = 0):
        self._path = Path(task.record) if rank == 0 else None
        self._first, self._began, self._samples = True, 0.0, 0

    def epoch_begins(self) -> None:
        self._began, self._samples = time.perf_counter(), 0

    def step(self, samples: int) -> None:
        """An update is made, of so many samples over all workers."""
        self._samples += samples
        if self._first:
            self._first = False
            self._write("first_step")

    def epoch_ended(self) -> None:
        self._write("epoch", samples=self._samples, seconds=time.perf_counter() - self._began)

    def tested(self, accuracy: float) -> None:
        self._write("tested", accuracy=accuracy)

    def _write(self, event: str, **values: Any) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"event": event, "at": time.time(), **values}) + "\n")

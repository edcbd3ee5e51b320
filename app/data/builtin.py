"""Data sets that come with the packages, or that torchvision fetches."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from app.config import Config
from app.data.cache import alone
from app.data.sampling import stratified_split
from app.errors import BadInput, Unavailable
from app.retry import is_transient, retry

if TYPE_CHECKING:
    import torch

    from app.data.splits import Splits

# Held out of the digits for test; fixed, so that every run is measured on the same 20 %.
DIGITS_TEST_FRACTION = 0.2


@dataclass(frozen=True)
class TorchvisionSet:
    """A torchvision data set: its class, the file that shows it is there, and its pixels' statistics."""

    name: str
    marker: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


TORCHVISION = {
    "mnist": TorchvisionSet("MNIST", "MNIST/raw/train-images-idx3-ubyte", (0.1307,), (0.3081,)),
    "fashion-mnist": TorchvisionSet("FashionMNIST", "FashionMNIST/raw/train-images-idx3-ubyte", (0.2860,), (0.3530,)),
    "cifar10": TorchvisionSet(
        "CIFAR10", "cifar-10-batches-py/data_batch_1", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    ),
    "cifar100": TorchvisionSet(
        "CIFAR100", "cifar-100-python/train", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
    ),
}


def data_dir(config: Config) -> str:
    return config.data_dir or "data"


def load_digits_images(config: Config) -> "Splits":
    """scikit-learn's 1,797 handwritten digits, 8x8 with 17 grey levels, enlarged to 28x28 (or image_size)."""
    import torch
    from sklearn.datasets import load_digits

    from app.data.splits import from_arrays

    images, labels = map(np.asarray, load_digits(return_X_y=True))
    pixels = torch.from_numpy((images * (255 / 16)).round().astype("uint8").reshape(-1, 1, 8, 8))
    train, test = stratified_split(labels, DIGITS_TEST_FRACTION)
    return from_arrays(
        (pixels[torch.from_numpy(train)], labels[train]),
        test=(pixels[torch.from_numpy(test)], labels[test]),
        val_fraction=config.val_fraction,
        class_names=tuple(str(digit) for digit in range(10)),
        mean=(0.3051,),
        std=(0.3249,),
        image_size=config.image_size or 28,
    )


def load_synthetic(config: Config) -> "Splits":
    """Noise around one random pattern per class: learnable, made at once, for measuring."""
    import torch

    from app.data.splits import from_arrays

    size, channels = config.image_size or 28, config.image_channels or 3
    num_classes = config.synthetic_classes or 10
    count = config.synthetic_samples or 10_000
    generator = np.random.Generator(np.random.Philox(key=0))
    patterns = generator.integers(0, 256, (num_classes, channels, size, size), np.uint8)

    def split(samples: int) -> "tuple[torch.Tensor, np.ndarray]":
        labels = np.arange(samples, dtype=np.int64) % num_classes
        pixels = generator.integers(0, 256, (samples, channels, size, size), np.uint8)
        return torch.from_numpy(pixels // 2 + patterns[labels] // 2), labels

    return from_arrays(
        split(count),
        val=split(max(count // 10, 1)),
        test=split(max(count // 10, 1)),
        val_fraction=config.val_fraction,
        class_names=tuple(str(label) for label in range(num_classes)),
        mean=(0.5,) * channels,
        std=(0.25,) * channels,
    )


def load_torchvision(config: Config) -> "Splits":
    import torch
    import torchvision.datasets

    from app.data.splits import from_arrays

    fetch_if_missing(config)  # on a node that the command did not run on
    known = TORCHVISION[config.dataset]
    cls = getattr(torchvision.datasets, known.name)

    def split(train: bool) -> tuple[Any, tuple[torch.Tensor, np.ndarray]]:
        try:
            source = retry(lambda: cls(data_dir(config), train=train, download=False), f"reading {data_dir(config)}")
        except Unavailable:
            raise
        except Exception as error:  # torchvision's readers meet damaged files with asserts and more
            reason = str(error) or type(error).__name__
            raise BadInput(f"--data-dir {data_dir(config)}: {known.name} could not be read: {reason}") from error
        pixels = torch.as_tensor(source.data)
        pixels = pixels.permute(0, 3, 1, 2).contiguous() if pixels.ndim == 4 else pixels.unsqueeze(1)
        return source, (pixels, np.asarray(source.targets, np.int64))

    source, train = split(train=True)
    _, test = split(train=False)
    return from_arrays(
        train,
        test=test,
        val_fraction=config.val_fraction,
        class_names=tuple(source.classes),
        mean=known.mean,
        std=known.std,
        image_size=config.image_size,
    )


def fetch_if_missing(config: Config) -> None:
    """Raises BadInput if it is neither there nor to be had."""
    known, directory = TORCHVISION[config.dataset], Path(data_dir(config))
    if (directory / known.marker).exists():
        return
    if not config.download:
        raise BadInput(
            f"--data-dir {directory}: no {known.name} there ({known.marker} is missing) and --no-download is set"
        )
    import torchvision.datasets

    unfinished = directory / f".{known.name}"
    with alone(directory / f".{known.name}.lock", f"--data-dir {directory}", unfinished):
        if (directory / known.marker).exists():  # another process has fetched it meanwhile
            return
        print(f"fetching {known.name} into {directory}", flush=True)
        shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
        try:
            getattr(torchvision.datasets, known.name)(str(unfinished), download=True)
            fetched = [file.relative_to(unfinished) for file in unfinished.rglob("*") if file.is_file()]
            for file in sorted(fetched, key=lambda file: file == Path(known.marker)):  # it shows that all is there
                (directory / file).parent.mkdir(parents=True, exist_ok=True)
                os.replace(unfinished / file, directory / file)
        except (RuntimeError, OSError) as error:  # URLError is an OSError
            shutil.rmtree(unfinished, ignore_errors=True)
            kind = Unavailable if is_transient(error) else BadInput
            raise kind(
                f"--data-dir {directory}: no {known.name} there, and it could not be fetched ({error}); "
                f"put its files there, so that {known.marker} exists, or connect to the network"
            ) from None
        shutil.rmtree(unfinished)

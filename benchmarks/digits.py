"""Data in the shape of well-known sets, made of scikit-learn's handwritten digits: nothing is downloaded."""

import struct
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch.nn import functional as F

HELD_OUT = 0.2


def drawn(count: int, side: int, train: bool) -> tuple[np.ndarray, np.ndarray]:
    """count digits (count, side, side) uint8, turned, moved and scaled at random, and their labels; those of
    train and of test are drawn from different originals."""
    images, labels = map(np.asarray, load_digits(return_X_y=True))
    order = np.random.default_rng(2).permutation(len(images))  # its writers come one after the other
    images, labels = images[order], labels[order]
    generator = np.random.default_rng(int(train))
    first = int(len(images) * HELD_OUT)
    chosen = generator.integers(first, len(images), count) if train else generator.integers(0, first, count)
    pixels = torch.from_numpy(images[chosen].reshape(-1, 1, 8, 8) / 16).float()
    angle, scale = generator.uniform(-0.25, 0.25, count), generator.uniform(0.9, 1.15, count)
    cos, sin = np.cos(angle) * scale, np.sin(angle) * scale
    shift = generator.uniform(-0.12, 0.12, (2, count))
    theta = np.stack([np.stack([cos, -sin, shift[0]], 1), np.stack([sin, cos, shift[1]], 1)], 1)
    grid = F.affine_grid(torch.from_numpy(theta).float(), [count, 1, side, side], align_corners=False)
    found = F.grid_sample(pixels, grid, align_corners=False, padding_mode="zeros")
    return (found[:, 0] * 255).round().byte().numpy(), labels[chosen].astype(np.uint8)


def write_mnist(folder: Path, num_train: int = 60_000, num_test: int = 10_000) -> None:
    """The four files of MNIST (LeCun's idx format), of its size unless told otherwise."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, train, count in (("train", True, num_train), ("t10k", False, num_test)):
        images, labels = drawn(count, 28, train)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, count, 28, 28) + images.tobytes())
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, count) + labels.tobytes())


def write_folder(folder: Path, num_train: int = 4_000, num_test: int = 1_000, side: int = 64) -> None:
    """Colour images as PNG, in folders train and test, each with one for every class."""
    for split, count in (("train", num_train), ("test", num_test)):
        images, labels = drawn(count, side, split == "train")
        colours = np.random.default_rng(2).uniform(0.3, 1, (count, 1, 1, 3))
        for number, (image, label) in enumerate(zip(images[..., None] * colours, labels, strict=True)):
            (folder / split / str(label)).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.astype(np.uint8)).save(folder / split / str(label) / f"{number}.png")

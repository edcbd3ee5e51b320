"""Images and labels by sample id: held in memory, or decoded from files when they are asked for.

Either way an image is a uint8 tensor (C, H, W) of the split's fixed size, so which of the two it is
changes the speed and not the result. Floats appear on the device only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from app.errors import BadInput


@dataclass(frozen=True)
class DataInfo:
    """What a model and a checkpoint need to know of the data.

    input_shape is (C, H, W); mean and std are per channel, of pixels scaled to 0..1; num_train is the
    number of training samples, on which the order of samples depends.
    """

    input_shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_train: int

    def __post_init__(self) -> None:
        # Lists and numpy's numbers become what JSON gives back: a checkpoint's must compare equal.
        channels, height, width = map(int, self.input_shape)
        object.__setattr__(self, "input_shape", (channels, height, width))
        object.__setattr__(self, "class_names", tuple(map(str, self.class_names)))
        object.__setattr__(self, "mean", tuple(map(float, self.mean)))
        object.__setattr__(self, "std", tuple(map(float, self.std)))
        object.__setattr__(self, "num_train", int(self.num_train))

    @property
    def num_classes(self) -> int:
        return len(self.class_names)


class ImageSet(Protocol):
    """labels: (N,) int64. images(ids): uint8 (n, C, H, W) for n ids. in_memory: not read from files."""

    labels: np.ndarray
    in_memory: bool

    def images(self, ids: np.ndarray) -> torch.Tensor: ...


class ImagesInMemory:
    in_memory = True

    def __init__(self, pixels: torch.Tensor, labels: np.ndarray):
        assert (pixels.dtype, pixels.ndim) == (torch.uint8, 4)
        assert len(pixels) == len(labels)
        self._pixels, self.labels = pixels, np.asarray(labels, np.int64)
        channels, height, width = pixels.shape[1:]
        self.image_shape = (channels, height, width)

    def images(self, ids: np.ndarray) -> torch.Tensor:
        return self._pixels[torch.from_numpy(ids)]


class ImageFiles:
    """Files decoded on demand to (channels, size, size): the shorter side resized, then cropped to the centre."""

    in_memory = False

    def __init__(self, paths: Sequence[Path], labels: np.ndarray, size: int, channels: int):
        self.paths, self.labels = list(paths), np.asarray(labels, np.int64)
        self._size, self._channels = size, channels

    def images(self, ids: np.ndarray) -> torch.Tensor:
        pixels = torch.empty(len(ids), self._channels, self._size, self._size, dtype=torch.uint8)
        for row, i in enumerate(ids):
            pixels[row] = decode_image(self.paths[i], self._size, self._channels)
        return pixels

    def loaded(self) -> ImagesInMemory:
        return ImagesInMemory(self.images(np.arange(len(self.paths))), self.labels)


class Subset:
    """Some of another set's samples, renumbered from 0."""

    def __init__(self, base: ImageSet, ids: np.ndarray):
        self._base, self._ids, self.labels = base, ids, base.labels[ids]
        self.in_memory = base.in_memory

    def images(self, ids: np.ndarray) -> torch.Tensor:
        return self._base.images(self._ids[ids])


def decode_image(path: Path, size: int, channels: int) -> torch.Tensor:
    """uint8 (channels, size, size). Raises BadInput, naming the file, if it is no readable image."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            upright = ImageOps.exif_transpose(file)
            if upright.mode.startswith(("I", "F")):  # 16 bits and more; convert() would cut them off at 255
                upright = Image.fromarray((np.asarray(upright, np.float64) / 257).clip(0, 255).astype(np.uint8))
            image = upright.convert("RGB" if channels == 3 else "L")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # what Pillow raises
        raise BadInput(f"{path} is no readable image: {error}") from None
    image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(image).reshape(size, size, channels)).permute(2, 0, 1).contiguous()


def resized(pixels: torch.Tensor, size: int) -> torch.Tensor:
    """uint8 (N, C, H, W) to (N, C, size, size), bilinear."""
    if pixels.shape[-2:] == (size, size):
        return pixels
    parts = [
        torch.nn.functional.interpolate(part.float(), size=(size, size), mode="bilinear", antialias=True)
        .round_()
        .clamp_(0, 255)
        .to(torch.uint8)
        for part in pixels.split(4096)  # bounds the floats in memory
    ]
    return torch.cat(parts)


def stratified_split(labels: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
    """Sorted ids (kept, held_out): each class gives round(fraction * n) samples, at least 1 of 2 or more.

    A function of the labels and the fraction alone, not of the run's seed: runs with different seeds
    are then measured on the same samples.
    """
    generator = np.random.Generator(np.random.Philox(key=0))
    held_out = []
    for label in np.unique(labels):
        ids = generator.permutation(np.flatnonzero(labels == label))
        count = min(max(round(fraction * len(ids)), 1), len(ids) - 1)
        held_out.append(ids[:count])
    held = np.sort(np.concatenate(held_out))
    return np.setdiff1d(np.arange(len(labels)), held), held

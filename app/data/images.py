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

from app.data.sampling import Facts
from app.errors import BadInput

# Width to height of the shapes that aspect-grouped images are resized to.
ASPECT_RATIOS = (1 / 2, 9 / 16, 3 / 4, 1.0, 4 / 3, 16 / 9, 2.0)


@dataclass(frozen=True)
class DataInfo:
    """What a model and a checkpoint need to know of the data.

    input_shape is (C, H, W); mean and std are per channel, of pixels scaled to 0..1; num_train is the
    number of training samples, on which the order of samples depends; shapes are the (H, W) of images
    that do not all have the shape input_shape, batches of which have one each.
    """

    input_shape: tuple[int, int, int]
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_train: int
    shapes: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        # Lists and numpy's numbers become what JSON gives back: a checkpoint's must compare equal.
        channels, height, width = map(int, self.input_shape)
        object.__setattr__(self, "input_shape", (channels, height, width))
        object.__setattr__(self, "class_names", tuple(map(str, self.class_names)))
        object.__setattr__(self, "mean", tuple(map(float, self.mean)))
        object.__setattr__(self, "std", tuple(map(float, self.std)))
        object.__setattr__(self, "num_train", int(self.num_train))
        object.__setattr__(self, "shapes", tuple((int(height), int(width)) for height, width in self.shapes))

    @property
    def num_classes(self) -> int:
        return len(self.class_names)


class ImageSet(Protocol):
    """labels: (N,) int64. images(ids): uint8 (n, C, H, W) for n ids, of one group if facts has groups.

    n may be 0. A sample that cannot be read raises BadInput, in which --max-bad-samples may skip it.
    in_memory: not read from files. facts: what orders can go by.
    """

    labels: np.ndarray
    in_memory: bool
    facts: Facts

    def images(self, ids: np.ndarray) -> torch.Tensor: ...


class ImagesInMemory:
    """unreadable: by id, what is wrong with each sample that could not be read, whose pixels mean nothing."""

    in_memory = True

    def __init__(
        self,
        pixels: torch.Tensor,
        labels: np.ndarray,
        facts: Facts | None = None,
        unreadable: dict[int, str] | None = None,
    ):
        assert (pixels.dtype, pixels.ndim) == (torch.uint8, 4)
        assert len(pixels) == len(labels)
        self._pixels, self.labels = pixels, np.asarray(labels, np.int64)
        self.facts, self._unreadable = facts or Facts(), unreadable or {}
        channels, height, width = pixels.shape[1:]
        self.image_shape = (channels, height, width)

    def images(self, ids: np.ndarray) -> torch.Tensor:
        if self._unreadable:
            for i in ids.tolist():
                if i in self._unreadable:
                    raise BadInput(self._unreadable[i])
        return self._pixels[torch.from_numpy(ids)]


class ImageFiles:
    """Files decoded on demand to (channels, H, W): resized to cover it, then cropped to the centre.

    shapes: the (H, W) of each group in the facts; of all images where these have no groups.
    """

    in_memory = False

    def __init__(
        self,
        paths: Sequence[Path],
        labels: np.ndarray,
        shapes: Sequence[tuple[int, int]],
        channels: int,
        facts: Facts | None = None,
    ):
        self.paths, self.labels, self.facts = list(paths), np.asarray(labels, np.int64), facts or Facts()
        self._shapes, self._channels = shapes, channels

    def images(self, ids: np.ndarray) -> torch.Tensor:
        groups = self.facts.groups
        shape = self._shapes[0 if groups is None or not len(ids) else int(groups[ids[0]])]
        pixels = torch.empty(len(ids), self._channels, *shape, dtype=torch.uint8)
        for row, i in enumerate(ids):
            assert groups is None or self._shapes[int(groups[i])] == shape
            pixels[row] = decode_image(self.paths[i], shape, self._channels)
        return pixels

    def loaded(self, skip_unreadable: bool = False) -> ImagesInMemory:
        """All of them in memory. Raises BadInput for one that cannot be read, or leaves that to who asks for it."""
        assert self.facts.groups is None
        pixels = torch.zeros(len(self.paths), self._channels, *self._shapes[0], dtype=torch.uint8)
        unreadable = {}
        for i, path in enumerate(self.paths):
            try:
                pixels[i] = decode_image(path, self._shapes[0], self._channels)
            except BadInput as error:
                if not skip_unreadable:
                    raise
                unreadable[i] = str(error)
        return ImagesInMemory(pixels, self.labels, self.facts, unreadable)


class Subset:
    """Some of another set's samples, renumbered from 0."""

    def __init__(self, base: ImageSet, ids: np.ndarray):
        self._base, self._ids, self.labels = base, ids, base.labels[ids]
        self.in_memory, self.facts = base.in_memory, base.facts.of(ids)

    def images(self, ids: np.ndarray) -> torch.Tensor:
        return self._base.images(self._ids[ids])


def aspect_shapes(size: int) -> list[tuple[int, int]]:
    """(H, W) for each of ASPECT_RATIOS: about size * size pixels, sides that are multiples of 8, none twice."""
    shapes = []
    for ratio in ASPECT_RATIOS:
        height, width = (max(8, 8 * round(size * side / 8)) for side in (ratio**-0.5, ratio**0.5))
        if (height, width) not in shapes:  # at a small size two ratios come out alike
            shapes.append((height, width))
    return shapes


def aspect_groups(sizes: Sequence[tuple[int, int]], shapes: Sequence[tuple[int, int]]) -> np.ndarray:
    """(N,) int64: the shape (H, W) whose ratio of the sides is nearest to that of each image's (W, H)."""
    ratios = np.log([width / height for width, height in sizes])
    return np.abs(ratios[:, None] - np.log([width / height for height, width in shapes])).argmin(axis=1)


def on_one_canvas(images: ImageSet, ids: np.ndarray) -> torch.Tensor:
    """uint8 (n, C, H, W): images of any shapes, each in the middle of a black canvas that all fit in."""
    pixels = [images.images(ids[row : row + 1])[0] for row in range(len(ids))]
    if not pixels:
        return images.images(ids)
    height, width = (max(image.shape[side] for image in pixels) for side in (1, 2))
    canvas = torch.zeros(len(pixels), len(pixels[0]), height, width, dtype=torch.uint8)
    for row, image in enumerate(pixels):
        top, left = (height - image.shape[1]) // 2, (width - image.shape[2]) // 2
        canvas[row, :, top : top + image.shape[1], left : left + image.shape[2]] = image
    return canvas


def decode_image(path: Path, shape: tuple[int, int], channels: int) -> torch.Tensor:
    """uint8 (channels, H, W) of the shape (H, W). Raises BadInput, naming the file, if it is no readable image."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            upright = ImageOps.exif_transpose(file)
            if upright.mode.startswith(("I", "F")):  # 16 bits and more; convert() would cut them off at 255
                upright = Image.fromarray((np.asarray(upright, np.float64) / 257).clip(0, 255).astype(np.uint8))
            image = upright.convert("RGB" if channels == 3 else "L")
    except Exception as error:  # what Pillow raises for damaged bytes has no common type
        raise BadInput(f"{path} is no readable image: {error}") from None
    image = ImageOps.fit(image, (shape[1], shape[0]), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(image).reshape(*shape, channels)).permute(2, 0, 1).contiguous()


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

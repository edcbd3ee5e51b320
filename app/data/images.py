"""Image files: decoded when they are asked for, or beforehand.

Either way an image is a uint8 tensor (C, H, W) of the split's fixed size, so which of the two it is
changes the speed and not the result. Floats appear on the device only.
"""

import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from app.data.samples import InMemory
from app.data.sampling import Facts
from app.errors import BadInput
from app.retry import describe, retry

# Width to height of the shapes that aspect-grouped images are resized to.
ASPECT_RATIOS = (1 / 2, 9 / 16, 3 / 4, 1.0, 4 / 3, 16 / 9, 2.0)


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
        # One array, which the processes of a loader share: a Path is many times as large, and counting the references
        # to it copies it into each of them.
        self._paths = np.array([os.fsencode(path) for path in paths], np.bytes_)
        self.labels, self.facts = np.asarray(labels, np.int64), facts or Facts()
        self._shapes, self._channels = shapes, channels

    def fingerprint(self) -> str:
        """Return a digest of the files' names below the folder that all are in, which may differ between nodes."""
        paths: list[bytes] = self._paths.tolist()
        # what the first and the last have in common, all in between have
        ends = [os.path.dirname(path) for path in (min(paths), max(paths))] if paths else []
        start = len(os.path.commonpath(ends)) + 1 if ends else 0
        return f"{len(paths):,} files, {hashlib.sha256(b'/'.join(path[start:] for path in paths)).hexdigest()[:12]}"

    def inputs(self, ids: np.ndarray) -> torch.Tensor:
        groups = self.facts.groups
        shape = self._shapes[0 if groups is None or not len(ids) else int(groups[ids[0]])]
        pixels = torch.empty(len(ids), self._channels, *shape, dtype=torch.uint8)
        for row, i in enumerate(ids):
            assert groups is None or self._shapes[int(groups[i])] == shape
            pixels[row] = decode_image(self._path(i), shape, self._channels)
        return pixels

    def shown(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Each in the middle of a black canvas that all fit in."""
        images = [self.inputs(ids[row : row + 1])[0] for row in range(len(ids))]
        if not images:
            return {"images": self.inputs(ids).numpy()}
        height, width = (max(image.shape[side] for image in images) for side in (1, 2))
        canvas = np.zeros((len(images), self._channels, height, width), np.uint8)
        for row, image in enumerate(images):
            top, left = (height - image.shape[1]) // 2, (width - image.shape[2]) // 2
            canvas[row, :, top : top + image.shape[1], left : left + image.shape[2]] = image
        return {"images": canvas}

    def loaded(self, skip_unreadable: bool = False) -> InMemory:
        """All of them in memory. Raises BadInput for one that cannot be read, or leaves that to who asks for it."""
        assert self.facts.groups is None
        pixels = torch.zeros(len(self._paths), self._channels, *self._shapes[0], dtype=torch.uint8)
        unreadable = {}
        for i in range(len(self._paths)):
            try:
                pixels[i] = decode_image(self._path(i), self._shapes[0], self._channels)
            except BadInput as error:
                if not skip_unreadable:
                    raise
                unreadable[i] = str(error)
        return InMemory(pixels, self.labels, self.facts, unreadable)

    def _path(self, i: int) -> Path:
        return Path(os.fsdecode(self._paths[i]))


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


def decode_image(file: Path | BinaryIO, shape: tuple[int, int], channels: int, name: str = "") -> torch.Tensor:
    """Decode to uint8 (channels, H, W) of the shape (H, W).

    Raises BadInput, by its name, if it is no readable image, and Unavailable if the disk does not give its bytes at
    the moment: that says nothing about the image.
    """
    from PIL import Image, ImageOps

    name = name or str(file)
    try:
        content = io.BytesIO(retry(file.read_bytes, f"reading {file}")) if isinstance(file, Path) else file
    except OSError as error:
        raise BadInput(f"{name} is no readable image: {describe(error)}") from None
    try:
        with Image.open(content) as opened:
            upright = ImageOps.exif_transpose(opened)
            if upright.mode.startswith(("I", "F")):  # 16 bits and more; convert() would cut them off at 255
                upright = Image.fromarray((np.asarray(upright, np.float64) / 257).clip(0, 255).astype(np.uint8))
            image = upright.convert("RGB" if channels == 3 else "L")
    except Exception as error:  # what Pillow raises for damaged bytes has no common type
        reason = str(error).replace(f" {content!r}", "")  # an address in memory
        raise BadInput(f"{name} is no readable image: {reason}") from None
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

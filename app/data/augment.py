"""Random changes to training images, each a function of (seed, epoch, sample id, draw of the sample in its epoch).

A batch at a time: the numbers are drawn sample by sample, as torchvision's transforms draw them, and the pixels of all
are changed at once, to the same values as by torchvision.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn import functional as F

from app.distributed import derive_seeds

# Images (n, C, H, W) uint8, changed as each one's generator says, whose seeds are given.
Augment = Callable[[torch.Tensor, Sequence[int]], torch.Tensor]

# What people use on these data sets; the others are trained as they are.
AUTO = {"digits": "shift", "cifar10": "flip-crop", "cifar100": "flip-crop", "image-folder": "flip-crop"}
# Of shift: degrees, shares of the width and the height, factors.
ANGLE, MOVE, SCALE = 10.0, 0.1, (0.9, 1.1)


def build_augment(name: str, dataset: str) -> Augment | None:
    """None for no change."""
    if name == "auto":
        name = AUTO.get(dataset, "none")
    return {"none": None, "shift": shift, "flip-crop": flip_crop, "randaugment": randaugment}[name]


def augmented(
    images: torch.Tensor,
    ids: np.ndarray,
    augment: Augment,
    seed: int,
    epoch: int,
    occurrences: np.ndarray | None = None,
) -> torch.Tensor:
    """Each of the images (n, C, H, W), of the samples ids (n,), changed as its generator says, wherever it is read.

    occurrences: see sampling.Request.
    """
    seeds = derive_seeds("augment", (seed, epoch), ids)
    if occurrences is not None and (again := occurrences > 0).any():
        seeds[again] = derive_seeds("augment", (seed, epoch, occurrences[again]), ids[again])
    return augment(images, seeds.tolist())


def first_words(seeds: Sequence[int], count: int) -> np.ndarray:
    """The first numbers (n, count) of 32 bits, as int64, that torch's generator has for each seed.

    NumPy's Mersenne Twister is the same one, and hands all of them over in one call.
    """
    twister = np.random.MT19937(0)
    seeded, words = np.random.RandomState(twister).seed, np.empty((len(seeds), count), np.uint64)
    for row, seed in zip(words, seeds, strict=True):
        seeded(seed & 0xFFFFFFFF)  # torch goes by no more of it either
        row[:] = twister.random_raw(count)
    return words.astype(np.int64)


def shift(images: torch.Tensor, seeds: Sequence[int]) -> torch.Tensor:
    """torchvision's RandomAffine without shear, bilinear, black outside."""
    count, _, height, width = images.shape
    low = np.array([-ANGLE, -MOVE * width, -MOVE * height, SCALE[0]], np.float32)
    high = np.array([ANGLE, MOVE * width, MOVE * height, SCALE[1]], np.float32)
    # As torch's uniform_ makes them of the words: of 24 bits, in double.
    uniform = (first_words(seeds, 4) & 0xFFFFFF) / 2**24 * (high - low) + low
    angle, x, y, scale = uniform.astype(np.float32).astype(np.float64).T
    angles, x, y = [math.radians(each) for each in angle.tolist()], x.round(), y.round()
    cos, sin = np.array(list(map(math.cos, angles))) / scale, np.array(list(map(math.sin, angles))) / scale
    # From the new image's pixels to the old one's, both counted from the centre.
    matrices = np.array([[cos, -sin], [sin, cos], [-cos * x - sin * y, sin * x - cos * y]], np.float32)  # (3, 2, n)
    theta = torch.from_numpy(matrices.transpose(2, 0, 1)) / torch.tensor([0.5 * width, 0.5 * height])
    centred = (torch.linspace((1.0 - side) * 0.5, (side - 1.0) * 0.5, side) for side in (height, width))
    rows, columns = torch.meshgrid(*centred, indexing="ij")
    pixels = torch.stack([columns, rows, torch.ones_like(rows)], -1).reshape(1, -1, 3)
    grid = pixels.expand(count, -1, -1).bmm(theta).view(count, height, width, 2)
    inside = torch.ones(count, 1, height, width)
    moved = F.grid_sample(torch.cat([images.float(), inside], 1), grid, align_corners=False)
    return (moved[:, :-1] * moved[:, -1:]).round_().to(images.dtype)


def flip_crop(images: torch.Tensor, seeds: Sequence[int]) -> torch.Tensor:
    """RandomHorizontalFlip, and RandomCrop to the same shape with an eighth of each side as padding."""
    count, _, height, width = images.shape
    tall, wide = max(1, height // 8), max(1, width // 8)
    # As torch.rand(1) < 0.5 and torch.randint make them of the words.
    first, top, left = torch.from_numpy(first_words(seeds, 3)).unbind(1)
    flip, top, left = first & 0xFFFFFF < 2**23, top % (2 * tall + 1), left % (2 * wide + 1)
    images = torch.where(flip.view(-1, 1, 1, 1), images.flip(-1), images)
    windows = F.pad(images, (wide, wide, tall, tall)).unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(count), :, top, left]


def randaugment(images: torch.Tensor, seeds: Sequence[int]) -> torch.Tensor:
    """flip_crop and torchvision's RandAugment (Cubuk et al. 2020), whose kinds of change differ by sample."""
    from torchvision.transforms import v2  # 2 s: only where it is used

    height, width = images.shape[-2:]
    crop = v2.RandomCrop((height, width), padding=[max(1, width // 8), max(1, height // 8)])
    change = v2.Compose([v2.RandomHorizontalFlip(), crop, v2.RandAugment(interpolation=v2.InterpolationMode.BILINEAR)])
    with torch.random.fork_rng(devices=[]):
        changed = []
        for image, seed in zip(images, seeds, strict=True):
            torch.default_generator.manual_seed(seed)
            changed.append(change(image))
    return torch.stack(changed)

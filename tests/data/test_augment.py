"""Augmentation of a batch: the same pixels as torchvision's transforms give, sample by sample."""

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from app.data.augment import augmented, build_augment
from app.distributed import derive_seed

BILINEAR = v2.InterpolationMode.BILINEAR
SHAPES = [(1, 28, 28), (3, 32, 32), (3, 24, 40), (3, 7, 5)]


def of_torchvision(name: str, height: int, width: int) -> v2.Transform:
    if name == "shift":
        return v2.RandomAffine([-10, 10], translate=(0.1, 0.1), scale=(0.9, 1.1), interpolation=BILINEAR)
    crop = v2.RandomCrop((height, width), padding=[max(1, width // 8), max(1, height // 8)])
    more = [v2.RandAugment(interpolation=BILINEAR)] if name == "randaugment" else []
    return v2.Compose([v2.RandomHorizontalFlip(), crop, *more])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["shift", "flip-crop", "randaugment"])
def test_a_batch_is_what_torchvision_makes_of_each(name: str, shape: tuple[int, int, int]) -> None:
    images = torch.randint(0, 256, (200, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    augment, ids, expected = build_augment(name, "synthetic"), np.arange(1000, 1200), []
    assert augment is not None
    for image, sample in zip(images, ids.tolist(), strict=True):
        torch.manual_seed(derive_seed("augment", 3, 2, sample))
        expected.append(of_torchvision(name, *shape[1:])(image))
    before, state = images.clone(), torch.get_rng_state()
    changed = augmented(images, ids, augment, seed=3, epoch=2)
    assert torch.equal(changed, torch.stack(expected))
    assert torch.equal(images, before)
    assert torch.equal(torch.get_rng_state(), state)
    # Whichever batch a sample is in.
    assert torch.equal(augmented(images[7:9], ids[7:9], augment, 3, 2), changed[7:9])
    assert not torch.equal(augmented(images, ids, augment, seed=3, epoch=4), changed)


def test_none() -> None:
    assert build_augment("none", "digits") is None
    assert build_augment("auto", "mnist") is None

"""Augmentation of a batch: the same pixels as torchvision's transforms give, sample by sample."""

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from app.config import Config
from app.data.augment import augmented, build_augment
from app.data.loader import Batch
from app.data.sampling import Order, build_order, build_schedule
from app.data.splits import Splits, from_arrays
from app.distributed import World, derive_seed, derive_seeds
from app.setup import training_loader
from tests.common import tiny_splits

ALONE = World()
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


def weighted(**settings: Any) -> tuple[Config, Splits, Order]:
    config = Config(dataset="tests.common:tiny_splits", augment="flip-crop", batch_size=10, seed=7, **settings)
    splits = tiny_splits(config)
    return config, splits, build_order(config, splits.train.labels, splits.train.facts)


def batches(run: tuple[Config, Splits, Order], world: World = ALONE, start: int = 0) -> list[Batch]:
    config, splits, order = run
    schedule = build_schedule(config, order)
    return list(training_loader(config, splits, order, schedule, world, start, torch.device("cpu")))


def images(all_batches: list[Batch]) -> list[torch.Tensor]:
    """Those that count, one by one."""
    return [image for batch in all_batches for image in batch["inputs"][batch["rows"]]]


def test_each_draw_of_a_sample_is_changed_in_its_own_way() -> None:
    """A class of 10 samples in 2000, of which half of the draws are, all but 1 in a hundred after the first."""
    pixels = torch.randint(0, 256, (2000, 1, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = (np.arange(2000) < 10).astype(np.int64)
    splits = from_arrays((pixels, labels), class_names=("a", "b"), mean=(0.5,), std=(0.5,), val_fraction=0.2)
    config = Config(dataset="tests.common:tiny_splits", sampler="balanced", augment="shift", epochs=1)
    order = build_order(config, splits.train.labels, splits.train.facts)
    drawn = batches((config, splits, order))
    rare = [
        image for image, label in zip(images(drawn), torch.cat([b["targets"] for b in drawn]), strict=True) if label
    ]
    assert len(rare) > 700
    assert len({image.numpy().tobytes() for image in rare}) > 0.95 * len(rare)


def test_the_first_draw_of_a_sample_is_changed_as_ever() -> None:
    """A run that began before draws were told apart resumes with the same images, but for repeated ones."""
    seen, digest = set(), hashlib.sha256()
    for batch in batches(weighted(sampler="weighted", epochs=2)):
        for sample, image in zip(batch["ids"].tolist(), batch["inputs"], strict=True):
            if (batch["step"] // 6, sample) not in seen:
                seen.add((batch["step"] // 6, sample))
                digest.update(image.numpy().tobytes())
    assert len(seen) == 54
    assert digest.hexdigest() == "4bf98c40b55a5da9633753d6316f719be27ae8e161b58ab06c4a029567761bfe"
    assert derive_seeds("augment", (7, 1), np.array([0, 5])).tolist() == [1626760293251174984, 3363421165812651569]


@pytest.mark.parametrize("mixup", [0.0, 0.4])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_repeated_draws_are_the_same_at_every_world_size(size: int, mixup: float) -> None:
    run = weighted(sampler="weighted", epochs=2, mixup=mixup)
    alone = images(batches(run))
    ranks = [batches(run, World(rank, size)) for rank in range(size)]
    together = [
        image for step in zip(*ranks, strict=True) for image in images([part for part in step if part["num_counted"]])
    ]
    assert torch.equal(torch.stack(together), torch.stack(alone))


def test_repeated_draws_are_the_same_after_a_resume_at_every_step() -> None:
    run = weighted(sampler="weighted", epochs=2)
    whole = batches(run)
    for start in range(len(whole)):
        resumed = batches(run, start=start)
        assert torch.equal(torch.stack(images(resumed)), torch.stack(images(whole[start:])))


def test_none() -> None:
    assert build_augment("none", "digits") is None
    assert build_augment("auto", "mnist") is None

"""Random numbers that users' own code draws from torch, NumPy and Python: the same in every run, and after a resume."""

import random

import numpy as np
import pytest
import torch

from app.config import Config
from app.data.datasets import load_splits
from app.data.samples import InMemory
from app.data.splits import Splits, from_arrays
from app.distributed import World
from app.loop import Training, evaluate
from app.models.build import preprocessing
from app.setup import build_network, evaluation_loader
from tests.common import PlainNet, bits_of, build_training, generator_states, on_ranks


def drawn() -> float:
    """A number that depends on all three generators."""
    return random.random() + float(np.random.rand()) + torch.rand(1).item()


def scramble() -> None:
    """The generators as they may be in any process."""
    random.seed()
    np.random.seed()
    torch.seed()


class RandomSet(InMemory):
    """Images (N, 1, 8, 8), of which each has another brightness whenever it is read."""

    in_memory = False

    def inputs(self, ids: np.ndarray) -> torch.Tensor:
        factors = torch.tensor([drawn() / 3 for _ in ids])
        return (super().inputs(ids) * factors.view(-1, 1, 1, 1)).to(torch.uint8)


class RandomNet(PlainNet):
    """Its first weights and its logits, in evaluation too, depend on all three generators."""

    def __init__(self, num_classes: int, input_shape: tuple[int, int, int]):
        super().__init__(num_classes, input_shape)
        torch.nn.init.constant_(self.conv.bias, drawn())  # type: ignore[arg-type]  # it has one

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images) * (1 + drawn())


def load_random(config: Config) -> Splits:
    pixels = torch.tensor([int(drawn() * 80) for _ in range(57 * 64)], dtype=torch.uint8).view(57, 1, 8, 8)
    splits = from_arrays(
        (pixels, np.arange(57) % 4), class_names=("a", "b", "c", "d"), mean=(0.5,), std=(0.2,), val_fraction=0.3
    )
    both = [RandomSet(part.inputs(np.arange(len(part.labels))), part.labels) for part in (splits.train, splits.val)]
    return Splits(splits.info, *both, test=None)


BASE = {"dataset": "tests.test_generators:load_random", "model": "tests.test_generators:RandomNet", "lr": 0.01}
BASE |= {"batch_size": 10, "epochs": 2, "seed": 3, "optimizer": "sgd"}


def user_bits(settings: dict, stop_at: int | None = None) -> list[tuple[list[float], bytes]]:
    """The losses of every step and the final weights, of a process as new, or of one up to stop_at and another."""
    scramble()
    config = Config(**{**BASE, **settings})
    splits = load_splits(config)

    def build() -> Training:
        scramble()
        return build_training(config, splits, build_network(config, splits.info, None))

    return bits_of(splits, build, stop_at)


@pytest.mark.parametrize("settings", [{}, {"sampler": "balanced", "mixup": 0.3}, {"micro_batch_size": 3}])
def test_users_random_numbers_are_the_same_in_every_run(settings: dict) -> None:
    settings = {"loader_workers": 0, **settings}
    whole = user_bits(settings)
    assert user_bits(settings) == whole
    assert user_bits({**settings, "loader_workers": 2}) == whole
    assert user_bits({**settings, "seed": 4}) != whole
    for stop_at in (1, 4, 5):  # an epoch has 4 steps
        assert user_bits(settings, stop_at) == whole
    assert user_bits({**settings, "loader_workers": 2}, 3) == whole


def test_users_random_numbers_are_the_same_after_a_resume_of_two_ranks() -> None:
    settings = {"loader_workers": 0, "sampler": "balanced"}
    whole, again, resumed = (on_ranks(2, user_bits, settings, stop) for stop in (None, None, 3))
    assert again == whole
    assert resumed == whole


def pixels_and_weights(seed: int) -> tuple[bytes, bytes]:
    scramble()
    config, states = Config(**{**BASE, "seed": seed}), generator_states()
    splits = load_splits(config)
    assert generator_states() == states
    pixels = InMemory.inputs(splits.train, np.arange(39))  # type: ignore[arg-type]  # as they were loaded
    network = build_network(config, splits.info, None)
    return pixels.numpy().tobytes(), b"".join(tensor.numpy().tobytes() for tensor in network.state_dict().values())


def test_what_load_draws_is_the_same_on_every_worker_and_for_every_seed() -> None:
    pixels, weights = pixels_and_weights(3)
    assert on_ranks(2, pixels_and_weights, 3) == [(pixels, weights)] * 2
    other_pixels, other_weights = pixels_and_weights(4)
    assert other_pixels == pixels
    assert other_weights != weights


def measured(loader_workers: int) -> float:
    config = Config(**BASE, loader_workers=loader_workers)
    splits = load_splits(config)
    network = build_network(config, splits.info, None)
    scramble()
    loader, states = evaluation_loader(config, splits.val, World(), torch.device("cpu")), generator_states()
    result = evaluate(network, preprocessing(splits.info), loader, 4, config, torch.device("cpu"))
    assert generator_states() == states
    return result.loss


def test_an_evaluation_draws_the_same_numbers_each_time_and_leaves_the_generators_alone() -> None:
    assert measured(0) == measured(0) == measured(2)

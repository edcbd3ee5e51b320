"""N ranks are 1 rank; interrupted and resumed is uninterrupted; not a number stops every rank."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from app.config import Config
from app.data.loader import build_loader
from app.data.sampling import EvaluationBatches
from app.distributed import World, current_world
from app.errors import NonFiniteLoss
from app.loop import evaluate, train, update_ema
from app.metrics import Evaluation
from app.models.build import Normalize
from app.models.mnist_cnn import MnistCnn
from tests.common import PlainNet, build_training, loader_for, on_ranks, tiny_splits

BASE = {"dataset": "tests.common:tiny_splits", "epochs": 3, "batch_size": 10, "lr": 0.01, "warmup_epochs": 0.5}

# Batch sizes that do not divide, by ranks or by accumulation; a last batch (57 = 5 x 10 + 7); mixing.
SETTINGS = {
    "plain": {"optimizer": "sgd"},
    "adamw, smoothing, clipping": {"label_smoothing": 0.1, "grad_clip": 0.5},
    "accumulation": {"optimizer": "sgd", "grad_accumulation": 3},
    "last batch of one": {"optimizer": "sgd", "batch_size": 8},
    "mixup": {"optimizer": "sgd", "mixup": 0.4},
    "cutmix and augmentation": {"optimizer": "sgd", "cutmix": 1.0, "augment": "flip-crop"},
    "balanced": {"optimizer": "sgd", "sampler": "balanced"},
    "weighted and mixup": {"optimizer": "sgd", "sampler": "weighted", "mixup": 0.4},
    "length-bucketed, whole batches only": {"optimizer": "sgd", "sampler": "length-bucketed", "drop_last": True},
}


def curve(settings: dict) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loss of every step, and the final weights."""
    config = Config(**{**BASE, **settings})
    splits = tiny_splits(config)
    training = build_training(config, splits)
    losses = [result.loss / result.count for result in train(training, loader_for(training, splits))]
    return losses, {name: tensor.clone() for name, tensor in training.network.state_dict().items()}


def curves(all_settings: list[dict]) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    return [curve(settings) for settings in all_settings]


@pytest.fixture(scope="module")
def alone() -> list:
    torch.set_num_threads(1)
    return curves(list(SETTINGS.values()))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_any_number_of_ranks_gives_the_losses_and_weights_of_one(world_size: int, alone: list) -> None:
    by_rank = on_ranks(world_size, curves, list(SETTINGS.values()))
    for number, name in enumerate(SETTINGS):
        losses, weights = alone[number]
        assert len(losses) == len(set(losses)) > 10
        for rank in range(world_size):
            rank_losses, rank_weights = by_rank[rank][number]
            assert rank_losses == pytest.approx(losses, rel=1e-5), name
            for key, tensor in weights.items():
                torch.testing.assert_close(rank_weights[key], tensor, rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")


def fewer_samples_than_ranks() -> list[float]:
    """A last batch of one sample on three ranks: two of them have no share of the step."""
    config = Config(**{**BASE, "batch_size": 56, "optimizer": "sgd"})
    splits = tiny_splits(config)
    training = build_training(config, splits)
    return [result.loss / result.count for result in train(training, loader_for(training, splits))]


def test_a_rank_without_a_share_of_a_step_takes_part_and_adds_nothing() -> None:
    alone = fewer_samples_than_ranks()
    for losses in on_ranks(3, fewer_samples_than_ranks):
        assert losses == pytest.approx(alone, rel=1e-5)


def bits(config: Config, stop_at: int | None = None) -> list[tuple[list[float], bytes]]:
    """Losses and final bits of a run with dropout, augmentation and EMA; broken off and resumed at stop_at."""
    splits = tiny_splits(config)

    def fresh():
        torch.manual_seed(1)
        return build_training(config, splits, MnistCnn((1, 8, 8), 4))

    training, losses, start = fresh(), [], 0
    if stop_at is not None:
        for result in train(training, loader_for(training, splits)):
            losses.append(result.loss)
            if result.step + 1 == stop_at:
                break
        again = fresh()
        again.network.load_state_dict(training.network.state_dict())
        again.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
        assert again.ema is not None
        assert training.ema is not None
        again.ema.load_state_dict(training.ema.state_dict())
        training, start = again, stop_at
    losses += [result.loss for result in train(training, loader_for(training, splits, start))]
    weights = [*training.network.state_dict().values(), *training.evaluated.state_dict().values()]
    return [(losses, b"".join(tensor.numpy().tobytes() for tensor in weights))]


RANDOM = Config(**BASE, augment="flip-crop", ema_decay=0.9)


def test_two_runs_are_the_same_bits() -> None:
    assert bits(RANDOM) == bits(RANDOM)


@pytest.mark.parametrize("stop_at", [1, 5, 6, 7, 17])  # an epoch has 6 steps
def test_interrupted_and_resumed_is_uninterrupted_bit_by_bit(stop_at: int) -> None:
    assert bits(RANDOM, stop_at) == bits(RANDOM)


def resumed_at_every(stops: list[int]) -> list:
    return [bits(RANDOM, stop) for stop in [None, *stops]]


def test_two_ranks_resume_bit_by_bit_too() -> None:
    for whole, *resumed in on_ranks(2, resumed_at_every, [5, 6]):
        assert resumed == [whole, whole]


def with_a_bad_rank(value: float, bad_step: int) -> tuple[str, int, bool]:
    """One rank's inputs become `value` at a step; what was raised, at which step, and whether weights stayed finite."""
    config = Config(**{**BASE, "optimizer": "sgd"})
    splits = tiny_splits(config)
    training = build_training(config, splits)
    done = 0

    class Poison(nn.Module):
        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            bad = done == bad_step and training.world.rank == training.world.size - 1
            return pixels.float() * value if bad else pixels.float() / 255

    training.normalize = Poison()
    before = None
    try:
        for result in train(training, loader_for(training, splits)):
            done = result.step + 1
            before = [parameter.clone() for parameter in training.network.parameters()]
    except NonFiniteLoss as error:
        assert before is not None
        same = all(map(torch.equal, before, training.network.parameters()))
        return str(error), done, same
    return "", done, False


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_on_one_rank_stops_all_before_the_update(value: float) -> None:
    for message, done, unchanged in on_ranks(2, with_a_bad_rank, value, 3):
        assert "step 4" in message
        assert done == 3
        assert unchanged


def measured(batch_size: int) -> Evaluation:
    config = Config(**{**BASE, "batch_size": batch_size})
    splits = tiny_splits(config)
    torch.manual_seed(0)
    network = PlainNet()
    loader = build_loader(splits["test"], EvaluationBatches(11, batch_size, current_world()), num_workers=0)
    return evaluate(network, Normalize(splits.info), loader, 4, config, torch.device("cpu"), num_worst=3)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_evaluation_is_the_same_on_any_number_of_ranks(world_size: int) -> None:
    alone = measured(4)
    assert alone.num_samples == 11
    for result in on_ranks(world_size, measured, 4):
        assert result.confusion == alone.confusion
        assert result.loss == pytest.approx(alone.loss, rel=1e-6)
        assert [(m.sample_id, m.prediction) for m in result.worst] == [(m.sample_id, m.prediction) for m in alone.worst]


def test_evaluation_is_a_plain_forward_pass() -> None:
    splits, result = tiny_splits(Config(**BASE)), measured(3)
    torch.manual_seed(0)
    network = PlainNet()
    pixels, labels = splits["test"].images(np.arange(11)), torch.from_numpy(splits["test"].labels)
    logits = network((pixels.float() / 255 - 0.5) / 0.25)
    assert result.loss == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert result.accuracy == pytest.approx((logits.argmax(1) == labels).float().mean().item())


def test_evaluation_restores_training_mode() -> None:
    config = Config(**BASE)
    splits = tiny_splits(config)
    network = PlainNet().train()
    loader = build_loader(splits["test"], EvaluationBatches(11, 4, World()), num_workers=0)
    evaluate(network, Normalize(splits.info), loader, 4, config, torch.device("cpu"))
    assert network.training


def test_ema_moves_towards_the_weights_at_the_rate_of_the_step() -> None:
    average, network = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    nn.init.zeros_(average.weight)
    nn.init.ones_(network.weight)
    update_ema(average, network, decay=0.999, step=0)
    assert average.weight.item() == pytest.approx(0.9)  # 1 - 1/10
    update_ema(average, network, decay=0.5, step=1000)
    assert average.weight.item() == pytest.approx(0.95)


def asked_to_stop(rank_that_asks: int) -> list[bool]:
    config = Config(**BASE)
    splits = tiny_splits(config)
    training = build_training(config, splits)
    seen: list[bool] = []
    asks = training.world.rank == rank_that_asks
    for result in train(training, loader_for(training, splits), lambda: asks and len(seen) == 2):
        seen.append(result.stop)
        if result.stop:
            break
    return seen


def test_all_ranks_stop_at_the_step_at_which_one_was_asked_to() -> None:
    assert on_ranks(2, asked_to_stop, 1) == [[False, False, True]] * 2


def test_bf16_trains_close_to_fp32() -> None:
    exact, rounded = curve({})[0], curve({"precision": "bf16"})[0]
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.05)


def test_loss_falls() -> None:
    losses, _ = curve({"epochs": 12})
    assert sum(losses[-6:]) < 0.5 * sum(losses[:6])

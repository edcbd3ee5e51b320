"""N ranks are 1 rank; interrupted and resumed is uninterrupted; not a number stops every rank."""

import copy
import dataclasses
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import functional as F

from app.config import Config
from app.data.datasets import check_data, load_splits
from app.data.loader import build_loader
from app.data.samples import Subset
from app.data.sampling import EvaluationBatches
from app.data.splits import Splits
from app.distributed import World, current_world
from app.errors import BadInput, NonFiniteLoss, TooManyBadSamples
from app.generators import seed_generators
from app.loop import evaluate, refuse_unreadable, train, update_ema
from app.metrics import Evaluation
from app.models.build import preprocessing
from app.models.mnist_cnn import MnistCnn
from app.setup import build_network, load_optimizer
from tests.common import PlainNet, bits_of, build_training, loader_for, on_ranks, tiny_splits, with_unreadable

BASE = {"dataset": "tests.common:tiny_splits", "epochs": 3, "batch_size": 10, "lr": 0.01, "warmup_epochs": 0.5}

# Batch sizes that do not divide, by ranks or by micro-batches; a last batch (57 = 5 x 10 + 7); mixing.
SETTINGS = {
    "plain": {"optimizer": "sgd"},
    "adamw, smoothing, clipping": {"label_smoothing": 0.1, "grad_clip": 0.5},
    "micro-batches": {"optimizer": "sgd", "micro_batch_size": 2},
    "last batch of one": {"optimizer": "sgd", "batch_size": 8},
    "mixup": {"optimizer": "sgd", "mixup": 0.4},
    "cutmix and augmentation": {"optimizer": "sgd", "cutmix": 1.0, "augment": "flip-crop"},
    "balanced": {"optimizer": "sgd", "sampler": "balanced"},
    "weighted and mixup": {"optimizer": "sgd", "sampler": "weighted", "mixup": 0.4},
    "length-bucketed, whole batches only": {"optimizer": "sgd", "sampler": "length-bucketed", "drop_last": True},
}


# Training samples that cannot be read, as many as an epoch may have, and what else is tried with them.
UNREADABLE = [3, 4, 20, 33, 56]
DAMAGED: dict[str, dict] = {
    "plain": {"optimizer": "sgd"},
    "clipping, micro-batches": {"optimizer": "sgd", "grad_clip": 0.5, "micro_batch_size": 2},
    "ranks that can read nothing": {"optimizer": "sgd", "batch_size": 5, "micro_batch_size": 1},
    "mixup and augmentation": {"optimizer": "sgd", "mixup": 0.4, "augment": "flip-crop"},
    "cutmix, weighted": {"optimizer": "sgd", "cutmix": 1.0, "sampler": "weighted"},
}
SETTINGS |= {f"unreadable: {name}": {**settings, "max_bad_samples": 15} for name, settings in DAMAGED.items()}


def splits_for(config: Config) -> Splits:
    splits = tiny_splits(config)
    return with_unreadable(splits, train=UNREADABLE, test=[0, 7]) if config.max_bad_samples else splits


def curve(settings: dict) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loss of every step, and the final weights."""
    config = Config(**{**BASE, **settings})
    splits = splits_for(config)
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


def one_step(splits: Splits, **settings) -> tuple[float, int, list[torch.Tensor]]:
    config = Config(**{**BASE, "optimizer": "sgd", "batch_size": 57, "max_steps": 1, "warmup_epochs": 0.0, **settings})
    training = build_training(config, splits)
    (result,) = train(training, loader_for(training, splits))
    return result.loss / result.count, result.count, [tensor.clone() for tensor in training.network.parameters()]


def test_random_numbers_are_those_of_torchs_own_seeding() -> None:
    seed = 2**62 + 7
    torch.manual_seed(seed)
    wanted = torch.rand(5)
    seed_generators(seed, torch.device("cpu"))
    assert torch.equal(torch.rand(5), wanted)


def test_a_step_with_unreadable_samples_is_the_step_without_them() -> None:
    splits = tiny_splits(Config(**BASE))
    kept = np.setdiff1d(np.arange(57), UNREADABLE)
    without = dataclasses.replace(splits, train=Subset(splits.train, kept))
    loss, count, weights = one_step(with_unreadable(splits, train=UNREADABLE), max_bad_samples=5)
    expected_loss, expected_count, expected_weights = one_step(without)
    assert count == expected_count == 52
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-7)


def counts(max_bad: int, bad_before: int = 0, start: int = 0) -> tuple[list[tuple[int, int]], list[str], str]:
    """(count, bad_samples) of the steps, what was reported, and how it ended."""
    config = Config(**{**BASE, "sampler": "sequential", "max_bad_samples": max_bad})
    splits = with_unreadable(tiny_splits(config), train=UNREADABLE)
    training = build_training(config, splits)
    seen, reported = [], []
    steps = train(training, loader_for(training, splits, start), lambda: False, reported.extend, bad_before)
    try:
        for result in steps:
            seen.append((result.count, result.bad_samples))
    except TooManyBadSamples as error:
        return seen, reported, str(error)
    return seen, reported, ""


def test_unreadable_samples_are_counted_by_the_epoch_and_named_on_every_rank() -> None:
    names = [f"train/{i}.png is no readable image" for i in UNREADABLE]
    for seen, reported, error in [counts(5), *on_ranks(3, counts, 5)]:
        assert seen == 3 * [(8, 2), (10, 2), (9, 3), (9, 4), (10, 4), (6, 5)]
        assert reported == 3 * names
        assert error == ""


def test_too_many_unreadable_samples_stop_every_rank_at_the_same_step() -> None:
    alone = counts(3)
    seen, reported, error = alone
    assert seen == [(8, 2), (10, 2), (9, 3)]
    assert len(reported) == 4  # each is said before the run ends
    assert "--max-bad-samples 3: 4 samples of epoch 1, up to step 4, could not be read (train/33.png is no" in error
    assert on_ranks(3, counts, 3) == [alone] * 3
    # A resumed epoch goes on counting.
    assert counts(3, bad_before=3, start=3)[0] == []
    assert counts(4, bad_before=3, start=3)[0] == [(9, 4), (10, 4)]


def nothing_readable() -> str:
    config = Config(**{**BASE, "sampler": "sequential", "max_bad_samples": 30})
    splits = with_unreadable(tiny_splits(config), train=list(range(10, 20)))
    training = build_training(config, splits)
    with pytest.raises(TooManyBadSamples) as error:
        list(train(training, loader_for(training, splits)))
    return str(error.value)


def test_a_step_of_which_nothing_can_be_read_is_named_by_every_rank() -> None:
    alone = nothing_readable()
    assert alone.startswith("no sample of step 2 could be read")
    assert "train/10.png is no readable image; train/11.png" in alone
    assert on_ranks(2, nothing_readable) == [alone] * 2


def test_an_unreadable_sample_without_a_budget_is_bad_input() -> None:
    with pytest.raises(BadInput, match=r"train/3\.png is no readable image"):
        counts(0)


def test_a_budget_that_is_not_needed_changes_no_bit() -> None:
    assert bits(RANDOM.model_copy(update={"max_bad_samples": 9})) == bits(RANDOM)


def measured_without(max_bad: int) -> Evaluation:
    config = Config(**{**BASE, "max_bad_samples": max_bad})
    return measured_on(splits_for(config), config)


def test_evaluation_leaves_out_what_cannot_be_read_on_any_number_of_ranks() -> None:
    alone, plain = measured_without(2), tiny_splits(Config(**BASE))
    assert alone.unreadable == ["test/0.png is no readable image", "test/7.png is no readable image"]
    kept = np.setdiff1d(np.arange(11), [0, 7])
    expected = measured_on(dataclasses.replace(plain, test=Subset(plain["test"], kept)), Config(**BASE))
    assert alone.confusion == expected.confusion
    assert alone.loss == pytest.approx(expected.loss, rel=1e-6)
    for world_size in (2, 3):
        for result in on_ranks(world_size, measured_without, 2):
            assert (result.confusion, result.unreadable) == (alone.confusion, alone.unreadable)
            assert result.loss == pytest.approx(alone.loss, rel=1e-6)


def test_an_evaluation_that_left_out_too_much_is_refused() -> None:
    config = Config(**{**BASE, "max_bad_samples": 2})
    refuse_unreadable(Evaluation(1.0, [[3]], unreadable=["a", "b"]), config, "val")
    with pytest.raises(TooManyBadSamples, match=r"--max-bad-samples 2: 3 samples of the val split .*\(a; b; c\)"):
        refuse_unreadable(Evaluation(1.0, [[3]], unreadable=["a", "b", "c"]), config, "val")
    with pytest.raises(TooManyBadSamples, match="no sample of the test split could be read: a"):
        refuse_unreadable(Evaluation(0.0, [[0]], unreadable=["a"]), config, "test")


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
    return bits_of(
        splits,
        lambda: build_training(config, splits, nn.Sequential(nn.Upsample(10), MnistCnn((1, 10, 10), 4))),
        stop_at,
    )


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


SYNTHETIC = {"dataset": "synthetic", "synthetic_samples": 400, "synthetic_classes": 4}
GREY = {**SYNTHETIC, "image_channels": 1, "model": "mnist-cnn"}
TEXTS = {"dataset": "text", "model": "text-lstm", "batch_size": 14}
# Networks of DDP buckets in one piece and in several, with batch norm, dropout and a recurrent layer.
NETWORKS: dict[str, dict] = {
    "mnist-cnn": {**GREY, "image_size": 12, "batch_size": 96},
    "mnist-cnn, uneven": {**GREY, "image_size": 17, "batch_size": 33, "micro_batch_size": 6},
    "mnist-cnn, several buckets": {**GREY, "image_size": 28, "batch_size": 13, "ema_decay": 0.9},
    "mnist-cnn, bf16 gradients": {**GREY, "image_size": 12, "batch_size": 96, "grad_compression": "bf16"},
    "mnist-cnn, buckets never rebuilt": {**GREY, "image_size": 12, "batch_size": 96, "find_unused_parameters": True},
    "resnet18": {**SYNTHETIC, "model": "resnet18", "image_size": 16, "batch_size": 23, "max_steps": 3},
    "text-lstm": {**TEXTS, "max_length": 12},
    "text-lstm, larger": {**TEXTS, "max_length": 30, "embedding_size": 70, "hidden_size": 90, "bidirectional": True},
}


def whole_and_resumed(name: str, data_dir: str, stop_at: int) -> list:
    own = {"data_dir": data_dir} if NETWORKS[name]["dataset"] == "text" else {}
    config = Config(**{"max_steps": 5, "lr": 0.01, "warmup_epochs": 0, **NETWORKS[name], **own})
    splits = load_splits(config, check_data(config).tokenizer)
    return [
        bits_of(splits, lambda: build_training(config, splits, build_network(config, splits.info, None)), stop)
        for stop in (None, stop_at)
    ]


LARGER = (pytest.mark.slow, pytest.mark.ci)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("mnist-cnn", "text-lstm") else LARGER) for name in NETWORKS]
)
def test_any_number_of_ranks_resumes_bit_by_bit(name: str, world_size: int, tmp_path: Path) -> None:
    words = [" ".join(f"w{number * place % 41}" for place in range(3 + number % 25)) for number in range(60)]
    (tmp_path / "t.csv").write_text("text,label\n" + "".join(f"{text},c{len(text) % 3}\n" for text in words))
    for whole, resumed in on_ranks(world_size, whole_and_resumed, name, str(tmp_path), 2):
        assert resumed == whole


def stretch(start: int, stop: int, state: dict | None) -> tuple[list[list[int]], list[float], dict]:
    """The steps from start up to stop: this rank's sample ids, the losses, and what to go on with."""
    config = Config(**BASE)
    splits = tiny_splits(config)
    training = build_training(config, splits)
    if state is not None:
        training.network.load_state_dict(state["network"])
        load_optimizer(training.optimizer, copy.deepcopy(state["optimizer"]))
    batches = list(itertools.islice(loader_for(training, splits, start), stop - start))
    losses = [result.loss / result.count for result in train(training, batches)]
    ids = [batch["ids"][batch["rows"]].tolist() for batch in batches]
    return ids, losses, {"network": training.network.state_dict(), "optimizer": training.optimizer.state_dict()}


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
@pytest.mark.parametrize("stop_at", [5, 6, 7])  # before, on and after an epoch's end
def test_resumed_on_another_number_of_ranks_it_is_the_same_run(before: int, after: int, stop_at: int) -> None:
    (whole,) = on_ranks(1, stretch, 0, 18, None)
    first = on_ranks(before, stretch, 0, stop_at, None)
    second = on_ranks(after, stretch, stop_at, 18, first[0][2])
    steps = [step for part in (first, second) for step in zip(*(ids for ids, _, _ in part), strict=True)]
    samples = [[sample for ids in step for sample in ids] for step in steps]
    assert samples == whole[0]
    assert first[0][1] + second[0][1] == pytest.approx(whole[1], rel=1e-5)
    for name, tensor in whole[2]["network"].items():
        torch.testing.assert_close(second[0][2]["network"][name], tensor, rtol=0, atol=1e-4)


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

    training.preprocess = Poison()
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
    return measured_on(tiny_splits(config), config)


def measured_on(splits: Splits, config: Config) -> Evaluation:
    torch.manual_seed(0)
    network = PlainNet()
    images = splits["test"]
    batches = EvaluationBatches(len(images.labels), config.batch_size, current_world())
    loader = build_loader(images, batches, num_workers=0, skip_unreadable=config.max_bad_samples > 0)
    return evaluate(network, preprocessing(splits.info), loader, 4, config, torch.device("cpu"), num_worst=3)


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
    pixels, labels = splits["test"].inputs(np.arange(11)), torch.from_numpy(splits["test"].labels)
    logits = network((pixels.float() / 255 - 0.5) / 0.25)
    assert result.loss == pytest.approx(nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert result.accuracy == pytest.approx((logits.argmax(1) == labels).float().mean().item())


def test_evaluation_restores_training_mode() -> None:
    config = Config(**BASE)
    splits = tiny_splits(config)
    network = PlainNet().train()
    loader = build_loader(splits["test"], EvaluationBatches(11, 4, World()), num_workers=0)
    evaluate(network, preprocessing(splits.info), loader, 4, config, torch.device("cpu"))
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


class HalfUsed(PlainNet):
    """A second class layer takes the first one's place in every other forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.calls = nn.Linear(8 * 6 * 6, 4), 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        layer = self.other if self.calls % 2 else self.fc
        return layer(F.relu(self.conv(images)).flatten(1))


def half_used(find_unused_parameters: bool) -> list[float] | str:
    config = Config(**BASE, find_unused_parameters=find_unused_parameters)
    splits = tiny_splits(config)
    torch.manual_seed(0)
    training = build_training(config, splits, HalfUsed())
    try:
        return [result.loss for result in train(training, loader_for(training, splits))]
    except RuntimeError as error:
        return str(error)


def test_parameters_that_are_not_used_in_a_step() -> None:
    alone = half_used(False)
    assert isinstance(alone, list)
    for losses in on_ranks(2, half_used, True):
        assert losses == pytest.approx(alone, rel=1e-5)
    assert all("find_unused_parameters=True" in str(told) for told in on_ranks(2, half_used, False))


def reductions(micro_batch_size: int | None) -> tuple[int, int]:
    """Steps made, and how often gradients were added up over the ranks."""
    config = Config(**{**BASE, "micro_batch_size": micro_batch_size})
    splits = tiny_splits(config)
    training, counted = build_training(config, splits), []

    def hook(group: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[reportPrivateImportUsage]
        if bucket.is_last():
            counted.append(bucket.index())
        return allreduce_hook(group, bucket)  # type: ignore[arg-type]  # None is the default group

    assert isinstance(training.model, nn.parallel.DistributedDataParallel)
    training.model.register_comm_hook(None, hook)
    return len(list(train(training, loader_for(training, splits)))), len(counted)


def test_gradients_travel_once_a_step() -> None:
    for micro_batch_size in (None, 2):
        for steps, times in on_ranks(2, reductions, micro_batch_size):
            assert steps == times > 3


class Counting(PlainNet):
    """Keep the number of samples of each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[int] = []

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.passes.append(len(images))
        return super().forward(images)


def passes_of_an_epoch(micro_batch_size: int) -> list[int]:
    config = Config(**{**BASE, "epochs": 1, "micro_batch_size": micro_batch_size})
    splits, network = tiny_splits(config), Counting()
    training = build_training(config, splits, network)
    list(train(training, loader_for(training, splits)))
    return network.passes


def test_micro_batches_are_limited_in_size_whatever_the_share() -> None:
    (alone,) = on_ranks(1, passes_of_an_epoch, 4)
    assert alone == 5 * [4, 3, 3] + [4, 3]
    assert on_ranks(2, passes_of_an_epoch, 4) == [5 * [3, 2] + [4], 5 * [3, 2] + [3]]


def test_ranks_make_equally_many_passes() -> None:
    """Shares of 4, 3 and 3 samples in micro-batches of 3: synchronized batch norm would hang on unequal numbers."""
    assert on_ranks(3, passes_of_an_epoch, 3) == [
        5 * [2, 2] + [3],
        5 * [2, 1] + [2],
        5 * [2, 1] + [2],
    ]


def test_bf16_trains_close_to_fp32() -> None:
    exact, rounded = curve({})[0], curve({"precision": "bf16"})[0]
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.05)


def test_loss_falls() -> None:
    losses, _ = curve({"epochs": 12})
    assert sum(losses[-6:]) < 0.5 * sum(losses[:6])

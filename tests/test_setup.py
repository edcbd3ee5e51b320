"""From settings to what a worker trains with."""

import contextlib
import copy
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from app.config import Config
from app.data.samples import DataInfo
from app.data.sampling import Schedule
from app.distributed import World
from app.errors import BadInput, plain_message
from app.optim import build_optimizer
from app.setup import (
    build_network,
    check_smallest_part,
    compress_gradients,
    ddp_options,
    evaluation_loader,
    load_optimizer,
    refuse_slow_bf16,
    set_up_ddp,
    set_up_torch,
)
from tests.common import PlainNet, on_ranks, tiny_splits

INFO = DataInfo((1, 8, 8), ("a", "b"), (0.5,), (0.25,), 57)


@pytest.mark.parametrize("saved_in_channels_last", [True, False])
def test_an_optimizers_state_follows_the_layout_of_the_weights(saved_in_channels_last: bool) -> None:
    def trained(channels_last: bool, state: dict | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        network = nn.Conv2d(4, 8, 3)
        if channels_last:
            network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack it
        optimizer = build_optimizer(Config(lr=0.1), list(network.parameters()))
        if state is not None:
            load_optimizer(optimizer, state)
        network(torch.rand(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))).square().sum().backward()
        optimizer.step()
        return network, optimizer

    state = copy.deepcopy(trained(saved_in_channels_last)[1].state_dict())
    same, other = (
        trained(layout, copy.deepcopy(state))[0] for layout in (saved_in_channels_last, not saved_in_channels_last)
    )
    torch.testing.assert_close(same.weight, other.weight, rtol=1e-4, atol=1e-5)


def test_an_optimizer_goes_on_with_its_own_settings() -> None:
    """A sweep that goes on from another trial's checkpoint has changed them."""
    weight = nn.Parameter(torch.ones(3))
    before = build_optimizer(Config(optimizer="sgd", momentum=0.9, weight_decay=0.1), [weight])
    weight.grad = torch.ones(3)
    before.step()
    after = build_optimizer(Config(optimizer="sgd", momentum=0.5, weight_decay=0.0), [weight])
    load_optimizer(after, copy.deepcopy(before.state_dict()))
    assert (after.param_groups[0]["momentum"], after.param_groups[0]["weight_decay"]) == (0.5, 0.0)
    torch.testing.assert_close(after.state[weight]["momentum_buffer"], before.state[weight]["momentum_buffer"])


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(64)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.norm(images.flatten(1))


@pytest.mark.parametrize(
    ("batch_size", "num_workers", "micro_batch_size", "good"),
    [
        (8, 1, None, False),  # 57 = 7 x 8 + 1
        (10, 1, None, True),
        (10, 4, None, False),
        (10, 1, 1, False),
        (10, 1, 3, True),
        (10, 3, 2, False),  # shares of 3 in two passes
        (57, 4, None, True),
        (57, "1:28", 2, False),
    ],
)
def test_batch_norm_is_not_given_a_single_sample(
    batch_size: int, num_workers: int | str, micro_batch_size: int | None, good: bool
) -> None:
    config = Config(batch_size=batch_size, micro_batch_size=micro_batch_size, num_workers=num_workers)
    schedule = Schedule((57,), batch_size, 1)
    check_smallest_part(nn.Flatten(), config, INFO, schedule)  # no batch norm: no matter
    if good:
        check_smallest_part(Normed(), config, INFO, schedule)
    else:
        with pytest.raises(
            BadInput, match=f"--batch-size {batch_size}: .*--micro-batch-size {micro_batch_size}, a worker"
        ):
            check_smallest_part(Normed(), config, INFO, schedule)


def test_evaluation_needs_no_more_memory_per_worker_than_micro_batches_allow() -> None:
    def sizes(world: World, **settings: Any) -> set[int]:
        config = Config(dataset="tests.common:tiny_splits", batch_size=8, **settings)
        loader = evaluation_loader(config, tiny_splits(config).train, world, torch.device("cpu"))
        return {len(batch["ids"]) for batch in loader}

    assert max(sizes(World(0, 1))) == 32
    assert max(sizes(World(0, 1), micro_batch_size=2)) == max(sizes(World(0, 2), micro_batch_size=2)) == 8


def test_synchronized_batch_norm_is_not_tried_on_the_cpu() -> None:
    network = nn.SyncBatchNorm.convert_sync_batchnorm(Normed())
    check_smallest_part(network, Config(batch_size=8, sync_batchnorm=True), INFO, Schedule((57,), 8, 1))


def test_sync_batchnorm_converts_the_network() -> None:
    for wanted in (True, False):
        network = build_network(Config(model="resnet18", sync_batchnorm=wanted), INFO, checkpoint=None)
        assert any(isinstance(module, nn.SyncBatchNorm) for module in network.modules()) is wanted


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_sets_torchs_switches(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", deterministic)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # and back again at the end
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    threads = torch.get_num_threads()
    try:
        set_up_torch(Config(deterministic=deterministic), torch.device("cuda"))
        assert torch.are_deterministic_algorithms_enabled() is deterministic
        assert torch.backends.cudnn.benchmark is not deterministic
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)


def test_a_message_from_a_loader_process_comes_without_its_traceback() -> None:
    wrapped = BadInput(
        "Caught BadInput in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "x.py", line 1\napp.errors.BadInput: a.png is no readable image\n'
    )
    assert plain_message(wrapped) == "a.png is no readable image"
    assert plain_message(BadInput("--lr 0")) == "--lr 0"


def gradients(config: Config) -> tuple[torch.Tensor, torch.dtype]:
    torch.manual_seed(0)
    network = PlainNet()
    model = nn.parallel.DistributedDataParallel(network, **ddp_options(config))
    compress_gradients(model, config)
    rank = torch.distributed.get_rank()
    model(torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
    found = torch.cat([parameter.grad.flatten() for parameter in network.parameters() if parameter.grad is not None])
    return found, found.dtype


def test_gradients_are_exchanged_in_bf16() -> None:
    exact, compressed = (on_ranks(2, gradients, Config(grad_compression=name)) for name in ("none", "bf16"))
    for ranks in (exact, compressed):
        assert torch.equal(ranks[0][0], ranks[1][0])
    found, dtype = compressed[0]
    assert dtype == torch.float32
    assert torch.equal(found, found.bfloat16().float())  # what came over the wire
    assert not torch.equal(found, exact[0][0])
    torch.testing.assert_close(found, exact[0][0], rtol=2**-6, atol=1e-3)


class Shuffled(nn.Module):
    """Registers its layers in another order than it uses them in, with batch norm, dropout and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.frozen, self.first = nn.Linear(6, 3), nn.Linear(6, 6).requires_grad_(False), nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.calls = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(nn.functional.dropout(self.norm(self.frozen(self.first(inputs))), 0.5))


def settled() -> tuple[list[str], bool]:
    """The parameters as DDP exchanges them in the first step, and whether preparing DDP left no other trace."""
    torch.manual_seed(0)
    network, config = Shuffled(), Config()
    model = nn.parallel.DistributedDataParallel(network, **ddp_options(config))
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in network.named_parameters()}
    before, numbers, exchanged = copy.deepcopy(network.state_dict()), torch.get_rng_state(), []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[reportPrivateImportUsage]
        exchanged.append([names[parameter] for parameter in bucket.parameters()])
        return allreduce_hook(state, bucket)  # type: ignore[arg-type]  # None is the default group

    model.register_comm_hook(None, hook)
    set_up_ddp(model, config)
    unchanged = all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    unchanged &= torch.equal(torch.get_rng_state(), numbers) and network.calls == 0
    unchanged &= all(parameter.grad is None for parameter in network.parameters()) and model.module is network
    exchanged.clear()
    model(torch.ones(2, 5)).sum().backward()
    return [name for bucket in exchanged for name in bucket], unchanged


def test_the_order_of_the_first_steps_gradients_is_that_of_registration() -> None:
    expected = ["norm.bias", "norm.weight", "first.bias", "first.weight", "last.bias", "last.weight"]
    assert on_ranks(2, settled) == [(expected, True)] * 2


@pytest.mark.parametrize(
    ("asked", "begun_in", "told"),
    [
        ("bf16", None, "--precision bf16: a card cannot compute in it; use fp32"),
        ("bf16", "fp32", "--precision bf16: a card cannot compute in it; use fp32"),
        (
            "auto",
            "bf16",
            "--precision auto came to bf16 when this run began, which a card cannot compute in: go on",
        ),
        ("auto", "fp32", None),
        ("auto", None, None),
        ("fp32", "bf16", None),
    ],
)
def test_a_gpu_that_is_slow_at_bf16_is_not_made_to(
    asked: Any, begun_in: Any, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")
    checkpoint: Any = None if begun_in is None else SimpleNamespace(config=Config(precision=begun_in))
    with pytest.raises(BadInput, match=told) if told else contextlib.nullcontext():
        refuse_slow_bf16(Config(precision=asked), checkpoint, torch.device("cuda"))

"""From settings to what a worker trains with. Pure PyTorch: nothing here knows Ray."""

import copy
import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from app.checkpoint import Checkpoint, load_checkpoint
from app.clock import StepClock
from app.config import Config, is_weights_file, is_weights_path
from app.data.augment import build_augment
from app.data.loader import build_loader
from app.data.samples import DataInfo, SampleSet
from app.data.sampling import EvaluationBatches, Order, Schedule, TrainingBatches
from app.data.splits import Splits
from app.data.tokens import same_tokens
from app.distributed import World, derive_seed
from app.errors import BadInput
from app.generators import seed_generators
from app.micro_batches import smallest_pass
from app.models.build import build_model, preprocessing
from app.runs import find_checkpoint
from app.storage import Storage
from app.weights import load_weights, load_weights_file


def set_up_torch(config: Config, device: torch.device) -> None:
    torch.set_num_threads(max(1, int(config.cpus_per_worker)))
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = not config.deterministic
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what deterministic cuBLAS asks for
    if torch.are_deterministic_algorithms_enabled() != config.deterministic:  # asking for it imports the compiler: 2 s
        torch.use_deterministic_algorithms(config.deterministic)


def is_fast_at_bf16(device: torch.device) -> bool:
    """Whether it has instructions of its own for bfloat16: NVIDIA's from Ampere on, Intel's AMX and AVX512-BF16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    able = torch.cpu.get_capabilities()
    return bool(able.get("amx_tile") or able.get("avx512_bf16"))


def refuse_slow_bf16(config: Config, checkpoint: Checkpoint | None, device: torch.device) -> None:
    """Raise BadInput for bf16 on a GPU that can only emulate it. CPUs are slow at it, and get there."""
    kept = config.precision == "auto" and checkpoint is not None
    precision = checkpoint.config.precision if checkpoint is not None and kept else config.precision
    if precision == "bf16" and device.type == "cuda" and not is_fast_at_bf16(device):
        name = torch.cuda.get_device_name(device)
        if kept:
            raise BadInput(
                f"--precision auto came to bf16 when this run began, which {name} cannot compute in: go on with it on "
                "a newer GPU or on a CPU, or choose another --run-name"
            )
        raise BadInput(f"--precision bf16: {name} cannot compute in it; use fp32")


def build_network(config: Config, info: DataInfo, checkpoint: Checkpoint | None) -> nn.Module:
    """The network on the CPU with its first weights, or with the ones being trained in the checkpoint."""
    seed_generators(derive_seed("weights", config.seed))
    network = build_model(config, info, pretrained=checkpoint is None)
    if checkpoint is not None:
        load_weights(network, checkpoint.trainer.get("trained_weights", checkpoint.model), checkpoint.path)
    elif config.weights is not None and is_weights_path(config.weights):
        load_weights(network, starting_weights(config.weights, info), f"--weights {config.weights}")
    if config.sync_batchnorm:
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    return in_layout(network, config)


def starting_weights(path: str, info: DataInfo) -> dict[str, torch.Tensor]:
    """Those of a file, of a checkpoint, or of a run's best checkpoint. Raises BadInput where there are none.

    The same tokens must mean the same, which shapes alone would not tell.
    """
    if is_weights_file(path):
        return load_weights_file(path, f"--weights {path}")
    checkpoint = load_checkpoint(Storage(find_checkpoint(path)), "")
    if checkpoint.info.tokenizer and not (info.tokenizer and same_tokens(checkpoint.info.tokenizer, info.tokenizer)):
        raise BadInput(
            f"--weights {path} was trained on the tokens of another tokenizer: "
            "give --tokenizer the tokenizer.json in that run's folder"
        )
    return checkpoint.model


def in_layout(network: nn.Module, config: Config) -> nn.Module:
    if config.channels_last:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack it
    return network


def check_smallest_part(network: nn.Module, config: Config, info: DataInfo, schedule: Schedule) -> None:
    """Raise BadInput if batch norm cannot train on the fewest samples that a forward pass will get."""
    if config.sync_batchnorm:
        return  # its statistics are over all workers, and it does not run on the CPU, where the network still is
    counts = {*schedule.leftovers, *([schedule.batch_size] if schedule.num_full else [])}
    smallest = min(
        smallest_pass(count, num_workers, config.micro_batch_size)
        for count in counts
        for num_workers in range(config.min_workers, config.max_workers + 1)
    )
    if smallest > 1 or not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in network.modules()):
        return
    try:
        copy.deepcopy(network).train()(preprocessing(info)(info.example(1)))
    except ValueError as error:  # 'Expected more than 1 value per channel when training'
        raise BadInput(
            f"--batch-size {config.batch_size}: with --num-workers {config.num_workers} and --micro-batch-size "
            f"{config.micro_batch_size}, a worker computes one sample by itself in some forward passes (an epoch's "
            f"smallest batch has {schedule.smallest_batch} samples), and {config.model}'s batch norm cannot train on "
            "one; change one of the three, or leave small batches out with --drop-last"
        ) from error


def ddp_options(config: Config) -> dict[str, Any]:
    """What DistributedDataParallel is made with."""
    return {"find_unused_parameters": config.find_unused_parameters, "gradient_as_bucket_view": True}


def set_up_ddp(model: nn.Module, config: Config, clock: StepClock | None = None) -> None:
    """Prepare a network that DistributedDataParallel wraps for its first step; one worker has none."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        compress_gradients(model, config, clock)
        settle_buckets(model)


class EveryParameter(nn.Module):
    """A sum over all trainable parameters, the last registered one first in its backward pass."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, _: None) -> torch.Tensor:
        trainable = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        return torch.stack([parameter.sum() for parameter in trainable]).sum()


def settle_buckets(model: nn.parallel.DistributedDataParallel) -> None:
    """Fix the buckets in which gradients are exchanged, without a pass through the network itself.

    DDP begins with one bucket and, after a process's first backward pass, makes new ones in the order in which the
    gradients came. A sum over three or more ranks depends on a gradient's place in its bucket, so the first step after
    a resume would differ in the last bit. A backward pass that is thrown away makes every process, fresh or resumed,
    have the same buckets from its first step on: in reverse order of registration, as DDP itself expects gradients.
    """
    if model.find_unused_parameters:
        return  # DDP then keeps its first buckets
    network = model.module
    model.module = EveryParameter(network)
    model(None).backward()
    model.module = network
    network.zero_grad(set_to_none=True)


def compress_gradients(model: nn.Module, config: Config, clock: StepClock | None = None) -> None:
    """Have DistributedDataParallel exchange gradients as --grad-compression says; one worker exchanges none.

    A clock that is on is told when the last ones are exchanged.
    """
    timed = clock is not None and clock.is_on
    if not isinstance(model, nn.parallel.DistributedDataParallel) or (config.grad_compression == "none" and not timed):
        return
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hook = default_hooks.bf16_compress_hook if config.grad_compression == "bf16" else default_hooks.allreduce_hook
    model.register_comm_hook(None, clock.on_last_bucket(hook) if clock is not None and clock.is_on else hook)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load its state, in the memory layout of the parameters; its settings stay (a sweep may change them).

    The saved tensors keep the layout they had; torch's fused kernels pair them with the parameters by
    place in memory, so another channels_last would silently mix them up.
    """
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def build_ema(config: Config, network: nn.Module, checkpoint: Checkpoint | None) -> nn.Module | None:
    """The moving average's network, or None when ema_decay is 0."""
    if not config.ema_decay:
        return None
    ema = copy.deepcopy(network).requires_grad_(False)
    if checkpoint is not None:
        load_weights(ema, checkpoint.model, checkpoint.path)
    return ema


def training_loader(
    config: Config,
    splits: Splits,
    order: Order,
    schedule: Schedule,
    world: World,
    start_step: int,
    device: torch.device,
) -> DataLoader:
    """Batches of the run's steps from start_step on, this rank's part of each."""
    batches = TrainingBatches(order, schedule, world, start_step, with_partner=bool(config.mixup or config.cutmix))
    augment = build_augment(config.augment, config.dataset)
    return build_loader(splits.train, batches, augment=augment, **_reading(config, splits.train, device))


def evaluation_loader(config: Config, samples: SampleSet, world: World, device: torch.device) -> DataLoader:
    """Every sample once, this rank's part. Batches are larger: no backward pass needs memory."""
    batch_size = 4 * config.batch_size
    if config.micro_batch_size is not None:
        batch_size = min(batch_size, 4 * config.micro_batch_size * world.size)
    batches = EvaluationBatches(len(samples.labels), batch_size, world, samples.facts.groups)
    return build_loader(samples, batches, **_reading(config, samples, device))


def _reading(config: Config, samples: SampleSet, device: torch.device) -> dict[str, Any]:
    num_workers = config.loader_workers
    if num_workers is None:
        num_workers = 0 if samples.in_memory else 2
    pin_memory, skip_unreadable = device.type == "cuda", config.max_bad_samples > 0
    # The clients of object stores do not survive a fork.
    streamed = config.dataset == "parquet" and "://" in str(config.data_dir)
    return {
        "seed": config.seed,
        "num_workers": num_workers,
        "pin_memory": pin_memory,
        "skip_unreadable": skip_unreadable,
        "start_method": "spawn" if streamed else None,
    }

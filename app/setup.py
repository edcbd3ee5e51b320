"""From settings to what a worker trains with. Pure PyTorch: nothing here knows Ray."""

import copy
import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from app.checkpoint import Checkpoint, load_weights, load_weights_file
from app.config import Config
from app.data.augment import build_augment
from app.data.images import DataInfo, ImageSet
from app.data.loader import build_loader
from app.data.sampling import EvaluationBatches, Schedule, TrainingBatches
from app.data.splits import Splits
from app.distributed import World, derive_seed
from app.errors import BadInput
from app.models.build import build_model, is_file


def set_up_torch(config: Config, device: torch.device) -> None:
    torch.set_num_threads(max(1, int(config.cpus_per_worker)))
    if device.type == "cuda":
        if config.precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise BadInput(f"--precision bf16: {torch.cuda.get_device_name(device)} cannot compute in it; use fp32")
        torch.backends.cudnn.benchmark = not config.deterministic
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what deterministic cuBLAS asks for
    torch.use_deterministic_algorithms(config.deterministic)


def build_network(config: Config, info: DataInfo, checkpoint: Checkpoint | None) -> nn.Module:
    """The network on the CPU with its first weights, or with the ones being trained in the checkpoint."""
    torch.manual_seed(derive_seed("weights", config.seed))
    network = build_model(config, info, pretrained=checkpoint is None)
    if checkpoint is not None:
        load_weights(network, checkpoint.trainer.get("trained_weights", checkpoint.model), checkpoint.path)
    elif config.weights is not None and is_file(config.weights):
        load_weights(network, load_weights_file(config.weights), f"--weights {config.weights}")
    if config.sync_batchnorm:
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    if config.channels_last:
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs lack it
    return network


def build_ema(config: Config, network: nn.Module, checkpoint: Checkpoint | None) -> nn.Module | None:
    """The moving average's network, or None when ema_decay is 0."""
    if not config.ema_decay:
        return None
    ema = copy.deepcopy(network).requires_grad_(False)
    if checkpoint is not None:
        load_weights(ema, checkpoint.model, checkpoint.path)
    return ema


def training_loader(
    config: Config, splits: Splits, schedule: Schedule, world: World, start_step: int, device: torch.device
) -> DataLoader:
    """Batches of the run's steps from start_step on, this rank's part of each."""
    batches = TrainingBatches(
        schedule, config.seed, world, start_step, with_partner=bool(config.mixup or config.cutmix)
    )
    augment = build_augment(config.augment, config.dataset, splits.info.input_shape[-1])
    return build_loader(
        splits.train, batches, augment=augment, seed=config.seed, **_reading(config, splits.train, device)
    )


def evaluation_loader(config: Config, images: ImageSet, world: World, device: torch.device) -> DataLoader:
    """Every sample once, in order, this rank's part. Batches are larger: no backward pass needs memory."""
    batches = EvaluationBatches(len(images.labels), 4 * config.batch_size, world)
    return build_loader(images, batches, **_reading(config, images, device))


def _reading(config: Config, images: ImageSet, device: torch.device) -> dict[str, Any]:
    num_workers = config.loader_workers
    if num_workers is None:
        num_workers = 0 if images.in_memory else 2
    return {"num_workers": num_workers, "pin_memory": device.type == "cuda"}

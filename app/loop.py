"""The training loop in pure PyTorch: a step, the steps of a run, an evaluation.

Knows nothing of Ray; runs in one process, or in one of several joined by torch.distributed.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import get_ema_multi_avg_fn

from app.config import Config
from app.data.loader import Batch
from app.data.sampling import Schedule
from app.distributed import PendingSum, World, broadcast_from_rank_zero, derive_seed
from app.errors import NonFiniteLoss
from app.metrics import Evaluation, EvaluationSums
from app.optim import learning_rate


@dataclass
class Training:
    """What a training step works with. model is the network as DDP or torch.compile wrapped it."""

    config: Config
    schedule: Schedule
    world: World
    device: torch.device
    network: nn.Module
    model: nn.Module
    normalize: nn.Module
    optimizer: torch.optim.Optimizer
    ema: nn.Module | None = None

    @property
    def evaluated(self) -> nn.Module:
        """The weights that are evaluated, kept and delivered: the moving average where there is one."""
        return self.network if self.ema is None else self.ema


@dataclass(frozen=True)
class StepResult:
    """A finished step, the same on every rank but for the seconds. loss and correct are sums over count samples."""

    step: int
    loss: float
    correct: float
    count: int
    seconds: float
    data_seconds: float
    stop: bool


def train(
    training: Training, batches: Iterable[Batch], stop_requested: Callable[[], bool] = lambda: False
) -> Iterator[StepResult]:
    """Make a step of every batch. All ranks see stop at the same step, whichever was asked to stop."""
    training.model.train()
    started = time.perf_counter()
    for batch in batches:
        received = time.perf_counter()
        loss, correct, stop = train_step(training, batch, stop_requested())
        ended = time.perf_counter()
        yield StepResult(batch["step"], loss, correct, batch["global_count"], ended - started, received - started, stop)
        started = time.perf_counter()


def train_step(training: Training, batch: Batch, stop: bool = False) -> tuple[float, float, bool]:
    """Forward, backward, clip, step: one update from one global batch.

    Returns the sum of the loss and of the correct predictions over the global batch, and whether any
    rank asked to stop. Raises NonFiniteLoss on every rank, before the update, if the loss of any is
    not finite.
    """
    config, step = training.config, batch["step"]
    # Dropout is a function of (seed, step, rank): nothing to save, and the same after a resume.
    torch.manual_seed(derive_seed("step", config.seed, step, training.world.rank))
    rate = learning_rate(step, config, training.schedule)
    for group in training.optimizer.param_groups:
        group["lr"] = rate

    inputs, targets, partners, share = _mix(training.normalize(batch["inputs"]), batch["targets"], config, step)
    counted = batch["num_counted"]
    kept = max(counted, 1)  # a rank without a share still goes through the motions, with a stand-in
    inputs, targets, partners = inputs[-kept:], targets[-kept:], partners[-kept:]
    if config.channels_last:
        inputs = inputs.contiguous(memory_format=torch.channels_last)

    totals = torch.zeros(3, dtype=torch.float64, device=training.device)
    totals[2] = float(stop)
    pending = None
    # As many parts on every rank: synchronized batch norm is a collective in each forward pass.
    num_parts = max(1, min(config.grad_accumulation, batch["global_count"] // training.world.size))
    parts = np.array_split(np.arange(kept), num_parts)
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        rows = slice(int(part[0]), int(part[-1]) + 1)
        with _gradient_sync(training.model, last):
            with torch.autocast(training.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
                logits = training.model(inputs[rows])
            losses = _loss(logits.float(), targets[rows], partners[rows], share, config.label_smoothing)
            losses = losses if counted else losses[:0]
            totals[0] += losses.detach().sum()
            totals[1] += (logits.detach().argmax(dim=1) == targets[rows])[: len(losses)].sum()
            if last:
                pending = PendingSum(totals)
            # A sum over this rank's samples, scaled so that DDP's mean over ranks is the mean over the
            # global batch, however unevenly it is shared out.
            (losses.sum() * (training.world.size / batch["global_count"])).backward()

    assert pending is not None
    loss, correct, any_stop = pending.result()  # waits for the forward pass of all ranks
    if not np.isfinite(loss):
        raise NonFiniteLoss(
            f"the loss is {loss} at step {step + 1}: training stopped before its update; "
            "a lower --lr, a longer --warmup-epochs or --grad-clip may help"
        )
    if config.grad_clip is not None:
        nn.utils.clip_grad_norm_(training.network.parameters(), config.grad_clip)
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=True)
    if training.ema is not None:
        update_ema(training.ema, training.network, config.ema_decay, step)
    return loss, correct, any_stop > 0


def _mix(
    inputs: torch.Tensor, targets: torch.Tensor, config: Config, step: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """mixup (Zhang et al. 2018) or cutmix (Yun et al. 2019) with the sample before, whose share is 1 - share.

    What is drawn depends on the step alone, and the sample before is the same at every world size
    (sampling.TrainingBatches), so mixing is too.
    """
    alpha = config.mixup or config.cutmix
    if not alpha:
        return inputs, targets, targets, 1.0
    generator = np.random.default_rng(derive_seed("mix", config.seed, step))
    share = float(generator.beta(alpha, alpha))
    others = inputs.roll(1, 0)
    if config.mixup:
        return inputs * share + others * (1 - share), targets, targets.roll(1), share
    height, width = inputs.shape[-2:]
    box_height, box_width = (round(side * (1 - share) ** 0.5) for side in (height, width))
    top = int(generator.integers(0, height - box_height + 1))
    left = int(generator.integers(0, width - box_width + 1))
    mixed = inputs.clone()
    box = (..., slice(top, top + box_height), slice(left, left + box_width))
    mixed[box] = others[box]
    return mixed, targets, targets.roll(1), 1 - box_height * box_width / (height * width)


def _loss(
    logits: torch.Tensor, targets: torch.Tensor, partners: torch.Tensor, share: float, label_smoothing: float
) -> torch.Tensor:
    """Cross-entropy of each sample (n,), between its own target and its mixing partner's."""
    losses = F.cross_entropy(logits, targets, reduction="none", label_smoothing=label_smoothing)
    if share == 1.0:
        return losses
    other = F.cross_entropy(logits, partners, reduction="none", label_smoothing=label_smoothing)
    return share * losses + (1 - share) * other


def _gradient_sync(model: nn.Module, enabled: bool):  # a context manager of DDP's own type
    """DDP adds up the gradients in the last part's backward pass only."""
    ddp = getattr(model, "_orig_mod", model)  # below torch.compile
    return ddp.no_sync() if isinstance(ddp, DistributedDataParallel) and not enabled else nullcontext()


@torch.no_grad()
def evaluate(
    network: nn.Module,
    normalize: nn.Module,
    batches: Iterable[Batch],
    num_classes: int,
    config: Config,
    device: torch.device,
    num_worst: int = 0,
) -> Evaluation:
    """Every sample exactly once over all ranks; every rank must call it, and all get the same.

    network is not wrapped in DDP: ranks may have different numbers of batches.
    """
    training = network.training
    network.eval()
    # Batch norm's statistics are each rank's own; rank 0's are the ones that checkpoints hold.
    broadcast_from_rank_zero(list(network.buffers()))
    sums = EvaluationSums(num_classes, device, num_worst)
    for batch in batches:
        inputs, targets = normalize(batch["inputs"]), batch["targets"]
        if config.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
            logits = network(inputs)
        losses = F.cross_entropy(logits.float(), targets, reduction="none")
        sums.add(losses, logits, targets, batch["ids"])
    network.train(training)
    return sums.result()


@torch.no_grad()
def update_ema(average: nn.Module, network: nn.Module, decay: float, step: int) -> None:
    """Move the average's weights towards the network's; buffers are copied.

    The decay rises to its value as min(decay, (1 + step) / (10 + step)), so that a short run's average
    does not hang on to the first weights (as in tf.train.ExponentialMovingAverage). A function of the
    step: nothing to save but the average itself.
    """
    move = get_ema_multi_avg_fn(min(decay, (1 + step) / (10 + step)))
    move(list(average.parameters()), list(network.parameters()), step)
    for kept, current in zip(average.buffers(), network.buffers(), strict=True):
        kept.copy_(current)

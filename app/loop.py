"""The training loop in pure PyTorch: a step, the steps of a run, an evaluation.

Knows nothing of Ray; runs in one process, or in one of several joined by torch.distributed.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import get_ema_multi_avg_fn

from app.clock import StepClock
from app.config import Config
from app.data.loader import Batch
from app.data.sampling import Schedule
from app.distributed import PendingSum, World, broadcast_from_rank_zero, derive_seed, gather_texts
from app.errors import NonFiniteLoss, TooManyBadSamples
from app.generators import generators_kept, seed_generators
from app.metrics import Evaluation, EvaluationSums
from app.micro_batches import num_micro_batches
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
    preprocess: nn.Module
    optimizer: torch.optim.Optimizer
    ema: nn.Module | None = None
    clock: StepClock = field(default_factory=StepClock)

    @property
    def evaluated(self) -> nn.Module:
        """The weights that are evaluated, kept and delivered: the moving average where there is one."""
        return self.network if self.ema is None else self.ema


@dataclass(frozen=True)
class StepResult:
    """A finished step, the same on every rank but for the seconds. loss and correct are sums over count samples.

    bad_samples: of the epoch up to here, those that could not be read and are not counted.
    """

    step: int
    loss: float
    correct: float
    count: int
    seconds: float
    data_seconds: float
    stop: bool
    bad_samples: int


def train(
    training: Training,
    batches: Iterable[Batch],
    stop_requested: Callable[[], bool] = lambda: False,
    report_unreadable: Callable[[list[str]], None] = lambda _: None,
    bad_samples: int = 0,
) -> Iterator[StepResult]:
    """Make a step of every batch. All ranks see stop at the same step, whichever was asked to stop.

    What could not be read is reported on every rank, whichever it was. bad_samples: those of an epoch
    that is gone on with. Raises TooManyBadSamples on every rank at the same step.
    """
    training.model.train()
    started = time.perf_counter()
    training.clock.begin_step()
    for batch in batches:
        received = time.perf_counter()
        loss, correct, stop, unreadable = train_step(training, batch, stop_requested())
        if batch["step"] % training.schedule.steps_per_epoch == 0:
            bad_samples = 0
        if unreadable:
            report_unreadable(unreadable)
            bad_samples += len(unreadable)
            epoch = training.schedule.epoch_of(batch["step"]) + 1
            refuse_too_many(bad_samples, unreadable, training.config, f"epoch {epoch}, up to step {batch['step'] + 1},")
        ended, count = time.perf_counter(), batch["global_count"] - len(unreadable)
        training.clock.end_step(count)
        yield StepResult(batch["step"], loss, correct, count, ended - started, received - started, stop, bad_samples)
        started = time.perf_counter()
        training.clock.begin_step()


def refuse_too_many(bad_samples: int, unreadable: list[str], config: Config, where: str) -> None:
    """Raise TooManyBadSamples if one pass over the data had more of them than --max-bad-samples."""
    if bad_samples > config.max_bad_samples:
        more = f" and {len(unreadable) - 5} more" if len(unreadable) > 5 else ""
        raise TooManyBadSamples(
            f"--max-bad-samples {config.max_bad_samples}: {bad_samples} samples of {where} could not be read "
            f"({'; '.join(unreadable[-5:])}{more}); mend or remove them, or raise --max-bad-samples"
        )


def refuse_unreadable(result: Evaluation, config: Config, split: str) -> None:
    """Raise TooManyBadSamples if an evaluation of the split left out too many samples, or all."""
    refuse_too_many(len(result.unreadable), result.unreadable, config, f"the {split} split")
    if result.unreadable and not result.num_samples:
        raise TooManyBadSamples(f"no sample of the {split} split could be read: {'; '.join(result.unreadable[:5])}")


def train_step(training: Training, batch: Batch, stop: bool = False) -> tuple[float, float, bool, list[str]]:
    """Forward, backward, clip, step: one update from one global batch.

    Returns the sum of the loss and of the correct predictions over the global batch, whether any rank
    asked to stop, and of each sample that could not be read, what is wrong: the update is that of the
    mean over the others. Raises NonFiniteLoss on every rank, before the update, if the loss of any is
    not finite, and TooManyBadSamples if no sample could be read.
    """
    config, step, clock = training.config, batch["step"], training.clock
    clock.enter("forward_backward")
    # Dropout, and all else that is random, is a function of (seed, step, rank): the same after a resume.
    seed_generators(derive_seed("step", config.seed, step, training.world.rank), training.device)
    rate = learning_rate(step, config, training.schedule)
    for group in training.optimizer.param_groups:
        group["lr"] = rate

    inputs, targets, partners, share = _mix(training.preprocess(batch["inputs"]), batch["targets"], config, step)
    rows, counted = batch["rows"], batch["num_counted"]
    inputs, targets, partners = inputs[rows], targets[rows], partners[rows]
    inputs = inputs_in_layout(inputs, config)

    totals = torch.zeros(4, dtype=torch.float64, device=training.device)
    totals[2], totals[3] = float(stop), float(counted)
    pending = None
    num_parts = num_micro_batches(batch["global_count"], training.world.size, config.micro_batch_size)
    parts = np.array_split(np.arange(counted), num_parts)
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        # A rank without a share still goes through the motions, with a stand-in.
        rows = slice(int(part[0]), int(part[-1]) + 1) if len(part) else slice(0, 1)
        with _gradient_sync(training.model, last):
            with torch.autocast(training.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
                logits = training.model(inputs[rows])
            losses = _loss(logits.float(), targets[rows], partners[rows], share, config.label_smoothing)
            losses = losses if len(part) else losses[:0]
            totals[0] += losses.detach().sum()
            totals[1] += (logits.detach().argmax(dim=1) == targets[rows])[: len(losses)].sum()
            if last:
                with clock.part("all_reduce"):
                    pending = PendingSum(totals)
            # A sum over this rank's samples, scaled so that DDP's mean over ranks is the mean over the
            # global batch, however unevenly it is shared out.
            (losses.sum() * (training.world.size / batch["global_count"])).backward()

    assert pending is not None
    clock.enter("all_reduce")  # as it was since the last gradients were there (StepClock.on_last_bucket)
    loss, correct, any_stop, num_read = pending.result()  # waits for the forward pass of all ranks
    clock.enter("optimizer")
    unreadable: list[str] = []
    if num_read < batch["global_count"]:
        unreadable = gather_texts(batch["unreadable"])
        if num_read == 0:
            raise TooManyBadSamples(
                f"no sample of step {step + 1} could be read, so there is nothing to learn from "
                f"({'; '.join(unreadable[:5])}); mend them, or leave out an epoch's small batches with --drop-last"
            )
        # Only now is it known how many there are to take the mean over.
        for parameter in training.network.parameters():
            if parameter.grad is not None:
                parameter.grad *= batch["global_count"] / num_read
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
    return loss, correct, any_stop > 0, unreadable


def _mix(
    inputs: torch.Tensor, targets: torch.Tensor, config: Config, step: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """mixup (Zhang et al. 2018) or cutmix (Yun et al. 2019) with the sample before, whose share is 1 - share.

    What is drawn depends on the step alone, and the sample before is the same at every world size
    (sampling.TrainingBatches), so mixing is too. Where the sample before cannot be read, the batch has
    the sample itself in its place (loader.Reader): it stays unmixed.
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


def inputs_in_layout(inputs: torch.Tensor, config: Config) -> torch.Tensor:
    """Images in the layout of the network's convolutions."""
    is_image = inputs.ndim == 4
    return inputs.contiguous(memory_format=torch.channels_last) if config.channels_last and is_image else inputs


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
    preprocess: nn.Module,
    batches: Iterable[Batch],
    num_classes: int,
    config: Config,
    device: torch.device,
    num_worst: int = 0,
) -> Evaluation:
    """Every sample exactly once over all ranks; every rank must call it, and all get the same.

    Samples that cannot be read are left out and named; whether they are too many is up to the caller.
    network is not wrapped in DDP: ranks may have different numbers of batches.
    """
    training = network.training
    network.eval()
    # Batch norm's statistics are each rank's own; rank 0's are the ones that checkpoints hold.
    broadcast_from_rank_zero(list(network.buffers()))
    sums, unreadable = EvaluationSums(num_classes, device, num_worst), []
    with generators_kept(device):
        for batch in batches:
            unreadable += batch["unreadable"]
            if not batch["num_counted"]:
                continue  # none of it could be read
            rows = batch["rows"]
            # For a network that is random in evaluation too: the same numbers in every evaluation.
            seed_generators(derive_seed("evaluation", config.seed, batch["step"]), device)
            inputs, targets = preprocess(batch["inputs"][rows]), batch["targets"][rows]
            inputs = inputs_in_layout(inputs, config)
            with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bf16"):
                logits = network(inputs)
            losses = F.cross_entropy(logits.float(), targets, reduction="none")
            sums.add(losses, logits, targets, batch["ids"][rows])
    network.train(training)
    return sums.result(unreadable)


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

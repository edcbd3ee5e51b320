"""The optimizer, and the learning rate as a pure function of the step."""

import math

import torch

from app.config import Config
from app.data.sampling import Schedule


def build_optimizer(config: Config, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """sgd (Nesterov momentum where momentum > 0), adam or adamw, with torch's fused kernels."""
    common = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": True}
    if config.optimizer == "sgd":
        momentum = 0.9 if config.momentum is None else config.momentum
        return torch.optim.SGD(parameters, momentum=momentum, nesterov=momentum > 0, **common)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer](parameters, **common)


def learning_rate(step: int, config: Config, schedule: Schedule) -> float:
    """The rate of the optimizer step with this number, counted from 0.

    Rises linearly over the warm-up, then: constant; cosine (Loshchilov and Hutter 2016, one half
    wave) or linear to 0 just after the last step; or multiplied by step_factor every step_epochs.
    """
    warmup = round(config.warmup_epochs * schedule.steps_per_epoch)
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    done = (step - warmup) / max(1, schedule.total_steps - warmup)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * done))
    if config.schedule == "linear":
        return config.lr * (1 - done)
    if config.schedule == "step":
        drops = schedule.epoch_of(step) // (config.step_epochs or 10)
        return config.lr * (0.1 if config.step_factor is None else config.step_factor) ** drops
    return config.lr

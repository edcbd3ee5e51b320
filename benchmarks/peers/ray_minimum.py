"""Ray Train: the documented minimum, a TorchTrainer with prepare_model and prepare_data_loader."""

import os
from typing import Any

import ray.train
import ray.train.torch
import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.peers.common import EVALUATED, LR, Record, Task, parse


def train_func(config: dict[str, Any]) -> None:
    task: Task = config["task"]
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(task.network())
    loader = DataLoader(task.dataset(train=True), task.batch_size, shuffle=True)
    loader = ray.train.torch.prepare_data_loader(loader)
    test_loader = ray.train.torch.prepare_data_loader(DataLoader(task.dataset(train=False), EVALUATED))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    context = ray.train.get_context()
    record = Record(task, context.get_world_rank())
    for epoch in range(task.epochs):
        if context.get_world_size() > 1:
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # Ray has put a DistributedSampler there
        model.train()
        loss = torch.tensor(0.0)
        record.epoch_begins()
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            record.step(len(inputs) * task.workers)
        record.epoch_ended()
        model.eval()
        right = seen = 0
        with torch.no_grad():
            for inputs, targets in test_loader:
                right += (model(inputs).argmax(1) == targets).sum().item()
                seen += len(inputs)
        sums = torch.tensor([right, seen], dtype=torch.float64)
        if context.get_world_size() > 1:
            torch.distributed.all_reduce(sums)
        record.tested((sums[0] / sums[1]).item())
        ray.train.report({"loss": loss.item(), "accuracy": (sums[0] / sums[1]).item()})


if __name__ == "__main__":
    given = parse()
    TorchTrainer(
        train_func,
        train_loop_config={"task": given},
        scaling_config=ScalingConfig(
            num_workers=given.workers,
            resources_per_worker={"CPU": max(1, (os.cpu_count() or 1) // given.workers)},
        ),
    ).fit()

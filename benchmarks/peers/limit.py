"""The limit: the same network, optimizer and DDP, on tensors that are ready in memory, and nothing else in a step."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from app.memory import variables
from benchmarks.peers.common import LR, Record, Task, parse

STEPS = 100


def work(rank: int, port: int, task: Task) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=task.workers)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // task.workers))
    torch.manual_seed(0)
    network, dataset = task.network(), task.dataset(train=True)
    layout = torch.channels_last if task.channels_last else torch.contiguous_format
    network.to(memory_format=layout)  # type: ignore[call-overload]  # torch's stubs lack it
    samples = [dataset[index] for index in range(4 * task.batch_size)]
    inputs = torch.stack([each for each, _ in samples]).contiguous(memory_format=layout).split(task.batch_size)
    targets = torch.tensor([label for _, label in samples]).split(task.batch_size)
    model = DistributedDataParallel(network, gradient_as_bucket_view=True) if task.workers > 1 else network
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    record = Record(task, rank)
    for _ in range(task.epochs):
        record.epoch_begins()
        for step in range(STEPS):
            with torch.autocast("cpu", torch.bfloat16, enabled=task.bf16):
                loss = F.cross_entropy(model(inputs[step % 4]).float(), targets[step % 4])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            record.step(task.batch_size * task.workers)
        record.epoch_ended()
    dist.destroy_process_group()


if __name__ == "__main__":
    given = parse()
    if given.keep_memory:  # in the processes that are spawned
        os.environ |= variables()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    mp.spawn(work, (free, given), nprocs=given.workers)  # type: ignore[attr-defined]  # torch's stubs

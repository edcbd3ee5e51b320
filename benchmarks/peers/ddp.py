"""DistributedDataParallel by mp.spawn: PyTorch's own tutorial, with a test at each epoch's end."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from benchmarks.peers.common import EVALUATED, LR, Record, Task, parse


def work(rank: int, port: int, task: Task) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=task.workers)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // task.workers))
    torch.manual_seed(0)
    train, test = task.dataset(train=True), task.dataset(train=False)
    sampler, held_out = DistributedSampler(train), DistributedSampler(test, shuffle=False)
    loader = DataLoader(train, task.batch_size, sampler=sampler)
    test_loader = DataLoader(test, EVALUATED, sampler=held_out)
    model = DistributedDataParallel(task.network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    record = Record(task, rank)
    for epoch in range(task.epochs):
        sampler.set_epoch(epoch)
        model.train()
        record.epoch_begins()
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            record.step(len(inputs) * task.workers)
        record.epoch_ended()
        model.eval()
        sums = torch.zeros(2)
        with torch.no_grad():
            for inputs, targets in test_loader:
                sums += torch.tensor([(model(inputs).argmax(1) == targets).sum(), len(inputs)])
        dist.all_reduce(sums)
        record.tested((sums[0] / sums[1]).item())
    dist.destroy_process_group()


if __name__ == "__main__":
    given = parse()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
    mp.spawn(work, (free, given), nprocs=given.workers)  # type: ignore[attr-defined]  # torch's stubs

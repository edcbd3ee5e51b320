"""Accelerate: a plain loop with an Accelerator, started by notebook_launcher's equivalent for scripts."""

import torch
from accelerate import Accelerator, notebook_launcher  # type: ignore[import-not-found]  # of the group bench
from torch.nn import functional as F
from torch.utils.data import DataLoader

from benchmarks.peers.common import EVALUATED, LR, Record, Task, parse


def work(task: Task) -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    network = task.network()
    model, optimizer, loader, test_loader = accelerator.prepare(
        network,
        torch.optim.AdamW(network.parameters(), lr=LR),
        DataLoader(task.dataset(train=True), task.batch_size, shuffle=True),
        DataLoader(task.dataset(train=False), EVALUATED),
    )
    record = Record(task, accelerator.process_index)
    for _ in range(task.epochs):
        model.train()
        record.epoch_begins()
        for inputs, targets in loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(inputs), targets))
            optimizer.step()
            record.step(len(inputs) * task.workers)
        record.epoch_ended()
        model.eval()
        right = seen = 0
        with torch.no_grad():
            for inputs, targets in test_loader:
                predictions, expected = accelerator.gather_for_metrics((model(inputs).argmax(1), targets))
                right += (predictions == expected).sum().item()
                seen += len(expected)
        record.tested(right / seen)


if __name__ == "__main__":
    given = parse()
    if given.workers > 1:
        notebook_launcher(work, (given,), num_processes=given.workers)
    else:
        work(given)

"""A DataLoader's processes."""

import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch

from app.data.loader import build_loader
from app.data.samples import InMemory
from app.data.sampling import EvaluationBatches
from app.distributed import World


class Handled(InMemory):
    """Each sample is whether SIGTERM ends the process that reads it."""

    def inputs(self, ids: np.ndarray) -> torch.Tensor:
        return torch.full((len(ids), 1), float(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL))


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_ctrl_c_on_the_terminal_leaves_training_its_batches(start_method: str) -> None:
    samples = Handled(torch.zeros(9, 1), np.zeros(9))
    before = signal.signal(signal.SIGTERM, lambda number, _: None)  # as the command has one
    try:
        loader = build_loader(samples, EvaluationBatches(9, 3, World()), num_workers=1, start_method=start_method)
        others = set(multiprocessing.active_children())
        batches = iter(loader)
        read = [next(batches)]  # the process is there
        [process] = set(multiprocessing.active_children()) - others
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        read += batches
    finally:
        signal.signal(signal.SIGTERM, before)
    assert np.concatenate([batch["ids"] for batch in read]).tolist() == list(range(9))
    assert all(batch["inputs"].all() for batch in read)

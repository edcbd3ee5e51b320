"""A worker that Ray kills because its node runs out of memory."""

from pathlib import Path

import psutil
import pytest
import ray.train
import torch

from tests.faults.common import Command, SlowNet, slow_config
from tests.faults.conftest import Figures

pytestmark = pytest.mark.faults

GIB = 2**30


class Greedy(SlowNet):
    """Rank 1 takes 1 GiB more at each step from its 6th on."""

    def __init__(self, num_classes: int, input_shape: tuple[int, int, int]):
        super().__init__(num_classes, input_shape)
        self.hoard: list[torch.Tensor] = []
        self.calls = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls > 5 and ray.train.get_context().get_world_rank() == 1:
            self.hoard.append(torch.ones(GIB // 4))
        return super().forward(images)


def test_a_worker_killed_for_memory(tmp_path: Path, figures: Figures) -> None:
    memory = psutil.virtual_memory()
    limit = (memory.total - memory.available + 8 * GIB) / memory.total
    if limit > 0.95:
        pytest.skip("this machine has too little free memory")
    config = slow_config(tmp_path, model="tests.faults.test_memory:Greedy", max_failures=1, epochs=40)
    run = Command(config, tmp_path, RAY_memory_usage_threshold=f"{limit:.3f}", RAY_memory_monitor_refresh_ms="100")
    summary, exit_code = run.result()
    assert (exit_code, summary["status"]) == (1, "failed"), run.output()
    assert "was killed because its node ran out of memory; lower --batch-size" in run.output()
    assert "out of memory at 5 samples per forward pass on 2 workers: continuing with 2" in run.output()
    assert "out of memory" in summary["error"]
    assert "Traceback" not in run.output()
    assert run.output().count("going on from") <= 1  # once more, as --max-failures says, and not for ever
    figures(
        "15. A worker killed for memory",
        "started again --max-failures times, with smaller micro-batches, then exit 1, saying so and what to do",
    )

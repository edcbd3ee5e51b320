"""Memory that a step frees is there for the next one."""

import os
import platform
import subprocess
import sys

import pytest

from app.memory import variables

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")

FAULTS = """
import resource, threading
{first}
import app.fit
import torch
from app.models.mnist_cnn import MnistCnn

STEPS = 5

def train():
    torch.set_num_threads(1)
    network, images = MnistCnn((1, 28, 28), 10), torch.rand(128, 1, 28, 28)

    def step():
        network(images).sum().backward()
        network.zero_grad(set_to_none=True)

    for _ in range(STEPS):
        step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(STEPS):
        step()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // STEPS)

thread = threading.Thread(target=train)  # as Ray Train runs the loop
thread.start()
thread.join()
"""


KEEP = "import app.cli; app.cli.keep_memory()"  # as run_main() does


def faults(first: str = "", **environment: str) -> int:
    """Pages that the system has to hand out for a step."""
    command = [sys.executable, "-c", FAULTS.format(first=first)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_memory_is_kept_in_this_process_and_in_those_to_come() -> None:
    left_alone = faults()
    assert left_alone > 2_000
    assert faults(KEEP) < left_alone / 4
    assert faults(**variables()) < left_alone / 4


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    assert variables() == {}
    assert faults(KEEP) > 2_000
    monkeypatch.delenv("MALLOC_ARENA_MAX")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.rtld.optional_static_tls=512:glibc.malloc.mmap_max=1024")
    assert variables() == {}
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.rtld.optional_static_tls=512")
    assert variables() != {}

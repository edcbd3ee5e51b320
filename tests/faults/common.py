"""Runs that something happens to: in this process's Ray, or as the command a person starts."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from app.checkpoint import load_checkpoint
from app.config import Config
from app.config_file import to_yaml
from app.runs import Summary, checkpoint_names
from app.spool import read_records
from app.storage import Storage
from tests.common import PlainNet

# 57 samples in batches of 10: 6 steps an epoch, 48 in all, a checkpoint at every 4th.
SLOW = {"dataset": "tests.common:tiny_splits", "model": "tests.faults.common:slow_net", "epochs": 8, "batch_size": 10}
SLOW |= {"augment": "flip-crop", "ema_decay": 0.9, "lr": 0.01, "num_workers": 2, "cpus_per_worker": 0.5}
SLOW |= {"log_every": 1, "checkpoint_every": 4, "keep_checkpoints": 4, "tracking_uri": "none"}
STEPS, CHECKPOINT_EVERY = 48, 4


class SlowNet(PlainNet):
    """With dropout, and slow enough that a run of it can be disturbed on its way."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        time.sleep(0.1)
        return self.fc(F.dropout(F.relu(self.conv(images)).flatten(1), 0.3, self.training))


def slow_net(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return SlowNet(num_classes, input_shape)


def slow_config(folder: Path, **settings: Any) -> Config:
    return Config(**{**SLOW, "output_dir": str(folder / "runs"), "run_name": "r", **settings})


def wait_until(condition: Callable[[], Any], timeout_s: float = 240.0) -> Any:
    """What the condition gave when it first was true."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise TimeoutError(f"{condition} was not true within {timeout_s:g} s")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Watched:
    """A run's files, seen from outside while it goes on."""

    def __init__(self, config: Config):
        self.config = config
        self.folder = Path(config.output_dir) / str(config.run_name)
        self.began = time.time()

    def losses(self) -> list[tuple[int, float, float]]:
        """(step, loss, time) of every record of train/loss, in the order they were written."""
        if not (self.folder / "tracking" / "records.jsonl").exists():
            return []
        records = [record for record, _ in read_records(self.folder / "tracking", 0) if record["kind"] == "metrics"]
        return [
            (r["step"], r["values"]["train/loss"], r["time_ms"] / 1000) for r in records if "train/loss" in r["values"]
        ]

    def epochs(self) -> list[tuple[int, float, float]]:
        """(step, loss, accuracy) of every record of an epoch's training."""
        records = [r for r, _ in read_records(self.folder / "tracking", 0) if r["kind"] == "metrics"]
        ended = [(r["step"], r["values"]) for r in records if "train/epoch_loss" in r["values"]]
        return [(step, values["train/epoch_loss"], values["train/epoch_accuracy"]) for step, values in ended]

    def step(self) -> int:
        losses = self.losses()
        return losses[-1][0] if losses else 0

    def ended(self) -> bool:
        raise NotImplementedError  # each kind of run knows it in its own way

    def wait_for_step(self, step: int) -> int:
        """The step it has come to, which is at least the one asked for."""

        def arrived() -> int | bool:
            ended, here = self.ended(), self.step()
            assert here >= step or not ended, f"the run ended before step {step}: {self.output()}"
            return here >= step and here

        return wait_until(arrived)

    def output(self) -> str:
        raise NotImplementedError  # each kind of run knows it in its own way

    def seconds_to_first_step(self) -> float:
        return self.losses()[0][2] - self.began

    def seconds_to_step_after(self, step: int, since: float) -> float:
        """From a moment, after the step had been recorded, to the record of the first step after it."""
        return next(at for number, _, at in self.losses() if number > step) - since

    def steps_lost(self, step: int, output: str) -> int:
        """Steps before `step` that were computed again, by what the run says it went on from last."""
        return max(0, step - int(re.findall(r"going on from .*, after step (\d+)", output)[-1]))

    def checkpoints(self) -> list[Path]:
        return [self.folder / "checkpoints" / name for name in checkpoint_names(Storage(f"{self.folder}/checkpoints"))]

    def weights(self) -> dict[str, torch.Tensor]:
        """Of the newest checkpoint, as they are trained and as they are evaluated."""
        checkpoint = load_checkpoint(Storage(f"{self.folder}/checkpoints"), self.checkpoints()[-1].name)
        return {**checkpoint.model, **{f"trained {k}": v for k, v in checkpoint.trainer["trained_weights"].items()}}


class Fit(Watched):
    """fit() in a thread, on the Ray that this process is connected to."""

    def __init__(self, config: Config):
        super().__init__(config)
        from app.fit import fit

        self._done: Future[tuple[Summary, int]] = Future()

        def work() -> None:
            try:
                self._done.set_result(fit(config))
            except BaseException as error:  # raised again by result()
                self._done.set_exception(error)

        threading.Thread(target=work, daemon=True).start()

    def ended(self) -> bool:
        return self._done.done()

    def output(self) -> str:
        return repr(self._done)

    def result(self) -> tuple[Summary, int]:
        return self._done.result(timeout=280)


COMMANDS: list[subprocess.Popen] = []


class Command(Watched):
    """python -m app.train, as a person starts it."""

    def __init__(self, config: Config, folder: Path, *flags: str, **environment: str):
        super().__init__(config)
        (folder / "settings.yaml").write_text(to_yaml(config))
        argv = [sys.executable, "-m", "app.train", "--config", str(folder / "settings.yaml"), *flags]
        self._out = folder / f"stdout-{time.monotonic_ns()}.txt"
        self._err = self._out.with_name(self._out.name.replace("stdout", "stderr"))
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(argv, stdout=out, stderr=err, env={**os.environ, **environment})
        COMMANDS.append(self.process)

    def ended(self) -> bool:
        return self.process.poll() is not None

    def output(self) -> str:
        return self._out.read_text() + self._err.read_text()

    def interrupt(self, number: int = signal.SIGINT) -> None:
        self.process.send_signal(number)

    def result(self) -> tuple[dict[str, Any], int]:
        """The JSON line, empty if there is none, and the exit code."""
        code = self.process.wait(timeout=280)
        lines = [line for line in self._out.read_text().splitlines() if line.startswith("{")]
        return (json.loads(lines[-1]) if lines else {}), code


def worker_pids() -> list[int]:
    """The processes of Ray Train's workers in this process's cluster."""
    from ray._private.state import actors

    return [
        actor["Pid"]
        for actor in actors().values()
        if actor["State"] == "ALIVE" and actor["ActorClassName"] == "RayTrainWorker"
    ]


def assert_same_run(run: Watched, undisturbed: Watched, exact: bool = True) -> None:
    """The same steps, once each and in order, with the same losses, epochs and final weights."""
    steps, losses = zip(*[(step, loss) for step, loss, _ in run.losses()], strict=True)
    expected_steps, expected = zip(*[(step, loss) for step, loss, _ in undisturbed.losses()], strict=True)
    assert steps == expected_steps
    weights, expected_weights = run.weights(), undisturbed.weights()
    assert weights.keys() == expected_weights.keys()
    assert [step for step, _, _ in run.epochs()] == [step for step, _, _ in undisturbed.epochs()]
    if exact:
        assert losses == expected
        assert run.epochs() == undisturbed.epochs()
        assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)
    else:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
        torch.testing.assert_close(torch.tensor(run.epochs()), torch.tensor(undisturbed.epochs()), rtol=1e-5, atol=0)
        for name in weights:
            torch.testing.assert_close(weights[name], expected_weights[name], rtol=0, atol=1e-4)

"""python -m benchmarks.run [--rounds 3] [--model mnist-cnn] [--epochs 2] [--only ours ddp ...] [--out FILE.json]

Ours and what others train the same network with, in turn (A B C A B C ...), each as its own command on the same
files, with as many cores to a worker: samples/s by the clock, seconds from the command to the first step and to a test
accuracy, peak memory, and ratios to ours. With --out also a JSON and a picture beside it.
"""

import argparse
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from app.spool import read_records
from benchmarks.digits import write_folder, write_mnist

ROOT = Path(__file__).parents[1]
OURS = {"ours": [], "ours, --precision auto": ["--precision", "auto"]}
PEERS = {
    "ddp": ["ddp"],
    "ray minimum": ["ray_minimum"],
    "lightning": ["lightning_trainer"],
    "accelerate": ["accelerate_loop"],
    "limit": ["limit"],
    "limit, channels_last": ["limit", "--channels-last"],
    "limit, our technique": ["limit", "--channels-last", "--keep-memory"],
    "limit, our technique, bf16": ["limit", "--channels-last", "--keep-memory", "--bf16"],
}
MEMORY_EVERY_S = 5.0  # a look takes 6 ms of each process, from the training that is measured


@dataclass(frozen=True)
class Measured:
    """samples_per_s: of the epochs after the first. first_step_s and accurate_s (None: never) count from the command;
    memory_mb: the most that its processes held together (PSS)."""

    samples_per_s: float
    first_step_s: float
    accurate_s: float | None
    accuracy: float | None
    memory_mb: float


class Memory(threading.Thread):
    """The most memory that a process and those it has started hold together."""

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self._process, self._ended, self.peak = psutil.Process(pid), threading.Event(), 0

    def run(self) -> None:
        while not self._ended.wait(MEMORY_EVERY_S):
            held = 0
            try:
                for each in [self._process, *self._process.children(recursive=True)]:
                    held += each.memory_full_info().pss
            except psutil.NoSuchProcess:
                continue
            self.peak = max(self.peak, held)

    def end(self) -> float:
        self._ended.set()
        self.join()
        return self.peak / 1e6


def run_peer(words: list[str], data: Path, given: argparse.Namespace) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.jsonl"
        command = [sys.executable, "-m", f"benchmarks.peers.{words[0]}", *words[1:]]
        command += ["--data", str(data), "--model", given.model, "--epochs", str(given.epochs)]
        command += ["--batch-size", str(given.batch_size), "--workers", str(given.num_workers)]
        began = time.time()
        process = subprocess.Popen(
            [*command, "--record", str(record)],
            cwd=folder,
            env=environment(folder),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        memory = Memory(process.pid)
        memory.start()
        _, errors = process.communicate()
        peak = memory.end()
        if process.returncode:
            raise RuntimeError(f"{words[0]} failed:\n{errors.decode()[-3000:]}")
        events = [json.loads(line) for line in record.read_text().splitlines()]
    epochs = [event for event in events if event["event"] == "epoch"]
    tests = [event for event in events if event["event"] == "tested"]
    accurate = [event["at"] - began for event in tests if event["accuracy"] >= given.accuracy]
    return Measured(
        samples_per_s=statistics.median(epoch["samples"] / epoch["seconds"] for epoch in epochs[1:] or epochs),
        first_step_s=next(event["at"] for event in events if event["event"] == "first_step") - began,
        accurate_s=accurate[0] if accurate else None,
        accuracy=tests[-1]["accuracy"] if tests else None,
        memory_mb=peak,
    )


def run_ours(flags: list[str], data: Path, given: argparse.Namespace) -> Measured:
    """The command of the README; its lines say when the first step was made."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = "mnist" if given.model == "mnist-cnn" else "image-folder"
        command = [sys.executable, "-m", "app.train", "--run-name", "r", "--dataset", dataset, "--data-dir", str(data)]
        command += ["--model", given.model, "--epochs", str(given.epochs), "--num-workers", str(given.num_workers)]
        command += ["--augment", "none"]  # as the others have none
        command += ["--batch-size", str(given.batch_size * given.num_workers)]
        command += ["--cpus-per-worker", str(max(1, (os.cpu_count() or 1) // given.num_workers))]
        if dataset == "image-folder":
            command += ["--image-size", "64"]
        began = time.time()
        process = subprocess.Popen(
            [*command, *flags],
            cwd=folder,
            env=environment(folder),
            stdout=subprocess.PIPE,
            stderr=(Path(folder) / "errors.txt").open("w"),
            text=True,
        )
        memory = Memory(process.pid)
        memory.start()
        assert process.stdout is not None
        first_step_s, line = 0.0, ""
        for line in process.stdout:
            if not first_step_s and line.startswith("epoch 1/"):
                first_step_s = time.time() - began
        peak = memory.end()
        if process.wait():
            raise RuntimeError(f"app.train failed:\n{(Path(folder) / 'errors.txt').read_text()[-3000:]}")
        summary = json.loads(line)
        records = [record for record, _ in read_records(Path(folder) / "runs" / "r" / "tracking", 0)]
    records = [record for record in records if record["kind"] == "metrics"]
    [tested] = [record for record in records if "test/accuracy" in record["values"]]
    accuracy = tested["values"]["test/accuracy"]
    return Measured(
        samples_per_s=summary["samples_seen"]
        / summary["step"]
        * steps_per_s(records, summary["step"] // summary["epoch"]),
        first_step_s=first_step_s,
        accurate_s=tested["time_ms"] / 1000 - began if accuracy >= given.accuracy else None,
        accuracy=accuracy,
        memory_mb=peak,
    )


def steps_per_s(records: list[dict[str, Any]], steps_per_epoch: int) -> float:
    """By the clock, from record to record of the epochs after the first, or of all where there is no other; without
    the evaluation and the checkpoint between two epochs, which those of the others leave out too."""
    at = [(record["step"], record["time_ms"] / 1000) for record in records if "train/loss" in record["values"]]
    within = [
        (end - start, ended - began)
        for (start, began), (end, ended) in itertools.pairwise(at)
        if start % steps_per_epoch and (start // steps_per_epoch) == (end - 1) // steps_per_epoch
        if start > steps_per_epoch or at[-1][0] <= steps_per_epoch
    ]
    if not within:
        return math.nan  # epochs shorter than from record to record
    return sum(steps for steps, _ in within) / sum(seconds for _, seconds in within)


def environment(folder: str) -> dict[str, str]:
    # Started by `uv run`, Ray would make a second environment for its workers, and first send them all of the folder.
    ours = {"PYTHONPATH": str(ROOT), "RAY_TMPDIR": folder, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | ours


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare with what others train the same network with.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=("mnist-cnn", "resnet18"), default="mnist-cnn")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=128, help="Of each worker.")
    parser.add_argument("--accuracy", type=float, default=0.985)
    parser.add_argument("--samples", type=int, help="For training. Default: as many as MNIST has, or 4,000 images.")
    parser.add_argument("--only", nargs="+", choices=[*OURS, *PEERS])
    parser.add_argument("--ours", default="", help="More flags for app.train, in one word; they win.")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    names = given.only or [*OURS, *PEERS]
    found: dict[str, list[Measured]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        counts = (given.samples,) if given.samples else ()
        (write_mnist if given.model == "mnist-cnn" else write_folder)(data, *counts)
        for number in range(given.rounds):
            for name in names:
                if name in OURS:
                    measured = run_ours([*OURS[name], *given.ours.split()], data, given)
                else:
                    measured = run_peer(PEERS[name], data, given)
                found[name].append(measured)
                print(f"round {number + 1}  {name}: {measured}", file=sys.stderr, flush=True)
    report(found)
    if given.out:
        machine = f"{os.cpu_count()} cores of {processor()}"
        draw(found, f"{given.model}, {given.num_workers} workers, {machine}", given.out.with_suffix(".png"))
        content = {
            "machine": machine,
            "settings": {name: value for name, value in vars(given).items() if name != "out"},
        }
        content |= {"measured": {name: [asdict(each) for each in rounds] for name, rounds in found.items()}}
        given.out.write_text(json.dumps(content, indent=1) + "\n")


def draw(found: dict[str, list[Measured]], title: str, path: Path) -> None:
    """Left samples/s, right seconds from the command to the first step: medians, with each round as a dot."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 0.5 * len(found) + 1.6), layout="constrained", sharey=True)
    figure.suptitle(title)
    names = list(found)
    for axis, field, label in (
        (axes[0], "samples_per_s", "samples/s"),
        (axes[1], "first_step_s", "seconds to the first step"),
    ):
        rounds = [[getattr(each, field) for each in found[name]] for name in names]
        colours = ["tab:orange" if name in OURS else "tab:blue" for name in names]
        axis.barh(names, [statistics.median(each) for each in rounds], color=colours, alpha=0.6)
        for row, each in enumerate(rounds):
            axis.plot(each, [row] * len(each), ".", color="black", markersize=4)
        axis.set_xlabel(label)
        axis.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()  # shared
    figure.savefig(path, dpi=100)
    plt.close(figure)


def processor() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].partition(":")[2].strip() if names else platform.processor()


def shown_ratio(ours: list[Measured], others: list[Measured]) -> str:
    """Of the speeds, round by round."""
    ratios = [one.samples_per_s / other.samples_per_s for one, other in zip(ours, others, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def report(found: dict[str, list[Measured]]) -> None:
    table = Table()
    ours = [name for name in OURS if name in found]
    ratios = [f"{name}: by it" for name in ours]
    for column in ("", "samples/s", *ratios, "first step, s", "accurate after, s", "accuracy", "memory, MB"):
        table.add_column(column, justify="left" if not column else "right")
    for name, rounds in found.items():
        accurate = [each.accurate_s for each in rounds if each.accurate_s is not None]
        accuracies = [each.accuracy for each in rounds if each.accuracy is not None]
        table.add_row(
            name,
            f"{statistics.median(each.samples_per_s for each in rounds):,.0f}",
            *(shown_ratio(found[mine], rounds) for mine in ours),
            f"{statistics.median(each.first_step_s for each in rounds):.1f}",
            f"{statistics.median(accurate):.1f}" if accurate else "",
            f"{statistics.median(accuracies):.4f}" if accuracies else "",
            f"{statistics.median(each.memory_mb for each in rounds):,.0f}",
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()

"""python -m benchmarks.parts [--rounds 10] [--only loader tracking ...] [--command-rounds 3] [--out FILE.json]

What the parts of the application cost: each against the same work without it, or done the plain way, in turn
(A B A B ...), as a ratio of their speeds: the median of the rounds, and the least and the most. Rows for a GPU stay
empty where there is none. docs/growth.md has what came of it.
"""

import argparse
import functools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchvision
from PIL import Image
from rich.console import Console
from rich.table import Table
from torchvision import transforms

from app.checkpoint import CheckpointWriter, Position
from app.config import Config
from app.data.datasets import load_splits
from app.data.inputs import Inputs
from app.data.sampling import build_order, build_schedule
from app.data.splits import Splits
from app.distributed import World
from app.loop import StepResult, Training, evaluate, inputs_in_layout, train
from app.metrics import Window
from app.models.build import preprocessing
from app.optim import build_optimizer
from app.predictor import Predictor
from app.reporter import Reporter
from app.setup import build_network, evaluation_loader, training_loader
from app.spool import read_records
from app.storage import Storage
from app.tracking import Tracker
from app.trained import Trained
from benchmarks.digits import write_folder, write_mnist
from benchmarks.run import environment, processor

WORLD = World()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CHECKPOINT_EVERY, TRACKED_STEPS = 100, 20
BILINEAR = transforms.InterpolationMode.BILINEAR
PLAIN_AUGMENT: dict[str, list[Any]] = {
    "none": [],
    "shift": [transforms.RandomAffine(10, (0.1, 0.1), (0.9, 1.1), interpolation=BILINEAR)],
    "flip-crop": [transforms.RandomHorizontalFlip(), transforms.RandomCrop(28, 3)],
}


@dataclass(frozen=True)
class Row:
    """ratios: of speeds, ours to the other's, one a round. ours: samples/s, the median. processor: the same ratios by
    the processor time of this process, which other processes of the machine disturb less."""

    name: str
    target: float | None
    ours: float | None = None
    ratios: tuple[float, ...] = ()
    processor: tuple[float, ...] = ()


def samples_per_s(work: Callable[[], int]) -> tuple[float, float]:
    """By the clock, and by processor time."""
    began, began_processor = time.perf_counter(), time.process_time()
    count = work()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return count / (time.perf_counter() - began), count / (time.process_time() - began_processor)


def compared(name: str, target: float | None, rounds: int, ours: Callable[[], int], other: Callable[[], int]) -> Row:
    """Each does its work once, and says how many samples that was; the first round is for warming up."""
    pairs = [(samples_per_s(ours), samples_per_s(other)) for _ in range(rounds + 1)][1:]
    by_clock, by_processor = (tuple(mine[n] / its[n] for mine, its in pairs) for n in range(2))
    return Row(name, target, statistics.median(mine for (mine, _), _ in pairs), by_clock, by_processor)


def mnist_config(data: Path, **settings: Any) -> Config:
    return Config(dataset="mnist", data_dir=str(data), loader_workers=0, log_every=10, **settings)


def build(config: Config, splits: Splits) -> tuple[Training, Iterator[StepResult]]:
    """A training in this process, and its steps."""
    order = build_order(config, splits.train.labels, splits.train.facts)
    schedule = build_schedule(config, order)
    network = build_network(config, splits.info, None).to(DEVICE)
    model: Any = torch.compile(network) if config.compile else network
    optimizer = build_optimizer(config, list(network.parameters()))
    preprocess = preprocessing(splits.info).to(DEVICE)
    training = Training(config, schedule, WORLD, DEVICE, network, model, preprocess, optimizer)
    loader = training_loader(config, splits, order, schedule, WORLD, 0, DEVICE)
    return training, train(training, map(moved, loader))


def moved(batch: Any) -> Any:
    return {key: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def loader(data: Path, rounds: int) -> Iterator[Row]:
    """The loader's samples/s in one process, against torchvision's MNIST in a DataLoader."""
    for name, changes in PLAIN_AUGMENT.items():
        config = mnist_config(data, epochs=1, augment=name)
        splits = load_splits(config)
        order = build_order(config, splits.train.labels, splits.train.facts)
        schedule = build_schedule(config, order)
        steps = [*changes, transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
        plain = torchvision.datasets.MNIST(str(data), transform=transforms.Compose(steps))
        loaders = (
            training_loader(config, splits, order, schedule, WORLD, 0, torch.device("cpu")),
            torch.utils.data.DataLoader(plain, config.batch_size, shuffle=True),
        )

        def ours(batches: Any = loaders[0]) -> int:
            return sum(len(batch["targets"]) for batch in batches)

        def other(batches: Any = loaders[1]) -> int:
            return sum(len(targets) for _, targets in batches)

        default = ", the default" if name == "none" else ""
        yield compared(
            f"loader, --augment {name}{default}: by torchvision's samples", 20, max(3, rounds // 3), ours, other
        )


class Elsewhere:
    """A Tracker in a process of its own, with records of MLflow in a sqlite file, that is called as an actor is."""

    def __init__(self, folder: str):
        context = multiprocessing.get_context("spawn")
        self._calls = context.SimpleQueue()
        self._process = context.Process(target=serve, args=(self._calls, folder))
        self._process.start()

    def __getattr__(self, method: str) -> Any:
        return Remote(functools.partial(self._call, method))

    def _call(self, method: str, *args: Any) -> None:
        self._calls.put((method, args))

    def end(self) -> None:
        self._calls.put(None)
        self._process.join()


@dataclass(frozen=True)
class Remote:
    remote: Callable[..., None]


def serve(calls: Any, folder: str) -> None:
    tracker = Tracker(f"{folder}/tracking", folder, f"sqlite:///{folder}/mlflow.db", "parts", "r")
    while (call := calls.get()) is not None:
        method, args = call
        getattr(tracker, method)(*args)
    tracker.close()


def tracking(data: Path, rounds: int) -> Iterator[Row]:
    """Steps that are recorded as app.worker does, every --log-every of them, against steps that are not: by a queue to
    another process in the place of Ray's calls, which only the row of the whole command has (commands)."""
    config = mnist_config(data, epochs=1000)
    training, steps = build(config, load_splits(config))
    with tempfile.TemporaryDirectory() as folder:
        tracker = Elsewhere(folder)
        reporter, window = Reporter(tracker, "r", WORLD, 0, 0, 600, setup_timeout_s=600), Window()

        def tracked() -> int:
            nonlocal window
            count = 0
            for _ in range(TRACKED_STEPS):
                result = next(steps)
                count += result.count
                reporter.alive()
                window.add(result.loss, result.correct, result.count, result.seconds, result.data_seconds)
                if result.step % config.log_every == 0:
                    reporter.metrics(result.step, window.metrics())
                    window = Window()
                reporter.live(result.step, training.schedule, epoch_ended=False)
            return count

        yield compared(
            "training with tracking: by training without", 0.98, 3 * rounds, tracked, lambda: some(steps, TRACKED_STEPS)
        )
        reporter.rest()
        tracker.end()


def some(steps: Iterator[StepResult], number: int) -> int:
    return sum(next(steps).count for _ in range(number))


def checkpoints(data: Path, rounds: int) -> Iterator[Row]:
    """Steps with a checkpoint at each hundredth, written beside the training, against steps without."""
    config = mnist_config(data, epochs=1000)
    splits = load_splits(config)
    training, steps = build(config, splits)
    with tempfile.TemporaryDirectory() as folder, CheckpointWriter(Storage(folder), config, splits.info) as writer:
        position = Position()

        def saving() -> int:
            position.step += CHECKPOINT_EVERY
            writer.save(position, training.network, training.optimizer)
            return some(steps, CHECKPOINT_EVERY)

        name = f"training, a checkpoint every {CHECKPOINT_EVERY} steps: by training without"
        yield compared(name, 0.98, rounds, saving, lambda: some(steps, CHECKPOINT_EVERY))


def evaluation(data: Path, rounds: int) -> Iterator[Row]:
    """Against a loop over float tensors in memory, in batches and a memory layout that are the same."""
    config = mnist_config(data)
    splits = load_splits(config)
    assert splits.test is not None
    network = build_network(config, splits.info, None).to(DEVICE)
    preprocess = preprocessing(splits.info).to(DEVICE)
    batches = evaluation_loader(config, splits.test, WORLD, DEVICE)
    inputs = preprocess(splits.test.inputs(np.arange(len(splits.test.labels))).to(DEVICE))
    targets = torch.from_numpy(splits.test.labels).to(DEVICE)
    correct = 0

    def ours() -> int:
        result = evaluate(network, preprocess, map(moved, batches), 10, config, DEVICE)
        assert round(result.accuracy * result.num_samples) == correct or not correct
        return result.num_samples

    def plain() -> int:
        nonlocal correct
        found = torch.zeros((), dtype=torch.int64, device=DEVICE)
        network.eval()
        with torch.no_grad():
            for some_inputs, some_targets in zip(inputs.split(512), targets.split(512), strict=True):
                with torch.autocast(DEVICE.type, torch.bfloat16, enabled=config.precision == "bf16"):
                    logits = network(inputs_in_layout(some_inputs, config))
                found += (logits.argmax(dim=1) == some_targets).sum()
        correct = int(found)
        return len(targets)

    yield compared("evaluation: by a plain loop over tensors in memory", 0.95, rounds, ours, plain)


def prediction(data: Path, rounds: int) -> Iterator[Row]:
    """Of a folder of images, against a loop that reads the same files."""
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), num_train=200, num_test=1000, side=64)
        info_config = Config(dataset="image-folder", data_dir=folder, model="mnist-cnn", image_size=64)
        splits = load_splits(info_config)
        network = build_network(info_config, splits.info, None)
        trained = Trained("benchmark", info_config, splits.info, dict(network.state_dict()))
        predictor, images = Predictor(trained, DEVICE, 64), Inputs((f"{folder}/test",), False, "text", 8 * 64, folder)
        files = sorted(Path(folder, "test").rglob("*.png"))
        classifier = trained.classifier().to(DEVICE)

        def ours() -> int:
            return sum(predictor(block).num_rows for block in images.blocks())

        def plain() -> int:
            labels: list[int] = []
            with torch.inference_mode():
                for start in range(0, len(files), 64):
                    batch = [np.array(Image.open(file).convert("RGB")) for file in files[start : start + 64]]
                    pixels = torch.from_numpy(np.stack(batch)).permute(0, 3, 1, 2).contiguous().to(DEVICE)
                    labels += classifier(pixels).softmax(dim=1).argmax(dim=1).tolist()
            return len(labels)

        yield compared("prediction of a folder: by a plain loop over its files", 0.95, rounds, ours, plain)


def commands(_: Path, rounds: int) -> Iterator[Row]:
    """The whole command on two workers, with each of two settings on and off. No epoch ends in it, which would be
    evaluated and saved in all of them."""
    none = ["--tracking-uri", "none"]
    rows = (
        ("the command, --tracking-uri sqlite: by none", ["--tracking-uri", "sqlite:///mlflow.db"], none),
        (f"the command, --checkpoint-every {CHECKPOINT_EVERY}: by none", [*none, "--checkpoint-every", "100"], none),
    )
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        write_mnist(data)
        for name, ours, other in rows:
            pairs = [(command_speed(data, ours), command_speed(data, other)) for _ in range(rounds)]
            yield Row(name, 0.98, statistics.median(mine for mine, _ in pairs), tuple(m / its for m, its in pairs))


def command_speed(data: Path, flags: list[str]) -> float:
    """samples/s by the clock, from the second record of its steps to the last."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "app.train", "--run-name", "r", "--dataset", "mnist", "--data-dir", str(data)]
        command += ["--num-workers", "2", "--batch-size", "256", "--max-steps", "210", *flags]
        done = subprocess.run(command, cwd=folder, env=environment(folder), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"app.train failed:\n{done.stderr[-3000:]}")
        records = [record for record, _ in read_records(Path(folder, "runs", "r", "tracking"), 0)]
    steps = [(each["step"], each["time_ms"]) for each in records if "train/loss" in each.get("values", {})]
    (first, began), (last, ended) = steps[1], steps[-1]
    return 1000 * 256 * (last - first) / (ended - began)


def on_a_gpu(data: Path, rounds: int) -> Iterator[Row]:
    """Of each network: what bf16, channels_last and compile bring together, and the share of the time that a step
    does not wait for data, and that a checkpoint does not hold training up."""
    for model, side in (("mnist-cnn", 28), ("resnet18", 224), ("resnet50", 224)):
        names = (
            f"{model}, bf16, channels_last and compile: by fp32",
            f"{model}: share of the time that is not spent waiting for data",
            f"{model}: the same, for a checkpoint every {CHECKPOINT_EVERY} steps",
        )
        if DEVICE.type != "cuda":
            yield from (Row(name, None) for name in names)
            continue
        settings: dict[str, Any] = {"model": model, "dataset": "synthetic", "image_size": side, "batch_size": 256}
        settings |= {"synthetic_samples": 4096, "epochs": 10_000, "loader_workers": 0}
        plain = Config(**settings, channels_last=False)
        fast = Config(**settings, precision="bf16", compile=True)
        splits = load_splits(plain)
        training, steps = build(fast, splits)
        _, plain_steps = build(plain, splits)
        number = 50 if model == "mnist-cnn" else 20
        yield compared(
            names[0], None, rounds, lambda s=steps, n=number: some(s, n), lambda s=plain_steps, n=number: some(s, n)
        )
        results = [next(steps) for _ in range(number * rounds)]
        yield Row(names[1], None, None, tuple(1 - each.data_seconds / each.seconds for each in results))
        with tempfile.TemporaryDirectory() as folder, CheckpointWriter(Storage(folder), fast, splits.info) as writer:
            shares = []
            for turn in range(rounds):
                began = time.perf_counter()
                writer.save(Position(step=turn + 1), training.network, training.optimizer)
                stall = time.perf_counter() - began
                some(steps, CHECKPOINT_EVERY)
                shares.append(1 - stall / (time.perf_counter() - began))
            yield Row(names[2], 0.98, None, tuple(shares))


PARTS: dict[str, Callable[[Path, int], Iterator[Row]]] = {
    "loader": loader,
    "tracking": tracking,
    "checkpoints": checkpoints,
    "evaluation": evaluation,
    "prediction": prediction,
    "commands": commands,
    "gpu": on_a_gpu,
}


def shown(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:.0f}"


def report(rows: list[Row]) -> None:
    table = Table()
    for column in ("", "samples/s", "ratio", "from", "to", "by processor time", "wanted"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        ratios = [statistics.median(row.ratios), min(row.ratios), max(row.ratios)] if row.ratios else []
        table.add_row(
            row.name,
            "" if row.ours is None else f"{row.ours:,.0f}",
            *(map(shown, ratios) if ratios else [""] * 3),
            shown(statistics.median(row.processor)) if row.processor else "",
            "" if row.target is None else f"{row.target:g}",
        )
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the parts cost.")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--command-rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)  # as in a worker with one core
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        write_mnist(data, 20_000, 5_000)
        for name in given.only:
            for row in PARTS[name](data, given.command_rounds if name == "commands" else given.rounds):
                rows.append(row)
                print(row, file=sys.stderr, flush=True)
    report(rows)
    if given.out:
        machine = f"{os.cpu_count()} cores of {processor()}"
        given.out.write_text(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()

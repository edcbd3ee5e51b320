"""python -m benchmarks.growth [--samples 10000 100000 1000000 10000000] [--only shuffled ...] [--out FILE.json]

What a worker holds and how long it waits as the number of training samples grows, for each order of them; what the
Tracker holds after a million metrics; and what is held of an image file and of a text. docs/growth.md has what came
of it. Without Ray, each measurement in a process of its own.
"""

import argparse
import json
import multiprocessing
import os
import pickle
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from app.config import Config
from app.data.images import ImageFiles
from app.data.samples import DataInfo
from app.data.sampling import EvaluationBatches, Facts, TrainingBatches, build_order, build_schedule
from app.data.splits import Splits
from app.data.text import Texts, TextSet
from app.data.tokens import encode, train_tokenizer
from app.deliver import _batches
from app.distributed import World
from app.loop import Training, train
from app.models.build import preprocessing
from app.optim import build_optimizer
from app.setup import training_loader
from app.tracking import Tracker, Validation
from benchmarks.run import processor

SIZES = (10**4, 10**5, 10**6, 10**7)
ORDERS = ("shuffled", "sequential", "subset", "weighted", "balanced", "length-bucketed", "aspect-grouped", "streamed")
CPU, WORLD, BATCH_SIZE, EPOCHS, STEPS, ROUNDS = torch.device("cpu"), World(), 128, 50, 25, 5
BLOCK_ROWS = 10_000


class Generated:
    """A SampleSet of 256 images that come again and again: nothing is held of a sample but its label and its facts."""

    in_memory = True

    def __init__(self, count: int, order: str):
        generator = np.random.default_rng(0)
        self.labels = np.arange(count) % 10
        self._images = torch.randint(0, 256, (256, 1, 28, 28), dtype=torch.uint8)
        self.facts = {
            "weighted": lambda: Facts(weights=generator.random(count)),
            "length-bucketed": lambda: Facts(lengths=generator.integers(1, 500, count)),
            "aspect-grouped": lambda: Facts(groups=generator.integers(0, 7, count)),
            "streamed": lambda: Facts(blocks=np.full(count // BLOCK_ROWS, BLOCK_ROWS)),
        }.get(order, Facts)()

    def inputs(self, ids: np.ndarray) -> torch.Tensor:
        return self._images[torch.from_numpy(ids % len(self._images))]

    def shown(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        return {}


@dataclass(frozen=True)
class Grown:
    """Of a worker with so many training samples.

    held_bytes: of its order, schedule and sampler for each sample, beside data_bytes of labels and facts, and
    evaluation_bytes of an evaluation's. rss_mb: of the process. loader_mb: what a loader's process has of its own
    (USS). spawned_bytes: what one that does not fork is sent, for each sample. build_s: of the order and the schedule.
    first_s: to an epoch's first step, with loader_workers 0 and 2. early_s and late_s: to the first batch's ids, going
    on from step 10 and from 99 % of the run. step_ms: of the loader and the loop, with loader_workers 0 and 2;
    step_ratio: by that with SIZES[0] samples, in turn. Seconds are those of the least disturbed of ROUNDS.
    """

    order: str
    samples: int
    data_bytes: float
    held_bytes: float
    evaluation_bytes: float
    rss_mb: float
    loader_mb: float
    spawned_bytes: float
    build_s: float
    first_s: tuple[float, float]
    early_s: float
    late_s: float
    step_ms: tuple[float, float]
    step_ratio: tuple[float, float]


def in_a_process(work: Callable[..., Any], *args: Any) -> Any:
    """Forked: what is imported here is there too. Unlike a Pool's, it may have children."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(work, *args).result()


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def least(work: Callable[[], Any]) -> float:
    """Seconds of the least disturbed time."""
    return min(seconds(work) for _ in range(ROUNDS))


def rss_mb() -> float:
    return psutil.Process().memory_info().rss / 1e6


def settings_of(name: str) -> Config:
    settings: dict[str, Any] = {"sampler": "shuffled" if name == "streamed" else name}
    if name == "subset":
        settings["subset_fraction"] = 0.9
    return Config(dataset="benchmarks.growth:none", batch_size=BATCH_SIZE, epochs=EPOCHS, augment="none", **settings)


def measure(name: str, samples: int) -> Grown:
    torch.set_num_threads(1)
    config = settings_of(name)
    data, few = Generated(samples, name), Generated(SIZES[0], name)
    build_s = least(lambda: build_schedule(config, build_order(config, data.labels, data.facts)))
    order = build_order(config, data.labels, data.facts)
    schedule = build_schedule(config, order)

    def first_batch(step: int) -> float:
        return seconds(lambda: next(iter(TrainingBatches(order, schedule, WORLD, step))))

    turns = [(first_batch(10), first_batch(int(0.99 * schedule.total_steps))) for _ in range(ROUNDS)]
    first, steps, ratios, loader_mb, resident = [], [], [], 0.0, 0.0
    for loader_workers in (0, 2):
        config = config.model_copy(update={"loader_workers": loader_workers})
        first.append(least(lambda c=config: next(steps_of(c, data))))
        own, others = steps_of(config, data), steps_of(config, few)
        next(own)
        processes = psutil.Process().children()
        turns_of_steps = [(block(own), block(others)) for _ in range(ROUNDS + 1)][1:]
        if loader_workers:
            loader_mb = statistics.median(each.memory_full_info().uss / 1e6 for each in processes)
        else:
            resident = rss_mb()
        steps.append(1000 * min(mine for mine, _ in turns_of_steps))
        ratios.append(statistics.median(mine / its for mine, its in turns_of_steps))
        del own, others

    tracemalloc.start()
    again = build_order(config, data.labels, data.facts)
    batches = iter(TrainingBatches(again, build_schedule(config, again), WORLD))
    next(batches)
    held = tracemalloc.get_traced_memory()[0]
    evaluation = EvaluationBatches(samples, 4 * BATCH_SIZE, WORLD, data.facts.groups)
    evaluation_held = tracemalloc.get_traced_memory()[0] - held
    tracemalloc.stop()
    assert len(evaluation) >= samples // (4 * BATCH_SIZE)
    known = [data.labels, data.facts.weights, data.facts.lengths, data.facts.groups, data.facts.blocks]
    return Grown(
        order=name,
        samples=samples,
        data_bytes=sum(each.nbytes for each in known if each is not None) / samples,
        held_bytes=held / samples,
        evaluation_bytes=evaluation_held / samples,
        rss_mb=resident,
        loader_mb=loader_mb,
        spawned_bytes=len(pickle.dumps(data)) / samples,
        build_s=build_s,
        first_s=(first[0], first[1]),
        early_s=min(early for early, _ in turns),
        late_s=min(late for _, late in turns),
        step_ms=(steps[0], steps[1]),
        step_ratio=(ratios[0], ratios[1]),
    )


def steps_of(config: Config, data: Generated) -> Iterator[float]:
    """Seconds of each step of a network that costs next to nothing, from the first step of the second epoch on; data
    alike come after each other in all of them."""
    info = DataInfo((1, 28, 28), tuple("0123456789"), (0.5,), (0.5,), len(data.labels))
    order = build_order(config, data.labels, data.facts)
    schedule = build_schedule(config, order)
    network = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))
    optimizer = build_optimizer(config, list(network.parameters()))
    training = Training(config, schedule, WORLD, CPU, network, network, preprocessing(info), optimizer)
    splits = Splits(info, data, data, None)
    loader = training_loader(config, splits, order, schedule, WORLD, schedule.steps_per_epoch, CPU)
    return (result.seconds for result in train(training, loader))


def block(steps: Iterator[float]) -> float:
    """Seconds of a step: the mean of some. Those in which a small set's next epoch is begun are among them."""
    return statistics.fmean(next(steps) for _ in range(STEPS))


def measure_tracker(records: int) -> dict[str, float]:
    """What a run's Tracker costs that records 4 metrics at a time, and 10^4 events and validations, of which
    the driver is told; and one that is started again on these records."""
    with tempfile.TemporaryDirectory() as folder:
        before = rss_mb()
        tracker = Tracker(folder, folder, None, "e", "r")
        began = time.perf_counter()
        for step in range(records):
            tracker.metrics(step, {"train/loss": 0.5, "train/accuracy": 0.5, "perf/samples_per_s": 1e4, "lr": 0.1})
        record_us = (time.perf_counter() - began) / records * 1e6
        events_seen = validations_seen = 0
        for step in range(10_000):
            tracker.event(f"event {step}")
            tracker.validated(Validation(step=step, epochs=1.0, metrics={"val/loss": 0.5, "val/accuracy": 0.5}))
            if step % 10 == 0:
                progress = tracker.progress(events_seen, validations_seen)
                events_seen, validations_seen = progress.events_seen, progress.validations_seen
        grown, between = rss_mb() - before, rss_mb()
        tracker.close()
        size = (Path(folder) / "records.jsonl").stat().st_size
        reopen_s = seconds(lambda: Tracker(folder, folder, None, "e", "r").close())
        reopened = rss_mb() - between
        whole_s = seconds(lambda: sum(1 for _ in _batches(Path(folder), 0)))
        positions = [position for _, position in _batches(Path(folder), 0)]
        last_s = seconds(lambda: next(_batches(Path(folder), [0, *positions][-2])))  # of few records, the first
        return {
            "metrics": 4 * records,
            "records_mb": size / 1e6,
            "record_us": record_us,
            "grown_mb": grown,
            "reopen_s": reopen_s,
            "reopened_mb": reopened,
            "read_all_s": whole_s,
            "read_last_s": last_s,
        }


def measure_files(count: int = 100_000) -> dict[str, float]:
    """Bytes held of an image's file with a path of 48 characters, and of a text of 12 words, its label included."""
    names = [f"/data/imagenet/train/n{n % 1000:08d}/n{n % 1000:08d}_{n:06d}.JPEG" for n in range(count)]
    generator = np.random.default_rng(0)
    words = np.array([f"word{number}" for number in range(1000)])
    texts = [" ".join(chosen) for chosen in words[generator.integers(0, 1000, (count, 12))]]
    tokenizer = train_tokenizer("words", 2000, 64, texts[:1000])
    ImageFiles(list(map(Path, names)), np.zeros(count), [(8, 8)], 3)  # Python's own table of names is now as large
    tracemalloc.start()
    labels = np.zeros(count, np.int64)
    images = ImageFiles(list(map(Path, names)), labels, [(8, 8)], 3)
    image_bytes = tracemalloc.get_traced_memory()[0]
    encoded = encode(tokenizer, texts)
    samples = TextSet(Texts(texts, labels), encoded)
    text_bytes = tracemalloc.get_traced_memory()[0] - image_bytes + labels.nbytes
    tracemalloc.stop()
    assert len(images.labels) == len(samples.labels) == count
    strings = sum(text.__sizeof__() for text in texts[:1000]) / 1000
    return {"image_file": image_bytes / count, "text": text_bytes / count + strings + 8, "text_itself": strings}


def report(found: list[Grown], tracker: dict[str, float], files: dict[str, float]) -> None:
    table = Table(title="a worker; with loader_workers 0 / 2")
    columns = ("order", "samples", "bytes each: data", "order", "val", "MB", "MB a loader", "sent if spawned")
    for column in (*columns, "build, s", "first batch, s", "at step 10, at 99 %, s", "step, ms", "by 10,000's"):
        table.add_column(column, justify="left" if column == "order" and not table.columns else "right")
    for each in found:
        table.add_row(
            each.order,
            f"{each.samples:,}",
            f"{each.data_bytes:.0f}",
            f"{each.held_bytes:.1f}",
            f"{each.evaluation_bytes:.2f}",
            f"{each.rss_mb:.0f}",
            f"{each.loader_mb:.0f}",
            f"{each.spawned_bytes:.0f}",
            f"{each.build_s:.3f}",
            " / ".join(f"{value:.2f}" for value in each.first_s),
            f"{each.early_s:.3f}, {each.late_s:.3f}",
            " / ".join(f"{value:.2f}" for value in each.step_ms),
            " / ".join(f"{value:.2f}" for value in each.step_ratio),
        )
    output = Console(width=190)
    output.print(table)
    for title, values in (("the Tracker", tracker), ("bytes held of a sample", files)):
        small = Table(title=title, show_header=False)
        for name, value in values.items():
            small.add_row(name, f"{value:,.1f}" if value >= 10 else f"{value:.4g}")
        output.print(small)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the cost as the work grows.")
    parser.add_argument("--samples", type=int, nargs="+", default=SIZES)
    parser.add_argument("--only", nargs="+", choices=ORDERS, default=ORDERS)
    parser.add_argument("--metrics", type=int, default=10**6, help="That the Tracker records.")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = []
    for name in given.only:
        for samples in given.samples:
            found.append(in_a_process(measure, name, samples))
            print(found[-1], flush=True)
    tracker, files = in_a_process(measure_tracker, given.metrics // 4), in_a_process(measure_files)
    report(found, tracker, files)
    if given.out:
        content = {"machine": f"{os.cpu_count()} cores of {processor()}", "tracker": tracker, "bytes_held": files}
        given.out.write_text(json.dumps({**content, "orders": [asdict(each) for each in found]}, indent=1) + "\n")


if __name__ == "__main__":
    main()

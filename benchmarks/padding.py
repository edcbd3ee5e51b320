"""python -m benchmarks.padding [ROUNDS]

What batches of similar length save: the share of padding, and training speed, with --sampler shuffled and
length-bucketed in turn, in one process. Texts are the standard library's sentences, and the same ones
joined to texts of 1 to 8 sentences, whose lengths differ more.
"""

import csv
import statistics
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from app.config import Config
from app.data.datasets import check_data, load_splits
from app.data.sampling import build_order, build_schedule
from app.data.stdlib_docs import read_sentences
from app.distributed import World
from app.loop import Training, train
from app.models.build import build_model, preprocessing
from app.optim import build_optimizer
from app.setup import training_loader

SAMPLERS = ("shuffled", "length-bucketed")
CPU = torch.device("cpu")


def measure(config: Config) -> tuple[float, float]:
    """The share of padding in an epoch's batches, and samples/s over the steps of its second half."""
    splits = load_splits(config, check_data(config).tokenizer)
    order = build_order(config, splits.train.labels, splits.train.facts)
    schedule = build_schedule(config, order)
    torch.manual_seed(0)
    network = build_model(config, splits.info)
    optimizer = build_optimizer(config, list(network.parameters()))
    training = Training(config, schedule, World(), CPU, network, network, preprocessing(splits.info), optimizer)
    loader = training_loader(config, splits, order, schedule, World(), 0, CPU)
    batches = list(loader)
    padding = sum(int((batch["inputs"] == 0).sum()) for batch in batches)
    share = padding / sum(batch["inputs"].numel() for batch in batches)
    results = list(train(training, loader))[len(batches) // 2 :]
    return share, sum(result.count for result in results) / sum(result.seconds for result in results)


def joined_sentences(path: Path) -> None:
    """A table of texts of 1 to 8 sentences of one package."""
    generator = np.random.default_rng(0)
    texts, labels = map(np.asarray, read_sentences())
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for label in np.unique(labels):
            for _ in range(300):
                writer.writerow([" ".join(generator.choice(texts[labels == label], generator.integers(1, 9))), label])


def main(rounds: int) -> None:
    table = Table(title=f"median of {rounds} rounds, batches of 64, one process of {torch.get_num_threads()} threads")
    for column in ("texts", "model", "padding: shuffled", "bucketed", "samples/s: shuffled", "bucketed", "ratio"):
        table.add_column(column, justify="left" if column in ("texts", "model") else "right")
    with tempfile.TemporaryDirectory() as folder:
        joined_sentences(Path(folder) / "joined.csv")
        for name, data in (
            ("sentences", {"dataset": "stdlib-docs"}),
            ("1 to 8 sentences", {"dataset": "text", "data_dir": f"{folder}/joined.csv", "max_length": 512}),
        ):
            for model in ("text-lstm", "text-transformer"):
                found: dict[str, list[tuple[float, float]]] = {sampler: [] for sampler in SAMPLERS}
                for _ in range(rounds):
                    for sampler in SAMPLERS:
                        settings = {**data, "model": model, "sampler": sampler, "batch_size": 64, "epochs": 1}
                        found[sampler].append(measure(Config(**settings)))
                (share, _), (bucketed_share, _) = (values[0] for values in found.values())
                speed, bucketed_speed = (statistics.median(v for _, v in values) for values in found.values())
                table.add_row(
                    name,
                    model,
                    f"{share:.1%}",
                    f"{bucketed_share:.1%}",
                    f"{speed:,.0f}",
                    f"{bucketed_speed:,.0f}",
                    f"{bucketed_speed / speed:.2f}",
                )
    Console(width=120).print(table)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)

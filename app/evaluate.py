"""python -m app.evaluate RUN_OR_CHECKPOINT [--split test] [--num-workers N]

Measure a checkpoint, given nothing but it and the data. The last line on stdout is one JSON object.
"""

import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import tyro
from pydantic import BaseModel, ConfigDict, Field

from app.cli import EXIT_CODES, run_main
from app.config import Config
from app.errors import BadInput
from app.metrics import Evaluation
from app.runs import checkpoint_names, read_run
from app.storage import Storage

if TYPE_CHECKING:
    import torch


class Command(BaseModel):
    """What to measure."""

    model_config = ConfigDict(extra="forbid")

    checkpoint: tyro.conf.Positional[str] = Field(
        description="A run's folder or name (its best checkpoint is taken), or a checkpoint's folder."
    )
    split: Literal["train", "val", "test"] = Field("test", description="The split to measure on.")
    num_workers: int = Field(1, description="Processes to share the samples out over, on Ray if more than 1.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes a GPU where there is one.")
    data_dir: str | None = Field(None, description="Where the data lies now, if not where it was trained on.")


def main(argv: Sequence[str]) -> int:
    command = tyro.cli(
        Command, args=list(argv), prog="python -m app.evaluate", description=f"Measure a checkpoint.\n\n{EXIT_CODES}"
    )
    if command.num_workers < 1:
        raise BadInput(f"--num-workers {command.num_workers}: must be at least 1")
    path = find_checkpoint(command.checkpoint)
    from app.checkpoint import load_checkpoint
    from app.data.splits import check_data
    from app.user_code import import_own

    config = load_checkpoint(Storage(path), "").config
    import_own(config)
    data_dir = os.path.abspath(command.data_dir) if command.data_dir is not None else config.data_dir
    check_data(to_evaluate(config, data_dir))  # once, not in each task
    if command.num_workers == 1:
        result, class_names = evaluate_share(path, command.split, data_dir, command.device, 0, 1)
    else:
        result, class_names = evaluate_on_ray(path, config, command, data_dir)
    from app.loop import refuse_unreadable

    for text in result.unreadable:
        print(f"skipping a sample: {text}")
    refuse_unreadable(result, config, command.split)
    report(path, command.split, result, class_names)
    return 0


def find_checkpoint(given: str) -> str:
    """The folder of the checkpoint that a person means by a run, its name, or a checkpoint."""
    if ".." in given.replace("\\", "/").split("/"):
        raise BadInput(f"{given}: name the run or the checkpoint by a path without '..'")
    root = given.rstrip("/") if "://" in given else os.path.abspath(given)
    for path in (root, os.path.abspath(os.path.join("runs", given))):
        storage = Storage(path)
        if "manifest.json" in storage.names(""):
            return path
        run = read_run(storage)
        if run is None:
            continue
        names = checkpoint_names(Storage(f"{path}/checkpoints"))
        if run.summary is not None and run.summary.checkpoint is not None:
            best = run.summary.checkpoint.rpartition("/")[2]
            if best in names:
                return f"{path}/checkpoints/{best}"
        if names:
            return f"{path}/checkpoints/{names[-1]}"
        raise BadInput(f"{given}: this run has no checkpoint")
    raise BadInput(f"{given} is no run's folder, no run below ./runs, and no checkpoint's folder")


def to_evaluate(config: Config, data_dir: str | None) -> Config:
    """A run's settings, with the data where it is now and without what only the order of training needs."""
    changes: dict[str, object] = {"data_dir": data_dir, "weight_column": None, "subset_file": None, "drop_last": False}
    if config.sampler != "aspect-grouped":  # which decides the images' shapes too
        changes["sampler"] = "shuffled"
    return config.model_copy(update=changes)


def evaluate_share(
    path: str, split: str, data_dir: str | None, device_name: str, rank: int, world_size: int
) -> tuple[Evaluation, tuple[str, ...]]:
    """Measure a rank's share of the split; with the class names."""
    import torch

    from app.checkpoint import load_checkpoint, load_weights
    from app.data.splits import load_splits
    from app.distributed import World
    from app.loop import evaluate
    from app.models.build import Normalize, build_model
    from app.setup import evaluation_loader, in_layout

    if device_name == "cuda" and not torch.cuda.is_available():
        raise BadInput("--device cuda: there is no GPU here")
    device = torch.device("cuda" if device_name != "cpu" and torch.cuda.is_available() else "cpu")
    checkpoint = load_checkpoint(Storage(path), "")
    config = to_evaluate(checkpoint.config, data_dir)
    splits = load_splits(config)
    checkpoint.refuse_other_data(splits.info)
    network = build_model(config, splits.info, pretrained=False)
    load_weights(network, checkpoint.model, path)
    in_layout(network, config)
    loader = evaluation_loader(config, splits[split], World(rank, world_size), device)
    batches = ({key: _to(value, device) for key, value in batch.items()} for batch in loader)
    result = evaluate(
        network.to(device),
        Normalize(splits.info).to(device),
        batches,  # type: ignore[arg-type]  # the same keys
        splits.info.num_classes,
        config,
        device,
    )
    return result, splits.info.class_names


def _to(value: object, device: "torch.device") -> object:
    import torch

    return value.to(device) if isinstance(value, torch.Tensor) else value


def evaluate_on_ray(
    path: str, config: Config, command: Command, data_dir: str | None
) -> tuple[Evaluation, tuple[str, ...]]:
    """Shares as Ray tasks; their sums added up give exactly what one process gets."""
    from app.cluster import connected

    # What a task needs, not what the training needed.
    needs = {"num_workers": command.num_workers, "device": command.device, "cpus_per_worker": 1.0}
    config = config.model_copy(update={**needs, "sync_batchnorm": False})
    with connected(config, verbose=False) as cluster:
        import ray
        from ray.exceptions import RayTaskError

        share = ray.remote(num_cpus=1, num_gpus=1 if cluster.use_gpu else 0)(evaluate_share)
        device = "cuda" if cluster.use_gpu else "cpu"
        refs = [
            share.remote(path, command.split, data_dir, device, rank, command.num_workers)
            for rank in range(command.num_workers)
        ]
        try:
            shares = ray.get(refs)
        except RayTaskError as error:
            if isinstance(error.cause, BadInput):
                raise BadInput(str(error.cause)) from None
            raise
    return Evaluation.total([result for result, _ in shares]), shares[0][1]


def report(path: str, split: str, result: Evaluation, class_names: tuple[str, ...]) -> None:
    from rich.table import Table
    from rich.text import Text

    from app.progress import console

    table = Table(title=f"{split}: {result.num_samples:,} samples")
    for column in ("class", "precision", "recall", "F1", "samples"):
        table.add_column(column, justify="left" if column == "class" else "right")
    rows = result.per_class()
    for name, row in zip(class_names, rows, strict=True):
        table.add_row(Text(name), *(f"{row[key]:.4f}" for key in ("precision", "recall", "f1")), str(row["support"]))
    output = console()
    output.print(table)
    if len(class_names) <= 20:
        matrix = Table(title="confusion matrix: a row per class, a column per prediction")
        for name in ("", *class_names):
            matrix.add_column(Text(name), justify="right")
        for name, counts in zip(class_names, result.confusion, strict=True):
            matrix.add_row(Text(name), *map(str, counts))
        output.print(matrix)
    content = {
        "checkpoint": path,
        "split": split,
        "num_samples": result.num_samples,
        "unreadable": result.unreadable,
        "metrics": result.metrics(split),
        "per_class": dict(zip(class_names, rows, strict=True)),
        "confusion": result.confusion,
    }
    print(json.dumps(content, allow_nan=False))


if __name__ == "__main__":
    run_main(main)

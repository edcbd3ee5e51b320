"""python -m app.evaluate RUN_OR_CHECKPOINT [--split test] [--num-workers N]
python -m app.evaluate WEIGHTS_FILE --config settings.yaml

Measure a checkpoint, given nothing but it and the data. The last line on stdout is one JSON object.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import tyro
from pydantic import BaseModel, ConfigDict, Field

from app.cli import EXIT_CODES, run_main
from app.config import Config
from app.errors import BadInput
from app.metrics import Evaluation
from app.runs import absolute
from app.storage import refuse_secrets
from app.user_code import import_own

if TYPE_CHECKING:
    import torch

    from app.trained import Trained


class Command(BaseModel):
    """What to measure."""

    model_config = ConfigDict(extra="forbid")

    checkpoint: tyro.conf.Positional[str] = Field(
        description="A run's folder or name (its best checkpoint), a checkpoint's folder, or a file of weights."
    )
    config: str | None = Field(None, description="YAML file with the settings of a file of weights.")
    split: Literal["train", "val", "test"] = Field("test", description="The split to measure on.")
    num_workers: int = Field(1, description="Processes to share the samples out over, on Ray if more than 1.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes a GPU where there is one.")
    data_dir: str | None = Field(None, description="Where the data lies now, if not where it was trained on.")
    cache_dir: str | None = Field(
        None, description="Where a node keeps its copies of data at a URI. Default: ~/.cache/evenkeel."
    )


def main(argv: Sequence[str]) -> int:
    command = tyro.cli(
        Command, args=list(argv), prog="python -m app.evaluate", description=f"Measure a checkpoint.\n\n{EXIT_CODES}"
    )
    if command.num_workers < 1:
        raise BadInput(f"--num-workers {command.num_workers}: must be at least 1")
    from app.data.datasets import check_data
    from app.trained import load_trained

    trained = load_trained(command.checkpoint, command.config, command.cache_dir)
    import_own(trained.config)
    config = trained.config
    data_dir = absolute(command.data_dir) if command.data_dir is not None else config.data_dir
    for note in check_data(to_evaluate(config, data_dir), trained.info.tokenizer).notes:  # once, not in each task
        print(note)
    if command.num_workers == 1:
        result = evaluate_share(trained, command.split, data_dir, command.device, 0, 1)
    else:
        result = evaluate_on_ray(trained, command, data_dir)
    from app.loop import refuse_unreadable

    for text in result.unreadable:
        print(f"skipping a sample: {text}")
    refuse_unreadable(result, config, command.split)
    report(trained, command.split, result)
    return 0


def to_evaluate(config: Config, data_dir: str | None) -> Config:
    """A run's settings, with the data where it is now and without what only the order of training needs."""
    refuse_secrets("--data-dir", data_dir or "")
    changes: dict[str, object] = {"data_dir": data_dir, "weight_column": None, "subset_file": None, "drop_last": False}
    if config.sampler != "aspect-grouped":  # which decides the images' shapes too
        changes["sampler"] = "shuffled"
    return config.model_copy(update=changes)


def evaluate_share(
    trained: "Trained", split: str, data_dir: str | None, device_name: str, rank: int, world_size: int
) -> Evaluation:
    """Measure a rank's share of the split."""
    from app.checkpoint import refuse_other_data
    from app.data.datasets import load_splits
    from app.distributed import World
    from app.loop import evaluate
    from app.setup import evaluation_loader, in_layout
    from app.trained import device_here

    device = device_here(device_name)
    config = to_evaluate(trained.config, data_dir)
    splits = load_splits(config, trained.info.tokenizer)
    refuse_other_data(trained.path, trained.info, splits.info)
    classifier = trained.classifier().to(device)
    in_layout(classifier, config)
    loader = evaluation_loader(config, splits[split], World(rank, world_size), device)
    batches = ({key: _to(value, device) for key, value in batch.items()} for batch in loader)
    return evaluate(
        classifier.network,
        classifier.preprocess,
        batches,  # type: ignore[arg-type]  # the same keys
        splits.info.num_classes,
        config,
        device,
    )


def _to(value: object, device: "torch.device") -> object:
    import torch

    return value.to(device) if isinstance(value, torch.Tensor) else value


def evaluate_on_ray(trained: "Trained", command: Command, data_dir: str | None) -> Evaluation:
    """Shares as Ray tasks; their sums added up give exactly what one process gets."""
    from app.cluster import connected

    with connected(trained.config_for(command.num_workers, command.device), verbose=False) as cluster:
        import ray
        from ray.exceptions import RayTaskError

        share = ray.remote(num_cpus=1, num_gpus=1 if cluster.use_gpu else 0)(evaluate_share)
        device = "cuda" if cluster.use_gpu else "cpu"
        to_all = ray.put(trained)
        refs = [
            share.remote(to_all, command.split, data_dir, device, rank, command.num_workers)
            for rank in range(command.num_workers)
        ]
        try:
            shares = ray.get(refs)
        except RayTaskError as error:
            if isinstance(error.cause, BadInput):
                raise BadInput(str(error.cause)) from None
            raise
    return Evaluation.total(shares)


def report(trained: "Trained", split: str, result: Evaluation) -> None:
    from rich.table import Table
    from rich.text import Text

    from app.progress import console

    table = Table(title=f"{split}: {result.num_samples:,} samples")
    for column in ("class", "precision", "recall", "F1", "samples"):
        table.add_column(column, justify="left" if column == "class" else "right")
    rows, class_names = result.per_class(), trained.info.class_names
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
        "checkpoint": trained.path,
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

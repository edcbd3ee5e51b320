"""python -m app.predict RUN_OR_CHECKPOINT INPUT... [--output FILE] [--num-workers N]

Label images or texts with a checkpoint. A row for each image or text, in the order given: input, row (of a table),
label, error, and probability_CLASS for each class; the same columns in CSV, JSON lines and Parquet. With --output the
last line on stdout is one JSON object; without, the rows are JSON lines on stdout.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import tyro
from pydantic import BaseModel, ConfigDict, Field

from app.cli import EXIT_CODES, run_main
from app.data.inputs import Inputs
from app.errors import BadInput
from app.output import File, Lines, check_output

if TYPE_CHECKING:
    import pyarrow as pa

    from app.trained import Trained

# Of which a block is made: small enough to share few images out over workers.
BATCHES_PER_BLOCK = 4


class Command(BaseModel):
    """What to predict."""

    model_config = ConfigDict(extra="forbid")

    checkpoint: tyro.conf.Positional[str] = Field(
        description="A run's folder or name (its best checkpoint), a checkpoint's folder, or a file of weights."
    )
    inputs: tyro.conf.Positional[tuple[str, ...]] = Field(
        description="Image files and folders of them; or tables of texts (CSV, TSV, JSON lines, Parquet) and texts."
    )
    output: str | None = Field(None, description="File for the rows: .csv, .jsonl or .parquet. Default: stdout.")
    num_workers: int = Field(1, description="Processes to share the rows out over, on Ray if more than 1.")
    batch_size: int = Field(64, description="Rows that the network gets at a time, in each process.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes a GPU where there is one.")
    text_column: str | None = Field(None, description="A table's column of texts. Default: that of the training.")
    config: str | None = Field(None, description="YAML file with the settings of a file of weights.")
    overwrite: bool = Field(False, description="Replace the output file if there is one.")


def main(argv: Sequence[str]) -> int:
    command = tyro.cli(Command, args=list(argv), prog="python -m app.predict", description=f"{__doc__}\n{EXIT_CODES}")
    for flag, value in (("--num-workers", command.num_workers), ("--batch-size", command.batch_size)):
        if value < 1:
            raise BadInput(f"{flag} {value}: must be at least 1")
    if not command.inputs:
        raise BadInput("nothing to predict: give image files or folders, tables of texts, or texts")
    if command.output is not None:
        check_output(command.output, command.overwrite)
    from app.trained import load_trained

    trained = load_trained(command.checkpoint, command.config)
    inputs = find_inputs(command, trained)
    total = inputs.check()
    refuse_output_among(inputs.tables(), command.output)
    counts, seconds = run(command, trained, inputs, total)
    report(command, trained, counts, seconds)
    return 0


def find_inputs(command: Command, trained: "Trained") -> Inputs:
    """Raises BadInput for a network that takes neither images nor texts."""
    info = trained.info
    is_text = info.tokenizer is not None
    if not is_text and not info.is_image:
        raise BadInput(f"{trained.path} was trained on {info}: only images and texts can be predicted from here")
    if command.text_column is not None and not is_text:
        raise BadInput(f"--text-column {command.text_column}: {trained.path} takes images; leave it out")
    column = trained.config.text_column if command.text_column is None else command.text_column
    return Inputs(command.inputs, is_text, column, BATCHES_PER_BLOCK * command.batch_size, os.getcwd())


def refuse_output_among(tables: Sequence[str], output: str | None) -> None:
    if output is None or not os.path.exists(output):
        return
    for table in tables:
        if os.path.samefile(table, output):
            raise BadInput(f"--output {output} is the table that is read: name another file")


def run(command: Command, trained: "Trained", inputs: Inputs, total: int | None) -> tuple[Counter[str | None], float]:
    """Write the results; how many rows got each label, or None, and in how many seconds."""
    from app.predictor import result_schema
    from app.progress import counting

    schema = result_schema(trained.info.class_names)
    counts: Counter[str | None] = Counter()
    lines_shown = command.output is None and sys.stdout.isatty()  # which are progress enough
    with (
        ending_on_sigterm(),
        Lines() if command.output is None else File(command.output, schema) as output,
        blocks_predicted(command, trained, inputs) as blocks,
        counting("rows", total) if not lines_shown else contextlib.nullcontext() as advance,
    ):
        began = time.perf_counter()
        for block in blocks:
            output.write(block)
            for value in block["label"].value_counts().to_pylist():
                counts[value["values"]] += value["counts"]
            if advance is not None:
                advance(block.num_rows)
        return counts, time.perf_counter() - began


@contextlib.contextmanager
def blocks_predicted(command: Command, trained: "Trained", inputs: Inputs) -> "Iterator[Iterator[pa.Table]]":
    """In this process, or on Ray. Raises BadInput for a device or a cluster that is not there."""
    if command.num_workers == 1:
        from app.predictor import Predictor
        from app.trained import device_here

        yield map(Predictor(trained, device_here(command.device), command.batch_size), inputs.blocks())
        return
    from app.cluster import connected

    trained.classifier()  # what does not fit is said here, and not by an actor
    with connected(trained.config_for(command.num_workers, command.device), verbose=False) as cluster:
        import ray

        from app.ray_blocks import predicted

        yield predicted(inputs, ray.put(trained), command.num_workers, cluster.use_gpu, command.batch_size)


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the command as Ctrl-C does: what was begun is cleared away."""

    def end(*_: object) -> None:
        sys.exit(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def report(command: Command, trained: "Trained", counts: Counter[str | None], seconds: float) -> None:
    """The errors' number on stderr; with --output the labels' on stdout, and the line for programs."""
    rows, errors = counts.total(), counts[None]
    if errors:
        print(f"{errors:,} of {rows:,} rows could not be predicted: see their column error", file=sys.stderr)
    if command.output is None:
        return
    from rich.table import Table
    from rich.text import Text

    from app.progress import console

    table = Table(title=f"{rows:,} rows")
    table.add_column("label")
    table.add_column("rows", justify="right")
    for label, count in counts.most_common(20):
        table.add_row(Text("error" if label is None else label, style="red" if label is None else ""), f"{count:,}")
    if len(counts) > 20:
        table.add_row("other", f"{sum(count for _, count in counts.most_common()[20:]):,}")
    console().print(table)
    content = {
        "checkpoint": trained.path,
        "output": os.path.abspath(command.output),
        "rows": rows,
        "errors": errors,
        "labels": {label: count for label, count in counts.most_common() if label is not None},
        "seconds": seconds,
        "samples_per_s": rows / seconds,
    }
    print(json.dumps(content, allow_nan=False))


if __name__ == "__main__":
    run_main(main)

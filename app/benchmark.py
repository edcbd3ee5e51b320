"""python -m app.benchmark --num-workers 1,2,4 [any flag of app.train]

How fast your model trains on your data on each number of workers, and where the time of a step goes: real training
with its checkpoints and records, of which nothing is kept. A table, a picture, and as the last line one JSON object.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field

from app.cli import parse_config, run_main
from app.config import Config
from app.config_file import to_yaml
from app.errors import BadInput
from app.runs import resolved, run_storage, tracking_directory
from app.storage import Storage

if TYPE_CHECKING:
    from app.clock import Span, StepTimes
    from app.cluster import Cluster
    from app.interrupt import Interrupt
    from app.progress import Display
    from app.tracking import DeliveryState

# More than a measurement gets to.
EPOCHS = 10**6
NAMES = {
    "data_wait": "data wait",
    "forward_backward": "forward + backward",
    "all_reduce": "all-reduce",
    "optimizer": "optimizer",
    "validation": "validation",
    "checkpoint": "checkpoint",
    "tracking": "tracking",
    "rest": "the rest",
}


class Command(BaseModel):
    """What to measure."""

    num_workers: str = Field(
        "1,2", description="Numbers of training processes to measure, such as 1,2,4; not taken from --config."
    )
    steps: int = Field(50, description="Steps measured for each number of workers.")
    warmup: int = Field(10, description="Steps before these, which are not counted.")
    scaling: Literal["strong", "weak"] = Field(
        "strong", description="strong: --batch-size over all workers together; weak: for each worker."
    )
    out: str | None = Field(
        None, description="Files to write, without .json and .png. Default: benchmark-..., in the current directory."
    )
    config: str | None = Field(None, description="YAML file with settings; flags override it.")
    verbose: bool = Field(False, description="Show Ray's own messages too (-v).")


@dataclass(frozen=True)
class Row:
    """What was measured on a number of workers."""

    workers: int
    batch_size: int
    times: "StepTimes"

    @property
    def samples_per_s(self) -> float:
        return self.times.samples / self.times.seconds

    @property
    def speed(self) -> float:
        """samples/s without evaluations and checkpoints, which fall among the measured steps of one row and not among
        those of another."""
        beside = self.times.parts["validation"] + self.times.parts["checkpoint"]
        return self.times.samples / (self.times.seconds - beside)

    @property
    def step_ms(self) -> float:
        return 1000 * self.times.seconds / self.times.steps

    def parts_ms(self, parts: dict[str, float]) -> dict[str, float]:
        """Milliseconds of a step, by part: rank 0's add up to step_ms."""
        return {part: 1000 * seconds / self.times.steps for part, seconds in parts.items()}

    def told(self, first: "Row") -> dict[str, Any]:
        """For programs."""
        speedup = self.speed / first.speed
        return {
            "workers": self.workers,
            "batch_size": self.batch_size,
            "samples_per_s": self.samples_per_s,
            "speedup": speedup,
            "efficiency": speedup * first.workers / self.workers,
            "step_ms": self.step_ms,
            "parts_ms": self.parts_ms(self.times.parts),
        }


def main(argv: Sequence[str]) -> int:
    argv = ["--verbose" if word == "-v" else word for word in argv]
    config, command = parse_config(
        argv, Command, "python -m app.benchmark", "Measure how training scales, and where the time of a step goes."
    )
    for flag, value, least in (("--steps", command.steps, 1), ("--warmup", command.warmup, 0)):
        if value < least:
            raise BadInput(f"{flag} {value}: must be at least {least}")
    configs = configs_to_measure(config, command)
    out = checked_out(command.out or configs[0].run_name.rpartition("-")[0])  # type: ignore[union-attr]  # it has one
    from app.clock import Span  # and with it torch

    return benchmark(configs, command, Span(command.warmup, command.steps), out)


def configs_to_measure(config: Config, command: Command) -> list[Config]:
    """A run for each number of workers. Raises BadInput."""
    name = f"benchmark-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    configs = []
    for workers in numbers(command.num_workers):
        settings = {
            "run_name": f"{name}-{workers}",
            "num_workers": workers,
            "batch_size": config.batch_size * (workers if command.scaling == "weak" else 1),
            # It ends when all is measured, and is not begun again.
            "epochs": EPOCHS,
            "max_steps": None,
            "early_stop_patience": None,
            "max_failures": 0,
        }
        configs.append(Config(**config.model_dump() | settings))
    return configs


def numbers(text: str) -> list[int]:
    """The numbers of workers in a list such as 1,2,4. Raises BadInput."""
    found = [int(word) if re.fullmatch(r"\s*[0-9]{1,9}\s*", word) else 0 for word in text.split(",")]
    if min(found) < 1 or len(set(found)) < len(found):
        raise BadInput(
            f"--num-workers {text!r}: allowed are numbers of at least 1, each once, with commas between them, "
            "such as 1,2,4"
        )
    return found


def checked_out(out: str) -> Path:
    """Where the files go, without their endings. Raises BadInput if they cannot be written."""
    path = Path(os.path.abspath(os.path.expanduser(re.sub(r"\.(json|png)$", "", out))))
    for file in files_at(path):
        place = file if file.exists() else file.parent
        if not (path.parent.is_dir() and os.access(place, os.W_OK)) or file.is_dir():
            raise BadInput(f"--out {out}: {file} cannot be written; make its directory, or name another file")
    return path


def files_at(out: Path) -> tuple[Path, Path]:
    return out.with_name(f"{out.name}.json"), out.with_name(f"{out.name}.png")


def benchmark(configs: list[Config], command: Command, span: "Span", out: Path) -> int:
    """Measure each config, report, and return the exit code."""
    from app.cluster import connected, set_environment
    from app.data.datasets import check_data
    from app.interrupt import Interrupt
    from app.nodes import look_around
    from app.progress import Display
    from app.user_code import import_own

    display = Display()
    with tempfile.TemporaryDirectory(prefix="evenkeel-", ignore_cleanup_errors=True) as scratch:
        # The records of a run are written and delivered as ever; a server would keep what nobody looks for.
        uri = None if configs[0].tracking_uri == "none" else f"sqlite:///{scratch}/mlflow.db"
        configs = [resolved(config.model_copy(update={"tracking_uri": uri or "none"})) for config in configs]
        largest = max(configs, key=lambda config: config.max_workers)
        import_own(largest)
        found = check_data(largest)
        for note in found.notes:
            display.event(note)
        set_environment()
        rows: list[Row] = []
        error, exit_code = None, 0
        with (
            removed_afterwards(configs),
            Interrupt() as interrupt,
            display,
            connected(largest, command.verbose) as cluster,  # refuses what there is no room for
        ):
            interrupt.listen()
            run_storage(largest).check_writable()
            look_around(largest, cluster, uri, display.event)
            for config in configs:
                row, error, exit_code = measure(config, found.tokenizer, span, uri, cluster, display, interrupt)
                if row is not None:
                    rows.append(row)
                    speed = f"{row.samples_per_s:,.0f} samples/s, {row.step_ms:.1f} ms a step"
                    display.event(f"{named(row.workers)}: {speed}")
                if error is not None or interrupt.count:
                    break
    report(rows, configs[0], command, "cuda" if cluster.use_gpu else "cpu", out, error, interrupt.count > 0)
    return 128 + interrupt.signal if interrupt.count and error is None else exit_code


def measure(
    config: Config,
    tokenizer: str | None,
    span: "Span",
    uri: str | None,
    cluster: "Cluster",
    display: "Display",
    interrupt: "Interrupt",
) -> tuple[Row | None, str | None, int]:
    """Train on one number of workers until the span is over: what was measured, or the error and its exit code;
    neither, where it was interrupted."""
    import ray
    from ray.exceptions import RayError

    from app.attempts import train
    from app.failures import why_lost
    from app.fit import begin, parameters, start_tracker, tags

    begin(config, tokenizer)
    tracker = start_tracker(config, uri)
    about = tags(config, cluster) | {"mlflow.source.name": "app.benchmark"}
    tracker.begin.remote(parameters(config), about, to_yaml(config))
    try:
        wait_for_mlflow(tracker, interrupt)
        outcome = train(config, cluster, tracker, shown_on(display, config, span), interrupt, span)
    except RayError as error:
        return None, f"{named(config.max_workers)}: {why_lost(error)}", 1
    ray.kill(tracker)
    if outcome.status == "failed":
        return None, f"{named(config.max_workers)}: {outcome.error}", outcome.exit_code
    if outcome.step_times is None:
        return None, None, 0
    return Row(config.max_workers, config.batch_size, outcome.step_times), None, 0


def wait_for_mlflow(tracker: Any, interrupt: "Interrupt") -> None:
    """MLflow takes seconds of a core to start, which the first steps would lack."""
    import ray

    from app.progress import LOOK_EVERY_S

    while not interrupt.count:
        state: DeliveryState = ray.get(tracker.delivery_state.remote())  # type: ignore[assignment]  # ray's stubs
        if state.all_sent or state.error:
            return
        time.sleep(LOOK_EVERY_S)


def shown_on(display: "Display", config: Config, span: "Span") -> "Display":
    """The same terminal, with a line that tells of the measurement and not of a run's epochs."""
    from app.progress import Display
    from app.tracking import Live

    total = span.warmup + span.steps

    class Shown(Display):
        def show(self, live: Live | None) -> None:
            doing = "starting" if live is None else f"step {min(live['step'], total)} of {total}"
            display.waiting(f"{named(config.max_workers)}: {doing}")

        def epoch_ended(self, live: Live) -> None: ...

        def event(self, text: str) -> None:
            display.event(text)

    return Shown()


@contextlib.contextmanager
def removed_afterwards(configs: list[Config]) -> Iterator[None]:
    """Nothing of these runs stays."""
    records = [tracking_directory(run_storage(config).root).parent for config in configs]
    parent = records[0].parent
    existed = parent.exists()
    try:
        yield
    finally:
        for config, folder in zip(configs, records, strict=True):
            if run_storage(config).names(""):
                Storage(config.output_dir).delete_folder(str(config.run_name))
            shutil.rmtree(folder, ignore_errors=True)  # elsewhere, of a run in an object store
        if not existed:
            with contextlib.suppress(OSError):  # somebody else has put something there
                parent.rmdir()


def named(workers: int) -> str:
    return f"{workers} worker{'s' * (workers > 1)}"


def report(
    rows: list[Row], config: Config, command: Command, device: str, out: Path, error: str | None, interrupted: bool
) -> None:
    """The table, the picture, and as stdout's last line the JSON object."""
    from app.progress import console

    written, picture = files_at(out)
    content = {
        "dataset": config.dataset,
        "model": config.model,
        "device": device,
        "scaling": command.scaling,
        "warmup": command.warmup,
        "steps": command.steps,
        "rows": [row.told(rows[0]) for row in rows],
        "files": [str(written), str(picture)] if rows else [],
        "interrupted": interrupted,
        "error": error,
    }
    if rows:
        title = f"{config.model} on {config.dataset}, {device}: {command.steps} steps after {command.warmup}"
        print_table(content["rows"], title)
        by_rank = {named(row.workers): [row.parts_ms(parts) for parts in row.times.by_rank] for row in rows}
        written.write_text(json.dumps(content | {"parts_ms_by_rank": by_rank}, indent=1, allow_nan=False) + "\n")
        draw(content["rows"], title, picture)
        console().print(f"written: {written} and {picture}", markup=False, soft_wrap=True)
    if error is not None:
        print(f"error: {error}", file=sys.stderr)
    print(json.dumps(content, allow_nan=False), flush=True)


def print_table(rows: list[dict[str, Any]], title: str) -> None:
    """A column for each number of workers."""
    from rich.table import Table
    from rich.text import Text

    from app.progress import console

    table = Table(title=Text(title))
    table.add_column("workers")
    for row in rows:
        table.add_column(str(row["workers"]), justify="right")
    table.add_row("samples in a step", *(f"{row['batch_size']:,}" for row in rows))
    table.add_row("samples/s", *(f"{row['samples_per_s']:,.0f}" for row in rows))
    table.add_row("speed-up", *(f"{row['speedup']:.2f}" for row in rows))
    table.add_row("efficiency", *(f"{row['efficiency']:.0%}" for row in rows))
    table.add_section()
    table.add_row("ms a step", *(f"{row['step_ms']:.1f}     " for row in rows))
    for part, name in NAMES.items():
        shares = [(row["parts_ms"][part], row["parts_ms"][part] / row["step_ms"]) for row in rows]
        table.add_row(f"  {name}", *(f"{ms:.1f} {share:4.0%}" for ms, share in shares))
    console().print(table)


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Left the speed, beside the one of which nothing is lost; right the parts of a step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    first, rows = rows[0], sorted(rows, key=lambda row: row["workers"])
    workers = [row["workers"] for row in rows]
    figure, (speed, parts) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    figure.suptitle(title)
    ideal = [first["samples_per_s"] * each / first["workers"] for each in workers]
    speed.plot(workers, ideal, "--", color="grey", label="ideal")
    speed.plot(workers, [row["samples_per_s"] for row in rows], marker="o", label="measured")
    speed.set(xlabel="workers", ylabel="samples/s", xticks=workers)
    speed.set_ylim(bottom=0)
    speed.grid(alpha=0.3)
    speed.legend()
    below = [0.0] * len(rows)
    for part, name in NAMES.items():
        heights = [row["parts_ms"][part] for row in rows]
        parts.bar(range(len(rows)), heights, 0.6, bottom=below, label=name)
        below = [base + height for base, height in zip(below, heights, strict=True)]
    parts.set_xticks(range(len(rows)), [str(each) for each in workers])
    parts.set(xlabel="workers", ylabel="ms a step")
    parts.grid(axis="y", alpha=0.3)
    handles, labels = parts.get_legend_handles_labels()
    parts.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5))  # as the bars are stacked
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    run_main(main)

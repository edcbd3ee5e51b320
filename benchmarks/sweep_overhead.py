"""python -m benchmarks.sweep_overhead [TRIALS]

What a trial with one worker costs beside its own training: in a sweep, whose trials share a process, and
with a TorchTrainer of its own, as Ray's examples nest one in each trial.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from app.cluster import connected, set_environment
from app.config import Config
from app.interrupt import Interrupt
from app.progress import Display, console
from app.runs import resolved, tracking_directory
from tune.ledger import read_trials

SETTINGS: dict[str, Any] = {"epochs": 2, "tracking_uri": "none", "model": "mnist-cnn"}


def in_a_sweep(trials: int, folder: Path) -> list[float]:
    """Seconds beside the training, of each trial."""
    (folder / "space.yaml").write_text("lr: {loguniform: [1e-3, 1e-2]}\n")
    flags = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words = ["--space", str(folder / "space.yaml"), "--num-trials", str(trials), "--max-concurrent", "1"]
    command = [sys.executable, "-m", "tune.sweep", *words, "--sweep-name", "s", "--output-dir", str(folder), *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = read_trials(tracking_directory(str(folder / "s")) / "trials")
    return [found[number].seconds - found[number].train_seconds for number in sorted(found)]


def with_a_trainer_each(trials: int, folder: Path) -> list[float]:
    """The same, Ray being there already: the run's Tracker, a TorchTrainer, and its end."""
    from app.attempts import train
    from app.fit import begin, concluded, start_tracker

    set_environment()
    costs = []
    first = resolved(Config(run_name="t0", output_dir=str(folder), **SETTINGS))
    with connected(first, verbose=False) as cluster, Display() as display:
        for number in range(trials):
            config = first.model_copy(update={"run_name": f"t{number}"})
            began = time.perf_counter()
            begin(config, None)
            tracker = start_tracker(config, None)
            outcome = train(config, cluster, tracker, display, Interrupt())
            concluded(config, outcome, None, time.perf_counter() - began)
            costs.append(time.perf_counter() - began - outcome.train_seconds)
    return costs


def main() -> None:
    from rich.table import Table

    trials = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    with tempfile.TemporaryDirectory() as folder:
        nested = with_a_trainer_each(trials, Path(folder))
        reused = in_a_sweep(trials, Path(folder))
    table = Table(title="seconds of a trial beside its training, one worker, one trial at a time")
    for column in ("", "first", "median of the others", "all"):
        table.add_column(column, justify="left" if not column else "right")
    for name, costs in (("in a sweep", reused), ("a TorchTrainer each", nested)):
        each = ", ".join(f"{cost:.1f}" for cost in costs)
        table.add_row(name, f"{costs[0]:.1f}", f"{statistics.median(costs[1:]):.1f}", each)
    console().print(table)
    print(json.dumps({"sweep": reused, "trainer": nested}))


if __name__ == "__main__":
    main()

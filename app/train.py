"""python -m app.train --num-workers 2

Parse, check, train on Ray, and say how it ended: a table for the person, then one JSON line for programs.
"""

import sys
from collections.abc import Sequence

import psutil
from pydantic import BaseModel, Field

from app.cli import parse_config, run_main
from app.config_file import to_yaml
from app.runs import Summary, resolved
from app.storage import without_credentials


class Command(BaseModel):
    """What to do."""

    config: str | None = Field(None, description="YAML file with settings; flags override it.")
    print_config: bool = Field(False, description="Print the resolved settings as YAML and exit.")
    start_over: bool = Field(
        False, description="Discard the run of this name, its checkpoints and its record, and train from the beginning."
    )
    dry_run: bool = Field(False, description="Check settings, data, model, storage and cluster, and exit.")
    verbose: bool = Field(False, description="Show Ray's own messages too (-v).")


def main(argv: Sequence[str]) -> int:
    argv = ["--verbose" if word == "-v" else word for word in argv]
    config, command = parse_config(argv, Command, "python -m app.train", "Train a classifier on Ray.")
    if command.print_config:
        shown = resolved(config)
        uri = without_credentials(shown.tracking_uri or "")
        print(to_yaml(shown.model_copy(update={"tracking_uri": uri})), end="")
        return 0

    # From here on it takes seconds: what the settings alone can tell is known.
    if command.dry_run:
        from app.preflight import check

        return check(resolved(config), command.verbose)
    from app.fit import fit

    summary, exit_code = fit(config, command.verbose, command.start_over, psutil.Process().create_time())
    report(summary)
    return exit_code


def report(summary: Summary) -> None:
    """The table, and as stdout's last line the JSON object."""
    from app.progress import print_table

    rows = {"run": summary.run_name, "status": summary.status, "steps": f"{summary.step:,} in {summary.epoch} epochs"}
    if summary.samples_per_s is not None:
        rows["samples/s"] = f"{summary.samples_per_s:,.0f}"
    rows |= {name: f"{value:.4f}" for name, value in summary.metrics.items()}
    rows["best checkpoint"] = summary.checkpoint or "none"
    rows["MLflow run"] = summary.run_id or "none"
    print_table(rows)
    if summary.error is not None:
        print(f"error: {summary.error}", file=sys.stderr)
    print(summary.to_json(), flush=True)


if __name__ == "__main__":
    run_main(main)

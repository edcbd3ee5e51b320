"""What a sweep is told to do, and that the same sweep goes on with the same."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro
from pydantic import BaseModel, ConfigDict, Field

from app.config import Config, effect_of, flag
from app.errors import BadInput
from app.runs import SWEEP, read_run, refuse_changes, run_storage
from app.storage import Storage
from tune.ledger import METRICS, Trial, ledger_directory, trial_name
from tune.space import Space, Value, planned

# What may change while training goes on: it decides neither the network nor the order of the samples.
MUTABLE = ("lr", "weight_decay", "momentum", "label_smoothing", "grad_clip", "mixup", "cutmix", "dropout", "augment")
DEFAULT_TRIALS = 10
# Options that may differ when a sweep is gone on with.
FREE = ("max_concurrent", "register_as", "num_trials")


class Options(BaseModel):
    """How to search."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_trials: int | None = Field(
        default=None,
        description="Trials; of a space with a grid, for each of its points. Default: 10; of search grid, all.",
    )
    search: Literal["random", "grid", "optuna"] = Field(default="random", description="Where the settings come from.")
    scheduler: Literal["none", "asha", "pbt", "median"] = Field(
        default="none", description="Which trials are given up early (asha, median), or go on from better ones (pbt)."
    )
    metric: str = Field(default="val/accuracy", description="What is best: val/accuracy or val/loss.")
    mode: Literal["max", "min"] | None = Field(default=None, description="Follows from the metric.")
    grace_epochs: float = Field(
        default=1.0, description="Of asha and median: epochs, or a part, before a trial is given up."
    )
    reduction_factor: float = Field(default=3.0, description="Of asha: one in so many goes on at each rung.")
    perturb_epochs: float = Field(
        default=1.0, description="Of pbt: epochs after which bad trials go on from good ones."
    )
    max_concurrent: int | None = Field(
        default=None, description="Trials at once. Default: as many as there is room for."
    )
    # pydantic's own models have a register() already
    register_as: Annotated[str | None, tyro.conf.arg(name="register")] = Field(
        default=None, description="Register the best model in MLflow by this name, as champion."
    )


@dataclass(frozen=True)
class Plan:
    """What a sweep tries out, and how. settings: each trial's, where they are known beforehand."""

    options: Options
    space: Space
    base: Config
    settings: tuple[dict[str, Value], ...] | None

    @property
    def count(self) -> int:
        return (self.options.num_trials or DEFAULT_TRIALS) if self.settings is None else len(self.settings)


def make_plan(options: Options, space: Space, base: Config) -> Plan:
    """Raises BadInput for what does not fit together."""
    check_options(options, space, base)
    if options.search == "optuna":
        return Plan(options, space, base, None)
    return Plan(options, space, base, tuple(planned(space, base, options.search, options.num_trials or DEFAULT_TRIALS)))


def check_options(options: Options, space: Space, base: Config) -> None:
    """Raises BadInput for options that do not fit together, with the space or with the settings."""
    if options.metric not in METRICS:
        raise BadInput(f"--metric {options.metric}: allowed are {', '.join(METRICS)}")
    if options.mode is not None and options.mode != METRICS[options.metric]:
        raise BadInput(
            f"--mode {options.mode}: of {options.metric} the {METRICS[options.metric]} is best; leave it out"
        )
    for name, least in (("num_trials", 1), ("max_concurrent", 1), ("reduction_factor", 1.001)):
        value = getattr(options, name)
        if value is not None and not value >= least:
            raise BadInput(f"{flag(name)} {value}: must be at least {least:g}")
    every = 1.0 if base.validate_every is None else 0.0
    for name, schedulers in (("grace_epochs", ("asha", "median")), ("perturb_epochs", ("pbt",))):
        value = getattr(options, name)
        if options.scheduler in schedulers and not max(every, 1e-9) <= value < base.epochs:
            raise BadInput(
                f"{flag(name)} {value:g}: must be at least 1 epoch, or a part of one with --validate-every, "
                f"and less than --epochs {base.epochs}"
            )
    if options.search == "grid":
        if ranges := [dimension for dimension in space.dimensions if not dimension.is_list]:
            first = ranges[0]
            raise BadInput(
                f"--space {space.path}, line {first.line}: {first.name} is a {first.kind}, and --search grid goes "
                "through lists (grid, choice): use --search random"
            )
        if options.num_trials is not None:
            raise BadInput(f"--num-trials {options.num_trials}: --search grid has each point once; leave it out")
    elif options.search == "optuna" and space.grid:
        first = space.grid[0]
        raise BadInput(f"--space {space.path}, line {first.line}: --search optuna chooses {first.name}: write choice")
    if options.scheduler == "pbt":
        _check_population(options, space, base)


def _check_population(options: Options, space: Space, base: Config) -> None:
    if options.search != "random" or space.grid:
        raise BadInput("--scheduler pbt changes settings by chance as it goes: use --search random, and no grid")
    if options.max_concurrent is not None:
        raise BadInput(f"--max-concurrent {options.max_concurrent}: --scheduler pbt takes turns; leave it out")
    if (options.num_trials or DEFAULT_TRIALS) < 2:
        raise BadInput("--num-trials: --scheduler pbt needs two or more trials, which learn from one another")
    if base.checkpoint_every is not None:
        raise BadInput("--checkpoint-every: --scheduler pbt hands on the checkpoint of each validation; leave it out")
    for dimension in space.dimensions:
        where = f"--space {space.path}, line {dimension.line}: {dimension.name}"
        if dimension.name not in MUTABLE:
            raise BadInput(f"{where} cannot change while a trial goes on; --scheduler pbt takes {', '.join(MUTABLE)}")
        if dimension.when:
            raise BadInput(f"{where}: --scheduler pbt takes no when")


def open_sweep(options: Options, space: Space, base: Config) -> None:
    """Write down what the sweep is. Raises BadInput if the one of this name is another one."""
    storage = run_storage(base)
    content = {"options": options.model_dump(), "space": space.text, "config": base.model_dump()}
    known = read_sweep(storage)
    if known is None and read_run(storage) is not None:
        raise BadInput(f"--sweep-name {base.run_name}: {storage.root} is a run's; choose another name")
    if known is not None:
        refuse_changes(known["config"], base)
        before = known["options"]
        lines = [
            f"  {flag(name)}: it has {getattr(before, name)}, you gave {getattr(options, name)}"
            for name in Options.model_fields
            if name not in FREE and getattr(before, name) != getattr(options, name)
        ]
        lines += [
            f"  {flag(name)}: it has {getattr(known['config'], name)}, you gave {getattr(base, name)} "
            "(trials that have ended would be compared with longer ones)"
            for name in Config.model_fields
            if effect_of(name) == "length" and getattr(known["config"], name) != getattr(base, name)
        ]
        if known["space"] != space.text:
            lines.append(f"  --space: {space.path} has changed since")
        if (before.num_trials or DEFAULT_TRIALS) > (options.num_trials or DEFAULT_TRIALS):
            lines.append(f"  --num-trials: it has {before.num_trials or DEFAULT_TRIALS}, and they can only become more")
        if lines:
            raise BadInput(
                f"--sweep-name {base.run_name} exists, and is another sweep:\n" + "\n".join(lines) + "\n"
                "Give what it has to go on with it, or another --sweep-name"
            )
    content["registered"] = known["registered"] if known is not None else None
    storage.write(SWEEP, json.dumps(content | {"status": "running"}, indent=1).encode())


def refuse_lost_records(storage: Storage, trials: dict[int, Trial], name: str) -> None:
    """The ledger of a sweep in an object store lies where it was started. Raises BadInput if it is elsewhere."""
    if not trials and any(trial_name(number) in storage.names("") for number in range(DEFAULT_TRIALS)):
        raise BadInput(
            f"--sweep-name {name}: {storage.root} has trials, and {ledger_directory(storage)} has no record of them; "
            "start it where it was started before, or choose another name"
        )


def end_sweep(storage: Storage, status: str, registered: list[str] | None) -> None:
    """Write down how it ended, and the checkpoint and the name that a model was last registered from and by."""
    content = json.loads(storage.read(SWEEP) or b"{}")
    storage.write(SWEEP, json.dumps(content | {"status": status, "registered": registered}, indent=1).encode())


def read_sweep(storage: Storage) -> dict[str, Any] | None:
    """Raises BadInput if it cannot be used."""
    data = storage.read(SWEEP)
    if data is None:
        return None
    try:
        content = json.loads(data)
        return {
            "options": Options(**content["options"]),
            "config": Config(**content["config"]),
            "space": content["space"],
            "status": content["status"],
            "registered": content["registered"],
        }
    except (ValueError, KeyError, TypeError, BadInput) as error:
        raise BadInput(f"{storage.uri(SWEEP)} cannot be used ({error}); restore it, or start afresh") from None

"""A run's name is its identity: start it, go on with it, or say that it is finished."""

import hashlib
import json
import os
import re
import secrets
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from app.config import (
    TEXT_DATASETS,
    TOKENIZERS,
    WEIGHTS_SUFFIXES,
    WITHOUT_FILES,
    Config,
    effect_of,
    flag,
    is_weights_file,
    is_weights_path,
)
from app.errors import BadInput
from app.storage import Storage, refuse_secrets, without_credentials

RUN, TOKENIZER, SWEEP = "run.json", "tokenizer.json", "sweep.json"
RAY_SNAPSHOT = "checkpoint_manager_snapshot.json"
CHECKPOINT = re.compile(r"checkpoint-\d{9,}")
TRACKING_SCHEMES = ("http", "https", "databricks", "sqlite", "postgresql", "mysql", "mssql")
# paused: between two attempts of the same command; stopped: a trial that its sweep gave up
Status = Literal["running", "paused", "finished", "stopped", "failed", "killed"]
LENGTH_DEPENDENT_SCHEDULES = ("cosine", "linear")


@dataclass(frozen=True)
class Summary:
    """How a run ended: the JSON line for programs.

    checkpoint: the best one, a folder; epoch: epochs begun; metrics: of the best checkpoint. seconds: wall clock of the
    command; train_seconds: time in the run's training steps, over all its commands, each step counted once.
    """

    run_name: str
    run_id: str | None
    status: Status
    checkpoint: str | None
    epoch: int
    step: int
    samples_seen: int
    samples_per_s: float | None
    seconds: float | None = None
    train_seconds: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    error: str | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False)


@dataclass(frozen=True)
class Run:
    """run.json: what the run is, and how it stands."""

    config: Config
    status: Status
    summary: Summary | None = None


def resolved(config: Config) -> Config:
    """The config with a run name, and with paths that mean the same in every process."""
    for name, value in config:
        if name != "tracking_uri":  # which is written down without them
            refuse_secrets(flag(name), str(value))
    data_dir, weights = config.data_dir, config.weights
    if data_dir is not None:
        data_dir = absolute(data_dir)
    elif config.dataset not in WITHOUT_FILES and ":" not in config.dataset:
        data_dir = os.path.abspath("data")
    uri = config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
    if uri.startswith("sqlite:///") and not uri.startswith("sqlite:////"):
        uri = "sqlite:///" + os.path.abspath(uri.removeprefix("sqlite:///"))
    elif uri != "none" and uri.partition("://")[0].partition("+")[0] not in TRACKING_SCHEMES:
        raise BadInput(
            f"--tracking-uri {uri}: allowed are http(s)://SERVER, a database such as sqlite:///mlflow.db, and none"
        )
    if weights is not None and is_weights_path(weights):
        weights = absolute(weights)
        if not is_weights_file(weights):
            _refuse_without_checkpoint(weights)
        elif not os.path.isfile(weights):
            raise BadInput(f"--weights {config.weights}: no such file")
    tokenizer = config.tokenizer if config.tokenizer in TOKENIZERS else absolute(config.tokenizer)
    subset_file = os.path.abspath(os.path.expanduser(config.subset_file)) if config.subset_file else None
    return config.model_copy(
        update={
            "run_name": config.run_name or generated_name(config),
            "output_dir": absolute(config.output_dir),
            "data_dir": data_dir,
            "cache_dir": absolute(config.cache_dir) if config.cache_dir else None,
            "weights": weights,
            "tokenizer": tokenizer,
            "subset_file": subset_file,
            "tracking_uri": uri,
        }
    )


def _refuse_without_checkpoint(weights: str) -> None:
    try:
        find_checkpoint(weights)
    except BadInput as error:
        raise BadInput(f"--weights {error}") from None


def absolute(path: str) -> str:
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def generated_name(config: Config) -> str:
    words = [config.dataset, config.model, time.strftime("%m%d-%H%M%S"), secrets.token_hex(2)]
    return "-".join(words).replace(":", ".")


def run_storage(config: Config) -> Storage:
    return Storage(f"{config.output_dir}/{config.run_name}")


def stored_tokenizer(config: Config) -> str | None:
    """The tokenizer that the run began with, as its library's JSON."""
    content = run_storage(config).read(TOKENIZER)
    return None if content is None else content.decode()


def tokenizer_to_go_on_with(config: Config) -> str | None:
    """None for a run that begins, and so makes its own. Raises BadInput where it is lost or damaged."""
    if config.dataset not in TEXT_DATASETS or not checkpoint_names(checkpoint_storage(config)):
        return None
    from app.data.tokens import read_tokenizer  # and with it numpy, which a wrong flag need not wait for

    try:
        if (tokenizer := stored_tokenizer(config)) is None:
            raise BadInput("it is missing")
        read_tokenizer(tokenizer)
    except (BadInput, UnicodeDecodeError) as error:
        raise BadInput(
            f"--run-name {config.run_name} can only go on with its tokenizer, {run_storage(config).uri(TOKENIZER)}: "
            f'{error}; restore it: a checkpoint has it in state.json, as "data", "tokenizer"'
        ) from None
    return tokenizer


def store_tokenizer(config: Config, tokenizer: str) -> None:
    run_storage(config).write(TOKENIZER, tokenizer.encode())


def checkpoint_storage(config: Config) -> Storage:
    return Storage(f"{config.output_dir}/{config.run_name}/checkpoints")


def checkpoint_name(step: int) -> str:
    return f"checkpoint-{step:09d}"


def checkpoint_names(storage: Storage) -> list[str]:
    """The checkpoints in a run's checkpoint storage, oldest first, good or not. Other names are not ours."""
    return [name for name in storage.names("") if CHECKPOINT.fullmatch(name)]


def step_of(checkpoint: str) -> int:
    return int(checkpoint.removeprefix("checkpoint-"))


def tracking_directory(run_root: str) -> Path:
    """Where the spool lies: with the run's files, or below ./runs when these are in an object store.

    The latter has a digest in its name, since runs of the same name may lie in several stores.
    """
    if "://" not in run_root:
        return Path(run_root) / "tracking"
    digest = hashlib.sha256(run_root.encode()).hexdigest()[:8]
    return Path("runs", Path(run_root).name, f"tracking-{digest}").resolve()


def read_run(storage: Storage) -> Run | None:
    """run.json; None if there is none. Raises BadInput if it cannot be used."""
    data = storage.read(RUN)
    if data is None:
        return None
    try:
        content: dict[str, Any] = json.loads(data)
        summary = content["summary"]
        return Run(Config(**content["config"]), content["status"], Summary(**summary) if summary else None)
    except (ValueError, KeyError, TypeError, BadInput) as error:
        raise BadInput(
            f"{storage.uri(RUN)} cannot be used ({error}); restore it, or start afresh with another --run-name"
        ) from None


def find_checkpoint(given: str) -> str:
    """The folder of the checkpoint that a person means by a run, its name, or a checkpoint."""
    if ".." in given.replace("\\", "/").split("/"):
        raise BadInput(f"{given}: name the run or the checkpoint by a path without '..'")
    refuse_secrets(without_credentials(given), given)
    root = given.rstrip("/") if "://" in given else os.path.abspath(given)
    for path in (root, os.path.abspath(os.path.join("runs", given))):
        storage = Storage(path, "checkpoint")
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
    raise BadInput(
        f"{given} is no run's folder, no run below ./runs, no checkpoint's folder, and no file of weights "
        f"({', '.join(WEIGHTS_SUFFIXES)})"
    )


def write_run(run: Run) -> None:
    content = {
        "status": run.status,
        "summary": asdict(run.summary) if run.summary else None,
        "config": run.config.model_dump(),
    }
    run_storage(run.config).write(RUN, json.dumps(content, indent=1, allow_nan=False).encode())


def open_run(config: Config) -> Run:
    """Return the run by this name, ready to continue, or a new one.

    A finished run that has nothing left to do comes back as finished, whether its checkpoints are still there or not.
    Raises BadInput where the config would change the result of the run that has this name, and where the checkpoints
    to continue from were removed. A run that ended before its first step never began: its name is free for any config.
    """
    _refuse_sweep(config)
    known, names = read_run(run_storage(config)), checkpoint_names(checkpoint_storage(config))
    if not names and not _has_trained(known):
        return Run(config, "running")
    if known is None:
        raise BadInput(
            f"--run-name {config.run_name}: {checkpoint_storage(config).root} has checkpoints, but there is no "
            "run.json that says what they are of; restore it, or choose another --run-name"
        )
    refuse_changes(known.config, config)
    longer = any(getattr(known.config, name) != getattr(config, name) for name in length_fields())
    if known.status == "finished" and not longer:
        return known
    if not names:
        raise BadInput(
            f"--run-name {config.run_name} is {known.status}, and its checkpoints in {checkpoint_storage(config).root} "
            "are gone: restore them, choose another --run-name, or discard the run with --start-over"
        )
    return Run(config, "running")


def _refuse_sweep(config: Config) -> None:
    if SWEEP in run_storage(config).names(""):
        raise BadInput(f"--run-name {config.run_name}: {run_storage(config).root} is a sweep's; choose another name")


def _has_trained(run: Run | None) -> bool:
    """Return True if run.json says that the run has made a step, or is finished."""
    return run is not None and run.summary is not None and (run.summary.step > 0 or run.status == "finished")


def discard_run(config: Config) -> None:
    """Delete a run's checkpoints and records, so that its name is free. Raises BadInput for a sweep's name."""
    _refuse_sweep(config)
    root, tracking = run_storage(config), tracking_directory(run_storage(config).root)
    # run.json last: a deletion that is broken off is then refused or repeated, never taken for a new run
    for name in ("checkpoints", "mlflow.json", TOKENIZER, RUN):
        if name not in root.names(""):
            continue
        if name == "checkpoints":
            root.delete_folder(name)
        else:
            root.delete(name)
    if tracking.exists():
        shutil.rmtree(tracking)


def length_fields() -> list[str]:
    return [name for name in Config.model_fields if effect_of(name) == "length"]


def refuse_changes(old: Config, new: Config) -> None:
    """Raise BadInput, with both values, for every field that differs and would change the result."""
    lines = []
    for name in Config.model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if before == after or effect_of(name) == "free":
            continue
        note = ""
        if effect_of(name) == "length":
            raised = after is None or (before is not None and after > before)
            if raised and not (name in ("epochs", "max_steps") and old.schedule in LENGTH_DEPENDENT_SCHEDULES):
                continue
            note = " (it can only be raised)"
            if raised:
                note = f" (--schedule {old.schedule} depends on it: the steps already done would have been different)"
        lines.append(f"  {flag(name)}: it has {before}, you gave {after}{note}")
    if lines:
        raise BadInput(
            f"--run-name {old.run_name} exists, with settings that give another result:\n" + "\n".join(lines) + "\n"
            "Give its settings to go on with it, or another --run-name to start afresh"
        )


def remove_leftovers(config: Config) -> None:
    """Half-written checkpoints of a process that was killed, and Ray Train's list of checkpoints, which is none
    of ours and keeps Ray from starting when it is damaged."""
    storage = checkpoint_storage(config)
    if RAY_SNAPSHOT in run_storage(config).names(""):
        run_storage(config).delete(RAY_SNAPSHOT)
    if storage.local and storage.local.is_dir():
        for folder in storage.local.glob(".unfinished-*"):
            shutil.rmtree(folder)


def forget_if_not_begun(config: Config) -> None:
    """Remove the records of a run that has made no step. To be called before there is a Tracker."""
    if not checkpoint_names(checkpoint_storage(config)) and not _has_trained(read_run(run_storage(config))):
        root = run_storage(config)
        shutil.rmtree(tracking_directory(root.root), ignore_errors=True)
        for name in {"mlflow.json", "record.jsonl", TOKENIZER}.intersection(root.names("")):
            root.delete(name)

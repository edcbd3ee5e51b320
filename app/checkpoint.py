"""Checkpoints: save, verify, find the newest good one, load.

A checkpoint is a folder:
    model.safetensors   the weights that are evaluated, by the plain network's names (no 'module.')
    trainer.pt          optimizer state, and the trained weights where model.safetensors is their average
    state.json          position, best so far, config, classes, preprocessing, format version
    record.jsonl        in an object store: what resuming the run's record takes (app/record.py)
    manifest.json       size and SHA-256 of the others, written last
Nothing of it is unpickled: safetensors, JSON, and torch.load(weights_only=True).
"""

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import nn

from app.config import Config
from app.data.samples import DataInfo
from app.errors import BadInput, TrainingFailed, Unavailable
from app.metrics import Window
from app.record import RECORD
from app.retry import describe, is_transient, retry
from app.runs import checkpoint_name, checkpoint_names, step_of
from app.storage import Storage
from app.weights import of_no_use

FORMAT_VERSION = 5
T = TypeVar("T")
MODEL, TRAINER, STATE, MANIFEST = "model.safetensors", "trainer.pt", "state.json", "manifest.json"


@dataclass
class Best:
    """The best validation so far, by accuracy, then by loss, which is None before the first."""

    step: int = 0
    accuracy: float = 0.0
    loss: float | None = None
    epochs_since: int = 0

    def metrics(self) -> dict[str, float]:
        return {"val/accuracy": self.accuracy, "val/loss": self.loss} if self.loss is not None else {}

    def update(self, step: int, accuracy: float, loss: float, epoch_ended: bool = True) -> bool:
        better = self.loss is None or (accuracy, -loss) > (self.accuracy, -self.loss)
        if better:
            self.step, self.accuracy, self.loss, self.epochs_since = step, accuracy, loss, 0
        else:
            self.epochs_since += epoch_ended
        return better


@dataclass
class Position:
    """Where a run stands: after `step` steps. All of it a resumed run needs beside weights and optimizer.

    epoch: epochs begun. epoch_window: the steps of the current epoch. train_seconds: in training steps, each counted
    once. order: the digest of the order of samples that the steps are steps in.
    bad_samples: of the epoch, those up to here that could not be read. samples_per_pass: the most that a worker
    computed at a time in the last step, and so had the memory for.
    """

    step: int = 0
    best: Best = field(default_factory=Best)
    window: Window = field(default_factory=Window)
    epoch: int = 0
    samples_seen: int = 0
    order: str = ""
    bad_samples: int = 0
    samples_per_pass: int = 0
    epoch_window: Window = field(default_factory=Window)
    train_seconds: float = 0.0


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint, its tensors on the CPU."""

    path: str
    config: Config
    info: DataInfo
    position: Position
    model: dict[str, torch.Tensor]
    trainer: dict[str, Any]

    def refuse_other_order(self, digest: str) -> None:
        """Raise BadInput unless a step of the order with this digest has the samples that it had in training."""
        if digest != self.position.order:
            raise BadInput(
                f"{self.path} was trained on samples in another order: the labels, or what --sampler "
                f"{self.config.sampler} goes by (weights, lengths, shapes, chosen ids), have changed since; "
                "restore them, or start afresh with another --run-name"
            )


def refuse_other_data(path: str, trained_on: DataInfo, info: DataInfo) -> None:
    """Raise BadInput unless what the path holds was trained on data of this kind."""
    pairs = zip(asdict(trained_on).items(), asdict(info).values(), strict=True)
    differing = [
        f"{name}: it has {str(old)[:200]}, this is {str(new)[:200]}" for (name, old), new in pairs if old != new
    ]
    if differing:
        raise BadInput("\n  ".join([f"{path} was trained on other data:", *differing]))


def snapshot(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies on the CPU, contiguous and sharing no memory, as safetensors wants them."""
    return {
        name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def _to_cpu(value: Any) -> Any:
    """A nested state dict with its tensors copied to the CPU; strides are kept."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _to_cpu(item) for key, item in value.items()}
    return [_to_cpu(item) for item in value] if isinstance(value, list) else value


class CheckpointWriter:
    """Writes checkpoints beside the training: save() copies the tensors and returns.

    One checkpoint is under way at a time. One that fails raises at the next save() or wait(), which leaving the
    context calls: Unavailable if storage did not take it for a while, else TrainingFailed. Older ones are deleted
    after a new one is whole: the best and the newest stay. One that cannot be deleted is a warning: warn(text).
    One rank of a run is enabled, the others save nothing.
    """

    def __init__(
        self,
        storage: Storage,
        config: Config,
        info: DataInfo,
        before_publish: Callable[[], bytes | None] = lambda: None,
        saved: Callable[[int, float], None] = lambda step, seconds: None,
        warn: Callable[[str], None] = print,
        enabled: bool = True,
    ):
        """before_publish: makes the run's record durable, and returns what the checkpoint is to have of it."""
        self._storage, self._config, self._info = storage, config, info
        self._before_publish, self._saved, self._warn, self._enabled = before_publish, saved, warn, enabled
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.wait()

    def save(
        self, position: Position, network: nn.Module, optimizer: torch.optim.Optimizer, ema: nn.Module | None = None
    ) -> None:
        if not self._enabled:
            return
        self.wait()
        trainer = {"optimizer": _to_cpu(optimizer.state_dict())}
        if ema is not None:
            trainer["trained_weights"] = _to_cpu(network.state_dict())
        weights = snapshot((network if ema is None else ema).state_dict())
        parameters = {name for name, _ in network.named_parameters()}
        state = {
            "format_version": FORMAT_VERSION,
            **asdict(position),
            "config": self._config.model_dump(),
            "data": asdict(self._info),
        }
        self._thread = threading.Thread(
            target=self._write,
            args=(position.step, position.best.step, weights, parameters, trainer, state),
            name="checkpoint",
        )
        self._thread.start()

    def wait(self) -> None:
        """Return when the last checkpoint is whole."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            kind = Unavailable if is_transient(error) else TrainingFailed
            raise kind(
                f"a checkpoint could not be saved to {self._storage.root}: {error}; the earlier ones are untouched"
            ) from error

    def _write(
        self, step: int, best_step: int, weights: Any, parameters: set[str], trainer: Any, state: dict[str, Any]
    ) -> None:
        folder, began = None, time.perf_counter()
        try:
            for name, tensor in weights.items():
                if trouble := of_no_use(tensor, tensor.is_floating_point(), name in parameters):
                    raise ValueError(f"after step {step} {name} {trouble}")
            folder = self._storage.new_folder()
            retry(partial(write_folder, folder, weights, trainer, state), f"writing {folder}")
            if (record := self._before_publish()) is not None:
                retry(partial(put_record, folder, record), f"writing {folder}")
            self._storage.put_folder(folder, checkpoint_name(step), last=MANIFEST)
            self._prune(checkpoint_name(best_step))
            self._saved(step, time.perf_counter() - began)
        except Exception as error:  # handed to the training thread, which raises it
            self._error = error
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def discard_after(self, step: int) -> None:
        """Remove checkpoints of later steps. The run goes on from here, so they were no good ones, and
        would pass for the newest."""
        if self._enabled:
            self._delete([name for name in checkpoint_names(self._storage) if step_of(name) > step])

    def _prune(self, best: str) -> None:
        try:
            names = checkpoint_names(self._storage)
        except (OSError, BadInput, Unavailable) as error:
            self._warn(f"old checkpoints in {self._storage.root} could not be listed: {describe(error)}")
            return
        newest = [name for name in names if name != best][-(self._config.keep_checkpoints - (best in names)) :]
        self._delete([name for name in names if name != best and name not in newest])

    def _delete(self, names: Sequence[str]) -> None:
        """A checkpoint that stays takes room and does no harm: the next call tries again."""
        for name in names:
            try:
                self._storage.delete_folder(name)
            except (OSError, BadInput, Unavailable) as error:
                self._warn(f"{self._storage.uri(name)} could not be deleted: {describe(error)}")


def write_folder(folder: Path, weights: dict[str, torch.Tensor], trainer: Any, state: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    save_file(weights, folder / MODEL)
    torch.save(trainer, folder / TRAINER)
    (folder / STATE).write_text(json.dumps(state, indent=1, allow_nan=False))
    manifest = {name: _size_and_digest(folder / name) for name in (MODEL, TRAINER, STATE)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def put_record(folder: Path, record: bytes) -> None:
    """Add the run's record to a checkpoint folder that is not published yet, or replace another run's."""
    (folder / RECORD).write_bytes(record)
    manifest = json.loads((folder / MANIFEST).read_text()) | {RECORD: _size_and_digest(folder / RECORD)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _size_and_digest(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def problem_with(folder: Path) -> str | None:
    """Return what is wrong with a checkpoint folder, or None if every file is what the manifest says.

    Only content that was read, or a file that is missing, makes a checkpoint damaged. Raises Unavailable where
    reading keeps failing, and BadInput where it is not allowed: the checkpoint may be good.
    """
    try:
        manifest = json.loads(_readable(folder / MANIFEST, Path.read_bytes))
        for name in (MODEL, TRAINER, STATE, *{RECORD}.intersection(manifest)):
            expected, path = manifest[name], folder / name
            if (size := _readable(path, Path.stat).st_size) != expected["size"]:
                return f"{name} has {size} bytes instead of {expected['size']}"
            if _readable(path, _sha256) != expected["sha256"]:
                return f"{name} was changed after it was written (SHA-256 differs)"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be used: {error!r}"
    return None


def _readable(path: Path, read: Callable[[Path], T]) -> T:
    """Return read(path). Raises FileNotFoundError, Unavailable, and BadInput for any other error of the system."""
    try:
        return retry(lambda: read(path), f"reading {path}")
    except NotADirectoryError as error:
        raise FileNotFoundError(error.errno, error.strerror, str(path.parent)) from error
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({describe(error)}): make it readable, and try again") from error


def find_good(storage: Storage, warn: Callable[[str], None], prefer: str | None = None) -> str | None:
    """Return the checkpoint `prefer`, or else the newest one, that is good; None if there is no checkpoint at all.

    Calls warn(text) for each that is damaged. Raises BadInput, listing them, if there are checkpoints and all are
    damaged, and Unavailable if one cannot be read at the moment: nothing is known of it then, so an older one must
    not take its place.
    """
    newest_first = checkpoint_names(storage)[::-1]
    problems = []
    for name in sorted(newest_first, key=lambda name: name != prefer):  # a stable sort
        with storage.local_folder(name) as folder:
            problem = problem_with(folder)
        if problem is None:
            return name
        problems.append(f"{storage.uri(name)}: {problem}")
        warn(f"skipping {problems[-1]}")
    if problems:
        raise BadInput(
            "\n  ".join(["no checkpoint of this run is valid:", *problems])
            + "\nNothing was deleted. Restore one of them, choose another --run-name, or discard this run and train "
            "from the beginning with --start-over"
        )
    return None


def load_checkpoint(storage: Storage, name: str, info: DataInfo | None = None) -> Checkpoint:
    """The checkpoint in a folder of the storage ("" for the storage itself).

    Raises BadInput for a folder that is no checkpoint, is damaged, has a newer format, or is of other
    data than info; Unavailable if it cannot be read at the moment.
    """
    import pickle

    from safetensors import SafetensorError

    path = storage.uri(name) if name else storage.root
    with storage.local_folder(name) as folder:
        problem = problem_with(folder)
        if problem:
            raise BadInput(f"{path} is no good checkpoint: {problem}")
        try:
            checkpoint = retry(lambda: _read_folder(folder, path), f"reading {path}")
        except (pickle.UnpicklingError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            # The files are what the manifest says, and not what we write: made by somebody else.
            raise BadInput(f"{path} is no checkpoint of ours: {type(error).__name__} in reading it") from error
    if info is not None:
        refuse_other_data(path, checkpoint.info, info)
    return checkpoint


def _read_folder(folder: Path, path: str) -> Checkpoint:
    from safetensors.torch import load_file

    state = json.loads((folder / STATE).read_text())
    if state["format_version"] != FORMAT_VERSION:
        raise BadInput(
            f"{path} has format {state['format_version']}, and this version reads {FORMAT_VERSION}: "
            "use the version that wrote it"
        )
    return Checkpoint(
        path=path,
        config=Config(**state["config"]),
        info=DataInfo(**state["data"]),
        position=Position(
            state["step"],
            Best(**state["best"]),
            Window(**state["window"]),
            state["epoch"],
            state["samples_seen"],
            state["order"],
            state["bad_samples"],
            state["samples_per_pass"],
            Window(**state["epoch_window"]),
            state["train_seconds"],
        ),
        model=load_file(folder / MODEL),
        trainer=torch.load(folder / TRAINER, map_location="cpu", weights_only=True),
    )

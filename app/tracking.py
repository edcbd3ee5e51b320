"""The Tracker: the single writer of a run's record, and the line between its workers and the driver.

Every record is first appended to a file (the spool) and from there delivered to MLflow by a thread,
so a slow or absent server never stops training, nothing is lost, and a run that crashed, resumed or
was resized stays one MLflow run without a repeated step. Workers never import MLflow: it takes
seconds and up to 1 GB in each.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Generic, Literal, TypedDict, TypeVar

import numpy as np

from app.deliver import Target, deliver
from app.errors import BadInput, TrainingFailed
from app.micro_batches import ForwardPass
from app.record import BAD_SAMPLES, restore, snapshot, store_rest
from app.spool import SPOOL, Spool, read_records, sent_offset
from app.storage import Storage

STATE = "tracker.json"
# Seconds between batches, and between tries to reach a server.
BATCH_S, RETRY_S = 1.0, 5.0
# Seconds between what the terminal is told of a training.
LIVE_EVERY_S = 0.5
# The delivery thread's niceness: importing MLflow and making its database takes seconds, in which workers start, whose
# niceness is Ray's 15.
BEHIND_TRAINING = 19
# Kept for a terminal that does not look, of which a sweep's trials have none.
MOST_EVENTS, MOST_EPOCHS = 10_000, 100
# A Tracker that is restarted counts events and validations from a number above those of its earlier process.
PER_START = 10**12
# A sweep's Tracker delivers many runs: pictures and models are not made by two threads at once.
ONE_AT_A_TIME = threading.Lock()


Stop = Literal["killed", "paused"]
T = TypeVar("T")


class Live(TypedDict):
    """What the terminal shows while training goes on."""

    step: int
    total_steps: int
    epoch: int
    epochs: int
    metrics: dict[str, float]


class Validation(TypedDict):
    """A measurement on the val split, after `step` steps."""

    step: int
    epochs: float  # gone through up to here
    metrics: dict[str, float]


@dataclass(frozen=True)
class Progress:
    """Where the run stands; live is None while no worker trains. events: those that were not seen yet, of
    events_seen in all; validations likewise. nodes: the ids of those that workers run on. failures: times
    that workers were lost. epochs: where it stood at each end of an epoch that was not seen yet, of epochs_seen in all.
    stop: what was asked for. hung: the message about a training in the driver's process that hangs."""

    live: Live | None
    events: list[str]
    events_seen: int
    nodes: frozenset[str]
    failures: int = 0
    validations: tuple[Validation, ...] = ()
    validations_seen: int = 0
    stop: Stop | None = None
    hung: str | None = None
    epochs: tuple[Live, ...] = ()
    epochs_seen: int = 0


@dataclass
class State:
    """What a Tracker that is restarted has to know, since nobody repeats it: kept in a file.

    starts: how often a Tracker was started on the folder. failure: message and exit code. unread: validations that
    the driver may not have seen. micro_batch_size: the most samples in a forward pass since one ran out of memory.
    forward_pass: those of the workers that train now; None if it is not known, or ran out of memory.
    """

    starts: int = 0
    stop: Stop | None = None
    failures: int = 0
    failure: tuple[str, int] | None = None
    hung: str | None = None
    nodes: list[str] = field(default_factory=list)
    unread: list[Validation] = field(default_factory=list)
    micro_batch_size: int | None = None
    forward_pass: ForwardPass | None = None

    def save(self, folder: Path) -> None:
        path = os.path.join(folder, STATE)  # a Path is several times as expensive, and this is called often
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            file.write(json.dumps(asdict(self)))
        os.replace(f"{path}.new", path)


def load_state(folder: Path) -> State:
    try:
        state = State(**json.loads((folder / STATE).read_text()))
        if isinstance(state.forward_pass, dict):
            state.forward_pass = ForwardPass(**state.forward_pass)
        return state
    except FileNotFoundError:
        return State()
    except ValueError:  # cut off by a power failure, which has ended the command that it was of
        return State()


class Unread(Generic[T]):
    """What its reader has not seen yet, in order; with `most`, the newest of it. count: of all there ever were, and
    before the first, a number above those of an earlier process."""

    def __init__(self, most: int | None = None, count: int = 0):
        self._held: deque[T] = deque(maxlen=most)
        self.count = count

    def append(self, item: T) -> None:
        self._held.append(item)
        self.count += 1

    def after(self, seen: int) -> list[T]:
        """Those behind the first `seen`. A reader says so once it has them: they are let go of."""
        unseen = self.count - min(seen, self.count)
        while len(self._held) > unseen:
            self._held.popleft()
        return list(self._held)


class Tracker:
    """Records, live progress and the stop flag of one run; a zero-CPU actor beside the driver.

    Its methods are short and run one at a time, in the order of the caller: slow things are the
    delivery thread's. One that is restarted on the same directory knows what the earlier one did.
    tracking_uri None: everything but MLflow. environment: MLflow's, of the driver. parent: of a nested run.
    """

    def __init__(
        self,
        directory: str,
        storage_root: str,
        tracking_uri: str | None,
        experiment: str,
        run_name: str,
        environment: dict[str, str] | None = None,
        parent: Target | None = None,
    ):
        os.environ.update(environment or {})
        self._spool, self._storage, self._run_name = Spool(Path(directory)), Storage(storage_root), run_name
        if not self._storage.local:
            restore(self._spool, self._storage, run_name)
        self._state = load_state(self._spool.directory)
        self._live: Live | None = None
        self._events = Unread[str](most=MOST_EVENTS, count=self._state.starts * PER_START)
        self._validations = Unread[Validation](count=self._state.starts * PER_START)
        for validation in self._state.unread:
            self._validations.append(validation)
        self._epochs = Unread[Live](most=MOST_EPOCHS, count=self._state.starts * PER_START)
        self._raised = False  # in this attempt
        self._state.starts += 1
        self._save()
        self.target, self._delivery = None, None
        if tracking_uri is not None:
            self.target = Target(tracking_uri, experiment, run_name, self._storage, parent)
            self._delivery = Delivery(self._spool.directory, self.target, self.event)

    # called by workers

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._spool.append_metrics(step, values)
        self._wake()

    def system_metrics(self, values: dict[str, float]) -> None:
        """Numbered by themselves: they follow the clock, not the training steps."""
        self._spool.append_metrics(max(map(self._spool.next_step, values)), values)
        self._wake()

    def joined(self, node_id: str) -> None:
        """A node that a worker runs on."""
        if node_id not in self._state.nodes:
            self._state.nodes.append(node_id)
            self._save()

    def live(self, live: Live, epoch_ended: bool = False) -> None:
        self._live = live
        if epoch_ended:
            self._epochs.append(live)

    def validated(self, validation: Validation) -> None:
        self._validations.append(validation)
        self._save()

    def event(self, text: str) -> None:
        """Something that a person should read once."""
        self._events.append(text)

    def unreadable(self, texts: list[str]) -> None:
        """Samples that are skipped: each is said and recorded once, though every epoch meets it again."""
        path = self._spool.directory / BAD_SAMPLES
        known = set(path.read_text().splitlines()) if path.exists() else set()
        # A file's name may be no UTF-8: then it is written, and known again, with its bytes spelled out.
        plain = (text.encode("utf-8", "backslashreplace").decode() for text in texts)
        lines = dict.fromkeys(" ".join(text.split()) for text in plain)
        if fresh := [line for line in lines if line not in known]:
            with path.open("a") as file:
                file.writelines(line + "\n" for line in fresh)
            for line in fresh:
                self.event(f"skipping a sample: {line}")
            self._spool.append("artifact", file=BAD_SAMPLES)
            self._wake()

    def fail(self, message: str, exit_code: int) -> None:
        """Restarting will not help: the next start of the workers ends at once with this message."""
        self._state.failure = self._state.failure or (message, exit_code)
        self._save()

    def failure(self) -> tuple[str, int] | None:
        return None if (failure := self._state.failure) is None else (failure[0], failure[1])  # JSON has no tuples

    def micro_batch_size(self) -> int | None:
        """The most samples in a forward pass since one ran out of memory; None if none did."""
        return self._state.micro_batch_size

    def forward_pass(self, forward_pass: ForwardPass) -> None:
        """Workers are about to train."""
        self._set_forward_pass(forward_pass)

    def saved(self) -> None:
        """A checkpoint of steps of these workers is whole."""
        known = self._state.forward_pass
        if known is not None and known.trained != known.samples:
            self._set_forward_pass(replace(known, trained=known.samples))

    def out_of_memory(self, reason: str = "") -> None:
        """Have the next workers continue from the checkpoint with smaller micro-batches.

        Without a checkpoint of any steps, or with one sample in a forward pass, the run fails. Called for each worker
        that ran out of memory: the first call decides. reason: the error that it raised; empty if it was killed, which
        may be another process's fault, so that a run without steps is started again as it is.
        """
        ran_out = self._state.forward_pass
        if ran_out is None:
            return
        self._set_forward_pass(None)
        detail = f" ({reason})" if reason else ""
        if ran_out.samples == 1:
            self.fail(f"out of memory at {ran_out}{detail}: no micro-batch is smaller; give each worker more memory", 1)
        elif ran_out.trained:
            self._set_forward_pass(None, ran_out.smaller)
            self.event(f"out of memory at {ran_out}: continuing with {ran_out.smaller}")
            self.tags({"micro_batch_size": str(ran_out.smaller)})
        elif reason:
            self.fail(f"out of memory at {ran_out}{detail}; lower --micro-batch-size or --batch-size", 1)

    def _set_forward_pass(self, forward_pass: ForwardPass | None, micro_batch_size: int | None = None) -> None:
        self._state.forward_pass = forward_pass
        self._state.micro_batch_size = micro_batch_size or self._state.micro_batch_size
        self._save()  # where memory runs out, Ray may end the Tracker's process as well

    def hung(self, text: str, stacks: str, in_driver: bool = False) -> None:
        """A worker that makes no steps, with the stacks of its threads."""
        if in_driver:
            self._state.hung = text
            self._save()
        self.event(f"{text}; the stacks are in {self._stacks(text, stacks)}")

    def raised(self, text: str, stack: str) -> None:
        """A worker's exception. Those of the others are often its consequences, and are kept as well."""
        file = self._stacks(text, stack)
        if not self._raised:
            self._raised = True
            self.event(f"the traceback is in {file}")

    def _stacks(self, text: str, stacks: str) -> Path:
        """Keep them."""
        path = self._spool.directory / "stacks.txt"
        with path.open("a") as file:
            file.write(f"{text}\n{stacks}\n")
        return path

    def stop_requested(self) -> Stop | None:
        return self._state.stop

    def pictures(self, **arrays: np.ndarray) -> None:
        """What the final pictures are drawn from; see pictures.draw()."""
        np.savez_compressed(self._spool.directory / "pictures.npz", **arrays)  # type: ignore[arg-type]  # numpy's hint takes one for allow_pickle

    def validations(self) -> list[Validation]:
        """All that were recorded, also by an earlier start. What a checkpoint was saved after is among them."""
        records = (record for record, _ in read_records(self._spool.directory, 0) if record["kind"] == "metrics")
        return [
            Validation(step=record["step"], epochs=values.pop("epoch"), metrics=values)
            for record in records
            if "epoch" in (values := record["values"])
        ]

    def go_back(self, step: int) -> None:
        """Training goes on from another run's checkpoint of this step: what follows is not what was recorded."""
        self._spool.go_back(step)

    def flush(self) -> None:
        """Return when what every earlier call recorded is on the disk."""
        self._spool.sync()

    def snapshot(self) -> bytes | None:
        """As flush(); return what a checkpoint in an object store keeps of the record (app/record.py), None on a
        disk."""
        self._spool.sync()
        return None if self._storage.local else snapshot(self._spool, self._run_name)

    # called by Ray Train's controller

    def workers_lost(self, reason: str, counts: bool, out_of_memory: bool = False) -> None:
        """counts: as a failure, of which a run has --max-failures. out_of_memory: Ray ended one for its memory."""
        self._live, self._state.nodes = None, []
        self._state.failures += counts
        self._save()
        if self._state.failure is None:  # else it is known, and the workers were ended for it
            self.event(reason)
        if out_of_memory:
            self.out_of_memory()

    # called by the driver

    def begin(self, params: dict[str, str], tags: dict[str, str], config_yaml: str) -> None:
        # A sweep begins a trial again in the same process, where it was stopped or died.
        self._validations, self._state = Unread[Validation](), State(starts=self._state.starts)
        self._save()
        self._spool.append("run", params=params, tags=tags)
        self.artifact("config.yaml", config_yaml.encode())

    def start_attempt(self, num_workers: int, tell: bool) -> None:
        """Workers are about to be started, for the first time or again."""
        self._live, self._state.nodes, self._raised = None, [], False
        if self._state.stop == "paused":
            self._state.stop = None
        self._save()
        if tell:
            self.event(f"training on {num_workers} worker{'s' * (num_workers > 1)}")
        self.tags({"world_size": str(num_workers)})

    def tags(self, tags: dict[str, str]) -> None:
        self._spool.append("tags", tags=tags)
        self._wake()

    def artifact(self, name: str, content: bytes) -> None:
        """A file of the run's; name may have a folder before it."""
        path = self._spool.directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        self._spool.append("artifact", file=name)
        self._wake()

    def request_stop(self, how: Stop) -> None:
        """killed: the run is to end after a checkpoint; paused: to go on from it with new workers."""
        if how == "killed" and self._state.stop != "killed":
            # At once, since who asked may not wait for the end; finish() has the last word.
            self._spool.append("status", status="KILLED")
            self._wake()
        if self._state.stop not in (how, "killed"):
            self._state.stop = how
            self._save()

    def progress(self, events_seen: int, validations_seen: int = 0, epochs_seen: int = 0) -> Progress:
        """With what came after the first events_seen events, validations_seen validations and epochs_seen ends of
        epochs, which are forgotten."""
        validations = self._validations.after(validations_seen)
        if len(validations) < len(self._state.unread):
            self._save()
        return Progress(
            self._live,
            self._events.after(events_seen),
            self._events.count,
            frozenset(self._state.nodes),
            self._state.failures,
            tuple(validations),
            self._validations.count,
            self._state.stop,
            self._state.hung,
            tuple(self._epochs.after(epochs_seen)),
            self._epochs.count,
        )

    def finish(self, status: str, checkpoint: str | None) -> None:
        """Record the end, with the best checkpoint as a model; delivery_state() tells when it is delivered."""
        if (self._spool.directory / "pictures.npz").exists():
            self._spool.append("pictures", file="pictures.npz")
        if checkpoint is not None:
            self.model(checkpoint)
        self._spool.append("status", status=status)
        self._wake()

    def model(self, checkpoint: str, register: str | None = None) -> None:
        """Deliver a checkpoint as a model; register: also under this name, as its champion."""
        self._spool.append("model", checkpoint=checkpoint, register=register)
        self._wake()

    def delivery_state(self) -> "DeliveryState":
        return self._delivery.state() if self._delivery is not None else DeliveryState(None, True, "")

    def store_rest(self) -> str | None:
        """Store what is not delivered yet with the run's files, where these are not on this machine's disk. Return
        what is wrong if that cannot be done."""
        if self._storage.local:
            return None
        try:
            store_rest(self._storage, None if self.delivery_state().all_sent else self.snapshot())
        except (OSError, BadInput, TrainingFailed) as error:
            return f"what MLflow has not got is on this machine alone, in {self._spool.directory}: {error}"
        return None

    def close(self) -> None:
        """To be called when all is delivered, and nothing more is to be recorded."""
        if self._delivery is not None:
            self._delivery.close()
        self._spool.close()

    def _save(self) -> None:
        self._state.unread = self._validations.after(0)
        self._state.save(self._spool.directory)

    def _wake(self) -> None:
        if self._delivery is not None:
            self._delivery.wake.set()


@dataclass(frozen=True)
class DeliveryState:
    """error: why the last try failed; empty while the server answers."""

    run_id: str | None
    all_sent: bool
    error: str


class Delivery:
    """A thread that sends the spool's records to MLflow, and tries again while it cannot be reached."""

    def __init__(self, directory: Path, target: "Target", event: Callable[[str], None]):
        self._directory, self._target, self._event, self._error = directory, target, event, ""
        self.wake, self._closed = threading.Event(), False
        self.wake.set()  # an earlier start may have left records
        threading.Thread(target=self._run, name="delivery", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self.wake.set()

    def state(self) -> DeliveryState:
        all_sent = sent_offset(self._directory) >= (self._directory / SPOOL).stat().st_size
        return DeliveryState(self._target.run_id, all_sent, self._error)

    def _run(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            with contextlib.suppress(OSError):  # a container may forbid it: then at the same priority
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), BEHIND_TRAINING)
        while True:
            self.wake.wait()
            if self._closed:
                return
            self.wake.clear()
            try:
                with ONE_AT_A_TIME:
                    deliver(self._directory, self._target, self._event)
                self._error = ""
                pause = BATCH_S
            except Exception as error:  # whatever a server that is not ours does: said, and tried again
                reason = self._target.reason(error)
                if not self._error:
                    self._event(f"MLflow at {self._target.name} cannot be reached; the records are kept: {reason}")
                self._error = reason
                self.wake.set()
                pause = RETRY_S
            time.sleep(pause)

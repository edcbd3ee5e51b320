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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Generic, Literal, TypedDict, TypeVar

import numpy as np

from app.deliver import Target, deliver
from app.micro_batches import ForwardPass
from app.spool import SPOOL, Spool, read_records, sent_offset
from app.storage import Storage

BAD_SAMPLES, FORWARD_PASS = "bad_samples.txt", "forward_pass.json"
# Seconds between batches, and between tries to reach a server.
BATCH_S, RETRY_S = 1.0, 5.0
# Seconds between what the terminal is told of a training.
LIVE_EVERY_S = 0.5
# The delivery thread's niceness: importing MLflow and making its database takes seconds, in which workers start, whose
# niceness is Ray's 15.
BEHIND_TRAINING = 19
# Kept for a terminal that does not look, of which a sweep's trials have none.
MOST_EVENTS, MOST_EPOCHS = 10_000, 100
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
    stop: what was asked for. hung: what is said of a training in the driver's process that hangs."""

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


class Unread(Generic[T]):
    """What its reader has not seen yet, in order; with `most`, the newest of it. count: of all there ever were."""

    def __init__(self, most: int | None = None):
        self._held: deque[T] = deque(maxlen=most)
        self.count = 0

    def append(self, item: T) -> None:
        self._held.append(item)
        self.count += 1

    def after(self, seen: int) -> list[T]:
        """Those behind the first `seen`. A reader says so once it has them: they are let go of."""
        unseen = self.count - min(seen, self.count)  # a Tracker that was restarted has had fewer than were seen
        while len(self._held) > unseen:
            self._held.popleft()
        return list(self._held)


class Tracker:
    """Records, live progress and the stop flag of one run; a zero-CPU actor beside the driver.

    Its methods are short and run one at a time, in the order of the caller: slow things are the
    delivery thread's. tracking_uri None: everything but MLflow. environment: MLflow's, of the driver. parent: of a
    nested run.
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
        self._spool = Spool(Path(directory))
        self._live: Live | None = None
        self._nodes: set[str] = set()
        self._events = Unread[str](most=MOST_EVENTS)
        self._validations = Unread[Validation]()
        self._epochs = Unread[Live](most=MOST_EPOCHS)
        self._failures = 0
        self._stop: Stop | None = None
        self._failure: tuple[str, int] | None = None
        self._recall_forward_pass()
        self._hung: str | None = None
        self._raised = False  # in this attempt
        self.target, self._delivery = None, None
        if tracking_uri is not None:
            self.target = Target(tracking_uri, experiment, run_name, Storage(storage_root), parent)
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
        self._nodes.add(node_id)

    def live(self, live: Live, epoch_ended: bool = False) -> None:
        self._live = live
        if epoch_ended:
            self._epochs.append(live)

    def validated(self, validation: Validation) -> None:
        self._validations.append(validation)

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
        self._failure = self._failure or (message, exit_code)

    def failure(self) -> tuple[str, int] | None:
        return self._failure

    def micro_batch_size(self) -> int | None:
        """The most samples in a forward pass since one ran out of memory; None if none did."""
        return self._micro_batch_size

    def forward_pass(self, forward_pass: ForwardPass) -> None:
        """Workers are about to train."""
        self._set_forward_pass(forward_pass)

    def saved(self) -> None:
        """A checkpoint of steps of these workers is whole."""
        known = self._forward_pass
        if known is not None and known.trained != known.samples:
            self._set_forward_pass(replace(known, trained=known.samples))

    def out_of_memory(self, reason: str = "") -> None:
        """Have the next workers continue from the checkpoint with smaller micro-batches.

        Without a checkpoint of any steps, or with one sample in a forward pass, the run fails. Called for each worker
        that ran out of memory: the first call decides. reason: the error that it raised; empty if it was killed, which
        may be another process's fault, so that a run without steps is started again as it is.
        """
        ran_out = self._forward_pass
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
        """Keep it in a file too: where memory runs out, Ray may end the Tracker's process as well."""
        self._forward_pass = forward_pass
        self._micro_batch_size = micro_batch_size or self._micro_batch_size
        known = {"micro_batch_size": self._micro_batch_size, "forward_pass": forward_pass and asdict(forward_pass)}
        path = self._spool.directory / FORWARD_PASS
        path.with_suffix(".new").write_text(json.dumps(known))
        path.with_suffix(".new").replace(path)

    def _recall_forward_pass(self) -> None:
        self._forward_pass: ForwardPass | None = None  # None: not known, or it ran out of memory
        self._micro_batch_size: int | None = None
        path = self._spool.directory / FORWARD_PASS
        if path.exists():
            known = json.loads(path.read_text())
            self._micro_batch_size = known["micro_batch_size"]
            self._forward_pass = ForwardPass(**known["forward_pass"]) if known["forward_pass"] else None

    def hung(self, text: str, stacks: str, in_driver: bool = False) -> None:
        """A worker that makes no steps, with the stacks of its threads."""
        if in_driver:
            self._hung = text
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
        return self._stop

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
        """Returns when every call made before it is in the spool."""

    # called by Ray Train's controller

    def workers_lost(self, reason: str, counts: bool, out_of_memory: bool = False) -> None:
        """counts: as a failure, of which a run has --max-failures. out_of_memory: Ray ended one for its memory."""
        self._live, self._nodes = None, set()
        self._failures += counts
        if self._failure is None:  # else it is known, and the workers were ended for it
            self.event(reason)
        if out_of_memory:
            self.out_of_memory()

    # called by the driver

    def begin(self, params: dict[str, str], tags: dict[str, str], config_yaml: str) -> None:
        # A sweep begins a trial again in the same process, where it was stopped or died.
        self._stop, self._failure, self._failures, self._validations = None, None, 0, Unread[Validation]()
        self._micro_batch_size = None
        self._set_forward_pass(None)
        self._spool.append("run", params=params, tags=tags)
        self.artifact("config.yaml", config_yaml.encode())

    def start_attempt(self, num_workers: int, tell: bool) -> None:
        """Workers are about to be started, for the first time or again."""
        self._live, self._nodes, self._raised = None, set(), False
        if self._stop == "paused":
            self._stop = None
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
        if how == "killed" and self._stop != "killed":
            # At once, since who asked may not wait for the end; finish() has the last word.
            self._spool.append("status", status="KILLED")
            self._wake()
        if self._stop != "killed":
            self._stop = how

    def progress(self, events_seen: int, validations_seen: int = 0, epochs_seen: int = 0) -> Progress:
        """With what came after the first events_seen events, validations_seen validations and epochs_seen ends of
        epochs, which are forgotten."""
        return Progress(
            self._live,
            self._events.after(events_seen),
            self._events.count,
            frozenset(self._nodes),
            self._failures,
            tuple(self._validations.after(validations_seen)),
            self._validations.count,
            self._stop,
            self._hung,
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

    def close(self) -> None:
        """To be called when all is delivered, and nothing more is to be recorded."""
        if self._delivery is not None:
            self._delivery.close()
        self._spool.close()

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

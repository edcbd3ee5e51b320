"""python -m app.tracking RUN_DIRECTORY    delivers what a run could not deliver to MLflow

The Tracker is the single writer of a run's MLflow record. Every record is first appended to a file
(the spool) and from there delivered by a thread, so a slow or absent server never stops training,
nothing is lost, and a run that crashed, resumed or was resized stays one MLflow run without a
repeated step. Workers never import MLflow: it takes seconds and up to 1 GB in each.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict
from urllib.parse import urlsplit, urlunsplit

import numpy as np

from app.storage import Storage

SPOOL, SENT, RUN = "records.jsonl", "sent.json", "mlflow.json"
# Seconds between batches, and between tries to reach a server.
BATCH_S, RETRY_S = 1.0, 5.0


class Spool:
    """Records in a file, one JSON object a line, each written once.

    A metric's steps only rise: what a resumed run computes again is the same and not recorded again.
    """

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._last_step: dict[str, int] = {}
        path = directory / SPOOL
        if path.exists():
            _cut_torn_line(path)
            for record, _ in read_records(directory, 0):
                if record["kind"] == "metrics":
                    self._last_step.update(dict.fromkeys(record["values"], record["step"]))
        self._file = path.open("a", encoding="utf-8")

    def append(self, kind: str, **content: Any) -> None:
        self._file.write(json.dumps({"kind": kind, "time_ms": int(time.time() * 1000), **content}) + "\n")
        self._file.flush()

    def append_metrics(self, step: int, values: dict[str, float]) -> None:
        fresh = {key: value for key, value in values.items() if step > self._last_step.get(key, -1)}
        if fresh:
            self._last_step.update(dict.fromkeys(fresh, step))
            self.append("metrics", step=step, values=fresh)

    def next_step(self, key: str) -> int:
        return self._last_step.get(key, -1) + 1


def _cut_torn_line(path: Path) -> None:
    """A process killed while writing leaves half a line at the end; nothing after it was written."""
    data = path.read_bytes()
    if not data.endswith(b"\n"):
        path.write_bytes(data[: data.rfind(b"\n") + 1])


def read_records(directory: Path, offset: int) -> Iterator[tuple[dict[str, Any], int]]:
    """The records from a byte offset on, each with the offset behind it."""
    with (directory / SPOOL).open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return  # being written
            offset += len(line)
            yield json.loads(line), offset


class Live(TypedDict):
    """What the terminal shows while training goes on."""

    step: int
    total_steps: int
    epoch: int
    epochs: int
    metrics: dict[str, float]


class Tracker:
    """Records, live progress and the stop flag of one run; a zero-CPU actor beside the driver.

    Its methods are short and run one at a time, in the order of the caller: slow things are the
    delivery thread's. tracking_uri None: everything but MLflow.
    """

    def __init__(self, directory: str, storage_root: str, tracking_uri: str | None, experiment: str, run_name: str):
        self._spool = Spool(Path(directory))
        self._live: Live | None = None
        self._events: list[str] = []
        self._stop = False
        self._failure: tuple[str, int] | None = None
        self._delivery = None
        if tracking_uri is not None:
            target = Target(tracking_uri, experiment, run_name, Storage(storage_root))
            self._delivery = Delivery(self._spool.directory, target, self.event)

    # called by workers

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self._spool.append_metrics(step, values)
        self._wake()

    def system_metrics(self, values: dict[str, float]) -> None:
        """Numbered by themselves: they follow the clock, not the training steps."""
        self._spool.append_metrics(max(map(self._spool.next_step, values)), values)
        self._wake()

    def live(self, live: Live) -> None:
        self._live = live

    def event(self, text: str) -> None:
        """Something that a person should read once."""
        self._events.append(text)

    def fail(self, message: str, exit_code: int) -> None:
        """Restarting will not help: the next start of the workers ends at once with this message."""
        self._failure = self._failure or (message, exit_code)

    def failure(self) -> tuple[str, int] | None:
        return self._failure

    def stop_requested(self) -> bool:
        return self._stop

    def pictures(self, **arrays: np.ndarray) -> None:
        """What the final pictures are drawn from; see pictures.draw()."""
        np.savez_compressed(self._spool.directory / "pictures.npz", **arrays)  # type: ignore[arg-type]

    def flush(self) -> None:
        """Returns when every call made before it is in the spool."""

    # called by the driver

    def begin(self, params: dict[str, str], tags: dict[str, str], config_yaml: str) -> None:
        (self._spool.directory / "config.yaml").write_text(config_yaml)
        self._spool.append("run", params=params, tags=tags)
        self._spool.append("artifact", file="config.yaml")
        self._wake()

    def request_stop(self) -> None:
        self._stop = True

    def progress(self, events_seen: int) -> tuple[Live | None, list[str]]:
        return self._live, self._events[events_seen:]

    def finish(self, status: str, checkpoint: str | None) -> None:
        """Record the end, with the best checkpoint as a model; delivery_state() tells when it is delivered."""
        if (self._spool.directory / "pictures.npz").exists():
            self._spool.append("pictures", file="pictures.npz")
        if checkpoint is not None:
            self._spool.append("model", checkpoint=checkpoint)
        self._spool.append("status", status=status)
        self._wake()

    def delivery_state(self) -> "DeliveryState":
        return self._delivery.state() if self._delivery is not None else DeliveryState(None, True, "")

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
        self.wake = threading.Event()
        threading.Thread(target=self._run, name="delivery", daemon=True).start()

    def state(self) -> DeliveryState:
        all_sent = sent_offset(self._directory) >= (self._directory / SPOOL).stat().st_size
        return DeliveryState(self._target.run_id, all_sent, self._error)

    def _run(self) -> None:
        while True:
            self.wake.wait()
            self.wake.clear()
            try:
                deliver(self._directory, self._target, self._event)
                self._error = ""
                pause = BATCH_S
            except Exception as error:  # whatever a server that is not ours does: said, and tried again
                reason = self._target.without_password(str(error)) or type(error).__name__
                if not self._error:
                    self._event(f"MLflow at {self._target.name} cannot be reached; the records are kept: {reason}")
                self._error = reason
                self.wake.set()
                pause = RETRY_S
            time.sleep(pause)


def sent_offset(directory: Path) -> int:
    try:
        return json.loads((directory / SENT).read_text())["offset"]
    except FileNotFoundError:
        return 0


class Target:
    """The MLflow run that records go to. Its id is kept with the run's files."""

    def __init__(self, uri: str, experiment: str, run_name: str, storage: Storage):
        self.uri, self.name = uri, without_credentials(uri)
        self._experiment, self._run_name, self._storage = experiment, run_name, storage
        self.run_id: str | None = None
        known = json.loads(storage.read(RUN) or b"{}")
        if known.get("tracking_uri") == self.name:
            self.run_id = known["run_id"]

    def connect(self) -> tuple[Any, str]:
        """An MlflowClient and the run's id; the run is created if there is none. Raises what MLflow raises."""
        # A dead server must be found out in seconds, not in MLflow's default of minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] = "false"
        import logging

        import mlflow

        logging.getLogger("mlflow").setLevel(logging.ERROR)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        mlflow.set_tracking_uri(self.uri)
        client = mlflow.MlflowClient(self.uri)
        if self.run_id is None:
            run = client.create_run(self._experiment_id(client), run_name=self._run_name)
            self.run_id = run.info.run_id
            record = {"tracking_uri": self.name, "run_id": self.run_id, "experiment": self._experiment}
            self._storage.write(RUN, json.dumps(record).encode())
        return client, self.run_id

    def without_password(self, text: str) -> str:
        """MLflow's errors name the URI with all that is in it."""
        user = urlsplit(self.uri).netloc.rpartition("@")[0]
        return text.replace(user + "@", "") if user else text

    def _experiment_id(self, client: Any) -> str:
        import mlflow.exceptions

        found = client.get_experiment_by_name(self._experiment)
        if found is not None:
            return found.experiment_id
        # A database file holds no artifacts: they go beside it, wherever this process runs.
        database = self.uri.removeprefix("sqlite:///") if self.uri.startswith("sqlite:///") else None
        location = Path(database).resolve().with_name("mlartifacts").as_uri() if database else None
        try:
            kind = {"mlflow.experimentKind": "custom_model_development"}  # its pages open on curves, not on chats
            return client.create_experiment(self._experiment, artifact_location=location, tags=kind)
        except mlflow.exceptions.MlflowException:
            found = client.get_experiment_by_name(self._experiment)  # made by another run meanwhile
            if found is None:
                raise
            return found.experiment_id


def without_credentials(uri: str) -> str:
    """The URI without user and password."""
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if "@" in parts.netloc else uri


def deliver(directory: Path, target: Target, event: Callable[[str], None] = print) -> None:
    """Send all records that were not sent yet. Raises what MLflow raises when it cannot be reached.

    A record that was sent but not noted as sent is sent again, with the same time and step, which
    MLflow stores once.
    """
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.exceptions import MlflowException

    metrics: list[Metric] = []

    def note(position: int) -> None:
        (directory / (SENT + ".new")).write_text(json.dumps({"offset": position}))
        os.replace(directory / (SENT + ".new"), directory / SENT)

    if target.run_id is None:
        note(0)  # a new MLflow run gets every record there is
    client, run_id = target.connect()

    def send_metrics(position: int) -> None:
        if metrics:
            client.log_batch(run_id, metrics=metrics)
            metrics.clear()
        note(position)

    offset = sent_offset(directory)
    for record, position in read_records(directory, offset):
        if record["kind"] == "metrics":
            metrics += [
                Metric(key, value, record["time_ms"], record["step"]) for key, value in record["values"].items()
            ]
            if len(metrics) > 900:  # log_batch takes 1000
                send_metrics(position)
            offset = position
            continue
        send_metrics(offset)
        offset = position
        try:
            if record["kind"] == "run":
                client.update_run(run_id, status="RUNNING")
                known = client.get_run(run_id).data.params  # of the run's first start; they cannot change
                params = [Param(key, value) for key, value in record["params"].items() if key not in known]
                for start in range(0, len(params), 100):
                    client.log_batch(run_id, params=params[start : start + 100])
                client.log_batch(run_id, tags=[RunTag(key, value) for key, value in record["tags"].items()])
            elif record["kind"] == "artifact":
                client.log_artifact(run_id, str(directory / record["file"]))
            elif record["kind"] == "pictures":
                from app.pictures import draw

                for picture in draw(directory, directory / record["file"]):
                    client.log_artifact(run_id, str(picture), "pictures")
            elif record["kind"] == "model":
                from app.mlflow_model import log_model

                try:
                    log_model(run_id, record["checkpoint"])
                except (MlflowException, OSError):  # requests' errors are OSErrors
                    raise
                except Exception as error:  # torch.export's, of which there are many: not every model can be
                    event(f"{record['checkpoint']} could not be exported as an MLflow model: {error}")
            elif record["kind"] == "status":
                client.set_terminated(run_id, status=record["status"], end_time=record["time_ms"])
        except MlflowException as error:
            # Refused for what it says, not for where it goes: sending it again would block all others.
            if error.error_code not in ("INVALID_PARAMETER_VALUE", "RESOURCE_ALREADY_EXISTS", "BAD_REQUEST"):
                raise
            event(f"MLflow refused a record of kind {record['kind']}, kept in {directory / SPOOL}: {error}")
        note(position)
    send_metrics(offset)


def main(argv: Sequence[str]) -> int:
    from app.errors import BadInput

    if len(argv) != 1 or argv[0] in ("-h", "--help"):
        print("usage: python -m app.tracking RUN_DIRECTORY\n\nDelivers the records of a run that MLflow lacks.")
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    from app.runs import read_run, tracking_directory

    storage = Storage(argv[0])
    record = read_run(storage)
    if record is None:
        raise BadInput(f"{argv[0]} is no run's directory: it has no run.json")
    directory = tracking_directory(storage.root)
    uri = record.config.tracking_uri
    if uri == "none" or uri is None:
        raise BadInput(f"{argv[0]} was run with --tracking-uri none: there is nothing to deliver")
    uri = os.environ.get("MLFLOW_TRACKING_URI", uri)
    assert record.config.run_name is not None
    target = Target(uri, record.config.experiment, record.config.run_name, storage)
    try:
        deliver(directory, target)
    except Exception as error:
        reason = target.without_password(str(error))
        raise BadInput(f"MLflow at {target.name} cannot be reached; the records are kept: {reason}") from None
    print(f"delivered to {target.name}, run {target.run_id}")
    return 0


if __name__ == "__main__":
    from app.cli import run_main

    run_main(main)

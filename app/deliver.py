"""python -m app.deliver RUN_DIRECTORY    sends MLflow what a run could not deliver

RUN_DIRECTORY is a path or, from any machine, the URI of a run in an object store.

Used by a run's Tracker all the time, and by a person for what is left over.
"""

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from app.database import ensure_database
from app.errors import BadInput
from app.lock import held
from app.record import restore, store_rest
from app.runs import SWEEP, read_run, tracking_directory
from app.spool import SPOOL, SYSTEM, Spool, last_go_back, note_sent, read_records, sent_offset
from app.storage import Storage, credentials_in, without_credentials

RUN = "mlflow.json"
PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306, "mssql": 1433}
ANSWER_S = 3.0


@dataclass
class Known:
    """The last step that MLflow has of each metric, counted from the last time before went_back_ms that training went
    back to an earlier step."""

    last_steps: dict[str, int]
    went_back_ms: int

    def has(self, key: str, step: int) -> bool:
        return step <= self.last_steps.get(key, -1)

    def go_back(self, time_ms: int) -> None:
        """What is recorded from here on may have lower steps, and is not what MLflow has of these."""
        if time_ms > self.went_back_ms:
            self.last_steps = {key: step for key, step in self.last_steps.items() if key.startswith(SYSTEM)}


class Target:
    """The MLflow run that records go to, nested in the parent's. Its id is kept with the run's files.

    is_new: it was created since this was last set to False, because there was none. known: what it had before the
    first record was sent.
    """

    def __init__(self, uri: str, experiment: str, run_name: str, storage: Storage, parent: "Target | None" = None):
        self.uri, self.name = uri, without_credentials(uri)
        self._experiment, self._run_name, self._storage, self._parent = experiment, run_name, storage, parent
        self.run_id: str | None = None
        self.is_new = False
        self.known: Known | None = None
        known = json.loads(storage.read(RUN) or b"{}")
        if known.get("tracking_uri") == self.name:
            self.run_id = known["run_id"]
        # mlflow.json is written; the run was seen to be there
        self._noted, self._checked = self.run_id is not None, False

    def connect(self) -> tuple[Any, str]:
        """An MlflowClient and the run's id. Raises what MLflow raises."""
        # A dead server must be found out in seconds, not in MLflow's default of minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] = "false"
        os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"  # with the password that is in it
        import logging

        import mlflow

        logging.getLogger("mlflow").setLevel(logging.ERROR)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        mlflow.set_tracking_uri(self.uri)
        ensure_database(self.uri)
        client = mlflow.MlflowClient(self.uri)
        if self.run_id is not None and not self._checked and not _exists(client, self.run_id):
            self.run_id, self._noted = None, False  # deleted meanwhile, or the database was
        if self.run_id is None:
            tags = {} if self._parent is None else {"mlflow.parentRunId": self._parent.connect()[1]}
            run = client.create_run(self._experiment_id(client), run_name=self._run_name, tags=tags)
            self.run_id, self.is_new = run.info.run_id, True
        self._checked = True
        if not self._noted:
            record = {"tracking_uri": self.name, "run_id": self.run_id, "experiment": self._experiment}
            self._storage.write(RUN, json.dumps(record).encode())
            self._noted = True
        return client, self.run_id

    def reason(self, error: Exception) -> str:
        """An error in a line. MLflow's name the URI with all that is in it; a proxy's may be a page of HTML."""
        text = str(error).strip()
        for found in credentials_in(self.uri):
            text = text.replace(found.rstrip("&"), "")
        return (text.splitlines() or [type(error).__name__])[0][:300]

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


def server_problem(uri: str) -> str | None:
    """Why the tracking server does not answer; None if it does, or if there is none to ask."""
    scheme = uri.partition("://")[0].partition("+")[0]
    if scheme not in PORTS:
        return None
    try:
        parts = urlsplit(uri)
        port = parts.port or PORTS[scheme]
        address = parts._replace(netloc=parts.netloc.rpartition("@")[2], path=parts.path.rstrip("/") + "/health")
    except ValueError:  # whose words may have a part of a password
        return f"{scheme}://...: its host and port cannot be read; give {scheme}://HOST:PORT"
    if parts.hostname is None:
        return None  # a database's, in a socket that its driver knows
    shown = f"{parts.hostname}:{port}"
    if scheme in ("http", "https"):
        import requests

        try:
            answer = requests.get(address.geturl(), timeout=ANSWER_S, verify=_certificates())
        except requests.RequestException as error:
            return f"{shown} does not answer ({type(error).__name__})"
        # Others say that it is there: whether a password is right is found out when the first record is sent.
        return f"{shown} answers with {answer.status_code} {answer.reason}" if answer.status_code >= 500 else None
    try:
        socket.create_connection((parts.hostname, port), timeout=ANSWER_S).close()
    except OSError as error:
        return f"{shown} does not answer ({error})"
    return None


def _certificates() -> bool | str:
    """What MLflow's client verifies servers by."""
    if os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() in ("true", "1"):
        return False
    return os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH") or True


def mlflow_environment() -> dict[str, str]:
    """What MLflow's client goes by, passwords among it, for a process that is no child of this one."""
    own = {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_")}
    own.pop("MLFLOW_TRACKING_URI", None)  # which the config decides
    return own


def _exists(client: Any, run_id: str) -> bool:
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(run_id).info.lifecycle_stage == "active"
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise


def deliver(directory: Path, target: Target, event: Callable[[str], None] = print) -> None:
    """Send all records that were not sent yet. Raises what MLflow raises when it cannot be reached.

    A record that was sent but not noted as sent is sent again, with the same time and step, which MLflow stores
    once. Another machine may have computed and sent the same steps before it was lost: metrics that MLflow already
    had when this process came to it are left out. A record that MLflow refuses is reported and skipped: it must not
    block those behind it.
    """
    client, run_id = target.connect()
    if target.is_new:
        note_sent(directory, 0)  # it gets every record there is
        target.is_new = False
    known = target.known = target.known or _known(client, run_id, directory)
    for records, position in _batches(directory, sent_offset(directory)):
        try:
            _send(client, run_id, directory, records, known)
        except Exception as error:  # MLflow's, or from drawing a picture, or torch.export's
            client.get_run(run_id)  # raises if it is the server that is not there: then all is tried again
            reason = target.reason(error)
            event(f"MLflow did not take a record of kind {records[0]['kind']}, kept in {directory / SPOOL}: {reason}")
        note_sent(directory, position)


def _known(client: Any, run_id: str, directory: Path) -> Known:
    line = last_go_back(directory)
    went_back_ms = json.loads(line)["time_ms"] if line is not None else 0
    last_steps = {}
    for metric in client.get_run(run_id).data.to_proto().metrics:  # of each the one with the highest step
        if metric.timestamp >= went_back_ms or metric.key.startswith(SYSTEM):
            last_steps[metric.key] = metric.step
        else:  # from before: there may be lower ones since
            history = client.get_metric_history(run_id, metric.key)
            steps = [each.step for each in history if each.timestamp >= went_back_ms]
            last_steps |= {metric.key: max(steps)} if steps else {}
    return Known(last_steps, went_back_ms)


def _batches(directory: Path, offset: int) -> Iterator[tuple[list[dict[str, Any]], int]]:
    """The records from an offset on, metrics in groups of up to 1000 values, with the offset behind them."""
    group: list[dict[str, Any]] = []
    values, behind = 0, offset
    for record, position in read_records(directory, offset):
        is_metrics = record["kind"] == "metrics"
        added = len(record["values"]) if is_metrics else 0
        if group and (not is_metrics or values + added > 1000):  # what log_batch takes
            yield group, behind
            group, values = [], 0
        if is_metrics:
            group.append(record)
            values += added
        else:
            yield [record], position
        behind = position
    if group:
        yield group, behind


def _send(client: Any, run_id: str, directory: Path, records: list[dict[str, Any]], known: Known) -> None:
    from mlflow.entities import Metric, Param, RunTag

    record = records[0]
    if record["kind"] == "metrics":
        metrics = [
            Metric(key, value, each["time_ms"], each["step"])
            for each in records
            for key, value in each["values"].items()
            if not known.has(key, each["step"])
        ]
        if metrics:
            client.log_batch(run_id, metrics)
    elif record["kind"] == "go_back":
        known.go_back(record["time_ms"])
    elif record["kind"] == "run":
        client.update_run(run_id, status="RUNNING")
        known = client.get_run(run_id).data.params  # of the run's first start; they cannot change
        params = [Param(key, value) for key, value in record["params"].items() if key not in known]
        client.log_batch(run_id, params=params, tags=[RunTag(key, value) for key, value in record["tags"].items()])
    elif record["kind"] == "tags":
        client.log_batch(run_id, tags=[RunTag(key, value) for key, value in record["tags"].items()])
    elif record["kind"] == "artifact":
        client.log_artifact(run_id, str(directory / record["file"]), os.path.dirname(record["file"]) or None)
    elif record["kind"] == "pictures":
        from app.pictures import CURVES, draw

        # MLflow's: the records of an earlier machine are not on this one's disk
        histories = {key: client.get_metric_history(run_id, key) for key in CURVES}
        curves = {key: sorted((each.step, each.value) for each in found) for key, found in histories.items()}
        for picture in draw(directory, directory / record["file"], curves):
            client.log_artifact(run_id, str(picture), "pictures")
    elif record["kind"] == "model":
        from app.mlflow_model import log_model

        log_model(run_id, record["checkpoint"], record.get("register"))
    else:
        assert record["kind"] == "status"
        client.set_terminated(run_id, status=record["status"], end_time=record["time_ms"])


def _has_records(directory: Path, storage: Storage, run_name: str) -> bool:
    """Return True if there is a record of the run: on this machine, or in its object store, which is restored."""
    if storage.local:
        return (directory / SPOOL).is_file()
    spool = Spool(directory)
    found = restore(spool, storage, run_name)
    spool.close()
    return found or (directory / SPOOL).stat().st_size > 0


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1 or argv[0] in ("-h", "--help"):
        print("usage: python -m app.deliver RUN_DIRECTORY\n\nDelivers the records of a run that MLflow lacks.")
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    storage = Storage(argv[0])
    record, sweep = read_run(storage), storage.read(SWEEP)
    if record is None and sweep is None:
        raise BadInput(f"{argv[0]} is no run's and no sweep's directory: it has no run.json and no {SWEEP}")
    settings = record.config.model_dump() if record is not None else json.loads(sweep or b"")["config"]
    uri = settings["tracking_uri"]
    if uri == "none" or uri is None:
        raise BadInput(f"{argv[0]} was run with --tracking-uri none: there is nothing to deliver")
    if without_credentials(given := os.environ.get("MLFLOW_TRACKING_URI", "")) == uri:
        uri = given  # the same server, with the password that was not written down
    directory, name = tracking_directory(storage.root), settings["run_name"]
    target = Target(uri, settings["experiment"], name, storage)
    # A command of this machine that trains the run would write the same file.
    with contextlib.nullcontext() if storage.local else held(storage, name):
        parts = [(directory, storage, target)] if _has_records(directory, storage, name) else []
        for name in storage.names("") if record is None else ():  # a sweep's trials
            nested, files = directory.parent / name / directory.name, Storage(f"{storage.root}/{name}")
            if (storage.local or read_run(files) is not None) and _has_records(nested, files, name):
                parts.append((nested, files, Target(uri, settings["experiment"], name, files, target)))
        for spool, files, part in parts:
            try:
                deliver(spool, part)
            except Exception as error:
                reason = target.reason(error)
                raise BadInput(f"MLflow at {target.name} cannot be reached; the records are kept: {reason}") from None
            if not files.local:
                store_rest(files, None)
    if not parts:
        raise BadInput(f"{argv[0]} has no records: they are on the machine that the run was started on")
    print(f"delivered to {target.name}, run {target.run_id}")
    return 0


if __name__ == "__main__":
    from app.cli import run_main

    run_main(main)

"""The record of a run in an object store: whichever machine resumes it, MLflow has every step once."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.config import Config
from app.deliver import Target, deliver
from app.deliver import main as deliver_by_hand
from app.errors import BadInput
from app.lock import held
from app.record import RECORD, restore, snapshot, store_rest
from app.runs import Run, checkpoint_name, write_run
from app.spool import SPOOL, SYSTEM_EVERY_S, Spool, read_records
from app.storage import Storage
from app.tracking import Tracker

pytestmark = pytest.mark.filterwarnings("ignore")  # mlflow's and alembic's own

CPU = "system/node_0/cpu"


def publish(storage: Storage, step: int, record: bytes) -> None:
    """As much of a checkpoint as the record needs."""
    folder = f"checkpoints/{checkpoint_name(step)}"
    entry = {"size": len(record), "sha256": hashlib.sha256(record).hexdigest()}
    storage.write(f"{folder}/{RECORD}", record)
    storage.write(f"{folder}/manifest.json", json.dumps({RECORD: entry}).encode())


class Machine:
    """A machine with a disk of its own, on which a command trains a run whose files are in the storage."""

    def __init__(self, name: str, tmp_path: Path, root: str):
        self.storage, self._uri = Storage(f"{root}/r"), f"sqlite:///{tmp_path}/mlflow.db"
        self.name, self.folder = name, tmp_path / name
        self.start()

    def start(self) -> None:
        """A command, or a Tracker that Ray starts again."""
        self.spool = Spool(self.folder)
        restore(self.spool, self.storage, "r")
        self._target = Target(self._uri, "tests", "r", self.storage)

    def train(self, after: int, to: int, loss: float = 1.0) -> None:
        for step in range(after + 1, to + 1):
            self.spool.append_metrics(step, {"train/loss": loss, f"perf/{self.name}": 1.0})

    def save(self, step: int) -> None:
        publish(self.storage, step, snapshot(self.spool, "r"))

    def deliver(self) -> None:
        deliver(self.folder, self._target)

    def history(self, key: str = "train/loss") -> list[Any]:
        import mlflow

        assert self._target.run_id is not None
        found = mlflow.MlflowClient(self._uri).get_metric_history(self._target.run_id, key)
        return sorted(found, key=lambda metric: (metric.step, metric.timestamp))

    def steps(self, key: str = "train/loss") -> list[int]:
        return [metric.step for metric in self.history(key)]


Start = Callable[[str], Machine]


@pytest.fixture
def machine(tmp_path: Path, object_root: str) -> Start:
    return lambda name: Machine(name, tmp_path, object_root)


def once(to: int) -> list[int]:
    return list(range(1, to + 1))


def test_steps_after_the_checkpoint_that_the_lost_machine_had_delivered_are_not_recorded_again(machine: Start) -> None:
    first = machine("a")
    first.train(0, 10)
    first.deliver()
    first.train(10, 12)
    first.save(12)
    first.train(12, 18)
    first.deliver()
    second = machine("b")
    second.train(12, 25)
    second.deliver()
    assert second.steps() == once(25)
    assert second.steps("perf/a") == once(18)
    # A Tracker that is started again on either machine changes nothing.
    second.start()
    second.train(20, 26)
    second.deliver()
    assert second.steps() == once(26)


def test_records_that_were_never_delivered_are_in_the_checkpoint_with_their_times_and_files(machine: Start) -> None:
    import mlflow

    first = machine("a")
    (first.folder / "config.yaml").write_text("lr: 1\n")
    first.spool.append("run", params={"lr": "1", "num_workers": "1"}, tags={"world_size": "1"})
    first.spool.append("artifact", file="config.yaml")
    first.train(0, 12)
    first.save(12)
    first.train(12, 18)
    second = machine("b")
    second.spool.append("run", params={"lr": "1", "num_workers": "2"}, tags={"world_size": "2"})
    second.train(12, 25)
    second.deliver()
    assert second.steps() == once(25)
    recorded = {r["step"]: r["time_ms"] for r, _ in read_records(first.folder, 0) if r["kind"] == "metrics"}
    assert [metric.timestamp for metric in second.history()[:12]] == [recorded[step] for step in once(12)]
    client = mlflow.MlflowClient(second._uri)
    run = client.get_run(str(second._target.run_id))
    assert run.data.params == {"lr": "1", "num_workers": "1"}  # of the first start
    assert run.data.tags["world_size"] == "2"
    (config,) = client.list_artifacts(run.info.run_id)
    assert Path(client.download_artifacts(run.info.run_id, config.path)).read_text() == "lr: 1\n"


def test_mlflow_that_comes_back_on_the_third_machine_gets_every_step_once(machine: Start) -> None:
    first = machine("a")
    first.train(0, 10)
    first.save(10)
    first.train(10, 18)
    first.deliver()
    second = machine("b")  # from where MLflow is never reached
    second.train(10, 20)
    second.save(20)
    third = machine("c")
    third.train(20, 30)
    third.deliver()
    assert third.steps() == once(30)


def test_a_machine_that_comes_back_after_another_went_further_adds_what_is_new(machine: Start) -> None:
    first = machine("a")
    first.train(0, 10)
    first.save(10)
    first.deliver()
    first.train(10, 15)  # not delivered
    second = machine("b")
    second.train(10, 30)
    second.deliver()
    second.train(30, 32)
    second.save(32)
    second.train(32, 40)
    second.deliver()
    for _ in range(2):
        first.start()
        first.train(32, 50)
        first.deliver()
        assert first.steps() == once(50)


def test_a_command_on_the_same_machine_adds_nothing(machine: Start) -> None:
    first = machine("a")
    first.train(0, 12)
    first.spool.append("tags", tags={"world_size": "1"})
    first.save(12)
    before = (first.folder / SPOOL).read_bytes()
    first.start()
    assert (first.folder / SPOOL).read_bytes() == before


def test_the_end_of_the_file_that_a_power_failure_took_is_not_delivered_twice(machine: Start) -> None:
    first = machine("a")
    first.train(0, 12)
    first.deliver()
    lines = (first.folder / SPOOL).read_bytes().splitlines(keepends=True)
    (first.folder / SPOOL).write_bytes(b"".join(lines[:10]))
    first.start()
    first.train(10, 14, loss=0.12345)
    first.deliver()
    assert first.steps() == once(14)


@pytest.mark.parametrize("is_delivered", [True, False])
def test_a_run_that_went_back_to_another_ones_checkpoint_is_resumed_elsewhere(
    is_delivered: bool, machine: Start
) -> None:
    first = machine("a")
    first.train(0, 6, loss=1.0)
    if is_delivered:
        first.deliver()
    first.spool.go_back(2)
    first.save(2)
    first.train(2, 4, loss=2.0)
    if is_delivered:
        first.deliver()
    second = machine("b")
    second.train(2, 8, loss=2.0)
    second.deliver()
    both = [(step, loss) for step in once(6) for loss in (1.0, 2.0) if (step, loss) not in ((1, 2.0), (2, 2.0))]
    assert [(metric.step, metric.value) for metric in second.history()] == [*both, (7, 2.0), (8, 2.0)]


def test_system_metrics_of_the_second_machine_have_numbers_of_their_own(
    machine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = machine("a")
    for number in range(3):
        first.spool.append_metrics(number, {CPU: 1.0})
    first.save(1)
    for number in range(3, 7):
        first.spool.append_metrics(number, {CPU: 1.0})
    first.deliver()
    header = json.loads(snapshot(first.spool, "r").splitlines()[0])
    later = header["time_ms"] / 1000 + 5 * SYSTEM_EVERY_S
    monkeypatch.setattr("time.time", lambda: later)
    second = machine("b")
    assert second.spool.next_step(CPU) >= 7
    for _ in range(3):
        second.spool.append_metrics(second.spool.next_step(CPU), {CPU: 2.0})
    second.deliver()
    assert [metric.value for metric in second.history(CPU)] == 7 * [1.0] + 3 * [2.0]
    assert len(set(second.steps(CPU))) == 10


def test_of_samples_that_cannot_be_read_each_machine_knows_all(machine: Start) -> None:
    first = machine("a")
    (first.folder / "bad_samples.txt").write_text("a.png\nb.png\n")
    first.deliver()
    first.save(2)
    second = machine("b")
    assert (second.folder / "bad_samples.txt").read_text() == "a.png\nb.png\n"
    (first.folder / "bad_samples.txt").write_text("b.png\nc.png\n")
    first.start()
    assert (first.folder / "bad_samples.txt").read_text() == "b.png\nc.png\na.png\n"


def damaged(storage: Storage, _: Path) -> None:
    storage.write(f"checkpoints/{checkpoint_name(4)}/{RECORD}", b"{}\n")


def of_another_run(storage: Storage, folder: Path) -> None:
    spool = Spool(folder / "donor")
    spool.append_metrics(100, {"train/loss": 9.0})
    publish(storage, 4, snapshot(spool, "donor"))


@pytest.mark.parametrize("spoil", [damaged, of_another_run])
def test_a_record_that_is_damaged_or_another_runs_is_passed_over_for_an_earlier_one(
    machine: Start, spoil: Callable[[Storage, Path], None], tmp_path: Path
) -> None:
    first = machine("a")
    for step in (2, 4):
        first.train(step - 2, step)
        first.save(step)
    spoil(first.storage, tmp_path)
    second = machine("b")
    assert second.spool.last_steps()["train/loss"] == 2


@pytest.mark.parametrize("name", ["../../outside", "/tmp/outside", "a/../../outside"])
def test_files_elsewhere_on_this_machine_are_neither_written_nor_read(machine: Start, name: str) -> None:
    first = machine("a")
    header = {"run": "r", "time_ms": 1, "last_steps": {}, "files": {name: ""}}
    line = {"file": name, "time_ms": 1, "kind": "artifact"}
    publish(first.storage, 1, b"".join(json.dumps(each).encode() + b"\n" for each in (header, line)))
    second = machine("b")
    assert list(read_records(second.folder, 0)) == []


def test_what_is_left_at_the_end_is_stored_with_the_run_until_it_is_delivered(machine: Start) -> None:
    first = machine("a")
    first.train(0, 2)
    first.save(2)
    first.spool.append("status", status="FINISHED")
    store_rest(first.storage, snapshot(first.spool, "r"))
    second = machine("b")
    assert [record["kind"] for record, _ in read_records(second.folder, 0)][-1] == "status"
    for _ in range(2):
        store_rest(second.storage, None)
        assert second.storage.read(RECORD) is None


def unreachable_run(tmp_path: Path, root: str) -> tuple[str, str]:
    """Left in an object store by a machine that never reached MLflow. Its URI, and MLflow's."""
    config = Config(run_name="r", output_dir=root, tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    write_run(Run(config, "killed"))
    first = Machine("a", tmp_path, root)
    first.train(0, 5)
    first.save(5)
    return first.storage.root, first._uri


def delivered_steps(uri: str) -> list[list[int]]:
    """Of train/loss, for each run that MLflow has."""
    import mlflow

    client = mlflow.MlflowClient(uri)
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return [[m.step for m in client.get_metric_history(run.info.run_id, "train/loss")] for run in runs]


def test_what_another_machine_left_in_an_object_store_is_delivered_by_hand(
    tmp_path: Path, object_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.lock.RENEW_S", 0.01)
    root, uri = unreachable_run(tmp_path, object_root)
    store_rest(Storage(root), Storage(root).read(f"checkpoints/{checkpoint_name(5)}/{RECORD}"))
    for machine_name in ("b", "b", "c"):
        (tmp_path / machine_name).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / machine_name)
        assert deliver_by_hand([root]) == 0
        assert delivered_steps(uri) == [once(5)]
        assert RECORD not in Storage(root).names("")


def test_a_run_that_is_being_trained_is_not_delivered_by_hand(
    tmp_path: Path, object_root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.lock.RENEW_S", 0.01)
    root, _ = unreachable_run(tmp_path, object_root)
    with held(Storage(root), "r"), pytest.raises(BadInput, match="--run-name r is being trained right now"):
        deliver_by_hand([root])


def test_only_a_run_in_an_object_store_has_a_record_in_its_checkpoints(tmp_path: Path, object_root: str) -> None:
    local = Tracker(str(tmp_path / "local"), str(tmp_path / "r"), None, "tests", "r")
    assert local.snapshot() is None
    remote = Tracker(str(tmp_path / "remote"), f"{object_root}/r", None, "tests", "r")
    remote.metrics(3, {"train/loss": 1.0})
    publish(Storage(f"{object_root}/r"), 3, remote.snapshot() or b"")
    again = Tracker(str(tmp_path / "elsewhere"), f"{object_root}/r", None, "tests", "r")
    again.metrics(3, {"train/loss": 1.0})
    again.metrics(4, {"train/loss": 1.0})
    steps = [r["step"] for r, _ in read_records(tmp_path / "elsewhere", 0)]
    assert steps == [3, 4]

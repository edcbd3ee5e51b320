"""One MLflow run, every record once, whatever the server does."""

import http.server
import json
import os
import re
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from app.deliver import Target, _batches, deliver, mlflow_environment
from app.micro_batches import ForwardPass
from app.spool import BLOCK, Spool, read_records
from app.storage import Storage, without_credentials
from app.tracking import MOST_EVENTS, Live, Progress, Tracker, Validation

pytestmark = pytest.mark.filterwarnings("ignore")  # mlflow's and alembic's own


def metric_records(directory: Path) -> list[tuple[int, dict[str, float]]]:
    return [(r["step"], r["values"]) for r, _ in read_records(directory, 0) if r["kind"] == "metrics"]


def test_a_skipped_sample_is_said_and_recorded_once_also_after_a_restart(tmp_path: Path) -> None:
    def tracker() -> Tracker:
        return Tracker(str(tmp_path), str(tmp_path), None, "e", "r")

    first = tracker()
    first.unreadable(["a.png is\nno image", "b.png", "b.png"])
    first.unreadable(["b.png"])
    assert first.progress(0).events == ["skipping a sample: a.png is no image", "skipping a sample: b.png"]
    again = tracker()
    again.unreadable(["b.png", "c.png"])
    assert again.progress(0).events == ["skipping a sample: c.png"]
    assert (tmp_path / "bad_samples.txt").read_text().splitlines() == ["a.png is no image", "b.png", "c.png"]
    assert [r["file"] for r, _ in read_records(tmp_path, 0) if r["kind"] == "artifact"] == ["bad_samples.txt"] * 2


def test_tracebacks_are_kept_and_told_of_once_in_an_attempt(tmp_path: Path) -> None:
    tracker = Tracker(str(tmp_path), str(tmp_path), None, "e", "r")
    for attempt in range(2):
        tracker.start_attempt(2, tell=False)
        tracker.raised("rank 1 raised", f"cause {attempt}")
        tracker.raised("rank 0 raised", "consequence")
    assert tracker.progress(0).events == [f"the traceback is in {tmp_path / 'stacks.txt'}"] * 2
    stacks = (tmp_path / "stacks.txt").read_text()
    assert stacks == "".join(f"rank 1 raised\ncause {attempt}\nrank 0 raised\nconsequence\n" for attempt in range(2))


def test_a_tracker_on_a_cluster_gets_the_drivers_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:password@elsewhere")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "password")
    environment = mlflow_environment()
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    monkeypatch.delenv("MLFLOW_TRACKING_PASSWORD")
    Tracker(str(tmp_path), str(tmp_path), None, "e", "r", environment)
    assert os.environ["MLFLOW_TRACKING_PASSWORD"] == "password"
    assert "MLFLOW_TRACKING_URI" not in os.environ


def test_a_step_is_recorded_once_also_after_a_restart(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.append_metrics(10, {"train/loss": 1.0})
    spool.append_metrics(20, {"train/loss": 0.5, "lr": 0.1})
    again = Spool(tmp_path)
    again.append_metrics(10, {"train/loss": 9.0})
    again.append_metrics(20, {"train/loss": 9.0, "val/loss": 0.7})
    again.append_metrics(30, {"train/loss": 0.25})
    assert metric_records(tmp_path) == [
        (10, {"train/loss": 1.0}),
        (20, {"train/loss": 0.5, "lr": 0.1}),
        (20, {"val/loss": 0.7}),
        (30, {"train/loss": 0.25}),
    ]


def test_a_run_that_goes_on_from_another_ones_checkpoint_records_what_differs(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for step in (10, 20, 30):
        spool.append_metrics(step, {"val/loss": 1.0})
    spool.append_metrics(40, {"system/node_0/cpu": 1.0})
    spool.go_back(20)
    spool.append_metrics(20, {"val/loss": 0.5})
    spool.append_metrics(30, {"val/loss": 0.4})
    spool.append_metrics(40, {"system/node_0/cpu": 2.0})
    spool.close()
    values = [(step, *values.values()) for step, values in metric_records(tmp_path)]
    assert values == [(10, 1.0), (20, 1.0), (30, 1.0), (40, 1.0), (30, 0.4)]
    again = Spool(tmp_path)
    assert again.next_step("val/loss") == 31
    again.close()


def test_half_a_line_of_a_killed_process_is_cut_off(tmp_path: Path) -> None:
    Spool(tmp_path).append_metrics(1, {"a": 1.0})
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"kind": "metr')
    spool = Spool(tmp_path)
    spool.append_metrics(2, {"a": 2.0})
    assert metric_records(tmp_path) == [(1, {"a": 1.0}), (2, {"a": 2.0})]


def test_half_a_line_is_cut_off_however_long_it_is_and_nothing_else(tmp_path: Path) -> None:
    whole = '{"kind": "tags", "time_ms": 1, "tags": {}}\n'
    for torn in ("x" * 3 * BLOCK, "x" * (BLOCK - 1), "x", ""):
        for before in ("", whole, whole * (BLOCK // len(whole) + 1)):
            (tmp_path / "records.jsonl").write_text(before + torn)
            Spool(tmp_path).close()
            assert (tmp_path / "records.jsonl").read_text() == before


@pytest.fixture
def database(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/mlflow.db"


def target(database: str, tmp_path: Path) -> Target:
    return Target(database, "tests", "r", Storage(str(tmp_path / "r")))


def history(database: str, run_id: str, key: str) -> list[tuple[int, float]]:
    import mlflow

    found = mlflow.MlflowClient(database).get_metric_history(run_id, key)
    return sorted((metric.step, metric.value) for metric in found)


def test_delivery_resumes_in_the_same_run_and_sends_nothing_twice(tmp_path: Path, database: str) -> None:
    import mlflow

    directory = tmp_path / "tracking"
    spool = Spool(directory)
    (directory / "config.yaml").write_text("lr: 1\n")
    spool.append("run", params={"lr": "1"}, tags={"world_size": "2"})
    spool.append("artifact", file="config.yaml")
    for step in range(1, 1501):
        spool.append_metrics(step, {"train/loss": 1 / step})
    first = target(database, tmp_path)
    deliver(directory, first)

    # A later start, with another number of workers and a parameter that differs.
    spool.append("run", params={"lr": "1", "num_workers": "3"}, tags={"world_size": "3"})
    spool.append_metrics(1501, {"train/loss": 0.5})
    spool.append("status", status="FINISHED")
    second = target(database, tmp_path)
    deliver(directory, second)
    deliver(directory, target(database, tmp_path))

    assert first.run_id is not None
    assert first.run_id == second.run_id
    client = mlflow.MlflowClient(database)
    run = client.get_run(first.run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "r"
    assert run.data.params == {"lr": "1", "num_workers": "3"}
    assert run.data.tags["world_size"] == "3"
    assert history(database, first.run_id, "train/loss") == [
        *((step, 1 / step) for step in range(1, 1501)),
        (1501, 0.5),
    ]
    assert [file.path for file in client.list_artifacts(first.run_id)] == ["config.yaml"]
    assert len(client.search_runs([run.info.experiment_id])) == 1


def test_a_record_sent_but_not_noted_is_stored_once(tmp_path: Path, database: str) -> None:
    directory = tmp_path / "tracking"
    Spool(directory).append_metrics(1, {"a": 1.0})
    where = target(database, tmp_path)
    deliver(directory, where)
    (directory / "sent.json").write_text(json.dumps({"offset": 0}))  # killed before the note
    deliver(directory, where)
    assert where.run_id is not None
    assert history(database, where.run_id, "a") == [(1, 1.0)]


def test_another_server_gets_the_whole_record(tmp_path: Path, database: str) -> None:
    directory = tmp_path / "tracking"
    Spool(directory).append_metrics(1, {"a": 1.0})
    deliver(directory, target(database, tmp_path))
    other = f"sqlite:///{tmp_path}/other.db"
    where = target(other, tmp_path)
    deliver(directory, where)
    assert where.run_id is not None
    assert history(other, where.run_id, "a") == [(1, 1.0)]


def test_a_deleted_mlflow_run_is_made_again_with_the_whole_record(tmp_path: Path, database: str) -> None:
    import mlflow

    directory = tmp_path / "tracking"
    Spool(directory).append_metrics(1, {"a": 1.0})
    first = target(database, tmp_path)
    deliver(directory, first)
    assert first.run_id is not None
    mlflow.MlflowClient(database).delete_run(first.run_id)
    second = target(database, tmp_path)
    deliver(directory, second)
    assert second.run_id not in (None, first.run_id)
    assert history(database, str(second.run_id), "a") == [(1, 1.0)]


def test_an_artifact_that_cannot_be_stored_does_not_block_the_rest(tmp_path: Path, database: str) -> None:
    import mlflow

    (tmp_path / "file").write_text("no directory")
    client = mlflow.MlflowClient(database)
    client.create_experiment("tests", artifact_location=f"file://{tmp_path}/file/below")
    directory = tmp_path / "tracking"
    spool = Spool(directory)
    (directory / "config.yaml").write_text("")
    spool.append("artifact", file="config.yaml")
    spool.append_metrics(1, {"a": 1.0})
    spool.append("status", status="FINISHED")
    said: list[str] = []
    where = target(database, tmp_path)
    deliver(directory, where, said.append)
    assert len(said) == 1
    assert "did not take a record of kind artifact" in said[0]
    assert where.run_id is not None
    assert client.get_run(where.run_id).info.status == "FINISHED"
    assert history(database, where.run_id, "a") == [(1, 1.0)]


def test_a_refused_record_is_said_and_does_not_block_the_others(tmp_path: Path, database: str) -> None:
    directory = tmp_path / "tracking"
    spool = Spool(directory)
    spool.append("run", params={"x" * 300: "1"}, tags={})  # MLflow takes 250 characters
    spool.append_metrics(1, {"a": 1.0})
    said: list[str] = []
    where = target(database, tmp_path)
    deliver(directory, where, said.append)
    assert len(said) == 1
    assert "did not take a record of kind run" in said[0]
    assert where.run_id is not None
    assert history(database, where.run_id, "a") == [(1, 1.0)]


def wait_for(condition, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def new_tracker(tmp_path: Path, uri: str | None) -> Tracker:
    return Tracker(str(tmp_path / "tracking"), str(tmp_path / "r"), uri, "tests", "r")


def test_a_tracker_delivers_while_it_runs_and_at_the_end(tmp_path: Path, database: str) -> None:
    tracker = new_tracker(tmp_path, database)
    tracker.begin({"lr": "1"}, {}, "lr: 1\n")
    tracker.metrics(1, {"train/loss": 2.0, "train/accuracy": 0.5})
    tracker.metrics(1, {"val/loss": 2.0, "val/accuracy": 0.5})
    tracker.system_metrics({"system/node_0/cpu": 50.0})
    tracker.system_metrics({"system/node_0/cpu": 60.0})
    tracker.pictures(
        split=np.array("test"),
        class_names=np.array(["a", "b"]),
        confusion=np.array([[3, 1], [0, 4]]),
        images=np.zeros((1, 1, 8, 8), np.uint8),
        targets=np.array([0]),
        predictions=np.array([1]),
        losses=np.array([2.5]),
    )
    wait_for(lambda: tracker.delivery_state().all_sent)
    tracker.finish("KILLED", checkpoint=None)
    wait_for(lambda: tracker.delivery_state().all_sent)

    import mlflow

    run_id = tracker.delivery_state().run_id
    assert run_id is not None
    client = mlflow.MlflowClient(database)
    assert client.get_run(run_id).info.status == "KILLED"
    assert history(database, run_id, "system/node_0/cpu") == [(0, 50.0), (1, 60.0)]
    pictures = [file.path for file in client.list_artifacts(run_id, "pictures")]
    assert pictures == [f"pictures/{name}.png" for name in ("confusion_matrix", "learning_curves", "worst_mistakes")]


def test_without_mlflow_the_records_are_kept(tmp_path: Path) -> None:
    tracker = new_tracker(tmp_path, None)
    tracker.begin({}, {}, "")
    tracker.metrics(1, {"a": 1.0})
    tracker.finish("FINISHED", None)
    assert tracker.delivery_state().all_sent
    assert metric_records(tmp_path / "tracking") == [(1, {"a": 1.0})]


def test_the_stop_flag_the_failure_and_the_events(tmp_path: Path) -> None:
    tracker = new_tracker(tmp_path, None)
    assert (tracker.stop_requested(), tracker.failure()) == (None, None)
    tracker.request_stop("paused")
    assert tracker.stop_requested() == "paused"
    tracker.start_attempt(2, tell=False)
    assert tracker.stop_requested() is None
    tracker.request_stop("killed")
    tracker.request_stop("paused")  # is no way back
    tracker.start_attempt(2, tell=False)
    tracker.fail("the first", 2)
    tracker.fail("a consequence", 1)
    tracker.event("one")
    tracker.event("two")
    assert (tracker.stop_requested(), tracker.failure()) == ("killed", ("the first", 2))
    assert tracker.progress(1) == Progress(None, ["two"], 2, frozenset(), stop="killed")
    first, second = (Validation(step=step, epochs=step / 2, metrics={"val/loss": 1.0}) for step in (1, 2))
    tracker.validated(first)
    tracker.validated(second)
    assert tracker.progress(2, 1) == Progress(None, [], 2, frozenset(), 0, (second,), 2, "killed")
    assert tracker.progress(9, 9).validations == ()
    # Begun again in the same process, by a sweep.
    tracker.begin({}, {}, "")
    assert (tracker.stop_requested(), tracker.failure()) == (None, None)
    assert tracker.progress(0).validations == ()


def test_a_tracker_that_is_restarted_knows_what_nobody_repeats(tmp_path: Path) -> None:
    tracker = new_tracker(tmp_path, None)
    tracker.begin({}, {}, "")
    tracker.start_attempt(2, tell=False)
    tracker.joined("node")
    tracker.workers_lost("rank 1 died", counts=True)
    tracker.workers_lost("its node was taken away", counts=False)
    tracker.joined("another node")
    tracker.fail("no data on rank 1", 2)
    tracker.hung("rank 0 made no step", "", in_driver=True)
    tracker.request_stop("paused")
    again = new_tracker(tmp_path, None)
    assert again.progress(0) == Progress(
        None, [], again._events.count, frozenset({"another node"}), 1, (), again._validations.count, "paused",
        "rank 0 made no step", epochs_seen=again._epochs.count,
    )  # fmt: skip
    assert again.failure() == ("no data on rank 1", 2)
    again.workers_lost("rank 1 died again", counts=True)
    assert new_tracker(tmp_path, None).progress(0).failures == 2
    # Another command counts from the beginning.
    command = new_tracker(tmp_path, None)
    command.begin({}, {}, "")
    for each in (command, new_tracker(tmp_path, None)):
        assert (each.progress(0).failures, each.failure(), each.stop_requested()) == (0, None, None)


def test_what_the_driver_has_not_seen_outlives_a_restart_of_the_tracker(tmp_path: Path) -> None:
    tracker = new_tracker(tmp_path, None)
    validations = [Validation(step=step, epochs=step / 10, metrics={"val/loss": 1.0}) for step in range(4)]
    for validation in validations[:2]:
        tracker.event("an event")
        tracker.validated(validation)
    seen = tracker.progress(0)
    tracker.progress(seen.events_seen, seen.validations_seen)
    tracker.validated(validations[2])
    again = new_tracker(tmp_path, None)
    again.event("since the restart")
    again.validated(validations[3])
    progress = again.progress(seen.events_seen, seen.validations_seen)
    assert progress.events == ["since the restart"]
    assert progress.validations == tuple(validations[2:])
    assert again.progress(progress.events_seen, progress.validations_seen).validations == ()


def test_a_state_that_a_power_failure_cut_off_is_that_of_an_earlier_command(tmp_path: Path) -> None:
    new_tracker(tmp_path, None).fail("no data", 2)
    (tmp_path / "tracking" / "tracker.json").write_text("")
    assert new_tracker(tmp_path, None).failure() is None


@pytest.mark.parametrize("call", [Tracker.flush, Tracker.snapshot])
def test_the_record_is_on_the_disk_before_a_checkpoint_relies_on_it(
    call: Callable[[Tracker], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = new_tracker(tmp_path, None)
    tracker.metrics(1, {"a": 1.0})
    synced: list[int] = []
    monkeypatch.setattr("app.spool.os.fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    call(tracker)
    assert synced == [(tmp_path / "tracking" / "records.jsonl").stat().st_size]


@pytest.mark.parametrize(
    ("samples", "trained", "then"),
    [(128, 32, 32), (128, 128, 64), (16, 32, 8), (2, 2, 1)],
)
def test_after_out_of_memory_training_continues_with_smaller_micro_batches(
    samples: int, trained: int, then: int, tmp_path: Path
) -> None:
    tracker = new_tracker(tmp_path, None)
    tracker.forward_pass(ForwardPass(samples, 1, trained))
    tracker.out_of_memory("CUDA out of memory")
    tracker.out_of_memory("CUDA out of memory")  # of another worker
    tracker.workers_lost("rank 0 failed", True, out_of_memory=True)  # as the controller sees it
    assert (tracker.micro_batch_size(), tracker.failure()) == (then, None)
    assert tracker.progress(0).events[0] == (
        f"out of memory at {samples} samples per forward pass on 1 worker: continuing with {then}"
    )
    tags = [record["tags"] for record, _ in read_records(tmp_path / "tracking", 0) if record["kind"] == "tags"]
    assert tags == [{"micro_batch_size": str(then)}]
    tracker.begin({}, {}, "")  # again in the same process, by a sweep
    assert tracker.micro_batch_size() is None


def test_a_worker_killed_for_memory_counts_from_the_first_checkpoint_on(tmp_path: Path) -> None:
    tracker = new_tracker(tmp_path, None)
    tracker.forward_pass(ForwardPass(10, 2, 0))
    tracker.workers_lost("rank 0 was killed", True, out_of_memory=True)
    assert (tracker.micro_batch_size(), tracker.failure()) == (None, None)  # tried again as it is
    tracker.forward_pass(ForwardPass(10, 2, 0))
    tracker.saved()
    for _ in range(2):
        tracker = new_tracker(tmp_path, None)  # Ray ended its process as well
        tracker.workers_lost("rank 0 was killed", True, out_of_memory=True)
        assert (tracker.micro_batch_size(), tracker.failure()) == (5, None)


@pytest.mark.parametrize(
    ("samples", "trained", "told"),
    [
        (10, 0, r"at 10 samples per forward pass on 2 workers \(too much\); lower --micro-batch-size or --batch-size"),
        (1, 1, r"at 1 sample per forward pass on 2 workers \(too much\): no micro-batch is smaller"),
    ],
)
def test_out_of_memory_without_a_way_out_fails_the_run(samples: int, trained: int, told: str, tmp_path: Path) -> None:
    tracker = new_tracker(tmp_path, None)
    tracker.forward_pass(ForwardPass(samples, 2, trained))
    tracker.out_of_memory("too much")
    failure = tracker.failure()
    assert failure is not None
    assert re.fullmatch(f"out of memory {told}.*", failure[0])
    assert failure[1] == 1
    assert tracker.micro_batch_size() is None


def test_the_driver_gets_everything_once_and_nothing_that_it_has_is_held(tmp_path: Path) -> None:
    tracker = new_tracker(tmp_path, None)
    events_seen = validations_seen = 0
    heard: list[str] = []
    steps: list[int] = []
    for step in range(1, 1001):
        tracker.event(f"event {step}")
        tracker.validated(Validation(step=step, epochs=step / 10, metrics={"val/loss": 1.0}))
        if step % 7 == 0 or step == 1000:
            progress = tracker.progress(events_seen, validations_seen)
            heard += progress.events
            steps += [validation["step"] for validation in progress.validations]
            events_seen, validations_seen = progress.events_seen, progress.validations_seen
            # Those of this call are kept until the next one says that they have arrived.
            assert len(tracker._events._held) == len(progress.events) <= 7
            assert len(tracker._validations._held) == len(progress.validations) <= 7
    assert heard == [f"event {step}" for step in range(1, 1001)]
    assert steps == list(range(1, 1001))


def test_the_driver_gets_each_end_of_an_epoch_once(tmp_path: Path) -> None:
    tracker = new_tracker(tmp_path, None)
    lives = [Live(step=step, total_steps=9, epoch=-(-step // 3), epochs=3, metrics={}) for step in range(1, 10)]
    seen: list[Live] = []
    for live in lives:
        tracker.live(live, epoch_ended=live["step"] % 3 == 0)
        if live["step"] in (3, 4, 9):
            progress = tracker.progress(0, 0, len(seen))
            assert progress.live == live
            seen += progress.epochs
            assert progress.epochs_seen == len(seen)
    assert seen == lives[2::3]


def test_of_events_that_nobody_looks_at_the_newest_are_kept(tmp_path: Path) -> None:
    tracker = new_tracker(tmp_path, None)
    tracker.unreadable([f"{number}.png" for number in range(MOST_EVENTS + 5)])
    progress = tracker.progress(0)
    assert progress.events_seen == MOST_EVENTS + 5
    assert [progress.events[0], progress.events[-1]] == [
        "skipping a sample: 5.png",
        f"skipping a sample: {MOST_EVENTS + 4}.png",
    ]
    assert len((tmp_path / "tracking" / "bad_samples.txt").read_text().splitlines()) == MOST_EVENTS + 5
    assert tracker.progress(progress.events_seen).events == []


def test_memory_does_not_grow_with_what_is_recorded(tmp_path: Path) -> None:
    """Of the Tracker, of one that is started again on its records, and of their delivery."""

    def held_by(count: int) -> list[int]:
        def peak(work: Callable[[], object]) -> int:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            work()
            return tracemalloc.get_traced_memory()[1] - before

        def record() -> None:
            for step in range(count):
                tracker.metrics(step, {"train/loss": 1.0, "lr": 0.1})
                tracker.validated(Validation(step=step, epochs=1.0, metrics={"val/loss": 1.0}))
                tracker.progress(step + 1, step + 1)

        tracker = new_tracker(tmp_path / str(count), None)
        directory = tmp_path / str(count) / "tracking"
        return [
            peak(record),
            peak(lambda: new_tracker(tmp_path / str(count), None).close()),
            peak(lambda: sum(len(records) for records, _ in _batches(directory, 0))),
        ]

    tracemalloc.start()
    try:
        held_by(10)  # what is imported and compiled at the first call
        few, many = held_by(1500), held_by(6000)
    finally:
        tracemalloc.stop()
    for less, more in zip(few, many, strict=True):
        assert more < 1.2 * less + 20_000


class Silent(http.server.BaseHTTPRequestHandler):
    """A server that is not MLflow: answers 503 and a page to everything."""

    def do_GET(self) -> None:
        self.send_error(503)

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None: ...


def test_an_outage_stops_nothing_is_said_once_and_loses_nothing(tmp_path: Path, database: str) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tracker = new_tracker(tmp_path, f"http://user:secret@127.0.0.1:{server.server_port}")
        tracker.begin({"lr": "1"}, {}, "lr: 1\n")
        for step in range(1, 101):
            began = time.monotonic()
            tracker.metrics(step, {"a": float(step)})
            assert time.monotonic() - began < 1.0
        tracker.finish("FINISHED", None)
        wait_for(lambda: tracker.delivery_state().error != "")
        assert not tracker.delivery_state().all_sent
        events = tracker.progress(0).events
        assert len(events) == 1
        assert "cannot be reached; the records are kept" in events[0]
        assert "secret" not in events[0]
        assert len(events[0].splitlines()) == 1
        server.shutdown()
    # Delivered later, elsewhere.
    where = target(database, tmp_path)
    deliver(tmp_path / "tracking", where)
    assert where.run_id is not None
    assert history(database, where.run_id, "a") == [(step, float(step)) for step in range(1, 101)]


def test_credentials_are_taken_out(tmp_path: Path) -> None:
    assert without_credentials("https://me:pw@host:5000/x?y=1") == "https://host:5000/x?y=1"
    assert without_credentials("postgresql://u:p@db/ml") == "postgresql://db/ml"
    assert without_credentials("postgresql://h/db?user=u&password=p&x=1") == "postgresql://h/db?user=u&x=1"
    assert without_credentials("postgresql://h/db?sslpassword=p") == "postgresql://h/db"
    assert without_credentials("mssql+pyodbc:///?odbc_connect=SERVER%3Dh%3BPWD%3Dp") == "mssql+pyodbc:///"
    assert without_credentials("https://host/x?tokens=1&design=2") == "https://host/x?tokens=1&design=2"
    assert without_credentials("sqlite:////a/b.db") == "sqlite:////a/b.db"
    assert without_credentials("digits") == "digits"
    where = Target("postgresql://u:p1@h/db?password=p2&x=1", "tests", "r", Storage(str(tmp_path)))
    text = where.reason(OSError("no answer from postgresql://u:p1@h/db?password=p2&x=1"))
    assert text == "no answer from postgresql://h/db?&x=1"


def test_an_error_is_a_line(tmp_path: Path) -> None:
    where = Target("http://u:p@h", "e", "r", Storage(str(tmp_path)))
    for error, line in (
        (OSError("\n\nno answer from http://u:p@h\n<html>"), "no answer from http://h"),
        (OSError("  \n"), "OSError"),
        (OSError("x" * 4000), "x" * 300),
    ):
        assert where.reason(error) == line

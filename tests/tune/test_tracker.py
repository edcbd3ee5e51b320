"""The Tracker of a sweep, and its records in MLflow."""

import threading
from pathlib import Path

import pytest

from app.config import Config
from app.deliver import main as deliver
from tests.test_tracking import wait_for
from tests.tune.test_space import space_of
from tune.spec import Options, open_sweep
from tune.tracker import PARENT, SweepTracker


@pytest.mark.filterwarnings("ignore")  # mlflow's own
def test_what_is_left_over_of_a_sweep_is_delivered_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri, root = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "s"
    base = Config(run_name="s", output_dir=str(tmp_path), tracking_uri=uri)
    open_sweep(Options(), space_of(tmp_path, "lr: {uniform: [0.1, 0.2]}\n"), base)
    unreachable = SweepTracker(str(root / "tracking"), str(root), None, "evenkeel", "s")
    unreachable.call(PARENT, "begin", {"seed": "0"}, {}, "seed: 0\n")
    unreachable.call("trial-0000", "begin", {"lr": "0.1"}, {}, "lr: 0.1\n")
    unreachable.call("trial-0000", "metrics", 6, {"val/accuracy": 0.5, "epoch": 1.0})
    unreachable.call("trial-0000", "finish", "KILLED", None)
    assert [v["step"] for v in unreachable.call("trial-0000", "validations")] == [6]

    assert deliver([str(root)]) == 0
    import mlflow

    client = mlflow.MlflowClient(uri)
    runs = client.search_runs([client.get_experiment_by_name("evenkeel").experiment_id])  # type: ignore[union-attr]  # it is there
    found = {str(run.info.run_name): run for run in runs}
    assert sorted(found) == ["s", "trial-0000"]
    nested = found["trial-0000"]
    assert nested.data.tags["mlflow.parentRunId"] == found["s"].info.run_id
    assert (nested.data.params["lr"], nested.data.metrics["val/accuracy"]) == ("0.1", 0.5)
    assert nested.info.status == "KILLED"
    assert f"run {found['s'].info.run_id}" in capsys.readouterr().out


def deliveries() -> int:
    return sum(thread.name == "delivery" for thread in threading.enumerate())


@pytest.mark.filterwarnings("ignore")  # mlflow's own
def test_trials_that_have_ended_hold_nothing_open(tmp_path: Path) -> None:
    uri, root = f"sqlite:///{tmp_path}/mlflow.db", str(tmp_path / "s")
    before = deliveries()
    tracker = SweepTracker(f"{root}/tracking", root, uri, "evenkeel", "s")
    tracker.call(PARENT, "begin", {}, {}, "")
    for number in range(3):
        tracker.call(f"trial-{number:04d}", "begin", {"lr": "0.1"}, {}, "")
        tracker.call(f"trial-{number:04d}", "finish", "FINISHED", None)
        wait_for(lambda: tracker.delivery_state().all_sent)
    wait_for(lambda: deliveries() == before + 2)
    assert list(tracker._trials) == ["trial-0002"]
    # What comes later is delivered all the same.
    tracker.call("trial-0000", "tags", {"trial_status": "finished"})
    wait_for(lambda: tracker.delivery_state().all_sent)
    import mlflow

    client = mlflow.MlflowClient(uri)
    runs = client.search_runs([client.get_experiment_by_name("evenkeel").experiment_id])  # type: ignore[union-attr]  # it is there
    first = next(run for run in runs if run.info.run_name == "trial-0000")
    assert (len(runs), first.data.tags["trial_status"], first.info.status) == (4, "finished", "FINISHED")

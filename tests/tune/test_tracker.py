"""The Tracker of a sweep, and its records in MLflow."""

from pathlib import Path

import pytest

from app.config import Config
from app.deliver import main as deliver
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

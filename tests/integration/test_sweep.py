"""Whole sweeps on a local Ray: each search and scheduler, and what becomes of trials."""

import json
from pathlib import Path
from typing import Any

import mlflow
import pytest

from app.config import Config
from app.errors import TrainingFailed
from app.runs import tracking_directory
from tests.integration.test_fit import TINY, config
from tune.ledger import Trial, read_trials
from tune.search import Optuna
from tune.space import read_space
from tune.sweep import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("local_ray"),
    pytest.mark.filterwarnings("ignore"),  # ray's, mlflow's and optuna's own
]

SPACE = "lr: {loguniform: [1e-3, 1e-1]}\nweight_decay: {choice: [0.0, 0.01]}\n"


def sweep(tmp_path: Path, *words: str, space: str = SPACE, code: int = 0, **settings: Any) -> dict[int, Trial]:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "space.yaml").write_text(space)
    own = {**TINY, "output_dir": tmp_path / "runs", "tracking_uri": "none", "cpus_per_worker": 0.5, **settings}
    flags = [word for name, value in own.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["--space", str(tmp_path / "space.yaml"), "--sweep-name", "s", *flags, *words]) == code
    return read_trials(tracking_directory(str(tmp_path / "runs" / "s")) / "trials")


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def mlflow_runs(uri: str) -> dict[str, Any]:
    """By name: the sweep's, and those nested in it."""
    client = mlflow.MlflowClient(uri)
    runs = client.search_runs([client.get_experiment_by_name("evenkeel").experiment_id])  # type: ignore[union-attr]  # it is there
    found = {str(run.info.run_name): run for run in runs}
    assert len(found) == len(runs)
    for name, run in found.items():
        assert run.data.tags.get("mlflow.parentRunId") == (None if name == "s" else found["s"].info.run_id)
    return found


def statuses(trials: dict[int, Trial]) -> list[str]:
    return [trials[number].status for number in sorted(trials)]


@pytest.mark.ci
def test_chance_in_one_mlflow_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    trials = sweep(tmp_path, "--num-trials", "3", "--register", "tiny", tracking_uri=uri)
    assert statuses(trials) == ["finished"] * 3
    assert all(len(trial.validations) == 3 and trial.steps == 18 for trial in trials.values())
    found = last_line(capsys)
    best = max(trials.values(), key=lambda trial: trial.value("val/accuracy") or 0)
    assert found["best_value"] == best.value("val/accuracy")
    assert found["counts"] == {"finished": 3, "stopped": 0, "failed": 0, "killed": 0, "running": 0}
    first = trials[found["best_trial"]]
    assert found["config"]["lr"] == first.settings["lr"]
    assert Path(found["checkpoint"]).is_dir()

    client, nested = mlflow.MlflowClient(uri), mlflow_runs(uri)
    parent = nested.pop("s")
    assert parent.info.run_id == found["run_id"]
    assert sorted(nested) == ["trial-0000", "trial-0001", "trial-0002"]
    for number, trial in trials.items():
        run = nested[f"trial-{number:04d}"]
        assert (run.info.status, run.data.tags["trial_status"]) == ("FINISHED", "finished")
        assert float(run.data.params["lr"]) == trial.settings["lr"]
        assert [m.value for m in client.get_metric_history(run.info.run_id, "val/accuracy")][:3] == [
            validation["metrics"]["val/accuracy"] for validation in trial.validations
        ]
    files = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert files == {"space.yaml", "best.yaml", "config.yaml", "pictures"}
    pictures = {file.path for file in client.list_artifacts(parent.info.run_id, "pictures")}
    assert pictures == {f"pictures/{name}.png" for name in ("best_so_far", "by_setting", "parallel_coordinates")}
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["best/val/accuracy"] == found["best_value"]
    version = client.get_model_version_by_alias("tiny", "champion")
    assert version.run_id == nested[first.name].info.run_id

    # The same command again has nothing left to do, and --show tells the same.
    again = sweep(tmp_path, "--num-trials", "3", "--register", "tiny", tracking_uri=uri)
    assert {number: trial.validations for number, trial in again.items()} == {
        number: trial.validations for number, trial in trials.items()
    }
    capsys.readouterr()
    assert main(["--show", "s", "--output-dir", str(tmp_path / "runs")]) == 0
    assert last_line(capsys) == found
    # In full, and as the trial was.
    assert Config(**found["config"]).run_name == "s-best"


@pytest.mark.parametrize("search", ["grid", "optuna"])
def test_searches(tmp_path: Path, search: str) -> None:
    space = "lr: {grid: [0.001, 0.02]}\nweight_decay: {choice: [0.0, 0.01]}\n" if search == "grid" else SPACE
    words = () if search == "grid" else ("--num-trials", "4", "--max-concurrent", "1")
    trials = sweep(tmp_path, "--search", search, *words, space=space, epochs=2)
    assert statuses(trials) == ["finished"] * 4
    assert len({json.dumps(trial.settings) for trial in trials.values()}) == 4
    if search == "optuna":  # each was asked for when the ones before were known
        base = config(tmp_path)
        study = Optuna(read_space(str(tmp_path / "space.yaml"), base), base, "val/accuracy", [])
        for number, trial in sorted(trials.items()):
            assert study.settings(number) == trial.settings
            study.tell(trial)


@pytest.mark.parametrize("scheduler", ["asha", "median"])
def test_losers_are_given_up(tmp_path: Path, scheduler: str) -> None:
    space = "lr: {grid: [0.03, 0.02, 0.01, 0.000001, 0.0000012, 0.0000011]}\n"
    words = ["--scheduler", scheduler, "--search", "grid", "--max-concurrent", "1"]
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    trials = sweep(tmp_path, *words, space=space, epochs=6, tracking_uri=uri)
    assert statuses(trials)[:3].count("finished") >= 1
    given_up = [trial for trial in trials.values() if trial.status == "stopped"]
    nested = mlflow_runs(uri)
    assert {trial.number for trial in given_up} >= {4, 5}
    for trial in given_up:
        assert trial.steps < 36
        run = json.loads((tmp_path / "runs" / "s" / trial.name / "run.json").read_text())
        assert (run["status"], run["summary"]["step"]) == ("stopped", trial.steps)
        assert nested[trial.name].info.status == "KILLED"
        assert nested[trial.name].data.tags["trial_status"] == "stopped"
    best = max(trials.values(), key=lambda trial: trial.value("val/accuracy") or 0)
    assert best.status == "finished"


def test_within_an_epoch(tmp_path: Path) -> None:
    space = "lr: {grid: [0.03, 0.000001, 0.0000011]}\n"
    words = ["--scheduler", "asha", "--grace-epochs", "0.3", "--search", "grid", "--max-concurrent", "1"]
    trials = sweep(tmp_path, *words, space=space, epochs=2, validate_every=2)
    assert [validation["step"] for validation in trials[0].validations] == [2, 4, 6, 8, 10, 12]
    assert trials[2].status == "stopped"
    assert trials[2].steps < 6


def test_a_population_goes_on_from_its_best(tmp_path: Path) -> None:
    # Room for one, so that they take turns: small as they are, they would not meet otherwise.
    settings = {"space": "lr: {loguniform: [1e-6, 3e-2]}\n", "epochs": 6, "cpus_per_worker": 4}
    trials = sweep(tmp_path, "--scheduler", "pbt", "--num-trials", "4", **settings)
    assert statuses(trials) == ["finished"] * 4
    files = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/s/trial-*/checkpoints/*/*")}
    assert files
    again = sweep(tmp_path, "--scheduler", "pbt", "--num-trials", "4", **settings)
    assert again == trials
    assert {path: path.stat().st_mtime_ns for path in files} == files
    exploited = [(trial, exploit) for trial in trials.values() for exploit in trial.exploits]
    assert exploited
    for trial, exploit in exploited:
        assert exploit["donor"] != trial.number
        assert exploit["sha256"]
        assert 1e-6 <= trial.settings["lr"] <= 3e-2  # type: ignore[operator]  # a number


def test_a_population_of_several_workers(tmp_path: Path) -> None:
    space, words = "lr: {loguniform: [1e-6, 3e-2]}\n", ("--scheduler", "pbt", "--num-trials", "2")
    # Two seconds an epoch, so that they meet.
    slow = {"model": "tests.faults.common:slow_net", "batch_size": 3, "epochs": 6, "cpus_per_worker": 1}
    words = (*words, "--metric", "val/loss", "--workers-per-trial", "2", "--perturb-epochs", "3")
    trials = sweep(tmp_path, *words, space=space, **slow)
    assert statuses(trials) == ["finished"] * 2
    for trial in trials.values():
        assert [validation["step"] for validation in trial.validations] == [19, 38, 57, 76, 95, 114]
    assert [exploit["donor"] for trial in trials.values() for exploit in trial.exploits]


def test_a_trial_that_fails_is_one_trial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri, space = f"sqlite:///{tmp_path}/mlflow.db", "lr: {grid: [1.0e+30, 0.01]}\n"
    trials = sweep(tmp_path, "--search", "grid", space=space, optimizer="sgd", epochs=2, tracking_uri=uri)
    assert statuses(trials) == ["failed", "finished"]
    assert "the loss is" in str(trials[0].error)
    assert last_line(capsys)["best_trial"] == 1
    run = json.loads((tmp_path / "runs" / "s" / "trial-0000" / "run.json").read_text())
    assert run["status"] == "failed"
    runs = mlflow_runs(uri)
    assert [runs[name].info.status for name in ("s", "trial-0000", "trial-0001")] == ["FINISHED", "FAILED", "FINISHED"]


def test_what_is_known_is_told_where_ray_tune_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(self: Any) -> None:
        raise RuntimeError("a traceback\nthe reason")

    monkeypatch.setattr("ray.tune.Tuner.fit", fit)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    with pytest.raises(TrainingFailed, match="Ray Tune ended: the reason; the same command goes on"):
        sweep(tmp_path, tracking_uri=uri)
    assert last_line(capsys)["status"] == "failed"
    assert mlflow_runs(uri)["s"].info.status == "FAILED"


def test_several_workers_a_trial(tmp_path: Path) -> None:
    trials = sweep(tmp_path, "--num-trials", "2", "--workers-per-trial", "2", cpus_per_worker=1, epochs=2)
    assert statuses(trials) == ["finished"] * 2
    alone = sweep(tmp_path / "alone", "--num-trials", "2", epochs=2)
    for number in (0, 1):
        one, two = (each[number].validations for each in (alone, trials))
        assert [v["metrics"]["val/loss"] for v in one] == pytest.approx(
            [v["metrics"]["val/loss"] for v in two], abs=1e-4
        )

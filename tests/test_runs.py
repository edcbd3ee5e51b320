"""A run's name is its identity."""

from pathlib import Path

import pytest

from app.config import Config
from app.errors import BadInput
from app.runs import (
    Run,
    Summary,
    open_run,
    read_run,
    remove_leftovers,
    resolved,
    run_storage,
    tracking_directory,
    write_run,
)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return resolved(Config(run_name="r", output_dir=str(tmp_path / "runs"), schedule="constant", epochs=5))


def finished(config: Config) -> Run:
    summary = Summary("r", "id", "finished", "c", 5, 55, 6475, 900.0, {"test/accuracy": 0.99})
    run = Run(config, "finished", summary)
    write_run(run)
    return run


def changed(config: Config, **settings) -> Config:
    return Config(**{**config.model_dump(), **settings})


def test_a_new_name_is_a_new_run(config: Config) -> None:
    assert open_run(config) == Run(config, "running")


def test_a_finished_run_comes_back_with_its_summary(config: Config) -> None:
    run = finished(config)
    assert open_run(config) == run


def test_a_killed_run_goes_on(config: Config) -> None:
    write_run(Run(config, "killed"))
    assert open_run(config).status == "running"


def test_every_field_that_changes_the_result_is_listed_with_both_values(config: Config) -> None:
    write_run(Run(config, "killed"))
    with pytest.raises(BadInput) as error:
        open_run(changed(config, lr=0.5, model="resnet18", seed=3))
    for line in (
        "--run-name r exists",
        "--lr: it has 0.002, you gave 0.5",
        "--model: it has mnist-cnn, you gave resnet18",
        "--seed: it has 0, you gave 3",
    ):
        assert line in str(error.value)


def test_what_does_not_change_the_result_may_differ(config: Config) -> None:
    write_run(Run(config, "killed"))
    other = changed(config, num_workers=7, cpus_per_worker=0.5, device="cpu", loader_workers=1, log_every=1)
    assert open_run(changed(other, max_failures=0, keep_checkpoints=5, tracking_uri="none")).status == "running"


@pytest.mark.parametrize("settings", [{"epochs": 6}, {"early_stop_patience": None, "epochs": 9}])
def test_a_longer_run_goes_on_where_the_schedule_allows_it(config: Config, settings: dict) -> None:
    finished(config)
    assert open_run(changed(config, **settings)) == Run(changed(config, **settings), "running")


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_longer_run_is_refused_where_the_schedule_depends_on_the_length(config: Config, schedule: str) -> None:
    config = changed(config, schedule=schedule)
    finished(config)
    with pytest.raises(BadInput, match=f"--epochs: it has 5, you gave 6 \\(--schedule {schedule} depends on it"):
        open_run(changed(config, epochs=6))


def test_a_shorter_run_is_refused(config: Config) -> None:
    finished(config)
    with pytest.raises(BadInput, match=r"--epochs: it has 5, you gave 4 \(it can only be raised\)"):
        open_run(changed(config, epochs=4))
    with pytest.raises(BadInput, match=r"--max-steps: it has None, you gave 4 \(it can only be raised\)"):
        open_run(changed(config, max_steps=4))


def test_a_damaged_record_says_what_to_do(config: Config) -> None:
    finished(config)
    path = Path(config.output_dir) / "r" / "run.json"
    path.write_text(path.read_text()[:50])
    with pytest.raises(BadInput, match=r"run\.json cannot be used .* another --run-name"):
        open_run(config)


def test_resolving_makes_paths_mean_the_same_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = resolved(Config(dataset="mnist"))
    assert found.output_dir == str(tmp_path / "runs")
    assert found.data_dir == str(tmp_path / "data")
    assert found.tracking_uri == f"sqlite:///{tmp_path}/mlflow.db"
    assert resolved(found) == found
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    assert resolved(Config()).tracking_uri == "http://server:5000"
    assert resolved(Config(output_dir="s3://bucket/runs")).output_dir == "s3://bucket/runs"


def test_generated_names_are_valid_and_differ() -> None:
    names = {resolved(Config(model="tests.common:PlainNet")).run_name for _ in range(5)}
    assert len(names) == 5
    assert all(Config(run_name=name).run_name == name for name in names)


def test_leftovers_of_a_killed_process_are_removed(config: Config) -> None:
    folder = Path(config.output_dir) / "r" / "checkpoints"
    (folder / ".unfinished-abc").mkdir(parents=True)
    (folder / "checkpoint-000000001").mkdir()
    remove_leftovers(config)
    assert [path.name for path in folder.iterdir()] == ["checkpoint-000000001"]


def test_a_run_in_an_object_store_keeps_its_spool_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert tracking_directory("s3://bucket/runs/r") == tmp_path / "runs" / "r" / "tracking"
    assert tracking_directory("/data/runs/r") == Path("/data/runs/r/tracking")


def test_a_run_is_read_back(config: Config) -> None:
    assert read_run(run_storage(config)) is None
    run = finished(config)
    assert read_run(run_storage(config)) == run

"""A run's name is its identity."""

import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from app.config import Config, flag
from app.data.tokens import train_tokenizer
from app.errors import BadInput
from app.runs import (
    Run,
    Summary,
    checkpoint_names,
    checkpoint_storage,
    discard_run,
    find_checkpoint,
    forget_if_not_begun,
    open_run,
    read_run,
    remove_leftovers,
    resolved,
    run_storage,
    store_tokenizer,
    tokenizer_to_go_on_with,
    tracking_directory,
    write_run,
)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Of a run that has a checkpoint."""
    (tmp_path / "runs" / "r" / "checkpoints" / "checkpoint-000000001").mkdir(parents=True)
    return resolved(Config(run_name="r", output_dir=str(tmp_path / "runs"), schedule="constant", epochs=5))


def finished(config: Config) -> Run:
    summary = Summary("r", "id", "finished", "c", 5, 55, 6475, 900.0, 30.5, 7.2, {"test/accuracy": 0.99})
    run = Run(config, "finished", summary)
    write_run(run)
    return run


def changed(config: Config, **settings) -> Config:
    return Config(**{**config.model_dump(), **settings})


def test_a_new_name_is_a_new_run(config: Config) -> None:
    other = changed(config, run_name="other")
    assert open_run(other) == Run(other, "running")


def test_a_run_that_was_refused_before_its_first_checkpoint_leaves_its_name_free(config: Config) -> None:
    write_run(Run(config, "failed"))
    root = Path(config.output_dir) / "r"
    (root / "checkpoints" / "checkpoint-000000001").rmdir()
    (root / "tracking").mkdir()
    (root / "mlflow.json").write_text("{}")
    store_tokenizer(config, "{}")
    other = changed(config, lr=0.5)
    assert open_run(other) == Run(other, "running")
    forget_if_not_begun(other)
    assert sorted(path.name for path in root.iterdir()) == ["checkpoints", "run.json"]


def test_the_tokenizer_is_that_of_a_run_that_goes_on(config: Config) -> None:
    config = changed(config, dataset="text", data_dir="/t.csv", model="text-lstm")
    new = changed(config, run_name="new")
    store_tokenizer(new, "of a run that never began")
    assert tokenizer_to_go_on_with(new) is None
    with pytest.raises(
        BadInput, match=r"--run-name r can only go on with .*/r/tokenizer\.json: it is missing; restore"
    ):
        tokenizer_to_go_on_with(config)
    for damaged in ("", "{", "null", Tokenizer(models.BPE()).to_str()):
        store_tokenizer(config, damaged)
        with pytest.raises(BadInput, match=r"the run's tokenizer .*; restore it: a checkpoint has it in state\.json"):
            tokenizer_to_go_on_with(config)
    (Path(config.output_dir) / "r" / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(BadInput, match=r"restore it: a checkpoint has it"):
        tokenizer_to_go_on_with(config)
    own = train_tokenizer("word", 20, 5, ["its own"])
    store_tokenizer(config, own)
    assert tokenizer_to_go_on_with(config) == own


def test_checkpoints_that_no_record_explains_are_not_continued(config: Config) -> None:
    with pytest.raises(BadInput, match=r"has checkpoints, but there is no run\.json"):
        open_run(config)


def test_what_is_not_ours_is_no_checkpoint(config: Config) -> None:
    folder = Path(config.output_dir) / "r" / "checkpoints"
    (folder / "checkpoint-000000001-backup").mkdir()
    (folder / "checkpoint-notes.txt").write_text("")
    assert checkpoint_names(checkpoint_storage(config)) == ["checkpoint-000000001"]


@pytest.mark.parametrize("uri", ["mlruns", "file:///tmp/mlruns", "foo://x"])
def test_tracking_that_mlflow_does_not_take(uri: str) -> None:
    with pytest.raises(BadInput, match=f"--tracking-uri {uri}: allowed are"):
        resolved(Config(tracking_uri=uri))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("output_dir", {}),
        ("data_dir", {"dataset": "image-folder"}),
        ("data_dir", {"dataset": "my_data:load"}),
        ("weights", {}),
        ("tokenizer", {"dataset": "stdlib-docs", "model": "text-lstm"}),
        ("subset_file", {"sampler": "subset"}),
    ],
)
@pytest.mark.parametrize(
    "uri",
    [
        "s3://key:HIDDEN@bucket/runs",
        "abfss://container:HIDDEN@account.dfs.core.windows.net/runs",
        "abfs://:HIDDEN@account/container/runs",
        "abfss://container@account.dfs.core.windows.net/runs?tenant_id=t&client_id=c&client_secret=HIDDEN",
        "abfss://container@account.dfs.core.windows.net/runs?sv=2024&sig=HIDDEN",
        "postgresql://host/db?user=u&password=HIDDEN",
    ],
)
def test_passwords_do_not_belong_into_settings(name: str, settings: dict, uri: str) -> None:
    with pytest.raises(BadInput, match=f"{flag(name)} has a password or a key in it.*: AWS_ACCESS_KEY_ID") as error:
        resolved(Config(**{**settings, name: uri}))
    assert "HIDDEN" not in str(error.value)


def test_neither_do_they_belong_into_the_name_of_a_checkpoint() -> None:
    with pytest.raises(BadInput, match="s3://bucket/runs/r has a password or a key in it"):
        find_checkpoint("s3://key:HIDDEN@bucket/runs/r")


@pytest.mark.parametrize(
    "uri",
    [
        "abfss://container@account.dfs.core.windows.net/runs",
        "abfss://account.dfs.core.windows.net/container?credential_kind=workload_identity&client_id=c",
        "s3://bucket/runs?region=eu-west-1&endpoint_override=host%3A9000",
        "/here/a:b@c?token=1",
        "s3://[bucket/runs",
    ],
)
def test_what_has_no_password_in_it(uri: str) -> None:
    assert resolved(Config(output_dir=uri)).output_dir == uri


def test_a_weights_file_is_looked_for_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=r"--weights w\.pt: no such file"):
        resolved(Config(weights="w.pt"))
    (tmp_path / "w.pt").write_text("")
    assert resolved(Config(weights="w.pt")).weights == str(tmp_path / "w.pt")


def test_a_finished_run_comes_back_with_its_summary(config: Config) -> None:
    run = finished(config)
    assert open_run(config) == run


def test_a_finished_run_without_its_checkpoints_is_still_finished(config: Config) -> None:
    run = finished(config)
    shutil.rmtree(Path(config.output_dir) / "r" / "checkpoints")
    tracking = Path(config.output_dir) / "r" / "tracking"
    tracking.mkdir()
    assert open_run(config) == run
    forget_if_not_begun(config)
    assert tracking.exists()
    with pytest.raises(BadInput, match="with settings that give another result"):
        open_run(changed(config, lr=0.5))
    with pytest.raises(BadInput, match=r"is finished, and its checkpoints in .* are gone: .* with --start-over"):
        open_run(changed(config, epochs=9))


def test_a_run_that_has_trained_is_not_forgotten_without_its_checkpoints(config: Config) -> None:
    summary = Summary("r", "id", "killed", "c", 2, 20, 2560, 900.0)
    write_run(Run(config, "killed", summary))
    shutil.rmtree(Path(config.output_dir) / "r" / "checkpoints")
    with pytest.raises(BadInput, match=r"is killed, and its checkpoints in .* are gone"):
        open_run(config)


def test_a_run_is_discarded(config: Config) -> None:
    finished(config)
    root = Path(config.output_dir) / "r"
    (root / "tracking").mkdir()
    (root / "run.lock").write_text("held")
    (root / "mlflow.json").write_text("{}")
    discard_run(config)
    assert [path.name for path in root.iterdir()] == ["run.lock"]
    other = changed(config, lr=0.5)
    assert open_run(other) == Run(other, "running")
    discard_run(other)  # also where there is nothing
    (root / "sweep.json").write_text("{}")
    with pytest.raises(BadInput, match="is a sweep's"):
        discard_run(other)


def test_a_killed_run_goes_on(config: Config) -> None:
    write_run(Run(config, "killed"))
    assert open_run(config).status == "running"


def test_every_field_that_changes_the_result_is_listed_with_both_values(config: Config) -> None:
    write_run(Run(config, "killed"))
    with pytest.raises(BadInput) as error:
        open_run(changed(config, lr=0.5, model="resnet18", seed=3, micro_batch_size=8))
    for line in (
        "--run-name r exists",
        "--lr: it has 0.002, you gave 0.5",
        "--model: it has mnist-cnn, you gave resnet18",
        "--seed: it has 0, you gave 3",
        "--micro-batch-size: it has None, you gave 8",
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
    remove_leftovers(config)
    assert [path.name for path in folder.iterdir()] == ["checkpoint-000000001"]


def test_a_run_in_an_object_store_keeps_its_spool_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = tracking_directory("s3://bucket/runs/r")
    assert found.parent == tmp_path / "runs" / "r"
    assert found != tracking_directory("s3://another/runs/r")
    assert tracking_directory("/data/runs/r") == Path("/data/runs/r/tracking")


def test_a_run_is_read_back(config: Config) -> None:
    assert read_run(run_storage(config)) is None
    run = finished(config)
    assert read_run(run_storage(config)) == run


@pytest.mark.parametrize("root", ["rclone"], indirect=True)
def test_a_store_that_may_not_be_listed(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    with pytest.raises(BadInput, match=f"--output-dir: listing {root}/r was refused .*InvalidAccessKeyId"):
        open_run(Config(run_name="r", output_dir=root))

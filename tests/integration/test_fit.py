"""Whole runs on a local Ray."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from app.checkpoint import load_checkpoint
from app.config import Config
from app.config_file import to_yaml
from app.errors import BadInput
from app.fit import fit
from app.runs import checkpoint_names, read_run
from app.spool import read_records
from app.storage import Storage
from app.trained import find_checkpoint, load_trained
from tests.common import write_images

pytestmark = [
    pytest.mark.usefixtures("local_ray"),
    pytest.mark.filterwarnings("ignore"),  # ray's, mlflow's and alembic's own
]

# 57 samples in batches of 10: 6 steps an epoch, 18 in all.
TINY = {"dataset": "tests.common:tiny_splits", "model": "tests.common:PlainNet", "epochs": 3, "batch_size": 10}
TINY |= {"schedule": "constant", "log_every": 2, "cpus_per_worker": 0.5, "lr": 0.01, "keep_checkpoints": 3}


def config(tmp_path: Path, **settings) -> Config:
    places = {"output_dir": str(tmp_path / "runs"), "tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"}
    return Config(**{**TINY, **places, **settings})


def recorded(tmp_path: Path, run_name: str, key: str) -> list[tuple[int, float]]:
    records = read_records(tmp_path / "runs" / run_name / "tracking", 0)
    return [(r["step"], r["values"][key]) for r, _ in records if r["kind"] == "metrics" and key in r["values"]]


def final_weights(tmp_path: Path, run_name: str) -> dict[str, torch.Tensor]:
    storage = Storage(str(tmp_path / "runs" / run_name / "checkpoints"))
    return load_checkpoint(storage, checkpoint_names(storage)[-1]).model


@pytest.mark.slow
@pytest.mark.ci
def test_a_run_trains_tracks_evaluates_and_is_resumed_longer_on_other_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary, exit_code = fit(config(tmp_path, run_name="r", num_workers=2))
    assert (exit_code, summary.status, summary.epoch, summary.step, summary.samples_seen) == (0, "finished", 3, 18, 171)
    assert summary.metrics.keys() == {"val/accuracy", "val/loss", "test/accuracy", "test/loss"}
    assert summary.metrics["test/accuracy"] > 0.8  # four classes
    assert summary.checkpoint is not None
    assert list(Path(summary.checkpoint).glob("*.safetensors"))
    assert json.loads(summary.to_json())["run_id"] == summary.run_id

    # MLflow has it all, in one run.
    import mlflow
    from mlflow.pytorch import load_model

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    assert summary.run_id is not None
    run = client.get_run(summary.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["batch_size"] == "10"
    assert run.data.tags["world_size"] == "2"
    assert run.data.metrics["test/accuracy"] == summary.metrics["test/accuracy"]
    assert {"lr", "perf/samples_per_s", "perf/step_s", "perf/data_wait_share"} <= run.data.metrics.keys()
    steps = [metric.step for metric in client.get_metric_history(summary.run_id, "train/loss")]
    assert steps == list(range(2, 19, 2))
    assert [metric.step for metric in client.get_metric_history(summary.run_id, "val/loss")] == [6, 12, 18]
    pictures = [file.path for file in client.list_artifacts(summary.run_id, "pictures")]
    assert {"pictures/confusion_matrix.png", "pictures/learning_curves.png"} <= set(pictures)

    # The model in MLflow is the network of the best checkpoint, from pixels to logits.
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    (model,) = client.search_logged_models([run.info.experiment_id])
    assert model.source_run_id == summary.run_id
    pixels = torch.randint(0, 256, (5, 1, 8, 8), dtype=torch.uint8)
    loaded = load_model(model.model_uri)

    expected = load_trained(summary.checkpoint).classifier()(pixels)
    torch.testing.assert_close(loaded(pixels), expected, rtol=1e-5, atol=1e-6)

    # The same again says that it is finished.
    assert fit(config(tmp_path, run_name="r")) == (summary, 0)

    # Longer goes on in the same MLflow run, on one worker; from the newest checkpoint that is good.
    newest = tmp_path / "runs" / "r" / "checkpoints" / "checkpoint-000000018" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-8])
    longer, exit_code = fit(config(tmp_path, run_name="r", num_workers=1, epochs=4))
    assert (exit_code, longer.status, longer.step, longer.run_id) == (0, "finished", 24, summary.run_id)
    steps = [metric.step for metric in client.get_metric_history(summary.run_id, "train/loss")]
    assert steps == list(range(2, 25, 2))
    assert find_checkpoint(str(tmp_path / "runs" / "r")) == longer.checkpoint
    output = capsys.readouterr().out
    assert f"skipping {newest.parent}: model.safetensors has" in output
    assert "checkpoint-000000012, after step 12" in output


def interrupted(tmp_path: Path, settings: Config, at_step: int) -> subprocess.CompletedProcess[str]:
    """The command as a person starts it, and SIGTERM once its records have come to a step."""
    (tmp_path / "settings.yaml").write_text(to_yaml(settings))
    argv = [sys.executable, "-m", "app.train", "--config", str(tmp_path / "settings.yaml")]
    spool = tmp_path / "runs" / str(settings.run_name) / "tracking"
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            steps = (
                recorded(tmp_path, str(settings.run_name), "train/loss") if (spool / "records.jsonl").exists() else []
            )
            if steps and steps[-1][0] >= at_step:
                process.send_signal(signal.SIGTERM)
                break
            time.sleep(0.05)
        stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(argv, process.returncode, stdout, stderr)


@pytest.mark.faults  # for its length
@pytest.mark.ci
def test_interrupted_mid_epoch_and_resumed_it_is_the_run_that_was_never_interrupted(tmp_path: Path) -> None:
    long = {"num_workers": 2, "epochs": 100, "model": "tests.integration.test_fit:slow_net", "tracking_uri": "none"}
    done = interrupted(tmp_path, config(tmp_path, run_name="stopped", **long), at_step=8)
    assert done.returncode == 143, done.stderr
    assert "Traceback" not in done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["status"] == "killed"
    assert 8 <= summary["step"] < 600
    run = read_run(Storage(str(tmp_path / "runs" / "stopped")))
    assert run is not None
    assert run.status == "killed"

    # How far it came decides how long both go on.
    epochs = summary["epoch"] + 1
    rewrite_epochs(tmp_path / "runs" / "stopped" / "run.json", epochs)
    resumed, _ = fit(config(tmp_path, run_name="stopped", **{**long, "epochs": epochs}))
    whole, _ = fit(config(tmp_path, run_name="whole", **{**long, "epochs": epochs}))
    assert (resumed.step, resumed.samples_seen) == (whole.step, whole.samples_seen) == (6 * epochs, 57 * epochs)
    assert resumed.metrics == whole.metrics
    assert recorded(tmp_path, "stopped", "train/loss") == recorded(tmp_path, "whole", "train/loss")
    weights = final_weights(tmp_path, "whole")
    for name, tensor in final_weights(tmp_path, "stopped").items():
        assert torch.equal(tensor, weights[name])


def rewrite_epochs(path: Path, epochs: int) -> None:
    """Raising is allowed and lowering is not; the test cannot know beforehand how far the run will come."""
    record = json.loads(path.read_text())
    record["config"]["epochs"] = epochs
    path.write_text(json.dumps(record))


def slow_net(num_classes: int, input_shape: tuple[int, int, int]) -> torch.nn.Module:
    """Slow enough that a run of it can be stopped on its way."""
    from tests.common import PlainNet

    class Slow(PlainNet):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            time.sleep(0.05)
            return super().forward(images)

    return Slow(num_classes, input_shape)


@pytest.mark.slow
@pytest.mark.ci
def test_a_loss_that_is_no_number_fails_the_run_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    settings = {"lr": 1e30, "optimizer": "sgd", "warmup_epochs": 0.0, "num_workers": 2}
    summary, exit_code = fit(config(tmp_path, run_name="nan", **settings))
    assert (exit_code, summary.status) == (1, "failed")
    assert summary.error is not None
    assert f"at step {summary.step + 1}" in summary.error
    assert summary.checkpoint is not None
    kept = load_checkpoint(Storage(summary.checkpoint), "")
    assert all(tensor.isfinite().all() for tensor in kept.model.values())

    import mlflow

    assert summary.run_id is not None
    assert mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_run(summary.run_id).info.status == "FAILED"


@pytest.mark.slow
def test_a_file_that_goes_bad_while_one_rank_reads_it_ends_the_run_and_is_named(tmp_path: Path) -> None:
    write_images(tmp_path / "images", {"cat": 30, "dog": 30}, size=(64, 64))
    path = tmp_path / "images" / "cat" / "007.png"
    path.write_bytes(path.read_bytes()[:3000])  # its header is good
    settings = {"dataset": "image-folder", "data_dir": str(tmp_path / "images"), "image_size": 8, "in_memory_mb": 0}
    with pytest.raises(BadInput, match=r"cat/007\.png is no readable image"):
        fit(config(tmp_path, run_name="bad", num_workers=2, tracking_uri="none", max_failures=0, **settings))


def test_more_workers_than_the_cluster_has(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"--num-workers 9 x --cpus-per-worker 1 needs 9 CPUs, and the cluster has 4"):
        fit(config(tmp_path, num_workers=9, cpus_per_worker=1.0))


def test_gpus_where_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--device cuda with --num-workers 1 needs as many GPUs"):
        fit(config(tmp_path, device="cuda"))
    with pytest.raises(BadInput, match="--sync-batchnorm needs GPUs"):
        fit(config(tmp_path, sync_batchnorm=True))

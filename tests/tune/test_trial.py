"""A trial by itself: its steps, and what is handed from one to another."""

import errno
import hashlib
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune

from app.checkpoint import MODEL, problem_with
from app.cluster import Cluster
from app.config import Config
from app.data.splits import Splits
from app.errors import TrainingFailed, Unavailable
from app.runs import resolved, tracking_directory
from app.spool import read_records
from app.storage import Storage
from tests.common import Failing
from tests.integration.test_fit import config as tiny
from tests.stores import environment
from tune.ledger import Trial
from tune.tracker import SweepTracker
from tune.trial import FILES, SweepTrial, Task

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.filterwarnings("ignore")]  # ray's own


@pytest.fixture
def task(tmp_path: Path) -> Task:
    own = {"run_name": "s", "num_workers": 1, "tracking_uri": "none", "ema_decay": 0.0}
    base = resolved(tiny(tmp_path, **own))
    root = str(tmp_path / "runs" / "s")
    tracker = ray.remote(SweepTracker).options(num_cpus=0).remote(f"{root}/tracking", root, None, "evenkeel", "s")  # type: ignore[attr-defined]  # ray's stubs
    return Task(base.model_dump(), root, tracker, Cluster(False, 1, ()))


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trial in this process; what has begun is ended."""
    monkeypatch.setattr("ray.tune.trainable.trainable.DEFAULT_STORAGE_PATH", str(tmp_path))
    made: list[SweepTrial] = []

    def make(task: Task, number: int, **settings: Any) -> SweepTrial:
        in_process = tune.with_parameters(SweepTrial, task=task)
        made.append(in_process({"number": number, **settings}))
        return made[-1]

    yield make
    for each in made:
        each.cleanup()


Make = Callable[..., SweepTrial]


def test_a_step_is_a_validation_and_the_last_one_the_outcome(task: Task, trial: Make) -> None:
    task = replace(task, base=task.base | {"epochs": 2, "validate_every": 4})
    trial_0 = trial(task, 0, lr=0.02)
    results = []
    while not results or not results[-1]["done"]:
        results.append(trial_0.step())
    assert [result["validation"]["step"] for result in results[:-1]] == [4, 6, 8, 12]
    assert [result["epochs"] for result in results[:-1]] == pytest.approx([4 / 6, 1, 8 / 6, 2])
    outcome = results[-1]["outcome"]
    assert outcome["status"] == "finished"
    assert 0 < outcome["train_seconds"] < outcome["seconds"]
    folder = Path(task.root, "trial-0000")
    records = [record for record, _ in read_records(tracking_directory(str(folder)), 0) if record["kind"] == "metrics"]
    assert [r["step"] for r in records if "val/accuracy" in r["values"]][:4] == [4, 6, 8, 12]
    run = json.loads((folder / "run.json").read_text())
    assert (run["status"], run["config"]["lr"], run["summary"]["step"]) == ("finished", 0.02, 12)


def test_a_clone_goes_on_with_the_donors_weights_and_its_own_settings(task: Task, trial: Make, tmp_path: Path) -> None:
    task = replace(task, mutates=True)
    donor, clone = trial(task, 0, lr=0.02), trial(task, 1, lr=0.001)
    at_step_12 = [donor.step()["validation"] for _ in range(2)][-1]
    clone.step()
    donor.save_checkpoint(str(tmp_path / "handed"))
    # As Ray Tune does it. At this rate the weights stay what they are.
    clone.reset_config({"number": 1, "lr": 1e-12})
    clone.load_checkpoint(str(tmp_path / "handed"))
    told, result = clone.step(), clone.step()
    assert told["validation"] == at_step_12
    assert result["validation"]["step"] == 18
    assert result["validation"]["metrics"]["val/loss"] == pytest.approx(at_step_12["metrics"]["val/loss"], rel=1e-6)
    donors = Path(task.root, "trial-0000", "checkpoints", "checkpoint-000000012", MODEL)
    sha256 = hashlib.sha256(donors.read_bytes()).hexdigest()
    assert result["exploited"] is None
    assert told["exploited"] == {"donor": 0, "step": 12, "sha256": sha256}
    assert clone.step()["outcome"]["status"] == "finished"
    assert json.loads(Path(task.root, "trial-0001", "run.json").read_text())["config"]["lr"] == 1e-12
    # The donor is what it was.
    assert donor.step()["validation"]["step"] == 18


def test_a_clone_in_an_object_store_has_a_record_of_its_own(
    task: Task, trial: Make, tmp_path: Path, moto: str, object_root: str
) -> None:
    root = f"{object_root}/s"
    options: Any = {"num_cpus": 0, "runtime_env": {"env_vars": environment(moto)}}
    tracker = ray.remote(SweepTracker).options(**options).remote(f"{tmp_path}/tracking", root, None, "evenkeel", "s")  # type: ignore[attr-defined]  # ray's stubs
    task = replace(task, root=root, tracker=tracker, mutates=True)
    donor, clone = trial(task, 0, lr=0.02), trial(task, 1, lr=0.001)
    donor.step()
    clone.step()
    donor.save_checkpoint(str(tmp_path / "handed"))
    clone.reset_config({"number": 1, "lr": 1e-12})
    clone.load_checkpoint(str(tmp_path / "handed"))
    checkpoints = Storage(f"{root}/trial-0001/checkpoints")
    (name,) = checkpoints.names("")
    with checkpoints.local_folder(name) as folder:
        assert problem_with(folder) is None
        header, *records = map(json.loads, (folder / "record.jsonl").read_text().splitlines())
    assert (header["run"], header["last_steps"]["val/loss"]) == ("trial-0001", 6)
    assert records[-1]["kind"] == "go_back"


def test_a_damaged_checkpoint_is_not_handed_on(task: Task, trial: Make, tmp_path: Path) -> None:
    donor, clone = trial(task, 0, lr=0.02), trial(task, 1, lr=0.001)
    donor.step()
    clone.step()
    donor.save_checkpoint(str(tmp_path / "handed"))
    (tmp_path / "handed" / FILES / MODEL).write_bytes(b"damaged")
    clone.reset_config({"number": 1, "lr": 0.01})
    with pytest.raises(TrainingFailed, match="the checkpoint of trial-0000 cannot be gone on from: "):
        clone.load_checkpoint(str(tmp_path / "handed"))


def test_a_trial_that_has_ended_is_not_run_again(task: Task, trial: Make) -> None:
    first = trial(task, 0, lr=0.02)
    seen = [first.step()["validation"] for _ in range(3)]
    past = Trial(0, {"lr": 0.02}, "stopped", seen)
    again = trial(replace(task, past={0: past}), 0, lr=0.02)
    assert [again.step()["validation"] for _ in range(3)] == seen
    last = again.step()
    assert (last["done"], last["outcome"]["status"], last["outcome"]["train_seconds"]) == (True, "stopped", 0.0)


def test_a_trial_whose_process_died_tells_what_it_had_told(task: Task, trial: Make) -> None:
    first = trial(task, 0, lr=0.02)
    seen = [first.step()["validation"] for _ in range(2)]
    first.cleanup()
    again = trial(task, 0, lr=0.02)
    results = [again.step() for _ in range(4)]
    assert [result["validation"] for result in results[:2]] == seen
    assert [result["validation"]["step"] for result in results] == [6, 12, 18, 18]
    assert results[-1]["outcome"]["status"] == "finished"


def test_what_a_population_had_recorded_and_not_told_is_told(task: Task, trial: Make) -> None:
    task = replace(task, mutates=True)
    first = trial(task, 0, lr=0.02)
    seen = [first.step()["validation"] for _ in range(2)]
    first.cleanup()
    again = trial(replace(task, past={0: Trial(0, {"lr": 0.02}, "killed", seen[:1])}), 0, lr=0.02)
    results = [again.step() for _ in range(3)]
    assert results[0]["validation"] == seen[1]
    assert [result["validation"]["step"] for result in results] == [12, 18, 18]
    assert results[-1]["outcome"]["status"] == "finished"


@pytest.mark.usefixtures("short_retries")
def test_a_checkpoint_that_cannot_be_read_at_the_moment_does_not_fail_the_trial(
    task: Task, trial: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = trial(task, 0, lr=0.02)
    seen = [first.step()["validation"] for _ in range(2)]
    first.cleanup()
    stale = itertools.repeat(OSError(errno.ESTALE, "Stale file handle"))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", Failing(Path.read_bytes, stale, lambda path: path.name == "manifest.json"))
        with pytest.raises(Unavailable, match="Stale file handle"):  # Ray Tune then starts the trial again
            trial(task, 0, lr=0.02).step()
    again = trial(task, 0, lr=0.02)
    results = [again.step() for _ in range(4)]
    assert [result["validation"] for result in results[:2]] == seen
    assert results[-1]["outcome"]["status"] == "finished"


def unreachable(config: Config) -> Splits:
    raise ConnectionError("the data server did not answer")


@pytest.mark.usefixtures("short_retries")
def test_a_data_server_that_does_not_answer_does_not_fail_the_trial(task: Task, trial: Make) -> None:
    task = replace(task, base=task.base | {"dataset": "tests.tune.test_trial:unreachable"})
    with pytest.raises(Unavailable, match="the data server did not answer"):
        trial(task, 0, lr=0.02).step()


def test_settings_that_cannot_work_fail_that_trial(task: Task, trial: Make) -> None:
    broken = trial(replace(task, base=task.base | {"model": "tests.common:NoSuchNet"}), 0, lr=0.02).step()
    assert broken["done"]
    assert broken["outcome"]["status"] == "failed"
    assert "NoSuchNet" in broken["outcome"]["error"]

"""What a sweep is told: refused where it does not fit, and the same when it is gone on with."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from app.config import Config
from app.errors import BadInput
from app.lock import held, is_held
from app.runs import open_run, resolved, run_storage, write_run
from app.storage import Storage
from tests.tune.test_space import space_of
from tune.ledger import Trial
from tune.spec import Options, check_options, end_sweep, open_sweep, read_sweep, refuse_lost_records
from tune.sweep import main

LR = "lr: {loguniform: [1e-4, 1]}"


def refusal(tmp_path: Path, options: dict[str, Any], space: str = LR, **settings: Any) -> str:
    base = Config(**settings)
    with pytest.raises(BadInput) as caught:
        check_options(Options(**options), space_of(tmp_path, space, base), base)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "space", "message"),
    [
        ({"metric": "test/accuracy"}, LR, "--metric test/accuracy: allowed are val/accuracy, val/loss"),
        ({"mode": "min"}, LR, "--mode min: of val/accuracy the max is best; leave it out"),
        ({"num_trials": 0}, LR, "--num-trials 0: must be at least 1"),
        ({"max_concurrent": 0}, LR, "--max-concurrent 0: must be at least 1"),
        ({"reduction_factor": 1.0}, LR, "--reduction-factor 1.0: must be at least 1.001"),
        ({"scheduler": "asha", "grace_epochs": 20}, LR, "--grace-epochs 20: .* less than --epochs 20"),
        (
            {"scheduler": "median", "grace_epochs": 0.5},
            LR,
            "--grace-epochs 0.5: must be at least 1 epoch, or .*--validate",
        ),
        ({"scheduler": "pbt", "perturb_epochs": float("nan")}, LR, "--perturb-epochs nan: must be at least 1"),
        ({"search": "grid"}, LR, "line 1: lr is a loguniform, and --search grid goes through lists"),
        (
            {"search": "grid", "num_trials": 3},
            "lr: {grid: [1, 2]}",
            "--num-trials 3: --search grid has each point once",
        ),
        ({"search": "optuna"}, "lr: {grid: [1, 2]}", "line 1: --search optuna chooses lr: write choice"),
        ({"scheduler": "pbt"}, "lr: {grid: [1, 2]}", "--scheduler pbt .*: use --search random, and no grid"),
        ({"scheduler": "pbt", "search": "optuna"}, LR, "use --search random, and no grid"),
        ({"scheduler": "pbt", "num_trials": 1}, LR, "needs two or more trials"),
        ({"scheduler": "pbt", "max_concurrent": 1}, LR, "--max-concurrent 1: --scheduler pbt takes turns"),
        (
            {"scheduler": "pbt"},
            "batch_size: {choice: [1, 2]}",
            "line 1: batch_size cannot change while a trial goes on",
        ),
        ({"scheduler": "pbt"}, "lr: {uniform: [0.1, 1], when: {optimizer: adamw}}", "--scheduler pbt takes no when"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, options: dict, space: str, message: str) -> None:
    assert re.search(message, refusal(tmp_path, options, space))


def test_a_population_needs_every_checkpoint(tmp_path: Path) -> None:
    assert "--checkpoint-every" in refusal(tmp_path, {"scheduler": "pbt"}, checkpoint_every=5)


def test_the_same_sweep_goes_on_and_another_one_is_refused(tmp_path: Path) -> None:
    base = resolved(Config(run_name="s", output_dir=str(tmp_path), tracking_uri="none"))
    space = space_of(tmp_path, LR)
    assert read_sweep_of(base) is None
    open_sweep(Options(num_trials=5), space, base)
    open_sweep(Options(num_trials=8, max_concurrent=1), space, base)
    found = read_sweep_of(base)
    assert found is not None
    assert (found["options"].num_trials, found["config"], found["space"]) == (8, base, LR)
    with pytest.raises(BadInput, match="--sweep-name s exists, and is another sweep:\n  --search: it has random"):
        open_sweep(Options(num_trials=8, search="optuna"), space, base)
    with pytest.raises(BadInput, match=r"--num-trials: it has 8, and they can only become more"):
        open_sweep(Options(num_trials=7), space, base)
    with pytest.raises(BadInput, match=r"--space: .*space\.yaml has changed since"):
        open_sweep(Options(num_trials=8), space_of(tmp_path, LR + "\n"), base)
    for epochs in (3, 30):
        with pytest.raises(BadInput, match=rf"--epochs: it has 20, you gave {epochs}"):
            open_sweep(Options(num_trials=8), space, base.model_copy(update={"epochs": epochs}))
    end_sweep(run_storage(base), "killed", ["checkpoint", "name"])
    open_sweep(Options(num_trials=8), space, base)
    found = read_sweep_of(base)
    assert found is not None
    assert (found["status"], found["registered"]) == ("running", ["checkpoint", "name"])
    with pytest.raises(BadInput, match=r"--run-name s: .*/s is a sweep's; choose another name"):
        open_run(base)
    (tmp_path / "s" / "sweep.json").write_text("{")
    with pytest.raises(BadInput, match=r"sweep\.json cannot be used"):
        open_sweep(Options(), space, base)
    run = base.model_copy(update={"run_name": "r"})
    write_run(open_run(run))
    with pytest.raises(BadInput, match=r"--sweep-name r: .*/r is a run's; choose another name"):
        open_sweep(Options(), space, run)


def read_sweep_of(base: Config) -> dict[str, Any] | None:
    return read_sweep(run_storage(base))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"--space FILE\.yaml is missing"),
        (["--space", "s.yaml", "--run-name", "r"], "--run-name is each trial's own: use --sweep-name"),
        (["--space", "s.yaml", "--num-workers", "2"], "--num-workers is each trial's own: use --workers-per-trial"),
        (["--space", "s.yaml", "--sweep-name", "../s"], r"--sweep-name '\.\./s'"),
        (["--space", "s.yaml", "--workers-per-trial", "0"], "--workers-per-trial 0"),
        (["--space", "s.yaml", "--sweep-name", "s" * 98], "--sweep-name 's+-best'"),
        (["--space", "s.yaml"], r"--space s\.yaml: No such file"),
        (["--show", "nothing"], r"--show nothing: .*/runs/nothing is no sweep's folder \(no sweep\.json in it\)"),
    ],
)
def test_bad_flags(words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=message):
        main(words)


@pytest.mark.filterwarnings("ignore")  # what ray imports, in the background
def test_a_sweep_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    space_of(tmp_path, LR)
    words = ["--space", str(tmp_path / "space.yaml"), "--sweep-name", "s", "--output-dir", str(tmp_path)]
    assert not is_held(Storage(str(tmp_path / "s")))
    with held(Storage(str(tmp_path / "s")), "s"):
        assert is_held(Storage(str(tmp_path / "s")))
        with pytest.raises(BadInput, match=f"--sweep-name s .*{os.getpid()}"):
            main([*words, "--tracking-uri", "none"])
    assert not is_held(Storage(str(tmp_path / "s")))


def test_trials_without_a_record_of_them_are_not_begun_again(tmp_path: Path) -> None:
    base = resolved(Config(run_name="s", output_dir=str(tmp_path), tracking_uri="none"))
    (tmp_path / "s" / "trial-0000").mkdir(parents=True)
    with pytest.raises(BadInput, match=r"--sweep-name s: .* has trials, and .*trials has no record of them"):
        refuse_lost_records(run_storage(base), {}, "s")
    refuse_lost_records(run_storage(base), {0: Trial(0, {})}, "s")

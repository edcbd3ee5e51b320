"""The ledger: what is written is what is known again."""

from pathlib import Path

from app.spool import SPOOL
from app.tracking import Validation
from tune.ledger import Ledger, Trial, best_checkpoint, ranked, read_trials


def validation(step: int, accuracy: float, loss: float = 1.0) -> Validation:
    return Validation(step=step, epochs=step / 10, metrics={"val/accuracy": accuracy, "val/loss": loss})


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.begin(0, {"lr": 0.1})
    ledger.begin(1, {"lr": 0.2})
    ledger.validation(0, validation(10, 0.5))
    ledger.validation(0, validation(20, 0.7))
    ledger.validation(0, validation(20, 0.7))  # computed again after a restart
    ledger.validation(1, validation(20, 0.9))  # of weights that are gone
    ledger.exploit(1, {"lr": 0.12}, donor=0, step=20, sha256="abc")
    ledger.end(0, "finished", None, 9.0, 7.0)
    ledger.end(1, "killed", None, 3.0, 1.0)
    ledger.begin(1, {"lr": 0.12})  # gone on with
    with (tmp_path / SPOOL).open("a") as file:
        file.write('{"kind": "end", "num')  # killed while writing
    ledger.close()
    again = read_trials(tmp_path)
    reopened = Ledger(tmp_path)
    reopened.close()
    assert again == ledger.trials == reopened.trials
    assert again[0] == Trial(
        0, {"lr": 0.1}, "finished", [validation(10, 0.5), validation(20, 0.7)], [], None, 9.0, 7.0, 1
    )
    assert (again[1].status, again[1].settings, again[1].seconds) == ("running", {"lr": 0.12}, 3.0)
    assert again[1].validations == again[0].validations  # the donor's, whose weights it has
    assert again[1].exploits == [{"donor": 0, "step": 20, "sha256": "abc"}]
    assert read_trials(tmp_path / "none") == {}


def test_the_best_are_first_and_those_without_a_measurement_last() -> None:
    trials = {
        0: Trial(0, {}, "failed"),
        1: Trial(1, {}, "finished", [validation(10, 0.9, 0.5), validation(20, 0.8, 0.1)]),
        2: Trial(2, {}, "stopped", [validation(10, 0.9, 0.3)]),
    }
    assert [trial.number for trial in ranked(trials, "val/loss")] == [2, 1, 0]
    assert trials[1].value("val/loss") == 0.5  # at its best checkpoint, which is chosen by accuracy
    assert [trial.number for trial in ranked(trials, "val/accuracy")] == [1, 2, 0]


def test_the_best_checkpoint(tmp_path: Path) -> None:
    trial = Trial(3, {}, "finished", [validation(10, 0.9), validation(20, 0.8)])
    assert best_checkpoint(str(tmp_path), trial) is None
    folder = tmp_path / "trial-0003" / "checkpoints"
    for step in (20, 10):
        (folder / f"checkpoint-{step:09d}").mkdir(parents=True)
        assert best_checkpoint(str(tmp_path), trial) == str(folder / f"checkpoint-{step:09d}")

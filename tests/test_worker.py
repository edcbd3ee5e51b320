"""What the worker does beside Ray: ranks that agree on bad input, and a best checkpoint chosen by one."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from app.checkpoint import MODEL, Best, Position
from app.config import Config
from app.errors import BadInput, Unavailable
from app.evaluate import main as evaluate
from app.nodes import look_here
from app.runs import Run, resolved, write_run
from app.storage import Storage
from app.worker import RefusedTogether, agreed_checkpoint, run, together, wants_more, with_precision
from tests.common import on_ranks


class Notes:
    """Stands for the Reporter: passes the first failure on through the group's store, as the Tracker does."""

    waiting = nullcontext

    def fail(self, message: str, exit_code: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        store.set("failure", message)

    def failure(self) -> tuple[str, int] | None:
        store = dist.distributed_c10d._get_default_store()
        return (store.get("failure").decode(), 2) if store.check(["failure"]) else None

    def raised(self, rank: int, stack: str) -> None: ...


def prepare_with_bad_data_on(bad_rank: int, unavailable_rank: int = 9) -> str:
    def work() -> str:
        if dist.get_rank() == bad_rank:
            raise BadInput(f"no data on rank {bad_rank}")
        if dist.get_rank() == unavailable_rank:
            raise ConnectionError("the store did not answer")
        return "ready"

    try:
        return together(work, Notes(), torch.device("cpu"))  # type: ignore[arg-type]  # as much of a Reporter as it needs
    except RefusedTogether as error:
        return f"refused: {error}"
    except Unavailable as error:
        return f"unavailable: {error}"


def test_bad_input_on_one_rank_is_refused_by_all() -> None:
    assert on_ranks(3, prepare_with_bad_data_on, 1) == ["refused: no data on rank 1"] * 3
    assert on_ranks(3, prepare_with_bad_data_on, 7) == ["ready"] * 3


def test_what_may_pass_on_one_rank_fails_the_attempt_on_all() -> None:
    unavailable = "unavailable: rank 1: the store did not answer"
    assert on_ranks(3, prepare_with_bad_data_on, 7, 1) == [unavailable] * 3
    assert on_ranks(3, prepare_with_bad_data_on, 0, 1) == ["refused: no data on rank 0"] * 3


class Alone:
    """Stands for the Reporter of the only rank."""

    is_rank_zero = True
    waiting = nullcontext

    def event(self, text: str) -> None: ...

    def fail(self, message: str, exit_code: int) -> None:
        self.failed = message, exit_code

    def failure(self) -> tuple[str, int]:
        return self.failed


def test_a_worker_looks_at_its_node_before_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise BadInput("the data is reached")

    monkeypatch.setattr("app.worker.load_splits", load)
    monkeypatch.setattr("ray.train.torch.get_device", lambda: torch.device("cpu"))
    config = Config(run_name="r", output_dir=str(tmp_path))
    write_run(Run(config, "running"))
    here = look_here(config)
    another = replace(here, found=here.found | {"torch": "2.1.0"})
    for found, message in ((here, "the data is reached"), (None, "the data is reached"), (another, "and 2.1.0 where")):
        with pytest.raises(RefusedTogether, match=message) as refused:
            run(config, Alone(), found)  # type: ignore[arg-type]  # as much of a Reporter as it needs
        assert refused.value.exit_code == 2


class Quiet(Alone):
    """Takes every report."""

    stop = None

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None

    def watched(self, batches: Any) -> Any:
        return batches

    def asked_to_stop(self) -> bool:
        return False


def test_where_the_best_checkpoint_is_lost_the_one_that_is_named_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost: list[str | None] = []

    def damage_the_best(storage: Storage, reporter: Any, device: torch.device, prefer: str | None = None) -> str | None:
        if prefer is not None:
            lost.append(prefer)
            Path(storage.root, prefer, MODEL).write_bytes(b"damaged")
        return agreed_checkpoint(storage, reporter, device, prefer)

    monkeypatch.setattr("app.worker.agreed_checkpoint", damage_the_best)
    monkeypatch.setattr("ray.train.torch.get_device", lambda: torch.device("cpu"))
    monkeypatch.setattr("ray.train.torch.prepare_model", lambda network, **_: network)
    monkeypatch.setattr("ray.train.torch.prepare_data_loader", lambda loader, **_: loader)
    tiny: dict[str, Any] = {"dataset": "tests.common:tiny_splits", "model": "tests.common:PlainNet", "lr": 0.01}
    config = resolved(Config(run_name="r", output_dir=str(tmp_path), batch_size=10, epochs=3, **tiny))
    write_run(Run(config, "running"))
    outcome = run(config, Quiet())  # type: ignore[arg-type]  # as much of a Reporter as it needs
    assert outcome.status == "finished"
    assert outcome.checkpoint is not None
    assert not outcome.checkpoint.endswith(str(lost[0]))
    assert evaluate([outcome.checkpoint, "--split", "val"]) == 0
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]
    assert {key: outcome.metrics[key] for key in measured} == pytest.approx(measured)
    assert outcome.metrics.keys() == {"val/accuracy", "val/loss", "test/accuracy", "test/loss"}


@pytest.mark.parametrize(("patience", "epochs_since", "more"), [(None, 99, True), (3, 2, True), (3, 3, False)])
def test_early_stopping(patience: int | None, epochs_since: int, more: bool) -> None:
    position = Position(best=Best(1, 0.5, 1.0, epochs_since))
    assert wants_more(Config(early_stop_patience=patience), position) is more


def test_the_best_is_by_accuracy_then_by_loss() -> None:
    best = Best()
    updates = [
        best.update(step, *measured) for step, measured in enumerate([(0.5, 2.0), (0.5, 1.0), (0.4, 0.1), (0.5, 1.0)])
    ]
    assert updates == [True, True, False, False]
    assert best == Best(step=1, accuracy=0.5, loss=1.0, epochs_since=2)


def precision_on(fast_rank: int, kept: str) -> tuple[str, list[str]]:
    told: list[str] = []
    checkpoint = SimpleNamespace(config=SimpleNamespace(precision=kept)) if kept else None
    reporter = SimpleNamespace(precision=told.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.worker.is_fast_at_bf16", lambda device: fast_rank in (dist.get_rank(), 9))
        found = with_precision(Config(precision="auto"), checkpoint, torch.device("cpu"), reporter)  # type: ignore[arg-type]  # as much of each as it needs
    return found.precision, told


@pytest.mark.parametrize(("fast_rank", "kept", "precision"), [(1, "", "fp32"), (9, "", "bf16"), (9, "fp32", "fp32")])
def test_precision_auto_is_bf16_where_all_devices_are_fast_at_it_and_stays_what_it_was(
    fast_rank: int, kept: str, precision: str
) -> None:
    assert on_ranks(2, precision_on, fast_rank, kept) == [(precision, [precision])] * 2

"""Saved whole or not at all, verified, pruned, and never unpickled unsafely."""

import errno
import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from app.checkpoint import (
    FORMAT_VERSION,
    MODEL,
    STATE,
    TRAINER,
    Best,
    CheckpointWriter,
    Position,
    find_good,
    load_checkpoint,
)
from app.config import Config
from app.data.samples import DataInfo
from app.errors import BadInput, TrainingFailed, Unavailable
from app.metrics import Window
from app.runs import checkpoint_names
from app.storage import Storage
from tests.common import Failing, PlainNet

INFO = DataInfo((1, 8, 8), ("a", "b", "c", "d"), (0.5,), (0.25,), 57)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)  # the same bits each time
    torch.manual_seed(0)
    network = PlainNet()
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    network(torch.rand(2, 1, 8, 8)).sum().backward()
    optimizer.step()
    return network, optimizer


def position_at(step: int, best: int = 0) -> Position:
    return Position(
        step,
        Best(min(best, step), 0.5, 1.0),
        Window(loss=1.5, steps=2),
        epoch=1,
        samples_seen=10 * step,
        order="order",
        bad_samples=3,
        samples_per_pass=32,
        epoch_window=Window(loss=4.5, steps=step),
        train_seconds=1.25,
    )


def write(storage: Storage, *steps: int, best: int = 0, keep: int = 2, ema: nn.Module | None = None) -> None:
    network, optimizer = trained()
    with CheckpointWriter(storage, Config(keep_checkpoints=keep), INFO) as writer:
        for step in steps:
            writer.save(position_at(step, best), network, optimizer, ema)


@pytest.fixture
def storage(root: str) -> Storage:
    return Storage(f"{root}/run/checkpoints")


def folder(storage: Storage, step: int) -> Path:
    return Path(storage.root) / f"checkpoint-{step:09d}"


def test_what_is_saved_is_loaded(storage: Storage) -> None:
    ema = PlainNet()
    write(storage, 7, ema=ema)
    network, optimizer = trained()
    checkpoint = load_checkpoint(storage, "checkpoint-000000007", INFO)
    assert load_checkpoint(Storage(checkpoint.path), "").position == checkpoint.position
    assert checkpoint.position == position_at(7)
    assert checkpoint.config == Config()
    assert checkpoint.info == INFO
    for name, tensor in ema.state_dict().items():
        assert torch.equal(checkpoint.model[name], tensor)  # what is evaluated
    for name, tensor in network.state_dict().items():
        assert torch.equal(checkpoint.trainer["trained_weights"][name], tensor)
    found = checkpoint.trainer["optimizer"]["state"][0]["exp_avg"]
    assert torch.equal(found, optimizer.state_dict()["state"][0]["exp_avg"])


def test_weights_load_in_plain_pytorch(storage: Storage) -> None:
    write(storage, 1)
    network = PlainNet()
    with storage.local_folder("checkpoint-000000001") as local:
        network.load_state_dict(load_file(local / MODEL))
    assert torch.equal(network.fc.weight, trained()[0].get_parameter("fc.weight"))


def test_saving_takes_a_copy(storage: Storage) -> None:
    network, optimizer = trained()
    before = network.get_parameter("fc.weight").clone()
    with CheckpointWriter(storage, Config(), INFO) as writer:
        writer.save(Position(1), network, optimizer)
        nn.init.zeros_(network.get_parameter("fc.weight"))  # training goes on
    assert torch.equal(load_checkpoint(storage, "checkpoint-000000001").model["fc.weight"], before)


def test_tied_weights_can_be_saved(storage: Storage) -> None:
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    network[1].weight = network[0].weight
    with CheckpointWriter(storage, Config(), INFO) as writer:
        writer.save(Position(1), network, torch.optim.SGD(network.parameters()))
    assert set(load_checkpoint(storage, "checkpoint-000000001").model) == set(network.state_dict())


@pytest.mark.parametrize(
    ("best", "keep", "kept"), [(0, 2, [4, 5]), (2, 2, [2, 5]), (2, 3, [2, 4, 5]), (5, 2, [4, 5]), (1, 4, [1, 3, 4, 5])]
)
def test_the_best_and_the_newest_are_kept(storage: Storage, best: int, keep: int, kept: list[int]) -> None:
    write(storage, 1, 2, 3, 4, 5, best=best, keep=keep)
    assert checkpoint_names(storage) == [f"checkpoint-{step:09d}" for step in kept]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", [MODEL, TRAINER, STATE, "manifest.json"])
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink])
def test_the_newest_good_one_wins_and_the_damage_is_said(tmp_path: Path, name: str, damage) -> None:
    storage = Storage(str(tmp_path))
    write(storage, 1, 2)
    damage(folder(storage, 2) / name)
    warnings: list[str] = []
    assert find_good(storage, warnings.append) == "checkpoint-000000001"
    (warning,) = warnings
    assert str(folder(storage, 2)) in warning
    with pytest.raises(BadInput, match="no good checkpoint"):
        load_checkpoint(storage, "checkpoint-000000002")


def test_none_is_good(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    assert find_good(storage, print) is None
    write(storage, 1, 2)
    for step in (1, 2):
        (folder(storage, step) / MODEL).unlink()
    with pytest.raises(BadInput) as refused:
        find_good(storage, lambda _: None)
    for name in ("checkpoint-000000001", "checkpoint-000000002"):
        assert f"{tmp_path}/{name}: model.safetensors is missing" in str(refused.value)
    assert "choose another --run-name, or discard this run and train from the beginning with --start-over" in str(
        refused.value
    )
    assert len(checkpoint_names(storage)) == 2


STALE = OSError(errno.ESTALE, "Stale file handle")


@pytest.mark.usefixtures("short_retries")
@pytest.mark.parametrize("method", ["read_bytes", "stat", "open"])
def test_what_cannot_be_read_for_a_moment_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    storage, warnings = Storage(str(tmp_path)), []
    write(storage, 1, 2)
    failing = Failing(getattr(Path, method), [STALE, STALE], lambda path, *_, **__: "000000002/" in str(path))
    monkeypatch.setattr(Path, method, failing)
    assert find_good(storage, warnings.append) == "checkpoint-000000002"
    assert failing.raised == 2
    assert warnings == []


@pytest.mark.usefixtures("short_retries")
def test_what_stays_unreadable_is_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(str(tmp_path))
    write(storage, 1, 2)
    failing = Failing(Path.read_bytes, itertools.repeat(STALE), lambda path: "000000002/" in str(path))
    monkeypatch.setattr(Path, "read_bytes", failing)
    with pytest.raises(Unavailable, match=r"000000002/manifest\.json failed .* times within 0\.5 s: Stale file handle"):
        find_good(storage, print)
    denied = PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr(Path, "read_bytes", Failing(Path.read_bytes, [denied]))
    with pytest.raises(BadInput, match=r"manifest\.json cannot be read \(Permission denied\)"):
        find_good(storage, print)


def test_a_preferred_one_wins_if_it_is_good(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    write(storage, 1, 2)
    assert find_good(storage, print, prefer="checkpoint-000000001") == "checkpoint-000000001"
    flip(folder(storage, 1) / MODEL)
    assert find_good(storage, lambda _: None, prefer="checkpoint-000000001") == "checkpoint-000000002"


def test_a_failed_save_is_raised_and_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = Storage(str(tmp_path))
    write(storage, 1)
    network, optimizer = trained()

    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("app.checkpoint.write_folder", full)
    with (
        pytest.raises(TrainingFailed, match=r"No space left on device; the earlier ones are untouched"),
        CheckpointWriter(storage, Config(), INFO) as writer,
    ):
        writer.save(Position(2), network, optimizer)
    assert os.listdir(tmp_path) == ["checkpoint-000000001"]
    assert find_good(storage, print) == "checkpoint-000000001"


@pytest.mark.usefixtures("short_retries")
def test_a_disk_that_does_not_answer_for_a_moment_delays_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, error = Storage(str(tmp_path)), OSError(errno.EIO, "Input/output error")
    monkeypatch.setattr(torch, "save", Failing(torch.save, [error, error]))
    write(storage, 1)
    assert find_good(storage, print) == "checkpoint-000000001"
    monkeypatch.setattr(torch, "save", Failing(torch.save, itertools.repeat(error)))
    with pytest.raises(Unavailable, match=r"a checkpoint could not be saved .* Input/output error; the earlier ones"):
        write(storage, 2)


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, warnings = Storage(str(tmp_path)), []
    write(storage, 1, 2)
    network, optimizer = trained()
    busy = OSError(errno.ENOTEMPTY, "Directory not empty")
    monkeypatch.setattr(Storage, "delete_folder", Failing(Storage.delete_folder, [busy]))
    with CheckpointWriter(storage, Config(), INFO, warn=warnings.append) as writer:
        writer.save(Position(3), network, optimizer)
    assert warnings == [f"{tmp_path}/checkpoint-000000001 could not be deleted: Directory not empty"]
    assert len(checkpoint_names(storage)) == 3
    write(storage, 4)
    assert checkpoint_names(storage) == ["checkpoint-000000003", "checkpoint-000000004"]


@pytest.mark.parametrize("method", ["names", "delete_folder"])
def test_a_store_that_refuses_to_prune_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    storage, warnings = Storage(str(tmp_path)), []
    write(storage, 1, 2)
    network, optimizer = trained()
    denied = BadInput("--output-dir s3://bucket/runs: access denied")
    monkeypatch.setattr(Storage, method, Failing(getattr(Storage, method), [denied]))
    with CheckpointWriter(storage, Config(), INFO, warn=warnings.append) as writer:
        writer.save(Position(3), network, optimizer)
    assert [warning.endswith("access denied") for warning in warnings] == [True]
    assert find_good(storage, print) == "checkpoint-000000003"


def test_weights_that_are_no_numbers_are_not_saved(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    network, optimizer = trained()
    nn.init.constant_(network.get_parameter("fc.weight"), float("nan"))
    with (
        pytest.raises(TrainingFailed, match=r"after step 2 .* has values that are not finite"),
        CheckpointWriter(storage, Config(), INFO) as writer,
    ):
        writer.save(Position(2), network, optimizer)
    assert os.listdir(tmp_path) == []


def test_damaged_checkpoints_of_later_steps_do_not_outlive_new_ones(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    write(storage, 3, 9, best=3)
    cut(folder(storage, 9) / MODEL)
    assert find_good(storage, lambda _: None) == "checkpoint-000000003"
    with CheckpointWriter(storage, Config(), INFO) as writer:
        writer.discard_after(3)
        writer.save(Position(6, Best(3, 0.5, 1.0)), *trained())
    assert checkpoint_names(storage) == ["checkpoint-000000003", "checkpoint-000000006"]


def test_nothing_is_published_before_the_records_are_written(tmp_path: Path) -> None:
    storage, network_and_optimizer, seen = Storage(str(tmp_path)), trained(), []
    with CheckpointWriter(storage, Config(), INFO, lambda: seen.append(checkpoint_names(storage))) as writer:
        writer.save(Position(1), *network_and_optimizer)
    assert seen == [[]]
    assert checkpoint_names(storage) == ["checkpoint-000000001"]


def test_other_data_is_refused(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    write(storage, 1)
    with pytest.raises(BadInput, match="trained on other data"):
        load_checkpoint(storage, "checkpoint-000000001", DataInfo((1, 8, 8), ("a", "b"), (0.5,), (0.25,), 57))


def test_another_order_of_the_samples_is_refused(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path))
    write(storage, 1)
    checkpoint = load_checkpoint(storage, "checkpoint-000000001")
    checkpoint.refuse_other_order("order")
    with pytest.raises(BadInput, match=r"samples in another order: the labels, or what --sampler shuffled .* changed"):
        checkpoint.refuse_other_order("other")


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    import hashlib

    storage = Storage(str(tmp_path))
    write(storage, 1)
    state_path, manifest_path = folder(storage, 1) / STATE, folder(storage, 1) / "manifest.json"
    state = json.loads(state_path.read_text())
    state["format_version"] = 99
    state_path.write_text(json.dumps(state))
    manifest = json.loads(manifest_path.read_text())
    data = state_path.read_bytes()
    manifest[STATE] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest_path.write_text(json.dumps(manifest))
    with pytest.raises(BadInput, match=f"has format 99, and this version reads {FORMAT_VERSION}"):
        load_checkpoint(storage, "checkpoint-000000001")

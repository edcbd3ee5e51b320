"""Measuring a checkpoint from the checkpoint alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.checkpoint import CheckpointWriter, Position
from app.config import Config
from app.data.datasets import check_data, load_splits
from app.errors import BadInput
from app.evaluate import main
from app.runs import Run, resolved, write_run
from app.setup import build_network
from app.storage import Storage
from app.trained import find_checkpoint
from tests.common import write_images, write_mnist


def trained_run(tmp_path: Path, **settings) -> Config:
    """A run with one checkpoint of untrained weights."""
    config = resolved(Config(run_name="r", output_dir=str(tmp_path / "runs"), **settings))
    splits = load_splits(config, check_data(config).tokenizer)
    network = build_network(config, splits.info, None)
    storage = Storage(str(tmp_path / "runs" / "r" / "checkpoints"))
    with CheckpointWriter(storage, config, splits.info) as writer:
        writer.save(Position(3), network, torch.optim.SGD(network.parameters()))
    write_run(Run(config, "killed"))
    return config


TINY: dict[str, Any] = {"dataset": "tests.common:tiny_splits", "model": "tests.common:PlainNet"}


def last_line(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_by_run_by_name_and_by_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained_run(tmp_path, **TINY)
    checkpoint = str(tmp_path / "runs" / "r" / "checkpoints" / "checkpoint-000000003")
    monkeypatch.chdir(tmp_path)
    for given in ("runs/r", "r", checkpoint):
        assert find_checkpoint(given) == checkpoint
    assert main(["r"]) == 0
    found = last_line(capsys)
    assert (found["checkpoint"], found["split"], found["num_samples"]) == (checkpoint, "test", 11)
    assert found["metrics"].keys() == {"test/accuracy", "test/loss"}
    assert found["per_class"].keys() == {"a", "b", "c", "d"}
    assert sum(map(sum, found["confusion"])) == 11
    assert main(["r", "--split", "val"]) == 0
    assert last_line(capsys)["metrics"].keys() == {"val/accuracy", "val/loss"}


@pytest.mark.usefixtures("local_ray")
@pytest.mark.filterwarnings("ignore")
def test_three_workers_measure_what_one_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained_run(tmp_path, **TINY)
    assert main([str(tmp_path / "runs" / "r")]) == 0
    alone = last_line(capsys)
    assert main([str(tmp_path / "runs" / "r"), "--num-workers", "3"]) == 0
    together = last_line(capsys)
    assert together["confusion"] == alone["confusion"]
    assert together["metrics"]["test/loss"] == pytest.approx(alone["metrics"]["test/loss"], rel=1e-6)


def test_data_that_has_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_images(tmp_path / "here", {"cat": 5, "dog": 5})
    trained_run(tmp_path, dataset="image-folder", data_dir=str(tmp_path / "here"), image_size=10)
    (tmp_path / "here").rename(tmp_path / "there")
    run = str(tmp_path / "runs" / "r")
    with pytest.raises(BadInput, match="here: no such directory"):
        main([run, "--split", "val"])
    assert main([run, "--split", "val", "--data-dir", str(tmp_path / "there")]) == 0
    assert last_line(capsys)["num_samples"] == 2
    with pytest.raises(BadInput, match="--split test: this data has train, val"):
        main([run, "--data-dir", str(tmp_path / "there")])
    write_images(tmp_path / "there", {"emu": 5})
    with pytest.raises(BadInput, match="trained on other data"):
        main([run, "--split", "val", "--data-dir", str(tmp_path / "there")])


def test_data_is_copied_to_this_machines_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_images(tmp_path / "here", {"cat": 5, "dog": 5})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    there = tmp_path / "of-the-cluster"
    trained_run(
        tmp_path, dataset="image-folder", data_dir=(tmp_path / "here").as_uri(), image_size=10, cache_dir=str(there)
    )
    shutil.rmtree(there)
    run = str(tmp_path / "runs" / "r")
    assert main([run, "--split", "val"]) == 0
    assert f"into {tmp_path}/mine/evenkeel/" in capsys.readouterr().out
    assert main([run, "--split", "val", "--cache-dir", str(tmp_path / "given")]) == 0
    assert f"into {tmp_path}/given/" in capsys.readouterr().out
    assert not there.exists()


def test_passwords_do_not_belong_into_the_data_dir(tmp_path: Path) -> None:
    trained_run(tmp_path, **TINY)
    with pytest.raises(BadInput, match="--data-dir has a password or a key in it"):
        main([str(tmp_path / "runs" / "r"), "--data-dir", "s3://key:secret@bucket/images"])


def test_data_that_is_gone_is_looked_for_before_it_is_read(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for train in (True, False):
        write_mnist(tmp_path / "data", generator.integers(0, 256, (40, 28, 28)), np.arange(40) % 10, train)
    trained_run(tmp_path, dataset="mnist", data_dir=str(tmp_path / "data"), download=False)
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(BadInput, match="--no-download is set"):
        main([str(tmp_path / "runs" / "r")])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere is no run's folder"),
        (["nowhere", "--num-workers", "0"], "--num-workers 0: must be at least 1"),
    ],
)
def test_bad_input(words: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        main(words)

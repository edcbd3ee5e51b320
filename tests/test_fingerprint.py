"""Ranks that would not train on the same samples with the same code are found out before the first step."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from app import fingerprint as fingerprint_module
from app.config import Config
from app.data.datasets import check_data, load_splits
from app.data.samples import InMemory
from app.data.sampling import build_order
from app.errors import BadInput
from app.fingerprint import fingerprint_rank, refuse_disagreement
from app.worker import RefusedTogether, compare_ranks
from tests.common import on_ranks, tiny_splits, write_images


def fingerprint_of(config: Config, tokenizer: str | None = None) -> dict[str, str]:
    splits = load_splits(config, tokenizer)
    return fingerprint_rank(config, splits, build_order(config, splits.train.labels, splits.train.facts))


def folder_config(path: Path, **settings) -> Config:
    return Config(dataset="image-folder", data_dir=str(path), **settings)


@pytest.mark.parametrize("in_memory_mb", [0, 1024])
def test_the_same_files_at_another_place_are_the_same(tmp_path: Path, in_memory_mb: int) -> None:
    write_images(tmp_path / "node-a" / "photos", {"cat": 9, "dog": 9})
    shutil.copytree(tmp_path / "node-a", tmp_path / "b")
    settings = {"in_memory_mb": in_memory_mb}
    one = fingerprint_of(folder_config(tmp_path / "node-a" / "photos", **settings))
    assert one == fingerprint_of(folder_config(tmp_path / "b" / "photos", **settings))


@pytest.mark.parametrize("in_memory_mb", [0, 1024])
def test_one_file_more_or_another_one_is_seen(tmp_path: Path, in_memory_mb: int) -> None:
    write_images(tmp_path, {"cat": 9, "dog": 9})
    config = folder_config(tmp_path, in_memory_mb=in_memory_mb)
    before = fingerprint_of(config)
    shutil.copy(tmp_path / "dog" / "001.png", tmp_path / "dog" / "extra.png")
    more = fingerprint_of(config)
    assert more["labels of train"] != before["labels of train"]
    assert more["order of the training samples"] != before["order of the training samples"]
    (tmp_path / "dog" / "001.png").unlink()  # as many as before, shifted by one
    other = fingerprint_of(config)
    assert other["labels of train"] == before["labels of train"]
    assert other["samples of train"] != before["samples of train"]


def test_other_pixels_texts_and_rows_are_seen(tmp_path: Path) -> None:
    pixels = torch.arange(60, dtype=torch.uint8).view(5, 3, 2, 2)
    one = InMemory(pixels, np.zeros(5))
    assert one.fingerprint() == InMemory(pixels.clone(), np.zeros(5)).fingerprint()
    assert one.fingerprint() != InMemory(pixels.roll(1, 0), np.zeros(5)).fingerprint()

    table = tmp_path / "t.csv"
    rows = [f"text number {number},{number % 2}\n" for number in range(20)]
    found = []
    for part in (rows, [*rows[2:], *rows[:2]]):
        table.write_text("text,label\n" + "".join(part))
        config = Config(dataset="text", data_dir=str(table), model="text-lstm")
        found.append(fingerprint_of(config, check_data(config).tokenizer))
    assert found[0]["labels of train"] == found[1]["labels of train"]
    assert found[0]["samples of train"] != found[1]["samples of train"]


def test_a_large_set_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.data.samples.MOST_DIGESTED", 100)
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5000, 1, 2, 2), np.uint8))
    assert InMemory(pixels, np.zeros(5000)).fingerprint() != InMemory(pixels.roll(1, 0), np.zeros(5000)).fingerprint()


def test_all_that_changes_numbers_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config(dataset="tests.common:tiny_splits", model="tests.faults.common:slow_net")
    found = fingerprint_of(config)
    for subject in ("code of app", "code of tests.common", "code of tests.faults.common", "classes", "preprocessing"):
        assert subject in found
    assert found["torch"] == torch.__version__.partition("+")[0]
    monkeypatch.setattr(fingerprint_module, "version", lambda package: "0.1+cpu")
    assert {fingerprint_of(config)[name] for name in ("torch", "torchvision", "numpy", "pillow", "tokenizers")} == {
        "0.1"
    }


def test_a_disagreement_names_nodes_and_values() -> None:
    same = {"classes": "2 classes, ab12", "torch": "2.15.0"}
    refuse_disagreement([same, same, same], ["10.0.0.1", "10.0.0.1", "10.0.0.2"])
    other = same | {"torch": "2.15.1", "labels of test": "9 labels, cd34"}
    with pytest.raises(BadInput) as refused:
        refuse_disagreement([same, same, other], ["10.0.0.1", "10.0.0.1", "10.0.0.2"])
    at_first = "node 10.0.0.1 (rank 0), node 10.0.0.1 (rank 1)"
    assert f"  torch: 2.15.0 on {at_first}; 2.15.1 on node 10.0.0.2 (rank 2)\n" in str(refused.value)
    assert f"  labels of test: none on {at_first}; 9 labels, cd34 on node 10.0.0.2 (rank 2)\n" in str(refused.value)
    assert "classes:" not in str(refused.value)


def train_set_shifted_on(shifted_rank: int) -> str:
    import torch.distributed as dist

    config = Config(dataset="tests.common:tiny_splits")
    splits = tiny_splits(config)
    labels = np.roll(splits.train.labels, dist.get_rank() == shifted_rank)
    try:
        compare_ranks(
            {
                "labels of train": str(labels[:5]),
                **fingerprint_rank(config, splits, build_order(config, labels, splits.train.facts)),
            }
        )
    except RefusedTogether as error:
        return f"{error.exit_code}: {error}"
    return "the same"


def test_all_ranks_refuse_a_shifted_data_set() -> None:
    assert on_ranks(3, train_set_shifted_on, 7) == ["the same"] * 3
    (refused,) = set(on_ranks(3, train_set_shifted_on, 1))
    assert refused.startswith("2: the workers do not have the same data, code or packages:")
    assert "order of the training samples" in refused
    assert "(rank 0), node" in refused


def test_images_of_one_class_folder_are_told_apart(tmp_path: Path) -> None:
    from app.data.images import ImageFiles

    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    one, other = (ImageFiles([tmp_path / name], np.zeros(1), [(8, 8)], 3) for name in ("a.png", "b.png"))
    assert one.fingerprint() != other.fingerprint()

"""A disk or a server that does not answer for a moment is neither bad input nor a bad sample."""

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from app.config import Config
from app.data.datasets import check_data, load_splits
from app.data.folder import check_headers, read_sizes, scan_folder
from app.data.images import ImageFiles, decode_image
from app.data.inputs import Inputs
from app.data.loader import build_loader
from app.data.sampling import EvaluationBatches, read_subset
from app.data.splits import Splits
from app.distributed import World
from app.errors import BadInput, Unavailable
from app.user_code import find_callable, told_as_bad_input
from app.weights import load_weights_file
from tests.common import Failing, tiny_splits, write_images

pytestmark = pytest.mark.usefixtures("short_retries")

EIO = OSError(errno.EIO, "Input/output error")


def named(name: str) -> Callable[..., bool]:
    return lambda path, *_, **__: str(path).endswith(name)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    write_images(tmp_path / "images", {"cat": 3, "dog": 3})
    return tmp_path / "images"


def pixels(splits: Splits) -> torch.Tensor:
    return torch.cat([each.inputs(np.arange(len(each.labels))) for each in (splits.train, splits.val)])


@pytest.mark.parametrize("in_memory_mb", [0, 1024])
def test_an_image_is_read_again(images: Path, monkeypatch: pytest.MonkeyPatch, in_memory_mb: int) -> None:
    config = Config(dataset="image-folder", data_dir=str(images), max_bad_samples=3, in_memory_mb=in_memory_mb)
    expected = pixels(load_splits(config))
    failing = Failing(Path.read_bytes, [EIO, EIO], named("cat/001.png"))
    monkeypatch.setattr(Path, "read_bytes", failing)
    assert torch.equal(pixels(load_splits(config)), expected)
    assert failing.raised == 2


def test_an_image_that_stays_unreadable_is_no_bad_sample(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ImageFiles(sorted(images.rglob("*.png")), np.zeros(6), [(8, 8)], 3)
    monkeypatch.setattr(Path, "read_bytes", Failing(Path.read_bytes, itertools.repeat(EIO), named("cat/001.png")))
    loader = build_loader(files, EvaluationBatches(6, 6, World()), num_workers=0, skip_unreadable=True)
    with pytest.raises(Unavailable, match=r"reading .*cat/001\.png failed .* Input/output error"):
        next(iter(loader))


def test_damaged_bytes_are_still_bad_input(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no pixels")
    for path in (tmp_path / "a.png", tmp_path / "missing.png"):
        with pytest.raises(BadInput, match="is no readable image"):
            decode_image(path, (8, 8), 3)


def test_headers_are_read_again(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import PIL.Image

    folder = scan_folder(str(images))
    failing = Failing(PIL.Image.open, [EIO, EIO], named("cat/001.png"))
    monkeypatch.setattr(PIL.Image, "open", failing)
    assert check_headers(folder, max_bad=3) == []
    assert failing.raised == 2
    monkeypatch.setattr(PIL.Image, "open", Failing(PIL.Image.open, [EIO], named("cat/001.png")))
    assert read_sizes([images / "cat" / "001.png"], skip_unreadable=True) == [(12, 10)]
    monkeypatch.setattr(PIL.Image, "open", Failing(PIL.Image.open, itertools.repeat(EIO), named("cat/001.png")))
    with pytest.raises(Unavailable):
        check_headers(folder, max_bad=3)
    with pytest.raises(Unavailable):
        read_sizes([images / "cat" / "001.png"], skip_unreadable=True)


def test_a_folder_that_cannot_be_listed_is_not_left_out(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (images / "cat" / "more").mkdir()
    (images / "cat" / "000.png").rename(images / "cat" / "more" / "000.png")
    expected = scan_folder(str(images))
    monkeypatch.setattr(os, "scandir", Failing(os.scandir, [EIO], named("cat/more")))
    assert scan_folder(str(images)) == expected
    monkeypatch.setattr(os, "scandir", Failing(os.scandir, itertools.repeat(EIO), named("cat/more")))
    with pytest.raises(Unavailable, match="listing --data-dir"):
        scan_folder(str(images))


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl"])
def test_a_table_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    rows = [("some words", "a"), ("other words", "b"), ("more words", "a"), ("last words", "b")] * 5
    text = {
        "t.csv": "text,label\n" + "".join(f"{text},{label}\n" for text, label in rows),
        "t.jsonl": "".join(f'{{"text": "{text}", "label": "{label}"}}\n' for text, label in rows),
    }[name]
    (tmp_path / name).write_text(text)
    config = Config(dataset="text", data_dir=str(tmp_path / name), model="text-lstm")
    failing = Failing(Path.open, [EIO, EIO], named(name))
    monkeypatch.setattr(Path, "open", failing)
    assert "18 train" in check_data(config).notes[0]
    assert failing.raised == 2
    monkeypatch.setattr(Path, "open", Failing(Path.open, itertools.repeat(EIO), named(name)))
    with pytest.raises(Unavailable, match=r"reading .* failed .* Input/output error"):
        check_data(config)
    inputs = Inputs((str(tmp_path / name),), True, "text", 4, os.getcwd())
    with pytest.raises(Unavailable):
        list(inputs.blocks())


def test_files_of_settings_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ids.txt").write_text("3\n1\n")
    monkeypatch.setattr(Path, "read_text", Failing(Path.read_text, [EIO], named("ids.txt")))
    assert read_subset(str(tmp_path / "ids.txt")).tolist() == [3, 1]
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    monkeypatch.setattr(torch, "load", Failing(torch.load, [EIO]))
    assert load_weights_file(str(tmp_path / "w.pt"), "--weights")["w"].tolist() == [1, 1]


calls = 0


def fetched(config: Config) -> Splits:
    """A data set of the user's own that comes from a server which refuses the first two connections."""
    global calls
    calls += 1
    if calls <= 2:
        raise ConnectionError("the data server did not answer")
    return tiny_splits(config)


def never_fetched(config: Config) -> Splits:
    raise ConnectionError("the data server did not answer")


def test_your_own_data_set_is_loaded_again() -> None:
    assert len(load_splits(Config(dataset="tests.data.test_transient:fetched")).train.labels) == 57
    assert calls == 3
    with pytest.raises(Unavailable, match=r"never_fetched.*the data server did not answer"):
        load_splits(Config(dataset="tests.data.test_transient:never_fetched"))


def test_your_own_code_may_fail_to_fetch_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match="--model m:f: ConnectionError: refused"), told_as_bad_input("--model m:f"):
        raise ConnectionError("refused")
    (tmp_path / "fetches_on_import.py").write_text("raise TimeoutError('no answer')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Unavailable, match="importing fetches_on_import failed: TimeoutError: no answer"):
        find_callable("--model", "fetches_on_import:build")

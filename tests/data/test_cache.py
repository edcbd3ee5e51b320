"""What a node fetches: once, whole or not at all, and again where it has changed."""

import contextlib
import contextvars
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import numpy as np
import pytest
import torch

from app.config import Config
from app.data.builtin import fetch_if_missing
from app.data.cache import alone, local_copy, on_this_node, progress, size_of
from app.data.datasets import check_data, load_splits
from app.errors import BadInput
from app.storage import File, Storage
from tests.common import write_images, write_mnist
from tests.stores import upload

ROOT = Path(__file__).parents[2]
COPY = """
import os, shutil, sys, time
from pathlib import Path
from app.data.cache import local_copy
copy = shutil.copyfileobj
shutil.copyfileobj = lambda *files: (copy(*files), time.sleep(0.5))
print("ready", flush=True)
while not Path(sys.argv[2]).exists():
    time.sleep(0.01)
print(local_copy(sys.argv[1], Path(sys.argv[2])))
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_images(tmp_path / "source" / "train", {"cat": 5, "dog": 5})
    write_images(tmp_path / "source" / "val", {"cat": 2, "dog": 2})
    return tmp_path / "source"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in [folder, *folder.rglob("*")] if path.is_file()}


def at_uri(source: Path, root: str) -> str:
    """The URI of the source: where it is, or in the store of this root."""
    return upload(source, root) if "://" in root else source.as_uri()


def start(source: Path | str, cache: Path, code: str = COPY) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, source if isinstance(source, str) else source.as_uri(), str(cache)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_processes_that_ask_at_once_fetch_it_once(source: Path, root: str, tmp_path: Path) -> None:
    uri = at_uri(source, root)
    processes = [start(uri, tmp_path / "cache") for _ in range(4)]
    assert [process.stdout and process.stdout.readline() for process in processes] == ["ready\n"] * 4
    (tmp_path / "cache").mkdir()
    outputs = [process.communicate()[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert sum(line.startswith(f"fetching {uri}") for lines in outputs for line in lines) == 1
    [copy] = {lines[-1] for lines in outputs}
    assert contents(Path(copy)) == contents(source)
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1


def test_what_a_killed_process_left_is_no_copy_and_the_next_one_goes_on(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It dies when it has half of the second file.
    half = "lambda read, write, size: write.write(read.read(10)) and write.flush() is None and os.kill(os.getpid(), 9)"
    first = f"shutil.copyfileobj = lambda *files: (copy(*files), setattr(shutil, 'copyfileobj', {half}))\n"
    one_by_one = "import app.data.cache\napp.data.cache.THREADS = 1\n"
    (tmp_path / "cache").mkdir()
    process = start(source, tmp_path / "cache", COPY.replace('print("ready', f'{one_by_one}{first}print("ready'))
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    left = sorted(path.stat().st_size for path in (tmp_path / "cache").rglob("*.png"))
    assert len(left) == 2
    assert left[0] == 10

    fetched, copyfileobj = [], shutil.copyfileobj

    def counted(read: BinaryIO, write: BinaryIO, size: int) -> None:
        fetched.append(-write.tell())
        copyfileobj(read, write, size)
        fetched.append(write.tell())

    monkeypatch.setattr("shutil.copyfileobj", counted)
    copy = local_copy(source.as_uri(), tmp_path / "cache")
    assert contents(copy) == contents(source)
    assert sum(fetched) == sum(map(len, contents(source).values())) - sum(left)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir() and path.name.startswith(".")]


def test_what_has_changed_is_fetched_anew(
    source: Path, root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = at_uri(source, root)
    first = local_copy(uri, tmp_path / "cache")
    assert local_copy(uri, tmp_path / "cache") == first
    assert contents(first) == contents(source)
    assert capsys.readouterr().out.count("fetching") == 1
    image = next((source / "val").rglob("*.png"))
    Storage(uri).write(image.relative_to(source).as_posix(), image.read_bytes()[::-1])
    assert local_copy(uri, tmp_path / "cache") != first


@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_objects_that_stand_for_folders_are_no_files(source: Path, root: str, tmp_path: Path) -> None:
    uri = upload(source, root)
    for marker in ("", "train/", "train/cat/", "empty/"):  # as consoles write them
        path = f"{root.removeprefix('s3://')}/{marker}"
        urllib.request.urlopen(urllib.request.Request(f"{os.environ['AWS_ENDPOINT_URL']}/{path}", b"", method="PUT"))
    assert contents(local_copy(uri, tmp_path / "cache")) == contents(source)
    assert Storage(uri).files("empty") == []
    assert Storage(uri).names("train") == ["cat", "dog"]
    assert Storage(uri).names("") == ["empty", "train", "val"]


def test_no_room(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(BadInput, match=r"there is room for 0 in .*cache: give a --cache-dir with more"):
        local_copy(source.as_uri(), tmp_path / "cache")


def test_a_copy_that_fails(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfileobj", lambda read, write, size: write.write(read.read(10)))
        with pytest.raises(BadInput, match=r"could not be fetched into .* has 10 bytes, and had \d+: it changed"):
            local_copy(source.as_uri(), tmp_path / "cache")
    assert contents(local_copy(source.as_uri(), tmp_path / "cache")) == contents(source)


def test_what_lies_in_the_way_of_a_copy(source: Path, tmp_path: Path) -> None:
    copy = local_copy(source.as_uri(), tmp_path / "cache")
    shutil.rmtree(copy)
    (copy.parent / "notes.txt").touch()
    assert contents(local_copy(source.as_uri(), tmp_path / "cache")) == contents(source)
    shutil.rmtree(copy.parent)
    copy.parent.touch()
    with pytest.raises(BadInput, match="could not be fetched into"):
        local_copy(source.as_uri(), tmp_path / "cache")


def test_a_file_that_would_leave_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Storage, "files", lambda storage: [File("../../x", 1, "")])
    with pytest.raises(BadInput, match=r"[.][.]/[.][.]/x would be written outside of the copy"):
        local_copy("s3://b/d", tmp_path / "cache")


def test_a_function_of_the_users_gets_the_uri(tmp_path: Path) -> None:
    config = Config(dataset="my_data:load", data_dir="https://host/data", cache_dir=str(tmp_path / "cache"))
    assert on_this_node(config) == config


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("file:///no/such/folder", "no such file or directory"),
        ("nosuch://bucket/images", "give a path, file:///PATH, s3://BUCKET/PATH"),
    ],
)
def test_what_cannot_be_had(uri: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"--data-dir {re.escape(uri)}: .*{problem}"):
        check_data(Config(dataset="image-folder", data_dir=uri, cache_dir=str(tmp_path)))
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="cannot be written to"):
        local_copy(tmp_path.as_uri(), tmp_path / "file" / "cache")


def test_images_are_the_same_at_a_uri(source: Path, root: str, tmp_path: Path) -> None:
    at_a_path = Config(dataset="image-folder", data_dir=str(source), cache_dir=str(tmp_path / "cache"))
    at_a_uri = at_a_path.model_copy(update={"data_dir": at_uri(source, root)})
    here, there = load_splits(at_a_path), load_splits(at_a_uri)
    check_data(at_a_uri)
    for name, split in here.named().items():
        ids = np.arange(len(split.labels))
        assert torch.equal(split.inputs(ids), there[name].inputs(ids))


@pytest.mark.parametrize("where", ["reviews", "reviews/train.csv"])
def test_texts_without_a_subfolder(where: str, tmp_path: Path) -> None:
    (tmp_path / "reviews").mkdir()
    for name in ("train", "val"):
        (tmp_path / "reviews" / f"{name}.csv").write_text("text,label\n" + "good,yes\nbad,no\n" * 20)
    uri = (tmp_path / where).as_uri()
    config = Config(dataset="text", model="text-lstm", data_dir=uri, cache_dir=str(tmp_path / "cache"))
    check_data(config)
    copied = Path(str(on_this_node(config).data_dir))
    assert copied.name == Path(where).name
    assert contents(copied) == contents(tmp_path / where)


FETCH = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
def fetch(root, download):
    print("fetching from afar")
    (Path(root) / "MNIST" / "raw").mkdir(parents=True)
    for name in ("train-images-idx3-ubyte", "t10k-images-idx3-ubyte"):  # the first one shows that it is there
        (Path(root) / "MNIST" / "raw" / name).touch()
        time.sleep(0.5)
sys.modules["torchvision"] = sys.modules["torchvision.datasets"] = SimpleNamespace(MNIST=fetch)
sys.modules["torchvision"].datasets = sys.modules["torchvision.datasets"]
from app.config import Config
from app.data.builtin import fetch_if_missing
fetch_if_missing(Config(dataset="mnist", data_dir=sys.argv[2]))
assert Path(sys.argv[2], "MNIST/raw/t10k-images-idx3-ubyte").exists()
"""


def test_a_torchvision_set_is_fetched_once_and_appears_whole(tmp_path: Path) -> None:
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)  # of an earlier one that broke off
    (tmp_path / "MNIST" / "notes.txt").write_text("the user's own")
    (tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte").write_text("half")
    processes = [start(tmp_path, tmp_path, FETCH) for _ in range(3)]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 3
    assert sum("fetching from afar" in output for output in outputs) == 1
    assert not (tmp_path / ".MNIST").exists()
    assert (tmp_path / "MNIST" / "notes.txt").read_text() == "the user's own"
    assert (tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte").read_text() == ""


def test_what_another_process_fetches_is_progress_of_one_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing = tmp_path / "growing"

    def fetch() -> Iterator[bool]:
        """By another process, which has the lock: look after look of this one."""
        yield False
        (growing / "a").mkdir(parents=True)
        for size in (10, 10, 20):
            (growing / "a" / "b").write_bytes(b"x" * size)
            yield False
        yield True

    looks, sizes = fetch(), []
    monkeypatch.setattr("app.data.cache._is_locked", lambda _: next(looks))
    monkeypatch.setattr("app.data.cache.POLL_S", 0)
    context = contextvars.copy_context()
    context.run(progress.set, lambda: sizes.append(size_of(growing)))
    context.run(lambda: contextlib.ExitStack().enter_context(alone(tmp_path / "lock", "", growing)))
    assert sizes == [0, 10, 20]


def test_a_torchvision_set_that_cannot_be_put_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mnist(root: str, download: bool) -> None:
        write_mnist(Path(root), np.zeros((20, 28, 28)), np.arange(20) % 10, True)

    monkeypatch.setattr("torchvision.datasets.MNIST", mnist)
    (tmp_path / "MNIST").touch()
    with pytest.raises(BadInput, match=r"it could not be fetched \(.*Not a directory"):
        fetch_if_missing(Config(dataset="mnist", data_dir=str(tmp_path)))
    assert (tmp_path / "MNIST").is_file()


def test_a_worker_fetches_what_its_node_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision.datasets

    read = torchvision.datasets.MNIST

    def mnist(root: str, train: bool = True, download: bool = False) -> object:
        if download:
            for part in (True, False):
                write_mnist(Path(root), np.zeros((20, 28, 28)), np.arange(20) % 10, part)
            return None
        return read(root, train=train)

    monkeypatch.setattr(torchvision.datasets, "MNIST", mnist)
    assert len(load_splits(Config(dataset="mnist", data_dir=str(tmp_path), val_fraction=0.5)).train.labels) == 10

"""The same functions on a disk and in object stores."""

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from app import retry
from app import storage as storage_module
from app.errors import BadInput, Unavailable
from app.storage import Storage


@pytest.fixture
def storage(root: str) -> Storage:
    return Storage(f"{root}/runs/r")


def new_folder(storage: Storage, **files: bytes) -> Path:
    folder = storage.new_folder()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def test_files(storage: Storage) -> None:
    assert storage.read("a/b.txt") is None
    assert storage.names("a") == []
    storage.write("a/b.txt", b"one")
    storage.write("a/b.txt", b"two")
    assert storage.read("a/b.txt") == b"two"
    assert storage.names("a") == ["b.txt"]
    assert storage.names("") == ["a"]
    storage.delete("a/b.txt")
    storage.delete("a/b.txt")
    assert storage.read("a/b.txt") is None


def test_folders(storage: Storage) -> None:
    folder = new_folder(storage, x=b"1", last=b"2")
    storage.put_folder(folder, "c", last="last")
    assert not folder.exists()
    assert storage.names("c") == ["last", "x"]
    with storage.local_folder("c") as local:
        assert (local / "x").read_bytes() == b"1"
    storage.put_folder(new_folder(storage, x=b"3", last=b"4"), "c", last="last")  # in the place of the other one
    with Storage(storage.uri("c")).local_folder("") as local:  # and as the root
        assert {path.name: path.read_bytes() for path in local.iterdir()} == {"x": b"3", "last": b"4"}
    storage.delete_folder("c")
    storage.delete_folder("c")
    assert storage.names("c") == []
    assert storage.names("") == []


def test_listings(storage: Storage, root: str) -> None:
    storage.write("a/b.txt", b"one")
    storage.write("a/sub/.c", b"")
    storage.write("ab", b"")
    assert [(file.path, file.size) for file in storage.files("a")] == [("b.txt", 3), ("sub/.c", 0)]
    assert [(file.path, file.size) for file in storage.files("a/b.txt")] == [("", 3)]
    assert storage.files("none") == []
    assert [Storage(root).exists(path) for path in ("runs", "runs/r/a/b.txt", "runs/r/a", "ru", "none")] == [
        *(True, True, True),
        *(False, False),
    ]
    before = storage.files("a")[0]
    storage.write("a/b.txt", b"two")
    assert storage.files("a")[0].changed != before.changed


def test_a_file_is_read_from_any_place(storage: Storage) -> None:
    storage.write("a", bytes(range(100)))
    with storage.open("a", 100) as file:
        file.seek(10)
        assert file.read(5) == bytes(range(10, 15))
        assert file.tell() == 15
        file.seek(-5, os.SEEK_END)
        assert file.read() == bytes(range(95, 100))
        assert file.read() == b""


def test_what_is_missing_of_a_file_is_fetched(storage: Storage, tmp_path: Path) -> None:
    storage.write("a", bytes(range(100)))
    (tmp_path / "copy").write_bytes(bytes(range(40)))
    storage.fetch("a", tmp_path / "copy", 100)
    assert (tmp_path / "copy").read_bytes() == bytes(range(100))
    with pytest.raises(FileNotFoundError):
        storage.fetch("none", tmp_path / "none", 100)


def test_a_large_file_is_sent_in_parts(storage: Storage) -> None:
    data = os.urandom(11 * 2**20)
    storage.put_folder(new_folder(storage, model=data, last=b""), "c", last="last")
    with storage.local_folder("c") as local:
        assert (local / "model").read_bytes() == data


def test_writable(storage: Storage) -> None:
    storage.check_writable()
    assert storage.names("") == []


def test_writable_is_found_out_by_two_at_once(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Storage.write

    def and_meanwhile(self: Storage, path: str, data: bytes) -> None:
        write(self, path, data)
        monkeypatch.setattr(Storage, "write", write)
        self.check_writable()

    monkeypatch.setattr(Storage, "write", and_meanwhile)
    storage.check_writable()
    assert storage.names("") == []


def test_what_cannot_be_deleted(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Storage, path: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Storage, "delete", denied)
    with pytest.raises(BadInput, match=r"--output-dir: .*/r/\.writable-\w+ cannot be deleted \(Permission denied\)"):
        storage.check_writable()


def test_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written to"):
        Storage(str(tmp_path / "file" / "r")).check_writable()


@pytest.mark.parametrize(
    "uri", ["nothing://bucket/runs", "hdfs://host/runs", "s3:///runs", "file://host/runs", "s3://"]
)
def test_a_uri_that_is_not_supported(uri: str) -> None:
    with pytest.raises(BadInput, match=f"--output-dir {re.escape(uri)}: give a path, file:///PATH, s3://BUCKET/PATH,"):
        Storage(uri)


def test_options_in_a_uri_are_refused() -> None:
    with pytest.raises(BadInput, match=r"leave out what follows '[?]', and give an address in AWS_ENDPOINT_URL"):
        Storage("s3://bucket/runs?endpoint_override=localhost:9000")


def test_a_file_uri_is_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    storage = Storage(folder.as_uri())
    storage.write("x", b"1")
    assert (folder / "x").read_bytes() == b"1"
    assert storage.root == str(folder)


# What a disk does.


class Failing:
    """Calls a function of os, but raises an error once: before or, as a server whose answer is lost, afterwards."""

    def __init__(self, name: str, error: int, monkeypatch: pytest.MonkeyPatch, after: bool = False, times: float = 1):
        self._function, self._error, self._after, self._left = getattr(os, name), error, after, times
        monkeypatch.setattr(os, name, self)

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._left <= 0:
            return self._function(*args, **options)
        self._left -= 1
        if self._after:
            self._function(*args, **options)
        raise OSError(self._error, os.strerror(self._error))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.01)
    return Storage(str(tmp_path / "runs"))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("name", "error"), [("rename", errno.EIO), ("fsync", errno.ESTALE), ("mkdir", errno.EIO)])
def test_a_folder_is_put_in_its_place_in_spite_of_errors_that_pass(
    disk: Storage, monkeypatch: pytest.MonkeyPatch, name: str, error: int, after: bool
) -> None:
    disk.put_folder(new_folder(disk, x=b"0", last=b"0"), "c/d", last="last")
    folder = new_folder(disk, x=b"1", last=b"2")
    Failing(name, error, monkeypatch, after)
    disk.put_folder(folder, "e/d" if name == "mkdir" else "c/d", last="last")
    with disk.local_folder("e/d" if name == "mkdir" else "c/d") as local:
        assert (local / "x").read_bytes() == b"1"


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", ["rename", "unlink", "rmdir"])
def test_a_folder_is_deleted_in_spite_of_errors_that_pass(
    disk: Storage, monkeypatch: pytest.MonkeyPatch, name: str, after: bool
) -> None:
    disk.put_folder(new_folder(disk, x=b"1", last=b"2"), "c", last="last")
    Failing(name, errno.EIO, monkeypatch, after)
    disk.delete_folder("c")
    assert disk.names("") == []


@pytest.mark.parametrize("name", ["replace", "fsync", "mkdir"])
def test_a_file_is_written_in_spite_of_errors_that_pass(
    disk: Storage, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    Failing(name, errno.EIO, monkeypatch)
    disk.write("a/b", b"1")
    assert disk.read("a/b") == b"1"
    assert disk.names("a") == ["b"]  # and nothing half


def test_a_disk_that_stays_away_is_unavailable(disk: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "RETRY_S", 0.1)
    disk.write("a", b"1")

    def stale(path: Path) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "read_bytes", stale)
    with pytest.raises(Unavailable, match=r"reading .*/runs/a failed .* within 0.1 s: Stale file handle"):
        disk.read("a")
    Failing("listdir", errno.EIO, monkeypatch, times=float("inf"))
    with pytest.raises(Unavailable, match=r"listing .*/runs failed .* within 0.1 s: Input/output error"):
        disk.names("")


def test_what_may_not_be_read_is_bad_input_at_once(disk: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.write("a/b", b"1")
    with pytest.raises(BadInput, match=r"/runs/a cannot be read: Is a directory"):
        disk.read("a")
    Failing("listdir", errno.EACCES, monkeypatch)
    with pytest.raises(BadInput, match=r"/runs/a cannot be read: Permission denied"):
        disk.names("a")


def test_a_name_is_on_the_disk_when_the_function_returns(disk: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, replace, rename = os.fsync, os.replace, os.rename

    def synced(file: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{file}')).name}")
        sync(file)

    def moved(name: str, move: Any) -> None:
        monkeypatch.setattr(
            os, name, lambda source, target: (done.append(f"{name} {target.name}"), move(source, target))
        )

    disk.write("a/x", b"0")
    monkeypatch.setattr(os, "fsync", synced)
    moved("replace", replace)
    moved("rename", rename)
    disk.write("a/b", b"1")
    assert done[1:] == ["replace b", "sync a"]
    assert done[0].startswith("sync .b.")
    folder = new_folder(disk, x=b"1", last=b"2")
    done.clear()
    disk.put_folder(folder, "new/c", last="last")
    assert sorted(done[:3]) == sorted(["sync x", "sync last", f"sync {folder.name}"])
    assert done[3:] == ["sync runs", "rename c", "sync new"]


def test_a_file_system_that_cannot_sync_a_folder(disk: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    Failing("fsync", errno.EINVAL, monkeypatch, times=float("inf"))
    storage_module._sync(disk.new_folder())
    shutil.rmtree(disk.root)

"""The same functions on a disk and at a URI."""

import re
from pathlib import Path

import pytest

from app.errors import BadInput
from app.storage import Storage


@pytest.fixture(params=["path", "uri"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    root = tmp_path / "runs" / "r"
    return Storage(str(root) if request.param == "path" else root.as_uri())


def test_files_and_folders(storage: Storage) -> None:
    assert storage.read("a/b.txt") is None
    assert storage.names("a") == []
    storage.write("a/b.txt", b"one")
    storage.write("a/b.txt", b"two")
    assert storage.read("a/b.txt") == b"two"
    assert storage.names("a") == ["b.txt"]

    folder = storage.new_folder()
    (folder / "x").write_bytes(b"1")
    (folder / "last").write_bytes(b"2")
    storage.put_folder(folder, "c", last="last")
    assert not folder.exists()
    assert storage.names("c") == ["last", "x"]
    with storage.local_folder("c") as local:
        assert (local / "x").read_bytes() == b"1"
    storage.delete_folder("c")
    assert storage.names("c") == []


def test_writable(storage: Storage) -> None:
    storage.check_writable()
    assert storage.names("") == []


def test_writable_is_found_out_by_two_at_once(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Storage.write

    def and_meanwhile(self: Storage, path: str, data: bytes) -> None:
        write(self, path, data)
        monkeypatch.undo()
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


@pytest.mark.parametrize("uri", ["nothing://bucket/runs", "fsspec+nothing://bucket/runs"])
def test_a_uri_that_no_filesystem_knows(uri: str) -> None:
    with pytest.raises(BadInput, match=f"--output-dir {re.escape(uri)}"):
        Storage(uri).read("x")

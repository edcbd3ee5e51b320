"""What Ray Tune does with its storage, in object stores."""

import pickle
from pathlib import Path

import pyarrow.fs
import pytest
from pyarrow.fs import FileSelector, FileType, LocalFileSystem

from app.arrow_store import arrow_filesystem
from app.storage import Storage

pytestmark = pytest.mark.parametrize("root", ["rclone", "moto"], indirect=True)


def test_files(root: str) -> None:
    filesystem, path = arrow_filesystem(root)
    filesystem = pickle.loads(pickle.dumps(filesystem))
    filesystem.create_dir(f"{path}/a")
    assert Storage(root).names("") == []  # no object that stands for a folder
    assert filesystem.get_file_info(f"{path}/a/b").type == FileType.NotFound
    with filesystem.open_output_stream(f"{path}/a/b") as file:
        file.write(b"0123")
        file.write(b"4567")
    assert filesystem.get_file_info(f"{path}/a/b").size == 8
    with filesystem.open_input_stream(f"{path}/a/b") as file:
        assert file.read() == b"01234567"
    with filesystem.open_input_file(f"{path}/a/b") as file:
        file.seek(6)
        assert file.read() == b"67"
    assert [each.base_name for each in filesystem.get_file_info(FileSelector(f"{path}/a"))] == ["b"]
    assert filesystem.get_file_info(FileSelector(f"{path}/none", allow_not_found=True)) == []
    filesystem.delete_dir(f"{path}/a")
    assert Storage(root).names("") == []


def test_folders_are_sent_and_fetched(root: str, tmp_path: Path) -> None:
    filesystem, path = arrow_filesystem(root)
    (tmp_path / "here" / "sub").mkdir(parents=True)
    (tmp_path / "here" / "sub" / "file").write_bytes(b"1" * 2**20)
    local = LocalFileSystem()
    pyarrow.fs.copy_files(
        str(tmp_path / "here"), f"{path}/there", source_filesystem=local, destination_filesystem=filesystem
    )
    pyarrow.fs.copy_files(
        f"{path}/there", str(tmp_path / "back"), source_filesystem=filesystem, destination_filesystem=local
    )
    assert (tmp_path / "back" / "sub" / "file").read_bytes() == b"1" * 2**20

"""Files of a run, on a disk or at a URI (s3://bucket/runs), through one set of functions.

A file or a folder appears whole or not at all on a disk (written beside its place, then renamed).
Object stores cannot rename folders: there a checkpoint's manifest, written last, makes it whole.
"""

import contextlib
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from app.errors import BadInput

# In a URI: user and password, and parameters that are as secret.
CREDENTIALS = re.compile(
    r"(?<=://)[^/?#]*@|(?<=[?&])"
    r"(?:[^=&]*(?:pass|passwd|password|pwd|secret|token|sig|signature|(?:access|account|api|private).?key)="
    r"|odbc_connect=[^&]*(?:pwd|password))[^&]*&?",
    re.IGNORECASE,
)


def credentials_in(uri: str) -> list[str]:
    return CREDENTIALS.findall(uri) if "://" in uri else []


def without_credentials(uri: str) -> str:
    return CREDENTIALS.sub("", uri).rstrip("?&") if credentials_in(uri) else uri


def refuse_secrets(name: str, uri: str) -> None:
    """Raise BadInput for a URI with a password or a key in it."""
    # A user alone is none: abfss://CONTAINER@ACCOUNT.dfs.core.windows.net
    if any(":" in found or "=" in found for found in credentials_in(uri)):
        raise BadInput(
            f"{name} has a password or a key in it, which would be written down: leave it out, and give it in the "
            "environment of the nodes: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY for s3, "
            "GOOGLE_APPLICATION_CREDENTIALS for gs, AZURE_TENANT_ID, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET for abfss"
        )


class Storage:
    """The files below one root. Paths are relative to it, with '/'."""

    def __init__(self, root: str):
        self.root = root.rstrip("/")
        self.local = Path(self.root) if "://" not in self.root else None
        self._filesystem = self._base = None

    def _remote(self):  # a pyarrow FileSystem: imported where it is needed
        if self._filesystem is None:
            from pyarrow.fs import FileSystem

            try:
                self._filesystem, self._base = FileSystem.from_uri(self.root)
            except (ValueError, ImportError, OSError) as error:
                raise BadInput(f"--output-dir {self.root}: {error}") from None
        return self._filesystem

    def uri(self, path: str) -> str:
        """The path as a person or a program would name it."""
        return f"{self.root}/{path}"

    def names(self, path: str) -> list[str]:
        """Names in a folder, sorted; none if there is no such folder."""
        if self.local:
            folder = self.local / path
            return sorted(os.listdir(folder)) if folder.is_dir() else []
        from pyarrow.fs import FileSelector

        found = self._remote().get_file_info(FileSelector(f"{self._base}/{path}", allow_not_found=True))
        return sorted(info.base_name for info in found)

    def read(self, path: str) -> bytes | None:
        """A file's bytes; None if there is no such file. Raises BadInput if it cannot be read."""
        try:
            if self.local:
                return (self.local / path).read_bytes()
            with self._remote().open_input_stream(f"{self._base}/{path}") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise BadInput(f"{self.uri(path)} cannot be read: {error.strerror or error}") from None

    def write(self, path: str, data: bytes) -> None:
        """Replace a file. Raises OSError if it cannot be written."""
        if self.local:
            target = self.local / path
            target.parent.mkdir(parents=True, exist_ok=True)
            beside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
            with open(beside, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, target)
            return
        filesystem = self._remote()
        filesystem.create_dir(f"{self._base}/{path}".rpartition("/")[0], recursive=True)
        with filesystem.open_output_stream(f"{self._base}/{path}") as file:
            file.write(data)

    def put_folder(self, source: Path, path: str, last: str) -> None:
        """Move a local folder to path, the file `last` after all others."""
        if self.local:
            target = self.local / path
            target.parent.mkdir(parents=True, exist_ok=True)
            for file in source.iterdir():  # on the disk before its name is: a power cut must not leave half of it
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            if target.exists():  # an unfinished or damaged one of the same step
                shutil.rmtree(target)
            os.rename(source, target)
            return
        filesystem = self._remote()
        filesystem.create_dir(f"{self._base}/{path}", recursive=True)
        for name in sorted(os.listdir(source), key=lambda name: name == last):
            with (source / name).open("rb") as read, filesystem.open_output_stream(f"{self._base}/{path}/{name}") as to:
                shutil.copyfileobj(read, to, 2**24)
        shutil.rmtree(source)

    def new_folder(self) -> Path:
        """An empty local folder to build one for put_folder in; on a disk, on the same disk."""
        if self.local:
            self.local.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".unfinished-", dir=self.local))

    @contextlib.contextmanager
    def local_folder(self, path: str) -> Iterator[Path]:
        """The folder on this machine's disk: where it is, or fetched into a temporary folder."""
        if self.local:
            yield self.local / path
            return
        with tempfile.TemporaryDirectory(prefix="evenkeel-") as folder:
            for name in self.names(path):
                data = self.read(f"{path}/{name}")
                assert data is not None
                Path(folder, name).write_bytes(data)
            yield Path(folder)

    def delete(self, path: str) -> None:
        if self.local:
            (self.local / path).unlink()
        else:
            self._remote().delete_file(f"{self._base}/{path}")

    def delete_folder(self, path: str) -> None:
        if self.local:
            shutil.rmtree(self.local / path)
        else:
            self._remote().delete_dir(f"{self._base}/{path}")

    @contextlib.contextmanager
    def temporary(self, path: str, data: bytes) -> Iterator[None]:
        """A file that is gone afterwards, and so is the root if it was made for it. Raises BadInput."""
        try:
            existed = self.local is not None and self.local.exists()
            self.write(path, data)
        except OSError as error:
            raise BadInput(
                f"--output-dir: {self.root} cannot be written to ({error.strerror or error}); choose another one"
            ) from None
        try:
            yield
        finally:
            try:
                self.delete(path)
            except OSError as error:
                raise BadInput(
                    f"--output-dir: {self.uri(path)} cannot be deleted ({error.strerror or error}), and a run deletes "
                    "its old checkpoints; allow it, or choose another one"
                ) from None
            if self.local and not existed:
                with contextlib.suppress(OSError):  # somebody else has put something there
                    self.local.rmdir()

    def check_writable(self) -> None:
        """Raise BadInput if nothing can be written or deleted here."""
        with self.temporary(f".writable-{uuid.uuid4().hex[:8]}", b""):
            pass

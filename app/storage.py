"""Files below a path or a URI, on a disk or in an object store, through one set of functions.

On a disk a file or a folder appears whole or not at all: it is written beside its place, then renamed. Object stores
cannot rename folders and have none: there a checkpoint's manifest, written last and deleted first, makes it whole.

Transient errors (app/retry.py) are retried, then raised as Unavailable. What a person has to mend is BadInput.
"""

import contextlib
import errno
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar
from urllib.parse import unquote

from app.errors import BadInput
from app.object_store import SCHEMES, ObjectFile, ObjectStore
from app.retry import retry
from app.scratch import scratch_folder

T = TypeVar("T")

# Of a folder that is being made or deleted: what a killed process leaves of it, the next one removes.
UNFINISHED = ".unfinished-"

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


@dataclass(frozen=True)
class File:
    """A file as a listing shows it. changed: a text that differs when the file has changed."""

    path: str
    size: int
    changed: str


class Storage:
    """The files below one root, a path or a URI. Paths are relative to it, with '/'; "" is the root itself.

    setting: the flag that error messages name. Raises BadInput for a URI that is not supported.
    """

    def __init__(self, root: str, setting: str = "--output-dir"):
        self.root, self.setting = root.rstrip("/"), setting
        self.local: Path | None = None
        scheme, separator, rest = root.partition("://")
        if separator and scheme in SCHEMES and rest.partition("/")[0]:
            if "?" in rest:
                raise BadInput(
                    f"{setting} {without_credentials(root)}: leave out what follows '?', and give an address in "
                    "AWS_ENDPOINT_URL and a region in AWS_REGION"
                )
            return
        if separator and (scheme != "file" or not rest.startswith("/")):
            raise BadInput(
                f"{setting} {without_credentials(root)}: give a path, file:///PATH, s3://BUCKET/PATH, "
                "gs://BUCKET/PATH, az://CONTAINER/PATH or abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH"
            )
        if separator:
            self.root = unquote(rest).rstrip("/")
        self.local = Path(self.root)

    @property
    def remote(self) -> ObjectStore:
        """The object store; only where local is None."""
        return ObjectStore(self.root, self.setting)

    def uri(self, path: str) -> str:
        """The path as a person or a program would name it."""
        return f"{self.root}/{path}".rstrip("/")

    def names(self, path: str) -> list[str]:
        """Names in a folder, sorted; none if there is no such folder."""
        if self.local is None:
            return self.remote.names(path)
        folder = self.local / path

        def work() -> list[str]:
            try:
                return sorted(os.listdir(folder))
            except (FileNotFoundError, NotADirectoryError):
                return []

        return self._on_disk("listing", path, work)

    def files(self, path: str = "") -> list[File]:
        """All files below a path, or the file that it names, sorted. Their paths are relative to it."""
        if self.local is None:
            return [File(each.path, each.size, f"{each.modified} {each.version}") for each in self.remote.objects(path)]
        top = self.local / path

        def work() -> list[File]:
            if top.is_file():
                return [_described(top, "")]
            found = (each for each in top.rglob("*") if each.is_file())
            return sorted((_described(each, each.relative_to(top).as_posix()) for each in found), key=lambda f: f.path)

        return self._on_disk("listing", path, work)

    def exists(self, path: str = "") -> bool:
        """Return True if there is a file or a folder at the path."""
        if self.local is None:
            return self.remote.exists(path)
        return self._on_disk("listing", path, (self.local / path).exists)

    def read(self, path: str) -> bytes | None:
        """A file's bytes; None if there is no such file."""
        if self.local is None:
            found = self.remote.get(path)
            return None if found is None else found[0]
        file = self.local / path

        def work() -> bytes | None:
            try:
                return file.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                return None

        return self._on_disk("reading", path, work)

    def open(self, path: str, size: int) -> IO[bytes] | ObjectFile:
        """A file to read from any place. Of one in an object store the size must be known."""
        return ObjectFile(self.remote, path, size) if self.local is None else (self.local / path).open("rb")

    def fetch(self, path: str, target: Path, size: int) -> None:
        """Copy what the target lacks of a file of this size. Raises FileNotFoundError if there is no such file."""
        if self.local is None:
            self.remote.download(path, target, size)
            return
        source = self.local / path

        def work() -> None:
            with source.open("rb") as read, target.open("ab") as write:
                read.seek(write.tell())
                shutil.copyfileobj(read, write, 2**23)

        retry(work, f"reading {source}")

    def write(self, path: str, data: bytes) -> None:
        """Replace a file. Raises OSError if a disk does not take it."""
        if self.local is None:
            self.remote.put(path, data)
            return
        target = self.local / path

        def work() -> None:
            _make_folder(target.parent)
            beside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
            try:
                with open(beside, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(beside, target)
            except OSError:
                with contextlib.suppress(OSError):
                    beside.unlink(missing_ok=True)
                raise
            _sync(target.parent)

        retry(work, f"writing {target}")

    def put_folder(self, source: Path, path: str, last: str) -> None:
        """Move a local folder to path, the file `last` after all others."""
        if self.local is None:
            # What may be there must not pass for whole while it is replaced.
            self.remote.delete(f"{path}/{last}")
            for name in sorted(os.listdir(source), key=lambda name: name == last):
                self.remote.put(f"{path}/{name}", source / name)
            shutil.rmtree(source)
            return
        target = self.local / path

        def work() -> None:
            if not source.exists() and (target / last).exists():  # moved by a try that then failed
                _sync(target.parent)
                return
            for file in source.iterdir():  # on the disk before its name is: a power cut must not leave half of it
                _sync(file)
            _sync(source)
            _make_folder(target.parent)
            if target.exists():  # an unfinished or damaged one of the same step
                shutil.rmtree(target)
            os.rename(source, target)
            _sync(target.parent)

        retry(work, f"writing {target}")

    def new_folder(self) -> Path:
        """An empty local folder to build one for put_folder in; on a disk, on the same disk."""
        if self.local is None:
            return scratch_folder()
        folder = self.local

        def work() -> Path:
            _make_folder(folder)
            return Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=folder))

        return retry(work, f"writing {folder}")

    @contextlib.contextmanager
    def local_folder(self, path: str) -> Iterator[Path]:
        """The folder on this machine's disk: where it is, or fetched into a temporary folder."""
        if self.local is not None:
            yield self.local / path
            return
        folder = scratch_folder()
        try:
            for each in self.remote.objects(path):
                if "/" in each.path:  # not what a checkpoint consists of
                    continue
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile: the manifest tells
                    self.remote.download(f"{path}/{each.path}", folder / each.path, each.size)
            yield folder
        finally:
            shutil.rmtree(folder)

    def delete(self, path: str) -> None:
        """Delete a file. One that is not there is no error."""
        if self.local is None:
            self.remote.delete(path)
            return
        file = self.local / path
        retry(lambda: file.unlink(missing_ok=True), f"deleting {file}")

    def delete_folder(self, path: str, first: str = "manifest.json") -> None:
        """Delete a folder. On a disk it is gone at once; in an object store the file `first` is the first to go."""
        if self.local is None:
            found = [each.path for each in self.remote.objects(path)]
            self.remote.delete(*(f"{path}/{name}" for name in sorted(found, key=lambda name: name != first)))
            return
        folder = self.local / path
        gone = folder.with_name(f"{UNFINISHED}{uuid.uuid4().hex[:8]}")

        def work() -> None:
            if folder.exists():
                os.rename(folder, gone)
            if gone.exists():
                shutil.rmtree(gone)

        retry(work, f"deleting {folder}")

    def _on_disk(self, doing: str, path: str, work: Callable[[], T]) -> T:
        try:
            return retry(work, f"{doing} {self.uri(path)}")
        except OSError as error:
            raise BadInput(f"{self.uri(path)} cannot be read: {error.strerror or error}") from None

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


def _described(file: Path, path: str) -> File:
    status = file.stat()
    return File(path, status.st_size, str(status.st_mtime_ns))


def _make_folder(folder: Path) -> None:
    """Make a folder, and those above it, so that it is still there after a power cut."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def _sync(path: Path) -> None:
    """Return when a file, or the names in a folder, are on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # what some network file systems say of a folder
            raise
    finally:
        os.close(opened)

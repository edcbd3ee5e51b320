"""Object stores as a file system of pyarrow's, which Ray Tune writes its own files through."""

import io
import shutil
from functools import partial
from typing import Any

from obstore.fsspec import FsspecStore
from pyarrow.fs import FSSpecHandler, PyFileSystem

from app import retry
from app.object_store import ObjectFile, ObjectStore, open_bucket
from app.scratch import scratch_folder


class _Store(FsspecStore):
    """Opens buckets and files as app.object_store does. It can be pickled: each process has its own connections."""

    def __init__(self, scheme: Any, **options: Any):
        super().__init__(scheme, **options)
        self._construct_store: Any = partial(_bucket, scheme)

    def _open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:
        store = ObjectStore(f"{self.protocol}://{path}")
        return ObjectFile(store, "", self.info(path)["size"]) if mode == "rb" else _Upload(store)


def _bucket(scheme: str, bucket: str) -> Any:
    return open_bucket(scheme, bucket, retry.RETRY_S)


class _Upload(io.FileIO):
    """A file on the disk that becomes an object when it is closed."""

    def __init__(self, store: ObjectStore):
        self._store, self._path = store, scratch_folder() / "object"
        super().__init__(self._path, "wb")

    def close(self) -> None:
        if not self.closed:
            super().close()
            try:
                self._store.put("", self._path)
            finally:
                shutil.rmtree(self._path.parent)


def arrow_filesystem(uri: str) -> tuple[PyFileSystem, str]:
    """Return pyarrow's file system for a URI, and the URI's path in it."""
    scheme, _, path = uri.partition("://")
    return PyFileSystem(FSSpecHandler(_Store(scheme))), path

"""Object stores as a file system of pyarrow's, which Ray Tune writes its own files through."""

from functools import partial
from typing import Any

from obstore.fsspec import FsspecStore
from pyarrow.fs import FSSpecHandler, PyFileSystem

from app import retry
from app.object_store import ObjectFile, ObjectStore, open_bucket


class _Store(FsspecStore):
    """Opens buckets as app.object_store does. It can be pickled: each process has its own connections."""

    def __init__(self, scheme: Any, **options: Any):
        super().__init__(scheme, **options)
        self._construct_store: Any = partial(self._bucket, scheme)

    @staticmethod
    def _bucket(scheme: str, bucket: str) -> Any:
        return open_bucket(scheme, bucket, retry.RETRY_S)

    def _open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:
        if mode == "rb":
            return ObjectFile(ObjectStore(f"{self.protocol}://{path}"), "", self.info(path)["size"])
        return super()._open(path, mode, *args, **options)


def arrow_filesystem(uri: str) -> tuple[PyFileSystem, str]:
    """Return pyarrow's file system for a URI, and the URI's path in it."""
    scheme, _, path = uri.partition("://")
    return PyFileSystem(FSSpecHandler(_Store(scheme))), path

"""Objects below a URI: s3://, gs://, az:// and abfss://. One place for credentials, time limits, retries and errors.

obstore does the work. It repeats failed requests by itself; what it does not repeat, app.retry does. It is imported
when a store is first used, and it does not survive a fork.
"""

import contextlib
import functools
import importlib.util
import os
import re
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self, TypeVar

from app import retry
from app.errors import BadInput, Unavailable
from app.scratch import scratch_folder

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Store

T = TypeVar("T")

SCHEMES = ("s3", "gs", "az", "abfss")
MIB = 2**20
# A request without an answer is given up after this share of the time for which it is repeated.
STALL_SHARE = 1 / 3
# Parts of an upload: few at a time, so that each is through before its request counts as stalled. A store takes
# 10,000 parts of one object.
PART_BYTES, PARTS_AT_A_TIME, MOST_PARTS = 5 * MIB, 3, 9000

# What an address with http:// may be given in.
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
# A machine or a pod on AWS has credentials by a role: by one of these variables, or at this address.
ROLES = ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
METADATA_ADDRESS = ("169.254.169.254", 80)
# What obstore's errors, which have one class for almost everything, have in their text.
METADATA = re.compile(r"169\.254\.169\.254|metadata\.google\.internal")
NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
CREDENTIALS_OVER = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired")
TRANSIENT = re.compile("HTTP error:|<Code>(RequestTimeout|SlowDown|InternalError|NoSuchUpload)</Code>")

HELP = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, install boto3 for the profiles of ~/.aws, or give the "
    "machine a role",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or give the machine a service account",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or AZURE_TENANT_ID, AZURE_CLIENT_ID and "
    "AZURE_CLIENT_SECRET",
}
HELP["abfss"] = HELP["az"]

Version = dict[str, str]


@dataclass(frozen=True)
class Object:
    """An object as a listing shows it. version: what conditional writes compare, and changes with its content."""

    path: str
    size: int
    version: Version
    modified: str


@dataclass(frozen=True)
class ObjectStore:
    """The objects below a URI. Paths are relative to it, with '/'; "" is the URI itself.

    setting: the flag that messages name. retry_s: how long a failing request is repeated, app.retry.RETRY_S by default.
    All methods raise BadInput for what a person has to mend and Unavailable for a store that cannot be reached.
    """

    uri: str
    setting: str = "--output-dir"
    retry_s: float | None = None

    def names(self, path: str) -> list[str]:
        """Names directly below a path, sorted. Objects that stand for a folder (NAME/) do not count."""
        key = self._key(path)
        found = self._call("listing", path, lambda store: store.list_with_delimiter(key or None))
        paths = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
        return sorted({each.rpartition("/")[2] for each in paths if each != key})

    def objects(self, path: str = "") -> list[Object]:
        """All objects below a path, or the one that the path names, sorted. Their paths are relative to this path."""
        key = self._key(path)
        found = self._call("listing", path, lambda store: store.list(key or None).collect())
        # An empty object may stand for a folder (NAME/): obstore lists it as NAME, where there is no object.
        found = [each for each in found if each["size"] or self._head(each["path"])]
        if key and not found and (itself := self._head(key)):
            found = [itself]
        described = (_described(each, each["path"][len(key) :].lstrip("/")) for each in found)
        return sorted(described, key=lambda each: each.path)

    def exists(self, path: str = "") -> bool:
        """Return True if the path names an object or a folder."""
        key = self._key(path)
        if self._call("listing", path, lambda store: next(iter(store.list(key or None, chunk_size=1)), None)):
            return True
        return bool(self.objects(path))

    def get(self, path: str) -> tuple[bytes, Version] | None:
        """An object and its version; None if there is no such object."""

        def work(store: "Store") -> tuple[bytes, Version]:
            result = store.get(self._key(path))
            return bytes(result.bytes()), _version(result.meta)

        try:
            return self._call("reading", path, work)
        except FileNotFoundError:
            return None

    def get_range(self, path: str, start: int, end: int) -> bytes | None:
        """The bytes from start to end; None if the store does not serve parts of objects."""
        try:
            return self._call(
                "reading", path, lambda store: bytes(store.get_range(self._key(path), start=start, end=end))
            )
        except _NoRangesError:
            return None

    def download(self, path: str, target: Path, size: int) -> None:
        """Fetch what the target lacks of an object of this size. Raises FileNotFoundError if there is no object."""

        def work(store: "Store") -> None:
            with target.open("ab") as file:
                if 0 < file.tell() < size:
                    result = store.get(self._key(path), options={"range": {"offset": file.tell()}})
                elif file.tell() < size:
                    result = store.get(self._key(path))
                else:
                    return
                for chunk in result.stream(min_chunk_size=8 * MIB):
                    file.write(chunk)

        try:
            self._call("reading", path, work)
        except _NoRangesError:
            target.unlink()
            self._call("reading", path, work)

    def put(self, path: str, data: bytes | Path) -> None:
        """Write an object: a file is streamed from the disk in parts."""
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        part = max(PART_BYTES, size // MOST_PARTS)
        self._call(
            "writing",
            path,
            lambda store: store.put(self._key(path), data, chunk_size=part, max_concurrency=PARTS_AT_A_TIME),
        )

    def put_if(self, path: str, data: bytes, version: Version | None) -> bool:
        """Write an object if it still has this version, or if None: if there is none. Return False if that has changed.

        A repeated request may find that the first one has succeeded, so the data must differ in each call. Some
        stores write without a check: see checks_versions().
        """
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            self._put_if(path, data, version)
        except NotImplementedError:
            self.put(path, data)
        except (AlreadyExistsError, PreconditionError, FileNotFoundError):
            found = self.get(path)
            return found is not None and found[0] == data
        return True

    def checks_versions(self, path: str, data: bytes, version: Version | None) -> bool:
        """Return True if the store refuses put_if(path, data, version), which has just succeeded, a second time."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            self._put_if(path, data, version)
        except NotImplementedError:
            return False
        except (AlreadyExistsError, PreconditionError):
            return True
        return False

    def _put_if(self, path: str, data: bytes, version: Version | None) -> None:
        mode: Any = "create" if version is None else version
        self._call("writing", path, lambda store: store.put(self._key(path), data, mode=mode))

    def delete(self, *paths: str) -> None:
        """Delete objects. One that is not there is no error."""
        for path in paths:  # in order, so that a manifest can be the first to go
            with contextlib.suppress(FileNotFoundError):  # of gs and az
                self._call("deleting", path, lambda store, path=path: store.delete(self._key(path)))

    def connect(self) -> "Store":
        """The bucket of the URI. Raises BadInput if it cannot be used."""
        scheme, _, rest = self.uri.partition("://")
        try:
            return open_bucket(scheme, rest.partition("/")[0], self._budget_s)
        except BadInput as error:
            raise BadInput(f"{self.setting} {self.uri}: {error}") from None
        except Exception as error:  # whatever obstore raises of what it cannot use
            raise BadInput(
                f"{self.setting} {self.uri} cannot be used ({_words(error)}): give {scheme}://NAME/PATH, and what "
                f"belongs to it in the environment: {HELP[scheme]}"
            ) from None

    @property
    def _budget_s(self) -> float:
        return retry.RETRY_S if self.retry_s is None else self.retry_s

    def _head(self, key: str) -> Any | None:
        """The description of the object with this key; None if there is none."""
        try:
            return self._call("reading", "", lambda store: store.head(key))
        except FileNotFoundError:
            return None

    def _key(self, path: str) -> str:
        prefix = self.uri.partition("://")[2].partition("/")[2]
        return "/".join(part for part in (prefix.strip("/"), path.strip("/")) if part)

    def _call(self, doing: str, path: str, work: Callable[["Store"], T]) -> T:
        """Return work(store), repeated after transient errors. Errors of the store become the project's own."""
        where, store = f"{self.uri}/{path}".rstrip("/"), self.connect()

        def attempt() -> T:
            try:
                return work(store)
            except OSError as error:
                if error.errno is not None:  # of a local file
                    raise
                raise self._translated(error, f"{doing} {where}", where) from error
            except Exception as error:  # whatever obstore raises: it has no common class for all
                raise self._translated(error, f"{doing} {where}", where) from error

        return retry.retry(attempt, f"{doing} {where}", self._budget_s)

    def _translated(self, error: Exception, what: str, where: str) -> Exception:
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        text, words, scheme = str(error), _words(error), self.uri.partition("://")[0]
        found = re.search(r"non-2xx status code: (\d+)", text)
        status = int(found[1]) if found else None
        if isinstance(error, AlreadyExistsError | PreconditionError | NotImplementedError):
            return error
        if status == 501:
            return NotImplementedError(words)
        if "non-partial response" in text:
            return _NoRangesError(words)
        if any(code in text for code in NO_BUCKET):
            bucket = self.uri.partition("://")[2].partition("/")[0]
            return BadInput(f"{self.setting} {self.uri}: there is no bucket {bucket}; make it, or give another one")
        if METADATA.search(text):
            return BadInput(f"{self.setting} {self.uri}: no credentials were found; {HELP[scheme]}")
        if type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError") or status in (401, 403):
            return BadInput(f"{self.setting}: {what} was refused ({words}); allow it, or {HELP[scheme]}")
        if any(code in text for code in CREDENTIALS_OVER):
            return BadInput(f"{self.setting}: {what} was refused ({words}); {HELP[scheme]}")
        gave_up = re.search(r" in ([\d.]+)(m?)s, after \d+ retries", text)
        if status in retry.TRANSIENT_STATUS or (TRANSIENT.search(text) and "builder error" not in text):
            if gave_up and float(gave_up[1]) / (1000 if gave_up[2] else 1) >= self._budget_s:
                return Unavailable(f"{what} failed for {self._budget_s:g} s: {words}")
            return ConnectionError(words)
        if isinstance(error, FileNotFoundError):
            return FileNotFoundError(f"{where}: there is no such object")
        if status == 301 or "redirect" in text or "AuthorizationHeaderMalformed" in text:
            return BadInput(f"{self.setting} {self.uri}: it lies in another region ({words}); set AWS_REGION to that")
        return BadInput(f"{self.setting}: {what} failed: {words}")


class ObjectFile:
    """An object as a file to read from any place, each read a request of its own."""

    def __init__(self, store: ObjectStore, path: str, size: int):
        self._store, self._path, self._size = store, path, size
        self._at = 0
        self._copy: IO[bytes] | None = None
        self.closed = False

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else min(self._at + size, self._size)
        data = self._read(self._at, end) if self._at < end else b""
        self._at += len(data)
        return data

    def _read(self, start: int, end: int) -> bytes:
        if self._copy is None:
            if (data := self._store.get_range(self._path, start, end)) is not None:
                return data
            self._copy = self._fetched()
        self._copy.seek(start)
        return self._copy.read(end - start)

    def _fetched(self) -> IO[bytes]:
        """A copy on the disk, of a store that serves whole objects only."""
        path = scratch_folder() / "object"
        self._store.download(self._path, path, self._size)
        file = path.open("rb")
        shutil.rmtree(path.parent)  # what is open can still be read
        return file

    def close(self) -> None:
        self.closed = True
        if self._copy is not None:
            self._copy.close()

    def __del__(self) -> None:
        self.close()  # pyarrow drops files without closing them

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _NoRangesError(Exception):
    """The store sent the whole object where a part was asked for, as rclone's server does."""


def _words(error: Exception) -> str:
    """What the store said, in a line."""
    from app.storage import without_credentials  # which imports this module

    text = str(error).partition("\n\nDebug source")[0]
    code, message = re.search("<Code>(.*?)</Code>", text), re.search("<Message>(.*?)</Message>", text, re.S)
    if code:
        return f"{code[1]}: {message[1]}" if message else code[1]
    return without_credentials(" ".join(text.split()))[:300]


def _version(meta: Any) -> Version:
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}


def _described(meta: Any, path: str) -> Object:
    return Object(path, meta["size"], _version(meta), meta["last_modified"].isoformat())


@functools.cache
def open_bucket(scheme: str, bucket: str, budget_s: float) -> "Store":
    """A bucket, or a container, as obstore's store. A process opens it once."""
    from obstore.store import from_url

    given: Any = _s3_options(bucket) if scheme == "s3" else {}
    stall = timedelta(seconds=budget_s * STALL_SHARE)
    return from_url(
        f"{scheme}://{bucket}",
        client_options={
            "allow_http": any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS),
            "connect_timeout": min(timedelta(seconds=5), stall),
            "read_timeout": stall,
            "timeout": timedelta(days=1),  # of a request with its body: a large object may take as long as it takes
        },
        retry_config={
            "max_retries": 1000,  # the time is what counts
            "retry_timeout": timedelta(seconds=budget_s),
            "backoff": {
                "init_backoff": timedelta(seconds=min(retry.FIRST_PAUSE_S, budget_s / 10)),
                "max_backoff": timedelta(seconds=min(retry.LONGEST_PAUSE_S, budget_s / 5)),
            },
        },
        **given,
    )


def _s3_options(bucket: str) -> dict[str, Any]:
    """Credentials and region where obstore does not find them itself. Raises BadInput where there are none."""
    options, region = {}, None
    has_own = any(name in os.environ for name in ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE"))
    if not has_own and importlib.util.find_spec("boto3") is not None:
        from obstore.auth.boto3 import Boto3CredentialProvider

        try:
            options["credential_provider"] = Boto3CredentialProvider()
        except ValueError:
            raise BadInput(f"no credentials were found; {HELP['s3']}") from None
        region = options["credential_provider"].config.get("region")
    elif not has_own and not any(name in os.environ for name in ROLES) and not _is_on_ec2():
        raise BadInput(f"no credentials were found; {HELP['s3']}")
    known = region or any(os.environ.get(name) for name in ("AWS_REGION", "AWS_DEFAULT_REGION", *ENDPOINTS))
    return options if known else options | {"region": _region_of(bucket)}


def _is_on_ec2() -> bool:
    try:
        socket.create_connection(METADATA_ADDRESS, timeout=1).close()
    except OSError:
        return False
    return True


def _region_of(bucket: str) -> str:
    """AWS names a bucket's region to everybody, in the header of any answer."""
    import requests

    try:
        answer = requests.head(f"https://s3.amazonaws.com/{bucket}", timeout=5, allow_redirects=False)
    except requests.RequestException:  # the first request will say what is wrong
        return "us-east-1"
    return answer.headers.get("x-amz-bucket-region", "us-east-1")

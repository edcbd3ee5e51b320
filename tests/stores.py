"""S3 servers on this machine, and storage on a disk and on them."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

from app.storage import Storage

BUCKET = "evenkeel"
KEY, SECRET = "a-key", "a-secret-of-some-length"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def rclone_server(folder: Path) -> Iterator[str]:
    """The address of an S3 server that checks keys, and has neither folders' markers nor conditional writes."""
    (folder / BUCKET).mkdir()
    address = f"127.0.0.1:{free_port()}"
    rclone = [str(Path(sys.executable).with_name("rclone")), "--config", os.devnull]
    with _running([*rclone, "serve", "s3", "--auth-key", f"{KEY},{SECRET}", "--addr", address, str(folder)], address):
        yield f"http://{address}"


@contextlib.contextmanager
def moto_server() -> Iterator[str]:
    """The address of an S3 server that has conditional writes, and takes any key."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    moto = str(Path(sys.executable).with_name("moto_server"))
    with _running([moto, "--host", "127.0.0.1", "--port", str(port)], address):
        urllib.request.urlopen(urllib.request.Request(f"http://{address}/{BUCKET}", method="PUT"))
        yield f"http://{address}"


@contextlib.contextmanager
def _running(command: list[str], address: str) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not _answers(f"http://{address}/"):
            assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
            assert time.monotonic() < deadline, f"{command[0]} does not answer"
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def environment(endpoint: str) -> dict[str, str]:
    """The variables of a process that uses the server."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


def upload(folder: Path, root: str) -> str:
    """Copy a folder's files below a root. Returns the root."""
    for path in folder.rglob("*"):
        if path.is_file():
            Storage(root).write(path.relative_to(folder).as_posix(), path.read_bytes())
    return root


def new_root(kind: str, folder: Path) -> str:
    """A path, or a URI in the server's bucket, where nothing is yet."""
    return str(folder / "root") if kind == "disk" else f"s3://{BUCKET}/{uuid.uuid4().hex}"

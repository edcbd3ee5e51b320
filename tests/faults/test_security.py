"""What a run opens to others, and what becomes of the secrets that it is given."""

import base64
import http.server
import os
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any

import mlflow
import psutil
import pytest

from tests.faults.common import Command, free_port, slow_config, wait_until
from tests.faults.conftest import Figures

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore")]  # ray's own

ROOT = Path(__file__).parents[2]
# What must be found nowhere afterwards.
URI, PASSWORD, KEY, TOKEN = ("canary-" + word for word in ("uri", "password", "key", "token"))


class Guard(http.server.BaseHTTPRequestHandler):
    """In front of an MLflow server: lets requests with the password pass."""

    server_port: int
    refused = 0

    def do_GET(self) -> None:
        expected = "Basic " + base64.b64encode(f"someone:{URI}".encode()).decode()
        if self.headers.get("Authorization") != expected:
            type(self).refused += 1
            self.send_error(401)
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name: value for name, value in self.headers.items() if name not in ("Host", "Authorization")}
        address = f"http://127.0.0.1:{self.server_port}{self.path}"
        request = urllib.request.Request(address, body or None, headers, method=self.command)
        try:
            with urllib.request.urlopen(request) as answer:
                code, content = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            code, content = error.code, error.read()
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[int]:
    """The port of an MLflow server behind a password."""
    folder = tmp_path / "server"
    folder.mkdir()
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination",
        str(folder / "files"),
    ]
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    guard = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Guarded", (Guard,), {"server_port": port}))
    thread = threading.Thread(target=guard.serve_forever)
    thread.start()
    wait_until(lambda: answers(port))
    yield guard.server_port
    guard.shutdown()
    thread.join()
    guard.server_close()
    for child in psutil.Process(process.pid).children(recursive=True):
        child.terminate()
    process.terminate()
    process.wait()


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except OSError:
        return False


def files_with(folder: Path, secret: bytes) -> list[str]:
    """Whose content or name has it."""
    found = []
    for path in folder.rglob("*"):
        if secret in os.fsencode(path) or (path.is_file() and secret in path.read_bytes()):
            found.append(str(path.relative_to(folder)))
    return found


def listening(process: psutil.Process) -> list[tuple[str, str]]:
    """What this process and those it has started listen on: their names, and the addresses."""
    found = []
    for each in [process, *process.children(recursive=True)]:
        try:
            found += [(each.name(), c.laddr.ip) for c in each.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        except psutil.NoSuchProcess:
            continue
    return found


def told_by_environment(process: psutil.Process, secret: str) -> list[str]:
    """Those of the processes it has started, and theirs, that were given the secret."""
    found = []
    for each in process.children(recursive=True):
        try:
            found += [each.name() for value in each.environ().values() if secret in value]
        except psutil.NoSuchProcess:
            continue
    return found


def is_loopback(text: str) -> bool:
    address = ip_address(text)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None  # ::ffff:127.0.0.1
    return (mapped or address).is_loopback


@pytest.mark.ci
def test_a_run_listens_on_loopback_only_and_keeps_its_secrets(tmp_path: Path, guarded: int, figures: Figures) -> None:
    uri = f"http://someone:{URI}@127.0.0.1:{guarded}"
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        run = Command(
            slow_config(tmp_path, tracking_uri=None),
            tmp_path,
            MLFLOW_TRACKING_URI=uri,
            MLFLOW_TRACKING_USERNAME="someone",
            MLFLOW_TRACKING_PASSWORD=PASSWORD,
            AWS_SECRET_ACCESS_KEY=KEY,
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN=TOKEN,
            RAY_TMPDIR=folder,
        )
        run.wait_for_step(10)
        command = psutil.Process(run.process.pid)
        open_ports = listening(command)
        assert told_by_environment(command, KEY)  # the workers' too, which read and write the object store
        for secret in (URI, PASSWORD):
            assert told_by_environment(command, secret) == []
        summary, exit_code = run.result()
        assert exit_code == 0, run.output()
        assert len(open_ports) > 5
        assert [(name, address) for name, address in open_ports if not is_loopback(address)] == []

        # It was recorded, with the password in the URI, which comes before the one in the environment.
        recorded = mlflow.MlflowClient(f"sqlite:///{tmp_path}/server/mlflow.db").get_run(summary["run_id"])
        assert recorded.info.status == "FINISHED"
        assert recorded.data.params["tracking_uri"] == f"http://127.0.0.1:{guarded}"
        assert list(Path(folder).rglob("*.log"))
        for secret in (URI, PASSWORD, KEY, TOKEN):
            for form in (secret.encode(), base64.b64encode(f"someone:{secret}".encode())):
                assert files_with(tmp_path, form) == []
                assert files_with(Path(folder), form) == []
    figures(
        "24. Secrets in the environment and the tracking URI", "in no file of the run, of Ray, of MLflow, and not said"
    )


@pytest.mark.ci
def test_a_sweep_keeps_its_secrets(tmp_path: Path) -> None:
    """Its server does not answer: what is said of that has no password either."""
    (tmp_path / "space.yaml").write_text("lr: {loguniform: [1e-3, 1e-2]}\n")
    words = ["--space", "space.yaml", "--num-trials", "2", "--sweep-name", "s", "--epochs", "1"]
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        secrets = {
            "MLFLOW_TRACKING_URI": f"http://someone:{URI}@127.0.0.1:{free_port()}",
            "MLFLOW_TRACKING_PASSWORD": PASSWORD,
            "AWS_SECRET_ACCESS_KEY": KEY,
        }
        done = subprocess.run(
            [sys.executable, "-m", "tune.sweep", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": folder, **secrets},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "127.0.0.1" in done.stdout
        assert list(Path(folder).rglob("*.log"))
        (tmp_path / "said.txt").write_text(done.stdout + done.stderr)
        for secret in (URI, PASSWORD, KEY):
            assert files_with(tmp_path, secret.encode()) == []
            assert files_with(Path(folder), secret.encode()) == []


def test_a_search_for_secrets_finds_them(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.bin").write_bytes(b"\0" + TOKEN.encode() + b"\0")
    (tmp_path / TOKEN).touch()
    assert sorted(files_with(tmp_path, TOKEN.encode())) == ["a/b.bin", TOKEN]

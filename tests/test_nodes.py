"""Whether nodes agree: what is said of each that does not, and of a server that does not answer."""

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from app.cluster import Cluster
from app.config import Config
from app.deliver import server_problem
from app.errors import BadInput
from app.nodes import (
    PACKAGES,
    Node,
    _answer,
    _patience,
    _problems,
    inspect_nodes,
    look,
    look_around,
    look_here,
    print_nodes,
    refuse_other_node,
)
from app.storage import Storage

pytestmark = pytest.mark.filterwarnings("ignore")  # ray's own


@pytest.fixture
def here(tmp_path: Path) -> dict[str, Any]:
    Storage(str(tmp_path)).write("marker", b"token")
    return look(PACKAGES, str(tmp_path), "marker", "token", str(tmp_path))


def problems(here: dict[str, Any], *founds: dict[str, Any] | str) -> list[str]:
    config = Config(dataset="image-folder", data_dir="/data", output_dir="/runs")
    nodes = [Node(f"10.0.0.{number}", 8, 1, found) for number, found in enumerate(founds, 1)]
    return list(_problems(config, nodes, here))


def test_what_there_is_here(here: dict[str, Any], tmp_path: Path) -> None:
    assert (here["output"], here["data"]) == (True, True)
    assert set(here) == {"Python", *PACKAGES, "code", "output", "data"}
    elsewhere = look(("no-such-package",), (tmp_path / "other").as_uri(), "marker", "token", str(tmp_path / "none"))
    assert elsewhere == {
        "Python": here["Python"],
        "no-such-package": "none",
        "code": here["code"],
        "output": False,
        "data": False,
    }
    at_a_uri = look((), tmp_path.as_uri(), "marker", "token", tmp_path.as_uri())
    assert (at_a_uri["output"], at_a_uri["data"]) == (True, True)
    assert look((), tmp_path.as_uri(), "marker", "another", None)["output"] is False
    (tmp_path / "table.csv").write_text("text,label")
    for place, there in (("table.csv", True), ("none", False)):
        assert look((), str(tmp_path), "marker", "token", (tmp_path / place).as_uri())["data"] is there
    refused = look((), "nosuch://bucket", "marker", "token", "nosuch://bucket/data")
    assert "BadInput" in refused["output"]
    assert "nosuch" in refused["data"]


def test_nodes_that_agree(here: dict[str, Any]) -> None:
    assert problems(here, here, here) == []


@pytest.mark.parametrize(
    ("differs", "parts"),
    [
        ({"Python": "3.9"}, ["Python 3.9, and 3.", "requirements.lock"]),
        ({"torch": "2.1.0"}, ["torch 2.1.0, and 2.", "--runtime-env deploy/runtime_env.yaml"]),
        ({"code": "0000"}, ["another version of the app package", "--working-dir ."]),
        ({"code": "none"}, ["no app package", "--working-dir ."]),
        ({"output": False}, ["--output-dir /runs is not the one that the command sees:", "s3://bucket/runs"]),
        ({"output": "OSError: denied"}, ["sees (OSError: denied): give"]),
        ({"data": False}, ["--data-dir /data is not there: copy it there"]),
    ],
)
def test_a_node_that_does_not(here: dict[str, Any], differs: dict[str, Any], parts: list[str]) -> None:
    [problem] = problems(here, here, here | differs, here | differs)
    assert problem.startswith("nodes 10.0.0.2, 10.0.0.3: ")
    for part in parts:
        assert part in problem


def test_a_node_that_does_not_answer(here: dict[str, Any]) -> None:
    [problem] = problems(here, "no answer in 30 s", here)
    assert problem.startswith("node 10.0.0.1: cannot be asked (no answer in 30 s): see `ray status`")


def test_a_worker_on_a_node_that_has_come_since(here: dict[str, Any], tmp_path: Path) -> None:
    config = Config(run_name="r", output_dir=str(tmp_path))
    Storage(str(tmp_path)).write("r/run.json", b"{}")
    there = look_here(config)
    refuse_other_node(config, there)
    Storage(str(tmp_path)).write("r/run.json", b"another run's")
    with pytest.raises(BadInput, match=r"node [0-9.]+: --output-dir .* is not the one that the command sees"):
        refuse_other_node(config, there)
    with pytest.raises(BadInput, match=r"torch 2\.15\.\d+, and 2\.1\.0 where"):
        refuse_other_node(config, replace(there, found=there.found | {"torch": "2.1.0"}))


def test_what_a_person_should_know(local_ray: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, port: int) -> None:
    config = Config(run_name="r", output_dir="/tmp/ray/runtime_resources/working_dir_files/1/runs")
    told: list[str] = []
    look_around(config, Cluster(False, 1, ("a note",)), f"http://127.0.0.1:{port}/broken", told.append)
    assert told[0] == "a note"
    assert told[1].startswith(f"tracking server 127.0.0.1:{port} answers with 500")
    assert told[2].startswith(f"--output-dir {config.output_dir} is in the job's own directory")
    assert len(told) == 3
    config = Config(dataset="image-folder", data_dir=str(tmp_path / "none"), output_dir=str(tmp_path))
    with pytest.raises(BadInput, match=r"nodes cannot train this run together:\n  node .*: --data-dir .* not there"):
        look_around(config, Cluster(False, 2, ()), None, told.append)
    monkeypatch.setattr("app.places.draining_nodes", lambda: {node["NodeID"] for node in ray.nodes()})
    look_around(config, Cluster(False, 2, ()), None, told.append)  # nothing is trained on a node that is to go
    assert len(told) == 3


def test_how_long_a_node_may_take(local_ray: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _patience() == 30
    for environment, seconds in (
        ({"working_dir": "gcs://a.zip", "config": {"setup_timeout_seconds": 1800}}, 30),
        ({"uv": {"packages": ["-r requirements.lock"]}, "config": {"setup_timeout_seconds": 1800}}, 1830),
        ({"pip": ["torch"]}, 630),
    ):
        monkeypatch.setattr("ray.get_runtime_context", lambda env=environment: SimpleNamespace(runtime_env=env))
        assert _patience() == seconds


def test_why_a_node_does_not_answer(local_ray: None) -> None:
    @ray.remote(max_retries=0)
    def broken() -> None:
        raise OSError("the disk\nis gone")

    answer = broken.remote()
    ray.wait([answer])
    assert _answer(answer, 30) == "the disk is gone"


def test_the_nodes_of_a_ray(local_ray: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inspection = inspect_nodes(Config(output_dir=str(tmp_path / "runs")))
    assert inspection.problems == ()
    [node] = inspection.nodes
    assert node.cpus == 4
    assert isinstance(node.found, dict)
    assert not list(tmp_path.iterdir())
    mute = Node("10.0.0.9", 8, 0, "no answer in 30 s")
    print_nodes([node, Node("10.0.0.8", 8, 0, node.found | {"output": "OSError: denied"}), mute])
    _, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows] == [node.address, "10.0.0.8", "10.0.0.9"]
    assert [row[-2:] for row in rows] == [["there", "there"], ["missing", "there"], ["0", "?"]]


class Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response({"/health": 200, "/locked/health": 401, "/broken/health": 500}.get(self.path, 404))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def port() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_tracking_server(port: int) -> None:
    assert server_problem(f"http://127.0.0.1:{port}") is None
    assert server_problem(f"http://user:password@127.0.0.1:{port}/locked/") is None
    assert (
        server_problem(f"http://127.0.0.1:{port}/broken") == f"127.0.0.1:{port} answers with 500 Internal Server Error"
    )
    assert server_problem(f"postgresql+psycopg2://user:password@127.0.0.1:{port}/mlflow") is None
    for uri in ("none", "sqlite:////tmp/mlflow.db", "databricks", "postgresql:///mlflow"):
        assert server_problem(uri) is None
    assert server_problem(f"http://127.0.0.1:{port}/nothing/here") is None  # not every MLflow has /health
    for uri in ("http://user:password@localhost:50o0", "http://[::1", "postgresql://user:pass/word@db/mlflow"):
        told = server_problem(uri)
        assert told is not None
        assert "cannot be read; give" in told
        assert "pass" not in told
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        closed = probe.getsockname()[1]
    for scheme in ("http", "postgresql"):
        told = server_problem(f"{scheme}://user:password@127.0.0.1:{closed}/")
        assert told is not None
        assert told.startswith(f"127.0.0.1:{closed} does not answer (")
        assert "password" not in told

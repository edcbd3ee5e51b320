"""A cluster as people start one, with `ray start` on each node and a token, and the command as a submitted job."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app.config import Config
from app.config_file import to_yaml
from tests.faults.common import COMMANDS, SLOW, free_port, wait_until
from tests.faults.conftest import Figures

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore")]  # ray's own

ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).with_name("ray"))
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a-token-that-is-long-enough-for-a-test"}


@dataclass(frozen=True)
class RayStarted:
    """address: of the dashboard, where jobs are submitted; folder: Ray's own."""

    address: str
    folder: Path

    def get(self, path: str) -> Any:
        request = urllib.request.Request(
            self.address + path, headers={"Authorization": f"Bearer {TOKEN['RAY_AUTH_TOKEN']}"}
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            return json.loads(answer.read())

    def submit(self, *words: str) -> subprocess.Popen[str]:
        """python -m app.train as a job, whose log is this process's output."""
        command = [RAY, "job", "submit", "--address", self.address, "--working-dir", ".", "--"]
        process = subprocess.Popen(
            [*command, "python", "-m", "app.train", *words],
            cwd=ROOT,
            env={**os.environ, **TOKEN},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        COMMANDS.append(process)
        return process

    def metrics(self) -> str:
        """What Prometheus would read, of all nodes."""
        targets = json.loads((self.folder / "prom_metrics_service_discovery.json").read_text())
        found = []
        for target in {each for group in targets for each in group["targets"]}:
            # Among them is the autoscaler's, which such a head has none of.
            with contextlib.suppress(urllib.error.URLError):
                found.append(urllib.request.urlopen(f"http://{target}/metrics", timeout=20).read().decode())
        return "\n".join(found)


@pytest.fixture
def started() -> Iterator[RayStarted]:
    """A head without CPUs, and two nodes of one."""
    processes = []
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        port, dashboard = free_port(), free_port()

        def start(*words: str) -> None:
            # Nodes of one machine must not have a port in common.
            command = [RAY, "start", "--block", "--disable-usage-stats", *words]
            command += ["--dashboard-agent-listen-port", str(free_port())]
            log = (Path(folder) / f"start-{len(processes)}.txt").open("w")
            # A job's `python` is that of the node.
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            environment = {**os.environ, **TOKEN, "RAY_TMPDIR": folder, "PATH": path}
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            COMMANDS.append(processes[-1])

        start(
            "--head", "--port", str(port), "--dashboard-port", str(dashboard), "--num-cpus", "0", "--temp-dir", folder
        )
        cluster = RayStarted(f"http://127.0.0.1:{dashboard}", Path(folder))
        wait_until(lambda: is_there(cluster))
        for nodes in (2, 3):  # one after the other: their sockets are numbered by what is there
            start("--address", f"127.0.0.1:{port}", "--num-cpus", "1")
            wait_until(lambda: len(cluster.get("/nodes?view=summary")["data"]["summary"]) == nodes)  # noqa: B023  # awaited here
        yield cluster
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(timeout=60)


def is_there(cluster: RayStarted) -> bool:
    try:
        cluster.get("/api/version")
        return True
    except OSError:
        return False


def test_a_job_on_nodes_that_were_started_one_by_one(started: RayStarted, tmp_path: Path, figures: Figures) -> None:
    settings = SLOW | {"run_name": "r", "output_dir": str(tmp_path / "runs"), "cpus_per_worker": 1.0, "epochs": 20}
    (tmp_path / "settings.yaml").write_text(to_yaml(Config(**settings)))
    job = started.submit("--config", str(tmp_path / "settings.yaml"))

    def gauges() -> list[tuple[str, str]] | None:
        assert job.poll() is None, job.communicate()[0]
        found = re.findall(r'^(ray_evenkeel_\w+)\{.*run="r".*\} ([\d.e+-]+)$', started.metrics(), re.M)
        return found if len(found) >= 4 else None

    measured = wait_until(gauges)
    values = {name: float(value) for name, value in measured}
    assert values["ray_evenkeel_samples_per_s"] > 1
    assert 0.1 < values["ray_evenkeel_step_s"] < 10  # its network takes a tenth of a second
    assert 0 <= values["ray_evenkeel_data_wait_share"] < 1
    assert values["ray_evenkeel_checkpoint_s"] > 0

    output = job.communicate(timeout=280)[0]
    assert job.returncode == 0, output
    log = [line for line in output.splitlines() if line.startswith(("epoch", "{"))]
    assert len(log) >= 20
    assert "\x1b" not in "".join(log)
    assert json.loads(log[-1])["status"] == "finished"
    [run] = started.get("/api/train/v2/runs/v1")["train_runs"]
    assert (run["name"], run["status"]) == ("r", "FINISHED")

    refused = started.submit("--lr", "nan")
    assert "error: --lr nan" in refused.communicate(timeout=100)[0]
    assert refused.returncode == 1  # Ray's own, for any that failed: the message has ours
    figures(
        "26. Nodes that were joined by `ray start`, with a token",
        "a submitted job trains on both; the Train view and Prometheus show it",
    )

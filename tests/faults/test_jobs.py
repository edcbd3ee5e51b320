"""A submitted Ray job that is stopped, and a second Ctrl-C."""

import shlex
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.job_submission import JobStatus, JobSubmissionClient

from app.config_file import to_yaml
from tests.faults.common import Command, Fit, SlowNet, Watched, assert_same_run, free_port, slow_config, wait_until
from tests.faults.conftest import Figures

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore")]  # ray's own


class VerySlowNet(SlowNet):
    """Its second step takes half a minute."""

    calls = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        if self.calls == 2:
            time.sleep(30)
        return super().forward(images)


class Job(Watched):
    """python -m app.train as a submitted job."""

    def __init__(self, client: JobSubmissionClient, folder: Path, **settings: Any):
        super().__init__(slow_config(folder, **settings))
        (folder / "settings.yaml").write_text(to_yaml(self.config))
        self._client = client
        root = Path(__file__).parents[2]
        words = [sys.executable, "-m", "app.train", "--config", str(folder / "settings.yaml")]
        self.id = client.submit_job(entrypoint=f"cd {shlex.quote(str(root))} && exec {shlex.join(words)}")

    def status(self) -> JobStatus:
        return self._client.get_job_status(self.id)

    def ended(self) -> bool:
        return self.status().is_terminal()

    def output(self) -> str:
        return self._client.get_job_logs(self.id)


@pytest.fixture
def client() -> Iterator[JobSubmissionClient]:
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        port = free_port()
        head = {"num_cpus": 2, "temp_dir": folder, "include_dashboard": True, "dashboard_port": port}
        head |= {"dashboard_agent_listen_port": free_port()}
        cluster = Cluster(initialize_head=True, connect=False, head_node_args=head)
        yield wait_until(lambda: connected(f"http://127.0.0.1:{port}"))
        cluster.shutdown()


def connected(address: str) -> JobSubmissionClient | None:
    try:
        client = JobSubmissionClient(address)
        client.list_jobs()
        return client
    except (ConnectionError, RuntimeError):  # not yet
        return None


def test_a_job_that_is_stopped_and_submitted_again(
    client: JobSubmissionClient, local_ray: None, tmp_path: Path, figures: Figures
) -> None:
    undisturbed = Fit(slow_config(tmp_path / "undisturbed"))
    assert undisturbed.result()[1] == 0
    database = tmp_path / "mlflow.db"
    job = Job(client, tmp_path, tracking_uri=f"sqlite:///{database}")
    job.wait_for_step(10)
    client.stop_job(job.id)
    wait_until(job.ended)
    assert job.status() == JobStatus.STOPPED
    step = job.step()
    with sqlite3.connect(database) as connection:
        assert connection.execute("select status from runs").fetchall() == [("KILLED",)]

    again = Job(client, tmp_path, tracking_uri=f"sqlite:///{database}")
    wait_until(again.ended)
    assert again.status() == JobStatus.SUCCEEDED, again.output()
    assert_same_run(again, undisturbed)
    lost = again.steps_lost(step, again.output())
    assert lost <= 1
    with sqlite3.connect(database) as connection:
        assert connection.execute("select status from runs").fetchall() == [("FINISHED",)]
    outcome = "saves, MLflow says KILLED; the same command goes on in the same MLflow run, bit-identical"
    figures("5.1 ray job stop (SIGTERM)", outcome, lost)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_leaves_at_once(number: int, code: int, tmp_path: Path, figures: Figures) -> None:
    run = Command(slow_config(tmp_path, model="tests.faults.test_jobs:VerySlowNet"), tmp_path)
    run.wait_for_step(1)
    run.interrupt(number)
    wait_until(lambda: "stopping after a checkpoint; once more to leave at once" in run.output())
    assert not run.ended()  # its step takes half a minute
    began = time.monotonic()
    run.interrupt(number)
    summary, exit_code = run.result()
    left_s = time.monotonic() - began
    assert (exit_code, summary["status"], summary["step"]) == (code, "killed", 0)
    assert left_s < 15
    figures(f"5.2 A second {signal.Signals(number).name}", f"leaves without the checkpoint, in {left_s:.1f} s")

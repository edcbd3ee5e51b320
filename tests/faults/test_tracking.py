"""An MLflow server that is not there, goes away, or accepts connections and never answers."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.deliver import main as deliver
from tests.faults.common import STEPS, Fit, free_port, slow_config, wait_until
from tests.faults.conftest import Figures

pytestmark = [
    pytest.mark.faults,
    pytest.mark.usefixtures("local_ray"),
    pytest.mark.filterwarnings("ignore"),  # ray's, mlflow's and alembic's own
]


@contextlib.contextmanager
def mlflow_server(port: int, folder: Path) -> Iterator[subprocess.Popen]:
    """A real one, of one process, ready to answer."""
    store = [
        "--backend-store-uri",
        f"sqlite:///{folder}/server.db",
        "--artifacts-destination",
        str(folder / "artifacts"),
    ]
    argv = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1", *store]
    with (folder / "server.txt").open("a") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_until(lambda: answers(port))
        yield process
    finally:
        stop(process)


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as response:
            return response.status == 200
    except OSError:
        return False


def stop(process: subprocess.Popen) -> None:
    """With the processes it started, which are of its own session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


@contextlib.contextmanager
def silent_server(port: int) -> Iterator[None]:
    """Accepts connections, as the system does for it, and never reads from one."""
    with socket.create_server(("127.0.0.1", port), backlog=100):
        yield


@pytest.mark.parametrize("kind", ["down from the start", "dying mid-run", "accepting and not answering"])
def test_nothing_is_lost(kind: str, tmp_path: Path, figures: Figures, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    with contextlib.ExitStack() as during:
        server = during.enter_context(mlflow_server(port, tmp_path)) if kind == "dying mid-run" else None
        if kind == "accepting and not answering":
            during.enter_context(silent_server(port))
        run = Fit(slow_config(tmp_path, tracking_uri=f"http://127.0.0.1:{port}"))
        if server is not None:
            run.wait_for_step(10)
            stop(server)
        summary, exit_code = run.result()
    assert (exit_code, summary.status, summary.step) == (0, "finished", STEPS)
    output = capsys.readouterr().out
    assert "cannot be reached; the records are kept" in output
    assert f"deliver it with: python -m app.deliver {run.folder}" in output

    with mlflow_server(port, tmp_path):
        back_at = time.monotonic()
        assert deliver([str(run.folder)]) == 0
        delivered_s = time.monotonic() - back_at
        import mlflow

        client = mlflow.MlflowClient(f"http://127.0.0.1:{port}")
        experiment = client.get_experiment_by_name("evenkeel")
        assert experiment is not None
        (found,) = client.search_runs([experiment.experiment_id])
        assert found.info.status == "FINISHED"
        history = client.get_metric_history(found.info.run_id, "train/loss")
        assert [(metric.step, metric.value) for metric in history] == [(step, loss) for step, loss, _ in run.losses()]
        assert [metric.step for metric in history] == list(range(1, STEPS + 1))
        assert {"pictures", "config.yaml"} <= {file.path for file in client.list_artifacts(found.info.run_id)}
        assert len(client.search_logged_models([found.info.experiment_id])) == 1
    figures(
        f"12. MLflow server {kind}", f"training goes on; all records delivered {delivered_s:.0f} s after it is back"
    )

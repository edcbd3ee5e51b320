"""One local Ray for all tests that need it, with its own folder and free ports."""

import os

# Before ray is imported anywhere: an embedded Ray turns token mode on in os.environ otherwise.
os.environ.update(
    RAY_AUTH_MODE="disabled",
    RAY_ENABLE_UV_RUN_RUNTIME_ENV="0",
    RAY_CHDIR_TO_TRIAL_DIR="0",
    RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.2",
    RAY_TRAIN_METRICS_ENABLED="0",
    RAY_TRAIN_ENABLE_PREEMPTION_WATCHER="0",
    RAY_USAGE_STATS_ENABLED="0",
    MLFLOW_DISABLE_TELEMETRY="true",
)
os.environ.pop("RAY_ADDRESS", None)
os.environ.pop("MLFLOW_TRACKING_URI", None)

import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from app.object_store import open_bucket
from tests import stores

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("without a clock", deadline=None)
hypothesis.settings.load_profile("without a clock")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults-table", metavar="FILE", help="write the fault tests' figures there, in Markdown")


@pytest.fixture(autouse=True)
def no_tracking_server_from_elsewhere() -> Iterator[None]:
    """mlflow.set_tracking_uri() writes it into the environment, where the next test's run would find it."""
    yield
    os.environ.pop("MLFLOW_TRACKING_URI", None)


@pytest.fixture
def short_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations are tried again a few times within half a second."""
    monkeypatch.setattr("app.retry.RETRY_S", 0.5)
    monkeypatch.setattr("app.retry.FIRST_PAUSE_S", 0.02)


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    import ray

    # A short path: Ray's sockets lie below it, and a socket's path may have 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=folder,
        )
        yield
        ray.shutdown()


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with stores.rclone_server(tmp_path_factory.mktemp("rclone")) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    with stores.moto_server() as endpoint:
        yield endpoint


@pytest.fixture
def object_root(moto: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A URI in an object store where nothing is yet."""
    for name, value in stores.environment(moto).items():
        monkeypatch.setenv(name, value)
    open_bucket.cache_clear()
    yield stores.new_root("moto", tmp_path)
    open_bucket.cache_clear()


@pytest.fixture(params=["disk", "rclone", "moto"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A root for Storage where nothing is yet: a path, and a URI on each S3 server."""
    if request.param != "disk":
        for name, value in stores.environment(request.getfixturevalue(request.param)).items():
            monkeypatch.setenv(name, value)
    open_bucket.cache_clear()
    yield stores.new_root(request.param, tmp_path)
    open_bucket.cache_clear()

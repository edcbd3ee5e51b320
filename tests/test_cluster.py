"""The Ray that the command starts, on a machine whose GPUs are made up: in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray._private.node import Node

from app.cluster import LAUNCHERS, connected, runtime_env
from app.config import Config
from app.errors import BadInput, TrainingFailed

# A machine of four GPUs. What is left of Ray is its own: what it takes CUDA_VISIBLE_DEVICES for, and which
# of the GPUs it gives to whom.
SCRIPT = """
import json, os, psutil, sys
from app.cluster import connected
from app.config import Config
from ray._private.accelerators import NvidiaGPUAcceleratorManager as Manager
Manager.get_current_node_num_accelerators = staticmethod(lambda: 4)
with connected(Config(num_workers=2, cpus_per_worker=0.5), verbose=False) as cluster:
    import ray
    each = {"num_cpus": 0.5, "num_gpus": 1 if cluster.use_gpu else 0}
    @ray.remote(**each)
    class Worker:
        def sees(self):
            return os.environ.get("CUDA_VISIBLE_DEVICES")
    workers = [Worker.remote() for _ in range(2)]
    sees = ray.get([worker.sees.remote() for worker in workers])
    processes = [" ".join(each.cmdline()) for each in psutil.Process().children(recursive=True)]
    print(json.dumps([cluster.use_gpu, ray.cluster_resources().get("GPU", 0), sees, processes]))
"""


def embedded(visible: str, cwd: Path) -> tuple[bool, float, list[str], list[str]]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    use_gpu, gpus, sees, processes = json.loads(done.stdout.splitlines()[-1])
    return use_gpu, gpus, sees, processes


@pytest.mark.slow
@pytest.mark.ci
def test_cuda_visible_devices_are_the_gpus_there_are(tmp_path: Path) -> None:
    use_gpu, gpus, sees, processes = embedded("3,1", tmp_path)
    assert (use_gpu, gpus) == (True, 2)
    assert sorted(sees) == ["1", "3"]  # one each
    assert [each for each in processes if "gcs_server" in each]
    # what a Ray of one machine does without, as ray/_private/services.py starts it
    needless = (
        "autoscaler/_private/monitor.py",
        "autoscaler/v2/monitor.py",
        "log_monitor.py",
        "dashboard/dashboard.py",
    )
    assert not [each for each in processes if any(script in each for script in needless)]


@pytest.mark.slow
def test_no_visible_device_means_cpus(tmp_path: Path) -> None:
    assert embedded("", tmp_path)[:3] == (False, 0, ["", ""])


@pytest.mark.parametrize(
    ("verbose", "has_trials", "wanted"),
    [
        (False, False, set()),
        (True, False, {"start_log_monitor"}),  # what workers print is shown
        (False, True, {"start_api_server"}),
    ],
)
def test_ray_starts_the_processes_that_the_command_has_use_for(
    verbose: bool, has_trials: bool, wanted: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are private methods of Ray's: that it still has them, under these names, is why this is here."""
    all_of_them = {"start_monitor", "start_log_monitor", "start_api_server"}
    rays_own = {name: getattr(Node, name) for name in all_of_them}
    started: set[str] = set()

    def init(**_: object) -> None:
        started.update(name for name in all_of_them if getattr(Node, name) is rays_own[name])
        raise Exception("as far as that")

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(TrainingFailed, match="as far as that"):
        connected(Config(), verbose, has_trials).__enter__()
    assert started == wanted
    assert {name: getattr(Node, name) for name in all_of_them} == rays_own


def test_a_ray_that_does_not_start_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(TrainingFailed, match="Ray did not start on this machine: The current node timed out"):
        connected(Config(), verbose=False).__enter__()


def test_a_command_that_torchrun_starts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.setenv(name, "0")
    with pytest.raises(BadInput, match="MASTER_PORT are set, as torchrun sets them: Ray starts the workers"):
        connected(Config(), verbose=False).__enter__()


def test_a_jobs_own_modules_are_sent_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runtime_env([]) == {}
    assert runtime_env(["/a/net.py"]) == {"py_modules": ["/a/net.py"]}
    job = {"runtime_env": {"py_modules": ["gcs://x.zip"], "working_dir": "gcs://y.zip"}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    assert runtime_env(["/a/net.py"]) == {"py_modules": ["gcs://x.zip", "/a/net.py"]}

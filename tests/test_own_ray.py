"""A Ray of one machine: what tells gloo, NCCL and torch's store to stay on loopback, and what is not started there."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from app.attempts import build_trainer
from app.own_ray import (
    NEEDLESS,
    LocalScalingPolicy,
    LocalTrainer,
    LoopbackBackend,
    OnFirstUse,
    OnLoopback,
    check_internals,
)


class Group:
    """Two workers that are this process."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __len__(self) -> int:
        return 2

    def execute(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.called.append(function.__name__)
        function(*arguments)

    def execute_single(self, rank: int, function: Callable[[], Any]) -> Any:
        self.called.append(function.__name__)
        return function()


def test_workers_are_given_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "")  # and back again at the end
    monkeypatch.setenv("MASTER_PORT", "")
    monkeypatch.setenv("RANK", "1")
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr("ray.train.torch.config._set_torch_distributed_env_vars", lambda: None)  # of Ray's context
    monkeypatch.setattr("ray.train.torch.config._setup_torch_process_group", lambda *group: given.append(group))
    group = Group()
    LoopbackBackend().on_start(group, OnLoopback(timeout_s=7, backend="gloo"))
    assert group.called == ["open_store", "join"]
    assert given == [("gloo", 1, 2, "env://", 7)]
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        addresses = psutil.net_if_addrs()[os.environ[name]]
        assert "127.0.0.1" in [address.address for address in addresses]
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listening = [each.laddr for each in psutil.Process().net_connections("inet") if each.laddr.port == port]
    assert [address.ip for address in listening if address.port == port][:1] == [host] == ["127.0.0.1"]


def test_the_command_and_rays_controller_start_workers_without_importing_torch() -> None:
    """What is sent to the controller is in own_ray and failures; each that imports torch holds up the workers."""
    script = "import sys, app.fit, app.attempts, app.own_ray, app.failures; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.filterwarnings("ignore")  # ray's own
def test_what_only_a_cluster_has_a_use_for_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Train's actors. The test also finds out whether Ray still has them, under these names."""
    trainer = LocalTrainer(7, scaling_config=ScalingConfig(num_workers=2))
    assert trainer.backend_config == OnLoopback(7, "gloo")
    theirs = {type(each).__name__ for each in DataParallelTrainer._create_default_callbacks(trainer)}
    assert theirs >= NEEDLESS
    assert {type(each).__name__ for each in trainer._create_default_callbacks()} == theirs - NEEDLESS
    policy = LocalScalingPolicy(trainer.scaling_config)
    monkeypatch.setattr(ray, "remote", None)  # by which it would start one
    policy.after_controller_start(None)
    decision = policy.make_decision_for_non_running_worker_group()
    assert isinstance(decision, ResizeDecision)
    assert (decision.num_workers, decision.resources_per_worker) == (2, {"CPU": 1})
    assert isinstance(policy.make_decision_for_running_worker_group(None, None), NoopDecision)  # type: ignore[arg-type]  # it reads neither
    assert policy._coordinator_client is None


class Actor:
    """Stands for an actor's handle; knows the calls of its methods."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda: self.called.append(name))


def test_an_actor_is_asked_for_once_and_not_before_it_is_used() -> None:
    actor, controller = Actor(), Actor()
    handle = OnFirstUse(actor, controller)
    pickle.dumps(OnFirstUse(None, None))  # it is sent to the workers
    assert controller.called == []
    handle.broadcast_from_rank_zero.remote()
    handle.reset.remote()
    assert controller.called == ["start_synchronization"]
    assert actor.called == ["broadcast_from_rank_zero", "reset"]


def test_this_version_of_ray_has_what_is_extended() -> None:
    check_internals()


@pytest.mark.filterwarnings("ignore")  # ray's own
@pytest.mark.parametrize("missing", ["a method", "a function of the workers", "a module"])
def test_another_version_of_ray_starts_the_workers_by_its_public_trainer(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing == "a method":
        monkeypatch.delattr(DataParallelTrainer, "_create_default_callbacks")
    elif missing == "a function of the workers":
        monkeypatch.setattr("app.own_ray.CALLED_IN_WORKERS", ("_no_such_function",))
    else:
        monkeypatch.setitem(sys.modules, "app.own_ray", None)
    told: list[str] = []
    given = {"scaling_config": ScalingConfig(num_workers=2), "run_config": RunConfig(worker_runtime_env={})}
    trainer = build_trainer(given, 7, is_own=True, tell=told.append)
    assert isinstance(trainer, TorchTrainer)
    environment = trainer.run_config.worker_runtime_env
    assert environment is not None
    assert environment["env_vars"].keys() == {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
    assert len(told) == 1
    assert f"Ray {ray.__version__} differs from the versions that are known" in told[0]

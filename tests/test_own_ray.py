"""A Ray of one machine: what tells gloo, NCCL and torch's store to stay on loopback, and what is not started there."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import ray
from ray.actor import ActorClass
from ray.train import ScalingConfig
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy, NoopDecision
from ray.train.v2._internal.execution.worker_group import state, worker_group
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from app.own_ray import NEEDLESS, LoopbackBackend, NoMeeting, OnLoopback, TrainerOfThisMachine


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
def test_what_a_cluster_alone_has_use_for_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors of Ray Train's. That it still has them, under these names, is why this is here."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(DataParallelTrainer, "_initialize_and_run_controller", lambda _, **kept: given.update(kept))
    trainer = TrainerOfThisMachine(7, scaling_config=ScalingConfig(num_workers=2))
    assert trainer.backend_config == OnLoopback(7, "gloo")
    theirs = {type(each).__name__ for each in DataParallelTrainer._create_default_callbacks(trainer)}
    assert theirs >= NEEDLESS
    assert {type(each).__name__ for each in trainer._create_default_callbacks()} == theirs - NEEDLESS
    trainer._initialize_and_run_controller(scaling_policy=FixedScalingPolicy(trainer.scaling_config), kept=True)
    policy = given["scaling_policy"]
    assert given["kept"]
    monkeypatch.setattr(ray, "remote", None)  # by which it would start one
    for module, name in ((worker_group, "SynchronizationActor"), (state, "_shutdown_sync_actor")):
        monkeypatch.setattr(module, name, getattr(module, name))  # and back again at the end
    assert isinstance(vars(worker_group)["SynchronizationActor"], ActorClass)
    policy.after_controller_start(None)
    assert vars(worker_group)["SynchronizationActor"] is NoMeeting
    meeting = vars(worker_group)["SynchronizationActor"].options(label_selector={}).remote(timeout_s=1)
    builder = state.WorkerGroupStateBuilder()
    builder.with_sync_actor(meeting)
    builder.shutdown()  # which would end an actor
    decision = policy.make_decision_for_non_running_worker_group()
    assert (decision.num_workers, decision.resources_per_worker) == (2, {"CPU": 1})
    assert isinstance(policy.make_decision_for_running_worker_group(None, None), NoopDecision)
    assert policy._coordinator_client is None

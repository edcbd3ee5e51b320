"""For a Ray of one machine, which ends with the run: what Ray Train does differently there.

The workers meet on loopback, where nobody else can reach them. Ray does by itself there. gloo and NCCL listen on the
address that the machine's name stands for, unless they are given an interface; and torch's store, by which the workers
find each other, on all, unless it is given a socket.

Nor does anything start that a cluster alone has use for: each actor is a process that takes seconds of the cores which
the workers start on. Ray Train's controller, which sets this up, is one too: torch, and Ray's TorchTrainer with it, is
imported in the workers alone.
"""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.train import ScalingConfig
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import state, worker_group
from ray.train.v2._internal.util import TrainingFramework
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

HOST = "127.0.0.1"
LEAVE_S = 30.0
# Callbacks of Ray Train's own, by their names, and what each starts an actor for: Ray Data's shards, of which there are
# none, and a placement group that outlives its controller, where all ends with the command.
NEEDLESS = {"DatasetsCallback", "PlacementGroupCleanerCallback"}
_stores: list[Any] = []  # a store ends with the object


@dataclass
class OnLoopback(BackendConfig):
    """In the place of TorchConfig. backend: gloo or nccl. timeout_s: of collectives."""

    timeout_s: int
    backend: str

    @property
    def backend_cls(self) -> type:
        return LoopbackBackend

    @property
    def train_func_context(self) -> Callable[[], Any]:  # type: ignore[override]  # Ray has no types of its own there
        from ray.train.torch.config import TorchConfigContextManager

        return TorchConfigContextManager

    @property
    def framework(self) -> TrainingFramework:  # type: ignore[override]  # likewise
        return TrainingFramework.TORCH

    def to_dict(self) -> dict[str, Any]:
        return {"backend": self.backend, "timeout_s": self.timeout_s}


class LoopbackBackend(Backend):
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: OnLoopback) -> None:  # type: ignore[override]  # of ours
        host, port = worker_group.execute_single(0, open_store)
        size = len(worker_group)
        worker_group.execute(join, host, port, size, backend_config.backend, backend_config.timeout_s)

    def on_shutdown(self, worker_group: Any, backend_config: OnLoopback) -> None:  # type: ignore[override]  # of ours
        leaving = worker_group.execute_async(leave, len(worker_group) > 1)
        ray.wait(leaving, num_returns=len(leaving), timeout=LEAVE_S)  # Ray ends those that hang


def open_store() -> tuple[str, int]:
    """In rank 0: the address and the port of a store that is already there."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs

    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    _stores.append(
        TCPStore(
            HOST, port, is_master=True, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
        )
    )
    # torch's name for it: rank 0 need not open one at MASTER_ADDR and MASTER_PORT.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    return HOST, port


def join(host: str, port: int, world_size: int, backend: str, timeout_s: int) -> None:
    """In each worker: as Ray's own backend does it."""
    from ray.train.torch.config import _set_torch_distributed_env_vars, _setup_torch_process_group

    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = loopback()
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    _set_torch_distributed_env_vars()
    _setup_torch_process_group(backend, int(os.environ["RANK"]), world_size, "env://", timeout_s)


def loopback() -> str:
    """The interface's name."""
    [name] = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]  # of Linux, of macOS
    return name


def leave(destroy_process_group: bool) -> None:
    """In each worker."""
    from ray.train.torch.config import _shutdown_torch

    _shutdown_torch(destroy_process_group)


class NoMeeting:
    """In the place of Ray Train's SynchronizationActor, where the workers meet in ray.train.report() and its
    collectives. Ours have torch.distributed's."""

    @classmethod
    def options(cls, **_: Any) -> type["NoMeeting"]:
        return cls

    @classmethod
    def remote(cls, **_: Any) -> type["NoMeeting"]:
        return cls


class OfThisMachine(FixedScalingPolicy):
    """In the place of Ray's, which tells Ray Data and the cluster's autoscaler of the workers through an actor."""

    def after_controller_start(self, train_run_context: Any) -> None:
        """In the controller's process, before it starts workers."""
        worker_group.SynchronizationActor = NoMeeting  # type: ignore[assignment]  # which it is not
        state._shutdown_sync_actor = lambda _: None

    def _maybe_send_resource_request(self) -> None:
        pass


class TrainerOfThisMachine(DataParallelTrainer):
    """In the place of TorchTrainer. It takes part in what Ray's trainers do inside: a Ray that does it in another way
    starts a few needless actors again, which a test would see."""

    def __init__(self, timeout_s: int, *, scaling_config: ScalingConfig, **given: Any):
        backend = OnLoopback(timeout_s, "nccl" if scaling_config.use_gpu else "gloo")
        super().__init__(train_loop, backend_config=backend, scaling_config=scaling_config, **given)

    def _create_default_callbacks(self) -> list[Any]:
        return [each for each in super()._create_default_callbacks() if type(each).__name__ not in NEEDLESS]

    def _initialize_and_run_controller(self, **given: Any) -> Any:
        return super()._initialize_and_run_controller(**given | {"scaling_policy": OfThisMachine(self.scaling_config)})


def train_loop(task: dict[str, Any]) -> Any:
    """In each worker."""
    from app.worker import train_loop_per_worker

    return train_loop_per_worker(task)

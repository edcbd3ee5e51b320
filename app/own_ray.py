"""Start Ray Train's workers on a local Ray, which ends with the run, sooner than TorchTrainer does.

The one module that builds on Ray's internals. Nothing in Ray is changed: its classes are extended, where Ray itself
selects them by an attribute or an argument. check_internals() finds out whether this version of Ray still has what is
extended; attempts.build_trainer() uses TorchTrainer where it has not.

The workers meet on loopback, where nobody else can reach them. Ray does so by itself there. gloo and NCCL listen on the
address that the machine's name stands for, unless they are given an interface; and torch's store, by which the workers
find each other, on all, unless it is given a socket.

Each actor is a process that takes seconds of the cores which the workers start on. Those that only a cluster has a use
for are not started, and the one behind ray.train.report() and ray.train.collective is started at its first use. Ray
Train's controller, which sets this up, is an actor too: torch, and Ray's TorchTrainer with it, is imported in the
workers alone.
"""

import asyncio
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.train import ScalingConfig
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
from ray.train.v2._internal.execution.worker_group import WorkerGroup
from ray.train.v2._internal.util import TrainingFramework
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from app.distributed import loopback

HOST = "127.0.0.1"
LEAVE_S = 30.0
# Callbacks of Ray Train's own, by their names, and what each starts an actor for: Ray Data's shards, of which there are
# none, and a placement group that outlives its controller, where all ends with the command.
NEEDLESS = {"DatasetsCallback", "PlacementGroupCleanerCallback"}
CALLED_IN_WORKERS = (
    "TorchConfigContextManager",
    "_set_torch_distributed_env_vars",
    "_setup_torch_process_group",
    "_shutdown_torch",
)
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


def leave(destroy_process_group: bool) -> None:
    """In each worker."""
    from ray.train.torch.config import _shutdown_torch

    _shutdown_torch(destroy_process_group)


class OnFirstUse:
    """Handle of an actor that the controller starts when one of its methods is first asked for, in any worker."""

    def __init__(self, actor: Any, controller: Any):
        self._actor, self._controller, self._is_asked_for = actor, controller, False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pickle asks for some before there is an actor
            raise AttributeError(name)
        if not self._is_asked_for:
            self._controller.start_synchronization.remote()
            self._is_asked_for = True
        return getattr(self._actor, name)


class LocalWorkerGroup(WorkerGroup):
    """Workers whose SynchronizationActor is started at its first use.

    Ray starts an actor's process when the arguments of its constructor are there. One of these, its timeout, is a
    value that the controller gives out once the actor is needed. Calls that are made before wait for it.
    """

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)
        controller: Any = ray.get_runtime_context().current_actor
        # Where a version of Ray does not read this attribute the actor is started at once, and works the same.
        self._collective_timeout_s = controller.when_synchronization_starts.remote(self._collective_timeout_s)

    def _init_train_context_on_workers(self, workers: Any, sync_actor: Any, *args: Any, **named: Any) -> None:
        on_first_use: Any = OnFirstUse(sync_actor, ray.get_runtime_context().current_actor)
        super()._init_train_context_on_workers(workers, on_first_use, *args, **named)


class LocalController(TrainController):
    worker_group_cls = LocalWorkerGroup

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)
        self._synchronization_starts = asyncio.Event()

    async def start_synchronization(self) -> None:
        self._synchronization_starts.set()

    async def when_synchronization_starts(self, value: Any) -> Any:
        """Return the value once the workers need their SynchronizationActor."""
        await self._synchronization_starts.wait()
        return value

    async def run(self) -> None:
        try:
            await super().run()
        finally:  # an actor's process ends when all its methods have returned
            self._synchronization_starts.set()


class LocalScalingPolicy(FixedScalingPolicy):
    """A number of workers, without the actor by which Ray asks Ray Data and a cluster's autoscaler for room."""

    def after_controller_start(self, train_run_context: Any) -> None:
        pass

    def _maybe_send_resource_request(self) -> None:
        pass


class LocalTrainer(DataParallelTrainer):
    """TorchTrainer for a local Ray. timeout_s: of torch's collectives."""

    def __init__(self, timeout_s: int, *, scaling_config: ScalingConfig, **given: Any):
        backend = OnLoopback(timeout_s, "nccl" if scaling_config.use_gpu else "gloo")
        super().__init__(train_loop, backend_config=backend, scaling_config=scaling_config, **given)

    def _create_default_callbacks(self) -> list[Any]:
        return [each for each in super()._create_default_callbacks() if type(each).__name__ not in NEEDLESS]

    def _initialize_and_run_controller(self, **given: Any) -> Any:
        given["scaling_policy"] = LocalScalingPolicy(self.scaling_config)
        # Ray's controller waits for its workers in its event loop, and would be warned of it.
        variables = {"RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0"} | get_env_vars_to_propagate()
        start = ray.remote(num_cpus=0, runtime_env={"env_vars": variables})(LocalController)
        controller: Any = start.remote(**given)
        ray.get(controller.run.remote())
        return ray.get(controller.get_result.remote())


def check_internals() -> None:
    """Raise ImportError if this version of Ray lacks something that the classes above extend or call."""
    extended = {
        TrainController: ("worker_group_cls", "run", "get_result"),
        WorkerGroup: ("_init_train_context_on_workers",),
        DataParallelTrainer: ("_create_default_callbacks", "_initialize_and_run_controller"),
        FixedScalingPolicy: ("after_controller_start", "_maybe_send_resource_request"),
    }
    missing = [f"{cls.__name__}.{name}" for cls, names in extended.items() for name in names if not hasattr(cls, name)]
    # What the workers call is in a module that imports torch, which this process does without.
    source = (Path(ray.__file__).parent / "train" / "torch" / "config.py").read_text()
    missing += [name for name in CALLED_IN_WORKERS if f"def {name}(" not in source and f"class {name}" not in source]
    if missing:
        raise ImportError(f"it has no {', '.join(missing)}")


def train_loop(task: dict[str, Any]) -> Any:
    """In each worker."""
    from app.worker import train_loop_per_worker

    return train_loop_per_worker(task)

"""For a Ray of one machine: the workers meet on loopback, where nobody else can reach them.

Ray does by itself there. gloo and NCCL listen on the address that the machine's name stands for, unless they are
given an interface; and torch's store, by which the workers find each other, on all, unless it is given a socket.
"""

import os
import socket
from typing import Any

from ray.train.torch import TorchConfig
from ray.train.torch.config import _TorchBackend

HOST = "127.0.0.1"
_stores: list[Any] = []  # a store ends with the object


class OnLoopback(TorchConfig):
    @property
    def backend_cls(self) -> type:
        return LoopbackBackend


class LoopbackBackend(_TorchBackend):
    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        worker_group.execute(use_loopback)
        super().on_start(WithStoreOnLoopback(worker_group), backend_config)  # type: ignore[arg-type]  # as good as one


class WithStoreOnLoopback:
    """The workers; the one thing that Ray asks of rank 0 alone is where its store is to be."""

    def __init__(self, worker_group: Any):
        self._worker_group = worker_group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker_group, name)

    def __len__(self) -> int:
        return len(self._worker_group)

    def execute_single(self, rank: int, function: Any) -> Any:
        return self._worker_group.execute_single(rank, open_store)


def use_loopback() -> None:
    """In each worker."""
    [name] = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]  # of Linux, of macOS
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name


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

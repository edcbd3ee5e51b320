"""Workers of a Ray of one machine: what tells gloo, NCCL and torch's store to stay on loopback."""

import os
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from ray.train.torch.config import _TorchBackend

from app.loopback import LoopbackBackend, OnLoopback


class Group:
    """Two workers that are this process."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def execute(self, function: Callable[[], Any]) -> None:
        self.called.append(function.__name__)
        function()

    def execute_single(self, rank: int, function: Callable[[], Any]) -> Any:
        self.called.append(function.__name__)
        return function()


def test_workers_are_given_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "")  # and back again at the end
    given: list[tuple[str, int]] = []
    # Ray asks rank 0 where its store is to be, then starts the process group on all workers.
    monkeypatch.setattr(
        _TorchBackend, "on_start", lambda _, group, config: given.append(group.execute_single(0, lambda: None))
    )
    group = Group()
    LoopbackBackend().on_start(group, OnLoopback())
    assert group.called == ["use_loopback", "open_store"]
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        addresses = psutil.net_if_addrs()[os.environ[name]]
        assert "127.0.0.1" in [address.address for address in addresses]
    [(host, port)] = given
    listening = [each.laddr for each in psutil.Process().net_connections("inet") if each.laddr.port == port]
    assert [address.ip for address in listening if address.port == port][:1] == [host] == ["127.0.0.1"]

"""Room for workers, as the cluster itself tells it."""

import time

import pytest

from app.places import Places

pytestmark = pytest.mark.usefixtures("local_ray")


def wait_until_settled(places: Places) -> int:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        ready = places.ready()
        if ready and places.settled():
            return ready
        time.sleep(0.05)
    raise TimeoutError


def test_as_many_as_there_is_room_for() -> None:
    places = Places(6, {"CPU": 1.0})
    assert wait_until_settled(places) == 4  # all the cluster's CPUs
    others = Places(1, {"CPU": 0.5})
    assert others.ready() == 0
    places.release()
    assert wait_until_settled(others) == 1  # at once, for there is nothing more to wait for
    others.release()

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


def test_fewer_than_the_least_are_not_held() -> None:
    first, second = (Places(3, {"CPU": 1.0}, least=3) for _ in range(2))
    assert wait_until_settled(first) == 3
    assert second.ready() == 0
    single = Places(1, {"CPU": 1.0})
    assert wait_until_settled(single) == 1  # the fourth CPU is free
    first.release()
    single.release()
    assert wait_until_settled(second) == 3
    second.release()


def test_more_than_the_least_if_there_is_room() -> None:
    places = Places(6, {"CPU": 1.0}, least=3)
    assert wait_until_settled(places) == 4
    places.release()

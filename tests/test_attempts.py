"""What a person is told of workers that died."""

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from app.attempts import LESS_MEMORY, why

DIED = WorkerHealthCheckFailedError("a long text", RayActorError())
CUT_OFF = RuntimeError("[/__w/pytorch/third_party/gloo/pair.cc:545] Connection reset by peer")


@pytest.mark.parametrize(
    ("failures", "told"),
    [
        ({1: DIED}, "rank 1 died: its process was killed or crashed"),
        ({0: CUT_OFF, 1: DIED}, "rank 1 died: its process was killed or crashed"),  # the cause, not what follows
        ({0: CUT_OFF}, "rank 0 lost the connection to another worker"),
        ({2: ValueError("one\ntwo")}, "rank 2 failed: two"),
        (
            {0: WorkerHealthCheckFailedError("", OutOfMemoryError("killed"))},
            f"rank 0 was killed because its node ran out of memory; {LESS_MEMORY}",
        ),
    ],
)
def test_the_cause_of_a_failed_attempt(failures: dict[int, Exception], told: str) -> None:
    assert why(WorkerGroupError("", failures)) == told


def test_workers_that_could_not_be_started() -> None:
    assert why(ControllerError(OutOfMemoryError("killed"))).startswith(
        "the workers could not be started: one was killed because its node ran out of memory"
    )

"""What happened to workers that died, in a line; and that Ray Train's controller tells the Tracker of it.

The controller is a process of its own, which imports this before it starts workers: so torch is kept out of it.
"""

from typing import Any

from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayError
from ray.train import UserCallback
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError

LESS_MEMORY = "lower --batch-size, --micro-batch-size or --in-memory-mb, or use fewer workers on a node"


class TellFailures(UserCallback):
    """Tells the Tracker of workers that died; called in Ray Train's controller."""

    def __init__(self, tracker: Any):
        self._tracker = tracker

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        failures = worker_exceptions.values()
        counts, out_of_memory = not any(map(_is_preempted, failures)), any(map(_was_killed_for_memory, failures))
        self._tracker.workers_lost.remote(why(WorkerGroupError("", worker_exceptions)), counts, out_of_memory)


def why(error: TrainingFailedError) -> str:
    """A failed attempt in a line. One worker's death makes the others fail: the dead are named first."""
    if not isinstance(error, WorkerGroupError):
        cause = error.controller_failure if isinstance(error, ControllerError) else error
        return f"the workers could not be started: one {why_a_worker(cause)[0]}"
    told = {rank: why_a_worker(failure) for rank, failure in sorted(error.worker_failures.items())}
    deaths = {rank: text for rank, (text, is_death) in told.items() if is_death}
    return "; ".join(f"rank {rank} {text}" for rank, text in (deaths or {r: t for r, (t, _) in told.items()}).items())


def why_a_worker(failure: Exception) -> tuple[str, bool]:
    """What happened to a worker, and whether that is a cause, rather than a consequence of another worker's end."""
    cause = _cause(failure)
    text = str(cause).strip() or type(cause).__name__
    if _was_killed_for_memory(failure):
        return f"was killed because its node ran out of memory; {LESS_MEMORY}", True
    if _ran_out_of_memory(cause):
        return f"ran out of memory ({text.splitlines()[-1]}); {LESS_MEMORY}", True
    if isinstance(cause, NodeDiedError):
        return "was lost with its node", True
    if "third_party/gloo" in text:
        return "lost the connection to another worker", False
    if isinstance(cause, RayActorError):
        return "died: its process was killed or crashed", True
    return f"failed: {text.splitlines()[-1]}", False


def why_lost(error: RayError) -> str:
    """Why the driver cannot go on, in a line: its Tracker, on this node, or the cluster is gone."""
    text, _ = why_a_worker(error)
    if LESS_MEMORY in text:  # where training is in this process, it is the Tracker that Ray ends to have memory
        return f"the run's Tracker {text}"
    return f"the Ray cluster was lost ({type(error).__name__}: {str(error).strip().splitlines()[0]})"


def _cause(failure: Exception) -> Exception:
    return failure.health_check_failure if isinstance(failure, WorkerHealthCheckFailedError) else failure


def _was_killed_for_memory(failure: Exception) -> bool:
    """Whether Ray's memory monitor ended the worker."""
    cause = _cause(failure)
    told = isinstance(cause, RayError) and ("OutOfMemory" in str(cause) or "low on memory" in str(cause))
    return isinstance(cause, OutOfMemoryError) or told


def _ran_out_of_memory(cause: Exception) -> bool:
    """Whether the worker raised MemoryError or torch.OutOfMemoryError, by its name: torch is not imported here."""
    raised = getattr(cause, "_base_exc", cause)  # Ray Train's UserExceptionWithTraceback has no public access to it
    return type(raised).__name__ in ("MemoryError", "OutOfMemoryError")


def _is_preempted(failure: Exception) -> bool:
    """Whether the worker died because its node was taken away: no failure of the run."""
    cause = _cause(failure)
    return isinstance(cause, RayActorError) and cause.preempted

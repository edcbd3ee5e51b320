"""Why a trial's process ended."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from ray import cloudpickle
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError

from app.errors import TrainingFailed
from tune.recorder import _why


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RayTaskError("step", "a traceback", TrainingFailed("no checkpoint")), "failed: no checkpoint"),
        (ActorDiedError(), "died: its process was killed or crashed"),
        (OutOfMemoryError("killed due to the node running low on memory.\nadvice"), "ran out of memory; lower --"),
    ],
)
def test_in_the_words_of_a_run(tmp_path: Path, error: Exception, reason: str) -> None:
    (tmp_path / "error.pkl").write_bytes(cloudpickle.dumps(error))  # type: ignore[reportPrivateImportUsage]  # ray's own
    trial = SimpleNamespace(pickled_error_file=str(tmp_path / "error.pkl"), error_file=None)
    assert reason in _why(trial)


def test_without_an_error_in_the_words_of_ray_tune(tmp_path: Path) -> None:
    (tmp_path / "error.txt").write_text("Failure # 1\nthe reason\n\n")
    trial = SimpleNamespace(pickled_error_file=None, error_file=str(tmp_path / "error.txt"))
    assert _why(trial) == "the reason"
    (tmp_path / "error.txt").unlink()
    assert _why(trial) == "its process died"

"""Transient errors are retried, then raised as Unavailable; permanent ones are raised at once."""

import email.message
import errno
import urllib.error

import PIL
import pytest

from app import retry as retry_module
from app.errors import BadInput, Unavailable
from app.retry import is_transient, pauses, retry


def http_error(status: int) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("http://host/data", status, "reason", email.message.Message(), None)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ESTALE, "Stale file handle"),
        OSError(errno.EIO, "Input/output error"),
        ConnectionResetError(),
        TimeoutError("timed out"),
        http_error(503),
        Unavailable("the store did not answer"),
    ],
    ids=repr,
)
def test_transient(error: Exception) -> None:
    assert is_transient(error)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file or directory"),
        PermissionError(errno.EACCES, "Permission denied"),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError("image file is truncated"),
        PIL.UnidentifiedImageError("cannot identify image file"),
        http_error(404),
        ValueError("not a number"),
        BadInput("--lr 0"),
    ],
    ids=repr,
)
def test_permanent(error: Exception) -> None:
    assert not is_transient(error)


def test_what_an_error_was_raised_from_counts() -> None:
    error = RuntimeError("the library's own error")
    error.__cause__ = ConnectionRefusedError()
    assert is_transient(error)


def test_what_an_error_deliberately_hides_does_not_count() -> None:
    error = BadInput("a message of our own")
    error.__context__, error.__suppress_context__ = TimeoutError(), True  # raise ... from None
    assert not is_transient(error)


class Flaky:
    """Fails a number of times, then returns 7."""

    def __init__(self, failures: int, error: Exception):
        self.failures, self.error, self.calls = failures, error, 0

    def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return 7


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only sleeping moves; the pauses that were made."""
    slept: list[float] = []
    monkeypatch.setattr(retry_module.time, "sleep", slept.append)
    monkeypatch.setattr(retry_module.time, "monotonic", lambda: sum(slept))
    return slept


def test_a_transient_error_is_retried(no_waiting: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    work = Flaky(3, OSError(errno.ESTALE, "Stale file handle"))
    assert retry(work, "reading manifest.json") == 7
    assert work.calls == 4
    assert capsys.readouterr().err == "reading manifest.json failed (Stale file handle): retrying for 30 s\n"


def test_the_time_is_limited(no_waiting: list[float]) -> None:
    work = Flaky(1000, OSError(errno.EIO, "Input/output error"))
    with pytest.raises(Unavailable, match=r"reading manifest.json failed .* within 30 s: Input/output error"):
        retry(work, "reading manifest.json")
    assert sum(no_waiting) == pytest.approx(30)
    assert 5 <= work.calls <= 12


def test_a_permanent_error_is_raised_at_once(no_waiting: list[float]) -> None:
    work = Flaky(1, FileNotFoundError(errno.ENOENT, "No such file or directory"))
    with pytest.raises(FileNotFoundError):
        retry(work, "reading manifest.json")
    assert work.calls == 1


def test_pauses_grow(no_waiting: list[float]) -> None:
    for pause in pauses():
        no_waiting.append(pause)
    assert no_waiting[0] == pytest.approx(0.5, rel=0.25)
    assert max(no_waiting) <= 10

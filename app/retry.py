"""Which errors may pass by themselves, and how often an operation is tried again before it fails.

The one place that classifies errors of disks, networks and object stores:

    transient   may pass: a stale file handle, a reset connection, a store that answers 503. Retried with growing
                pauses, then raised as Unavailable, which fails the attempt and counts against --max-failures.
    permanent   will not pass by itself: a missing file, no permission, a full disk. Raised as it is.

A file that was read and whose content is wrong is damaged. That is for the caller to decide, never for an OSError.
"""

import errno
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from app.errors import Unavailable

T = TypeVar("T")

# Seconds for which an operation is tried again, the first pause and the longest one.
RETRY_S, FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 0.5, 8.0

_TRANSIENT_ERRNOS = {
    getattr(errno, name)
    for name in (
        *("EAGAIN", "EBUSY", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH", "EINTR"),
        *("EIO", "ENETDOWN", "ENETRESET", "ENETUNREACH", "ENFILE", "ENOBUFS", "ENOLCK", "ENOTCONN", "EPIPE"),
        *("EREMOTEIO", "ESHUTDOWN", "ESTALE", "ETIMEDOUT"),
    )
    if hasattr(errno, name)  # macOS has no EREMOTEIO
}
TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504}  # of HTTP
# pauses must not draw from the generator that the user's own code draws from
_jitter = random.Random()


def is_transient(error: BaseException) -> bool:
    """Return True if the error, or one that it was raised from, may pass by itself."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        if _is_transient(each):
            return True
        seen.add(id(each))
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return False


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, Unavailable | ConnectionError | TimeoutError):
        return True
    status = getattr(error, "code", None) or getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int) and status in TRANSIENT_STATUS:  # urllib's and requests' HTTPError
        return True
    # OSError without a number is also what Pillow raises for a damaged image: not transient by itself.
    return isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS


def pauses(budget_s: float | None = None) -> Iterator[float]:
    """Seconds to wait between tries, until the budget (default: RETRY_S) is used up. Each varies by a quarter, so
    that many workers do not come back at the same moment."""
    deadline = time.monotonic() + (RETRY_S if budget_s is None else budget_s)
    pause = FIRST_PAUSE_S
    while (left := deadline - time.monotonic()) > 0:
        yield min(pause * _jitter.uniform(0.75, 1.25), left)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def retry(work: Callable[[], T], what: str, budget_s: float | None = None) -> T:
    """Return work(), which is called again while it raises a transient error, for RETRY_S seconds or the budget.

    what: the operation and its path or URI, such as "reading s3://bucket/runs/r/run.json".
    Raises Unavailable when the time is up, and any other error at once.
    """
    budget_s = RETRY_S if budget_s is None else budget_s
    waits = pauses(budget_s)
    tries = 1
    while True:
        try:
            return work()
        except Exception as error:
            if not is_transient(error) or isinstance(error, Unavailable):
                raise
            pause = next(waits, None)
            if pause is None:
                raise Unavailable(f"{what} failed {tries} times within {budget_s:g} s: {describe(error)}") from error
            if tries == 1:
                print(f"{what} failed ({describe(error)}): retrying for {budget_s:g} s", file=sys.stderr)
        time.sleep(pause)
        tries += 1


def describe(error: BaseException) -> str:
    """An error in one line: the system's words where it has some."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__

"""The errors a person is meant to read. Everything else is a bug and keeps its traceback."""


class BadInput(Exception):
    """A setting, a file or a cluster that cannot work. Exit code 2.

    The message names the setting, its value, what is allowed and what to do. It is deliberately no
    ValueError: pydantic and tyro would catch one and print their own text around it.
    """


class TrainingFailed(Exception):
    """Training ran and could not go on. Exit code 1."""


class Unavailable(TrainingFailed):
    """Storage or data could not be reached for a while (app/retry.py). Fails the attempt, which is repeated within
    --max-failures; before training starts, and when no attempt is left: exit code 1."""


class ExportFailed(Exception):
    """A network could not be exported, or what was exported is not the network. Exit code 1."""


class FailedTogether(TrainingFailed):
    """Raised on every rank at the same step: none waits for another."""


class TooManyBadSamples(FailedTogether):
    """More samples could not be read than --max-bad-samples allows."""


class NonFiniteLoss(FailedTogether):
    """The loss became NaN or infinite. Raised before the update."""


def plain_message(error: Exception) -> str:
    """Return its words alone: torch's DataLoader hands over an error of its processes with the traceback as text."""
    return str(error).rpartition(f"{__name__}.{type(error).__name__}: ")[2].strip()

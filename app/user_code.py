"""The user's own models and data sets, named as package.module:attribute."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from app.errors import BadInput


def find_callable(flag: str, reference: str) -> Callable[..., Any]:
    """'package.module:attribute' as the object, found from the directory the command was started in."""
    module_name, _, attribute = reference.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise BadInput(f"{flag} {reference}: {error}; it is looked for from {os.getcwd()} and on PYTHONPATH") from None
    except Exception as error:
        raise BadInput(
            f"{flag} {reference}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise BadInput(f"{flag} {reference}: {module_name} has no callable {attribute}")
    return found

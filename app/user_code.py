"""The user's own models and data sets, named as package.module:attribute: found, called, sent to a cluster."""

import contextlib
import functools
import importlib
import inspect
import os
import shutil
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from app.config import CALLABLE, TEXT_DATASETS, Config
from app.errors import BadInput, Unavailable
from app.retry import is_transient

# What a data set is called with.
DATASET_ARGUMENTS = ("config",)
# What is sent is code. More than this is data that lies among it.
MOST_MIB = 50
# Where Ray unpacks, on a node, what it was sent.
SENT = "py_modules_files"


def find_callable(flag: str, reference: str, *arguments: str) -> Callable[..., Any]:
    """'package.module:attribute' as the object, which can be called with arguments of these names. Raises BadInput."""
    # Ray puts the directory that the command was started in before what was sent from it. On another
    # node an older copy may lie at that path.
    sys.path.sort(key=lambda path: SENT not in str(path))
    module_name, _, attribute = reference.partition(":")
    if module_name.endswith(".py"):
        raise BadInput(f"{flag} {reference}: write {module_name.removesuffix('.py')}:{attribute}, without .py")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise BadInput(
            f"{flag} {reference}: {error}{_place(error)}; it is looked for from {os.getcwd()} and on PYTHONPATH"
        ) from error
    except (Exception, SystemExit) as error:  # SystemExit: a script that starts work when it is imported
        kind = Unavailable if is_transient(error) else BadInput
        raise kind(f"{flag} {reference}: importing {module_name} failed: {told(error)}") from error
    path = getattr(module, "__file__", None) or "a directory without __init__.py"
    if not hasattr(module, attribute):
        raise BadInput(f"{flag} {reference}: {module_name} ({path}) has no {attribute}")
    found = getattr(module, attribute)
    # Not whatever can be called: a network itself can.
    if not inspect.isroutine(found) and not inspect.isclass(found) and not isinstance(found, functools.partial):
        raise BadInput(
            f"{flag} {reference}: {attribute} in {path} is an object of type {type(found).__name__}: "
            f"it must be a function or a class, which is called with {' and '.join(arguments)}"
        )
    try:
        inspect.signature(found).bind(**dict.fromkeys(arguments))
    except (TypeError, ValueError) as error:
        raise BadInput(
            f"{flag} {reference} is called with {' and '.join(arguments)}, which it does not take: {error}"
        ) from error
    return found


@contextlib.contextmanager
def told_as_bad_input(what: str) -> Iterator[None]:
    """What the user's own code raises, as BadInput that begins with `what` and names the place.

    A transient error (retry.is_transient) is raised as Unavailable: code that fetches something meets those.
    """
    try:
        yield
    except (MemoryError, Unavailable):  # not theirs to mend; the worker says what to do
        raise
    except BadInput as error:
        raise BadInput(f"{what}: {error}") from error
    except (Exception, SystemExit) as error:
        kind = Unavailable if is_transient(error) else BadInput
        raise kind(f"{what}: {told(error)}") from error


def told(error: BaseException) -> str:
    """An exception of the user's own code in a line, with the place."""
    text = str(error).strip()
    # A NotImplementedError of torch's dispatcher goes on for pages.
    first = f": {text.splitlines()[0]}" if text else ""
    return f"{type(error).__name__}{first}{_place(error)}"


def _place(error: BaseException) -> str:
    """The deepest line of a file that is neither Python's, nor installed, nor this project's."""
    others = (*(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")), str(Path(__file__).parent))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if os.path.isabs(frame.filename) and not frame.filename.startswith(tuple(f"{path}{os.sep}" for path in others))
    ]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def import_own(config: Config, *, data: bool = True) -> None:
    """Import what the settings name of the user's own, from the directory the command was started in.

    For the process that the command started. data: the data set too, and not the model alone. Raises BadInput.
    """
    shape = "vocab_size" if config.dataset in TEXT_DATASETS else "input_shape"
    named = [("--dataset", config.dataset, DATASET_ARGUMENTS), ("--model", config.model, ("num_classes", shape))]
    named = named if data else named[1:]
    own = [(flag, reference, arguments) for flag, reference, arguments in named if CALLABLE.fullmatch(reference)]
    if own and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for flag, reference, arguments in own:
        find_callable(flag, reference, *arguments)


@contextlib.contextmanager
def packed(config: Config) -> Iterator[list[str]]:
    """Paths for Ray's runtime_env py_modules: a copy of the user's own code, as long as the context lasts.

    The modules and packages below the directory the command was started in that import_own() has imported,
    and those that they have; not the directory itself, which may hold gigabytes. Raises BadInput.
    """
    with tempfile.TemporaryDirectory(prefix="evenkeel-") as folder:
        try:
            copies = [str(_copy(source, Path(folder))) for source in _sources(config)]
        except OSError as error:
            raise BadInput(f"your own code cannot be copied to be sent to the cluster's workers: {error}") from error
        yield copies


def _sources(config: Config) -> list[Path]:
    """Files of top-level modules, and directories of top-level packages."""
    if not any(CALLABLE.fullmatch(reference) for reference in (config.dataset, config.model)):
        return []
    installed = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    elsewhere = [Path(path) for path in installed if Path(path) != Path.cwd()]
    found = set()
    for name, module in list(sys.modules.items()):
        if "." in name or name in ("app", "__main__"):  # this project, which the nodes have
            continue
        places = getattr(module, "__path__", None) or [getattr(module, "__file__", None) or ""]
        for place in map(Path, places):
            inside = Path.cwd() in place.parents and not any(path in place.parents for path in elsewhere)
            if inside and (place.is_dir() or place.suffix == ".py"):
                found.add(place)
    return sorted(found)


def _copy(source: Path, folder: Path) -> Path:
    """A file or a directory, without what is hidden or compiled."""
    target = folder / source.name
    if source.is_file():
        shutil.copy(source, target)
        return target
    total = 0
    for directory, names, files in os.walk(source, followlinks=True):
        names[:] = [name for name in names if not name.startswith(".") and name != "__pycache__"]
        (target / Path(directory).relative_to(source)).mkdir()
        for file in (Path(directory, name) for name in files if not name.startswith(".")):
            if not file.is_file():  # a socket, a pipe, a link to nothing
                continue
            total += max(file.stat().st_size, 1024)  # so that links in a circle come to an end too
            if total > MOST_MIB * 2**20:
                raise BadInput(
                    f"the package {source}, which is sent to the cluster's workers, has more than {MOST_MIB} MiB: "
                    "keep data and runs out of it, or install it on every node"
                )
            shutil.copy(file, target / file.relative_to(source))
    # Ray knows a directory it was sent before by what is in it, and would take a package for another
    # of the same content: after it was renamed, say.
    (target / f".{source.name}").touch()
    return target

"""What the commands share: settings from YAML and flags, and exit codes."""

import logging
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tyro
from pydantic import BaseModel, Field, create_model

from app.config import GROUPS, REPLACED, Config, flag, group_of
from app.config_file import load_yaml
from app.errors import BadInput, ExportFailed, TrainingFailed
from app.interrupt import exit_with
from app.memory import keep_memory

Command = TypeVar("Command", bound=BaseModel)

EXIT_CODES = "Exit codes: 0 done, 1 training or export failed, 2 bad input, 130 interrupted, 143 terminated."


def parse_config(argv: Sequence[str], command: type[Command], prog: str, description: str) -> tuple[Config, Command]:
    """The Config and the command's own flags. A YAML file given with --config sets defaults; flags win.

    The parser is made from Config's fields, in its groups, without its limits: these are checked
    once, by Config itself, in its own words. A flag of the command's own takes the place of a setting's.
    """
    files = _values_of(argv, "--config")
    if len(files) > 1:
        raise BadInput(f"--config is given {len(files)} times ({', '.join(files)}): give one file")
    for name, instead in REPLACED.items():
        if any(word.partition("=")[0] in (flag(name), f"--{name}") for word in argv):
            raise BadInput(f"{flag(name)} is no setting any more: {instead}")
    defaults = load_yaml(files[0]) if files else {}
    fields: dict[str, Any] = {
        "command": (command, command()),
    }
    for group, meaning in GROUPS.items():
        members: dict[str, Any] = {
            name: (info.annotation, _described(defaults.get(name, info.default), info.description or ""))
            for name, info in Config.model_fields.items()
            if group_of(name) == group and name not in command.model_fields
        }
        model = create_model(group, __doc__=meaning, **members)
        fields[group] = (model, model())
    flags = create_model("Flags", **fields)
    parsed = tyro.cli(
        flags,
        args=list(argv),
        prog=prog,
        description=f"{description}\n\n{EXIT_CODES}",
        config=(tyro.conf.OmitArgPrefixes,),
    )
    values = {name: value for group in GROUPS for name, value in getattr(parsed, group)}
    return Config(**values), parsed.command  # type: ignore[attr-defined]  # the model was made above


def _described(default: Any, help: str) -> Any:
    return Field(default, description=help)


def _values_of(argv: Sequence[str], flag: str) -> list[str]:
    following = [argv[index + 1] for index, word in enumerate(argv[:-1]) if word == flag]
    return following + [word.removeprefix(flag + "=") for word in argv if word.startswith(flag + "=")]


def run_main(main: Callable[[Sequence[str]], int]) -> None:
    """Run a command's main and exit with its code; an error that a person is meant to read is one line."""
    keep_memory()  # for what the command computes itself
    # A line at a time also when stdout is a file or a job's log.
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]  # a TextIOWrapper here
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        code = main(sys.argv[1:])
    except BadInput as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except (TrainingFailed, ExportFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except SystemExit as error:
        if error.code != signal.SIGTERM:
            raise
        code = 128 + signal.SIGTERM  # Ray's own handler exits so while it starts
    exit_with(code)

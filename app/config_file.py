"""Settings from a YAML file, and back."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.config import ALONE, Config
from app.errors import BadInput
from app.storage import Storage


def load_yaml(path: str) -> dict[str, Any]:
    """The settings in a YAML file, checked on their own so that an error can name the file."""
    import yaml

    try:
        values = yaml.load(_text(path), Loader=yaml_loader())
    except OSError as error:
        raise BadInput(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise BadInput(f"--config {path} is no YAML: {error}") from None
    values = {} if values is None else values  # an empty file, or one of comments
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise BadInput(f"--config {path} must hold lines of 'setting: value' with names as keys")
    try:
        config = Config.model_validate(dict(values), context=ALONE)
    except BadInput as error:
        raise BadInput(f"--config {path}: {error}") from None
    return {name: getattr(config, name) for name in values}


def _text(path: str) -> str:
    if "://" not in path:
        return Path(path).read_text()
    folder, _, name = path.rpartition("/")
    data = Storage(folder, "--config").read(name)
    if data is None:
        raise BadInput(f"--config {path}: there is no such file")
    return data.decode()


def yaml_loader() -> Any:
    """PyYAML's safe loader, without two surprises: 1:4 is a number there (64, in base 60), and of a key
    given twice the last one wins."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                if key.value in seen:
                    raise yaml.YAMLError(f"{key.value} is given twice (line {key.start_mark.line + 1})")
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    integer = re.compile(r"[-+]?(0|[1-9][0-9_]*)$")  # 010 is 8 in YAML 1.1, and 08 no number at all
    Loader.yaml_implicit_resolvers = {
        first: [(tag, integer if tag == "tag:yaml.org,2002:int" else regexp) for tag, regexp in pairs]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    return Loader


def to_yaml(config: Config) -> str:
    import yaml

    return yaml.safe_dump(config.model_dump(), sort_keys=False)

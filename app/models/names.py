"""The names of the models, known without importing torch."""

import functools
import importlib.util
import re
from pathlib import Path

TEXT_MODELS = ("text-lstm", "text-transformer")
MODELS = ("mnist-cnn", *TEXT_MODELS)


@functools.cache
def torchvision_models() -> tuple[str, ...]:
    """torchvision's classification models, read from its source.

    torchvision.models.list_models(module=torchvision.models) says the same (a test holds the two
    together) but imports torch, which takes seconds: too long to be told of a typing error.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise ImportError("torchvision is not installed")
    names: set[str] = set()
    for file in (Path(spec.origin).parent / "models").glob("*.py"):
        names.update(re.findall(r"^@register_model\(\)\n(?:@.*\n(?:.*\n)*?)?def (\w+)\(", file.read_text(), re.M))
    return tuple(sorted(names))

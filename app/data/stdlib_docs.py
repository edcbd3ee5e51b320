"""Sentences of the Python standard library's own docstrings, labelled by the package that they document.

A real text data set on every machine that has Python. It is that of the running Python: another
minor version has other sentences.
"""

import ast
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from app.errors import BadInput

# Packages of every build of CPython (some distributions leave out others, such as tkinter) that have the
# most to say. decimal's docstrings are in the module that its C version falls back to.
PACKAGES = {
    "asyncio": "asyncio",
    "decimal": "_pydecimal.py",
    "email": "email",
    "http": "http",
    "importlib": "importlib",
    "logging": "logging",
    "unittest": "unittest",
    "xml": "xml",
}
MIN_WORDS, MAX_WORDS = 4, 60


def read_sentences() -> tuple[list[str], list[str]]:
    """Texts, and the package of each: as many of every package, none twice, in a fixed order.

    A sentence that two packages have (in any spelling of case) is in neither. Raises BadInput for a Python
    without its library's source.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    by_package: dict[str, dict[str, str]] = {}  # each sentence under its spelling in lower case
    for package, place in PACKAGES.items():
        found = by_package[package] = {}
        path = library / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            try:
                source = file.read_text(encoding="utf-8")
            except OSError as error:
                raise BadInput(f"--dataset stdlib-docs needs the source of Python's library: {error}") from None
            for sentence in _sentences(source):
                found.setdefault(sentence.lower(), sentence)
    times_said: dict[str, int] = {}
    for found in by_package.values():
        for key in found:
            times_said[key] = times_said.get(key, 0) + 1
    own = {package: [key for key in found if times_said[key] == 1] for package, found in by_package.items()}
    count = min(map(len, own.values()))
    if not count:
        raise BadInput(f"--dataset stdlib-docs: the Python library in {library} has no docstrings")
    texts, labels = [], []
    for package, keys in own.items():
        chosen = set(random.Random(package).sample(keys, count))
        texts += [by_package[package][key] for key in keys if key in chosen]
        labels += [package] * count
    return texts, labels


def _sentences(source: str) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, documented) else None
        for paragraph in re.split(r"\n\s*\n", text or ""):
            if ">>>" in paragraph or paragraph.startswith((" ", "\t")):  # code, tables
                continue
            for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(paragraph.split())):
                if MIN_WORDS <= len(sentence.split()) <= MAX_WORDS and sentence.endswith((".", "!", "?")):
                    yield sentence

"""Search spaces: a YAML file over Config's fields, checked line by line before anything starts.

lr: {loguniform: [1e-4, 1e-1]}
batch_size: {choice: [64, 128, 256]}
optimizer: {choice: [sgd, adamw]}
momentum: {uniform: [0.8, 0.99], when: {optimizer: sgd}}
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from app.config import ALONE, Config, did_you_mean, effect_of
from app.config_file import yaml_loader
from app.errors import BadInput

# What the values of a dimension are drawn by, and how many numbers it takes; both ends are included.
RANGES = {"uniform": 2, "loguniform": 2, "quniform": 3, "qloguniform": 3, "randint": 2, "lograndint": 2, "qrandint": 3}
LISTS = ("choice", "grid")
# Free for the result, and still worth trying out: what decides the speed.
FREE = ("channels_last", "compile", "loader_workers", "checkpoint_every", "in_memory_mb")
# The sweep's own.
OF_THE_SWEEP = ("epochs", "max_steps", "early_stop_patience", "max_bad_samples")

Value = bool | int | float | str | None


class Draw(Protocol):
    """Where values come from: chance, or a search that learns."""

    def number(self, dimension: "Dimension") -> float | int: ...

    def choice(self, dimension: "Dimension") -> Value: ...


@dataclass(frozen=True)
class Dimension:
    """A setting that varies. kind is one of RANGES, with low, high and quantum, or of LISTS, with values.

    when: it varies where each of these settings has one of the values, and is the base config's elsewhere.
    """

    name: str
    kind: str
    line: int
    values: tuple[Value, ...] = ()
    low: float = 0.0
    high: float = 0.0
    quantum: float | None = None
    when: dict[str, tuple[Value, ...]] = field(default_factory=dict)

    @property
    def is_log(self) -> bool:
        return "log" in self.kind

    @property
    def is_integer(self) -> bool:
        return self.kind.endswith("randint")

    @property
    def is_list(self) -> bool:
        return self.kind in LISTS

    def fitted(self, value: float) -> float | int:
        """The nearest value of the range."""
        if self.quantum is not None:
            value = round(value / self.quantum) * self.quantum
        value = min(max(value, self.low), self.high)
        return round(value) if self.is_integer else float(value)

    def draw(self, draw: Draw) -> Value:
        return draw.choice(self) if self.is_list else draw.number(self)


class Chance:
    """Values by chance; the same for the same generator."""

    def __init__(self, generator: np.random.Generator):
        self._generator = generator

    def number(self, dimension: Dimension) -> float | int:
        # Integers have as much room at the ends as in between.
        margin = 0.5 if dimension.is_integer and dimension.quantum is None else 0.0
        low, high = dimension.low - margin, dimension.high + margin
        if dimension.is_log:
            return dimension.fitted(math.exp(self._generator.uniform(math.log(low), math.log(high))))
        return dimension.fitted(self._generator.uniform(low, high))

    def choice(self, dimension: Dimension) -> Value:
        return dimension.values[int(self._generator.integers(len(dimension.values)))]


@dataclass(frozen=True)
class Space:
    """The dimensions, each after those that its `when` asks for."""

    path: str
    dimensions: tuple[Dimension, ...]
    text: str

    @property
    def grid(self) -> tuple[Dimension, ...]:
        return tuple(dimension for dimension in self.dimensions if dimension.kind == "grid")

    def points(self, *, of_all_lists: bool = False) -> Iterator[dict[str, Value]]:
        """The grid's, in the order of the file, the last one fastest. of_all_lists: as if each list were a grid."""
        lists = [each for each in self.dimensions if each.kind == "grid" or (of_all_lists and each.is_list)]
        for values in itertools.product(*(dimension.values for dimension in lists)):
            yield dict(zip((dimension.name for dimension in lists), values, strict=True))

    def sample(self, base: Config, draw: Draw, point: dict[str, Value] | None = None) -> dict[str, Value]:
        """Values for the dimensions that apply; those of the grid are the point's."""
        found: dict[str, Value] = {}
        for dimension in self.dimensions:
            if all(found.get(name, getattr(base, name)) in values for name, values in dimension.when.items()):
                if point is not None and dimension.name in point:
                    found[dimension.name] = point[dimension.name]
                else:
                    found[dimension.name] = dimension.draw(draw)
        return found


def planned(space: Space, base: Config, search: str, num_trials: int) -> list[dict[str, Value]]:
    """The settings of each trial of a grid or of chance, a function of the space and the seed alone.

    A grid has each of its points once, for chance num_trials times. Raises BadInput for settings that do
    not fit together.
    """
    points = list(space.points(of_all_lists=search == "grid"))
    repeats = 1 if search == "grid" else num_trials
    found = []
    for number in range(len(points) * repeats):
        chance = Chance(np.random.default_rng([base.seed, number]))
        found.append(space.sample(base, chance, points[number % len(points)]))
    if search == "grid":  # points that differ only where a `when` leaves them out are one
        found = list({repr(settings): settings for settings in found}.values())
    for number, settings in enumerate(found):
        try:
            Config(**{**base.model_dump(), **settings})
        except BadInput as error:
            raise BadInput(f"--space {space.path}: trial {number} would have {settings}: {error}") from None
    return found


def read_space(path: str, base: Config) -> Space:
    """Raises BadInput that names the line."""
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        loader = yaml_loader()(text)
        root = loader.get_single_node()
    except OSError as error:
        raise BadInput(f"--space {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"--space {path} is no YAML: {error}") from None
    if not isinstance(root, yaml.MappingNode) or not root.value:
        raise BadInput(f"--space {path} has nothing to vary: write lines such as lr: {{loguniform: [1e-4, 1e-1]}}")
    dimensions: dict[str, Dimension] = {}
    for key, node in root.value:
        line = key.start_mark.line + 1
        try:
            name, content = str(key.value), loader.construct_object(node, deep=True)
            if name in dimensions:
                raise BadInput(f"{name} is given twice")
            dimensions[name] = _dimension(name, content, line, base)
        except (BadInput, yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise BadInput(f"--space {path}, line {line}: {str(error).splitlines()[0]}") from None
    for dimension in dimensions.values():
        _check_when(path, dimension, dimensions, base)
    return Space(path, tuple(_in_order(path, dimensions)), text)


def _dimension(name: str, content: Any, line: int, base: Config) -> Dimension:
    if name not in Config.model_fields:
        raise BadInput(f"{name} is no setting{did_you_mean(name, Config.model_fields)} (app.train --help lists them)")
    if name in OF_THE_SWEEP or (effect_of(name) == "free" and name not in FREE):
        raise BadInput(f"{name} is the same for all trials: give it as a flag")
    known = (*RANGES, *LISTS)
    kinds = [word for word in content if word != "when"] if isinstance(content, dict) else []
    if len(kinds) != 1 or kinds[0] not in known:
        raise BadInput(
            f"{name}: {content} must be one of {', '.join(known)} with its numbers or values, such as "
            "{loguniform: [1e-4, 1e-1]} or {choice: [64, 128]}"
        )
    kind, given = kinds[0], content[kinds[0]]
    when = _when(name, content.get("when", {}))
    if not isinstance(given, list):
        raise BadInput(f"{name}: {kind} takes a list, not {given}")
    if kind in LISTS:
        values = tuple(_checked(name, value) for value in given)
        if len(values) < 2 or len(set(map(repr, values))) < len(values):
            raise BadInput(f"{name}: {kind} {given} needs two or more different values")
        return Dimension(name, kind, line, values=values, when=when)
    return _range(name, kind, given, line, when)


def _range(name: str, kind: str, given: list[Any], line: int, when: dict[str, tuple[Value, ...]]) -> Dimension:
    try:
        numbers = [float(number) for number in given]  # YAML takes 1e-4 for a word
    except (TypeError, ValueError):
        numbers = [math.nan]
    shape = "[low, high, quantum]" if RANGES[kind] == 3 else "[low, high]"
    if len(numbers) != RANGES[kind] or not all(map(math.isfinite, numbers)):
        raise BadInput(f"{name}: {kind} {given} must be {shape}, finite numbers")
    low, high = numbers[:2]
    quantum = numbers[2] if len(numbers) == 3 else None
    if not low < high:
        raise BadInput(f"{name}: {kind} {given}: {low:g} must be less than {high:g}")
    if "log" in kind and low <= 0:
        raise BadInput(f"{name}: {kind} {given}: a logarithm needs a low end above 0")
    if quantum is not None and not 0 < quantum <= high - low:
        raise BadInput(f"{name}: {kind} {given}: the quantum must be above 0, and at most {high - low:g}")
    if quantum is not None and any(abs(end / quantum - round(end / quantum)) > 1e-9 for end in (low, high)):
        raise BadInput(f"{name}: {kind} {given}: both ends must be multiples of the quantum")
    dimension = Dimension(name, kind, line, low=low, high=high, quantum=quantum, when=when)
    if dimension.is_integer and any(number != int(number) for number in numbers):
        raise BadInput(f"{name}: {kind} {given} must be integers")
    for end in (low, high):
        value = _checked(name, dimension.fitted(end))
        if isinstance(value, bool | str) or (isinstance(value, int) and not dimension.is_integer):
            raise BadInput(f"{name} takes {type(value).__name__}: use {', '.join(LISTS)} or randint, not {kind}")
    return dimension


def _checked(name: str, value: Any) -> Value:
    """As the Config has it. Raises BadInput for one that it refuses."""
    config = Config.model_validate({name: value}, context=ALONE)
    return getattr(config, name)


def _when(name: str, given: Any) -> dict[str, tuple[Value, ...]]:
    if not isinstance(given, dict):
        raise BadInput(f"{name}: when {given} must be settings with the values that they must have")
    found = {}
    for other, values in given.items():
        if other not in Config.model_fields:
            raise BadInput(f"{name}: when {other}: is no setting{did_you_mean(str(other), Config.model_fields)}")
        found[other] = tuple(_checked(other, value) for value in (values if isinstance(values, list) else [values]))
    return found


def _check_when(path: str, dimension: Dimension, dimensions: dict[str, Dimension], base: Config) -> None:
    """A condition that never holds is a mistake."""
    for name, values in dimension.when.items():
        other = dimensions.get(name)
        if other is None or (other.when and getattr(base, name) in values):
            possible = getattr(base, name) in values
        elif other.is_list:
            possible = any(value in other.values for value in values)
        else:
            possible = any(isinstance(value, int | float) and other.low <= value <= other.high for value in values)
        if not possible:
            has = f"is {getattr(base, name)}" if other is None else f"varies by line {other.line}"
            raise BadInput(
                f"--space {path}, line {dimension.line}: {dimension.name} applies when {name} is "
                f"{' or '.join(map(str, values))}, which never is: it {has}"
            )


def _in_order(path: str, dimensions: dict[str, Dimension]) -> Iterator[Dimension]:
    placed: set[str] = set()
    left = dict(dimensions)
    while left:
        ready = [name for name, dimension in left.items() if not (dimension.when.keys() & dimensions.keys()) - placed]
        if not ready:
            first = next(iter(left.values()))
            raise BadInput(f"--space {path}, line {first.line}: {', '.join(left)} wait for one another in their 'when'")
        for name in ready:
            yield left.pop(name)
        placed.update(ready)

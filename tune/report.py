"""What a sweep has found: a table, pictures, and a line for programs."""

import io
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from app.config import Config
from app.progress import console
from tune.ledger import METRICS, Trial, ranked
from tune.space import Value

STATUSES = ("finished", "stopped", "failed", "killed", "running")


def shown(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def described(settings: dict[str, Value]) -> str:
    return ", ".join(f"{name} {shown(value)}" for name, value in settings.items())


def print_ranking(sweep_name: str, trials: dict[int, Trial], metric: str, most: int = 20) -> None:
    """The best trials with the settings that vary; failed ones with their reason."""
    names = list(dict.fromkeys(name for trial in trials.values() for name in trial.settings))
    from rich.table import Table
    from rich.text import Text

    order = ranked(trials, metric)
    table = Table(title=f"{sweep_name}: {len(order)} trials")
    for column in ("trial", metric, "status", "steps", *names):
        table.add_column(column, justify="left" if column == "status" else "right", overflow="fold")
    for trial in order[:most]:
        value = trial.value(metric)
        cells = [str(trial.number), "" if value is None else f"{value:.4f}", trial.status, f"{trial.steps:,}"]
        cells += [shown(trial.settings[name]) if name in trial.settings else "" for name in names]
        table.add_row(*map(Text, cells))
    output = console()
    output.print(table)
    if len(order) > most:
        output.print(f"and {len(order) - most} more")
    for trial in order:
        if trial.error is not None:
            output.print(Text(f"trial {trial.number} failed: {trial.error}"))


def counts(trials: dict[int, Trial]) -> dict[str, int]:
    found = Counter(trial.status for trial in trials.values())
    return {status: found[status] for status in STATUSES}


def share_saved(trials: Iterable[Trial], base: Config) -> float:
    """Of the steps of running each trial to its end, those that were saved by giving trials up; 0 to 1."""
    made = full = 0.0
    for trial in trials:
        if trial.status in ("finished", "stopped") and trial.validations:
            last = trial.validations[-1]
            to_its_end = last["step"] / last["epochs"] * base.epochs
            made += trial.steps
            full += trial.steps if trial.status == "finished" else min(to_its_end, base.max_steps or math.inf)
    return 1 - made / full if full else 0.0


def draw(trials: dict[int, Trial], metric: str, names: Sequence[str]) -> dict[str, bytes]:
    """PNG files by name: parallel coordinates, the metric against each setting, and the best so far."""
    import matplotlib

    matplotlib.use("Agg")
    measured = [trial for trial in trials.values() if trial.value(metric) is not None]
    if not measured:
        return {}
    return {
        "pictures/parallel_coordinates.png": _parallel(measured, metric, names),
        "pictures/by_setting.png": _by_setting(measured, metric, names),
        "pictures/best_so_far.png": _best_so_far(measured, metric),
    }


class Axis:
    """Where a setting's values lie on an axis: numbers by size, or by their logarithm; others side by side."""

    def __init__(self, values: Sequence[Value]):
        self.known = [value for value in values if value is not None]
        numbers = [value for value in self.known if isinstance(value, int | float) and not isinstance(value, bool)]
        self.is_number = len(numbers) == len(self.known) and len(set(numbers)) > 1
        self.is_log = self.is_number and min(numbers) > 0 and max(numbers) / min(numbers) >= 30
        self.ticks = [] if self.is_number else sorted({str(value) for value in self.known})

    def place(self, value: Value) -> float:
        return float(value) if self.is_number else float(self.ticks.index(str(value)))  # type: ignore[arg-type]  # a number

    def share(self, value: Value) -> float:
        """0..1 between the least and the most."""
        places = [self.place(each) for each in self.known]
        if self.is_log:
            places = [math.log(place) for place in places]
        place = math.log(self.place(value)) if self.is_log else self.place(value)
        low, high = min(places), max(places)
        return 0.5 if low == high else (place - low) / (high - low)


def _axes(trials: Sequence[Trial], names: Sequence[str]) -> dict[str, Axis]:
    found = {name: Axis([trial.settings[name] for trial in trials if name in trial.settings]) for name in names}
    return {name: axis for name, axis in found.items() if axis.known}


def _values(trials: Sequence[Trial], metric: str) -> list[float]:
    return [value for trial in trials if (value := trial.value(metric)) is not None]


def _parallel(trials: Sequence[Trial], metric: str, names: Sequence[str]) -> bytes:
    import matplotlib.pyplot as plt
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    axes, values = _axes(trials, names), _values(trials, metric)
    scale = Normalize(min(values), max(values) if max(values) > min(values) else min(values) + 1e-9)
    colors = colormaps["viridis" if METRICS[metric] == "max" else "viridis_r"]
    outcome = Axis(values)
    figure, axis = plt.subplots(figsize=(2.2 * (len(axes) + 1) + 1.5, 4.5), layout="constrained")
    best_last = sorted(zip(values, trials, strict=True), key=lambda pair: pair[0], reverse=METRICS[metric] == "min")
    for value, trial in best_last:
        places = [(x, axes[name].share(trial.settings[name])) for x, name in enumerate(axes) if name in trial.settings]
        places.append((len(axes), outcome.share(value)))
        axis.plot(*zip(*places, strict=True), color=colors(scale(value)), marker="o", markersize=3, linewidth=1.2)
    labels = [name + (" (log)" if each.is_log else "") for name, each in [*axes.items(), (metric, outcome)]]
    for x, each in enumerate([*axes.values(), outcome]):
        axis.axvline(x, color="0.8", zorder=0)
        ticks = sorted(set(each.known), key=each.place) if each.is_number else each.ticks
        for tick in ticks if not each.is_number else (ticks[0], ticks[-1]):
            place = each.share(tick)
            sides = {0.0: (-0.04, "top"), 1.0: (1.04, "bottom")}.get(place, (place, "center"))
            axis.text(x, sides[0], shown(tick), fontsize=8, va=sides[1], ha="center", backgroundcolor="white")
    axis.set_xticks(range(len(labels)), labels)
    axis.set_yticks([])
    axis.set_ylim(-0.12, 1.12)
    axis.set_xlim(-0.3, len(labels) - 0.7)
    figure.colorbar(plt.cm.ScalarMappable(scale, colors), ax=axis, label=metric)
    return _png(figure)


def _by_setting(trials: Sequence[Trial], metric: str, names: Sequence[str]) -> bytes:
    import matplotlib.pyplot as plt

    axes = _axes(trials, names)
    figure, plots = plt.subplots(
        1, len(axes), figsize=(3.2 * len(axes) + 1, 3.6), layout="constrained", sharey=True, squeeze=False
    )
    for plot, (name, axis) in zip(plots[0], axes.items(), strict=True):
        having = [trial for trial in trials if name in trial.settings]
        plot.scatter([axis.place(trial.settings[name]) for trial in having], _values(having, metric), s=18)
        plot.set_xlabel(name)
        if axis.is_log:
            plot.set_xscale("log")
        if not axis.is_number:
            plot.set_xticks(range(len(axis.ticks)), axis.ticks)
        plot.grid(alpha=0.3)
    plots[0][0].set_ylabel(metric)
    return _png(figure)


def best_so_far(trials: Iterable[Trial], metric: str) -> tuple[list[float], list[float]]:
    """The values of the trials that have ended, in the order of their end, and the best up to each."""
    better = max if METRICS[metric] == "max" else min
    values = _values(sorted((trial for trial in trials if trial.ended), key=lambda trial: trial.ended or 0), metric)
    return values, list(itertools.accumulate(values, better))


def _best_so_far(trials: Sequence[Trial], metric: str) -> bytes:
    import matplotlib.pyplot as plt

    values, best = best_so_far(trials, metric)
    figure, axis = plt.subplots(figsize=(6.5, 4), layout="constrained")
    ended = range(1, len(values) + 1)
    axis.scatter(ended, values, s=18, label="trial")
    axis.step(ended, best, where="post", color="C1", label="best so far")
    axis.set_xlabel("trials, in the order of their end")
    axis.set_ylabel(metric)
    axis.grid(alpha=0.3)
    axis.legend()
    return _png(figure)


def _png(figure: Any) -> bytes:
    import matplotlib.pyplot as plt

    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    plt.close(figure)
    return file.getvalue()

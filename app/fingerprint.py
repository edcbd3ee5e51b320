"""What a rank trains on and with, as digests that must be equal on all ranks.

One node with an extra file, another version of a library or other code would otherwise shift a rank's samples or
numbers without a word. Workers compare their fingerprints before the first step.
"""

import hashlib
import importlib.util
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from app.config import CALLABLE, Config
from app.errors import BadInput

if TYPE_CHECKING:
    from app.data.sampling import Order
    from app.data.splits import Splits

# Packages that compute, decode or tokenize: another version may give other numbers.
PACKAGES = ("torch", "torchvision", "numpy", "pillow", "tokenizers")
MOST_NAMED = 5


def fingerprint_rank(config: Config, splits: "Splits", order: "Order") -> dict[str, str]:
    """Return what must be equal on all ranks: each subject with its value, short enough to be shown."""
    info = asdict(splits.info)
    class_names = info.pop("class_names")
    found = {
        "order of the training samples": f"{order.num_samples:,} samples, {order.digest[:12]}",
        "classes": f"{len(class_names)} classes, {_digest(json.dumps(class_names).encode())}",
        "preprocessing": _digest(json.dumps(info).encode()),
    }
    for split, samples in splits.named().items():
        labels = np.ascontiguousarray(samples.labels)
        found[f"labels of {split}"] = f"{len(labels):,} labels, {_digest(labels.tobytes())}"
        if (fingerprint := getattr(samples, "fingerprint", None)) is not None:  # of a user's own set there may be none
            found[f"samples of {split}"] = fingerprint()
    found["code of app"] = _digest_code(Path(__file__).parent)
    for reference in (config.dataset, config.model):
        if CALLABLE.fullmatch(reference):
            module = reference.partition(":")[0]
            spec = importlib.util.find_spec(module)
            if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
                found[f"code of {module}"] = _digest(Path(spec.origin).read_bytes())
    for package in PACKAGES:  # 2.15.0+cpu computes what 2.15.0+cu130 does
        found[package] = version(package).partition("+")[0]
    return found


def refuse_disagreement(fingerprints: Sequence[dict[str, str]], nodes: Sequence[str]) -> None:
    """Raise BadInput, naming nodes, ranks and values, unless all ranks have the same fingerprint.

    fingerprints and nodes: those of each rank, by rank.
    """
    differing = []
    for subject in dict.fromkeys(subject for each in fingerprints for subject in each):
        where = defaultdict(list)
        for rank, each in enumerate(fingerprints):
            where[each.get(subject, "none")].append(f"node {nodes[rank]} (rank {rank})")
        if len(where) > 1:
            values = [f"{value} on {_some(places)}" for value, places in where.items()]
            differing.append(f"  {subject}: {'; '.join(values)}")
    if differing:
        raise BadInput(
            "the workers do not have the same data, code or packages:\n" + "\n".join(differing) + "\n"
            "Give every node the same files in --data-dir, the same code and the packages of requirements.lock; "
            "a --dataset of your own must return the same samples in the same order in every process"
        )


def _some(places: Sequence[str]) -> str:
    more = f" and {len(places) - MOST_NAMED} more" if len(places) > MOST_NAMED else ""
    return ", ".join(places[:MOST_NAMED]) + more


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _digest_code(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]

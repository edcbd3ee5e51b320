"""Labelled texts: tables of the user's, or the standard library's docstrings."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from app.config import TOKENIZERS, Config
from app.data.sampling import Facts, stratified_split
from app.data.stdlib_docs import read_sentences
from app.data.tables import SUFFIXES, as_weight, is_table, read_rows
from app.data.tokens import Encoded, encode, read_tokenizer, read_tokenizer_file, train_tokenizer
from app.errors import BadInput
from app.retry import retry

if TYPE_CHECKING:
    import torch

# What a file of a split may be called.
SPLIT_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val", "test": "test"}
# Held out of the docstrings for test; fixed, so that every run is measured on the same 20 %.
STDLIB_TEST_FRACTION = 0.2


@dataclass(frozen=True, eq=False)
class Texts:
    """The texts of a split and their labels (N,); weights (N,) where --weight-column gives them."""

    texts: list[str]
    labels: np.ndarray
    weights: np.ndarray | None = None

    def of(self, ids: np.ndarray) -> "Texts":
        weights = None if self.weights is None else self.weights[ids]
        return Texts([self.texts[i] for i in ids], self.labels[ids], weights)


class TextSet:
    """Texts as a SampleSet: inputs are token ids, int64 (n, the longest of the n), padded on the right."""

    in_memory = True

    def __init__(self, source: Texts, encoded: Encoded):
        self.labels, self.facts = source.labels, Facts(weights=source.weights, lengths=encoded.lengths)
        self._texts, self._encoded = source.texts, encoded

    def fingerprint(self) -> str:
        """Return a digest of all texts."""
        return hashlib.sha256("\0".join(self._texts).encode("utf-8", "surrogatepass")).hexdigest()[:12]

    def inputs(self, ids: np.ndarray) -> "torch.Tensor":
        import torch

        return torch.from_numpy(self._encoded.padded(ids))

    def shown(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        return {"texts": np.array([self._texts[i] for i in ids], np.str_)}


def read_texts(config: Config) -> tuple[dict[str, Texts], tuple[str, ...]]:
    """The texts by split, train and val always, with the class names. Raises BadInput for what cannot be used."""
    if config.dataset == "stdlib-docs":
        texts, names = read_sentences()
        class_names = tuple(sorted(set(names)))
        everything = Texts(texts, np.array([class_names.index(name) for name in names]))
        rest, test = stratified_split(everything.labels, STDLIB_TEST_FRACTION)
        splits = {"train": everything.of(rest), "test": everything.of(test)}
    else:
        splits, class_names = _read_tables(config)
    if "val" not in splits:
        train = splits["train"]
        kept, held = stratified_split(train.labels, config.val_fraction)
        if not len(held):
            raise BadInput("no class has two texts, so none can be held out for validation: give a val file")
        splits = {**splits, "train": train.of(kept), "val": train.of(held)}
    return splits, class_names


def make_tokenizer(config: Config, train: Sequence[str]) -> str:
    """The tokenizer's JSON, as --tokenizer says: trained on the training texts, or a file's."""
    if config.tokenizer in TOKENIZERS:
        return train_tokenizer(config.tokenizer, config.vocab_size, config.max_length, train)
    return read_tokenizer_file(config.tokenizer, config.max_length)


def encoded_texts(config: Config, tokenizer: str, source: Texts, split: str) -> Encoded:
    """Raises BadInput for a text that the tokenizer finds no token in."""
    encoded = encode(tokenizer, source.texts)
    if len(empty := np.flatnonzero(encoded.lengths == 0)):
        text = source.texts[empty[0]]
        raise BadInput(f"--tokenizer {config.tokenizer} finds no token in {text[:40]!r} ({split}): remove such texts")
    return encoded


def describe(config: Config, tokenizer: str, splits: dict[str, Encoded]) -> str:
    """For a person: how many, and what share of them is cut off."""
    counts = {name: len(encoded.lengths) for name, encoded in splits.items()}
    share = sum(encoded.truncated for encoded in splits.values()) / sum(counts.values())
    return (
        f"texts: {', '.join(f'{count:,} {name}' for name, count in counts.items())}; "
        f"{read_tokenizer(tokenizer).size:,} tokens known; {share:.2%} of the texts are cut off at --max-length "
        f"{config.max_length}"
    )


def _find_files(data_dir: str) -> dict[str, Path]:
    root = Path(data_dir)
    if root.is_file() or is_table(root):
        return {"train": root}
    if not root.is_dir():
        raise BadInput(f"--data-dir {data_dir}: no such file or directory")
    tables = sorted(path for path in root.iterdir() if is_table(path) and not path.name.startswith("."))
    files: dict[str, Path] = {}
    for path in tables:
        split = SPLIT_NAMES.get(path.stem.lower())
        if split is None:
            continue
        if split in files:
            raise BadInput(f"--data-dir {data_dir}: {files[split].name} and {path.name} are both {split}: keep one")
        files[split] = path
    if not files and len(tables) == 1:
        return {"train": tables[0]}
    if "train" not in files:
        found = ", ".join(path.name for path in tables) or "no table"
        raise BadInput(
            f"--data-dir {data_dir} must be a table ({', '.join(SUFFIXES)}), or a folder with one of them called train "
            f"and, if there are, val and test; it holds {found}"
        )
    return {split: files[split] for split in ("train", "val", "test") if split in files}


def _read_tables(config: Config) -> tuple[dict[str, Texts], tuple[str, ...]]:
    assert config.data_dir is not None
    files = _find_files(config.data_dir)
    rows = {
        split: retry(partial(_read_table, config, path, weighted=split == "train"), f"reading {path}")
        for split, path in files.items()
    }
    class_names = _sorted_classes({label for _, label, _, _ in rows["train"]})
    if len(class_names) < 2:
        raise BadInput(
            f"--label-column {config.label_column}: {files['train']} has one class only, {', '.join(class_names)}; "
            "a classifier needs two or more"
        )
    numbers = {name: number for number, name in enumerate(class_names)}
    splits = {}
    for split, found in rows.items():
        for _, label, _, where in found:
            if label not in numbers:
                raise BadInput(f"{files[split]}, {where}: the label {label!r} is not in {files['train']}")
        weights = np.array([weight for _, _, weight, _ in found]) if config.weight_column and split == "train" else None
        labels = np.array([numbers[label] for _, label, _, _ in found], np.int64)
        splits[split] = Texts([text for text, _, _, _ in found], labels, weights)
    return splits, class_names


def _read_table(config: Config, path: Path, weighted: bool) -> list[tuple[str, str, float, str]]:
    """(text, label, weight, where) of each row; the weight is 1 unless weighted."""
    columns = [(config.text_column, "--text-column"), (config.label_column, "--label-column")]
    if weighted and config.weight_column is not None:
        columns.append((config.weight_column, "--weight-column"))
    rows = []
    for row in read_rows(path, columns):
        where = f"{path}, {row.where}"
        if row.error is not None:
            raise BadInput(f"{where}: {row.error}")
        text = row.values[0]
        if not isinstance(text, str) or not text.strip():
            raise BadInput(f"{where}: {config.text_column} is {_shown(text)}, and must be a text that is not empty")
        weight = as_weight(row.values[2], where) if len(columns) == 3 else 1.0
        rows.append((text, _label(row.values[1], f"{where}: {config.label_column}"), weight, row.where))
    if not rows:
        raise BadInput(f"--data-dir: {path} has no rows")
    return rows


def _label(value: Any, where: str) -> str:
    """The class's name. Numbers that a table holds as 3.0, for want of an integer type with gaps, are 3."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, str | int) and str(value).strip():
        return str(value).strip()
    raise BadInput(f"{where} is {_shown(value)}, and must be a string or an integer")


def _sorted_classes(names: set[str]) -> tuple[str, ...]:
    """Numbers by size, else by the alphabet; 1 and 01 are two classes."""
    numeric = all(len(name) < 1000 and name.removeprefix("-").isdecimal() for name in names)
    return tuple(sorted(names, key=lambda name: (int(name), name)) if numeric else sorted(names))


def _shown(value: Any) -> str:
    return "empty" if value is None or not str(value).strip() else repr(value)[:60]

"""The splits of a data set, and how to make them of arrays in memory."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from app.data.images import resized
from app.data.samples import DataInfo, InMemory, SampleSet, Subset
from app.data.sampling import Facts, stratified_split
from app.errors import BadInput


@dataclass(frozen=True)
class Splits:
    """A data set ready to be read. test is None where the data set has no test split."""

    info: DataInfo
    train: SampleSet
    val: SampleSet
    test: SampleSet | None

    def named(self) -> dict[str, SampleSet]:
        splits = {"train": self.train, "val": self.val, "test": self.test}
        return {name: samples for name, samples in splits.items() if samples is not None}

    def __getitem__(self, name: str) -> SampleSet:
        if name not in self.named():
            raise BadInput(f"--split {name}: this data has {', '.join(self.named())}")
        return self.named()[name]


Arrays = tuple[torch.Tensor, np.ndarray]
DTYPES = (torch.uint8, torch.float32, torch.int64)
ALLOWED = "torch.uint8 of shape (N, C, H, W) for images, or torch.float32 or torch.int64 of shape (N, ...)"


def from_arrays(
    train: Arrays,
    val: Arrays | None = None,
    test: Arrays | None = None,
    *,
    val_fraction: float,
    class_names: tuple[str, ...],
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    image_size: int | None = None,
    weights: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
) -> Splits:
    """Splits of samples in memory, each a tensor (N, ...) with labels (N,); val is held out where absent.

    uint8 (N, C, H, W) are images: normalized by mean and std (C,) of pixels scaled to 0..1, and resized to
    image_size. float32 and int64 (N, ...) go to the model as they are. weights and lengths (N,) are those of
    the samples in train, for --sampler weighted and length-bucketed.
    """
    _check_arrays({"train": train, "val": val, "test": test}, class_names, mean, std, image_size)
    if val is None and not 0 < val_fraction < 1:
        raise BadInput(f"from_arrays: val_fraction is {val_fraction}: without val it must be between 0 and 1")
    for name, values in (("weights", weights), ("lengths", lengths)):
        if values is not None and np.shape(values) != (len(train[1]),):
            raise BadInput(f"from_arrays: {name} has the shape {np.shape(values)} for {len(train[1])} training samples")
    facts = Facts(*(None if values is None else np.asarray(values) for values in (weights, lengths)))

    def in_memory(split: Arrays, facts: Facts | None = None) -> InMemory:
        inputs, labels = split
        return InMemory(resized(inputs, image_size) if image_size else inputs, labels, facts)

    train_set = in_memory(train, facts)
    example = train_set.inputs(np.zeros(1, np.int64))[0]
    info = DataInfo(
        tuple(example.shape),
        class_names,
        mean,
        std,
        len(train_set.labels),
        dtype=str(example.dtype).removeprefix("torch."),
    )
    return made(info, train_set, in_memory(val) if val else None, in_memory(test) if test else None, val_fraction)


def _check_arrays(splits: dict[str, Any], class_names: Any, mean: Any, std: Any, image_size: Any) -> None:
    """Raise BadInput for what from_arrays() cannot take, saying what it can."""
    names = None if isinstance(class_names, str) else list(class_names)
    if names is None or not all(isinstance(name, str) for name in names) or len(set(names)) < max(2, len(names)):
        raise BadInput(
            f"from_arrays: class_names is {class_names!r}: it must be a tuple of two or more different str, "
            "one for each label from 0 on"
        )
    first: tuple[str, torch.Tensor] | None = None
    for split, given in splits.items():
        if given is None and split != "train":
            continue
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise BadInput(f"from_arrays: {split} is a {type(given).__name__}: it must be a pair (samples, labels)")
        inputs = given[0]
        if not isinstance(inputs, torch.Tensor):
            raise BadInput(
                f"from_arrays: the samples of {split} are a {type(inputs).__name__}: they must be a torch.Tensor "
                f"(torch.from_numpy makes one of a NumPy array), {ALLOWED}"
            )
        shaped = inputs.ndim == 4 if inputs.dtype == torch.uint8 else inputs.ndim > 1
        if inputs.dtype not in DTYPES or not shaped or not inputs.numel() or inputs.device.type != "cpu":
            raise BadInput(
                f"from_arrays: the samples of {split} are {inputs.dtype} of shape {tuple(inputs.shape)} on "
                f"{inputs.device}: they must be {ALLOWED}, not empty, on cpu"
            )
        kind = f"{inputs.dtype} of shape (N, {', '.join(map(str, inputs.shape[1:]))})"
        if first is not None and kind != first[0]:
            raise BadInput(f"from_arrays: the samples of {split} are {kind}, those of train {first[0]}")
        first = first or (kind, inputs)
        if inputs.is_floating_point() and not inputs.isfinite().all():
            raise BadInput(f"from_arrays: the samples of {split} have NaN or infinite numbers in them")
        _check_labels(f"from_arrays: the labels of {split}", given[1], len(inputs), len(names))
    assert first is not None
    dtype, shape = first[1].dtype, tuple(first[1].shape[1:])
    if dtype != torch.uint8:
        if len(mean) or len(std) or image_size is not None:
            raise BadInput(f"from_arrays: mean, std and image_size are for images, not for {dtype}: leave them out")
        return
    for name, values in (("mean", mean), ("std", std)):
        try:
            numbers = np.asarray(values, np.float64)
        except (TypeError, ValueError):
            numbers = np.array(np.nan)
        good = np.isfinite(numbers).all() and (name == "mean" or (numbers > 0).all())
        if numbers.shape != (shape[0],) or not good:
            above_zero = " above 0" if name == "std" else ""
            raise BadInput(
                f"from_arrays: {name} is {values!r}: it must have a finite number{above_zero}, for pixels of 0..1, "
                f"for each of the {shape[0]} channels; the images' shape (C, H, W) is {shape}"
            )


def _check_labels(what: str, labels: Any, num_samples: int, num_classes: int) -> None:
    found = np.asarray(labels)
    if found.dtype.kind not in "iu" or found.shape != (num_samples,):
        raise BadInput(
            f"{what} are {found.dtype} of shape {found.shape}: "
            f"they must be integers of shape ({num_samples},), one for each sample"
        )
    if found.min() < 0 or found.max() >= num_classes:
        raise BadInput(
            f"{what} go from {found.min()} to {found.max()}: "
            f"with {num_classes} class_names they must be 0 to {num_classes - 1}"
        )


def checked(splits: Any) -> Splits:
    """The user's splits, whether from_arrays() made them or not. Raises BadInput."""
    if not isinstance(splits, Splits):
        raise BadInput(
            f"it returned {type(splits).__name__}: "
            "it must return app.data.splits.Splits (app.data.splits.from_arrays makes one)"
        )
    for name, samples in splits.named().items():
        if not isinstance(samples.labels, np.ndarray) or samples.labels.dtype != np.int64 or not len(samples.labels):
            raise BadInput(f"{name}.labels must be an int64 NumPy array of shape (N,), not empty")
        _check_labels(f"{name}.labels", samples.labels, len(samples.labels), splits.info.num_classes)
    return splits


def made(
    info: DataInfo, train: SampleSet, val: SampleSet | None, test: SampleSet | None, val_fraction: float
) -> Splits:
    """Splits, of which val is held out of train where it is absent."""
    if val is None:
        kept, held = stratified_split(train.labels, val_fraction)
        if not len(held):
            raise BadInput("no class has two samples, so none can be held out for validation: give a val split")
        train, val = Subset(train, kept), Subset(train, held)
    return Splits(replace(info, num_train=len(train.labels)), train, val, test)

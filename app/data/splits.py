"""The splits of a data set, and how to make them of arrays in memory."""

from dataclasses import dataclass, replace

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

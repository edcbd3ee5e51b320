"""What data is to the rest: inputs and labels by sample id, and what a model has to know of them."""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch

from app.data.sampling import Facts
from app.errors import BadInput

if TYPE_CHECKING:
    from app.data.tokens import Vocabulary


# Bytes that a fingerprint goes through in a tenth of a second, and how many samples it takes of a larger set.
MOST_DIGESTED, DIGESTED_SAMPLES = 2**26, 1000


@dataclass(frozen=True)
class DataInfo:
    """What a model and a checkpoint need to know of the data.

    input_shape and dtype are those of one sample: (C, H, W) uint8 of images, (max_length,) int64 of
    texts, anything else of features, which are float32 or int64 and used as they are. mean and std are
    per channel of images, of pixels scaled to 0..1; num_train is the number of training samples, on
    which the order of samples depends; shapes are the (H, W) of images that do not all have the shape
    input_shape, batches of which have one each; tokenizer is that of texts, as its library's JSON.
    """

    input_shape: tuple[int, ...]
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_train: int
    shapes: tuple[tuple[int, int], ...] = ()
    dtype: str = "uint8"
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        # Lists and numpy's numbers become what JSON gives back: a checkpoint's must compare equal.
        object.__setattr__(self, "input_shape", tuple(map(int, self.input_shape)))
        object.__setattr__(self, "class_names", tuple(map(str, self.class_names)))
        object.__setattr__(self, "mean", tuple(map(float, self.mean)))
        object.__setattr__(self, "std", tuple(map(float, self.std)))
        object.__setattr__(self, "num_train", int(self.num_train))
        object.__setattr__(self, "shapes", tuple((int(height), int(width)) for height, width in self.shapes))

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def kind(self) -> Literal["images", "texts", "features"]:
        if self.dtype == "uint8":
            return "images"
        return "features" if self.tokenizer is None else "texts"

    @property
    def is_image(self) -> bool:
        return self.kind == "images"

    @property
    def vocab_size(self) -> int:
        """Of texts."""
        return self._vocabulary().size

    @property
    def padding(self) -> int:
        """Of texts: the id that fills them up to one length."""
        return self._vocabulary().padding

    def _vocabulary(self) -> "Vocabulary":
        from app.data.tokens import read_tokenizer

        assert self.tokenizer is not None
        return read_tokenizer(self.tokenizer)

    def example(self, count: int, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Inputs (count, *shape), by default input_shape: black images, texts of one word, zeros."""
        example = torch.zeros(count, *(shape or self.input_shape), dtype=getattr(torch, self.dtype))
        # Not padding: a text of nothing else has no end.
        return example if self.tokenizer is None else example + int(self.padding == 0)

    def __str__(self) -> str:
        shape = "x".join(map(str, self.input_shape))
        if self.is_image:
            return f"{self.num_classes} classes, images of {shape}"
        if self.tokenizer is not None:
            return f"{self.num_classes} classes, texts of up to {shape} out of {self.vocab_size:,} tokens"
        return f"{self.num_classes} classes, {self.dtype} features of {shape}"


class SampleSet(Protocol):
    """labels: (N,) int64. inputs(ids): (n, *shape) for n ids, of one group if facts has groups.

    n may be 0. A sample that cannot be read raises BadInput, in which --max-bad-samples may skip it.
    in_memory: not read from files. facts: what orders can go by. shown(ids): what a person can look at,
    by kind: images (n, C, H, W) uint8, or texts (n,); empty where there is neither.

    A set may also have fingerprint(), a short text that tells two sets with other samples apart: workers compare it
    before they train. It must take less than a second.
    """

    labels: np.ndarray
    in_memory: bool
    facts: Facts

    def inputs(self, ids: np.ndarray) -> torch.Tensor: ...

    def shown(self, ids: np.ndarray) -> dict[str, np.ndarray]: ...


class InMemory:
    """Tensors (N, *shape). unreadable: by id, what is wrong with each sample that could not be read, whose
    values mean nothing."""

    in_memory = True

    def __init__(
        self,
        inputs: torch.Tensor,
        labels: np.ndarray,
        facts: Facts | None = None,
        unreadable: dict[int, str] | None = None,
    ):
        assert len(inputs) == len(labels)
        self._inputs, self.labels = inputs, np.asarray(labels, np.int64)
        self.facts, self._unreadable = facts or Facts(), unreadable or {}

    def fingerprint(self) -> str:
        """Return a digest of all values, or, of a large set, of those of samples at equal distances."""
        inputs, step = self._inputs, 1
        if inputs.numel() * inputs.element_size() > MOST_DIGESTED:
            step = max(1, len(inputs) // DIGESTED_SAMPLES)
        digest = hashlib.sha256(f"{inputs.dtype} {tuple(inputs.shape)}".encode())
        digest.update(inputs[::step].contiguous().numpy().data)
        return digest.hexdigest()[:12]

    def inputs(self, ids: np.ndarray) -> torch.Tensor:
        if self._unreadable:
            for i in ids.tolist():
                if i in self._unreadable:
                    raise BadInput(self._unreadable[i])
        return self._inputs[torch.from_numpy(ids)]

    def shown(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        return {"images": self.inputs(ids).numpy()} if self._inputs.dtype == torch.uint8 else {}


class Subset:
    """Some of another set's samples, renumbered from 0."""

    def __init__(self, base: SampleSet, ids: np.ndarray):
        self._base, self._ids, self.labels = base, ids, base.labels[ids]
        self.in_memory, self.facts = base.in_memory, base.facts.of(ids)

    def fingerprint(self) -> str:
        base = getattr(self._base, "fingerprint", lambda: "unknown samples")()
        return f"{hashlib.sha256(np.ascontiguousarray(self._ids).data).hexdigest()[:12]} of {base}"

    def inputs(self, ids: np.ndarray) -> torch.Tensor:
        return self._base.inputs(self._ids[ids])

    def shown(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        return self._base.shown(self._ids[ids])

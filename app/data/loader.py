"""A data set and a batch sampler made into a DataLoader of whole batches."""

from typing import Any, TypedDict

import torch
from torch.utils.data import DataLoader, Dataset

from app.data.augment import Augment, augmented
from app.data.images import ImageSet
from app.data.sampling import EvaluationBatches, Request, TrainingBatches


class Batch(TypedDict):
    """One rank's part of a step. The last num_counted of the n samples count; see sampling.Request.

    inputs: uint8 (n, C, H, W); targets and ids: int64 (n,); global_count: samples of the step on all ranks.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    ids: torch.Tensor
    num_counted: int
    global_count: int
    step: int


class Reader(Dataset):
    """Reads a batch at a time: torch's DataLoader hands __getitems__ whatever the batch sampler yields."""

    def __init__(self, images: ImageSet, augment: Augment | None = None, seed: int = 0):
        self._images, self._augment, self._seed = images, augment, seed
        self._labels = torch.from_numpy(images.labels)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitems__(self, request: Request) -> Batch:
        ids = torch.from_numpy(request.ids)
        inputs = self._images.images(request.ids)
        if self._augment is not None:
            inputs = augmented(inputs, ids.tolist(), self._augment, self._seed, request.epoch)
        return Batch(
            inputs=inputs,
            targets=self._labels[ids],
            ids=ids,
            num_counted=request.num_counted,
            global_count=request.global_count,
            step=request.step,
        )


def build_loader(
    images: ImageSet,
    batches: TrainingBatches | EvaluationBatches,
    *,
    num_workers: int,
    augment: Augment | None = None,
    seed: int = 0,
    pin_memory: bool = False,
) -> DataLoader:
    return DataLoader(
        Reader(images, augment, seed),
        batch_sampler=batches,  # type: ignore[arg-type]  # yields Requests, which Reader takes
        collate_fn=_as_it_is,
        num_workers=num_workers,
        # Kept between the evaluations of an epoch's end; the training loader is iterated once.
        persistent_workers=num_workers > 0,
        pin_memory=pin_memory,
    )


def _as_it_is(batch: Any) -> Any:
    return batch

"""A data set and a batch sampler made into a DataLoader of whole batches."""

import signal
from typing import Any, TypedDict

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from app.data.augment import Augment, augmented
from app.data.samples import SampleSet
from app.data.sampling import EvaluationBatches, Request, TrainingBatches
from app.distributed import derive_seed
from app.errors import BadInput
from app.generators import seed_generators


class Batch(TypedDict):
    """One rank's part of a step, for a sampling.Request.

    inputs: (n, *shape), see SampleSet; targets and ids: int64 (n,); rows: those of the n that count, num_counted
    of them, as a slice, or as int64 indices where some in between could not be read; where none counts,
    a stand-in. global_count: samples of the step on all ranks, readable or not; unreadable: of each of
    this rank's that is not, what is wrong.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    ids: torch.Tensor
    rows: slice | torch.Tensor
    num_counted: int
    global_count: int
    step: int
    unreadable: list[str]


class Reader(Dataset):
    """Reads a batch at a time: torch's DataLoader hands __getitems__ whatever the batch sampler yields."""

    def __init__(
        self, samples: SampleSet, augment: Augment | None = None, seed: int = 0, skip_unreadable: bool = False
    ):
        self._samples, self._augment, self._seed = samples, augment, seed
        self._skip_unreadable = skip_unreadable
        self._labels = torch.from_numpy(samples.labels)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitems__(self, request: Request) -> Batch:
        ids = torch.from_numpy(request.ids)
        # For a data set that draws random numbers: the same in each process, and after a resume.
        first = 0 if request.occurrences is None else int(request.occurrences[0])
        seed_generators(derive_seed("read", self._seed, request.epoch, first, int(request.ids[0])))
        inputs, problems = self._read(request.ids)
        targets, counted = self._labels[ids], request.num_counted
        if self._augment is not None:
            inputs = augmented(inputs, request.ids, self._augment, self._seed, request.epoch, request.occurrences)
        rows: slice | torch.Tensor = slice(len(ids) - max(counted, 1), len(ids))
        if problems:
            # In the place of what cannot be read stands the sample after it, which would be mixed with
            # it, and so is mixed with itself: on every rank alike, whether it counts there or not.
            for row in sorted(problems.keys() - {len(ids) - 1}, reverse=True):
                inputs[row], targets[row] = inputs[row + 1], targets[row + 1]
            problems = {row: text for row, text in problems.items() if row >= len(ids) - counted}
            good = [row for row in range(len(ids) - counted, len(ids)) if row not in problems]
            counted = len(good)
            rows = torch.tensor(good) if good else slice(len(ids) - 1, len(ids))
        return Batch(
            inputs=inputs,
            targets=targets,
            ids=ids,
            rows=rows,
            num_counted=counted,
            global_count=request.global_count,
            step=request.step,
            unreadable=list(problems.values()),
        )

    def _read(self, ids: np.ndarray) -> tuple[torch.Tensor, dict[int, str]]:
        """The inputs, and by row what is wrong with those that cannot be read, which are zeros."""
        try:
            return self._samples.inputs(ids), {}
        except BadInput:
            if not self._skip_unreadable:
                raise
        inputs, problems = {}, {}
        for row in range(len(ids)):  # which of them was it?
            try:
                inputs[row] = self._samples.inputs(ids[row : row + 1])[0]
            except BadInput as error:
                problems[row] = str(error)
        none = self._samples.inputs(ids[:0])
        zeros = none.new_zeros(next(iter(inputs.values())).shape if inputs else none.shape[1:])
        return torch.stack([inputs.get(row, zeros) for row in range(len(ids))]), problems


def build_loader(
    samples: SampleSet,
    batches: TrainingBatches | EvaluationBatches,
    *,
    num_workers: int,
    augment: Augment | None = None,
    seed: int = 0,
    pin_memory: bool = False,
    skip_unreadable: bool = False,
    start_method: str | None = None,
) -> DataLoader:
    return DataLoader(
        Reader(samples, augment, seed, skip_unreadable),
        batch_sampler=batches,  # type: ignore[arg-type]  # yields Requests, which Reader takes
        collate_fn=_as_it_is,
        num_workers=num_workers,
        # Kept between the evaluations of an epoch's end; the training loader is iterated once.
        persistent_workers=num_workers > 0,
        pin_memory=pin_memory,
        multiprocessing_context=start_method if num_workers else None,
        worker_init_fn=_leave_signals_to_training,
    )


def _leave_signals_to_training(_: int) -> None:
    """In a loader's process: Ctrl-C on a terminal reaches all that it runs, and training needs its next batches."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which a DataLoader ends them with


def _as_it_is(batch: Any) -> Any:
    return batch

"""From a block of inputs to a block of labels and probabilities, with a network that is built once."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from app.data.folder import read_sizes
from app.data.images import aspect_groups, decode_image
from app.data.inputs import printable
from app.data.tokens import encode
from app.errors import BadInput
from app.setup import in_layout
from app.trained import Trained

# Pillow lets other threads run while it decodes.
DECODING_THREADS = 4

Batch = tuple[np.ndarray, torch.Tensor]  # rows of the block (n,), and their inputs


def result_schema(class_names: Sequence[str]) -> pa.Schema:
    """Of the results: where from, label, error, and a probability for each class.

    The classes' columns cannot have the names of the others. Classes of one name have their number in it too.
    """
    names = [f"probability_{printable(name)}" for name in class_names]
    if len(set(names)) < len(names):
        names = [f"probability_{number}_{printable(name)}" for number, name in enumerate(class_names)]
    fields = [(name, pa.string()) for name in ("input", "row", "label", "error")]
    return pa.schema([*fields, *((name, pa.float32()) for name in names)])


class Predictor:
    """A trained network on a device. Called with a block as app.data.inputs makes it, gives result_schema's columns.

    A row whose content is of no use has an error in place of label and probabilities. fp32 throughout.
    """

    def __init__(self, trained: Trained, device: torch.device, batch_size: int):
        self._config, self._info, self._device, self._batch_size = trained.config, trained.info, device, batch_size
        self._classifier = in_layout(trained.classifier().to(device), trained.config)
        self._schema = result_schema(trained.info.class_names)
        self._class_names = pa.array(map(printable, trained.info.class_names), pa.string())
        self._threads = ThreadPoolExecutor(DECODING_THREADS)

    def __call__(self, block: pa.Table) -> pa.Table:
        errors = block["error"].to_pylist()
        probabilities = np.full((len(errors), self._info.num_classes), np.nan, np.float32)
        batches = self._images(block, errors) if self._info.is_image else self._texts(block, errors)
        with torch.inference_mode():
            for rows, inputs in batches:
                logits = self._classifier(inputs.to(self._device))
                probabilities[rows] = logits.float().softmax(dim=1).cpu().numpy()
        for row in np.flatnonzero(~np.isfinite(probabilities).all(axis=1)):
            errors[row] = errors[row] or "the network gives numbers that are not finite for it"
        failed = np.array([error is not None for error in errors])
        labels = pa.array(np.nan_to_num(probabilities).argmax(axis=1), mask=failed)
        columns = [
            block["input"],
            block["row"],
            self._class_names.take(labels),
            pa.array(errors, pa.string()),
            *(pa.array(column, mask=failed) for column in np.ascontiguousarray(probabilities.T)),
        ]
        return pa.table(columns, self._schema)

    def _images(self, block: pa.Table, errors: list[str | None]) -> Iterator[Batch]:
        """Batches of one shape each; the next one is decoded while one is computed."""
        paths = {row: Path(os.fsdecode(content)) for row, content in enumerate(block["content"].to_pylist()) if content}
        channels = self._info.input_shape[0]
        parts = list(self._parts(paths))

        def begin(number: int) -> list["Future[torch.Tensor | str]"]:
            rows, shape = parts[number]
            return [self._threads.submit(_decode, paths[row], shape, channels) for row in rows.tolist()]

        upcoming = begin(0) if parts else []
        for number, (rows, shape) in enumerate(parts):
            decoding, upcoming = upcoming, begin(number + 1) if number + 1 < len(parts) else []
            layout = torch.channels_last if self._config.channels_last else torch.contiguous_format
            pixels = torch.empty(len(rows), channels, *shape, dtype=torch.uint8, memory_format=layout)
            readable = []
            for row, future in zip(rows.tolist(), decoding, strict=True):
                image = future.result()
                if isinstance(image, str):
                    errors[row] = image
                else:
                    pixels[len(readable)] = image
                    readable.append(row)
            if readable:
                yield np.array(readable), pixels[: len(readable)]

    def _parts(self, paths: dict[int, Path]) -> Iterator[tuple[np.ndarray, tuple[int, int]]]:
        """Rows (n,) of a batch, and the (H, W) that they are decoded to."""
        rows = np.array(list(paths), np.int64)
        _, height, width = self._info.input_shape
        shapes = self._info.shapes or ((height, width),)
        groups = np.zeros(len(rows), np.int64)
        if self._info.shapes and len(rows):
            groups = aspect_groups(read_sizes(list(paths.values()), skip_unreadable=True), shapes)
        for group, (height, width) in enumerate(shapes):
            members = rows[groups == group]
            for start in range(0, len(members), self._batch_size):
                yield members[start : start + self._batch_size], (height, width)

    def _texts(self, block: pa.Table, errors: list[str | None]) -> Iterator[Batch]:
        """Batches of similar length: short texts are not padded to a long one's."""
        assert self._info.tokenizer is not None
        rows = np.flatnonzero([error is None for error in errors])
        texts = block["content"].cast(pa.large_string()).take(rows).to_pylist()
        try:
            encoded = encode(self._info.tokenizer, texts)
        except BadInput:  # of one of them: which?
            for row, text in zip(rows, texts, strict=True):
                try:
                    encode(self._info.tokenizer, [text])
                except BadInput as error:
                    errors[row] = str(error)
            yield from self._texts(block, errors)
            return
        for row in rows[encoded.lengths == 0]:
            errors[row] = "the tokenizer finds no token in the text"
        order = np.argsort(encoded.lengths, kind="stable")
        order = order[np.count_nonzero(encoded.lengths == 0) :]
        for start in range(0, len(order), self._batch_size):
            part = order[start : start + self._batch_size]
            yield rows[part], torch.from_numpy(encoded.padded(part))


def _decode(path: Path, shape: tuple[int, int], channels: int) -> torch.Tensor | str:
    """uint8 (channels, H, W), or what is wrong with the file."""
    if not path.is_file():  # a pipe would be waited for
        return printable(f"{path} is no file")
    try:
        return decode_image(path, shape, channels)
    except BadInput as error:
        return printable(str(error))

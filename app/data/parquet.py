"""Parquet tables that need not fit a node: read where they lie, a row group at a time.

What is known of a table beforehand is its labels and the sizes of its row groups. The rest is read
when a batch needs it: with sampling.streamed_order each rank goes through row groups of its own, from the
first row to the last.
"""

import contextlib
import hashlib
import io
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from app.config import Config
from app.data.sampling import Facts
from app.errors import BadInput
from app.retry import retry
from app.storage import File, Storage

if TYPE_CHECKING:
    import torch

SPLITS = ("train", "val", "test")
SUFFIX = ".parquet"
# What pyarrow raises for what it cannot read, damaged files included.
UNREADABLE = (OSError, ValueError, NotImplementedError)


@dataclass(frozen=True)
class Table:
    """The files of a split, in order, by their paths below the location. groups: of each row group its file and its
    number in that; sizes (n,) int64: their rows. labels: (N,) int64, or as the table has them. columns: the one with
    images, or those of numbers."""

    files: tuple[File, ...]
    groups: tuple[tuple[int, int], ...]
    sizes: np.ndarray
    labels: np.ndarray
    columns: tuple[str, ...]


T = TypeVar("T")


def _read_file(storage: Storage, file: File, read: Callable[["_Source"], T], what: str) -> T:
    """Return read(the file), repeated while a disk or a store fails. what: the part of it that is read.

    Raises BadInput for damaged data; Unavailable, or another OSError, where the file cannot be had.
    """
    name = storage.uri(file.path)

    def work() -> T:
        with contextlib.closing(_Source(storage.open(file.path, file.size))) as source:
            try:
                return read(source)
            except UNREADABLE as error:
                if source.failed:
                    raise
                raise BadInput(f"{name}{what} is damaged: {error}") from None

    return retry(work, f"reading {name}")


def _read_beforehand(storage: Storage, file: File, read: Callable[["_Source"], T]) -> T:
    """As _read_file(); before training starts a file that cannot be had is bad input too."""
    try:
        return _read_file(storage, file, read, "")
    except OSError as error:
        raise BadInput(f"--data-dir: {storage.uri(file.path)} cannot be read: {error}") from None


def find_tables(config: Config) -> tuple[dict[str, Table], tuple[str, ...]]:
    """The splits that there are, their labels numbered, and the names of the classes by these numbers.

    Raises BadInput for what cannot be trained on.
    """
    location = str(config.data_dir)
    storage = Storage(location, "--data-dir")
    files = {split: found for split in SPLITS if (found := _find_files(storage, split))}
    if missing := [split for split in ("train", "val") if split not in files]:
        raise BadInput(
            f"--data-dir {location} has no folder {missing[0]} with {SUFFIX} files in it: of a table that is streamed, "
            "train and val are folders of their own (and test, if there is one)"
        )
    columns = _input_columns(config, storage, files["train"][0])
    tables = {split: _read_table(config, storage, files[split], columns) for split in files}
    if empty := [split for split, table in tables.items() if not len(table.labels)]:
        raise BadInput(f"--data-dir {location}: {empty[0]} has no rows")
    classes = np.unique(tables["train"].labels)
    if len(classes) < 2:
        raise BadInput(f"--label-column {config.label_column}: there is one class only, {classes[0]}")
    for split, table in tables.items():
        same_kind = table.labels.dtype.kind == classes.dtype.kind
        if len(unknown := np.setdiff1d(table.labels, classes) if same_kind else table.labels):
            raise BadInput(f"--label-column {config.label_column}: {split} has {unknown[0]}, which train has not")
        tables[split] = replace(table, labels=np.searchsorted(classes, table.labels))
    return tables, tuple(map(str, classes.tolist()))


def _find_files(storage: Storage, folder: str) -> tuple[File, ...]:
    found = storage.files(folder)
    return tuple(replace(file, path=f"{folder}/{file.path}") for file in found if file.path.endswith(SUFFIX))


def _input_columns(config: Config, storage: Storage, file: File) -> tuple[str, ...]:
    """--image-column, or all columns of numbers but the label's. Raises BadInput if there are none."""
    from pyarrow.parquet import read_schema

    if config.image_column is not None:
        return (config.image_column,)
    schema = _read_beforehand(storage, file, read_schema)
    columns = tuple(each.name for each in schema if _is_number(each.type))
    if columns := tuple(name for name in columns if name != config.label_column):
        return columns
    raise BadInput(
        f"--data-dir {config.data_dir} has no columns of numbers beside --label-column {config.label_column}; of "
        "images give --image-column"
    )


def _read_table(config: Config, storage: Storage, files: tuple[File, ...], columns: tuple[str, ...]) -> Table:
    with ThreadPoolExecutor(16) as threads:
        read = list(threads.map(lambda file: _read_labels(config, storage, file, columns), files))
    groups = [(file, group) for file, (sizes, _) in enumerate(read) for group, size in enumerate(sizes) if size]
    sizes = np.array([size for sizes, _ in read for size in sizes if size], np.int64)
    return Table(files, tuple(groups), sizes, np.concatenate([labels for _, labels in read]), columns)


def _read_labels(
    config: Config, storage: Storage, file: File, columns: tuple[str, ...]
) -> tuple[list[int], np.ndarray]:
    """The rows of each row group of a file, and its labels. Raises BadInput where a column is not what it must be."""
    from pyarrow import types
    from pyarrow.parquet import ParquetFile

    path = storage.uri(file.path)

    def read(source: _Source) -> tuple[dict[str, Any], list[int], Any]:
        with ParquetFile(source) as opened:
            kinds = {each.name: each.type for each in opened.schema_arrow}
            for column, flag in ((config.label_column, "--label-column"), (config.image_column, "--image-column")):
                if column is not None and column not in kinds:
                    raise BadInput(f"{flag} {column}: {path} has {', '.join(kinds)}")
            sizes = [opened.metadata.row_group(group).num_rows for group in range(opened.num_row_groups)]
            return kinds, sizes, opened.read(columns=[config.label_column]).column(0)

    kinds, sizes, labels = _read_beforehand(storage, file, read)
    for column in columns:
        if config.image_column is None and not (column in kinds and _is_number(kinds[column])):
            raise BadInput(f"--data-dir: {path} has no column of numbers {column}, as the first file of train has")
        if config.image_column is not None and not _is_bytes(kinds[column]):
            raise BadInput(
                f"--image-column {column}: {path} has {kinds[column]}: it must be the bytes of images' files"
            )
    if types.is_dictionary(labels.type):
        labels = labels.cast(labels.type.value_type)
    kind = labels.type
    if labels.null_count or not (types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind)):
        has = f"{labels.null_count} empty values" if labels.null_count else str(kind)
        raise BadInput(f"--label-column {config.label_column}: {path} has {has}: it must be integers or strings")
    values = labels.to_numpy()
    return sizes, values.astype(np.int64) if values.dtype.kind in "iu" else values.astype(str)


def _is_number(kind: Any) -> bool:
    from pyarrow import types

    return types.is_integer(kind) or types.is_floating(kind)


def _is_bytes(kind: Any) -> bool:
    from pyarrow import types

    if types.is_struct(kind) and kind.get_field_index("bytes") >= 0:  # as Hugging Face's datasets write images
        kind = kind.field("bytes").type
    return types.is_binary(kind) or types.is_large_binary(kind)


class _Source:
    """A file for pyarrow. failed: it could not be read; damaged bytes raise OSError too."""

    def __init__(self, file: Any):
        self._file, self.failed, self.closed = file, False, False
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        try:
            return self._file.read(size)
        except OSError:
            self.failed = True
            raise
        except BadInput as error:  # access is refused: this says nothing of the samples
            self.failed = True
            raise OSError(str(error)) from error

    def close(self) -> None:
        self.closed = True
        self._file.close()


@dataclass
class ParquetSet:
    """A split's samples: images, from their files' bytes, or numbers.

    shape and channels are those of the images; channels 0: numbers. As many row groups are held in memory as the
    largest batch needed, those asked for last.
    """

    location: str
    table: Table
    shape: tuple[int, int]
    channels: int
    in_memory: bool = False
    labels: np.ndarray = field(init=False)
    facts: Facts = field(init=False)

    def __post_init__(self) -> None:
        self.labels, self.facts = self.table.labels, Facts(blocks=self.table.sizes)
        self._starts = np.cumsum(self.table.sizes) - self.table.sizes
        self._held: OrderedDict[int, Any] = OrderedDict()
        self._room = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_held": OrderedDict()}  # what was read stays in its process

    def fingerprint(self) -> str:
        """Return a digest of the files' names and of their row groups."""
        names = [file.path.rpartition("/")[2] for file in self.table.files]
        content = repr((names, self.table.groups, self.table.sizes.tolist(), self.table.columns))
        return f"{len(names):,} files, {hashlib.sha256(content.encode()).hexdigest()[:12]}"

    def inputs(self, ids: np.ndarray) -> "torch.Tensor":
        """Raises BadInput for damaged data, and Unavailable or OSError where a file cannot be had."""
        import torch

        groups = np.searchsorted(self._starts, ids, side="right") - 1
        rows = ids - self._starts[groups]
        self._hold(np.unique(groups).tolist())
        if not self.channels:
            numbers = np.empty((len(ids), len(self.table.columns)), np.float32)
            for group in np.unique(groups):
                numbers[groups == group] = self._held[group][rows[groups == group]]
            return torch.from_numpy(numbers)
        pixels = torch.empty(len(ids), self.channels, *self.shape, dtype=torch.uint8)
        for place, (group, row) in enumerate(zip(groups.tolist(), rows.tolist(), strict=True)):
            pixels[place] = self._image(group, row)
        return pixels

    def shown(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        return {"images": self.inputs(ids).numpy()} if self.channels else {}

    def _image(self, group: int, row: int) -> "torch.Tensor":
        from app.data.images import decode_image

        file, number = self._place(group)
        name = f"{Storage(self.location).uri(file.path)}, row {row + 1} of row group {number}"
        data = self._held[group][row].as_py()
        data = data["bytes"] if isinstance(data, dict) else data
        if data is None:
            raise BadInput(f"{name} has no image")
        return decode_image(io.BytesIO(data), self.shape, self.channels, name)

    def _place(self, group: int) -> tuple[File, int]:
        """The file of a row group, and its number in that."""
        file, number = self.table.groups[group]
        return self.table.files[file], number

    def _hold(self, groups: list[int]) -> None:
        """Have these in memory, in the place of those that were asked for the longest ago."""
        self._room = max(self._room, len(groups))
        for group in self._held.keys() & groups:
            self._held.move_to_end(group)
        for group in groups:
            if group not in self._held:
                while len(self._held) >= self._room:
                    self._held.popitem(last=False)
                self._held[group] = self._read(group)

    def _read(self, group: int) -> Any:
        """What is read of a row group: a column of images, or (n, columns) float32."""
        from pyarrow.parquet import ParquetFile

        storage, (file, number) = Storage(self.location, "--data-dir"), self._place(group)

        def row_group(source: _Source) -> Any:
            with ParquetFile(source, pre_buffer=True) as opened:  # few requests, and large ones
                return opened.read_row_group(number, columns=list(self.table.columns))

        table = _read_file(storage, file, row_group, f", row group {number}")
        if self.channels:
            return table.column(0)
        read = np.stack([np.asarray(table.column(name), np.float32) for name in self.table.columns], axis=1)
        if not np.isfinite(read).all():
            row, column = np.argwhere(~np.isfinite(read))[0]
            path = storage.uri(file.path)
            raise BadInput(f"{path}, row {row + 1} of row group {number}: {self.table.columns[column]} is no number")
        return read

"""Tables to a file of CSV, JSON lines or Parquet, which appears whole or not at all, or to stdout. Imports no torch."""

import contextlib
import json
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import BinaryIO, Self

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from app.errors import BadInput, TrainingFailed

FORMATS = (".csv", ".jsonl", ".parquet")
# Of results that become a row group of Parquet's.
GROUP_BYTES = 2**25


def check_output(path: str, overwrite: bool) -> None:
    """Raise BadInput unless a file of one of FORMATS can be written there."""
    folder = os.path.dirname(os.path.realpath(path))
    if not path.lower().endswith(FORMATS):
        raise BadInput(f"--output {path}: its name must end with {', '.join(FORMATS[:-1])} or {FORMATS[-1]}")
    if os.path.isdir(path):
        raise BadInput(f"--output {path} is a folder: name a file")
    if os.path.exists(path) and not overwrite:
        raise BadInput(f"--output {path} is there already: name another file, or replace it with --overwrite")
    if not os.path.isdir(folder):
        raise BadInput(f"--output {path}: there is no folder {folder}; make it first")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise BadInput(f"--output {path}: {folder} cannot be written to ({error.strerror}); choose another") from None


class Lines:
    """JSON lines on stdout."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pass

    def write(self, table: pa.Table) -> None:
        try:
            sys.stdout.write(json_lines(table))
            sys.stdout.flush()
        except BrokenPipeError:  # whoever reads has enough, such as head; what is left in the buffer goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(128 + signal.SIGPIPE)


class File:
    """Written beside its place, which it takes when the context is left without an error."""

    def __init__(self, path: str, schema: pa.Schema):
        self._path, self._target = path, os.path.realpath(path)
        folder, name = os.path.split(self._target)
        self._beside = os.path.join(folder, f".{uuid.uuid4().hex[:8]}-{name[-200:]}")
        self._schema, self._waiting = schema, list[pa.Table]()
        self._waiting_bytes = 0
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        try:
            self._open()
        except OSError as error:
            raise BadInput(f"--output {self._path} cannot be written: {error.strerror}") from None
        except BaseException:  # Ctrl-C, just here
            self._remove()
            raise
        return self

    def _open(self) -> None:
        self._file = open(self._beside, "xb")  # noqa: SIM115  # _remove() closes it
        self._writer: pyarrow.csv.CSVWriter | pyarrow.parquet.ParquetWriter | None = None
        if self._path.lower().endswith(".csv"):
            self._writer = pyarrow.csv.CSVWriter(self._file, self._schema)
        elif self._path.lower().endswith(".parquet"):
            self._writer = pyarrow.parquet.ParquetWriter(self._file, self._schema)

    def _remove(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk does not take what is thrown away here, either
                self._file.close()
        if os.path.exists(self._beside):
            os.unlink(self._beside)

    def write(self, table: pa.Table) -> None:
        """Raises TrainingFailed for a disk that is full or gone."""
        assert self._file is not None
        try:
            if self._writer is None:
                self._file.write(json_lines(table).encode())
            elif isinstance(self._writer, pyarrow.csv.CSVWriter):
                self._writer.write_table(table)
            else:
                self._waiting.append(table)
                self._waiting_bytes += table.nbytes
                if self._waiting_bytes >= GROUP_BYTES:
                    self._write_group(self._writer)
        except OSError as error:
            raise self._failure(error) from error

    def _write_group(self, writer: pyarrow.parquet.ParquetWriter) -> None:
        if self._waiting:
            writer.write_table(pa.concat_tables(self._waiting))
            self._waiting, self._waiting_bytes = [], 0

    def _failure(self, error: OSError) -> TrainingFailed:
        return TrainingFailed(f"--output {self._path} could not be written: {error}")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._file is not None
        try:
            if error is None and isinstance(self._writer, pyarrow.parquet.ParquetWriter):
                self._write_group(self._writer)
            if self._writer is not None:
                self._writer.close()
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                os.replace(self._beside, self._target)
        except OSError as problem:
            if error is None:  # else that one is the first of the troubles
                raise self._failure(problem) from problem
        finally:
            self._remove()


def json_lines(table: pa.Table) -> str:
    """A flat object for each row, with the table's columns."""
    names: Sequence[str] = table.column_names
    # By way of a string a float32 keeps its own few digits; as a double it would get those of the difference.
    columns = [
        (column.cast(pa.string()).cast(pa.float64()) if pa.types.is_float32(column.type) else column).to_pylist()
        for column in table.columns
    ]
    rows = zip(*columns, strict=True)
    return "".join(json.dumps(dict(zip(names, row, strict=True)), allow_nan=False) + "\n" for row in rows)

"""Rows of CSV, TSV, JSON-lines and Parquet files, one after the other, each with where it stands."""

import csv
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import BadInput
from app.retry import describe, is_transient

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")  # JSON can name it, and no encoding has it


@dataclass(frozen=True)
class Row:
    """values: of the columns asked for, in their order. error: why there are none, for a person.

    where: 'line 7', or 'row 7' of a Parquet file, counted from 1.
    """

    where: str
    values: tuple[Any, ...] = ()
    error: str | None = None


def is_table(path: str | Path) -> bool:
    """By its name."""
    return str(path).lower().endswith(SUFFIXES)


def read_rows(path: str | Path, columns: Sequence[tuple[str, str]]) -> Iterator[Row]:
    """The rows of a table in UTF-8, of which no more than a block is in memory.

    columns: their names, each with the flag that says so. Values are strings in CSV and TSV, where an empty
    line is no row unless there is one column only; what the file has in the other two. A row that cannot be
    read has an error, and those behind it are read all the same. Raises BadInput for a file that cannot be
    opened or lacks a column, and OSError where the disk does not answer at the moment (retry.is_transient).
    """
    path = Path(path)
    read = {".csv": _csv, ".tsv": _csv, ".parquet": _parquet}.get(path.suffix.lower(), _json_lines)
    if not is_table(path):
        raise BadInput(f"{path} is no table by its name: {', '.join(SUFFIXES)} are")
    try:
        yield from read(path, [name for name, _ in columns], lambda present: _refuse_missing(path, columns, present))
    except OSError as error:
        if is_transient(error):
            raise
        raise BadInput(f"{path} cannot be read: {describe(error)}") from None


def as_weight(value: Any, where: str) -> float:
    try:
        weight = float(value)
    except (ValueError, TypeError, OverflowError):
        weight = math.nan
    if not math.isfinite(weight) or weight < 0:
        raise BadInput(f"{where}: {value!r} is no weight: a finite number, 0 or more")
    return weight


def _refuse_missing(path: Path, columns: Sequence[tuple[str, str]], present: Sequence[str]) -> None:
    for name, flag in columns:
        if present.count(name) != 1:
            has = f"there are {', '.join(map(str, present)) or 'none'}"
            trouble = f"no column {name}; {has}" if name not in present else f"{present.count(name)} columns {name}"
            raise BadInput(f"{flag} {name}: {path} has {trouble}")


def _csv(path: Path, columns: list[str], refuse_missing: Callable[[Sequence[str]], None]) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # of its own accord it ends at 128 KiB
    undecoded: dict[int, str] = {}
    with path.open("rb") as file:
        lines = _text_lines(file, undecoded, keep_ends=True)
        reader = csv.reader(lines, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        try:
            header = next(reader, [])
        except csv.Error as error:
            raise BadInput(f"{path}, line 1: {error}") from None
        if undecoded:
            raise BadInput(f"{path}, line 1: {undecoded.popitem()[1]}")
        refuse_missing(header)
        places = [header.index(name) for name in columns]
        while True:
            first = reader.line_num + 1
            try:
                fields = next(reader, None)
                error = None
            except csv.Error as problem:
                fields, error = [], f"broken: {problem}"
            if fields is None:
                return
            lost = [text for number, text in undecoded.items() if number >= first]
            undecoded.clear()
            if lost:
                error = lost[0]
            elif fields and len(fields) != len(header):
                error = f"{len(fields)} fields, and the header has {len(header)}"
            if error is not None:
                yield Row(f"line {first}", error=error)
            elif fields:
                yield Row(f"line {first}", tuple(fields[place] for place in places))
            elif len(header) == 1:  # whose value is empty
                yield Row(f"line {first}", ("",) * len(places))


def _text_lines(file: Any, undecoded: dict[int, str], *, keep_ends: bool) -> Iterator[str]:
    """The lines of a binary file as text; what is wrong with those that are no UTF-8 goes by number into undecoded."""
    for number, line in enumerate(file, 1):
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            text = line.decode(errors="replace")
            undecoded[number] = f"no UTF-8 (byte 0x{line[error.start]:02x}); save the file as UTF-8"
        yield text if keep_ends else text.strip()


def _json_lines(path: Path, columns: list[str], refuse_missing: Callable[[Sequence[str]], None]) -> Iterator[Row]:
    undecoded: dict[int, str] = {}
    is_first = True
    with path.open("rb") as file:
        for number, line in enumerate(_text_lines(file, undecoded, keep_ends=False), 1):
            where = f"line {number}"
            if number in undecoded:
                yield Row(where, error=undecoded.pop(number))
                continue
            if not line:
                continue
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield Row(where, error=f"no JSON: {error}")
                continue
            if not isinstance(values, dict):
                yield Row(where, error=f"a JSON {type(values).__name__}, and not an object with columns as names")
                continue
            if is_first:
                refuse_missing(list(values))
            is_first = False
            if missing := [name for name in columns if name not in values]:
                yield Row(where, error=f"no {missing[0]}; there are {', '.join(values) or 'none'}")
            elif halves := [name for name in columns if HALF_A_CHARACTER.search(str(values[name]))]:
                yield Row(where, error=f"{halves[0]} has half a character in it (an escape \\ud800 to \\udfff alone)")
            else:
                yield Row(where, tuple(values[name] for name in columns))


def _parquet(path: Path, columns: list[str], refuse_missing: Callable[[Sequence[str]], None]) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            refuse_missing(file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=8192, columns=list(set(columns))):
                values = [batch.column(name).to_pylist() for name in columns]
                for row in zip(*values, strict=True):
                    number += 1
                    yield Row(f"row {number}", row)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is no readable Parquet file (after row {number}): {error}") from None

"""What is to be predicted: images or texts, as blocks of rows that are read when their turn comes. Imports no torch."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from app.data.folder import EXTENSIONS
from app.data.tables import SUFFIXES, is_table, read_rows
from app.errors import BadInput, Unavailable
from app.retry import describe, retry

# input, row: where it is from, for a person. content: an image's absolute path, or a text in UTF-8. error: why
# there is no content.
SCHEMA = pa.schema(
    [("input", pa.string()), ("row", pa.string()), ("content", pa.large_binary()), ("error", pa.string())]
)
# A block of texts ends here, however few they are: bounds the memory where texts are long.
BLOCK_BYTES = 2**23

Row = tuple[str, str | None, bytes | None, str | None]  # as in SCHEMA


@dataclass(frozen=True)
class Inputs:
    """given: image files and folders of them, or tables of texts (text_column) and texts, from the directory cwd."""

    given: tuple[str, ...]
    is_text: bool
    text_column: str
    block_rows: int
    cwd: str

    def check(self) -> int | None:
        """How many rows there are, where that is cheap to say. Raises BadInput for what cannot be used at all."""
        if self.is_text:
            for given in self.given:
                self._check_text(given)
            return None if any(map(is_table, self.given)) else len(self.given)
        return sum(map(self._count_images, self.given))

    def tables(self) -> list[str]:
        return [given for given in self.given if self.is_text and is_table(given)]

    def blocks(self) -> Iterator[pa.Table]:
        """Tables of SCHEMA with up to block_rows rows, in the order given."""
        rows: list[Row] = []
        size = 0
        for row in self._texts() if self.is_text else self._images():
            rows.append(row)
            size += len(row[2] or b"")
            if len(rows) == self.block_rows or size >= BLOCK_BYTES:
                yield _block(rows)
                rows, size = [], 0
        if rows:
            yield _block(rows)

    def _check_text(self, given: str) -> None:
        path = self._path(given)
        if is_table(given):

            def first_row() -> None:  # JSON says its columns in its first good line
                next((row for row in read_rows(path, [(self.text_column, "--text-column")]) if row.error is None), None)

            retry(first_row, f"reading {path}")
        elif given and os.path.exists(path):
            raise BadInput(
                f"{printable(given)} is a {'folder' if os.path.isdir(path) else 'file'}, and this model takes texts: "
                f"give tables of them ({', '.join(SUFFIXES)}), or the texts themselves"
            )

    def _count_images(self, given: str) -> int:
        path = self._path(given)
        if os.path.isdir(path):
            if not (count := sum(1 for _ in _image_files(path))):
                raise BadInput(
                    f"{printable(given)} has no images in it, by their names ({', '.join(sorted(EXTENSIONS))})"
                )
            return count
        if is_table(given):
            raise BadInput(f"{printable(given)} is a table, and this model takes images: give image files or folders")
        if not os.path.exists(path):
            raise BadInput(f"{printable(given)}: no such file or directory")
        return 1

    def _images(self) -> Iterator[Row]:
        for given in self.given:
            path = self._path(given)
            found = _image_files(path) if os.path.isdir(path) else [(path, None)]
            for file, error in found:
                shown = given + file.removeprefix(path)
                yield printable(shown), None, None if error else os.fsencode(file), error

    def _texts(self) -> Iterator[Row]:
        for given in self.given:
            if not is_table(given):
                yield printable(given), None, *_as_text(given)
                continue
            try:
                for row in read_rows(self._path(given), [(self.text_column, "--text-column")]):
                    text, error = (None, row.error) if row.error is not None else _as_text(row.values[0])
                    yield printable(given), row.where, text, None if error is None else printable(error)
            except OSError as error:  # half a table must not pass for the whole
                raise Unavailable(f"reading {printable(given)} failed: {describe(error)}") from error
            except BadInput as error:  # a file damaged further on than check() looked
                yield printable(given), None, None, printable(f"{error}; what follows in it is left out")

    def _path(self, given: str) -> str:
        return os.path.join(self.cwd, given)


def printable(text: str) -> str:
    """Text that UTF-8 can hold: file names need not be any."""
    return text.encode("utf-8", "backslashreplace").decode()


def _block(rows: list[Row]) -> pa.Table:
    columns = zip(*rows, strict=True)
    return pa.table([pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)], SCHEMA)


def _image_files(folder: str) -> Iterator[tuple[str, str | None]]:
    """The paths below the folder in order, each with what is wrong: a folder that cannot be listed is there too."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        yield folder, f"{printable(folder)} cannot be listed: {error.strerror}"
        return
    for entry in entries:
        if entry.name.startswith("."):  # what file managers leave behind
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _image_files(entry.path)
        elif os.path.splitext(entry.name)[1].lower() in EXTENSIONS:
            yield entry.path, None


def _as_text(value: Any) -> tuple[bytes | None, str | None]:
    """(the text, None) or (None, what is wrong with it)."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None, "the text is empty"
    if not isinstance(value, str):
        return None, f"{repr(value)[:60]} is no text"
    try:
        return value.encode(), None
    except UnicodeEncodeError:
        return None, "the text is no UTF-8"

"""Records of a run in a file, written before anything is done with them."""

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SPOOL, SENT = "records.jsonl", "sent.json"
BLOCK = 2**16
# Metrics that are numbered by themselves, and not by training steps: each node has a sample every so many seconds.
SYSTEM, SYSTEM_EVERY_S = "system/", 5.0


class Spool:
    """Records in a file, one JSON object a line, each written once.

    A metric's steps only rise: what a resumed run computes again is the same and not recorded again. An appended
    record survives the death of this process; after sync() it survives that of the machine.
    """

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._last_step: dict[str, int] = {}
        self._time_ms = 0
        path = directory / SPOOL
        if existed := path.exists():
            _cut_torn_line(path)
            for record, _ in read_records(directory, 0):
                self._note(record)
            # A power failure can take the end of the file; what MLflow got of it is not sent again (app/deliver.py).
            if sent_offset(directory) > path.stat().st_size:
                note_sent(directory, path.stat().st_size)
        self._file = path.open("ab")
        if not existed:
            sync_folder(directory)

    def close(self) -> None:
        self.sync()
        self._file.close()

    def sync(self) -> None:
        """Return when every record appended so far is on the disk."""
        os.fsync(self._file.fileno())

    def append(self, kind: str, **content: Any) -> None:
        # Times never decrease, even if the machine's clock is set back: go_back() relies on their order.
        self._write({"kind": kind, "time_ms": max(int(time.time() * 1000), self._time_ms), **content})

    def append_metrics(self, step: int, values: dict[str, float]) -> None:
        if fresh := self._fresh(step, values):
            self.append("metrics", step=step, values=fresh)

    def go_back(self, step: int) -> None:
        """What is computed again after this step differs, and is recorded too."""
        self._time_ms += 1  # later than everything that was recorded before
        self.append("go_back", step=step)

    def next_step(self, key: str) -> int:
        return self._last_step.get(key, -1) + 1

    def last_steps(self) -> dict[str, int]:
        """The last recorded step of each metric."""
        return dict(self._last_step)

    def missing(self, lines: Iterable[bytes]) -> list[bytes]:
        """Those of another spool's lines that are not in this one."""
        found = dict.fromkeys(lines)
        for line in read_lines(self.directory, 0):
            found.pop(line, None)
        return list(found)

    def restore(self, lines: Iterable[bytes], last_steps: dict[str, int]) -> None:
        """Append another spool's lines as they are, without the steps of metrics that this one has.

        last_steps: of each metric in the other spool, which need not have all records up to there any more.
        """
        for line in lines:
            record = json.loads(line)
            if record["kind"] == "metrics":
                record["values"] = self._fresh(record["step"], record["values"])
            if record.get("values") != {}:
                self._write(record)
        for key, step in last_steps.items():
            self._last_step[key] = max(step, self._last_step.get(key, -1))
        self.sync()

    def _fresh(self, step: int, values: dict[str, float]) -> dict[str, float]:
        return {key: value for key, value in values.items() if step > self._last_step.get(key, -1)}

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()
        self._note(record)

    def _note(self, record: dict[str, Any]) -> None:
        self._time_ms = max(self._time_ms, record["time_ms"])
        if record["kind"] == "metrics":
            self._last_step.update(dict.fromkeys(record["values"], record["step"]))
        elif record["kind"] == "go_back":
            for key, last in self._last_step.items():
                if not key.startswith(SYSTEM):
                    self._last_step[key] = min(last, record["step"])


def _cut_torn_line(path: Path) -> None:
    """A process killed while writing leaves half a line at the end; nothing after it was written."""
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end:  # from the end: the file may be larger than the memory
            start = max(0, end - BLOCK)
            file.seek(start)
            if (newline := file.read(end - start).rfind(b"\n")) >= 0:
                end = start + newline + 1
                break
            end = start
        file.truncate(end)


def read_lines(directory: Path, offset: int) -> Iterator[bytes]:
    """The records from a byte offset on, as they are in the file."""
    with (directory / SPOOL).open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return  # being written
            yield line


def read_records(directory: Path, offset: int) -> Iterator[tuple[dict[str, Any], int]]:
    """The records from a byte offset on, each with the offset behind it."""
    for line in read_lines(directory, offset):
        offset += len(line)
        yield json.loads(line), offset


def last_go_back(directory: Path) -> bytes | None:
    """The line of the last go_back(); None if there was none."""
    found = None
    for line in read_lines(directory, 0):  # which reads a million lines a second, where parsing them takes seconds
        if line.startswith(b'{"kind": "go_back"'):
            found = line
    return found


def sent_offset(directory: Path) -> int:
    try:
        return json.loads((directory / SENT).read_text())["offset"]
    except FileNotFoundError:
        return 0


def note_sent(directory: Path, offset: int) -> None:
    """Note that MLflow has every record before this byte offset."""
    replace_file(directory / SENT, json.dumps({"offset": offset}).encode())


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file, so that a power failure leaves the old content or the new one."""
    beside = path.with_name(path.name + ".new")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder as durable as the files."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

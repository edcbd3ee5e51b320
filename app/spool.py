"""Records of a run in a file, written before anything is done with them."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SPOOL, SENT = "records.jsonl", "sent.json"
BLOCK = 2**16


class Spool:
    """Records in a file, one JSON object a line, each written once.

    A metric's steps only rise: what a resumed run computes again is the same and not recorded again.
    """

    def __init__(self, directory: Path):
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._last_step: dict[str, int] = {}
        path = directory / SPOOL
        if path.exists():
            _cut_torn_line(path)
            for record, _ in read_records(directory, 0):
                if record["kind"] == "metrics":
                    self._last_step.update(dict.fromkeys(record["values"], record["step"]))
        self._file = path.open("a", encoding="utf-8")

    def close(self) -> None:
        self._file.close()

    def append(self, kind: str, **content: Any) -> None:
        self._file.write(json.dumps({"kind": kind, "time_ms": int(time.time() * 1000), **content}) + "\n")
        self._file.flush()

    def append_metrics(self, step: int, values: dict[str, float]) -> None:
        fresh = {key: value for key, value in values.items() if step > self._last_step.get(key, -1)}
        if fresh:
            self._last_step.update(dict.fromkeys(fresh, step))
            self.append("metrics", step=step, values=fresh)

    def go_back(self, step: int) -> None:
        """What is computed again after this step differs, and is recorded too."""
        for key, last in self._last_step.items():
            if not key.startswith("system/"):  # these have numbers of their own
                self._last_step[key] = min(last, step)

    def next_step(self, key: str) -> int:
        return self._last_step.get(key, -1) + 1


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


def read_records(directory: Path, offset: int) -> Iterator[tuple[dict[str, Any], int]]:
    """The records from a byte offset on, each with the offset behind it."""
    with (directory / SPOOL).open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return  # being written
            offset += len(line)
            yield json.loads(line), offset


def sent_offset(directory: Path) -> int:
    try:
        return json.loads((directory / SENT).read_text())["offset"]
    except FileNotFoundError:
        return 0

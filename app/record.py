"""The record of a run whose files lie in an object store: stored next to each checkpoint, restored on any machine.

The spool (app/spool.py) lies on the disk of the machine that the command runs on, and may be lost with it. So each
checkpoint has what no other machine could know in its file record.jsonl. Line 1 is a JSON object:

    run          the run's name: a checkpoint may be a copy of another run's
    time_ms      when this was written
    last_steps   the last recorded step of each metric
    files        the files that the records below refer to, in base64

The lines below are the spool's records that MLflow has not got yet. At the end of a command the same file lies in the
run's folder, if records are left that could not be delivered. What MLflow got after a checkpoint was written is found
out when they are delivered (app/deliver.py).
"""

import base64
import hashlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from app.runs import checkpoint_names
from app.spool import SYSTEM, SYSTEM_EVERY_S, Spool, last_go_back, read_lines, sent_offset
from app.storage import Storage

RECORD, BAD_SAMPLES = "record.jsonl", "bad_samples.txt"


def snapshot(spool: Spool, run_name: str) -> bytes:
    """Return the content of record.jsonl for the spool as it stands."""
    lines = list(read_lines(spool.directory, sent_offset(spool.directory)))
    went_back = last_go_back(spool.directory)
    if went_back is not None and went_back not in lines:
        lines.insert(0, went_back)
    paths = {name: spool.directory / name for name in sorted({BAD_SAMPLES, *map(_file, lines)} - {""})}
    header = {
        "run": run_name,
        "time_ms": int(time.time() * 1000),
        "last_steps": spool.last_steps(),
        "files": {name: base64.b64encode(path.read_bytes()).decode() for name, path in paths.items() if path.exists()},
    }
    return json.dumps(header).encode() + b"\n" + b"".join(lines)


def restore(spool: Spool, storage: Storage, run_name: str) -> bool:
    """Add to the spool what it lacks of the run's newest record in the storage. Return False if there is none."""
    found = False
    for header, lines in _newest(storage, run_name):
        found = True
        missing = [line for line in spool.missing(lines) if _is_inside(json.loads(line).get("file", ""))]
        for name in set(map(_file, missing)) & header["files"].keys() - {BAD_SAMPLES}:
            path = spool.directory / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(base64.b64decode(header["files"][name]))
        if BAD_SAMPLES in header["files"]:
            _add_lines(spool.directory / BAD_SAMPLES, base64.b64decode(header["files"][BAD_SAMPLES]))
        # System metrics follow the clock: leave out the numbers that the other machine may have used since.
        passed = math.ceil(max(0.0, time.time() - header["time_ms"] / 1000) / SYSTEM_EVERY_S)
        floors = {key: step + passed * key.startswith(SYSTEM) for key, step in header["last_steps"].items()}
        spool.restore(missing, floors)
    return found


def store_rest(storage: Storage, content: bytes | None) -> None:
    """Store a snapshot at the end of a command, or remove an earlier one if nothing is left (None)."""
    if content is not None:
        storage.write(RECORD, content)
    elif RECORD in storage.names(""):
        storage.delete(RECORD)


def _newest(storage: Storage, run_name: str) -> Iterator[tuple[dict[str, Any], list[bytes]]]:
    """The header and the lines of the newest checkpoint's record, and of the one that a command left at its end."""
    for name in reversed(checkpoint_names(Storage(storage.uri("checkpoints")))):
        if (content := _verified(storage, f"checkpoints/{name}")) and (found := _parsed(content, run_name)):
            yield found
            break
    if (content := storage.read(RECORD)) and (found := _parsed(content, run_name)):
        yield found


def _verified(storage: Storage, folder: str) -> bytes | None:
    """The record in a checkpoint's folder; None if there is none, or it is not what the manifest says."""
    content, manifest = storage.read(f"{folder}/{RECORD}"), storage.read(f"{folder}/manifest.json")
    if content is None or manifest is None:
        return None
    try:
        expected = json.loads(manifest)[RECORD]["sha256"]
    except (ValueError, KeyError, TypeError):  # a damaged manifest
        return None
    return content if hashlib.sha256(content).hexdigest() == expected else None


def _parsed(content: bytes, run_name: str) -> tuple[dict[str, Any], list[bytes]] | None:
    """None if it is another run's."""
    header, *lines = content.splitlines(keepends=True)
    values = json.loads(header)
    return (values, lines) if values["run"] == run_name else None


def _file(line: bytes) -> str:
    """The file that a record refers to; empty if it refers to none."""
    return str(json.loads(line)["file"]) if line.startswith((b'{"kind": "artifact"', b'{"kind": "pictures"')) else ""


def _is_inside(name: str) -> bool:
    """False for a file outside the spool's folder: who can write to the storage must not reach it."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _add_lines(path: Path, content: bytes) -> None:
    """Add those that the file lacks."""
    known = path.read_bytes() if path.exists() else b""
    path.write_bytes(b"".join(dict.fromkeys([*known.splitlines(True), *content.splitlines(True)])))

"""MLflow's SQLite database: created whole or not at all."""

import contextlib
import fcntl
import os
from pathlib import Path

from app.spool import sync_folder


def ensure_database(uri: str) -> None:
    """Create the SQLite database that the tracking URI names, with MLflow's tables, unless it exists.

    MLflow creates its tables in many steps, and never opens a database again that was left in between. So the
    database is created under another name and gets its own once it is complete: a process that is killed at any
    moment leaves either no database or one that opens. URIs of other databases are left to MLflow.
    """
    from sqlalchemy.engine import make_url

    url = make_url(uri)
    if url.get_backend_name() != "sqlite" or not url.database or url.database.startswith((":", "file:")):
        return
    path = Path(url.database)
    new = path.with_name(f".{path.name}.new")
    if path.exists() and not new.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f".{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process
        for leftover in (new, *(new.with_name(new.name + end) for end in ("-journal", "-wal", "-shm"))):
            leftover.unlink(missing_ok=True)
        if path.exists():
            return
        import mlflow

        mlflow.MlflowClient(url.set(database=str(new)).render_as_string(hide_password=False)).search_experiments(
            max_results=1
        )
        with new.open("rb") as file:
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # somebody else, as mlflow ui, has created it meanwhile
            _link(new, path)
        new.unlink(missing_ok=True)
        sync_folder(path.parent)


def _link(new: Path, path: Path) -> None:
    """Give the file its other name. Raises FileExistsError rather than replace a file."""
    try:
        os.link(new, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links; MLflow takes an empty file for a new database
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        os.replace(new, path)

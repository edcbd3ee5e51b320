"""MLflow's database: whatever happens while it is created, it opens."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from app import database
from app.database import ensure_database

pytestmark = pytest.mark.filterwarnings("ignore")  # mlflow's and alembic's own

# Forks children that create a database and are killed at moments spread over the time that it takes; of each, two more
# see whether MLflow opens what is left: as it is, if it is there, and after another try to create it.
KILLS = 5
KILLER = """
import logging, os, signal, sys, time
import mlflow, mlflow.store.db.utils, mlflow.store.tracking.sqlalchemy_store
from app.database import ensure_database
logging.disable()

def child(work, uri):
    pid = os.fork()
    if not pid:
        try:
            work(uri)
            os._exit(0)
        finally:
            os._exit(1)
    return pid

def opens(uri):
    mlflow.MlflowClient(uri).create_experiment(str(os.getpid()))

def ends_well(work, uri):
    return os.waitpid(child(work, uri), 0)[1] == 0

folder, kills = sys.argv[1], int(sys.argv[2])
began = time.monotonic()
assert ends_well(ensure_database, f"sqlite:///{folder}/whole.db")
takes = time.monotonic() - began
left = []
for number in range(kills):
    path = f"{folder}/{number}/mlflow.db"
    os.mkdir(os.path.dirname(path))
    pid = child(ensure_database, f"sqlite:///{path}")
    time.sleep(takes * (number + 0.5) / kills)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    left.append(os.path.exists(os.path.dirname(path) + "/.mlflow.db.new"))
    uri = f"sqlite:///{path}"
    assert not os.path.exists(path) or ends_well(opens, uri), f"kill {number}: what is left does not open"
    assert ends_well(ensure_database, uri), f"kill {number}: it cannot be created again"
    assert ends_well(opens, uri), f"kill {number}: it does not open"
assert any(left), "no kill came while the tables were made"
"""


def test_a_kill_at_any_moment_leaves_no_database_or_one_that_opens(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path), str(KILLS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for number in range(KILLS):
        assert sorted(os.listdir(tmp_path / str(number))) == [".mlflow.db.lock", "mlflow.db"]


def is_opened(path: Path) -> bool:
    import mlflow

    return len(mlflow.MlflowClient(f"sqlite:///{path}").search_experiments()) > 0


def test_two_that_create_it_at_once_get_the_same(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    threads = [threading.Thread(target=ensure_database, args=(f"sqlite:///{path}",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_opened(path)


@pytest.mark.parametrize("has_links", [True, False])
def test_one_that_appears_meanwhile_is_left_as_it_is(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, give_name = tmp_path / "mlflow.db", database._link

    def appears(new: Path, target: Path) -> None:
        target.write_bytes(b"somebody else's")
        give_name(new, target)

    def link(*_: object) -> None:
        raise FileExistsError if has_links else PermissionError

    monkeypatch.setattr(database, "_link", appears)
    monkeypatch.setattr(os, "link", link)
    ensure_database(f"sqlite:///{path}")
    assert path.read_bytes() == b"somebody else's"
    assert sorted(os.listdir(tmp_path)) == [".mlflow.db.lock", "mlflow.db"]


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", link)
    ensure_database(f"sqlite:///{tmp_path}/mlflow.db")
    assert is_opened(tmp_path / "mlflow.db")


def test_one_that_exists_and_other_servers_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"")
    for uri in (f"sqlite:///{tmp_path}/mlflow.db", "sqlite://", "postgresql://host/mlflow", "http://host:5000"):
        ensure_database(uri)
    assert os.listdir(tmp_path) == ["mlflow.db"]

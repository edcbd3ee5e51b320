"""Object stores that fail: what passes is retried, what stays is told, and what a person must mend is bad input."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from app import object_store, retry
from app.errors import BadInput, Unavailable
from app.object_store import ObjectStore, open_bucket
from app.storage import Storage
from tests.faulty import FAULTS, FaultyProxy, faulty
from tests.stores import BUCKET

ON_RCLONE = pytest.mark.parametrize("root", ["rclone"], indirect=True)
ON_MOTO = pytest.mark.parametrize("root", ["moto"], indirect=True)


@pytest.fixture
def proxy(root: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Between Storage and its server."""
    with faulty(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


def use_everything(storage: Storage, tmp_path: Path) -> None:
    data = os.urandom(6 * 2**20)
    for number in range(3):
        folder = storage.new_folder()
        (folder / "model").write_bytes(data)
        (folder / "manifest.json").write_bytes(b"{}")
        storage.put_folder(folder, f"c{number}", last="manifest.json")
        storage.write("run.json", str(number).encode())
        assert storage.read("run.json") == str(number).encode()
        assert storage.read("none") is None
        assert storage.names("") == [f"c{number}", "run.json"]
        with storage.local_folder(f"c{number}") as local:
            assert (local / "model").read_bytes() == data
        with storage.open(f"c{number}/model", len(data)) as file:
            file.seek(2**20)
            assert file.read(1000) == data[2**20 : 2**20 + 1000]
        storage.delete_folder(f"c{number}")
    assert [(file.path, file.size) for file in storage.files()] == [("run.json", 1)]


@pytest.mark.parametrize("root", ["rclone", "moto"], indirect=True)
@pytest.mark.parametrize("fault", FAULTS)
def test_requests_that_fail_now_and_then_change_nothing(
    root: str, proxy: FaultyProxy, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "RETRY_S", 5.0)
    monkeypatch.setattr(object_store, "STALL_SHARE", 0.1)
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.05)
    proxy.one_in(6, faults=(fault,))
    use_everything(Storage(root), tmp_path)
    assert proxy.counts[fault] > 1


@ON_RCLONE
@pytest.mark.parametrize("fault", ["busy", "reset", "stall"])
def test_a_store_that_stays_away_is_unavailable(
    root: str, proxy: FaultyProxy, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "RETRY_S", 1.0)
    storage = Storage(root)
    storage.write("a", b"1")
    proxy.fault = lambda method, path: fault
    began = time.monotonic()
    with pytest.raises(Unavailable, match=rf"reading {root}/a failed for 1 s: "):
        storage.read("a")
    assert time.monotonic() - began < 10  # and not twice as long for each layer that repeats
    for use in (lambda: storage.write("a", b"2"), lambda: storage.names(""), lambda: storage.delete("a")):
        with pytest.raises(Unavailable, match=rf"(writing|listing|deleting) {root}\S* failed"):
            use()
    proxy.fault = lambda method, path: None
    assert storage.read("a") == b"1"


@ON_RCLONE
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"AWS_ACCESS_KEY_ID": "nobody"}, r"was refused \(InvalidAccessKeyId.*; allow it, or set AWS_ACCESS_KEY_ID"),
        ({"AWS_SECRET_ACCESS_KEY": "x"}, r"was refused \(SignatureDoesNotMatch.*; allow it, or set AWS_ACCESS_KEY_ID"),
        ({"AWS_ENDPOINT_URL": "ftp://host"}, r"--output-dir: \w+ s3://\S+ failed: .* ftp://host"),
    ],
)
def test_what_a_person_must_mend_is_bad_input_at_once(
    root: str, variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    storage = Storage(root)
    for use in (lambda: storage.read("a"), lambda: storage.names(""), lambda: storage.write("a", b"1")):
        with pytest.raises(BadInput, match=message):
            use()


@pytest.mark.parametrize("root", ["rclone", "moto"], indirect=True)
def test_a_bucket_that_is_not_there(root: str) -> None:
    storage = Storage("s3://nobodys-bucket/runs", "--data-dir")
    for use in (lambda: storage.read("a"), lambda: storage.names(""), lambda: storage.write("a", b"1"), storage.files):
        with pytest.raises(BadInput, match="--data-dir s3://nobodys-bucket/runs: there is no bucket nobodys-bucket"):
            use()


@ON_RCLONE
def test_an_object_in_another_region(root: str, proxy: FaultyProxy) -> None:
    proxy.fault = lambda method, path: "moved"
    with pytest.raises(BadInput, match=r"it lies in another region .*; set AWS_REGION to that"):
        Storage(root).read("a")


def test_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(object_store, "METADATA_ADDRESS", ("127.0.0.1", 9))
    find_spec = object_store.importlib.util.find_spec
    monkeypatch.setattr(
        object_store.importlib.util, "find_spec", lambda name: None if name == "boto3" else find_spec(name)
    )
    open_bucket.cache_clear()
    with pytest.raises(BadInput, match=r"--output-dir s3://b/r: no credentials were found; set AWS_ACCESS_KEY_ID and"):
        Storage("s3://b/r").read("a")


@ON_RCLONE
def test_credentials_of_a_profile(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, secret = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    (tmp_path / "credentials").write_text(f"[mine]\naws_access_key_id={key}\naws_secret_access_key={secret}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "mine")
    Storage(root).write("a", b"1")
    assert Storage(root).read("a") == b"1"


@ON_MOTO
def test_a_region_that_is_not_given_is_asked_for(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import requests

    asked: list[str] = []

    def head(url: str, **_: object) -> SimpleNamespace:
        asked.append(url)
        return SimpleNamespace(headers={"x-amz-bucket-region": "eu-west-1"})

    monkeypatch.setattr(requests, "head", head)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.delenv("AWS_REGION")
    store = ObjectStore(root).connect()
    assert asked == [f"https://s3.amazonaws.com/{BUCKET}"]
    assert store.config["region"] == "eu-west-1"  # type: ignore[union-attr]  # an S3Store


def test_obstore_is_not_imported_without_need() -> None:
    code = "import sys, app.storage, app.lock, app.data.cache as c; c.Storage('s3://b/r'); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "app.object_store" in modules
    assert not {"obstore", "boto3", "pyarrow", "requests"} & set(modules)


@ON_MOTO
def test_a_checkpoint_is_whole_by_what_is_written_last_and_deleted_first(
    root: str, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "RETRY_S", 0.2)
    storage = Storage(root)

    def put() -> None:
        folder = storage.new_folder()
        for name in ("a", "manifest.json", "z"):
            (folder / name).write_bytes(b"1")
        storage.put_folder(folder, "c", last="manifest.json")

    def fails_at(number: int, method: str) -> None:
        """From the number-th request of this kind on, the store answers no more."""
        seen: list[str] = []
        proxy.fault = lambda kind, path: (
            "busy" if len(seen) >= number or (kind == method and seen.append(path)) else None
        )

    put()
    fails_at(2, "PUT")
    with pytest.raises(Unavailable):
        put()  # in the place of the first one: which does not pass for whole any more
    proxy.fault = lambda method, path: None
    assert storage.names("c") == ["a", "z"]
    put()
    fails_at(1, "POST")
    with pytest.raises(Unavailable):
        storage.delete_folder("c")
    proxy.fault = lambda method, path: None
    assert storage.names("c") == ["a", "z"]
    storage.delete_folder("c")
    assert storage.names("") == []

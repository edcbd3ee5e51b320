"""Tables that are read a row group at a time: every sample once, by few reads, the same at any number of ranks."""

import errno
import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from app import retry
from app.config import Config
from app.data.datasets import check_data, load_splits
from app.data.loader import Reader
from app.data.sampling import (
    EvaluationBatches,
    Request,
    TrainingBatches,
    build_order,
    build_schedule,
    rank_slice,
    streamed_order,
)
from app.distributed import World
from app.errors import BadInput, Unavailable
from app.storage import Storage
from tests.common import build_training, loader_for, on_ranks
from tests.stores import upload

Write = Callable[..., Path]


@given(
    blocks=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    lanes=st.integers(1, 20),
    batch_size=st.integers(1, 24),
    seed=st.integers(0, 3),
)
def test_each_sample_once_in_another_order_each_epoch(
    blocks: list[int], lanes: int, batch_size: int, seed: int
) -> None:
    sizes = np.array(blocks)
    first, second = (streamed_order(sizes, lanes, batch_size, seed, epoch) for epoch in (0, 1))
    assert np.array_equal(np.sort(first), np.arange(sum(blocks)))
    assert np.array_equal(np.sort(second), np.arange(sum(blocks)))
    assert np.array_equal(first, streamed_order(sizes, lanes, batch_size, seed, 0))
    if sum(blocks) > 20:
        assert not np.array_equal(first, second)


@given(
    num_blocks=st.integers(1, 80), block=st.integers(1, 60), lanes=st.integers(1, 20), batch_size=st.integers(1, 130)
)
def test_a_batch_is_drawn_from_all_lanes(num_blocks: int, block: int, lanes: int, batch_size: int) -> None:
    order = streamed_order(np.full(num_blocks, block), lanes, batch_size, seed=0, epoch=0)
    num_full, lanes = len(order) // batch_size, min(lanes, batch_size)
    batches = (order // block)[: num_full * batch_size].reshape(-1, batch_size)  # the block of each sample
    if block <= num_full * (batch_size // lanes):  # none is longer than a lane
        assert min(len(set(batch)) for batch in batches) >= lanes


@pytest.mark.parametrize("batch_size", [50, 61, 100, 127, 128])
def test_a_rank_reads_blocks_of_its_own(batch_size: int) -> None:
    order = streamed_order(np.full(64, 1000), 16, batch_size, seed=0, epoch=0)
    batches = np.split(order // 1000, np.arange(batch_size, 64_000, batch_size))
    assert min(len(set(batch)) for batch in batches[:-1]) >= 16
    assert len(set(batches[-1])) >= min(16, len(batches[-1])) - 1  # also what is left over at the end
    for world_size in (1, 2, 3, 4, 8, 16):
        shares = [[rank_slice(batch, World(rank, world_size)) for batch in batches] for rank in range(world_size)]
        assert max(len(set(share)) for own in shares for share in own) <= 16 / world_size + 2
        read = [len(set(np.concatenate(own))) for own in shares]
        # Its own 64 / N, and those that its lanes have in common with others.
        assert sum(read) <= 64 + 2 * 16
        assert max(read) <= 64 / world_size + 6


def image(value: int, side: int = 8) -> bytes:
    file = io.BytesIO()
    Image.new("L", (side, side), value).save(file, "png")
    return file.getvalue()


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a split: files of so many rows, in row groups of five. Sample n of class n % 2 is an image of one grey."""

    def written(split: str = "train", files: tuple[int, ...] = (23, 12), **columns: Any) -> Path:
        (tmp_path / "table" / split).mkdir(parents=True, exist_ok=True)
        begun = 0
        for number, rows in enumerate(files):
            ids = range(begun, begun + rows)
            begun += rows
            default = {
                "image": [image(4 * i) for i in ids],
                "label": [i % 2 for i in ids],
                "height": [float(i) for i in ids],
                "width": [2 * i for i in ids],
            }
            given = {name: values(ids) for name, values in columns.items()}
            table = {name: values for name, values in {**default, **given}.items() if values is not None}
            pq.write_table(pa.table(table), tmp_path / "table" / split / f"{number}.parquet", row_group_size=5)
        return tmp_path / "table"

    return written


def config(location: Path | str, **settings: Any) -> Config:
    own = {"dataset": "parquet", "data_dir": str(location), "batch_size": 8, "image_size": 8, "image_channels": 1}
    return Config(**{**own, "image_column": "image", "lanes": 4, **settings})


def numbers(location: Path | str, **settings: Any) -> Config:
    return config(location, **{"image_column": None, "image_size": None, "image_channels": None, **settings})


def test_images_by_their_ids(write: Write) -> None:
    write("val", files=(6,))
    splits = load_splits(config(write()))
    assert splits.info.input_shape == (1, 8, 8)
    assert splits.info.class_names == ("0", "1")
    assert len(splits.train.labels) == 35
    ids = np.array([34, 0, 24, 22, 23, 1])
    assert splits.train.inputs(ids)[:, 0, 0, 0].tolist() == (4 * ids).tolist()
    assert splits.train.labels[ids].tolist() == (ids % 2).tolist()
    assert splits.train.inputs(ids[:0]).shape == (0, 1, 8, 8)
    assert splits.val.shown(np.array([3]))["images"][0, 0, 0, 0] == 12


def test_numbers_and_labels_that_are_strings(write: Write) -> None:
    own = {"label": lambda ids: ["yes" if i % 3 else "no" for i in ids], "image": lambda ids: None}
    write("val", files=(6,), **own)
    splits = load_splits(numbers(write(**own)))
    assert splits.info.class_names == ("no", "yes")
    assert splits.info.dtype == "float32"
    assert splits.train.inputs(np.array([30, 2])).tolist() == [[30.0, 60.0], [2.0, 4.0]]
    assert splits.train.labels[:4].tolist() == [0, 1, 1, 0]
    assert splits.train.shown(np.array([0])) == {}


def test_a_store_and_images_as_hugging_face_writes_them(write: Write, root: str) -> None:
    in_structs = {"image": lambda ids: [{"bytes": image(4 * i), "path": None} for i in ids]}
    write("val", files=(6,), **in_structs)
    here, location = load_splits(config(write(**in_structs))), upload(write(**in_structs), root)
    check_data(config(location))
    there = load_splits(config(location))
    ids = np.arange(35)
    assert torch.equal(here.train.inputs(ids), sent(there.train).inputs(ids))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The row groups that are read, in order."""
    read, original = [], pq.ParquetFile.read_row_group

    def counted(self: Any, group: int, **more: Any) -> Any:
        read.append(group)
        return original(self, group, **more)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    return read


@pytest.mark.parametrize("batch_size", [8, 13, 32])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_row_group_is_read_about_once_and_those_of_a_batch_are_held(
    write: Write, read: list[int], batch_size: int, world_size: int
) -> None:
    write("val", files=(6,))
    settings = config(write(files=(400, 400)), epochs=1, lanes=8, batch_size=batch_size)
    for rank in range(world_size):
        train: Any = load_splits(settings).train
        most = 0
        order = build_order(settings, train.labels, train.facts)
        for request in TrainingBatches(order, build_schedule(settings, order), World(rank, world_size)):
            train.inputs(request.ids)
            most = max(most, len(set(request.ids // 5)))
            assert len(train._held) <= most
    # Of 160, and once more where two lanes have one in common, or two ranks a lane, which has up to 2/13 of them.
    assert 160 <= len(read) <= 160 + 8 + (25 * (world_size - 1) if batch_size == 13 else 0)


def test_a_damaged_image_costs_no_other_read(write: Write, read: list[int]) -> None:
    write("val", files=(6,))
    location = write(files=(400,), image=lambda ids: [b"no image" if i % 10 == 7 else image(1) for i in ids])
    settings = config(location, epochs=1, max_bad_samples=40)
    train = load_splits(settings).train
    order, reader = build_order(settings, train.labels, train.facts), Reader(train, skip_unreadable=True)
    schedule = build_schedule(settings, order)
    batches = [reader.__getitems__(request) for request in TrainingBatches(order, schedule, World(0, 1))]
    assert sum(len(batch["unreadable"]) for batch in batches) == 40
    assert 80 <= len(read) <= 80 + 4


def test_an_evaluation_reads_in_order(write: Write, read: list[int]) -> None:
    write(files=(6,))
    val: Any = load_splits(config(write("val", files=(203, 100)))).val
    for rank in range(2):
        for request in EvaluationBatches(303, 32, World(rank, 2)):
            val.inputs(request.ids)
            assert len(val._held) <= 16 // 5 + 2
    assert 61 <= len(read) <= 62


class FailingFile(io.FileIO):
    """A file that fails as often as `left` says, when it is opened or, if late, when it is read."""

    left, late = 0.0, False

    def __init__(self, path: Path):
        if not self.late:
            self._fail()
        super().__init__(path)

    def read(self, size: int | None = -1, /) -> bytes:
        self._fail()
        return super().read(size)

    def _fail(self) -> None:
        if type(self).left > 0:
            type(self).left -= 1
            raise OSError(errno.ESTALE, "Stale file handle")


@pytest.mark.parametrize("late", [False, True])
def test_a_store_that_does_not_answer_is_asked_again_and_is_no_bad_sample(
    write: Write, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    write("val", files=(6,))
    location, ids = write(), np.arange(7)
    samples = load_splits(config(location)).train
    expected = samples.inputs(ids)
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(Storage, "open", lambda storage, path, size: FailingFile(location / path))
    monkeypatch.setattr(FailingFile, "late", late)
    monkeypatch.setattr(FailingFile, "left", 2)
    batch = Reader(sent(samples), skip_unreadable=True).__getitems__(Request(0, 0, ids, 7, 7))
    assert torch.equal(batch["inputs"], expected)
    assert batch["unreadable"] == []
    assert FailingFile.left == 0
    monkeypatch.setattr(FailingFile, "left", math.inf)
    monkeypatch.setattr(retry, "RETRY_S", 0.05)
    with pytest.raises(Unavailable, match=r"reading .*0.parquet failed .*: Stale file handle"):
        Reader(sent(samples), skip_unreadable=True).__getitems__(Request(0, 0, ids, 7, 7))


def test_a_file_that_may_not_be_read_is_no_bad_sample(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise BadInput("--data-dir: reading s3://bucket/0.parquet was refused")

    write("val", files=(6,))
    location, ids = write(), np.arange(7)
    samples = load_splits(config(location)).train
    monkeypatch.setattr(Storage, "open", lambda storage, path, size: Refused(location / path))
    with pytest.raises(OSError, match="was refused"):
        Reader(sent(samples), skip_unreadable=True).__getitems__(Request(0, 0, ids, 7, 7))


def sent(samples: Any) -> Any:
    """The set as a process of the loader gets it: nothing read, no connection."""
    return pickle.loads(pickle.dumps(samples))


def test_a_damaged_row_group_is_bad_data_at_once(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("val", files=(6,))
    location = write()
    samples, path = load_splits(config(location)).train, location / "train" / "0.parquet"
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).dictionary_page_offset
    with path.open("r+b") as file:
        file.seek(start)
        file.write(bytes(20))
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("waited"))
    assert len(samples.inputs(np.arange(5))) == 5
    with pytest.raises(BadInput, match=r"train/0.parquet, row group 1 is damaged"):
        samples.inputs(np.arange(10))


def trained(location: str) -> list[float]:
    from app.loop import train

    settings = numbers(location, epochs=2, lr=1e-3, loader_workers=0)
    splits = load_splits(settings)
    torch.manual_seed(0)
    training = build_training(settings, splits, linear(2, (2,)))
    return [result.loss for result in train(training, loader_for(training, splits))]


def linear(num_classes: int, input_shape: tuple[int, ...]) -> torch.nn.Module:
    return torch.nn.Linear(input_shape[0], num_classes)


def test_any_number_of_ranks_gives_the_losses_of_one(write: Write) -> None:
    write("val", files=(6,))
    location = str(write())
    [alone] = on_ranks(1, trained, location)
    assert len(alone) == 10
    for world_size in (2, 3):
        for losses in on_ranks(world_size, trained, location):
            assert losses == pytest.approx(alone, rel=1e-5)


def test_what_cannot_be_trained_on_is_said(write: Write, tmp_path: Path) -> None:
    location = write()
    cases: list[tuple[Config, str]] = [
        (config(location), "has no folder val with .parquet files"),
        (
            config("nosuch://bucket/table"),
            "--data-dir nosuch://bucket/table: give a path, file:///PATH, s3://BUCKET/PATH",
        ),
    ]
    for settings, message in cases:
        with pytest.raises(BadInput, match=message):
            check_data(settings)
    write("val", files=(6,))
    for settings, message in [
        (
            config(location, image_column="picture"),
            r"--image-column picture: .*0.parquet has image, label, height, width",
        ),
        (config(location, label_column="class"), "--label-column class"),
        (config(location, label_column="height"), "has double: it must be integers or strings"),
        (config(location, num_workers=36, batch_size=36), "only 35 training samples"),
    ]:
        with pytest.raises(BadInput, match=message):
            check_data(settings)
    write("val", files=(6,), label=lambda ids: [2 for _ in ids])
    with pytest.raises(BadInput, match="val has 2, which train has not"):
        check_data(config(location))
    write("val", files=(6,), label=lambda ids: ["a" for _ in ids])
    with pytest.raises(BadInput, match="val has a, which train has not"):
        check_data(config(location))
    write("val", files=(6,), label=lambda ids: [None, *[0 for _ in ids[1:]]])
    with pytest.raises(BadInput, match="1 empty values: it must be"):
        check_data(config(location))
    (location / "val" / "0.parquet").write_bytes(b"no table")
    with pytest.raises(BadInput, match=r"val/0.parquet is damaged"):
        check_data(config(location))


def test_tables_that_do_not_fit_are_refused(write: Write) -> None:
    write("val", files=(6,))
    none: dict[str, Any] = {
        "label": lambda ids: pa.array([], pa.int64()),
        "image": lambda ids: pa.array([], pa.binary()),
    }
    location = write(files=(0,), **none)
    with pytest.raises(BadInput, match="train has no rows"):
        check_data(config(location))
    write()
    write("val", files=(0,), **none)
    with pytest.raises(BadInput, match="val has no rows"):
        check_data(config(location))
    write("val", files=(6,))
    write("test", files=(6,), width=lambda ids: None)
    check_data(config(location))
    with pytest.raises(
        BadInput, match=r"test/0.parquet has no column of numbers width, as the first file of train has"
    ):
        check_data(numbers(location))
    write("test", files=(6,), width=lambda ids: ["wide" for _ in ids])
    with pytest.raises(
        BadInput, match=r"test/0.parquet has no column of numbers width, as the first file of train has"
    ):
        check_data(numbers(location))
    strings = {name: lambda ids: ["a" for _ in ids] for name in ("height", "width")}
    write("val", files=(6,), **strings)
    with pytest.raises(BadInput, match="no columns of numbers beside --label-column label; of images"):
        check_data(numbers(write(**strings)))


@pytest.mark.parametrize(
    "column",
    [[1.0] * 6, ["a"] * 6, [{"path": "a.png"}] * 6, [{"bytes": "a"}] * 6],
    ids=["float", "str", "path", "text"],
)
def test_a_column_that_has_no_images(write: Write, column: list[Any]) -> None:
    write("val", files=(6,), image=lambda ids: column)
    with pytest.raises(BadInput, match=r"--image-column image: .*val/0.parquet has .*: it must be the bytes of images"):
        check_data(config(write()))


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_labels_and_images_as_polars_and_pandas_write_them(write: Write, kind: pa.DataType) -> None:
    def own(ids: range) -> pa.Array:
        return pa.array(["yes" if i % 3 else "no" for i in ids], kind)

    images = {"image": lambda ids: pa.array([image(4 * i) for i in ids], pa.large_binary())}
    write("val", files=(6,), label=own, **images)
    splits = load_splits(config(write(label=own, **images)))
    assert splits.info.class_names == ("no", "yes")
    assert splits.train.labels[:4].tolist() == [0, 1, 1, 0]
    assert splits.train.inputs(np.array([3]))[0, 0, 0, 0] == 12


def test_a_damaged_sample_is_named(write: Write) -> None:
    write("val", files=(6,))
    location = write(image=lambda ids: [b"no image" if i == 7 else image(i) for i in ids])
    with pytest.raises(BadInput, match=r"train/0.parquet, row 3 of row group 1 is no readable image"):
        load_splits(config(location)).train.inputs(np.arange(10))
    location = write(height=lambda ids: [float("nan") if i == 7 else 1.0 for i in ids])
    with pytest.raises(BadInput, match=r"train/0.parquet, row 3 of row group 1: height is no number"):
        load_splits(numbers(location)).train.inputs(np.arange(10))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler": "balanced"}, "--sampler balanced takes samples from anywhere"),
        ({"data_dir": None}, "--dataset parquet needs --data-dir"),
        ({"image_column": None, "image_channels": None}, "--image-size 8 has an effect only with images"),
        (
            {"dataset": "digits", "data_dir": None, "image_channels": None, "lanes": 16},
            "--image-column image has an effect only",
        ),
    ],
)
def test_settings_that_do_not_go_with_it(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        config("/table", **settings)

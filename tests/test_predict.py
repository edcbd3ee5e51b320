"""Labels and probabilities from a checkpoint alone: the numbers, and the inputs that are of no use."""

import csv
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from torch import nn

from app.checkpoint import write_folder
from app.data.images import decode_image
from app.data.samples import DataInfo
from app.data.tokens import encode
from app.errors import BadInput, TrainingFailed
from app.evaluate import main as evaluate
from app.output import File, check_output
from app.predict import main
from app.predictor import Predictor, result_schema
from app.trained import Trained, load_trained
from tests.common import PlainNet, write_images
from tests.test_evaluate import trained_run

WORDS = [f"word{number}" for number in range(60)]


def random_texts(count: int) -> list[str]:
    generator = np.random.default_rng(0)
    return [" ".join(generator.choice(WORDS, generator.integers(1, 40))) for _ in range(count)]


def write_table(path: Path, texts: list[str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        rows.writerows((text, ("good", 'b,"ad', "=cmd")[number % 3]) for number, text in enumerate(texts))
    return path


def text_run(tmp_path: Path, model: str = "text-lstm", **settings: Any) -> str:
    table = write_table(tmp_path / "train.csv", random_texts(90))
    small = {"embedding_size": 16, "hidden_size": 16, "max_length": 20, "num_heads": 2}
    small = {name: value for name, value in small.items() if name != "num_heads" or model == "text-transformer"}
    trained_run(tmp_path, dataset="text", data_dir=str(table), model=model, **{**small, **settings})
    return str(tmp_path / "runs" / "r")


def image_run(tmp_path: Path, **settings: Any) -> str:
    write_images(tmp_path / "photos", {"cat": 15, "dog": 14}, size=(40, 32))
    settings = {"image_size": 28, "model": "mnist-cnn", **settings}
    trained_run(tmp_path, dataset="image-folder", data_dir=str(tmp_path / "photos"), **settings)
    return str(tmp_path / "runs" / "r")


def predicted(words: list[str], tmp_path: Path, name: str = "out.jsonl") -> list[dict[str, Any]]:
    assert main([*words, "--output", str(tmp_path / name), "--overwrite"]) == 0
    return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]


def probabilities(rows: list[dict[str, Any]], trained: Trained) -> np.ndarray:
    return np.array([[row[f"probability_{name}"] for name in trained.info.class_names] for row in rows])


def plain_images(trained: Trained, paths: list[Path]) -> np.ndarray:
    channels, height, width = trained.info.input_shape
    pixels = torch.stack([decode_image(path, (height, width), channels) for path in paths])
    with torch.no_grad():
        return trained.classifier()(pixels).softmax(dim=1).numpy()


def plain_texts(trained: Trained, texts: list[str]) -> np.ndarray:
    assert trained.info.tokenizer is not None
    encoded = encode(trained.info.tokenizer, texts)
    with torch.no_grad():
        return trained.classifier()(torch.from_numpy(encoded.padded(np.arange(len(texts))))).softmax(dim=1).numpy()


@pytest.mark.parametrize("batch_size", ["5", "64"])
def test_images_are_what_a_plain_forward_pass_gives(tmp_path: Path, batch_size: str) -> None:
    trained = load_trained(image_run(tmp_path))
    photos = tmp_path / "photos"
    rows = predicted([str(tmp_path / "runs" / "r"), str(photos), "--batch-size", batch_size], tmp_path)
    paths = sorted(photos.rglob("*.png"))
    assert [row["input"] for row in rows] == [str(path) for path in paths]
    expected = plain_images(trained, paths)
    np.testing.assert_allclose(probabilities(rows, trained), expected, atol=1e-6)
    assert [row["label"] for row in rows] == [trained.info.class_names[number] for number in expected.argmax(axis=1)]
    assert {(row["row"], row["error"]) for row in rows} == {(None, None)}


@pytest.mark.parametrize("model", ["text-lstm", "text-transformer"])
def test_texts_are_what_a_plain_forward_pass_gives(tmp_path: Path, model: str) -> None:
    run = text_run(tmp_path, model)
    trained, texts = load_trained(run), random_texts(101)
    table = write_table(tmp_path / "new.csv", texts)
    rows = predicted([run, str(table), "word1 word2", "--batch-size", "7"], tmp_path)
    assert [row["row"] for row in rows] == [*(f"line {line}" for line in range(2, 103)), None]
    assert rows[-1]["input"] == "word1 word2"
    np.testing.assert_allclose(probabilities(rows, trained), plain_texts(trained, [*texts, "word1 word2"]), atol=1e-6)


OWN_IMAGES = """
import numpy as np
import torch
from app.data.splits import from_arrays

def load(config):
    images = torch.arange(40 * 100).reshape(40, 1, 10, 10).remainder(251).to(torch.uint8)
    options = dict(val_fraction=0.2, class_names=("a", "b"), mean=(0.5,), std=(0.2,))
    return from_arrays((images, np.arange(40) % 2), **options)
"""


def test_the_data_that_was_trained_on_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "own_images.py").write_text(OWN_IMAGES)
    trained_run(tmp_path, dataset="own_images:load")
    (tmp_path / "own_images.py").unlink()
    monkeypatch.delitem(sys.modules, "own_images")
    write_images(tmp_path / "photos", {"x": 3}, size=(10, 10))
    rows = predicted([str(tmp_path / "runs" / "r"), str(tmp_path / "photos")], tmp_path)
    assert [row["label"] in ("a", "b") for row in rows] == [True] * 3
    with pytest.raises(BadInput, match="--dataset own_images:load: No module named 'own_images'"):
        evaluate([str(tmp_path / "runs" / "r"), "--split", "val"])


def test_images_of_several_shapes(tmp_path: Path) -> None:
    run = image_run(tmp_path, model="resnet18", sampler="aspect-grouped", image_size=32)
    write_images(tmp_path / "mixed" / "wide", {"a": 5}, size=(60, 30))
    write_images(tmp_path / "mixed" / "high", {"b": 4}, size=(30, 60))
    trained, paths = load_trained(run), sorted((tmp_path / "mixed").rglob("*.png"))
    paths = [paths[i] for i in (0, 8, 4, 5, 1, 2, 7, 3, 6)]
    rows = predicted([run, *map(str, paths), "--batch-size", "2"], tmp_path)
    assert [row["input"] for row in rows] == list(map(str, paths))
    expected = []
    for path in paths:
        shape = (48, 24) if "high" in path.parts else (24, 48)
        assert shape in trained.info.shapes
        with torch.no_grad():
            expected.append(trained.classifier()(decode_image(path, shape, 3)[None]).softmax(dim=1)[0].numpy())
    np.testing.assert_allclose(probabilities(rows, trained), expected, atol=1e-6)


def counted_net(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """PlainNet; who has built one is told to the actor 'builds', where there is one."""
    import ray

    if ray.is_initialized():
        builds: Any = ray.get_actor("builds")
        ray.get(builds.add.remote(os.getpid()))
    torch.manual_seed(0)
    return PlainNet(num_classes, input_shape)


class Builds:
    def __init__(self) -> None:
        self._pids: list[int] = []

    def add(self, pid: int) -> None:
        self._pids.append(pid)

    def all(self) -> list[int]:
        return self._pids


@pytest.mark.usefixtures("local_ray")
@pytest.mark.filterwarnings("ignore")
def test_two_workers_on_ray_give_what_one_process_gives_and_build_one_network_each(tmp_path: Path) -> None:
    import ray

    builds: Any = ray.remote(num_cpus=0)(Builds).options(name="builds").remote()  # type: ignore[attr-defined]
    run = image_run(tmp_path, model="tests.test_predict:counted_net", image_size=8)
    (tmp_path / "photos" / "cat" / "damaged.png").write_bytes(b"no image")
    words = [run, str(tmp_path / "photos"), str(tmp_path / "photos"), "--batch-size", "3"]
    alone = predicted(words, tmp_path)
    before: list[int] = ray.get(builds.all.remote())
    together = predicted([*words, "--num-workers", "2"], tmp_path)
    assert together == alone
    assert len(alone) == 60
    assert [row["label"] is None for row in alone].count(True) == 2
    pids = [pid for pid in ray.get(builds.all.remote())[len(before) :] if pid != os.getpid()]
    assert 1 <= len(pids) == len(set(pids)) <= 2  # for 5 blocks, which the first to be ready may have done alone


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", ["text-lstm", "text-transformer"])
def test_texts_on_two_workers(tmp_path: Path, model: str) -> None:
    run = text_run(tmp_path, model)
    trained, texts = load_trained(run), random_texts(101)
    table = write_table(tmp_path / "new.csv", texts)
    rows = predicted([run, str(table), "--batch-size", "7", "--num-workers", "2"], tmp_path)
    assert [row["row"] for row in rows] == [f"line {line}" for line in range(2, 103)]
    np.testing.assert_allclose(probabilities(rows, trained), plain_texts(trained, texts), atol=1e-6)
    (tmp_path / "empty.csv").write_text("text\n")
    assert predicted([run, str(tmp_path / "empty.csv"), "--num-workers", "2"], tmp_path) == []


def test_the_three_formats_hold_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = text_run(tmp_path)
    words = [run, "word1 word2", 'a "quoted",\nword3', "", "na\u00efve word4 \U0001f600"]
    rows = predicted(words, tmp_path)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["rows"], report["errors"], report["output"]) == (4, 1, str(tmp_path / "out.jsonl"))
    assert sum(report["labels"].values()) == 3
    assert list(rows[0]) == ["input", "row", "label", "error"] + [
        f"probability_{name}" for name in ("=cmd", 'b,"ad', "good")
    ]
    assert main([*words, "--output", str(tmp_path / "out.parquet")]) == 0
    parquet = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert [row["input"] for row in parquet.to_pylist()] == words[1:]
    assert parquet.drop_columns([n for n in parquet.column_names if n.startswith("prob")]).to_pylist() == [
        {name: row[name] for name in ("input", "row", "label", "error")} for row in rows
    ]
    assert main([*words, "--output", str(tmp_path / "out.csv")]) == 0
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    for from_csv, row in zip(table, rows, strict=True):
        assert {name: value or None for name, value in from_csv.items() if not name.startswith("prob")} == {
            name: value or None for name, value in row.items() if not name.startswith("prob")
        }
        for name in row:
            if name.startswith("prob"):
                assert (float(from_csv[name]) if from_csv[name] else None) == row[name]
    capsys.readouterr()
    assert main(words) == 0
    captured = capsys.readouterr()
    assert [json.loads(line) for line in captured.out.splitlines()] == rows
    assert "1 of 4 rows could not be predicted" in captured.err


def test_what_cannot_be_predicted_is_a_row_with_an_error(tmp_path: Path) -> None:
    run = text_run(tmp_path)
    lines = [b"text,label", b"word1,x", b'"  ",x', b"word\xff,x", b"a,b,c", b"word2,x", b"word1,x"]
    (tmp_path / "t.csv").write_bytes(b"\n".join(lines) + b"\n")
    (tmp_path / "t.jsonl").write_text('{"text": 3}\n{broken\n{"text": "\\ud800"}\n{"text": null}\n{"text": "word1"}\n')
    rows = predicted([run, str(tmp_path / "t.csv"), str(tmp_path / "t.jsonl"), "\udcff"], tmp_path)
    errors = [row["error"] for row in rows]
    assert [row["row"] for row in rows[:6]] == [f"line {line}" for line in range(2, 8)]
    assert [error is None for error in errors] == [True, False, False, False, True, True] + [False] * 4 + [True, False]
    for number, words in (
        (1, "empty"),
        (2, "UTF-8"),
        (3, "3 fields"),
        (6, "3 is no text"),
        (7, "no JSON"),
        (8, "half a character"),
        (9, "empty"),
        (11, "UTF-8"),
    ):
        assert words in errors[number]
    assert rows[0] == rows[5] | {"row": "line 2"}  # a text twice
    assert all(row["label"] is None and row["probability_good"] is None for row in rows if row["error"])


def test_a_text_without_a_token(tmp_path: Path) -> None:
    trained = load_trained(text_run(tmp_path))
    assert trained.info.tokenizer is not None
    content = json.loads(trained.info.tokenizer)
    content["model"]["unk_token"] = "[UNK]"
    content["normalizer"] = {"type": "Replace", "pattern": {"String": "-"}, "content": " "}
    info = DataInfo(**{**vars(trained.info), "tokenizer": json.dumps(content)})
    predict = Predictor(Trained("", trained.config, info, trained.weights), torch.device("cpu"), 2)
    block = pa.table({"input": ["a", "b", "c"], "row": pa.nulls(3, pa.string()), "content": [b"word1", b"-", b"word1"]})
    result = predict(block.append_column("error", pa.nulls(3, pa.string()))).to_pylist()
    assert [row["error"] for row in result] == [None, "the tokenizer finds no token in the text", None]
    assert result[0]["probability_good"] == result[2]["probability_good"]


def test_a_text_that_the_tokenizer_breaks_on(tmp_path: Path) -> None:
    trained = load_trained(text_run(tmp_path))
    assert trained.info.tokenizer is not None
    content = json.loads(trained.info.tokenizer)
    content["model"]["unk_token"] = "gone"  # which a run's tokenizer cannot be, and the library finds out by itself
    info = DataInfo(**{**vars(trained.info), "tokenizer": json.dumps(content)})
    predict = Predictor(Trained("", trained.config, info, trained.weights), torch.device("cpu"), 2)
    block = pa.table({"input": ["a", "b", "c"], "row": pa.nulls(3, pa.string()), "content": [b"word1", b"?", b"word1"]})
    result = predict(block.append_column("error", pa.nulls(3, pa.string()))).to_pylist()
    assert [row["error"] is None for row in result] == [True, False, True]
    assert "the tokenizer cannot encode a text: WordLevel error" in result[1]["error"]
    assert result[0]["probability_good"] == result[2]["probability_good"]


def test_damaged_and_odd_images(tmp_path: Path) -> None:
    run = image_run(tmp_path)
    odd = tmp_path / "odd \u00e4\n1"
    (odd / "inner.png").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    photo = Image.fromarray(pixels)
    photo.save(odd / "a.jpg")
    (odd / "b.jpg").write_bytes((odd / "a.jpg").read_bytes()[:300])
    photo.convert("CMYK").save(odd / "c.jpg")
    Image.fromarray(pixels[:, :, 0].astype(np.uint16) * 257).save(odd / "d.png")
    photo.save(odd / "e.gif", save_all=True, append_images=[photo.rotate(90)])
    Image.new("RGB", (1, 1)).save(odd / "f.png")
    Image.new("RGB", (3000, 1)).save(odd / "g.webp", lossless=True)
    os.mkfifo(odd / "h.png")
    (odd / "i.png").symlink_to(odd / "gone.png")
    (odd / "inner.png" / "j.PNG").write_bytes(b"")
    (odd / "notes.txt").write_text("no image")
    (odd / ".hidden.png").write_text("no image")
    Path(os.fsdecode(os.fsencode(odd) + b"/k\xff.png")).write_bytes((odd / "f.png").read_bytes())
    rows = predicted([run, str(odd), str(odd / "notes.txt")], tmp_path)
    assert [row["input"].removeprefix(f"{odd}/") for row in rows] == [
        *("a.jpg", "b.jpg", "c.jpg", "d.png", "e.gif", "f.png", "g.webp", "h.png", "i.png"),
        *("inner.png/j.PNG", "k\\udcff.png", "notes.txt"),
    ]
    bad = [row["input"].rpartition("/")[2] for row in rows if row["error"]]
    assert bad == ["b.jpg", "h.png", "i.png", "j.PNG", "notes.txt"]
    assert main([run, str(odd), "--output", str(tmp_path / "o.csv")]) == 0
    with (tmp_path / "o.csv").open(newline="", encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 11


def test_a_table_that_is_damaged_further_on(tmp_path: Path) -> None:
    run = text_run(tmp_path)
    path = tmp_path / "t.parquet"
    texts = pa.table({"text": random_texts(20_000)})
    pyarrow.parquet.write_table(texts, path, row_group_size=10_000, compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    second = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    content[second : second + 40] = b"\xff" * 40
    path.write_bytes(content)
    rows = predicted([run, str(path), "word1"], tmp_path)
    assert "what follows in it is left out" in rows[-2]["error"]
    assert rows[-1]["error"] is None
    assert len([row for row in rows if row["error"] is None]) == len(rows) - 1 > 8000


class Overflowing(PlainNet):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        is_plain = (images.amax(dim=(0, 2, 3)) == images.amin(dim=(0, 2, 3))).all()  # the black ones it is tried with
        return super().forward(images) * (1.0 if is_plain else torch.inf)


def test_numbers_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    run = image_run(tmp_path, model="tests.test_predict:Overflowing", image_size=8)
    rows = predicted([run, str(tmp_path / "photos")], tmp_path)
    assert {row["error"] for row in rows} == {"the network gives numbers that are not finite for it"}


def test_names_of_the_columns_are_never_those_of_others() -> None:
    assert result_schema(["label", "error"]).names[4:] == ["probability_label", "probability_error"]
    assert result_schema(["a", "a"]).names[4:] == ["probability_0_a", "probability_1_a"]


REFUSED: dict[str, Callable[[Path], list[str]]] = {
    "nothing to predict": lambda _: [],
    "no column text": lambda path: [str(path / "other.csv")],
    "cannot be read: Is a directory": lambda path: [str(path / "folder.csv")],
    "cannot be read: No such file": lambda path: [str(path / "gone.csv")],
    "folder is a folder, and this model takes texts": lambda path: [str(path / "folder")],
    "photo.png is a file, and this model takes texts": lambda path: [str(path / "photo.png")],
    "no column titel": lambda path: [str(path / "train.csv"), "--text-column", "titel"],
    "must end with .csv, .jsonl or .parquet": lambda path: ["word1", "--output", str(path / "out.xlsx")],
    "there already": lambda path: ["word1", "--output", str(path / "other.csv")],
    "is a folder: name a file": lambda path: ["word1", "--output", str(path / "folder.csv"), "--overwrite"],
    "make it first": lambda path: ["word1", "--output", str(path / "none" / "out.csv")],
    "is the table that is read": lambda path: [
        *(str(path / "train.csv"), "--output", str(path / "folder" / ".." / "train.csv"), "--overwrite")
    ],
    "--num-workers 0": lambda _: ["word1", "--num-workers", "0"],
    "--batch-size 0": lambda _: ["word1", "--batch-size", "0"],
    "is no file of weights": lambda _: ["word1", "--config", "c.yaml"],
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_before_anything_is_computed(tmp_path: Path, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = text_run(tmp_path)
    (tmp_path / "other.csv").write_text("title\nx\n")
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "photo.png").write_bytes(b"")
    monkeypatch.setattr("app.predictor.Predictor.__call__", lambda *_: pytest.fail("it computes"))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BadInput, match=message.replace("(", r"\(")):
        main([run, *REFUSED[message](tmp_path)])
    assert sorted(tmp_path.rglob("*")) == before


def test_refused_for_images(tmp_path: Path) -> None:
    run = image_run(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "t.csv").write_text("text\nx\n")
    for words, message in (
        ([str(tmp_path / "empty")], "has no images in it"),
        ([str(tmp_path / "t.csv")], "is a table, and this model takes images"),
        ([str(tmp_path / "gone.png")], "no such file"),
        ([str(tmp_path / "photos"), "--text-column", "text"], "leave it out"),
    ):
        with pytest.raises(BadInput, match=message):
            main([run, *words])


def test_features_are_refused(tmp_path: Path) -> None:
    trained = load_trained(image_run(tmp_path))
    folder = tmp_path / "features"
    folder.mkdir()
    state = json.loads(Path(trained.path, "state.json").read_text())
    state["data"] |= {"input_shape": [4], "dtype": "float32", "mean": [], "std": []}
    write_folder(folder, trained.weights, {}, state)
    with pytest.raises(BadInput, match="only images and texts"):
        main([str(folder), "x"])


def write_and_raise(path: Path, table: pa.Table) -> None:
    with File(str(path), table.schema) as output:
        output.write(table)
        raise KeyboardInterrupt


def test_an_output_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    schema = result_schema(["a"])
    for name in ("out.csv", "out.jsonl", "out.parquet"):
        path = tmp_path / name
        path.write_text("before")
        table = pa.table([["x"], [None], ["a"], [None], pa.array([1.0], pa.float32())], schema)
        with pytest.raises(KeyboardInterrupt):
            write_and_raise(path, table)
        assert [path.read_text(), os.listdir(tmp_path)] == ["before", [name]]
        with File(str(path), schema) as output:
            output.write(table)
            assert path.read_text() == "before"
        assert b"before" not in path.read_bytes()
        path.unlink()


def test_an_output_interrupted_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        assert len(os.listdir(tmp_path)) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr("pyarrow.csv.CSVWriter", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_and_raise(tmp_path / "out.csv", pa.table({"a": ["x"]}))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["out.csv", "out.jsonl", "out.parquet"])
def test_a_disk_that_is_full_is_said_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    schema = result_schema(["a"])
    rows = 50_000
    texts = [f"{number}" for number in range(rows)]
    table = pa.table([texts, texts, texts, texts, pa.array(np.arange(rows), pa.float32())], schema)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(TrainingFailed, match="could not be written"), File(str(tmp_path / name), schema) as output:
            output.write(table)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(BadInput, match="cannot be written to"):
        check_output(str(tmp_path / "out.csv"), overwrite=False)


COMMAND = [sys.executable, "-m", "app.predict"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ended_in_the_middle_it_leaves_nothing(tmp_path: Path, number: signal.Signals, code: int) -> None:
    run, out = text_run(tmp_path), tmp_path / "out"
    out.mkdir()
    table = write_table(tmp_path / "long.csv", ["word1"] * 300_000)
    words = [run, str(table), "--output", str(out / "o.csv"), "--batch-size", "1"]
    # A shell that has started the tests in the background ignores SIGINT, and so would the command.
    command = subprocess.Popen([*COMMAND, *words], preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    try:
        while not os.listdir(out):
            assert command.poll() is None
            time.sleep(0.01)
        command.send_signal(number)
        assert command.wait(60) == code
    finally:
        command.kill()
        command.wait()
    assert os.listdir(out) == []


@pytest.mark.slow
def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    run = text_run(tmp_path)
    program = (
        "import resource, sys; from app.predict import main; main(sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks = []
    for rows in (100, 1000):
        path = write_table(tmp_path / f"{rows}.csv", ["word1 " * 10_000] * rows)
        words = [run, str(path), "--output", str(tmp_path / f"{rows}.parquet"), "--batch-size", "16"]
        done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.splitlines()[-1]) / 1024)
    assert path.stat().st_size > 55 * 2**20
    assert peaks[1] - peaks[0] < 30, peaks

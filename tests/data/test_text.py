"""Labelled texts, from tables and from the standard library."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from app.config import Config
from app.data.datasets import check_data, load_splits
from app.data.sampling import build_order, build_schedule
from app.data.splits import Splits
from app.data.stdlib_docs import PACKAGES, read_sentences
from app.data.text import read_texts
from app.data.tokens import encode, read_tokenizer
from app.errors import BadInput

ROWS = [(f"{word} text number {number}", word) for number in range(10) for word in ("good", "bad", "odd")]


def text_config(data_dir: Path, **settings: Any) -> Config:
    return Config(dataset="text", data_dir=str(data_dir), model="text-lstm", **settings)


def write_csv(path: Path, rows: Sequence[tuple[Any, ...]] = ROWS, header: str = "text,label") -> None:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows), ""]))


def loaded(config: Config) -> Splits:
    return load_splits(config, check_data(config).tokenizer)


def texts_of(config: Config) -> dict[str, list[str]]:
    return {name: split.texts for name, split in read_texts(config)[0].items()}


def test_one_table_is_split_by_class_and_the_same_way_for_every_seed(tmp_path: Path) -> None:
    write_csv(tmp_path / "reviews.csv")
    config = text_config(tmp_path / "reviews.csv", val_fraction=0.2)
    splits = loaded(config)
    assert splits.info.class_names == ("bad", "good", "odd")
    assert splits.test is None
    assert np.bincount(splits.train.labels).tolist() == [8, 8, 8]
    assert np.bincount(splits.val.labels).tolist() == [2, 2, 2]
    texts = texts_of(config)
    assert sorted(texts["train"] + texts["val"]) == sorted(text for text, _ in ROWS)
    assert texts_of(text_config(tmp_path, val_fraction=0.2, seed=5)) == texts  # in a folder by itself, too


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_every_kind_of_table_gives_the_same(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"train{suffix}"
    if suffix in (".csv", ".tsv"):
        write_csv(path)
        path.write_text(path.read_text().replace(",", "," if suffix == ".csv" else "\t"))
    elif suffix == ".jsonl":
        path.write_text("".join(json.dumps({"label": label, "text": text}) + "\n" for text, label in ROWS))
    else:
        texts, labels = zip(*ROWS, strict=True)
        pq.write_table(pa.table({"text": texts, "label": labels}), path)
    splits, names = read_texts(text_config(tmp_path))
    assert names == ("bad", "good", "odd")
    assert len(splits["train"].texts) == 27
    assert [(text, names[label]) for text, label in zip(splits["val"].texts, splits["val"].labels, strict=True)] == [
        row for row in ROWS if row[0] in splits["val"].texts
    ]


def test_files_for_each_split_and_other_names_of_columns(tmp_path: Path) -> None:
    for name, count in (("train", 30), ("validation", 6), ("test", 9)):
        write_csv(tmp_path / f"{name}.csv", [(f"{name} {label}", label) for _, label in ROWS[:count]], "review,stars")
    config = text_config(tmp_path, text_column="review", label_column="stars")
    splits = loaded(config)
    assert {name: len(part.labels) for name, part in splits.named().items()} == {"train": 30, "val": 6, "test": 9}
    # Of the training split alone:
    assert splits.info.tokenizer is not None
    assert set(read_tokenizer(splits.info.tokenizer).tokenizer.get_vocab()) == {
        "[PAD]",
        "[UNK]",
        "train",
        "good",
        "bad",
        "odd",
    }
    assert splits.val.inputs(np.array([0]))[0, 0] == 1


def test_integers_as_labels_are_in_the_order_of_their_size(tmp_path: Path) -> None:
    write_csv(tmp_path / "train.csv", [("a b", number) for number in (10, -1, 2)] * 4)
    assert read_texts(text_config(tmp_path))[1] == ("-1", "2", "10")
    write_csv(tmp_path / "train.csv", [("a b", number) for number in ("1", "01", "001", "0")] * 4)
    assert read_texts(text_config(tmp_path))[1] == ("0", "001", "01", "1")
    long = "9" * 5000
    write_csv(tmp_path / "train.csv", [("a b", number) for number in (long, "10")] * 4)
    assert read_texts(text_config(tmp_path))[1] == ("10", long)
    # As pandas writes integers where one was missing.
    pq.write_table(pa.table({"text": ["a", "b"] * 4, "label": [1.0, 0.0] * 4}), tmp_path / "t.parquet")
    assert read_texts(text_config(tmp_path / "t.parquet"))[1] == ("0", "1")


def test_inputs_are_padded_to_the_longest_of_the_batch_and_shown_as_texts(tmp_path: Path) -> None:
    rows = [("one two three", "x"), ("one", "y"), ("four five", "x"), ("six seven eight nine", "y")]
    for name in ("train", "val"):
        write_csv(tmp_path / f"{name}.csv", rows)
    splits = loaded(text_config(tmp_path, max_length=3))
    inputs = splits.train.inputs(np.array([1, 2]))
    assert (inputs.dtype, tuple(inputs.shape)) == (torch.int64, (2, 2))
    assert inputs[0, 1] == 0
    assert splits.train.inputs(np.array([3])).shape == (1, 3)
    assert splits.train.facts.lengths is not None
    assert splits.train.facts.lengths.tolist() == [3, 1, 2, 3]
    assert splits.train.shown(np.array([2]))["texts"].tolist() == ["four five"]
    assert splits.info.input_shape == (3,)
    assert str(splits.info) == "2 classes, texts of up to 3 out of 11 tokens"


def test_what_is_cut_off_is_said(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", [("one two three four", "x"), ("one two", "y"), ("one", "x"), ("two", "y")])
    (note,) = check_data(text_config(tmp_path, max_length=3, val_fraction=0.5)).notes
    assert note.startswith("texts: 2 train, 2 val; ")
    assert note.endswith("; 25.00% of the texts are cut off at --max-length 3")


def test_batches_of_similar_length_have_less_padding(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    rows = [(" ".join(["w"] * generator.integers(1, 100)), f"c{number % 2}") for number in range(2000)]
    write_csv(tmp_path / "t.csv", rows)
    shares = {}
    for sampler in ("shuffled", "length-bucketed"):
        config = text_config(tmp_path, sampler=sampler, batch_size=32)
        train = loaded(config).train
        order = build_order(config, train.labels, train.facts)
        schedule = build_schedule(config, order)
        ids = order(0)
        batches = [train.inputs(ids[schedule.batch_of(step)]) for step in range(schedule.steps_per_epoch)]
        shares[sampler] = sum(int((batch == 0).sum()) for batch in batches) / sum(batch.numel() for batch in batches)
    assert shares["shuffled"] > 0.4
    assert shares["length-bucketed"] < 0.05


def test_weights_of_the_training_texts(tmp_path: Path) -> None:
    write_csv(tmp_path / "train.csv", [("a b", "x", 1), ("c d", "y", 2.5)], "text,label,w")
    write_csv(tmp_path / "val.csv", [("a b", "x"), ("c d", "y")])
    splits = loaded(text_config(tmp_path, sampler="weighted", weight_column="w"))
    assert splits.train.facts.weights is not None
    assert splits.train.facts.weights.tolist() == [1, 2.5]


def test_a_tokenizer_of_ones_own(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv")
    first = loaded(text_config(tmp_path, tokenizer="bpe", vocab_size=40))
    assert first.info.tokenizer is not None
    (tmp_path / "tokenizer.json").write_text(first.info.tokenizer)
    again = loaded(text_config(tmp_path, tokenizer=str(tmp_path / "tokenizer.json")))
    assert again.info == first.info
    assert torch.equal(again.train.inputs(np.arange(5)), first.train.inputs(np.arange(5)))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"t.csv": "text,klass\na,x\n"}, r"--label-column label: .*t\.csv has no column label; there are text, klass"),
        ({"t.csv": "text,label\na,x\n  ,y\n"}, r"t\.csv, line 3: text is empty, and must be a text that is not empty"),
        ({"t.jsonl": '{"text": 5, "label": "x"}\n'}, r"line 1: text is 5, and must be a text that is not empty"),
        ({"t.csv": "text,label\na,x\nb,\n"}, r"t\.csv, line 3: label is empty, and must be a string or an integer"),
        ({"t.jsonl": '{"text": "a", "label": 1.5}\n'}, r"line 1: label is 1\.5, and must be a string or an integer"),
        ({"t.jsonl": '{"text": "a \\ud800", "label": 1}\n'}, r"line 1: text has half a character in it"),
        ({"t.jsonl": '{"text": "a", "label": "\\udfff"}\n'}, r"line 1: label has half a character in it"),
        ({"t.csv": "text,label\na,x\nb,x\n"}, r"--label-column label: .*t\.csv has one class only, x"),
        ({"t.csv": "text,label\na,x\nb,x,y\n"}, r"t\.csv, line 3: 3 fields, and the header has 2"),
        ({"t.csv": b"text,label\na,x\n\xe9,x\n"}, r"t\.csv, line 3: no UTF-8 \(byte 0xe9\); save the file as UTF-8"),
        ({"t.csv": "text,label\n"}, r"--data-dir: .*t\.csv has no rows"),
        ({"t.csv": "text,label\na,x\nb,y\n"}, "no class has two texts, so none can be held out for validation"),
        (
            {"train.csv": "text,label\na,x\nb,y\n", "val.csv": "text,label\na,x\nb,z\n"},
            r"val\.csv, line 3: the label 'z' is not in .*train\.csv",
        ),
        ({}, r"--data-dir .* must be a table .* or a folder with one of them called train .*; it holds no table"),
        ({"a.csv": "", "b.csv": ""}, r"it holds a\.csv, b\.csv"),
        ({"val.csv": "", "test.csv": ""}, r"called train .* it holds test\.csv, val\.csv"),
        ({"train.csv": "", "train.tsv": ""}, r"train\.csv and train\.tsv are both train: keep one"),
        ({"val.csv": "", "dev.tsv": ""}, r"dev\.tsv and val\.csv are both val: keep one"),
    ],
)
def test_texts_gone_wrong_are_found_before_training(tmp_path: Path, files: dict, message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadInput, match=message):
        check_data(text_config(tmp_path))


def test_more_that_is_found_before_training(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"none\.csv cannot be read: No such file"):
        check_data(text_config(tmp_path / "none.csv"))
    with pytest.raises(BadInput, match=r"--data-dir .*none: no such file or directory"):
        check_data(text_config(tmp_path / "none"))
    write_csv(tmp_path / "t.csv", [("a", "x", 1), ("b", "y", "much")] * 2, "text,label,w")
    with pytest.raises(BadInput, match=r"t\.csv, line 3: 'much' is no weight"):
        check_data(text_config(tmp_path, sampler="weighted", weight_column="w"))
    with pytest.raises(BadInput, match="--num-workers 3: there are only 2 training samples"):
        check_data(text_config(tmp_path, num_workers=3, val_fraction=0.5))
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"}})
    )
    with pytest.raises(
        BadInput,
        match=r"tokenizer\.json cannot encode every text at --max-length 128: it has no token",
    ):
        check_data(text_config(tmp_path, tokenizer=str(tmp_path / "tokenizer.json")))


def test_the_standard_librarys_sentences_are_balanced_and_none_is_in_two_splits() -> None:
    config = Config(dataset="stdlib-docs", model="text-lstm")
    splits, names = read_texts(config)
    assert names == tuple(sorted(PACKAGES))
    assert len(names) >= 8
    counts = {name: np.bincount(split.labels) for name, split in splits.items()}
    for count in counts.values():
        assert (count == count[0]).all()
    assert sum(count[0] for count in counts.values()) > 200
    every = [text.lower() for split in splits.values() for text in split.texts]
    assert len(set(every)) == len(every)
    assert sorted(read_sentences()[0]) == sorted(text for split in splits.values() for text in split.texts)


def test_a_text_no_token_is_found_in(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", [("a", "x"), ("b", "y")] * 2)
    tokenizer = check_data(text_config(tmp_path)).tokenizer
    assert tokenizer is not None
    content = json.loads(tokenizer)
    content["normalizer"] = {"type": "Replace", "pattern": {"Regex": "b"}, "content": ""}
    assert encode(json.dumps(content), ["b"]).lengths.tolist() == [0]
    with pytest.raises(BadInput, match=r"--tokenizer word finds no token in 'b' \(train\): remove such texts"):
        check_data(text_config(tmp_path), json.dumps(content))

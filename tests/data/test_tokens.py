"""Tokenizers: trained, given, and what they make of texts."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from app.data.samples import DataInfo
from app.data.tokens import encode, read_tokenizer, read_tokenizer_file, same_tokens, train_tokenizer
from app.errors import BadInput
from app.models.build import preprocessing

TEXTS = ["The cat sat on the mat.", "The dog sat, the cat ran!", "a b c d e f g"]


def tokens_of(content: str, texts: Sequence[str]) -> list[list[int]]:
    """As a batch."""
    return encode(content, texts).padded(np.arange(len(texts))).tolist()


@pytest.mark.parametrize("kind", ["word", "bpe"])
def test_padding_is_0_and_unknown_is_1(kind: str) -> None:
    content = train_tokenizer(kind, 1000, 100, TEXTS)
    vocabulary = read_tokenizer(content)
    assert vocabulary.padding == 0
    assert [vocabulary.tokenizer.id_to_token(number) for number in (0, 1)] == ["[PAD]", "[UNK]"]
    known, unknown = tokens_of(content, ["the CAT", "\N{SNOWMAN}"])
    assert min(known) > 1
    assert unknown[0] == 1
    assert 0 not in tokens_of(content, TEXTS[2:])[0]


@pytest.mark.parametrize("kind", ["word", "bpe"])
def test_training_is_the_same_each_time_and_keeps_to_the_size(kind: str) -> None:
    texts = [f"word{i} stem{i % 7}ing the" for i in range(500)]
    contents = {train_tokenizer(kind, 60, 100, texts) for _ in range(3)}
    assert len(contents) == 1
    assert read_tokenizer(contents.pop()).size == 60


def test_bpe_knows_the_parts_of_words_it_has_not_seen() -> None:
    texts = ["low lower lowest new newer newest"] * 5
    word, bpe = (tokens_of(train_tokenizer(kind, 60, 20, texts), ["lownewest"]) for kind in ("word", "bpe"))
    assert word == [[1]]
    assert 1 not in bpe[0]


def test_long_texts_are_cut_off_and_counted() -> None:
    encoded = encode(train_tokenizer("word", 100, 7, TEXTS), TEXTS)
    assert encoded.lengths.tolist() == [7, 7, 7]
    assert encoded.truncated == 1  # of 7, 8 and 7 tokens
    assert encode(train_tokenizer("word", 100, 8, TEXTS), TEXTS).truncated == 0


def test_batches_are_padded_to_their_longest() -> None:
    encoded = encode(train_tokenizer("word", 100, 10, TEXTS), ["cat", "the cat sat", "dog dog"])
    tokens = encoded.padded(np.array([2, 0]))
    assert tokens.dtype == np.int64
    assert tokens.shape == (2, 2)
    assert (tokens == 0).tolist() == [[False, False], [False, True]]
    assert encoded.padded(np.array([], np.int64)).shape == (0, 0)


def test_a_text_that_names_the_padding_token_has_none() -> None:
    encoded = encode(train_tokenizer("word", 100, 10, TEXTS), ["cat [PAD] sat", "cat sat", "[PAD]"])
    assert encoded.lengths.tolist() == [2, 2, 0]
    assert encoded.padded(np.array([0])).tolist() == encoded.padded(np.array([1])).tolist()


MARKS = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])


def given(path: Path, vocabulary: dict[str, int], max_length: int = 4) -> str:
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if "<s>" in vocabulary:
        tokenizer.post_processor = MARKS
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(path))
    return read_tokenizer_file(str(path), max_length)


@pytest.mark.parametrize(("name", "padding"), [("<pad>", 1), ("other", 5)])
def test_a_given_tokenizer_keeps_its_ids_and_gets_a_padding_token_if_it_has_none(
    tmp_path: Path, name: str, padding: int
) -> None:
    content = given(tmp_path / "t.json", {"<s>": 0, name: 1, "</s>": 2, "<unk>": 3, "word": 4})
    encoded = encode(content, ["word", "word what word"])
    tokens = encoded.padded(np.array([0, 1]))
    assert tokens.tolist() == [[0, 4, 2, padding], [0, 4, 3, 2]]
    assert encoded.truncated == 1
    info = DataInfo((4,), ("a", "b"), (), (), 2, dtype="int64", tokenizer=content)
    assert (info.padding, info.vocab_size) == (padding, max(5, padding + 1))
    assert not (info.example(2) == padding).any()
    # A network gets 0 for padding all the same.
    networks = preprocessing(info)(torch.from_numpy(tokens))
    assert networks.tolist() == [[padding, 4, 2, 0], [padding, 4, 3, 2]]
    assert preprocessing(info)(networks).tolist() == tokens.tolist()


def test_what_is_stored_cuts_off_and_pads_without_us(tmp_path: Path) -> None:
    trained = train_tokenizer("bpe", 100, 5, TEXTS)
    file = given(tmp_path / "t.json", {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "cat": 4})
    for content in (trained, file):
        batch = Tokenizer.from_str(content).encode_batch(["a cat", *TEXTS])
        assert [encoding.ids for encoding in batch] == tokens_of(content, ["a cat", *TEXTS])


def test_a_vocabulary_with_gaps(tmp_path: Path) -> None:
    content = given(tmp_path / "t.json", {"[PAD]": 0, "<unk>": 1, "far": 500})
    assert read_tokenizer(content).size == 501
    assert tokens_of(content, ["far off"]) == [[500, 1]]
    content = given(tmp_path / "t.json", {"far": 7, "<unk>": 1})
    assert tokens_of(content, ["far", "far off"])[1] == [7, 1]
    assert read_tokenizer(content).padding not in (1, 7)
    assert read_tokenizer(content).size > max(7, read_tokenizer(content).padding)


def test_the_same_tokens_whatever_is_cut_off() -> None:
    first, second = train_tokenizer("word", 100, 5, TEXTS), train_tokenizer("word", 100, 9, TEXTS)
    assert first != second
    assert same_tokens(first, second)
    assert not same_tokens(first, train_tokenizer("word", 100, 5, TEXTS[:1]))


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"--tokenizer none\.json: No such file or directory; allowed are word, bpe and a file"
    ):
        read_tokenizer_file("none.json", 5)
    for content in ("{}", "no JSON", "\x00"):
        (tmp_path / "t.json").write_text(content)
        with pytest.raises(BadInput, match=r"t\.json is no tokenizer file"):
            read_tokenizer_file(str(tmp_path / "t.json"), 5)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "none"},
            r"no token for what it has never seen .* is none\)",
        ),
        ({"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "[UNK]"}, r"never seen .* is \[UNK\]\)"),
        ({"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "<unk>"}, "never seen .* is <unk>"),
        ({"type": "Unigram", "vocab": [["a", 0.0]]}, "never seen"),
        ({"type": "WordLevel", "vocab": {"a": 2, "b": 0}, "unk_token": "b"}, "no token for padding, and 2 is taken"),
    ],
)
def test_a_tokenizer_that_cannot_encode_every_text(tmp_path: Path, model: dict[str, Any], message: str) -> None:
    if model["type"] == "WordPiece":
        model |= {"continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    (tmp_path / "t.json").write_text(json.dumps({"version": "1.0", "model": model}))
    with pytest.raises(BadInput, match=rf"t\.json cannot encode every text at --max-length 5: it has .*{message}"):
        read_tokenizer_file(str(tmp_path / "t.json"), 5)


def test_marks_that_leave_no_room_or_are_no_tokens(tmp_path: Path) -> None:
    vocabulary = {"<s>": 0, "</s>": 2, "<unk>": 3, "<pad>": 1}
    for length in (1, 2):
        with pytest.raises(BadInput, match=f"at --max-length {length}: it puts 2 marks of its own into each, .*room"):
            given(tmp_path / "t.json", vocabulary, max_length=length)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.post_processor = processors.BertProcessing(("</s>", 2), ("<s>", 77))
    tokenizer.save(str(tmp_path / "t.json"))
    with pytest.raises(BadInput, match="it gives the id 77, and the last of its tokens is 3"):
        read_tokenizer_file(str(tmp_path / "t.json"), 5)


def test_the_padding_that_a_file_names_is_its_padding(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "<PAD>": 1, "a": 2}, unk_token="<unk>"))
    tokenizer.enable_padding(pad_id=1, pad_token="<PAD>")
    tokenizer.save(str(tmp_path / "t.json"))
    vocabulary = read_tokenizer(read_tokenizer_file(str(tmp_path / "t.json"), 5))
    assert (vocabulary.padding, vocabulary.size) == (1, 3)

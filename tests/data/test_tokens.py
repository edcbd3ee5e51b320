"""Tokenizers: trained, given, and what they make of texts."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from app.data.tokens import encode, read_tokenizer, read_tokenizer_file, train_tokenizer, vocabulary_size
from app.errors import BadInput

TEXTS = ["The cat sat on the mat.", "The dog sat, the cat ran!", "a b c d e f g"]


@pytest.mark.parametrize("kind", ["word", "bpe"])
def test_padding_is_0_and_unknown_is_1(kind: str) -> None:
    content = train_tokenizer(kind, 1000, TEXTS)
    tokenizer = read_tokenizer(content)
    assert (tokenizer.id_to_token(0), tokenizer.id_to_token(1)) == ("[PAD]", "[UNK]")
    known, unknown = encode(content, ["the CAT", "\N{SNOWMAN}"], 10).padded(np.array([0, 1]))
    assert known.min() > 1
    assert unknown[0] == 1
    assert 0 not in encode(content, TEXTS, 100).padded(np.array([2]))


@pytest.mark.parametrize("kind", ["word", "bpe"])
def test_training_is_the_same_each_time_and_keeps_to_the_size(kind: str) -> None:
    texts = [f"word{i} stem{i % 7}ing the" for i in range(500)]
    contents = {train_tokenizer(kind, 60, texts) for _ in range(3)}
    assert len(contents) == 1
    assert vocabulary_size(contents.pop()) == 60


def test_bpe_knows_the_parts_of_words_it_has_not_seen() -> None:
    texts = ["low lower lowest new newer newest"] * 5
    word, bpe = (
        encode(train_tokenizer(kind, 60, texts), ["lownewest"], 20).padded(np.array([0])) for kind in ("word", "bpe")
    )
    assert word.tolist() == [[1]]
    assert 1 not in bpe


def test_long_texts_are_cut_off_and_counted() -> None:
    content = train_tokenizer("word", 100, TEXTS)
    encoded = encode(content, TEXTS, 7)
    assert encoded.lengths.tolist() == [7, 7, 7]
    assert encoded.truncated == 1  # of 7, 8 and 7 tokens
    assert encode(content, TEXTS, 8).truncated == 0


def test_batches_are_padded_to_their_longest() -> None:
    encoded = encode(train_tokenizer("word", 100, TEXTS), ["cat", "the cat sat", "dog dog"], 10)
    tokens = encoded.padded(np.array([2, 0]))
    assert tokens.dtype == np.int64
    assert tokens.shape == (2, 2)
    assert (tokens == 0).tolist() == [[False, False], [False, True]]
    assert encoded.padded(np.array([], np.int64)).shape == (0, 0)


def given(path: Path, vocabulary: list[str]) -> str:
    numbers = {token: number for number, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(path))
    return read_tokenizer_file(str(path))


@pytest.mark.parametrize(("padding", "start"), [("<pad>", 1), ("other", 5)])
def test_a_given_tokenizer_keeps_its_marks_and_makes_room_for_padding(tmp_path: Path, padding: str, start: int) -> None:
    """Where another token is number 0, that one takes the number of its padding token, or a new one."""
    content = given(tmp_path / "t.json", ["<s>", padding, "</s>", "<unk>", "word"])
    encoded = encode(content, ["word", "word what word"], 4)
    assert encoded.padded(np.array([0, 1])).tolist() == [[start, 4, 2, 0], [start, 4, 3, 2]]
    assert encoded.truncated == 1
    assert vocabulary_size(content) == (5 if padding == "<pad>" else 6)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"--tokenizer none\.json: No such file or directory; allowed are word, bpe and a file"
    ):
        read_tokenizer_file("none.json")
    for content in ("{}", "no JSON", "\x00"):
        (tmp_path / "t.json").write_text(content)
        with pytest.raises(BadInput, match=r"t\.json is no tokenizer file"):
            read_tokenizer_file(str(tmp_path / "t.json"))

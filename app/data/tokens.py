"""From texts to numbers: a tokenizer of the tokenizers library, trained on the training split or given as a file."""

import functools
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from app.config import TOKENIZERS
from app.errors import BadInput
from app.retry import retry

# Said aloud, the library does not warn of it when a process that has used it is forked (a DataLoader's).
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, UNK = "[PAD]", "[UNK]"
# What the padding token is called in tokenizers from elsewhere.
PADDING_NAMES = (PAD, "<pad>", "<|pad|>")
# Texts that are encoded at a time: bounds the library's objects in memory.
BLOCK = 10_000


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer ready for use. size: ids are below it; padding: the id of its padding token."""

    tokenizer: "Tokenizer"
    size: int
    padding: int


def train_tokenizer(kind: str, vocab_size: int, max_length: int, texts: Iterable[str]) -> str:
    """Its JSON. kind word: the most frequent words and marks; bpe: byte pair encoding (Sennrich et al. 2016).

    Both take no notice of case; what is in the vocabulary of neither is [UNK], and 0 is [PAD].
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    model = models.WordLevel(unk_token=UNK) if kind == "word" else models.BPE(unk_token=UNK)
    options = {"vocab_size": vocab_size, "special_tokens": [PAD, UNK], "show_progress": False}
    trainer = trainers.WordLevelTrainer(**options) if kind == "word" else trainers.BpeTrainer(**options)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(texts, trainer)
    return _completed(tokenizer, max_length)


def read_tokenizer_file(path: str, max_length: int) -> str:
    """The JSON of a tokenizer that the tokenizers library has saved, with a padding token if it has none.

    Raises BadInput for anything else, and for a tokenizer that cannot encode every text.
    """
    from tokenizers import Tokenizer

    try:
        content = retry(lambda: Path(path).read_text(encoding="utf-8"), f"reading --tokenizer {path}")
        tokenizer = Tokenizer.from_str(content)
    except OSError as error:
        raise BadInput(
            f"--tokenizer {path}: {error.strerror}; allowed are {', '.join(TOKENIZERS)} and a file"
        ) from None
    except Exception as error:  # the library raises nothing more special
        raise BadInput(f"--tokenizer {path} is no tokenizer file (tokenizer.json): {error}") from None
    try:
        return _completed(tokenizer, max_length)
    except BaseException as error:  # a panic in Rust is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise BadInput(f"--tokenizer {path} cannot encode every text at --max-length {max_length}: {error}") from None


def _completed(tokenizer: "Tokenizer", max_length: int) -> str:
    """JSON that whoever loads it need not know more than: it cuts off and pads by itself.

    Raises ValueError, or what the library raises, for a tokenizer that does not take every text.
    """
    model = json.loads(tokenizer.to_str())["model"]
    unknown, tokens = model.get("unk_token"), model.get("vocab", {})
    if model["type"] == "Unigram":
        lacking = model.get("unk_id") is None and not model.get("byte_fallback")
    else:  # BPE leaves out what it does not know
        lacking = unknown not in tokens and not (model["type"] == "BPE" and unknown is None)
    if lacking:
        raise ValueError(f"it has no token for what it has never seen (its model's unk_token is {unknown})")
    names = (*([tokenizer.padding["pad_token"]] if tokenizer.padding else []), *PADDING_NAMES)
    name = next((name for name in names if tokenizer.token_to_id(name) is not None), PAD)
    tokenizer.add_special_tokens([name])
    padding, ids = tokenizer.token_to_id(name), list(tokenizer.get_vocab().values())
    assert padding is not None
    if ids.count(padding) > 1:  # a new one is numbered by how many there are
        raise ValueError(f"it has no token for padding, and {padding} is taken: add one called {PAD} to it")
    tokenizer.enable_padding(pad_id=padding, pad_token=name)
    if (marks := tokenizer.num_special_tokens_to_add(False)) >= max_length:  # it would not cut off at all
        raise ValueError(f"it puts {marks} marks of its own into each, and there must be room for more")
    tokenizer.enable_truncation(max_length)
    if (most := max(tokenizer.encode("a \N{SNOWMAN}").ids, default=0)) > max(ids):
        raise ValueError(f"it gives the id {most}, and the last of its tokens is {max(ids)}")
    return tokenizer.to_str()


@functools.lru_cache(maxsize=4)
def read_tokenizer(content: str) -> Vocabulary:
    """From the JSON that a run keeps. Raises BadInput for anything else."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(content)
    except Exception as error:  # the library raises nothing more special
        raise BadInput(f"the run's tokenizer cannot be read: {error}") from None
    if tokenizer.padding is None or tokenizer.truncation is None:
        raise BadInput("the run's tokenizer does not say how it pads and cuts off: it is not as the run stored it")
    padding: int = tokenizer.padding["pad_id"]
    tokenizer.no_padding()  # of a whole block to its longest
    # Not their number: those of a vocabulary that was cut down have gaps.
    return Vocabulary(tokenizer, max(tokenizer.get_vocab().values()) + 1, padding)


def same_tokens(one: str, other: str) -> bool:
    """Whether an id is the same token in both tokenizers, whatever they cut off."""
    contents = [json.loads(content) | {"truncation": None} for content in (one, other)]
    return contents[0] == contents[1]


class Encoded:
    """Texts as token ids, int32, one behind the other. lengths: (N,) int64; truncated: how many were cut off."""

    def __init__(self, tokens: np.ndarray, lengths: np.ndarray, truncated: int, padding: int):
        self.lengths, self.truncated = lengths, truncated
        self._tokens, self._starts, self._padding = tokens, np.concatenate([[0], np.cumsum(lengths)]), padding

    def padded(self, ids: np.ndarray) -> np.ndarray:
        """int64 (n, the longest of the n), filled up with the tokenizer's padding on the right."""
        lengths = self.lengths[ids]
        tokens = np.full((len(ids), lengths.max(initial=0)), self._padding, np.int64)
        for row, (start, length) in enumerate(zip(self._starts[ids], lengths, strict=True)):
            tokens[row, :length] = self._tokens[start : start + length]
        return tokens


def encode(content: str, texts: Sequence[str]) -> Encoded:
    """The tokens of each text, as far as the tokenizer goes. Padding is in none: a text that names it means none.

    Raises BadInput for a text that the library breaks on.
    """
    vocabulary = read_tokenizer(content)
    parts, lengths, truncated = [np.empty(0, np.int32)], [], 0
    for start in range(0, len(texts), BLOCK):
        try:
            encodings = vocabulary.tokenizer.encode_batch_fast(list(texts[start : start + BLOCK]))
        except BaseException as error:  # a panic in Rust is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise BadInput(f"the tokenizer cannot encode a text: {error}") from None
        for encoding in encodings:
            tokens = np.array(encoding.ids, np.int32)
            parts.append(tokens[tokens != vocabulary.padding])
            lengths.append(len(parts[-1]))
            truncated += bool(encoding.overflowing)
    return Encoded(np.concatenate(parts), np.array(lengths, np.int64), truncated, vocabulary.padding)

"""From texts to numbers: a tokenizer of the tokenizers library, trained on the training split or given as a file."""

import functools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from app.config import TOKENIZERS
from app.errors import BadInput

# Said aloud, the library does not warn of it when a process that has used it is forked (a DataLoader's).
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, UNK = "[PAD]", "[UNK]"
# Texts that are encoded at a time: bounds the library's objects in memory.
BLOCK = 10_000


def train_tokenizer(kind: str, vocab_size: int, texts: Iterable[str]) -> str:
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
    return tokenizer.to_str()


def read_tokenizer_file(path: str) -> str:
    """The JSON of a tokenizer that the tokenizers library has saved. Raises BadInput for anything else."""
    try:
        content = Path(path).read_text(encoding="utf-8")
        read_tokenizer(content)
    except OSError as error:
        raise BadInput(
            f"--tokenizer {path}: {error.strerror}; allowed are {', '.join(TOKENIZERS)} and a file"
        ) from None
    except Exception as error:  # the library raises nothing more special
        raise BadInput(f"--tokenizer {path} is no tokenizer file (tokenizer.json): {error}") from None
    return content


@functools.lru_cache(maxsize=4)
def read_tokenizer(content: str) -> "Tokenizer":
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(content)
    tokenizer.no_padding()
    return tokenizer


def vocabulary_size(content: str) -> int:
    """The number of ids that encode() gives, padding included."""
    return max(read_tokenizer(content).get_vocab_size(), _padding_id(content) + 1)


def _padding_id(content: str) -> int:
    """The id of its padding token, or one that is free."""
    tokenizer = read_tokenizer(content)
    known = (tokenizer.token_to_id(name) for name in (PAD, "<pad>", "<|pad|>"))
    return next((number for number in known if number is not None), tokenizer.get_vocab_size())


class Encoded:
    """Texts as token ids, int32, one behind the other. lengths: (N,) int64; truncated: how many were cut off."""

    def __init__(self, tokens: np.ndarray, lengths: np.ndarray, truncated: int):
        self.lengths, self.truncated = lengths, truncated
        self._tokens, self._starts = tokens, np.concatenate([[0], np.cumsum(lengths)])

    def padded(self, ids: np.ndarray) -> np.ndarray:
        """int64 (n, the longest of the n), filled up with 0 on the right."""
        lengths = self.lengths[ids]
        tokens = np.zeros((len(ids), lengths.max(initial=0)), np.int64)
        for row, (start, length) in enumerate(zip(self._starts[ids], lengths, strict=True)):
            tokens[row, :length] = self._tokens[start : start + length]
        return tokens


def encode(content: str, texts: Sequence[str], max_length: int) -> Encoded:
    """The first max_length tokens of each text; 0 is padding and in no text.

    (Where the tokenizer has another token at 0, that one takes the number of its padding token.)
    Raises BadInput for a tokenizer that cannot do it, such as one without an unknown token.
    """
    tokenizer, padding = read_tokenizer(content), _padding_id(content)
    parts, lengths, truncated = [np.empty(0, np.int32)], [], 0
    for start in range(0, len(texts), BLOCK):
        try:
            tokenizer.enable_truncation(max_length)  # leaves the tokens that its post-processor adds
            encodings = tokenizer.encode_batch_fast(list(texts[start : start + BLOCK]))
        except Exception as error:  # the library raises nothing more special
            raise BadInput(f"the tokenizer cannot encode at --max-length {max_length}: {error}") from None
        for encoding in encodings:
            parts.append(np.array(encoding.ids, np.int32))
            lengths.append(len(encoding.ids))
            truncated += bool(encoding.overflowing)
    tokens = np.concatenate(parts)
    if padding:
        tokens[tokens == 0] = padding
    return Encoded(tokens, np.array(lengths, np.int64), truncated)

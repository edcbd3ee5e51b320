"""Models of texts: padding never changes a prediction, and any number of ranks learns the same."""

import copy
import functools
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from app.config import Config
from app.data.datasets import check_data, load_splits
from app.data.samples import DataInfo
from app.data.tokens import train_tokenizer
from app.errors import BadInput
from app.loop import train
from app.models.build import build_model
from app.models.text import TextLstm, TextTransformer
from tests.common import build_training, loader_for, on_ranks

VOCABULARY = 50
LENGTHS = [1, 7, 3, 12]

MODELS = {
    "lstm": functools.partial(TextLstm, VOCABULARY, 3, 16, 20, dropout=0.3),
    "bidirectional": functools.partial(TextLstm, VOCABULARY, 3, 16, 20, dropout=0.3, bidirectional=True),
    "transformer": functools.partial(TextTransformer, VOCABULARY, 3, 16, 20, num_layers=2, num_heads=4, dropout=0.3),
}


def batch() -> torch.Tensor:
    """Texts of LENGTHS, padded to the longest."""
    tokens = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        tokens[row, :length] = torch.randint(1, VOCABULARY, (length,), generator=torch.Generator().manual_seed(row))
    return tokens


@pytest.mark.parametrize("name", MODELS)
def test_padding_never_changes_a_prediction(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    # Whatever stands for padding in the embedding: nobody looks at it.
    torch.nn.init.normal_(next(m for m in model.modules() if isinstance(m, nn.Embedding)).weight)
    tokens = batch()
    together = model(tokens)
    assert together.shape == (4, 3)
    alone = torch.cat([model(tokens[row : row + 1, :length]) for row, length in enumerate(LENGTHS)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)
    more = model(torch.nn.functional.pad(tokens, (0, 30)))
    torch.testing.assert_close(more, alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_padding_never_changes_a_gradient(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()  # no dropout, which would differ
    other = copy.deepcopy(model)
    model(batch()).square().sum().backward()
    other(torch.nn.functional.pad(batch(), (0, 9))).square().sum().backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
def test_what_stands_first_and_last_matters(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    tokens = batch()
    for place in (0, LENGTHS[1] - 1):
        changed = tokens.clone()
        changed[1, place] = changed[1, place] % (VOCABULARY - 1) + 1
        different = (model(changed) - model(tokens)).abs().amax(dim=1) > 1e-6
        assert different.tolist() == [False, True, False, False]


def test_the_state_is_that_of_torchs_own_packed_sequences() -> None:
    torch.manual_seed(0)
    model = TextLstm(VOCABULARY, 3, 16, 20, bidirectional=True).eval()
    reference = nn.LSTM(16, 20, batch_first=True, bidirectional=True)
    assert model.backward_lstm is not None
    for name, weights in model.lstm.named_parameters():
        getattr(reference, name).data = weights.data
        getattr(reference, f"{name}_reverse").data = dict(model.backward_lstm.named_parameters())[name].data
    packed = nn.utils.rnn.pack_padded_sequence(
        model.embedding(batch()), torch.tensor(LENGTHS), batch_first=True, enforce_sorted=False
    )
    _, (states, _) = reference(packed)
    expected = model.fc(torch.cat([states[0], states[1]], dim=1))
    torch.testing.assert_close(model(batch()), expected, rtol=0, atol=1e-6)


def two_sentences(folder: Path) -> Config:
    rows = "text,label\nI love this movie,good\nThis movie is terrible,bad\n"
    for name in ("train.csv", "val.csv"):
        (folder / name).write_text(rows)
    return Config(
        dataset="text",
        data_dir=str(folder),
        model="text-lstm",
        embedding_size=50,
        hidden_size=50,
        dropout=0,
        batch_size=2,
        optimizer="adam",
        lr=1e-3,
        weight_decay=0,
        schedule="constant",
        warmup_epochs=0,
        epochs=10,
    )


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_two_sentences_are_learnt_in_ten_epochs(tmp_path: Path, seed: int) -> None:
    config = two_sentences(tmp_path).model_copy(update={"seed": seed})
    splits = load_splits(config, check_data(config).tokenizer)
    torch.manual_seed(seed)
    network = build_model(config, splits.info)
    training = build_training(config, splits, network)
    losses = [result.loss for result in train(training, loader_for(training, splits))]
    assert len(losses) == 10
    assert all(later < earlier for earlier, later in itertools.pairwise(losses))
    predictions = network.eval()(splits.val.inputs(np.arange(2))).argmax(dim=1)
    assert [splits.info.class_names[i] for i in predictions] == ["good", "bad"]


def text_losses(settings: dict) -> list[float]:
    config = Config(**settings)
    splits = load_splits(config, check_data(config).tokenizer)
    torch.manual_seed(0)
    training = build_training(config, splits, build_model(config, splits.info))
    return [result.loss / result.count for result in train(training, loader_for(training, splits))]


@pytest.mark.parametrize("model", ["text-lstm", "text-transformer"])
def test_any_number_of_ranks_gives_the_losses_of_one(tmp_path: Path, model: str) -> None:
    """Though each pads its part of a batch to its own longest."""
    generator = np.random.default_rng(3)
    rows = [" ".join(f"w{i}" for i in generator.integers(0, 40, generator.integers(1, 30))) for _ in range(60)]
    (tmp_path / "t.csv").write_text("text,label\n" + "".join(f"{text},c{len(text) % 3}\n" for text in rows))
    settings = {
        "dataset": "text",
        "data_dir": str(tmp_path),
        "model": model,
        "sampler": "length-bucketed",
        "batch_size": 14,
        "epochs": 3,
        "dropout": 0,
        "embedding_size": 16,
        "hidden_size": 16,
    }
    expected = text_losses(settings)
    assert np.ptp(expected) > 0.01
    for size in (2, 3):
        for losses in on_ranks(size, text_losses, settings):
            np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)


def text_info(classes: int = 3) -> DataInfo:
    names = tuple(map(str, range(classes)))
    return DataInfo((9,), names, (), (), 10, dtype="int64", tokenizer=train_tokenizer("word", 30, 9, ["a b c"]))


def reads_pixels(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    return nn.Linear(input_shape[0], num_classes)


def reads_tokens(num_classes: int, vocab_size: int) -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(vocab_size, num_classes, padding_idx=0, mode="mean"))


def test_a_model_of_ones_own_is_told_the_vocabulary() -> None:
    here = "tests.models.test_text"
    config = Config(dataset="stdlib-docs", model=f"{here}:reads_tokens")
    assert build_model(config, text_info())(torch.ones(2, 4, dtype=torch.int64)).shape == (2, 3)
    with pytest.raises(BadInput, match="is called with num_classes and vocab_size, which it does not take"):
        build_model(config.model_copy(update={"model": f"{here}:reads_pixels"}), text_info())


def test_texts_and_images_are_not_mixed_up() -> None:
    images = DataInfo((1, 8, 8), ("a", "b"), (0.5,), (0.5,), 10)
    with pytest.raises(
        BadInput, match=r"--model text-lstm takes texts, and --dataset .* has 2 classes, images of 1x8x8"
    ):
        build_model(Config(model="text-lstm", dataset="tests.common:tiny_splits"), images)
    with pytest.raises(
        BadInput, match=r"--model mnist-cnn takes images, and .* has 3 classes, texts of up to 9 out of 5"
    ):
        build_model(Config(), text_info())

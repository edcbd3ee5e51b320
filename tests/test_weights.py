"""Weights from elsewhere: files, checkpoints and runs, to start from and to measure."""

import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from app.config import Config
from app.config_file import to_yaml
from app.data.datasets import check_data, load_splits
from app.errors import BadInput
from app.evaluate import main as evaluate
from app.runs import find_checkpoint, resolved
from app.setup import build_network
from app.trained import load_trained
from app.weights import load_weights, load_weights_file
from tests.common import ClassicNet, PlainNet, tiny_splits
from tests.test_evaluate import TINY, last_line, trained_run


def same(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


class Canary:
    """Unpickling it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_a_malicious_pickle_is_rejected_and_not_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(Canary(canary), protocol=2))
    torch.save({"weight": Canary(canary)}, tmp_path / "evil2.pt")
    for name in ("evil.pt", "evil2.pt"):
        with pytest.raises(BadInput, match=f"{name} is no file of plain tensors"):
            load_weights_file(str(tmp_path / name), str(tmp_path / name))
    assert not canary.exists()


def test_weights_files(tmp_path: Path) -> None:
    weights = PlainNet().state_dict()
    torch.save(weights, tmp_path / "w.pt")
    save_file(weights, tmp_path / "w.safetensors")
    for name in ("w.pt", "w.safetensors"):
        found = load_weights_file(str(tmp_path / name), str(tmp_path / name))
        assert all(torch.equal(found[key], weights[key]) for key in weights)
    with pytest.raises(BadInput, match="no such file"):
        load_weights_file(str(tmp_path / "none.pt"), str(tmp_path / "none.pt"))
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(BadInput, match="no file of plain tensors"):
        load_weights_file(str(tmp_path / "text.safetensors"), str(tmp_path / "text.safetensors"))
    (tmp_path / "empty.pt").write_bytes(b"")
    (tmp_path / "text.pt").write_text("hello")
    for name in ("empty.pt", "text.pt"):
        with pytest.raises(BadInput, match=f"{name} is no file of plain tensors"):
            load_weights_file(str(tmp_path / name), str(tmp_path / name))
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(BadInput, match="must hold a state dict"):
        load_weights_file(str(tmp_path / "list.pt"), str(tmp_path / "list.pt"))


def test_another_architecture_is_refused_with_keys_and_shapes() -> None:
    weights = PlainNet(num_classes=5).state_dict()
    weights["extra"] = torch.zeros(2)
    del weights["conv.bias"]
    with pytest.raises(BadInput) as error:
        load_weights(PlainNet(), weights, "w.pt")
    for line in (
        "w.pt is of another architecture",
        "conv.bias (8,) is missing",
        "extra (2,) is not in the model",
        "fc.weight is (5, 288), the model has (4, 288)",
    ):
        assert line in str(error.value)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
def test_prefixes_of_ddp_and_compile_are_stripped_when_all_keys_carry_them(tmp_path: Path, suffix: str) -> None:
    network = PlainNet()
    ddp = nn.parallel.DistributedDataParallel
    wrappers: list[tuple[Any, str]] = [  # Any: torch.compile's stubs say Callable
        (network, "conv.weight"),
        (ddp(network), "module.conv.weight"),
        (nn.DataParallel(network), "module.conv.weight"),
        (torch.compile(network), "_orig_mod.conv.weight"),
        (torch.compile(ddp(network)), "_orig_mod.module.conv.weight"),
        (ddp(torch.compile(network)), "module._orig_mod.conv.weight"),  # type: ignore[arg-type]
    ]
    for wrapped, first in wrappers:
        weights = wrapped.state_dict()
        assert next(iter(weights)) == first
        path = str(tmp_path / f"w{suffix}")
        save_file(weights, path) if suffix == ".safetensors" else torch.save(weights, path)
        loaded = PlainNet()
        load_weights(loaded, load_weights_file(path, path), path)
        assert same(loaded.state_dict(), network.state_dict()), first


def test_a_prefix_that_not_all_keys_carry_is_no_wrappers() -> None:
    weights = {f"module.{name}": tensor for name, tensor in PlainNet().state_dict().items()}
    weights["steps"] = torch.zeros(1)
    with pytest.raises(BadInput, match=r"module\.conv\.weight \(8, 1, 3, 3\) is not in the model"):
        load_weights(PlainNet(), weights, "w.pt")


class Holder(nn.Module):
    """Its only part is called as DDP calls what it wraps."""

    def __init__(self):
        super().__init__()
        self.module = PlainNet()


def test_a_part_called_module_is_kept() -> None:
    network = Holder()
    for weights in (network.state_dict(), nn.DataParallel(network).state_dict()):
        loaded = Holder()
        load_weights(loaded, weights, "w.pt")
        assert same(loaded.state_dict(), network.state_dict())


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        (lambda tensor: torch.full_like(tensor, torch.nan), "has values that are not finite"),
        (lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8), r"is torch\.qint8"),
        (lambda tensor: tensor.to(torch.complex64), r"is torch\.complex64"),
        (lambda tensor: tensor.to(torch.int8), r"is torch\.int8"),
        (lambda tensor: torch.full_like(tensor, torch.inf), "has values that are not finite"),
        (lambda tensor: tensor.to("meta"), "is on the meta device"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # deprecated, and still in files
def test_weights_that_are_no_numbers_to_start_from(spoilt: Callable, message: str) -> None:
    network = nn.Linear(3, 2)
    weights = {name: tensor.detach() for name, tensor in network.state_dict().items()}
    with pytest.raises(BadInput, match=rf"w\.pt: bias {message}.*; save the floating-point weights"):
        load_weights(network, weights | {"bias": spoilt(weights["bias"])}, "w.pt")
    load_weights(network, {name: tensor.half() for name, tensor in weights.items()}, "w.pt")
    network.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    load_weights(network, network.state_dict(), "w.pt")


@pytest.mark.parametrize("name", ["model", "state_dict", "model_state_dict"])
def test_a_state_dict_among_other_things(tmp_path: Path, name: str) -> None:
    weights = PlainNet().state_dict()
    path = str(tmp_path / "w.pt")
    torch.save({name: weights, "epoch": 3, "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]}}, path)
    assert same(load_weights_file(path, path), weights)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"net": {"a": torch.zeros(1)}, "epoch": 3}, "or one as model, state_dict, .* it has the keys net, epoch"),
        ({"model": {"a": torch.zeros(1)}, "state_dict": {"a": torch.zeros(1)}}, "of which model and state_dict are"),
        ({"model": 3}, "it has the keys model"),
        ({1: torch.zeros(1)}, "it has the keys 1"),
        (torch.zeros(1), "it holds Tensor"),
    ],
)
def test_what_is_no_state_dict_is_refused_with_its_keys(tmp_path: Path, content: object, message: str) -> None:
    path = str(tmp_path / "w.pt")
    torch.save(content, path)
    with pytest.raises(BadInput, match=f"w.pt must hold a state dict.*{message}"):
        load_weights_file(path, path)


def starting(tmp_path: Path, weights: str, settings: dict[str, Any] = TINY) -> nn.Module:
    """The network that a run with these --weights begins with."""
    config = resolved(Config(weights=weights, output_dir=str(tmp_path / "new"), **settings))
    return build_network(config, load_splits(config, check_data(config).tokenizer).info, None)


def test_a_run_starts_from_another_runs_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained_run(tmp_path, seed=7, **TINY)
    monkeypatch.chdir(tmp_path)
    checkpoint = find_checkpoint("r")
    expected = load_trained("r").weights
    shutil.copytree("runs/r", "copied")  # a folder's name without any '/'
    for given in ("runs/r", "./runs/r/", str(tmp_path / "runs" / "r"), checkpoint, "copied"):
        assert same(starting(tmp_path, given).state_dict(), expected), given
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert same(starting(tmp_path, "../runs/r").state_dict(), expected)
    (tmp_path / "run.pt").symlink_to(tmp_path / "runs" / "r")  # a folder, whatever it is called
    assert same(starting(tmp_path, str(tmp_path / "run.pt")).state_dict(), expected)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("runs/none", "--weights .*runs/none is no run's folder, .* no file of weights"),
        ("none.safetensors", "--weights none.safetensors: no such file"),
        ("empty", "--weights .*empty is no run's folder"),
    ],
)
def test_weights_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=message):
        resolved(Config(weights=weights, **TINY))


def write_table(path: Path, words: tuple[str, str]) -> str:
    path.write_text("text,label\n" + "".join(f"{words[i % 2]} it is,{'ab'[i % 2]}\n" for i in range(20)))
    return str(path)


def test_weights_of_texts_are_those_of_their_tokens(tmp_path: Path) -> None:
    model: dict[str, Any] = {
        "dataset": "text",
        "model": "text-lstm",
        "embedding_size": 4,
        "hidden_size": 4,
        "max_length": 5,
    }
    trained_run(tmp_path, data_dir=write_table(tmp_path / "t.csv", ("good", "bad")), **model)
    other = write_table(tmp_path / "u.csv", ("fine", "poor"))
    run = tmp_path / "runs" / "r"
    with pytest.raises(BadInput, match=r"runs/r was trained on the tokens of another tokenizer.*tokenizer\.json"):
        starting(tmp_path, str(run), model | {"data_dir": other})
    tokenizer = load_trained(str(run)).info.tokenizer
    assert tokenizer is not None
    (tmp_path / "tokenizer.json").write_text(tokenizer)
    model |= {"tokenizer": str(tmp_path / "tokenizer.json"), "max_length": 9}  # longer than the run's
    found = starting(tmp_path, str(run), model | {"data_dir": other})
    assert same(found.state_dict(), load_trained(str(run)).weights)


def test_evaluate_measures_a_plain_state_dict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = trained_run(tmp_path, **TINY)
    assert evaluate([str(tmp_path / "runs" / "r")]) == 0
    expected = last_line(capsys)
    trained = load_trained(str(tmp_path / "runs" / "r"))
    weights = str(tmp_path / "w.pt")
    torch.save(nn.DataParallel(trained.classifier().network).state_dict(), weights)
    settings = tmp_path / "settings.yaml"
    settings.write_text(to_yaml(config.model_copy(update={"weights": "no-longer-there.pt"})))
    assert load_trained(weights, str(settings)).info == tiny_splits(config).info
    assert evaluate([weights, "--config", str(settings)]) == 0
    assert last_line(capsys) == {**expected, "checkpoint": weights}

    with pytest.raises(BadInput, match=r"w\.pt has weights alone.*--config FILE\.yaml"):
        evaluate([weights])
    with pytest.raises(BadInput, match=r"--config .*runs/r is no file of weights .*leave it out"):
        evaluate([str(tmp_path / "runs" / "r"), "--config", str(settings)])
    settings.write_text("dataset: image-folder\n")
    with pytest.raises(BadInput, match=r"--config .*settings\.yaml: --dataset image-folder needs --data-dir"):
        evaluate([weights, "--config", str(settings)])
    settings.write_text(json.dumps({**TINY, "model": "resnet18"}))
    with pytest.raises(BadInput, match=r"w\.pt is of another architecture"):
        evaluate([weights, "--config", str(settings)])


@pytest.mark.usefixtures("process_group")
def test_evaluate_measures_a_checkpoint_of_a_classic_ddp_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = ClassicNet()
    torch.save(nn.parallel.DistributedDataParallel(network).state_dict(), tmp_path / "mnist_cnn.pt")
    (tmp_path / "settings.yaml").write_text("dataset: digits\nmodel: mnist-cnn\n")
    assert evaluate([str(tmp_path / "mnist_cnn.pt"), "--config", str(tmp_path / "settings.yaml")]) == 0
    splits = load_splits(Config())
    test, (mean,), (std,) = splits["test"], splits.info.mean, splits.info.std
    with torch.no_grad():
        logits = network.eval()((test.inputs(np.arange(len(test.labels))).float() / 255 - mean) / std)
    loss = nn.functional.cross_entropy(logits, torch.from_numpy(test.labels)).item()
    assert last_line(capsys)["metrics"]["test/loss"] == pytest.approx(loss, rel=1e-5)


def test_evaluate_of_texts_needs_their_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data_dir = write_table(tmp_path / "t.csv", ("good", "bad"))
    model: dict[str, Any] = {
        "dataset": "text",
        "data_dir": data_dir,
        "model": "text-lstm",
        "embedding_size": 4,
        "hidden_size": 4,
    }
    config = trained_run(tmp_path, **model)
    run = load_trained(str(tmp_path / "runs" / "r"))
    save_file(run.weights, tmp_path / "w.safetensors")
    (tmp_path / "settings.yaml").write_text(to_yaml(config))
    with pytest.raises(BadInput, match=r"--config .*settings\.yaml: .* set tokenizer to its file, tokenizer\.json"):
        load_trained(str(tmp_path / "w.safetensors"), str(tmp_path / "settings.yaml"))
    assert run.info.tokenizer is not None
    (tmp_path / "tokenizer.json").write_text(run.info.tokenizer)
    given = config.model_copy(update={"tokenizer": str(tmp_path / "tokenizer.json")})
    (tmp_path / "settings.yaml").write_text(to_yaml(given))
    found = load_trained(str(tmp_path / "w.safetensors"), str(tmp_path / "settings.yaml"))
    assert found.info == run.info
    argv = [str(tmp_path / "w.safetensors"), "--config", str(tmp_path / "settings.yaml"), "--split", "val"]
    assert evaluate(argv) == 0
    assert last_line(capsys)["num_samples"] == 2


def test_a_malicious_file_is_refused_and_never_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    evil = str(tmp_path / "evil.pth")
    settings = tmp_path / "settings.yaml"
    settings.write_text(json.dumps(TINY))
    for content in (Canary(canary), {"model": PlainNet().state_dict(), "args": Canary(canary)}):
        torch.save(content, evil)
        with pytest.raises(BadInput, match=r"evil\.pth is no file of plain tensors \(it holds more than tensors\)"):
            evaluate([evil, "--config", str(settings)])
        with pytest.raises(BadInput, match=r"--weights .*evil\.pth is no file of plain tensors"):
            starting(tmp_path, evil)
    assert not canary.exists()

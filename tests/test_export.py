"""Networks as files that are run without this project: what they give, and what is beside them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import app.export
from app.errors import BadInput, ExportFailed
from app.export import main, read_onnx, read_pt2, real_batches
from app.trained import load_trained
from tests.common import PlainNet, tiny_splits, with_unreadable, write_images
from tests.test_evaluate import TINY, last_line, trained_run

SUFFIXES = {"torch-export": "pt2", "onnx": "onnx"}
READERS = {"torch-export": read_pt2, "onnx": read_onnx}


def write_texts(path: Path) -> str:
    rows = [f"{'good fine well'[: 4 + i % 11]} {'it is so ' * (i % 5)},{'ab'[i % 2]}" for i in range(200)]
    path.write_text("text,label\n" + "\n".join(rows) + "\n")
    return str(path)


def texts(tmp_path: Path, **settings: Any) -> dict[str, Any]:
    sizes = {"embedding_size": 8, "hidden_size": 6, "max_length": 12}
    return {"dataset": "text", "data_dir": write_texts(tmp_path / "t.csv"), **sizes, **settings}


def exported(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str], **settings: Any) -> tuple[Path, dict]:
    """The file of an untrained run, and what the command said of it."""
    trained_run(tmp_path, **settings)
    file = tmp_path / f"model.{SUFFIXES[kind]}"
    capsys.readouterr()
    assert main([str(tmp_path / "runs" / "r"), "--format", kind, "--output", str(file)]) == 0
    found = last_line(capsys)
    assert (found["file"], found["format"], found["size"]) == (str(file), kind, file.stat().st_size)
    assert 0 <= found["max_difference"] <= found["tolerance"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    return file, found


@pytest.mark.parametrize("kind", SUFFIXES)
@pytest.mark.parametrize(
    "settings",
    [
        {"model": "text-lstm"},
        {"model": "text-lstm", "bidirectional": True},
        {"model": "text-transformer", "num_heads": 2, "num_layers": 1},
    ],
    ids=["lstm", "bidirectional", "transformer"],
)
def test_texts_of_any_number_and_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, settings: dict[str, Any]
) -> None:
    file, found = exported(tmp_path, kind, capsys, **texts(tmp_path, **settings))
    assert {shape[0] for shape in found["input_shapes"]} >= {1, 2, 7}
    assert len({shape[1] for shape in found["input_shapes"]}) > 2
    run, network = READERS[kind](file), load_trained(str(tmp_path / "runs" / "r")).classifier()
    generator = torch.Generator().manual_seed(0)
    for shape in ((1, 1), (1, 12), (5, 1), (3, 40)):  # 40: more than the tokens it was traced with
        tokens = torch.randint(2, 6, shape, generator=generator)
        tokens[0, (shape[1] + 1) // 2 :] = 0
        with torch.no_grad():
            torch.testing.assert_close(run(tokens), network(tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", SUFFIXES)
def test_images_of_several_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    for size, name in (((12, 12), "cat"), ((20, 8), "dog"), ((8, 20), "emu")):
        write_images(tmp_path / "data", {name: 12}, size)
    settings = {"dataset": "image-folder", "data_dir": str(tmp_path / "data"), "image_size": 32, "val_fraction": 0.5}
    _, found = exported(tmp_path, kind, capsys, model="resnet18", sampler="aspect-grouped", **settings)
    assert found["split"] == "val"
    assert len({tuple(shape[2:]) for shape in found["input_shapes"]}) > 1


def tiny_vit(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    """torchvision's, which is large in all its named sizes."""
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        input_shape[1], patch_size=8, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8, num_classes=num_classes
    )


@pytest.mark.parametrize("model", ["mnist-cnn", "tests.test_export:tiny_vit"])
def test_images_as_onnx(tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str) -> None:
    data = {"dataset": "synthetic", "synthetic_samples": 50, "image_size": 24}
    _, found = exported(tmp_path, "onnx", capsys, model=model, **data)
    assert {shape[0] for shape in found["input_shapes"]} == {1, 2}


def test_what_stands_in_a_pt2_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, _ = exported(tmp_path, "torch-export", capsys, **texts(tmp_path, model="text-lstm"))
    extra: dict[str, Any] = {"class_names.json": "", "settings.yaml": "", "tokenizer.json": ""}
    torch.export.load(file, extra_files=extra)
    assert json.loads(extra["class_names.json"]) == ["a", "b"]
    assert yaml.safe_load(extra["settings.yaml"])["model"] == "text-lstm"
    assert extra["tokenizer.json"] == load_trained(str(tmp_path / "runs" / "r")).info.tokenizer


def test_what_stands_in_an_onnx_file_of_a_users_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import onnx

    file, found = exported(tmp_path, "onnx", capsys, **TINY)
    assert (found["num_samples"], found["num_classes"]) == (11, 4)
    model = onnx.load(file)
    beside = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(beside["class_names.json"]) == ["a", "b", "c", "d"]
    assert yaml.safe_load(beside["settings.yaml"])["model"] == TINY["model"]
    assert [value.name for value in (*model.graph.input, *model.graph.output)] == ["inputs", "logits"]
    first, channels, *_ = model.graph.input[0].type.tensor_type.shape.dim
    assert (first.dim_param, channels.dim_value) == ("batch", 1)


def test_a_file_of_weights_is_exported_with_its_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(PlainNet().state_dict(), tmp_path / "w.pt")
    (tmp_path / "settings.yaml").write_text(json.dumps(TINY))
    argv = ["--format", "torch-export", "--output", str(tmp_path / "w.pt2")]
    assert main([str(tmp_path / "w.pt"), "--config", str(tmp_path / "settings.yaml"), *argv]) == 0
    assert last_line(capsys)["checkpoint"] == str(tmp_path / "w.pt")


class Batched(PlainNet):
    """What it gives depends on how many samples it is given."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits = super().forward(images)
        return logits if images.shape[0] == 2 else logits + 1


class Unsteady(PlainNet):
    """It gives something else each time."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images) + torch.rand(1)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("Batched", "cannot trace this model with an open batch"),
        ("Unsteady", "gives other logits than the network: the largest difference on 11 samples is .*nothing was"),
    ],
)
def test_what_is_not_the_network_is_not_written(tmp_path: Path, model: str, message: str) -> None:
    trained_run(tmp_path, **TINY | {"model": f"tests.test_export:{model}"})
    file = tmp_path / "model.pt2"
    file.write_text("the one before")
    with pytest.raises(ExportFailed, match=message):
        main([str(tmp_path / "runs" / "r"), "--format", "torch-export", "--output", str(file), "--overwrite"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt2", "runs"]
    assert file.read_text() == "the one before"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "onnx", "--output", "m.pt2"], r"--output m\.pt2: a file of --format onnx must end in \.onnx"),
        (["--format", "torch-export", "--output", "m"], r"--output m: .* must end in \.pt2"),
        (["--format", "onnx", "--output", "s3://b/m.onnx"], "must be a file on this machine"),
        (["--format", "onnx", "--output", "no/m.onnx"], "--output no/m.onnx: there is no directory"),
        (["--format", "onnx", "--output", "there.onnx"], "there.onnx exists: .* --overwrite"),
        (["--format", "onnx", "--output", "m.onnx", "--num-samples", "0"], "--num-samples 0: must be at least 1"),
        (["--format", "onnx", "--output", "m.onnx"], "nowhere is no run's folder"),
    ],
)
def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.onnx").touch()
    with pytest.raises(BadInput, match=message):
        main(["nowhere", *words])


def test_onnx_without_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.export, "ONNX_PACKAGES", ("torch", "onnx_that_is_not_there"))
    with pytest.raises(BadInput, match="--format onnx needs onnx_that_is_not_there: install with uv sync --extra onnx"):
        main(["nowhere", "--format", "onnx", "--output", str(tmp_path / "m.onnx")])


def test_samples_that_cannot_be_read_are_left_out_where_training_left_them_out(tmp_path: Path) -> None:
    config = trained_run(tmp_path, **TINY)
    samples = with_unreadable(tiny_splits(config), test=[0, 3])["test"]
    assert [len(batch) for batch in real_batches(samples, 64, skip_unreadable=True)] == [1, 2, 6]
    with pytest.raises(BadInput, match=r"test/0\.png is no readable image"):
        real_batches(samples, 64, skip_unreadable=False)
    assert [len(batch) for batch in real_batches(samples, 2, skip_unreadable=True)] == [1]

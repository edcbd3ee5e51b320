"""Networks by name, fitted to the data."""

import dataclasses

import pytest
import torch
from torch import nn

from app.config import Config
from app.data.samples import DataInfo
from app.errors import BadInput
from app.models.build import Normalize, build_model
from tests.common import ClassicNet


def info(channels: int = 1, size: int = 28, classes: int = 7) -> DataInfo:
    return DataInfo((channels, size, size), tuple(map(str, range(classes))), (0.5,) * channels, (0.25,) * channels, 100)


@pytest.mark.parametrize("training", [False, True])
def test_mnist_cnn_is_the_classic_network(training: bool) -> None:
    network, classic = build_model(Config(), info(classes=10)), ClassicNet()
    assert sum(parameter.numel() for parameter in network.parameters()) == 824_326
    network.load_state_dict(classic.state_dict())
    images, logits = torch.rand(4, 1, 28, 28), []
    for each in (network, classic):
        torch.manual_seed(0)  # of dropout
        logits.append(each.train(training)(images))
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize(("size", "features"), [(10, 64), (28, 1600), (29, 1600), (32, 2304)])
def test_mnist_cnn_takes_other_sizes_and_channels(size: int, features: int) -> None:
    network = build_model(Config(), info(3, size))
    assert network.get_parameter("fc1.weight").shape == (500, features)


def test_mnist_cnn_names_the_smallest_image() -> None:
    with pytest.raises(BadInput, match=r"--model mnist-cnn needs images of 10 pixels or more on a side, .* 9x9"):
        build_model(Config(), info(size=9))


@pytest.mark.parametrize(
    ("name", "channels", "size"),
    [
        ("resnet18", 1, 28),
        ("mobilenet_v3_small", 3, 32),
        ("squeezenet1_1", 1, 32),
        ("googlenet", 3, 64),
        ("vit_b_16", 1, 32),
        ("efficientnet_b0", 3, 32),
    ],
)
def test_torchvision_models_take_the_datas_channels_and_classes(name: str, channels: int, size: int) -> None:
    network = build_model(Config(model=name), info(channels, size)).eval()
    assert network(torch.rand(2, channels, size, size)).shape == (2, 7)


def test_pretrained_weights_keep_all_but_the_class_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    source = torchvision.models.resnet18(num_classes=1000).state_dict()
    monkeypatch.setattr(torchvision.models.ResNet18_Weights, "get_state_dict", lambda *_, **__: source)
    network = build_model(Config(model="resnet18", weights="IMAGENET1K_V1"), info(channels=1, size=32))
    found = network.state_dict()
    assert torch.equal(found["layer1.0.conv1.weight"], source["layer1.0.conv1.weight"])
    assert found["fc.weight"].shape == (7, 512)
    # A grey image gives what its RGB copy gave.
    grey = torch.rand(1, 1, 32, 32)
    expected = nn.functional.conv2d(grey.expand(1, 3, 32, 32), source["conv1.weight"], stride=2, padding=3)
    torch.testing.assert_close(network.get_submodule("conv1")(grey), expected, rtol=1e-4, atol=1e-5)


def test_a_model_of_one_shape_is_refused_images_of_several() -> None:
    several = dataclasses.replace(info(3, 32), shapes=((32, 32), (24, 40)))
    config = Config(model="resnet18", dataset="tests.common:tiny_splits", sampler="aspect-grouped")
    build_model(config, several)
    for model in ("mnist-cnn", "vit_b_16", "tests.common:PlainNet"):
        with pytest.raises(BadInput, match=r"3x24x40: .*--sampler aspect-grouped needs one that takes images of any"):
            build_model(config.model_copy(update={"model": model}), several)


def test_unknown_weights_are_listed() -> None:
    with pytest.raises(BadInput, match="--weights V9: resnet18 has DEFAULT, IMAGENET1K_V1"):
        build_model(Config(model="resnet18", weights="V9"), info(3, 32))


def test_weights_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    def unreachable(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(torchvision.models.ResNet18_Weights, "get_state_dict", unreachable)
    with pytest.raises(BadInput, match=r"could not be fetched \(no route to host\)"):
        build_model(Config(model="resnet18", weights="DEFAULT"), info(3, 32))


@pytest.mark.parametrize(("name", "size"), [("alexnet", 16), ("vit_b_16", 30)])
def test_images_that_a_model_cannot_take(name: str, size: int) -> None:
    with pytest.raises(BadInput, match=f"--model {name}"):
        build_model(Config(model=name), info(3, size))


def three_classes(num_classes: int, input_shape: tuple[int, int, int]) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 3))


def not_a_module(num_classes: int, input_shape: tuple[int, int, int]) -> str:
    return "network"


def test_your_own_model() -> None:
    network = build_model(Config(model="tests.models.test_build:three_classes"), info(classes=3))
    assert network(torch.rand(2, 1, 28, 28)).shape == (2, 3)


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("three_classes", r"gives \(2, 3\) for 2 images of 1x28x28: expected logits \(2, 7\)"),
        ("not_a_module", "returned str: it must return a torch.nn.Module"),
        ("missing", r"test_build.py\) has no missing"),
    ],
)
def test_your_own_model_gone_wrong(attribute: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        build_model(Config(model=f"tests.models.test_build:{attribute}"), info())


def test_normalize() -> None:
    data = DataInfo((2, 1, 1), ("a", "b"), (0.5, 0.1), (0.25, 0.2), 10)
    pixels = torch.tensor([[[[255]], [[51]]]], dtype=torch.uint8)
    torch.testing.assert_close(Normalize(data)(pixels).flatten(), torch.tensor([2.0, 0.5]))

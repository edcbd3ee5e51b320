"""Models by name: build_model() makes one for a data set's classes and image shape."""

import inspect

import torch
from torch import nn

from app.config import CALLABLE, Config, is_weights_path
from app.data.samples import DataInfo
from app.errors import BadInput
from app.models.mnist_cnn import MnistCnn
from app.models.names import MODELS, TEXT_MODELS
from app.models.text import TextLstm, TextTransformer
from app.models.zoo import build_torchvision
from app.user_code import find_callable


def build_model(config: Config, info: DataInfo, *, pretrained: bool = True) -> nn.Module:
    """A network from what preprocessing() gives to logits (N, num_classes), on the CPU, checked.

    pretrained=False leaves torchvision's weights out: a checkpoint's are about to replace them.
    Raises BadInput for a network that cannot be built or that does not take these images.
    """
    is_text = info.tokenizer is not None
    if not CALLABLE.fullmatch(config.model) and (is_text, info.is_image) != (
        config.model in TEXT_MODELS,
        config.model not in TEXT_MODELS,
    ):
        takes = "texts" if config.model in TEXT_MODELS else "images"
        raise BadInput(f"--model {config.model} takes {takes}, and --dataset {config.dataset} has {info}")
    if config.model in TEXT_MODELS:
        model: nn.Module = build_text_model(config, info)
    elif config.model in MODELS:
        model = MnistCnn(info.input_shape, info.num_classes)
    elif CALLABLE.fullmatch(config.model):
        build = find_callable("--model", config.model)
        given = {"vocab_size": info.vocab_size} if is_text else {"input_shape": info.input_shape}
        try:
            inspect.signature(build).bind(num_classes=info.num_classes, **given)
        except (TypeError, ValueError) as error:
            raise BadInput(
                f"--model {config.model} is called with num_classes and {next(iter(given))}, "
                f"which it does not take: {error}"
            ) from None
        model = build(num_classes=info.num_classes, **given)
        if not isinstance(model, nn.Module):
            raise BadInput(f"--model {config.model} returned {type(model).__name__}: it must return a torch.nn.Module")
    else:
        named = config.weights is not None and not is_weights_path(config.weights)
        weights = config.weights if pretrained and named else None
        model = build_torchvision(config.model, info, weights)
    shapes = [(info.input_shape[0], height, width) for height, width in info.shapes] or [info.input_shape]
    for shape in shapes:
        _check(model, config, info, shape)
    return model


def build_text_model(config: Config, info: DataInfo) -> nn.Module:
    sizes = (info.vocab_size, info.num_classes, config.embedding_size, config.hidden_size)
    if config.model == "text-lstm":
        return TextLstm(*sizes, config.dropout, config.bidirectional)
    return TextTransformer(*sizes, config.num_layers, config.num_heads, config.dropout)


def _check(model: nn.Module, config: Config, info: DataInfo, input_shape: tuple[int, ...]) -> None:
    """Two samples of the shape must give two rows of logits."""
    name, training = config.model, model.training
    model.eval()
    kind = "images" if info.is_image else "texts" if info.tokenizer is not None else "features"
    shape = "x".join(str(side) for side in input_shape)
    try:
        with torch.no_grad():
            logits = model(preprocessing(info)(info.example(2, input_shape)))
    except (RuntimeError, AssertionError, ValueError, IndexError, TypeError) as error:
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        remedy = "; another --image-size may suit it" if info.is_image else ""
        if info.shapes:
            remedy = f"; --sampler {config.sampler} needs one that takes images of any shape, such as resnet18"
        raise BadInput(f"--model {name} does not take {kind} of {shape}: {reason[0]}{remedy}") from error
    finally:
        model.train(training)
    if not isinstance(logits, torch.Tensor) or logits.shape != (2, info.num_classes):
        got = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise BadInput(f"--model {name} gives {got} for 2 {kind} of {shape}: expected logits (2, {info.num_classes})")


def preprocessing(info: DataInfo) -> nn.Module:
    """From the loader's inputs to the network's, on the device: images are normalized, the rest stays as it is."""
    return Normalize(info) if info.is_image else nn.Identity()


class Normalize(nn.Module):
    """uint8 or float pixels 0..255 (N, C, H, W) to float32 of zero mean and unit variance per channel."""

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, info: DataInfo):
        super().__init__()
        shape = (1, len(info.mean), 1, 1)
        self.register_buffer("scale", (1 / (255 * torch.tensor(info.std))).view(shape), persistent=False)
        self.register_buffer("shift", (torch.tensor(info.mean) / torch.tensor(info.std)).view(shape), persistent=False)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.float() * self.scale - self.shift

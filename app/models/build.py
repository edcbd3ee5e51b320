"""Models by name: build_model() makes one for a data set's classes and image shape."""

import torch
from torch import nn

from app.config import CALLABLE, Config, is_weights_path
from app.data.samples import DataInfo
from app.errors import BadInput
from app.models.mnist_cnn import MnistCnn
from app.models.names import MODELS, TEXT_MODELS
from app.models.text import TextLstm, TextTransformer
from app.models.zoo import build_torchvision
from app.user_code import find_callable, told, told_as_bad_input


def build_model(config: Config, info: DataInfo, *, pretrained: bool = True) -> nn.Module:
    """A network from what preprocessing() gives to logits (N, num_classes), on the CPU, checked.

    pretrained=False leaves torchvision's weights out: a checkpoint's are about to replace them.
    Raises BadInput for a network that cannot be built or that does not take these images.
    """
    is_text = info.tokenizer is not None
    takes = "texts" if config.model in TEXT_MODELS else "images"
    if not CALLABLE.fullmatch(config.model) and takes != info.kind:
        raise BadInput(f"--model {config.model} takes {takes}, and --dataset {config.dataset} has {info}")
    if config.model in TEXT_MODELS:
        model: nn.Module = build_text_model(config, info)
    elif config.model in MODELS:
        model = MnistCnn(info.input_shape, info.num_classes)
    elif CALLABLE.fullmatch(config.model):
        argument, value = ("vocab_size", info.vocab_size) if is_text else ("input_shape", info.input_shape)
        build = find_callable("--model", config.model, "num_classes", argument)
        with told_as_bad_input(f"--model {config.model}"):
            model = build(num_classes=info.num_classes, **{argument: value})
            if not isinstance(model, nn.Module):
                raise BadInput(f"it returned {type(model).__name__}: it must return a torch.nn.Module")
            if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
                raise BadInput(f"it returned a {type(model).__name__}: return what is in it, .module; the run wraps it")
        _check_parameters(model, config.model)
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
    """Two samples of the shape must give two rows of logits, in evaluation mode."""
    name, training = config.model, model.training
    model.eval()
    inputs = preprocessing(info)(info.example(2, input_shape))
    if config.channels_last and info.is_image:
        inputs = inputs.contiguous(memory_format=torch.channels_last)  # as in training: view() may not take it
    what = f"{info.kind} of {'x'.join(map(str, input_shape))}"
    try:
        with torch.no_grad():
            logits = model(inputs)
    except BadInput:
        raise
    except Exception as error:  # a network of the user's own raises anything
        remedy = "; another --image-size may suit it" if info.is_image else ""
        if CALLABLE.fullmatch(name):
            dtype = str(inputs.dtype).removeprefix("torch.")
            remedy = f"; it is called with {dtype} of shape (N, {', '.join(map(str, input_shape))})"
        if info.shapes:
            remedy = f"; --sampler {config.sampler} needs one that takes images of any shape, such as resnet18"
        raise BadInput(f"--model {name} does not take {what}: {told(error)}{remedy}") from error
    finally:
        model.train(training)
    if not isinstance(logits, torch.Tensor) or logits.shape != (2, info.num_classes):
        got = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise BadInput(f"--model {name} gives {got} for 2 {what}: expected logits (2, {info.num_classes})")
    if not logits.is_floating_point() or not logits.isfinite().all():
        given = f"{logits.dtype}" if not logits.is_floating_point() else "NaN or infinite logits"
        raise BadInput(f"--model {name} gives {given} for {what}: expected finite floats")


def _check_parameters(model: nn.Module, name: str) -> None:
    """Of a network of the user's own."""
    tensors = [*model.parameters(), *model.buffers()]
    if elsewhere := {str(tensor.device) for tensor in tensors} - {"cpu"}:
        raise BadInput(f"--model {name} returned a network on {', '.join(elsewhere)}: leave it on the CPU")
    if other := {str(p.dtype) for p in model.parameters() if p.is_floating_point()} - {"torch.float32"}:
        raise BadInput(f"--model {name} has parameters of {', '.join(other)}: use torch.float32, and --precision bf16")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BadInput(f"--model {name} returned a network without a parameter to train")


def preprocessing(info: DataInfo) -> nn.Module:
    """From the loader's inputs to the network's, on the device.

    Images are normalized, padding of texts is 0; features stay as they are.
    """
    if info.is_image:
        return Normalize(info)
    return PaddingFirst(info.padding) if info.kind == "texts" and info.padding else nn.Identity()


class PaddingFirst(nn.Module):
    """The ids of a tokenizer (N, L) with padding as 0, and what was 0 in its place."""

    def __init__(self, padding: int):
        super().__init__()
        self.padding = padding

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        changed = torch.where(tokens == self.padding, 0, tokens)
        return torch.where(tokens == 0, self.padding, changed)


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

"""torchvision's classification models, fitted to a data set's classes and channels."""

from typing import Any

import torch
from torch import nn

from app.data.samples import DataInfo
from app.errors import BadInput, Unavailable
from app.retry import is_transient


def build_torchvision(name: str, info: DataInfo, weights: str | None) -> nn.Module:
    """The model by its name; with pretrained weights the class layer is new and the rest is kept.

    Raises BadInput for unknown weights, or weights that cannot be fetched.
    """
    from torchvision import models

    options: dict[str, object] = {}
    if name.startswith("vit_"):
        options["image_size"] = info.input_shape[1]
    if name in ("googlenet", "inception_v3"):
        options.update(aux_logits=False)  # these give a tuple otherwise
        if weights is None:
            options["init_weights"] = True
    if weights is None:
        try:
            model = models.get_model(name, weights=None, num_classes=info.num_classes, **options)
        except (AssertionError, ValueError, RuntimeError) as error:  # a ViT's image size must divide into patches
            raise BadInput(f"--model {name} with images of {info.input_shape[1:]}: {error}") from error
    else:
        model = _pretrained(name, info, weights, options)
    _fit_channels(model, info.input_shape[0], keep_weights=weights is not None)
    return model


def _pretrained(name: str, info: DataInfo, weights: str, options: dict[str, object]) -> nn.Module:
    from torchvision import models

    known = models.get_model_weights(name)
    allowed = ["DEFAULT", *known.__members__]
    if weights not in allowed:
        raise BadInput(
            f"--weights {weights}: {name} has {', '.join(allowed)}; or give a .safetensors or .pt file, or runs/NAME"
        )
    chosen = known[weights] if weights != "DEFAULT" else known.DEFAULT  # type: ignore[attr-defined]  # every weights enum has one
    options.pop("image_size", None)  # the weights' own; the check of the model tells if it does not fit
    try:
        model = models.get_model(name, weights=chosen, **options)
    except OSError as error:  # URLError is one
        kind = Unavailable if is_transient(error) else BadInput
        raise kind(
            f"--weights {weights}: {chosen.url} could not be fetched ({error}); "
            "connect to the network, or put the file into torch's cache and try again"
        ) from None
    _replace_last(model, len(chosen.meta["categories"]), info.num_classes)
    return model


def _replace_last(model: nn.Module, old_classes: int, num_classes: int) -> None:
    """A new class layer in place of the last one."""
    for path, module in reversed(list(model.named_modules())):
        if isinstance(module, nn.Linear) and module.out_features == old_classes:
            new: nn.Module = nn.Linear(module.in_features, num_classes, bias=module.bias is not None)
        elif isinstance(module, nn.Conv2d) and module.out_channels == old_classes:  # squeezenet's
            new = nn.Conv2d(module.in_channels, num_classes, kernel_size=1)
        else:
            continue
        model.set_submodule(path, new)
        return
    raise AssertionError(f"no layer of {old_classes} classes")


def _fit_channels(model: nn.Module, channels: int, *, keep_weights: bool) -> None:
    """A first convolution for the data's channels. Kept weights are summed over the old channels and
    shared out over the new ones, so that a grey image gives what its RGB copy gave."""
    path, first = next((p, m) for p, m in model.named_modules() if isinstance(m, nn.Conv2d))
    if first.in_channels == channels:
        return
    shape: dict[str, Any] = {key: getattr(first, key) for key in ("kernel_size", "stride", "padding", "dilation")}
    new = nn.Conv2d(channels, first.out_channels, bias=first.bias is not None, **shape)
    if keep_weights:
        with torch.no_grad():
            total = first.weight.sum(dim=1, keepdim=True)
            new.weight.copy_(total.expand_as(new.weight) / channels)
            if first.bias is not None and new.bias is not None:
                new.bias.copy_(first.bias)
    model.set_submodule(path, new)

"""Weights for a network: whatever they were saved from, by their names and shapes."""

from collections.abc import Set
from typing import Any

import torch
from torch import nn

from app.errors import BadInput, Unavailable
from app.retry import retry

# What DDP and DataParallel, and torch.compile, put before the names of a wrapped network's state dict.
WRAPPERS = ("module.", "_orig_mod.")
# Under these names people save a state dict together with other things.
CONTAINED = ("model", "state_dict", "model_state_dict")


def load_weights(network: nn.Module, weights: dict[str, torch.Tensor], source: str) -> None:
    """Copy weights into the network; what wrappers put before every name is left out.

    Raises BadInput listing the keys and shapes that differ.
    """
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    weights = without_wrappers(weights, wanted.keys())
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    lines = [f"  {name} {wanted[name]} is missing" for name in wanted if name not in found]
    lines += [f"  {name} {found[name]} is not in the model" for name in found if name not in wanted]
    lines += [
        f"  {name} is {found[name]}, the model has {wanted[name]}"
        for name in wanted
        if name in found and found[name] != wanted[name]
    ]
    if lines:
        more = [f"  and {len(lines) - 20} more"] if len(lines) > 20 else []
        raise BadInput(f"{source} is of another architecture:\n" + "\n".join(lines[:20] + more))
    parameters = dict(network.named_parameters())
    for name, own in network.state_dict().items():
        if trouble := of_no_use(weights[name], own.is_floating_point(), name in parameters):
            raise BadInput(f"{source}: {name} {trouble}; save the floating-point weights of a model that works")
    network.load_state_dict(weights)


def of_no_use(tensor: torch.Tensor, wants_float: bool, is_parameter: bool) -> str | None:
    """What is wrong with a tensor for a network's. A buffer may be infinite: a mask is."""
    if tensor.is_meta:
        return "is on the meta device, where tensors have no values"
    if not tensor.is_floating_point():
        return f"is {tensor.dtype}" if wants_float else None
    values = tensor.float()  # what is finite is not known for the smallest types
    if values.isnan().any() or (is_parameter and not values.isfinite().all()):
        return "has values that are not finite"
    return None


def without_wrappers(weights: dict[str, torch.Tensor], wanted: Set[str]) -> dict[str, torch.Tensor]:
    """Without the prefixes that DDP, DataParallel and torch.compile put before every name, in any order.

    One that not all names have is no wrapper's. A network may have a part called 'module' itself: names
    that are wanted are left as they are.
    """
    while weights and not weights.keys() & wanted:
        prefix = next((prefix for prefix in WRAPPERS if all(name.startswith(prefix) for name in weights)), None)
        if prefix is None:
            break
        weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights


def load_weights_file(path: str, source: str) -> dict[str, torch.Tensor]:
    """A state dict from a .safetensors file, or from a .pt file of tensors and plain values.

    A .pt file may hold it under one of the names in CONTAINED instead. Raises BadInput, which calls the
    file `source`, for anything else.
    """
    import pickle

    from safetensors.torch import load_file

    try:
        if path.endswith(".safetensors"):
            return retry(lambda: load_file(path), f"reading {path}")
        content = retry(lambda: torch.load(path, map_location="cpu", weights_only=True), f"reading {path}")
    except FileNotFoundError:
        raise BadInput(f"{source}: no such file") from None
    except Unavailable:
        raise
    except Exception as error:  # what damaged bytes raise in torch.load has no common type
        reason = "it holds more than tensors" if isinstance(error, pickle.UnpicklingError) else type(error).__name__
        raise BadInput(f"{source} is no file of plain tensors ({reason}); save model.state_dict() alone") from error
    if _is_state_dict(content):
        return content
    names = [str(name) for name in content] if isinstance(content, dict) else []
    inside = [name for name in CONTAINED if name in names and _is_state_dict(content[name])]
    if len(inside) == 1:
        return content[inside[0]]
    holds = f"has the keys {', '.join(names[:20])}" if names else f"holds {type(content).__name__}"
    if inside:
        holds += f", of which {' and '.join(inside)} are state dicts: save one of them alone"
    raise BadInput(
        f"{source} must hold a state dict, names and dense tensors, or one as {', '.join(CONTAINED)}; it {holds}"
    )


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        for name, tensor in value.items()
    )

"""Which linear layers can be converted, which stay as they are and why, and what is not covered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Uncovered:
    """Something that multiplies outside a linear layer.

    `flops_per_row` counts multiply-adds twice, forward and backward, for one use a row; None where
    it depends on data that a plan does not see.
    """

    name: str
    kind: str
    reason: str
    flops_per_row: int | None


def left_alone_because(module: nn.Module, *, parent: nn.Module) -> str | None:
    """Why a linear layer keeps its class, or None when it can be converted."""
    if isinstance(parent, nn.MultiheadAttention):
        return "never called as a module: MultiheadAttention hands its weight to a fused function"
    if isinstance(parent, nn.TransformerEncoderLayer):
        return "in evaluation TransformerEncoderLayer's fast path reads its weight past the module"
    if type(module) is not nn.Linear:
        return (
            f"is a {type(module).__qualname__}, a subclass of nn.Linear with behaviour of its own"
        )
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance; a wrapped layer would bypass that"
    if not isinstance(module.weight, torch.Tensor) or module.weight.dtype not in WEIGHT_DTYPES:
        return f"its weight is {getattr(module.weight, 'dtype', None)}, not float32 or bfloat16"
    return None


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear, nn.Module, list[str]]]:
    """(name, module, parent, all names) of every nn.Linear or subclass, in the model's order."""
    names: dict[int, list[str]] = {}
    found: dict[int, tuple[nn.Linear, nn.Module]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        if isinstance(module, nn.Linear):
            names.setdefault(id(module), []).append(name)
            found.setdefault(id(module), (module, modules[name.rpartition(".")[0] if name else ""]))
    for key, (module, parent) in found.items():
        yield names[key][0], module, parent, names[key]


def tied_names(model: nn.Module) -> dict[int, list[str]]:
    """id of a Parameter -> its full names, for Parameters that have more than one."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {key: found for key, found in names.items() if len(found) > 1}


def uncovered(model: nn.Module) -> tuple[Uncovered, ...]:
    """Everything with a 2-D or larger floating Parameter that is not an nn.Linear."""
    return tuple(
        entry
        for name, module in model.named_modules()
        if not isinstance(module, nn.Linear)
        for entry in _entries(name, module)
    )


def _entries(name: str, module: nn.Module) -> Iterator[Uncovered]:
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        yield Uncovered(name, "embedding", "a table lookup has no product", 0)
        return
    if isinstance(module, nn.modules.conv._ConvNd):
        yield Uncovered(name, "convolution", "convolutions are not covered", None)
        return
    for key, parameter in module.named_parameters(recurse=False):
        if parameter.ndim < 2 or not parameter.is_floating_point():
            continue
        full = f"{name}.{key}" if name else key
        kind = type(module).__qualname__
        flops = 6 * parameter.numel()
        if isinstance(module, nn.MultiheadAttention):
            reason = "projection inside MultiheadAttention's fused function"
        elif isinstance(module, nn.RNNBase):
            reason = "recurrent product inside a fused function"
        else:
            reason = f"raw {parameter.ndim}-D parameter of {kind}, multiplied outside nn.Linear"
        yield Uncovered(full, kind, reason, flops)

"""Which linear layers can be converted, which stay as they are and why, and what is not covered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
# weight_norm, spectral_norm and pruning rename a weight; it stays the layer's own product.
_OWN: Final = ("weight", "bias", "weight_g", "weight_v", "weight_orig")
_ADDED: Final = ("bias_k", "bias_v")
# The last is what batch and instance norms, lazy ones included, have in common.
_NORMS: Final = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_TABLES: Final = (nn.Embedding, nn.EmbeddingBag)
_CONVOLUTION: Final = nn.modules.conv._ConvNd


@dataclass(frozen=True)
class Uncovered:
    """Something that multiplies, or may multiply, outside a linear layer.

    `flops_per_row` counts multiply-adds twice, forward and backward, for one use a row; None where
    it depends on what a plan does not see.
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
    if isinstance(module._parameters.get("weight"), UninitializedParameter):
        return "its shape is not known yet: run one batch first"
    if type(module) is not nn.Linear:
        return (
            f"is a {type(module).__qualname__}, a subclass of nn.Linear with behaviour of its own"
        )
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance; a wrapped layer would bypass that"
    if not isinstance(module.weight, torch.Tensor) or module.weight.dtype not in WEIGHT_DTYPES:
        return f"its weight is {getattr(module.weight, 'dtype', None)}, not float32 or bfloat16"
    if 0 in (module.out_features, module.in_features):
        return f"is {module.out_features} x {module.in_features} (N x K): nothing to multiply"
    return None


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear, nn.Module, list[str]]]:
    """(name, module, parent, all names) of every nn.Linear or subclass, in the model's order.

    A layer that is registered more than once has several parents: `parent` is the first one whose
    class keeps it from being converted, else the first one.
    """
    names: dict[int, list[str]] = {}
    found: dict[int, nn.Linear] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        if isinstance(module, nn.Linear):
            names.setdefault(id(module), []).append(name)
            found.setdefault(id(module), module)
    for key, layer in found.items():
        parents = [modules[name.rpartition(".")[0]] for name in names[key]]
        refusing = (one for one in parents if left_alone_because(layer, parent=one))
        yield names[key][0], layer, next(refusing, parents[0]), names[key]


def tied_names(model: nn.Module) -> dict[int, list[str]]:
    """id of a Parameter -> its full names, for Parameters that have more than one."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {key: found for key, found in names.items() if len(found) > 1}


def uncovered(model: nn.Module) -> tuple[Uncovered, ...]:
    """Every table, convolution and floating Parameter of 2-D or more that is no layer's weight."""
    modules = dict(model.named_modules())
    return tuple(
        entry
        for name, module in modules.items()
        if not _is_weight_elsewhere(name, module, modules)
        for entry in _entries(name, module)
    )


def _is_weight_elsewhere(name: str, module: nn.Module, modules: dict[str, nn.Module]) -> bool:
    # A parametrized weight lies in LAYER.parametrizations.weight; LAYER itself accounts for it.
    if not isinstance(module, ParametrizationList):
        return False
    owner, _, key = name.rpartition("parametrizations.")
    layer = modules.get(owner.removesuffix("."))
    return key == "weight" and isinstance(layer, (nn.Linear, _CONVOLUTION, *_TABLES, *_NORMS))


def _entries(name: str, module: nn.Module) -> Iterator[Uncovered]:
    if isinstance(module, _TABLES):
        yield Uncovered(name, "embedding", "a table lookup has no product", 0)
        return
    if isinstance(module, _CONVOLUTION):
        yield Uncovered(name, "convolution", "convolutions are not covered", None)
        return
    if isinstance(module, _NORMS):
        return
    kind = type(module).__qualname__
    for key, parameter in module.named_parameters(recurse=False):
        if isinstance(module, nn.Linear) and key in _OWN:
            continue
        full = f"{name}.{key}" if name else key
        if isinstance(parameter, UninitializedParameter):
            yield Uncovered(full, kind, f"parameter of {kind} whose shape is not known yet", None)
        elif parameter.ndim >= 2 and parameter.is_floating_point():
            yield from _raw(full, key, parameter, module)


def _raw(full: str, key: str, parameter: nn.Parameter, module: nn.Module) -> Iterator[Uncovered]:
    kind = type(module).__qualname__
    flops: int | None = 6 * parameter.numel()
    if isinstance(module, nn.MultiheadAttention):
        if key in _ADDED:
            return
        reason = "projection inside MultiheadAttention's fused function"
    elif isinstance(module, nn.RNNBase):
        reason = "recurrent product inside a fused function"
    else:
        reason = f"raw {parameter.ndim}-D parameter of {kind}: may be multiplied outside nn.Linear"
        if parameter.ndim > 3 or 1 in parameter.shape[:-1]:
            # The shape of something that is broadcast and added, such as position embeddings.
            flops = None
    yield Uncovered(full, kind, reason, flops)

"""Which modules compute an attention, and whether what they call can be proven beforehand."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from torch import nn

from lowprec.attention_call import NO_MASK, Mask

_CALL: Final = "scaled_dot_product_attention"
_ARGUMENTS: Final = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_FUSED: Final = (
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)
_UNKNOWN: Final = object()


class Site(NamedTuple):
    """A module that computes an attention, its names, and why it is left alone, if it is."""

    module: nn.Module
    names: list[str]
    activation: str
    mask: Mask
    reason: str | None


def attention_sites(model: nn.Module) -> Iterator[Site]:
    """Every lowprec.Attention, MultiheadAttention, and module whose forward names the SDPA call."""
    names: dict[int, list[str]] = {}
    found: dict[int, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
        found.setdefault(id(module), module)
    for key, module in found.items():
        own: Any = module
        if "lowprec_attention" in module.__dict__:
            # A converted caller has the mask that was proven, Attention its own.
            mask = module.__dict__.get("lowprec_mask", None) or own.mask
            activation = own.activation if "activation" in module.__dict__ else "softmax"
            yield Site(module, names[key], activation, mask, None)
        elif isinstance(module, nn.MultiheadAttention):
            reason = (
                "calls attention inside a fused function of torch, with weights returned or not"
            )
            yield Site(module, names[key], "softmax", NO_MASK, reason)
        elif _CALL in _names_in(type(module).forward):
            unproven, causal = _proof(module)
            mask = Mask("causal") if causal else NO_MASK
            yield Site(module, names[key], "softmax", mask, unproven)


def _names_in(function: Any) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return () if code is None else (*code.co_names, *code.co_freevars)


def _proof(module: nn.Module) -> tuple[str | None, bool]:
    """Why the call cannot be proven, or None; and whether it is causal."""
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance", False
    for name, inner in module.named_modules():
        ours = type(inner).__module__.partition(".")[0] == "lowprec"
        if inner is not module and (
            isinstance(inner, _FUSED) or not (ours or type(inner).__module__.startswith("torch.nn"))
        ):
            kind = type(inner).__qualname__
            return f"holds {name}, a {kind}, whose own calls would be caught as well", False
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(type(module).forward)))
        function: Any = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return "the source of its forward cannot be read", False
    return _proof_of_source(function, module)


def _proof_of_source(function: Any, module: nn.Module) -> tuple[str | None, bool]:
    calls = [one for one in ast.walk(function) if isinstance(one, ast.Call) and _is_call(one.func)]
    if len(calls) != 1:
        return f"its forward names {_CALL} without one plain call of it", False
    call = calls[0]
    given = dict(zip(_ARGUMENTS, call.args, strict=False))
    given |= {one.arg: one.value for one in call.keywords if one.arg is not None}
    starred = any(isinstance(one, ast.Starred) for one in call.args)
    if starred or any(one.arg is None for one in call.keywords):
        return f"passes arguments to {_CALL} that its source does not show", False
    values = {
        name: _value(given[name], function.args.args[0].arg, module) if name in given else default
        for name, default in (("attn_mask", None), ("dropout_p", 0.0), ("is_causal", False))
    }
    if values["attn_mask"] is not None:
        return "passes attn_mask: which keys are seen is not known before the call", False
    if values["dropout_p"] is _UNKNOWN or values["dropout_p"] != 0:
        return "its dropout_p is not 0 in training: attention here has no dropout", False
    if not isinstance(values["is_causal"], bool):
        return "is_causal is decided in the call", False
    return None, values["is_causal"]


def _is_call(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
    return name == _CALL


def _value(node: ast.expr, own: str, module: nn.Module) -> Any:
    """What an argument is whatever happens: a constant, or a plain attribute of the module."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.IfExp):
        both = [_value(one, own, module) for one in (node.body, node.orelse)]
        return both[0] if both[0] == both[1] else _UNKNOWN
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
        return _UNKNOWN
    if node.value.id != own or node.attr == "training":
        return _UNKNOWN
    found = module.__dict__.get(node.attr, _UNKNOWN)
    return found if isinstance(found, (bool, int, float, type(None))) else _UNKNOWN

"""Modules that call F.scaled_dot_product_attention, with that call computed by us.

The module becomes a subclass of its own class, in place; everything else it does stays its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lowprec.attention_call import AttentionCall, Mask
from lowprec.errors import UnsupportedError
from lowprec.nn.attention import AttentionProducts
from lowprec.nn.operands import autocast_dtype

_made: dict[type, type] = {}


def redirecting(kind: type) -> type:
    """The subclass of `kind` that computes its SDPA call by a plan; one for each class."""
    if kind not in _made:
        body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _made[kind] = type(kind.__name__, (RedirectsAttention, kind), body)
    return _made[kind]


def _blank(kind: type) -> Any:
    ours: Any = redirecting(kind)
    return ours.__new__(ours)


class RedirectsAttention(torch.nn.Module):
    """What is put in front of a module's class: its forward, with the SDPA call redirected."""

    lowprec_attention: AttentionProducts
    lowprec_mask: Mask

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        with _Redirect(self.lowprec_attention, self.lowprec_mask):
            return super().forward(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # By the class that others know: ours is made when it is needed.
        return _blank, (type(self).__mro__[2],), self.__dict__


class _Redirect(TorchFunctionMode):
    def __init__(self, products: AttentionProducts, mask: Mask) -> None:
        super().__init__()
        self.products, self.mask = products, mask

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is functional.scaled_dot_product_attention:
            return redirected(self.products, self.mask, args, kwargs)
        return func(*args, **kwargs)


def redirected(products: AttentionProducts, mask: Mask, args: Any, kwargs: Any) -> torch.Tensor:
    """F.scaled_dot_product_attention(*args, **kwargs) by the products of a plan.

    Raises UnsupportedError for a call that is not the one the plan was made for.
    """
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    q, k, v = (given[name] for name in _NAMES[:3])
    causal = bool(given.get("is_causal", False))
    if given.get("attn_mask") is not None or given.get("dropout_p", 0.0) != 0:
        raise UnsupportedError(
            f"attention {products.layer!r} was planned as a call without attn_mask and dropout, "
            "but is called with one; plan again, or leave it out of the recipe"
        )
    if causal != (mask.kind == "causal"):
        raise UnsupportedError(
            f"attention {products.layer!r} was planned with is_causal={not causal}, but is called "
            f"with is_causal={causal}"
        )
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise UnsupportedError(
            f"attention {products.layer!r}: q has shape {tuple(q.shape)}; only calls with [B, "
            "heads, L, head dim] are computed in low precision"
        )
    if causal and q.shape[2] != k.shape[2]:
        raise UnsupportedError(
            f"attention {products.layer!r}: is_causal counts from the first key for {q.shape[2]} "
            f"queries and {k.shape[2]} keys, the mask here from the last; give equal lengths"
        )
    if k.shape[1] != q.shape[1] and not given.get("enable_gqa", False):
        raise UnsupportedError(
            f"attention {products.layer!r}: {q.shape[1]} query heads and {k.shape[1]} key heads "
            "without enable_gqa"
        )
    dtype = autocast_dtype(v)
    if dtype is not None:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    scale = given.get("scale")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    o = _attend(products, (q, k, v), AttentionCall("softmax", mask, float(scale), False))
    return o.view(q.shape[0], q.shape[2], q.shape[1], q.shape[3]).transpose(1, 2)


_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def _attend(
    products: AttentionProducts, qkv: tuple[torch.Tensor, ...], call: AttentionCall
) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in qkv)
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    cu = (starts * q.shape[1], starts * k.shape[1])
    flat = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
    return products.attend(flat, cu, call, None, check=False)

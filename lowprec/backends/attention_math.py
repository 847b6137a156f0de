"""Attention forward and backward, sequence by sequence, for backends written in PyTorch.

Dimensions: H query heads, R queries, C keys, D head dim, of one sequence. A backend brings its
casts and the dtype of its sums; formulas and masks are here, see lowprec.attention_call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import torch
from torch.nn import functional

from lowprec.attention_call import AttentionCall, Mask
from lowprec.attention_policy import AttentionGemm, AttentionPolicy, StaticCast
from lowprec.formats import Cast

# The axis of each operand, as it lies in memory, that the product contracts.
_AXES: Final = {
    "qk": (-1, -1),
    "pv": (-1, -2),
    "dp": (-1, -1),
    "dv": (-2, -2),
    "dq": (-1, -2),
    "dk": (-2, -2),
}
_SCORES: Final = 1 << 26  # of one step, in numbers: a quarter of a GiB of float32


class Arithmetic(NamedTuple):
    """What a backend brings: values after a cast (along -1 or -2), the product, dtype of sums.

    exact: unquantized operands are not rounded to bf16, for float64 inputs.
    """

    cast: Callable[[torch.Tensor, Cast | StaticCast, int], torch.Tensor]
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    sums: torch.dtype
    exact: bool = False


class Step(NamedTuple):
    """One sequence, or some heads of it: its rows of q and k, its heads of q and of k."""

    queries: slice
    keys: slice
    heads: slice
    key_heads: slice

    def take(self, t: torch.Tensor, *, keys: bool) -> torch.Tensor:
        """The part of `t` [T, H, D] as [H, rows, D]."""
        rows, heads = (self.keys, self.key_heads) if keys else (self.queries, self.heads)
        return t[rows, heads].transpose(0, 1)

    def bias(self, bias: torch.Tensor | None, sums: torch.dtype) -> torch.Tensor | None:
        """The part of the bias [H or 1, R, C]."""
        return None if bias is None else self.bias_part(bias).to(sums)

    def bias_part(self, bias: torch.Tensor) -> torch.Tensor:
        """The same as a view."""
        r, c = (one.stop - one.start for one in (self.queries, self.keys))
        return bias[self.heads if bias.shape[0] > 1 else slice(None), :r, :c]


def steps(
    q: torch.Tensor, k: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor
) -> Iterator[Step]:
    """The sequences in order; the heads of long ones in several steps."""
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    key_heads = k.shape[1]
    group = q.shape[1] // max(key_heads, 1)
    for b in range(len(ends_q) - 1):
        queries, keys = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        scores = (queries.stop - queries.start) * (keys.stop - keys.start) * group
        width = max(1, min(key_heads, _SCORES // max(scores, 1)))
        for first in range(0, key_heads, width):
            last = min(first + width, key_heads)
            yield Step(queries, keys, slice(first * group, last * group), slice(first, last))


def visible(mask: Mask, rows: int, cols: int, device: torch.device) -> torch.Tensor | None:
    """Which keys each query sees, bool [R, C]; None for all."""
    if mask.kind == "none":
        return None
    i = torch.arange(rows, device=device).unsqueeze(1)
    j = torch.arange(cols, device=device)
    if mask.kind == "blocks":
        return i // mask.size == j // mask.size
    p = i + (cols - rows)
    if mask.kind == "causal":
        return j <= p
    return (j >= p - mask.left) & (j <= p + mask.right)


def _multiply(
    arithmetic: Arithmetic,
    policy: AttentionPolicy,
    name: str,
    left: torch.Tensor,
    right: torch.Tensor,
) -> torch.Tensor:
    """One product by its policy; right operands of fewer heads serve groups of heads."""
    product = getattr(policy, name)
    casts = product.casts if isinstance(product, AttentionGemm) else (None, None)
    a, b = (
        _operand(arithmetic, t, cast, axis)
        for t, cast, axis in zip((left, right), casts, _AXES[name], strict=True)
    )
    a = a if _AXES[name][0] == -1 else a.mT
    b = b.mT if _AXES[name][1] == -1 else b
    if b.shape[0] != a.shape[0]:
        b = b.repeat_interleave(a.shape[0] // max(b.shape[0], 1), 0)
    return arithmetic.multiply(a, b)


def _operand(
    arithmetic: Arithmetic, t: torch.Tensor, cast: Cast | StaticCast | None, axis: int
) -> torch.Tensor:
    if cast is not None:
        return arithmetic.cast(t, cast, axis).to(arithmetic.sums)
    return (t if arithmetic.exact else t.bfloat16()).to(arithmetic.sums)


class _Sequence(NamedTuple):
    """Operands [heads, rows, D] of a step, and where its scores come from."""

    arithmetic: Arithmetic
    policy: AttentionPolicy
    call: AttentionCall
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None

    def product(self, name: str, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return _multiply(self.arithmetic, self.policy, name, left, right)

    def left(self, name: str, t: torch.Tensor) -> torch.Tensor:
        """`t` as it enters a product on the left."""
        product = getattr(self.policy, name)
        cast = product.casts[0] if isinstance(product, AttentionGemm) else None
        return _operand(self.arithmetic, t, cast, _AXES[name][0])

    def scores(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """scale * q k^T + bias, [H, R, C], and the hidden ones, bool [R, C]."""
        s = self.product("qk", self.q, self.k) * self.call.scale
        s = s if self.bias is None else s + self.bias
        seen = visible(self.call.mask, s.shape[1], s.shape[2], s.device)
        return s, None if seen is None else ~seen


def _plain(activation: str, s: torch.Tensor) -> torch.Tensor:
    return functional.gelu(s) if activation == "gelu" else functional.silu(s)


def _slope(activation: str, s: torch.Tensor) -> torch.Tensor:
    """Derivative of gelu (x Phi(x)) or silu (x sigmoid(x))."""
    if activation == "silu":
        gate = torch.sigmoid(s)
        return gate * (1 + s * (1 - gate))
    phi = 0.5 * (1 + torch.erf(s * math.sqrt(0.5)))
    return phi + s * torch.exp(-0.5 * s * s) * (1 / math.sqrt(2 * math.pi))


def _forward_step(one: _Sequence) -> tuple[torch.Tensor, torch.Tensor | None]:
    """o [H, R, D] and lse [H, R]."""
    s, hidden = one.scores()
    if one.call.activation != "softmax":
        p = _plain(one.call.activation, s)
        p = p if hidden is None else p.masked_fill(hidden, 0)
        return one.product("pv", p, one.v), None
    s = s if hidden is None else s.masked_fill(hidden, -math.inf)
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:2], 1), -math.inf)
    # A row without keys: exp(-inf - 0) is 0 for each, and so are its sum and its result.
    top = top.masked_fill(top == -math.inf, 0)
    p = torch.exp(s - top)
    total = p.sum(-1, keepdim=True)
    lse = (top + total.log()).squeeze(-1)
    return one.product("pv", p, one.v) / total.masked_fill(total == 0, 1), lse


def _backward_step(
    one: _Sequence, do: torch.Tensor, o: torch.Tensor, lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq [H, R, D], dk and dv [H, C, D] by query head, ds [H, R, C]."""
    s, hidden = one.scores()
    dp = one.product("dp", do, one.v)
    if lse is None:
        p, ds = _plain(one.call.activation, s), _slope(one.call.activation, s) * dp
    else:
        # Rows without keys: exp(-inf - 0).
        s = s if hidden is None else s.masked_fill(hidden, -math.inf)
        p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1))
        # dO as dP reads it: where one key has nearly all of a row's weight, dP - delta is nearly 0,
        # and errors that the two do not share would be all that is left of it.
        delta = (one.left("dp", do) * o.to(s.dtype)).sum(-1, keepdim=True)
        ds = p * (dp - delta)
    if hidden is not None:
        p, ds = p.masked_fill(hidden, 0), ds.masked_fill(hidden, 0)
    dq = one.product("dq", ds, one.k) * one.call.scale
    dk = one.product("dk", ds, one.q) * one.call.scale
    return dq, dk, one.product("dv", p, do), ds


def forward(
    arithmetic: Arithmetic,
    tensors: tuple[torch.Tensor, ...],
    *,
    call: AttentionCall,
    policy: AttentionPolicy,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of (q, k, v, cu_q, cu_k)."""
    q, k, v, cu_q, cu_k = tensors
    arithmetic = _widened(arithmetic, q)
    o = torch.zeros_like(q, memory_format=torch.contiguous_format)
    softmax = call.activation == "softmax"
    rows = (q.shape[1], q.shape[0]) if softmax else (0,)
    wide = torch.promote_types(torch.float32, q.dtype)
    lse = torch.full(rows, -math.inf, dtype=wide, device=q.device)
    for step in steps(q, k, cu_q, cu_k):
        one = _sequence(arithmetic, step, (q, k, v), call, policy, bias)
        o_HRD, lse_HR = _forward_step(one)
        o[step.queries, step.heads] = o_HRD.transpose(0, 1).to(o.dtype)
        if lse_HR is not None:
            lse[step.heads, step.queries] = lse_HR.to(wide)
    return o, lse


def backward(
    arithmetic: Arithmetic,
    tensors: tuple[torch.Tensor, ...],
    *,
    call: AttentionCall,
    policy: AttentionPolicy,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """dq, dk, dv and dbias of (do, q, k, v, o, lse, cu_q, cu_k)."""
    do, q, k, v, o, lse, cu_q, cu_k = tensors
    arithmetic = _widened(arithmetic, q)
    found = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    dbias = None
    if bias is not None and call.wants_dbias:
        dbias = torch.zeros(bias.shape, dtype=arithmetic.sums, device=bias.device)
    for step in steps(q, k, cu_q, cu_k):
        one = _sequence(arithmetic, step, (q, k, v), call, policy, bias)
        do_HRD, o_HRD = (step.take(t, keys=False) for t in (do, o))
        lse_HR = lse[step.heads, step.queries] if call.activation == "softmax" else None
        dq_HRD, dk_HCD, dv_HCD, ds_HRC = _backward_step(one, do_HRD, o_HRD, lse_HR)
        found[0][step.queries, step.heads] = dq_HRD.transpose(0, 1).to(q.dtype)
        for out, by_query_head in ((found[1], dk_HCD), (found[2], dv_HCD)):
            heads = step.key_heads.stop - step.key_heads.start
            summed = by_query_head.unflatten(0, (heads, -1)).sum(1)
            out[step.keys, step.key_heads] = summed.transpose(0, 1).to(out.dtype)
        if dbias is not None:
            part = ds_HRC.sum(0, keepdim=True) if dbias.shape[0] == 1 else ds_HRC
            step.bias_part(dbias).add_(part)
    dq, dk, dv = found
    return dq, dk, dv, None if dbias is None or bias is None else dbias.to(bias.dtype)


def _widened(arithmetic: Arithmetic, q: torch.Tensor) -> Arithmetic:
    sums = torch.promote_types(arithmetic.sums, q.dtype)
    return arithmetic._replace(sums=sums, exact=q.dtype == torch.float64)


def _sequence(
    arithmetic: Arithmetic,
    step: Step,
    qkv: tuple[torch.Tensor, ...],
    call: AttentionCall,
    policy: AttentionPolicy,
    bias: torch.Tensor | None,
) -> _Sequence:
    q, k, v = (step.take(t, keys=keys) for t, keys in zip(qkv, (False, True, True), strict=True))
    return _Sequence(arithmetic, policy, call, q, k, v, step.bias(bias, arithmetic.sums))

"""Attention without native hardware: operands are cast and decoded, sums are float32.

Casts give the reference's numbers bit for bit; products differ from it in the order and width of
summation alone. On a GPU the products are bf16 GEMMs, in which the decoded operands are exact.
"""

from __future__ import annotations

import torch

from lowprec.attention_call import AttentionCall
from lowprec.attention_policy import AttentionPolicy, StaticCast
from lowprec.backends import rounding
from lowprec.backends.attention_facts import AttentionFacts
from lowprec.backends.attention_math import Arithmetic, backward, forward
from lowprec.blocks import Blocking, amax_of, e8m0_bytes, power_of_two, reciprocal_power
from lowprec.formats import Cast, Element


def _cast(t: torch.Tensor, cast: Cast | StaticCast, axis: int) -> torch.Tensor:
    if isinstance(cast, StaticCast):
        return _rounded(t.float() * cast.factor, cast.element).div_(cast.factor)
    blocking = Blocking.of(t.shape, cast.format, axis)
    blocks = blocking.split(t.float())
    biased = e8m0_bytes(amax_of(blocks), cast.format.element, cast.scale_rule)
    # A block with Inf or NaN: whatever comes of it is multiplied by a NaN scale.
    values = _rounded(blocks * reciprocal_power(biased), cast.format.element)
    return blocking.join(values.mul_(power_of_two(biased)))


def _rounded(values: torch.Tensor, element: Element) -> torch.Tensor:
    """Scaled values as the element holds them: float32, saturating."""
    codes = torch.zeros_like(values, dtype=torch.uint8)
    rounding.encode(codes, values, element)
    rounding.decode(values, codes, element)
    return values


def _multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.is_cuda and a.dtype == torch.float32:
        return torch.bmm(a.bfloat16(), b.bfloat16(), out_dtype=torch.float32)
    return a @ b


ARITHMETIC = Arithmetic(_cast, _multiply, torch.float32)


def refuse_attention(facts: AttentionFacts) -> str | None:
    """Every attention exists here."""
    del facts
    return None


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    *,
    call: AttentionCall,
    policy: AttentionPolicy,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse; see lowprec.attention_call."""
    return forward(ARITHMETIC, (q, k, v, cu_q, cu_k), call=call, policy=policy, bias=bias)


def attention_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    *,
    call: AttentionCall,
    policy: AttentionPolicy,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """dq, dk, dv and dbias; see lowprec.attention_call."""
    tensors = (do, q, k, v, o, lse, cu_q, cu_k)
    return backward(ARITHMETIC, tensors, call=call, policy=policy, bias=bias)

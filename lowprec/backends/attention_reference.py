"""The law of attention: casts by the reference's integer rules, sums in float64."""

from __future__ import annotations

import torch

from lowprec.attention_call import AttentionCall
from lowprec.attention_policy import AttentionPolicy, StaticCast
from lowprec.backends import reference
from lowprec.backends.attention_facts import AttentionFacts
from lowprec.backends.attention_math import Arithmetic, backward, forward
from lowprec.formats import Cast


def _cast(t: torch.Tensor, cast: Cast | StaticCast, axis: int) -> torch.Tensor:
    if isinstance(cast, Cast):
        q = reference.quantize(t, cast, axis=axis)
        return reference.dequantize(q, dtype=torch.float32)
    codes = reference.encode(t.float() * cast.factor, cast.element)
    return reference.decode(codes, cast.element) / cast.factor


ARITHMETIC = Arithmetic(_cast, torch.matmul, torch.float64)


def refuse_attention(facts: AttentionFacts) -> str | None:
    """The reference computes every attention on every device."""
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

"""Attention by Triton kernels from where the projection left q and k: front and products.

BF16 products read x' that a pass wrote; of an 8-bit policy the forward pass casts q, k and v where
it reads them, and no x' is written. The backward pass makes x' again.
"""

from __future__ import annotations

import torch

from lowprec.attention_call import AttentionCall
from lowprec.attention_front import Front
from lowprec.attention_policy import AttentionPolicy
from lowprec.backends.triton_kernels import (
    attention_fp8_ops,
    attention_ops,
    attention_project_ops,
    attention_stream_ops,
)
from lowprec.backends.triton_kernels.attention_project_ops import Weights


def forward(
    tensors: tuple[torch.Tensor, ...],
    weights: Weights,
    *,
    front: Front,
    call: AttentionCall,
    policy: AttentionPolicy,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of q, k, v, cu_q, cu_k; see lowprec.attention_call and lowprec.attention_front."""
    q, k, v, cu_q, cu_k = tensors
    one = attention_ops.given((q, k, v), (cu_q, cu_k), bias, call, policy)
    if one.native is None:
        q, k = attention_project_ops.fronted(one, front, weights)
        return attention_ops.attention_forward(
            q, k, v, cu_q, cu_k, call=call, policy=policy, bias=bias
        )
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    if q.numel():
        streams = attention_stream_ops.takes(one)
        codes = attention_project_ops.encoded(
            one, front, weights, one.native.rule, turn="for registers" if streams else "tile"
        )
        if streams:
            attention_stream_ops.forward(one, one.native, o, lse, given=codes)
        else:
            attention_fp8_ops.forward(one, one.native, o, lse, codes)
    return o, lse


def backward(
    tensors: tuple[torch.Tensor, ...],
    weights: Weights,
    *,
    front: Front,
    call: AttentionCall,
    policy: AttentionPolicy,
    bias: torch.Tensor | None,
) -> list[torch.Tensor | None]:
    """dq, dk, dv, dbias and gradients of the weights, of do, q, k, v, o, lse, cu_q, cu_k."""
    do, q, k, v, o, lse, cu_q, cu_k = tensors
    one = attention_ops.given((q, k, v), (cu_q, cu_k), bias, call, policy)
    turned = attention_project_ops.fronted(one, front, weights)
    dq, dk, dv, dbias = attention_ops.attention_backward(
        do, *turned, v, o, lse, cu_q, cu_k, call=call, policy=policy, bias=bias
    )
    dq_, dk_, *of_weights = attention_project_ops.gradients(one, (dq, dk), front, weights)
    return [dq_, dk_, dv, dbias, *of_weights]

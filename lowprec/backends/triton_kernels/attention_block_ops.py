"""Attention within blocks in one pass: which calls take it, and the launches."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton

from lowprec.backends.triton_kernels import attention_blocks, launch
from lowprec.backends.triton_kernels.attention_schedule import schedule
from lowprec.backends.triton_kernels.launch import stored_as

SIZES: Final = (32, 64)
RUN: Final = 8
STAGES: Final = 2
"""Of blocks on their way; one where operands are read in two ways, for which two have no room."""
WIDEST: Final = 128


def takes(one: Any) -> bool:
    """Whether a call (attention_ops.Given) is within blocks of tokens that are queries and keys.

    That the lengths are the same ones is seen from the storage of cu_q and cu_k.
    """
    mask, same = one.call.mask, one.cu_q.data_ptr() == one.cu_k.data_ptr()
    same = same and one.cu_q.shape == one.cu_k.shape
    plain = one.bias is None and one.native is None
    small = mask.size in SIZES and one.width <= WIDEST
    return mask.kind == "blocks" and same and plain and small


def takes_backward(one: Any) -> bool:
    """The same, with a key head for each query head: no sums over heads."""
    return takes(one) and one.q.shape[1] == one.k.shape[1]


def _constants(one: Any, *, wide: int, stages: int = STAGES) -> dict[str, Any]:
    padded = triton.next_power_of_2(one.width)
    return {
        "KIND": one.kind,
        "WIDTH": one.width,
        "D": padded,
        "SIZE": one.call.mask.size,
        "RUN": RUN,
        "STAGES": stages,
        "INTEGER": launch.INTEGER,
        "num_warps": 8 if padded >= wide else 4,
    }


def _stored(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [stored_as(one, integer=launch.INTEGER) for one in tensors]


def forward(one: Any, o: torch.Tensor, lse: torch.Tensor) -> None:
    """Write o and lse."""
    heads = one.q.shape[1]
    starts, owners = schedule(one.cu_q, one.cu_q, one.tokens, one.call.mask.size * RUN)
    strides = [s for t in (one.q, one.k, one.v) for s in t.stride()[:2]]
    attention_blocks.attend_blocks[(owners.shape[0] * heads,)](
        *_stored(one.q, one.k, one.v, o),
        *(lse, one.cu_q, starts, owners, one.cu_q.shape[0] - 1, one.tokens),
        *(heads, heads // one.k.shape[1], *strides, one.call.scale),
        **_constants(one, wide=256),
    )


def backward(
    one: Any,
    do: torch.Tensor,
    do_read: torch.Tensor | None,
    o: torch.Tensor,
    lse: torch.Tensor,
    grads: list[torch.Tensor],
) -> None:
    """Write dq, dk and dv. do_read: dO as dP reads it where dV does not, strided alike."""
    q_read, k_read = one.of_s or (None, None)
    alike = one.of_s is None and do_read is None
    heads = one.q.shape[1]
    starts, owners = schedule(one.cu_q, one.cu_q, one.tokens, one.call.mask.size * RUN)
    strides = [s for t in (one.q, one.k, one.v, do, o) for s in t.stride()[:2]]
    attention_blocks.blocks_backward[(owners.shape[0] * heads,)](
        *_stored(one.q, one.k, one.v, do, q_read, k_read, do_read, o, *grads),
        *(lse, one.cu_q, starts, owners, one.cu_q.shape[0] - 1, one.tokens),
        *(heads, *strides, one.call.scale),
        **_constants(one, wide=128, stages=STAGES if alike else 1),
    )

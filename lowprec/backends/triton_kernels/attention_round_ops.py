"""Operands of attention rounded through their casts, for a backward pass in BF16: the launches."""

from __future__ import annotations

from typing import Any, Final

import torch
import triton

from lowprec.backends.triton_kernels import attention_round, launch
from lowprec.backends.triton_kernels.attention_native import BLOCK
from lowprec.backends.triton_kernels.attention_schedule import schedule
from lowprec.backends.triton_kernels.launch import stored_as

WARPS: Final = 4

Listed = tuple[torch.Tensor, torch.Tensor]


def rounded(one: Any) -> Any:
    """A call (attention_ops.Given) in bf16, of q, k and v as its forward pass read them."""
    rule, of_keys = one.native.rule, None
    of_queries = _listed(one.q, one.cu_q)
    if one.cu_q.data_ptr() == one.cu_k.data_ptr() and one.cu_q.shape == one.cu_k.shape:
        of_keys = of_queries
    (q,) = _rounded((one.q,), one.cu_q, of_queries, rule)
    k, v = _rounded((one.k, one.v), one.cu_k, of_keys or _listed(one.k, one.cu_k), rule)
    return one._replace(q=q, k=k, v=v, native=None)


def _listed(x: torch.Tensor, cu: torch.Tensor) -> Listed | None:
    return schedule(cu, cu, x.shape[0], BLOCK) if x.numel() else None


def _rounded(
    tensors: tuple[torch.Tensor, ...], cu: torch.Tensor, listed: Listed | None, rule: str
) -> list[torch.Tensor]:
    """One or two tensors [T, H, D], rows lined up, as their codes say them; see round_pair."""
    first, none = tensors[0], [None] * (2 - len(tensors))
    _, heads, width = first.shape
    found = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in tensors]
    if listed is not None:
        strides = [t.stride()[:2] for t in (*tensors, first)][:2]
        attention_round.round_pair[(listed[1].shape[0] * heads,)](
            *(*_stored(tensors), *none, *_stored(found), *none),
            *(cu, *listed, cu.shape[0] - 1, heads, *strides[0], *strides[1]),
            RULE=rule,
            BLOCK=BLOCK,
            WIDTH=width,
            D=triton.next_power_of_2(width),
            INTEGER=launch.INTEGER,
            num_warps=WARPS,
        )
    return found


def _stored(tensors: Any) -> list[torch.Tensor | None]:
    return [stored_as(one, integer=launch.INTEGER) for one in tensors]

"""Operands of attention rounded through their casts, for a backward pass in BF16: the launches."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton

from lowprec.backends.triton_kernels import attention_round, launch
from lowprec.backends.triton_kernels.attention_native import BLOCK
from lowprec.backends.triton_kernels.attention_schedule import schedule
from lowprec.backends.triton_kernels.launch import stored_as

WARPS: Final = 4

Pair = tuple[torch.Tensor, torch.Tensor]


class Operands8(NamedTuple):
    """q and k [T, H, D] contiguous in E4M3, scales float32 [H, tiles] of tiles of 128 tokens."""

    q: torch.Tensor
    k: torch.Tensor
    scales_q: torch.Tensor
    scales_k: torch.Tensor


def rounded(one: Any, *, codes: bool = False) -> Any:
    """A call (attention_ops.Given) in bf16, of q, k and v as its forward pass read them.

    codes: q and k also as codes, for products S of these.
    """
    rule, of_keys = one.native.rule, None
    of_queries = _listed(one.q, one.cu_q)
    if one.cu_q.data_ptr() == one.cu_k.data_ptr() and one.cu_q.shape == one.cu_k.shape:
        of_keys = of_queries
    of_keys = of_keys or _listed(one.k, one.cu_k)
    of_q = _room(one.q, one.cu_q) if codes else None
    of_k = _room(one.k, one.cu_k) if codes else None
    (q,) = _rounded((one.q,), one.cu_q, of_queries, rule, of_q)
    k, v = _rounded((one.k, one.v), one.cu_k, of_keys, rule, of_k)
    of_s = Operands8(of_q[0], of_k[0], of_q[1], of_k[1]) if of_q and of_k else None
    return one._replace(q=q, k=k, v=v, native=None, of_s=of_s)


def _room(x: torch.Tensor, cu: torch.Tensor) -> Pair:
    """Room for codes of `x` [T, H, D] and their scales."""
    tiles = x.shape[0] // BLOCK + cu.shape[0] - 1
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return codes, torch.empty((x.shape[1], tiles), dtype=torch.float32, device=x.device)


def _listed(x: torch.Tensor, cu: torch.Tensor) -> Pair | None:
    return schedule(cu, cu, x.shape[0], BLOCK) if x.numel() else None


def _rounded(
    tensors: tuple[torch.Tensor, ...],
    cu: torch.Tensor,
    listed: Pair | None,
    rule: str,
    room: Pair | None,
) -> list[torch.Tensor]:
    """One or two tensors [T, H, D], rows lined up, as their codes say them; see round_pair.

    room: for the codes of the first and their scales.
    """
    first, none = tensors[0], [None] * (2 - len(tensors))
    _, heads, width = first.shape
    found = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in tensors]
    if listed is not None:
        strides = [t.stride()[:2] for t in (*tensors, first)][:2]
        attention_round.round_pair[(listed[1].shape[0] * heads,)](
            *(*_stored(tensors), *none, *_stored(found), *none),
            *((None, None) if room is None else (room[0].view(torch.uint8), room[1])),
            *(cu, *listed, cu.shape[0] - 1, None if room is None else room[1].shape[1]),
            *(heads, *strides[0], *strides[1]),
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

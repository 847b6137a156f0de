"""Operands of the backward pass rounded through their casts: the launches."""

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
    """E4M3 [T, H, D], contiguous, each with scales float32 [H, tiles] of tiles of 128 tokens.

    scales_v: where dP is a product of codes too; v itself is of codes then. rule: of the scales.
    """

    rule: str
    q: Pair
    k: Pair
    scales_v: torch.Tensor | None


def rounded(one: Any, *, codes: bool = False) -> Any:
    """A call (attention_ops.Given) in bf16, of q, k and v as its forward pass read them.

    codes: q and k also as codes, for products S of these; v is codes where dP is one, too.
    """
    rule, of_keys, of_v = one.native.rule, None, None
    of_queries = _listed(one.q, one.cu_q)
    if one.cu_q.data_ptr() == one.cu_k.data_ptr() and one.cu_q.shape == one.cu_k.shape:
        of_keys = of_queries
    of_keys = of_keys or _listed(one.k, one.cu_k)
    if not codes:
        (q,) = _rounded((one.q,), one.cu_q, of_queries, rule)
        k, v = _rounded((one.k, one.v), one.cu_k, of_keys, rule)
        return one._replace(q=q, k=k, v=v, native=None)
    of_q, of_k = _room(one.q, one.cu_q), _room(one.k, one.cu_k)
    if one.native.dp:
        of_v = _room(one.v, one.cu_k)
    (q,) = _rounded((one.q,), one.cu_q, of_queries, rule, of_q)
    k, *more = _rounded((one.k, one.v), one.cu_k, of_keys, rule, of_k, of_v)
    v, scales_v = (more[0], None) if of_v is None else of_v
    return one._replace(q=q, k=k, v=v, native=None, codes=Operands8(rule, of_q, of_k, scales_v))


def rounded_do(one: Any, do: torch.Tensor) -> torch.Tensor:
    """dO [T, H, D], rows lined up, as dP of a call in 8 bits reads it; contiguous."""
    (found,) = _rounded((do,), one.cu_q, _listed(do, one.cu_q), one.native.rule)
    return found


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
    first_room: Pair | None = None,
    second_room: Pair | None = None,
) -> list[torch.Tensor]:
    """One or two tensors [T, H, D], rows lined up, as their codes say them; see round_pair.

    first_room, second_room: for their codes and scales; of the second instead of its values.
    """
    first, none = tensors[0], [None] * (2 - len(tensors))
    _, heads, width = first.shape
    written = tensors if second_room is None else tensors[:1]
    found = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in written]
    if listed is not None:
        strides = [t.stride()[:2] for t in (*tensors, first)][:2]
        rooms = (first_room, second_room)
        attention_round.round_pair[(listed[1].shape[0] * heads,)](
            *(*_stored(tensors), *none, *_stored(found), *[None] * (2 - len(found))),
            *(None if room is None else room[0].view(torch.uint8) for room in rooms),
            *(None if room is None else room[1] for room in rooms),
            *(cu, *listed, cu.shape[0] - 1, 0 if first_room is None else first_room[1].shape[1]),
            *(heads, *strides[0], *strides[1]),
            RULE=rule,
            BLOCK=BLOCK,
            WIDTH=width,
            D=triton.next_power_of_2(width),
            INTEGER=launch.INTEGER,
            num_warps=WARPS,
        )
    return found


def prepared(
    one: Any, do: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, rows_of: torch.Tensor
) -> Pair:
    """Codes and scales of dO; exponents and delta into rows_of [H, places, 2, rows of a place].

    See attention_round.prepare_codes.
    """
    tokens, heads, width = o.shape
    codes, scales = _room(do, one.cu_q)
    starts, owners = schedule(one.cu_q, one.cu_q, tokens, BLOCK)
    attention_round.prepare_codes[(owners.shape[0] * heads,)](
        *(*_stored((do, o)), lse, codes.view(torch.uint8), scales, rows_of),
        *(one.cu_q, starts, owners, one.cu_q.shape[0] - 1, tokens),
        *(scales.shape[1], rows_of.shape[1], heads, *do.stride()[:2], *o.stride()[:2]),
        RULE=one.codes.rule,
        BLOCK=BLOCK,
        TILE=rows_of.shape[3],
        WIDTH=width,
        D=triton.next_power_of_2(width),
        INTEGER=launch.INTEGER,
        num_warps=WARPS,
    )
    return codes, scales


def _stored(tensors: Any) -> list[torch.Tensor | None]:
    return [stored_as(one, integer=launch.INTEGER) for one in tensors]

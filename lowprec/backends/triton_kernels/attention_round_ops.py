"""Operands of the backward pass rounded through their casts: the launches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
import triton

from lowprec.backends.triton_kernels import attention_round, launch
from lowprec.backends.triton_kernels.attention_native import BLOCK
from lowprec.backends.triton_kernels.attention_schedule import schedule
from lowprec.backends.triton_kernels.launch import stored_as

WARPS: Final = 8

Pair = tuple[torch.Tensor, torch.Tensor]


class Operands8(NamedTuple):
    """E4M3 [T, H, D], contiguous, each with scales float32 [H, tiles] of tiles of 128 tokens.

    scales_v: where dP is a product of codes too; v itself is of codes then. rule: of the scales.
    listed: the tiles of the queries, see attention_schedule.
    """

    rule: str
    listed: Pair | None
    q: Pair
    k: Pair
    scales_v: torch.Tensor | None


class _Form(NamedTuple):
    """What is made of a tensor: its values as its codes say them, and the codes."""

    values: bool
    codes: bool


class _Made(NamedTuple):
    """Values [T, H, D], and codes with their scales."""

    values: torch.Tensor | None
    codes: Pair | None


def coded(one: Any) -> Any:
    """A call (attention_ops.Given) in 8 bits for kernels that stream: q and k also as codes.

    q, k and v are as dQ, dK and dP read them; v is codes where dP is a product of codes.
    """
    native = one.native
    form = _Form(values=native.rounded, codes=True)
    of_v = _Form(values=native.rounded and not native.dp, codes=native.dp)
    listed = _listed(one)
    (q,), (k, v) = _made(one, listed, ((one.q, form),), ((one.k, form), (one.v, of_v)))
    assert q.codes is not None
    assert k.codes is not None
    read_v, scales_v = v.codes or (v.values, None)
    read = {"q": q.values, "k": k.values, "v": read_v}
    codes = Operands8(native.rule, listed, q.codes, k.codes, scales_v)
    made = {name: t for name, t in read.items() if t is not None}
    return one._replace(**made, native=None, codes=codes)


def rounded(one: Any, do: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor | None]:
    """The same for kernels of BF16 products, dO, and dO as dP reads it where that differs.

    q and k are as dQ and dK read them, and `of_s` as S does where that differs; all that is read
    in two ways is contiguous.
    """
    native = one.native
    form = _Form(values=True, codes=False)
    of_v = _Form(values=native.rounded or native.dp, codes=False)
    of_do = _Form(values=native.dp, codes=False)
    of_queries, of_keys = ((one.q, form), (do, of_do)), ((one.k, form), (one.v, of_v))
    (q, read), (k, v) = _made(one, _listed(one), of_queries, of_keys)
    if native.rounded:
        one = one._replace(q=q.values, k=k.values)
    else:
        one = one._replace(q=one.q.contiguous(), k=one.k.contiguous(), of_s=(q.values, k.values))
    one = one._replace(v=one.v if v.values is None else v.values, native=None)
    return one, do if read.values is None else do.contiguous(), read.values


def _room(x: torch.Tensor, cu: torch.Tensor) -> Pair:
    """Room for codes of `x` [T, H, D] and their scales."""
    tiles = x.shape[0] // BLOCK + cu.shape[0] - 1
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return codes, torch.empty((x.shape[1], tiles), dtype=torch.float32, device=x.device)


_Some = tuple[tuple[torch.Tensor, _Form], ...]


def _listed(one: Any) -> Pair | None:
    """The list of tiles of the queries; None where there is none."""
    return schedule(one.cu_q, one.cu_q, one.tokens, BLOCK) if one.q.numel() else None


def _made(
    one: Any, listed: Pair | None, of_queries: _Some, of_keys: _Some
) -> tuple[list[_Made], list[_Made]]:
    """What is asked for of one or two tensors of queries, and of keys; rows lined up."""
    made = _made_of(of_queries, one.cu_q, listed, one.native.rule)
    same = one.cu_q.data_ptr() == one.cu_k.data_ptr() and one.cu_q.shape == one.cu_k.shape
    if not one.k.numel():
        listed = None
    elif listed is None or not same:
        listed = schedule(one.cu_k, one.cu_k, one.k.shape[0], BLOCK)
    return made, _made_of(of_keys, one.cu_k, listed, one.native.rule)


def _made_of(some: _Some, cu: torch.Tensor, listed: Pair | None, rule: str) -> list[_Made]:
    """One pass over one or two tensors; see attention_round.round_pair."""
    made = [
        _Made(
            torch.empty(t.shape, dtype=t.dtype, device=t.device) if form.values else None,
            _room(t, cu) if form.codes else None,
        )
        for t, form in some
    ]
    # Nothing is asked for of the second in some cases.
    asked = [(t, one) for (t, form), one in zip(some, made, strict=True) if any(form)]
    if listed is None:
        return made
    first, none = asked[0][0], [None] * (2 - len(asked))
    _, heads, width = first.shape
    codes = [one.codes for _, one in asked]
    tiles = [pair[1].shape[1] for pair in codes if pair]
    strides = [t.stride()[:2] for t in (*(t for t, _ in asked), first)][:2]
    attention_round.round_pair[(listed[1].shape[0] * heads,)](
        *(*_stored(t for t, _ in asked), *none, *_stored(one.values for _, one in asked), *none),
        *(*(None if pair is None else pair[0].view(torch.uint8) for pair in codes), *none),
        *(*(None if pair is None else pair[1] for pair in codes), *none),
        *(cu, *listed, cu.shape[0] - 1, tiles[0] if tiles else 0),
        *(heads, *strides[0], *strides[1]),
        RULE=rule,
        BLOCK=BLOCK,
        WIDTH=width,
        D=triton.next_power_of_2(width),
        INTEGER=launch.INTEGER,
        num_warps=WARPS,
    )
    return made


def prepared(
    one: Any, do: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, rows_of: torch.Tensor
) -> Pair:
    """Codes and scales of dO; exponents and delta into rows_of [H, places, 2, rows of a place].

    See attention_round.prepare_codes.
    """
    tokens, heads, width = o.shape
    codes, scales = _room(do, one.cu_q)
    starts, owners = one.codes.listed
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


def _stored(tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor | None]:
    return [stored_as(one, integer=launch.INTEGER) for one in tensors]

"""Attention with E4M3 operands on tensor cores: the launches."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
import triton

from lowprec.backends.triton_kernels import attention_fp8, launch
from lowprec.backends.triton_kernels.attention_native import BLOCK, Native8
from lowprec.backends.triton_kernels.attention_schedule import schedule
from lowprec.backends.triton_kernels.launch import stored_as

# By head dim: keys of a tile, stages, warps.
SHAPES: Final = {64: (128, 3, 8), 128: (128, 3, 8)}
WARPS: Final = 4


class Pair8(NamedTuple):
    """Two tensors as codes in tiles of 128 tokens, see attention_fp8.encode_pair."""

    codes: tuple[torch.Tensor, torch.Tensor]
    scales: tuple[torch.Tensor, torch.Tensor]
    tiles: int


def encode_pair(a: torch.Tensor, b: torch.Tensor, cu: torch.Tensor, rule: str) -> Pair8:
    """Cast `a` and `b` [T, H, D], rows lined up, in one pass; tiles of `b` are transposed."""
    codes, scales = _encode((a, b), cu, rule, "tile")
    return Pair8((codes[0], codes[1]), (scales[0], scales[1]), codes[0].shape[1])


def encode(
    x: torch.Tensor, cu: torch.Tensor, rule: str, *, turn: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [H, tiles, 128, D] of `x` [T, H, D] and scales [H, tiles]; see _encode_to."""
    codes, scales = _encode((x,), cu, rule, turn)
    return codes[0], scales[0]


def _encode(
    tensors: tuple[torch.Tensor, ...], cu: torch.Tensor, rule: str, turn: str
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    a = tensors[0]
    tokens, heads, width = a.shape
    padded, batch, device = triton.next_power_of_2(width), cu.shape[0] - 1, a.device
    tiles, none = tokens // BLOCK + batch, [None] * (2 - len(tensors))
    turned, shape = (heads, tiles, padded, BLOCK), (heads, tiles, BLOCK, padded)
    shapes = [shape] * (len(tensors) - 1) + [turned if turn else shape]
    codes = [torch.empty(one, dtype=torch.uint8, device=device) for one in shapes]
    scales = [torch.empty(shape[:2], dtype=torch.float32, device=device) for _ in tensors]
    if a.numel():
        starts, owners = schedule(cu, cu, tokens, BLOCK)
        strides = [one.stride()[:2] for one in (*tensors, a)][:2]
        attention_fp8.encode_pair[(owners.shape[0] * heads,)](
            *(*(stored_as(one, integer=launch.INTEGER) for one in tensors), *none),
            *(*codes, *none, *scales, *none),
            *(cu, starts, owners, batch, tiles, heads, *strides[0], *strides[1]),
            TURN=turn,
            RULE=rule,
            BLOCK=BLOCK,
            WIDTH=width,
            D=padded,
            INTEGER=launch.INTEGER,
            num_warps=WARPS,
        )
    return codes, scales


def forward(one: Any, how: Native8, o: torch.Tensor, lse: torch.Tensor, given: Any = None) -> None:
    """Write o and lse of a call (attention_ops.Given) without bias and with a positive scale.

    given: its q, k and v as attention_project_ops.Codes; else they are cast here.
    """
    if given is None:
        keys = encode_pair(one.k, one.v, one.cu_k, how.rule)
        operands = [stored_as(one.q, integer=launch.INTEGER), *keys.codes, None, *keys.scales]
        tiles, strides = (0, keys.tiles), (*one.q.stride()[:2], 0, 0)
    else:
        operands = list(given[:6])
        tiles, strides = given[6:], (*given.q.stride()[:2], *given.k.stride()[:2])
    heads, mask = one.q.shape[1], one.call.mask
    padded = triton.next_power_of_2(one.width)
    tile_k, stages, warps = SHAPES[max(padded, 64)]
    starts, owners = schedule(one.cu_q, one.cu_k, one.tokens, BLOCK)
    attention_fp8.attend_fp8[(owners.shape[0] * heads,)](
        *operands,
        stored_as(o, integer=launch.INTEGER),
        *(lse, one.cu_q, one.cu_k, starts, owners),
        *(one.cu_q.shape[0] - 1, one.tokens, *tiles, heads, heads // one.k.shape[1]),
        *(*strides, one.call.scale, mask.left, mask.right, mask.size),
        MASK=mask.kind,
        RULE=how.rule,
        FACTOR=math.log2(how.factor),
        BLOCK=BLOCK,
        WIDTH=one.width,
        D=padded,
        TILE_K=tile_k,
        STAGES=stages,
        INTEGER=launch.INTEGER,
        num_warps=warps,
    )

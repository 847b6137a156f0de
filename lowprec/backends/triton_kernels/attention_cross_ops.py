"""Attention to short keys in one pass: which calls take it, and the launch."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
import triton

from lowprec.backends.triton_kernels import attention_cross, launch
from lowprec.backends.triton_kernels.attention_schedule import List, schedule
from lowprec.backends.triton_kernels.launch import stored_as
from lowprec.backends.triton_kernels.proven import PROVEN

NAME: Final = "attention bf16, short keys"
TILE_K: Final = 64
"""Keys that stay; a tile of the other kernels, whose bits these are."""
LONG: Final = 8
"""Queries for each key from which on reading q and writing o are the time."""


class Shape(NamedTuple):
    """Queries of a tile, tiles of a program, stages of the pipeline, warps."""

    tile: int
    run: int
    stages: int
    warps: int


# By the power of two that holds the head dim.
SHAPES: Final = {
    16: Shape(128, 8, 4, 4),
    32: Shape(128, 8, 4, 4),
    64: Shape(64, 16, 4, 4),
    128: Shape(64, 16, 3, 4),
}
_INTERPRETED: Final = Shape(32, 2, 1, 1)


def takes(one: Any) -> bool:
    """Whether a call (attention_ops.Given) has short keys, on average, and many queries.

    No bit depends on it beside attention.attend. Before the kernel is proven on a GPU it runs in
    the interpreter alone.
    """
    batch, keys = one.cu_q.shape[0] - 1, one.k.shape[0]
    plain = one.bias is None and one.native is None and one.call.mask.kind == "none"
    short = keys <= TILE_K * batch and one.tokens >= LONG * keys
    return plain and short and ready(one.width)


def ready(width: int) -> bool:
    """Whether the kernel computes heads of `width`, here."""
    return triton.next_power_of_2(width) in SHAPES and (launch.INTEGER or NAME in PROVEN)


def tile(width: int) -> int:
    """Queries of a program."""
    shape = _INTERPRETED if launch.INTEGER else SHAPES[triton.next_power_of_2(width)]
    return shape.tile * shape.run


def forward(one: Any, o: torch.Tensor, lse: torch.Tensor, which: List | None = None) -> None:
    """Write o and lse of all sequences, or of those in a list of tiles of `tile`."""
    heads, padded = one.q.shape[1], triton.next_power_of_2(one.width)
    shape = _INTERPRETED if launch.INTEGER else SHAPES[padded]
    starts, owners = which or schedule(one.cu_q, one.cu_k, one.tokens, tile(one.width))
    strides = [s for t in (one.q, one.k, one.v) for s in t.stride()[:2]]
    attention_cross.attend_cross[(owners.shape[0] * heads,)](
        *(stored_as(t, integer=launch.INTEGER) for t in (one.q, one.k, one.v, o)),
        *(lse, one.cu_q, one.cu_k, starts, owners, one.cu_q.shape[0] - 1, one.tokens),
        *(heads, heads // one.k.shape[1], *strides, one.call.scale),
        KIND=one.kind,
        WIDTH=one.width,
        D=padded,
        TILE_Q=shape.tile,
        TILE_K=32 if launch.INTEGER else TILE_K,
        RUN=shape.run,
        STAGES=shape.stages,
        INTEGER=launch.INTEGER,
        num_warps=shape.warps,
    )

"""Forward attention on Hopper's asynchronous products: which calls it takes, and the launches."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lowprec.backends.triton_kernels import (
    attention_gradients,
    attention_round_ops,
    attention_stream,
    attention_stream_gradients,
    launch,
)
from lowprec.backends.triton_kernels.attention_fp8_ops import encode
from lowprec.backends.triton_kernels.attention_native import Native8
from lowprec.backends.triton_kernels.attention_project_ops import Codes
from lowprec.backends.triton_kernels.attention_schedule import List, schedule
from lowprec.backends.triton_kernels.pipelined import processors

ROWS: Final = 64
TILE_Q: Final = 2 * ROWS
TILE_K: Final = 128
# Slots of the rings of keys and of values, by head dim.
STAGES: Final = {64: 4, 128: 2}
STAGES_8: Final = {64: 4, 128: 3}
# Of the backward kernels: slots; and keys of a step and slots.
KEYS: Final = {64: 4, 128: 2}
KEYS_8: Final = {64: 4, 128: 3}
QUERIES: Final = {64: (128, 3), 128: (128, 2)}


class Source(NamedTuple):
    """A tensor as the copying warp sees it, the columns from head to head, scales, tiles a head."""

    descriptor: Any
    head: int
    scales: torch.Tensor | None
    tiles: int


def takes(one: Any) -> bool:
    """Whether these kernels compute a call (attention_ops.Given)."""
    return _takes_call(one) and all(_regular(t) for t in (one.q, one.k, one.v))


def _takes_call(one: Any) -> bool:
    """`takes` but for how q, k and v lie in memory."""
    return (
        not launch.INTEGER
        and one.q.is_cuda
        and torch.cuda.get_device_capability(one.q.device)[0] == 9
        and one.width in STAGES
        and one.call.mask.kind in ("none", "causal")
        and one.bias is None
        and one.kind in ("softmax", "gelu", "silu")
        and one.k.shape[0] > 0
    )


def takes_backward(one: Any) -> bool:
    """Whether these kernels compute the gradients of a call: of a softmax, in bf16 or of codes."""
    return one.native is None and one.kind == "softmax" and takes(one)


def takes_backward_of_codes(one: Any) -> bool:
    """`takes_backward` of a call in 8 bits, once attention_round_ops.coded has been there."""
    small = all(t.numel() < 2**31 for t in (one.q, one.k, one.v))
    kept = [] if one.native.rounded else [one.q, one.k]
    if not (one.native.rounded or one.native.dp):
        kept.append(one.v)
    return one.kind == "softmax" and small and all(map(_regular, kept)) and _takes_call(one)


def _regular(x: torch.Tensor) -> bool:
    """Whether heads lie side by side, or rows do."""
    row, head, _ = x.stride()
    return row > 0 and head > 0 and x.shape[0] * row < 2**31 and x.shape[1] * head < 2**31


def _descriptor(x: torch.Tensor, shape: list[int], rows: int, cols: int, row: int) -> Any:
    size = x.dtype.itemsize
    layout = NVMMASharedLayout(
        swizzle_byte_width=min(128, cols * size), element_bitwidth=8 * size, rank=2
    )
    return TensorDescriptor(x, shape, [row, 1], [rows, cols], layout)


def _plain(x: torch.Tensor, rows: int) -> Source:
    """`x` [T, H, D] bf16 in tiles of `rows`."""
    tokens, heads, width = x.shape
    row, head, _ = x.stride()
    shape = [tokens, (heads - 1) * head + width]
    return Source(_descriptor(x, shape, rows, width, row), head, None, 0)


def _codes(x: torch.Tensor, cu: torch.Tensor, rule: str, rows: int, *, turn: bool) -> Source:
    """Codes of `x` in tiles of 128 tokens, copied `rows` at a time; turned, whole tiles."""
    codes, scales = encode(x, cu, rule, turn="for registers" if turn else "")
    return _tiled(codes, scales, codes.shape[-2] if turn else rows)


def _tiled(codes: torch.Tensor, scales: torch.Tensor, rows: int) -> Source:
    flat = codes.view(torch.float8_e4m3fn).view(-1, codes.shape[-1])
    cols = flat.shape[1]
    return Source(_descriptor(flat, list(flat.shape), rows, cols, cols), 0, scales, codes.shape[1])


def _projected(given: Codes) -> tuple[Source, Source, Source]:
    """Codes that the projection left: q and k at the places of their tokens."""
    q, k = (
        _plain(codes.view(torch.float8_e4m3fn), rows)._replace(scales=scales, tiles=tiles)
        for codes, rows, scales, tiles in (
            (given.q, ROWS, given.scales_q, given.tiles_q),
            (given.k, TILE_K, given.scales_k, given.tiles_k),
        )
    )
    return q, k, _tiled(given.v, given.scales_v, given.v.shape[-2])


def forward(
    one: Any,
    how: Native8 | None,
    o: torch.Tensor,
    lse: torch.Tensor,
    which: List | None = None,
    given: Codes | None = None,
) -> None:
    """Write o and lse of a call that `takes` says yes to, of the sequences in a list or of all.

    given: its q, k and v in 8 bits; else they are cast here.
    """
    attend(one, how, sources(one, how, given), o, lse, which)


def sources(
    one: Any, how: Native8 | None, given: Codes | None = None
) -> tuple[Source, Source, Source]:
    """q, k and v as the copying warp reads them; cast here, unless `given` in 8 bits."""
    if how is None:
        q = _plain(one.q, ROWS)
        k, v = (_plain(t, TILE_K) for t in (one.k, one.v))
    elif given is not None:
        q, k, v = _projected(given)
    else:
        q = _codes(one.q, one.cu_q, how.rule, ROWS, turn=False)
        k = _codes(one.k, one.cu_k, how.rule, TILE_K, turn=False)
        v = _codes(one.v, one.cu_k, how.rule, TILE_K, turn=True)
    return q, k, v


def attend(
    one: Any,
    how: Native8 | None,
    qkv: tuple[Source, Source, Source],
    o: torch.Tensor,
    lse: torch.Tensor,
    which: List | None = None,
) -> None:
    """The launch of `forward`, of what `sources` gave."""
    (q, k, v), heads = qkv, one.q.shape[1]
    starts, owners = which or schedule(one.cu_q, one.cu_k, one.tokens, TILE_Q)
    programs = min(processors(one.q.device.index), owners.shape[0] * heads)
    attention_stream.attend_stream[(programs,)](
        *(q.descriptor, k.descriptor, v.descriptor),
        *(q.scales, k.scales, v.scales),
        *(o, lse, one.cu_q, one.cu_k, starts, owners),
        *(one.cu_q.shape[0] - 1, one.tokens, heads, heads // one.k.shape[1]),
        *(q.tiles, k.tiles, q.head, k.head, v.head, one.call.scale),
        CAUSAL=one.call.mask.kind == "causal",
        KIND=one.kind,
        EIGHT=how is not None,
        # Tiles of codes lie one below the other: there are no columns from head to head.
        TOKENS=q.head > 0,
        FACTOR=math.log2(how.factor) if how else 0.0,
        WIDTH=one.width,
        TILE_K=TILE_K,
        D=one.width,
        STAGES=(STAGES_8 if how else STAGES)[one.width],
        num_warps=4,
    )


def backward(
    one: Any, do: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, grads: list[torch.Tensor]
) -> None:
    """Write dq, dk and dv of a call that `takes_backward` says yes to.

    S, and dP with scales_v, are products of codes where the call has them: a kernel then holds its
    own side as codes, and reads the other side as both, but v as codes.
    """
    dq, dk, dv = grads
    heads, shared_heads, batch = one.q.shape[1], one.k.shape[1], one.cu_q.shape[0] - 1
    ends, programs = (one.cu_q, one.cu_k), processors(one.q.device.index)
    codes = one.codes
    scales_v = codes.scales_v if codes else None
    rows_of, places = _rows_of(one, o)
    q, k, v, dout = (_plain(t, ROWS) for t in (one.q, one.k, one.v, do))
    # Each side as S and dP read it, and codes that are read beside values.
    s_q, s_k, dp_do, codes_q, codes_do = q, k, dout, None, None
    scales: list[Any] = [None] * 4 + [0, 0]
    if codes:
        s_q, s_k = _plain(codes.q[0], ROWS), _plain(codes.k[0], ROWS)
        codes_q = s_q.descriptor
        scales = [codes.q[1], codes.k[1], None, None, codes.q[1].shape[1], codes.k[1].shape[1]]
    if scales_v is None:
        _prepare(one, do, o, lse, rows_of)
    else:
        code, scales_do = attention_round_ops.prepared(one, do, o, lse.contiguous(), rows_of)
        dp_do = _plain(code, ROWS)
        codes_do = dp_do.descriptor
        scales[2:4] = scales_v, scales_do
    constants = {"CAUSAL": one.call.mask.kind == "causal", "D": one.width, "num_warps": 4}
    starts, owners = schedule(one.cu_k, one.cu_q, one.k.shape[0], TILE_K)
    attention_stream_gradients.keys_stream[(min(programs, owners.shape[0] * shared_heads),)](
        *(q.descriptor, s_k.descriptor, v.descriptor, dout.descriptor),
        *(codes_q, codes_do, *scales),
        *(dk, dv, rows_of),
        *(*ends, starts, owners, batch, places, shared_heads, heads // shared_heads),
        *(q.head, s_k.head, v.head, dout.head, one.call.scale),
        TILE_K=TILE_K,
        STAGES=(KEYS if scales_v is None else KEYS_8)[one.width],
        **constants,
    )
    step, stages = QUERIES[one.width]
    k, v = (_plain(t, step) for t in (one.k, one.v))
    codes_k = _plain(codes.k[0], step).descriptor if codes else None
    starts, owners = schedule(one.cu_q, one.cu_k, one.tokens, TILE_Q)
    attention_stream_gradients.queries_stream[(min(programs, owners.shape[0] * heads),)](
        *(s_q.descriptor, k.descriptor, v.descriptor, dp_do.descriptor, codes_k, *scales),
        *(dq, rows_of),
        *(*ends, starts, owners, batch, places, heads, heads // shared_heads),
        *(s_q.head, k.head, v.head, dp_do.head, one.call.scale),
        STEP_K=step,
        STAGES=stages,
        **constants,
    )


def _rows_of(one: Any, o: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Room for exponents and delta in tiles of 64 rows, and tiles a head."""
    # One more for the second half of the last 128 rows.
    places = o.shape[0] // ROWS + one.cu_q.shape[0]
    shape = (o.shape[1], places, 2, ROWS)
    return torch.empty(shape, dtype=torch.float32, device=o.device), places


def _prepare(
    one: Any,
    do: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    rows_of: torch.Tensor,
) -> None:
    """Write exponents and delta; see prepare_tiles."""
    tokens, heads, width = o.shape
    starts, owners = schedule(one.cu_q, one.cu_q, tokens, ROWS)
    attention_gradients.prepare_tiles[(owners.shape[0] * heads,)](
        *(do, o, lse.contiguous(), rows_of, one.cu_q, starts, owners),
        *(
            one.cu_q.shape[0] - 1,
            tokens,
            rows_of.shape[1],
            heads,
            *do.stride()[:2],
            *o.stride()[:2],
        ),
        WIDTH=width,
        D=width,
        TILE=ROWS,
        num_warps=4,
    )

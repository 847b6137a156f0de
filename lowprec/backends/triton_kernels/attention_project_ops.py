"""From a projection to its attention by kernels: norm, rotary embedding and cast; the launches."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
import triton

from lowprec.attention_front import Front
from lowprec.backends.triton_kernels import attention_fp8_ops, attention_project, launch
from lowprec.backends.triton_kernels.attention_native import BLOCK
from lowprec.backends.triton_kernels.attention_schedule import schedule
from lowprec.backends.triton_kernels.launch import stored_as
from lowprec.backends.triton_kernels.starting import start
from lowprec.rotary import steps_of

Weights = tuple[torch.Tensor | None, torch.Tensor | None]


class Shape(NamedTuple):
    """Tokens of a tile, heads of a program, stages of the pipeline, warps."""

    tile: int
    heads: int
    stages: int
    warps: int


# By the power of two that holds the head dim. CAST: 32 values of a thread at the most, with sines
# and cosines in as many registers, for all heads of a program.
_UP_TO_128: Final = (16, 32, 64, 128)
CAST: Final = dict.fromkeys(_UP_TO_128, Shape(BLOCK, 8, 3, 8)) | {128: Shape(BLOCK, 8, 3, 16)}
WRITE: Final = dict.fromkeys(_UP_TO_128, Shape(32, 8, 3, 4)) | {256: Shape(16, 8, 3, 4)}
BACK: Final = dict.fromkeys(_UP_TO_128, Shape(32, 8, 2, 8)) | {256: Shape(16, 8, 2, 8)}


class Codes(NamedTuple):
    """q and k [tokens, H, D] and v [Hkv, tiles, D, 128] in E4M3, scales [H, tiles]; no padding but
    that of D to a power of two, and of v to whole tiles of each sequence.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scales_q: torch.Tensor
    scales_k: torch.Tensor
    scales_v: torch.Tensor
    tiles_q: int
    tiles_k: int


class _Side(NamedTuple):
    """q or k with the weight of its norm, offsets, those of the keys, and the list of its tiles."""

    x: torch.Tensor
    weight: torch.Tensor | None
    cu: torch.Tensor
    cu_keys: torch.Tensor
    starts: torch.Tensor
    owners: torch.Tensor

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.cu.shape[0] - 1

    def programs(self, heads: int) -> int:
        """Programs of `heads` heads of a tile each."""
        return self.owners.shape[0] * -(-self.x.shape[1] // heads)


def _sides(one: Any, weights: Weights, tile: int) -> tuple[_Side, _Side]:
    """Of a call (attention_ops.Given), with one list where queries and keys share their offsets."""
    listed = schedule(one.cu_q, one.cu_q, one.tokens, tile)
    q = _Side(one.q, weights[0], one.cu_q, one.cu_k, *listed)
    if one.cu_q.data_ptr() != one.cu_k.data_ptr() or one.cu_q.shape != one.cu_k.shape:
        listed = schedule(one.cu_k, one.cu_k, one.k.shape[0], tile)
    return q, _Side(one.k, weights[1], one.cu_k, one.cu_k, *listed)


def _tile(shape: Shape) -> int:
    """Tiles are small in the interpreter, but for those that have one scale."""
    return 32 if launch.INTEGER and shape.tile != BLOCK else shape.tile


@lru_cache(maxsize=64)
def _steps(base: float, dims: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(mode=False):
        return torch.tensor(steps_of(base, dims), device=device)


def _stored(x: torch.Tensor | None) -> torch.Tensor | None:
    return stored_as(x, integer=launch.INTEGER)


def _words(x: torch.Tensor | None, front: Front) -> torch.Tensor | None:
    """`x` as the kernels read it: pairs of neighbours as words of both."""
    if x is None or front.rotary is None or not front.rotary.interleaved:
        return _stored(x)
    return x.view(torch.int16 if x.dtype == torch.uint8 else torch.int32)


def _strides(x: torch.Tensor, front: Front) -> tuple[int, ...]:
    words = _words(x, front)
    assert words is not None
    return words.stride()[:2]


def _constants(front: Front, width: int, shape: Shape) -> dict[str, Any]:
    """Pairs of channels, and the shape of programs."""
    rotary = front.rotary
    dims = width if rotary is None else rotary.turning(width)
    return {
        "WIDTH": width,
        "HALF": dims // 2,
        "TOGETHER": rotary is not None and rotary.interleaved,
        "P": triton.next_power_of_2(width) // 2,
        "TILE": _tile(shape),
        "HEADS": 2 if launch.INTEGER else shape.heads,
        "STAGES": 1 if launch.INTEGER else shape.stages,
        "INTEGER": launch.INTEGER,
        "num_warps": shape.warps,
        # The turn is rounded as lowprec.rotary rounds it, operation by operation.
        "enable_fp_fusion": False,
    }


def _turn(front: Front, x: torch.Tensor) -> torch.Tensor | None:
    if front.rotary is None:
        return None
    return _steps(front.rotary.base, front.rotary.turning(x.shape[2]), x.device)


def _project(
    side: _Side,
    front: Front,
    shape: Shape,
    out: torch.Tensor | None,
    cast: tuple[torch.Tensor, torch.Tensor] | None = None,
    rule: str = "",
) -> None:
    """Write x' to `out`, or its codes and their scales to `cast`; see attention_project.project."""
    x, width = side.x, side.x.shape[2]
    codes, scales = cast or (None, None)
    filled = width if codes is None else codes.shape[2]
    constants = _constants(front, width, shape)
    operands = (_words(x, front), _stored(side.weight), _turn(front, x))
    tiles = 0 if scales is None else scales.shape[1]
    if x.numel():
        start(
            attention_project.project,
            side.programs(constants["HEADS"]),
            *(*operands, _words(out, front), _words(codes, front), scales, *side[2:]),
            *(side.batch, tiles, x.shape[1], *_strides(x, front), front.eps),
            RULE=rule,
            D=filled,
            **constants,
        )


def fronted(one: Any, front: Front, weights: Weights) -> tuple[torch.Tensor, torch.Tensor]:
    """q' and k' in bf16 of a call (attention_ops.Given); see lowprec.attention_front."""
    shape = WRITE[triton.next_power_of_2(one.width)]
    q, k = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (one.q, one.k))
    for side, out in zip(_sides(one, weights, _tile(shape)), (q, k), strict=True):
        _project(side, front, shape, out)
    return q, k


def encoded(one: Any, front: Front, weights: Weights, rule: str, *, turn: str = "tile") -> Codes:
    """q', k' and v in E4M3, of one pass over each; turn: of v, see attention_fp8.encode_pair."""
    padded = triton.next_power_of_2(one.width)
    shape, found = CAST[padded], []
    sides = _sides(one, weights, BLOCK)
    for side in sides:
        tokens, heads, _ = side.x.shape
        # Tiles of keys are loaded whole: what is behind the last token is read, and masked.
        codes = side.x.new_empty((tokens + BLOCK, heads, padded), dtype=torch.uint8)
        tiles = tokens // BLOCK + side.batch
        scales = side.x.new_empty((heads, tiles), dtype=torch.float32)
        _project(side, front, shape, None, (codes, scales), rule)
        found.append((codes, scales, tiles))
    (q, scales_q, tiles_q), (k, scales_k, tiles_k) = found
    codes_v, scales_v = attention_fp8_ops.encode(one.v, one.cu_k, rule, turn=turn)
    return Codes(q, k, codes_v, scales_q, scales_k, scales_v, tiles_q, tiles_k)


def gradients(
    one: Any, grads: tuple[torch.Tensor, torch.Tensor], front: Front, weights: Weights
) -> list[torch.Tensor | None]:
    """dq, dk and those of the weights from dq' and dk'; see lowprec.attention_front."""
    shape = BACK[triton.next_power_of_2(one.width)]
    sides = _sides(one, weights, _tile(shape))
    found = [_gradient(d, side, front, shape) for d, side in zip(grads, sides, strict=True)]
    return [found[0][0], found[1][0], found[0][1], found[1][1]]


def _gradient(
    d: torch.Tensor, side: _Side, front: Front, shape: Shape
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dx and that of the weight; see attention_project.project_backward."""
    x, weight = side.x, side.weight
    _, heads, width = x.shape
    constants = _constants(front, width, shape)
    programs = side.programs(constants["HEADS"])
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # Programs without a tile leave their part alone.
    partial = None if weight is None else x.new_zeros((programs, width), dtype=torch.float32)
    if x.numel():
        start(
            attention_project.project_backward,
            programs,
            *(_words(t, front) for t in (d.contiguous(), x)),
            *(_stored(weight), _turn(front, x), _words(dx, front), partial, *side[2:]),
            *(side.batch, heads, *_strides(x, front), front.eps),
            **constants,
        )
    if partial is None or weight is None:
        return dx, None
    return dx, partial.sum(0).to(weight.dtype)

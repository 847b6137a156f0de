"""Exact products without native hardware: dequantize, then the vendor's own GEMM.

A code times its block scale has at most 8 significant bits in every format here, so it fits bf16
(float32 on a CPU, which holds the same numbers) and the product differs from a native block-scaled
one only in the order of summation. The one exception on a GPU: magnitudes below 2^-126 x 2^-7,
where bf16 itself ends. No speed claim is ever made from this path.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from lowprec.backends.chunks import Chunks, blocks, is_eager_cpu, per_block
from lowprec.backends.facts import Facts
from lowprec.backends.rounding import decode, encode, encode_stochastic
from lowprec.blocks import (
    Blocking,
    Matrix,
    e8m0_bytes,
    float_scales,
    power_of_two,
    reciprocal_power,
)
from lowprec.formats import E2M1, E4M3, Cast, ScaleRule
from lowprec.rng import RandomStream
from lowprec.tensor import QuantizedTensor

_FLOAT32_MAX = torch.finfo(torch.float32).max
_MANY_SUMS = 1 << 24


def refuse(op: str, facts: Facts) -> str | None:
    """Casts and products of every format exist here."""
    del op, facts
    return None


def quantize(
    x: torch.Tensor, cast: Cast, *, axis: int, stream: RandomStream | None = None
) -> QuantizedTensor:
    """Cast `x` (any floating dtype, read as float32) along `axis`; see lowprec.quantize."""
    matrix = Matrix.of(x.detach(), cast.format, axis)
    data, inner_axis = matrix.data, matrix.axis
    # Work in the order of memory: a transposed view is cast along its other axis instead.
    flipped = _is_flipped(data)
    if flipped:
        data, inner_axis = data.mT, -3 - inner_axis
    blocking = Blocking.of(data.shape, cast.format, inner_axis)
    words = None
    if stream is not None:
        words = Matrix.of(stream.words_like(x), cast.format, axis).data
        words = _stacked(words.mT if flipped else words, blocking)
    *lead, rows, columns = data.shape
    height, width = rows + blocking.pad_rows, columns + blocking.pad_cols
    shape = (*lead, height // blocking.rows, width // blocking.cols)
    amax = data.new_zeros((math.prod(shape[:-1]), shape[-1]), dtype=torch.float32)
    codes, scales, outer = _cast(_stacked(data, blocking), blocking, cast, amax, words)
    scales = scales.view(shape)
    if lead:
        codes = codes.view(*lead, height, columns)[..., :rows, :]
    if flipped:
        codes, scales = codes.mT, scales.mT
    return QuantizedTensor(
        codes=matrix.restore(codes, is_scale=False),
        scales=matrix.restore(scales, is_scale=True),
        format=cast.format,
        axis=matrix.source_axis,
        outer=outer,
    )


def _is_flipped(x: torch.Tensor) -> bool:
    return x.ndim >= 2 and x.stride(-1) != 1 and x.stride(-2) == 1


def _stacked(x: torch.Tensor, blocking: Blocking) -> torch.Tensor:
    """[..., R, C] as one matrix, padded so that no block reaches into the next [R, C]."""
    if x.ndim == 2:
        return x
    if blocking.pad_rows:
        x = functional.pad(x, (0, 0, 0, blocking.pad_rows))
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _cast(
    x: torch.Tensor,
    blocking: Blocking,
    cast: Cast,
    amax: torch.Tensor,
    words: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes, block scales and outer scale of a matrix; `amax` is room for one number a block."""
    chunks = Chunks.of(x, blocking.rows, blocking.cols)
    buffer = x.new_empty((chunks.limit, x.shape[1]), dtype=torch.float32)
    _fill_amax(amax, x, chunks, buffer)
    scales, factor, outer = _scales(amax, cast)
    poisoned = ~amax.isfinite()
    if outer is not None:
        poisoned = poisoned.any().expand(amax.shape)
    # Masking costs a pass, and looking first a device sync that tracing cannot have either.
    clean = is_eager_cpu(x) and not bool(poisoned.any())
    codes = x.new_empty(x.shape, dtype=torch.uint8)
    for rows in chunks.rows:
        part, out = x[rows.start : rows.stop].float(), codes[rows.start : rows.stop]
        values = buffer[: rows.stop - rows.start]
        for cols in chunks.cols:
            args = blocks(part, rows, cols), per_block(factor, rows, cols)
            scale = torch.div if cast.scale_rule is ScaleRule.EXACT and outer is None else torch.mul
            scale(*args, out=blocks(values, rows, cols))
        if words is None:
            encode(out, values, cast.format.element)
        else:
            encode_stochastic(out, values, cast.format.element, words[rows.start : rows.stop])
        for cols in () if clean else chunks.cols:
            blocks(out, rows, cols).masked_fill_(per_block(poisoned, rows, cols), 0)
    return codes, scales, outer


def _fill_amax(amax: torch.Tensor, x: torch.Tensor, chunks: Chunks, buffer: torch.Tensor) -> None:
    """Largest magnitude of each block, NaN and Inf on top; a block may lie in several chunks."""
    bits = amax.view(torch.int32)
    for rows in chunks.rows:
        # Magnitudes are ordered like their bits, which are faster to compare.
        part = buffer[: rows.stop - rows.start].view(torch.int32)
        source = x[rows.start : rows.stop].float().view(torch.int32)
        torch.bitwise_and(source, 0x7FFFFFFF, out=part)
        for cols in chunks.cols:
            cut = blocks(part, rows, cols)
            tops = (cut.squeeze(1) if cut.shape[1] == 1 else cut.amax(1)).amax(-1)
            so_far = bits[rows.first : rows.last, cols.first : cols.last]
            torch.maximum(so_far, tops, out=so_far)


def _scales(
    amax: torch.Tensor, cast: Cast
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Block scales as stored, what encoding multiplies or divides by, and the outer scale."""
    fmt = cast.format
    if fmt.outer:
        return _two_level_scales(amax)
    if not fmt.power_of_two:
        scales = float_scales(amax, fmt.element)
        return scales, scales, None
    biased = e8m0_bytes(amax, fmt.element, cast.scale_rule)
    scales = biased.to(torch.uint8) if fmt.scale == "e8m0" else power_of_two(biased)
    return scales, reciprocal_power(biased), None


def _two_level_scales(amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """NVFP4: an E4M3 scale a block under one float32 scale a tensor that fills E4M3's range."""
    top = amax.amax() if amax.numel() else amax.new_zeros(())
    poisoned = ~top.isfinite()
    # By a tensor: a Python number over a tensor is its reciprocal times the number, two roundings.
    widest = torch.full_like(top, E4M3.max * E2M1.max)
    encode_scale = torch.where(top > 0, (widest / top).clamp(max=_FLOAT32_MAX), 1.0)
    outer = 1.0 / encode_scale
    sixth = torch.full_like(top, 1 / 6)
    wanted = torch.where(poisoned, 0.0, amax * (encode_scale * sixth))
    scales = torch.empty_like(amax, dtype=torch.uint8)
    encode(scales, wanted, E4M3)
    block_scales = torch.empty_like(amax)
    decode(block_scales, scales, E4M3)
    multiplier = (1.0 / block_scales.mul_(outer)).clamp_(max=_FLOAT32_MAX)
    return scales, multiplier, torch.where(poisoned, torch.nan, outer)


def _values(t: QuantizedTensor) -> torch.Tensor:
    """float32 code x block scale of [R, C], without a scale that multiplies the product."""
    flipped = _is_flipped(t.codes)
    codes, axis, scales = t.codes, t.axis, t.scales
    if flipped:
        codes, axis, scales = codes.mT, -3 - axis, scales.mT
    if t.format.scale == "e8m0":
        scales = power_of_two(scales.int())
    elif t.format.scale == "e4m3":
        stored, scales = scales, torch.empty_like(scales, dtype=torch.float32)
        decode(scales, stored, E4M3)
    blocking = Blocking.of(codes.shape, t.format, axis)
    chunks = Chunks.of(codes, blocking.rows, blocking.cols)
    values = codes.new_empty(codes.shape, dtype=torch.float32)
    for rows in chunks.rows:
        part = values[rows.start : rows.stop]
        decode(part, codes[rows.start : rows.stop], t.format.element)
        for cols in () if t.format.scale_after_product else chunks.cols:
            blocks(part, rows, cols).mul_(per_block(scales, rows, cols))
    return values.mT if flipped else values


def _operand(t: torch.Tensor | QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values to multiply, exact in bf16, and the factor [rows, 1] or [] that scales the product."""
    if not isinstance(t, QuantizedTensor):
        return (t if t.dtype == torch.float64 else t.bfloat16()), None
    return _values(t), t.scales if t.format.scale_after_product else t.outer


def matmul(
    a: torch.Tensor | QuantizedTensor,
    b: torch.Tensor | QuantizedTensor,
    *,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """a [M, K] times b [N, K] transposed: exact operands, float32 sums, one rounding at the end."""
    (left, left_scale), (right, right_scale) = _operand(a), _operand(b)
    if left_scale is None and right_scale is None and _at_once(left, right, bias, out_dtype):
        if bias is None:
            return torch.mm(left, right.mT)
        return torch.addmm(bias.detach(), left, right.mT)
    if left.dtype == torch.float64:
        product = left @ right.mT
    elif left.is_cuda:
        product = torch.mm(left.bfloat16(), right.bfloat16().mT, out_dtype=torch.float32)
    else:
        product = left.float() @ right.float().mT
    # Scales first: a huge one times the product could overflow where the result is finite.
    scale = left_scale
    if right_scale is not None:
        right_scale = right_scale.mT if right_scale.ndim else right_scale
        scale = right_scale if scale is None else scale * right_scale
    # In place: the product is fresh memory of this call.
    if scale is not None:
        product *= scale
    if bias is not None:
        product += bias.to(product.dtype)
    return product.to(out_dtype)


def _at_once(
    left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> bool:
    """Whether the vendor's bf16 product, which rounds by itself, is as precise.

    Of a result this large every multiprocessor has tiles enough: no reason to split the sums, whose
    parts would be added after rounding to bf16. Smaller ones are written in float32 first, which
    costs them little.
    """
    types = {left.dtype, right.dtype, out_dtype} | ({bias.dtype} if bias is not None else set())
    large = left.shape[0] * right.shape[0] >= _MANY_SUMS
    return large and left.is_cuda and types == {torch.bfloat16}

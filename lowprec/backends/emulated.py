"""Exact products without native hardware: dequantize, then the vendor's own GEMM.

A code times its block scale has at most 8 significant bits in every format here, so it fits bf16
(float32 on a CPU, which holds the same numbers) and the product differs from a native block-scaled
one only in the order of summation. The one exception on a GPU: magnitudes below 2^-126 x 2^-7,
where bf16 itself ends. No speed claim is ever made from this path.
"""

from __future__ import annotations

import torch

from lowprec.backends.facts import Facts
from lowprec.blocks import (
    Blocking,
    Matrix,
    amax_of,
    e8m0_bytes,
    float_scales,
    per_block,
    power_of_two,
    reciprocal_power,
)
from lowprec.errors import UnsupportedError
from lowprec.formats import E4M3, E5M2, Cast, Element
from lowprec.rng import RandomStream
from lowprec.tensor import QuantizedTensor

# An 8-bit float, sign-extended and shifted, has sign and fields where float32 has them once the
# copies of the sign are masked off; the multiplier repairs the exponent bias.
_WIDEN = {E4M3.name: (20, -0x78100000, 2.0**120), E5M2.name: (21, -0x70200000, 2.0**112)}


def refuse(op: str, facts: Facts) -> str | None:
    """Casts to 8-bit one-level formats have a fast path here; products exist for every format."""
    if op == "quantize" and facts.left is not None:
        fmt = facts.left.format
        if facts.left.stochastic:
            return "no fast stochastic rounding"
        if fmt.outer or fmt.element.name not in _WIDEN:
            return f"no fast cast to {fmt.name}"
    return None


def quantize(
    x: torch.Tensor, cast: Cast, *, axis: int, stream: RandomStream | None = None
) -> QuantizedTensor:
    """Cast `x` along `axis` through torch's own float8 conversion, clamped before it."""
    if stream is not None:
        raise UnsupportedError("emulated: no fast stochastic rounding; use the reference")
    matrix = Matrix.of(x, cast.format, axis)
    element, data, inner_axis = cast.format.element, matrix.data.detach(), matrix.axis
    # Work in the order of memory: a transposed view is cast along its other axis instead.
    flipped = data.ndim >= 2 and data.stride(-1) != 1 and data.stride(-2) == 1
    if flipped:
        data, inner_axis = data.mT, -3 - inner_axis
    blocking = Blocking.of(data.shape, cast.format, inner_axis)
    blocks = blocking.split(data)
    if element.torch_dtype is None or cast.format.outer:
        raise UnsupportedError(f"emulated: no fast cast to {cast.format.name}; use the reference")
    amax = amax_of(blocks)
    if cast.format.power_of_two:
        biased = e8m0_bytes(amax, element, cast.scale_rule)
        values = blocks.float() * reciprocal_power(biased)
        scales = biased.to(torch.uint8) if cast.format.scale == "e8m0" else power_of_two(biased)
    else:
        scales = float_scales(amax, element)
        values = blocks.float() / scales
    codes = values.clamp_(-element.max, element.max).to(element.torch_dtype).view(torch.uint8)
    # Masking costs a pass, and looking first costs a device sync that tracing cannot have either.
    look_first = type(codes) is torch.Tensor and codes.device.type == "cpu"
    look_first = look_first and not torch.compiler.is_compiling()
    if not (look_first and bool(amax.isfinite().all())):
        codes = codes.masked_fill_(~amax.isfinite(), 0)
    codes = blocking.join(codes)
    scales = scales.squeeze(-1).squeeze(-2)
    if flipped:
        codes, scales = codes.mT, scales.mT
    return QuantizedTensor(
        codes=matrix.restore(codes, is_scale=False),
        scales=matrix.restore(scales, is_scale=True),
        format=cast.format,
        axis=matrix.source_axis,
    )


def _widen(codes: torch.Tensor, element: Element) -> torch.Tensor:
    """float32 values of codes, NaN and Inf codes excepted (a cast never writes them)."""
    if element.name in _WIDEN:
        shift, mask, multiplier = _WIDEN[element.name]
        bits = (codes.view(torch.int8).int() << shift) & mask
        return bits.view(torch.float32).mul_(multiplier)
    table = torch.tensor(element.values, dtype=torch.float32, device=codes.device)
    return table[codes.int()]


def _operand(
    t: torch.Tensor | QuantizedTensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values to multiply, exact in bf16, and the factor [rows, 1] that scales the product."""
    if not isinstance(t, QuantizedTensor):
        return (t if t.dtype == torch.float64 else t.bfloat16()), None
    scales = t.scales
    if t.format.scale == "e8m0":
        scales = power_of_two(scales.int())
    elif t.format.scale == "e4m3":
        scales = _widen(scales, E4M3)
    if t.format.scale_after_product:
        return _widen(t.codes, t.format.element), scales
    flipped = t.codes.stride(-1) != 1 and t.codes.stride(-2) == 1
    codes, axis = (t.codes.mT, -3 - t.axis) if flipped else (t.codes, t.axis)
    scales = scales.mT if flipped else scales
    blocking = Blocking.of(codes.shape, t.format, axis)
    values = blocking.split(_widen(codes, t.format.element)) * per_block(scales)
    joined = blocking.join(values)
    return (joined.mT if flipped else joined), t.outer


def matmul(
    a: torch.Tensor | QuantizedTensor,
    b: torch.Tensor | QuantizedTensor,
    *,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """a [M, K] times b [N, K] transposed: exact operands, float32 sums, one rounding at the end."""
    (left, left_scale), (right, right_scale) = _operand(a), _operand(b)
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
    if scale is not None:
        product = product * scale
    if bias is not None:
        product = product + bias.to(product.dtype)
    return product.to(out_dtype)

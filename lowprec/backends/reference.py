"""The law: every op in plain PyTorch, on any device, by integer rules that read like the standard.

Other backends must give the same codes and scales bit for bit.
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
from lowprec.formats import E2M1, E4M3, Cast, Element
from lowprec.rng import RandomStream
from lowprec.tensor import QuantizedTensor

FLOAT32_MAX = torch.finfo(torch.float32).max


def refuse(op: str, facts: Facts) -> str | None:
    """The reference computes every op on every device."""
    del op, facts
    return None


def encode(values: torch.Tensor, element: Element) -> torch.Tensor:
    """Codes (uint8) of float32 values: nearest, ties to even, saturating; the sign of zero is kept.

    Values must not be NaN: blocks that hold one never get here.
    """
    bits = values.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    shift = 23 - element.mantissa_bits
    half_to_even = (1 << (shift - 1)) - 1 + ((magnitude >> shift) & 1)
    rebias = (127 - element.bias) << element.mantissa_bits
    normal = ((magnitude + half_to_even) >> shift) - rebias
    tiny = values.abs().clamp(max=2.0**element.emin)
    subnormal = (tiny * (1 / element.quantum)).round().int()
    code = torch.where(values.abs() < 2.0**element.emin, subnormal, normal)
    code = torch.where(magnitude >= 0x7F800000, element.max_code, code).clamp(max=element.max_code)
    sign = (bits < 0).int() << (element.bits - 1)
    return (code | sign).to(torch.uint8)


def encode_stochastic(values: torch.Tensor, words: torch.Tensor, element: Element) -> torch.Tensor:
    """Codes (uint8) of float32 values, up or down by random 32-bit words (int32), saturating.

    Normal values: the low s = 23 - mantissa bits of the word are added to the float32 bits before
    they are cut off, so P(up) is exactly the fraction that is cut. Subnormal values: the fraction
    of a quantum, cut to 28 bits, against the upper 28 bits of the word. Values must not be NaN.
    """
    bits = values.view(torch.int32)
    magnitude, size = bits & 0x7FFFFFFF, values.abs()
    shift = 23 - element.mantissa_bits
    rebias = (127 - element.bias) << element.mantissa_bits
    normal = ((magnitude + (words & ((1 << shift) - 1))) >> shift) - rebias
    quanta = size.clamp(max=2.0**element.emin) * (1 / element.quantum)
    whole = quanta.floor()
    fraction = ((quanta - whole) * 2.0**28).int()
    subnormal = whole.int() + ((fraction + ((words >> 4) & 0xFFFFFFF)) >> 28)
    code = torch.where(size < 2.0**element.emin, subnormal, normal)
    code = torch.where(size >= element.max, element.max_code, code).clamp(max=element.max_code)
    sign = (bits < 0).int() << (element.bits - 1)
    return (code | sign).to(torch.uint8)


def decode(codes: torch.Tensor, element: Element) -> torch.Tensor:
    """Values (float32) of codes (uint8), by table."""
    table = torch.tensor(element.values, dtype=torch.float32, device=codes.device)
    return table[codes.int()]


def quantize(
    x: torch.Tensor, cast: Cast, *, axis: int, stream: RandomStream | None = None
) -> QuantizedTensor:
    """Cast `x` (any floating dtype, read as float32) along `axis`; see lowprec.quantize."""
    matrix = Matrix.of(x, cast.format, axis)
    blocking = Blocking.of(matrix.data.shape, cast.format, matrix.axis)
    blocks = blocking.split(matrix.data.detach().float())
    amax = amax_of(blocks)
    outer = None
    if cast.format.power_of_two:
        scales, values = _power_of_two_scales(blocks, amax, cast)
    elif cast.format.outer:
        scales, values, outer = _two_level_scales(blocks, amax)
    else:
        scales = float_scales(amax, cast.format.element)
        values = torch.where(amax.isfinite(), blocks / scales, 0.0)
    if stream is None:
        codes = encode(values, cast.format.element)
    else:
        words = stream.words_like(x)
        words = blocking.split(Matrix.of(words, cast.format, axis).data)
        codes = encode_stochastic(values, words, cast.format.element)
    return QuantizedTensor(
        codes=matrix.restore(blocking.join(codes), is_scale=False),
        scales=matrix.restore(scales.squeeze(-1).squeeze(-2), is_scale=True),
        format=cast.format,
        axis=matrix.source_axis,
        outer=outer,
    )


def _power_of_two_scales(
    blocks: torch.Tensor, amax: torch.Tensor, cast: Cast
) -> tuple[torch.Tensor, torch.Tensor]:
    biased = e8m0_bytes(amax, cast.format.element, cast.scale_rule)
    values = torch.where(biased == 255, 0.0, blocks * reciprocal_power(biased))
    if cast.format.scale == "e8m0":
        return biased.to(torch.uint8), values
    return power_of_two(biased), values


def _two_level_scales(
    blocks: torch.Tensor, amax: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """NVFP4: an E4M3 scale a block under one float32 scale a tensor that fills E4M3's range."""
    tensor_amax = amax.amax() if amax.numel() else amax.new_zeros(())
    poisoned = ~tensor_amax.isfinite()
    # A Python number over a tensor would be reciprocal times number: two roundings.
    widest = torch.full_like(tensor_amax, E4M3.max * E2M1.max)
    encode_scale = torch.where(tensor_amax > 0, (widest / tensor_amax).clamp(max=FLOAT32_MAX), 1.0)
    outer = 1.0 / encode_scale
    sixth = torch.tensor(1 / 6, dtype=torch.float32, device=amax.device)
    wanted = torch.where(poisoned, 0.0, amax * (encode_scale * sixth))
    codes = encode(wanted, E4M3)
    multiplier = (1.0 / (decode(codes, E4M3) * outer)).clamp(max=FLOAT32_MAX)
    values = torch.where(poisoned, 0.0, blocks * multiplier)
    return codes, values, torch.where(poisoned, torch.nan, outer)


def block_scales(q: QuantizedTensor) -> torch.Tensor:
    """The block scales of `q` as float32 multipliers, in the shape of `q.scales`."""
    if q.format.scale == "e8m0":
        return power_of_two(q.scales.int())
    return decode(q.scales, E4M3) if q.format.scale == "e4m3" else q.scales


def dequantize(q: QuantizedTensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Values of `q` in `dtype`: code x scale (x outer), each product rounded to float32."""
    codes = Matrix.of(q.codes, q.format, q.axis)
    scales = Matrix.of(block_scales(q), q.format, q.axis).data
    blocking = Blocking.of(codes.data.shape, q.format, codes.axis)
    values = blocking.split(decode(codes.data, q.format.element)) * per_block(scales)
    if q.outer is not None:
        values = values * q.outer
    return codes.restore(blocking.join(values), is_scale=False).to(dtype)


def matmul(
    a: torch.Tensor | QuantizedTensor,
    b: torch.Tensor | QuantizedTensor,
    *,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """a [M, K] times b [N, K] transposed, summed in float64 and rounded once to `out_dtype`."""
    left, right = (_operand(t).double() for t in (a, b))
    product = left @ right.mT
    if bias is not None:
        product = product + bias.double()
    return product.to(out_dtype)


def _operand(t: torch.Tensor | QuantizedTensor) -> torch.Tensor:
    if isinstance(t, QuantizedTensor):
        return dequantize(t, dtype=torch.float32)
    return t if t.dtype == torch.float64 else t.bfloat16()

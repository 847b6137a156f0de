# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""Device functions on pairs of neighbouring bf16 numbers, int32 with the first in the low half.

A pair is unpacked by two instructions, rounded by one, compared and scaled by one: half of what two
numbers by themselves take. Kernels in plain Triton and in Gluon share these. INTEGER is as in
codec: the interpreter knows no assembly.
"""

import triton
import triton.language as tl

from lowprec.backends.triton_kernels.codec import (
    carry_of,
    emax_of,
    encode,
    encode_multiplier,
    hardware_cast,
    round_to,
    scale_bytes,
)


@triton.jit
def halves(pairs):
    """Both numbers of pairs, float32."""
    first = (pairs << 16).to(tl.float32, bitcast=True)
    second = (pairs & -65536).to(tl.float32, bitcast=True)
    return first, second


@triton.jit
def parameters(at, p, pairs):
    """Both numbers of pairs p of a parameter: float32, or pairs of bf16 (int32); 0 past `pairs`."""
    if at.dtype.element_ty == tl.float32:
        first = tl.load(at + 2 * p, mask=p < pairs, other=0.0)
        second = tl.load(at + 2 * p + 1, mask=p < pairs, other=0.0)
    else:
        first, second = halves(tl.load(at + p, mask=p < pairs, other=0))
    return first, second


@triton.jit
def joined(first, second, INTEGER: tl.constexpr):
    """Pairs of two float32 tensors, rounded to bf16."""
    if INTEGER:
        low = round_to(first, "bfloat16", INTEGER).to(tl.int32) & 0xFFFF
        pairs = low | (round_to(second, "bfloat16", INTEGER).to(tl.int32) << 16)
    else:
        pairs = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [first, second], tl.int32, True, 1
        )
    return pairs


@triton.jit
def _larger_pairs(a, b):
    """The larger magnitudes of both numbers, NaN on top; the signs mean nothing."""
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1
    )


@triton.jit
def pair_amax(pairs, axis: tl.constexpr, INTEGER: tl.constexpr):
    """bf16 bits (int32) of the largest magnitude of pairs along an axis; NaN and Inf on top."""
    if INTEGER:
        low = tl.max(pairs & 0x7FFF, axis)
        found = tl.maximum(low, tl.max((pairs >> 16) & 0x7FFF, axis))
    else:
        both = tl.reduce(pairs, axis, _larger_pairs)
        found = tl.maximum(both & 0x7FFF, (both >> 16) & 0x7FFF)
    return found


@triton.jit
def pair_scales(amax, ELEMENT: tl.constexpr, RULE: tl.constexpr):
    """Scale bytes, pairs of multipliers and masks of codes to keep, of bf16 bits of amax (int32).

    As scale_bytes and encode_multiplier on 16 bits: a finite amax never has a byte above 253, so
    that no multiplier is subnormal.
    """
    EMAX: tl.constexpr = emax_of(ELEMENT)
    CARRY: tl.constexpr = carry_of(ELEMENT, RULE) >> 16
    tl.static_assert(EMAX >= 2)
    raised = tl.maximum(amax + CARRY, EMAX << 7)
    multiplier = ((254 + EMAX) << 7) - (raised & 0x7F80)
    poisoned = amax >= 0x7F80
    biased = tl.where(poisoned, 255, (raised >> 7) - EMAX)
    return biased, multiplier * 0x10001, tl.where(poisoned, 0, -1)


@triton.jit
def encode_pairs(pairs, multipliers, keep, ELEMENT: tl.constexpr):
    """Two codes each (int16) of pairs times pairs of powers of two, cleared where keep is 0.

    The product is exact where its code is not 0: what bf16 cannot hold is far below a quantum.
    """
    CONVERT: tl.constexpr = "cvt.rn.satfinite." + ELEMENT + "x2.f32"
    ASSEMBLY: tl.constexpr = (
        "{ .reg .b32 x, y, a, b, c, d; .reg .b16 m, n;"
        "mul.rn.bf16x2 x, $1, $3; mul.rn.bf16x2 y, $2, $4;"
        "shl.b32 a, x, 16; and.b32 b, x, 0xffff0000;"
        "shl.b32 c, y, 16; and.b32 d, y, 0xffff0000;"
        + CONVERT
        + " m, b, a;"
        + CONVERT
        + " n, d, c;"
        "mov.b32 x, {m, n}; and.b32 $0, x, $5; }"
    )
    return tl.inline_asm_elementwise(
        ASSEMBLY, "=r,r,r,r,r,r,r", [pairs, multipliers, keep], tl.int16, True, 2
    )


@triton.jit
def cast_pairs(pairs, SPEC: tl.constexpr, INTEGER: tl.constexpr):
    """Codes (int16, two each) [R, P] and scale bytes [R, blocks] of pairs [R, P], by row."""
    R: tl.constexpr = pairs.shape[0]
    P: tl.constexpr = pairs.shape[1]
    ELEMENT: tl.constexpr = SPEC[0]
    RULE: tl.constexpr = SPEC[1]
    HALF: tl.constexpr = SPEC[3] // 2
    HARDWARE: tl.constexpr = hardware_cast(ELEMENT)
    blocks = tl.reshape(pairs, (R, P // HALF, HALF))
    amax = pair_amax(blocks, 2, INTEGER)
    if INTEGER or not HARDWARE:
        biased = scale_bytes(amax << 16, ELEMENT, RULE)
        spread = tl.expand_dims(biased, 2)
        multiplier = encode_multiplier(spread)
        first, second = halves(blocks)
        first = encode(tl.where(spread == 255, 0.0, first * multiplier), ELEMENT, INTEGER)
        second = encode(tl.where(spread == 255, 0.0, second * multiplier), ELEMENT, INTEGER)
        codes = (first.to(tl.int32) | (second.to(tl.int32) << 8)).to(tl.int16)
    else:
        biased, multipliers, keep = pair_scales(amax, ELEMENT, RULE)
        multipliers, _ = tl.broadcast(tl.expand_dims(multipliers, 2), blocks)
        keep, _ = tl.broadcast(tl.expand_dims(keep, 2), blocks)
        codes = encode_pairs(blocks, multipliers, keep, ELEMENT)
    return tl.reshape(codes, (R, P)), biased


@triton.jit
def centered(first, second, share, inside):
    """Values of rows of pairs less their mean, and the mean; share is 1 / columns.

    inside: which pairs are not padding, or None. Padding must hold zeros, and holds them after.
    """
    middle = tl.sum(first + second, 1) * share
    first = first - tl.expand_dims(middle, 1)
    second = second - tl.expand_dims(middle, 1)
    if inside is not None:
        first, second = tl.where(inside, first, 0.0), tl.where(inside, second, 0.0)
    return first, second, middle


@triton.jit
def over_deviation(first, second, share, eps):
    """1 / sqrt(mean square + eps) of rows of pairs."""
    return tl.rsqrt(tl.sum(tl.fma(first, first, second * second), 1) * share + eps)


@triton.jit
def affine(first, second, factor, w_first, w_second, b_first, b_second):
    """v * factor * weight + bias of both halves; weights and biases [P] float32 or None."""
    first = first * tl.expand_dims(factor, 1)
    second = second * tl.expand_dims(factor, 1)
    if w_first is not None:
        first = first * tl.expand_dims(w_first, 0)
        second = second * tl.expand_dims(w_second, 0)
    if b_first is not None:
        first = first + tl.expand_dims(b_first, 0)
        second = second + tl.expand_dims(b_second, 0)
    return first, second


@triton.jit
def column_scales(pairs, ELEMENT: tl.constexpr, RULE: tl.constexpr):
    """pair_scales of the columns [P] of pairs [R, P]: bytes of both, pairs, masks of both."""
    both = tl.reduce(pairs, 0, _larger_pairs)
    first, pair_1, keep_1 = pair_scales(both & 0x7FFF, ELEMENT, RULE)
    second, pair_2, keep_2 = pair_scales((both >> 16) & 0x7FFF, ELEMENT, RULE)
    return first, second, (pair_1 & 0xFFFF) | (pair_2 & -65536), keep_1, keep_2


@triton.jit
def encode_columns(pairs, multipliers, keep_1, keep_2, ELEMENT: tl.constexpr):
    """As encode_pairs, the codes (int8) of both columns apart; a thread has four rows of a pair."""
    CONVERT: tl.constexpr = "cvt.rn.satfinite." + ELEMENT + "x2.f32"
    ASSEMBLY: tl.constexpr = (
        "{ .reg .b32 x, y, z, w, a, b, c, d; .reg .b16 m, n;"
        "mul.rn.bf16x2 x, $2, $6; mul.rn.bf16x2 y, $3, $6;"
        "mul.rn.bf16x2 z, $4, $6; mul.rn.bf16x2 w, $5, $6;"
        "shl.b32 a, x, 16; shl.b32 b, y, 16; shl.b32 c, z, 16; shl.b32 d, w, 16;"
        + CONVERT + " m, b, a;" + CONVERT + " n, d, c;"
        "mov.b32 a, {m, n}; and.b32 $0, a, $10;"
        "and.b32 x, x, 0xffff0000; and.b32 y, y, 0xffff0000;"
        "and.b32 z, z, 0xffff0000; and.b32 w, w, 0xffff0000;"
        + CONVERT + " m, y, x;" + CONVERT + " n, w, z;"
        "mov.b32 a, {m, n}; and.b32 $1, a, $14; }"
    )  # fmt: skip
    return tl.inline_asm_elementwise(
        ASSEMBLY,
        "=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [pairs, multipliers, keep_1, keep_2],
        (tl.int8, tl.int8),
        True,
        4,
    )

# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""Device functions that every kernel shares: amax, scale bytes, multipliers, codes, values.

The integer rules are those of lowprec.blocks and lowprec.backends.reference, on float32 bits.
INTEGER switches from the conversions of the compiler to integer arithmetic: both give the same
bits on a GPU, and Triton's interpreter converts to 8- and 16-bit floats wrongly.
"""

import triton
import triton.language as tl

from lowprec.formats import ELEMENTS

# Plain numbers, because the compiler keeps a copy of every global that a kernel reads.
_FACTS = {
    one.name: (
        one.mantissa_bits,
        one.bias,
        one.bits - 1,
        one.max_code,
        one.emax,
        one.max_fraction,
        one.torch_dtype is not None,
        one.max,
    )
    for one in ELEMENTS.values()
}


@triton.constexpr_function
def emax_of(element):
    """Exponent of the largest value."""
    return _FACTS[element][4]


@triton.constexpr_function
def max_of(element):
    """The largest value."""
    return _FACTS[element][7]


@triton.constexpr_function
def carry_of(element, rule):
    """What to add to the bits of amax so that they carry into the exponent; see e8m0_bytes."""
    facts = _FACTS[element]
    return {
        "floor": 0,
        "rceil": 0x7FFFFF - facts[5],
        "ceil": 0x7FFFFF,
        "even": 1 << (22 - facts[0]),
    }[rule]


@triton.constexpr_function
def layout_of(element):
    """Mantissa bits, exponent bias, position of the sign and code of the largest value."""
    return _FACTS[element][:4]


@triton.constexpr_function
def hardware_cast(element):
    """True when the compiler has a saturating conversion to the element."""
    return _FACTS[element][6]


@triton.constexpr_function
def widening(element):
    """Shift, mask and multiplier that turn an 8-bit code into the float32 of its value."""
    mantissa, bias, sign = _FACTS[element][:3]
    shift = 23 - mantissa
    return (shift, ((1 << sign) - 1) << shift, 2.0 ** (127 - bias))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax_bits(values, axis: tl.constexpr, INTEGER: tl.constexpr):
    """Bits of the largest magnitude of float32 values along an axis; NaN and Inf stay on top."""
    if INTEGER:
        found = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis)
    else:
        found = tl.reduce(tl.abs(values), axis, _larger).to(tl.int32, bitcast=True)
    return found


@triton.jit
def scale_bytes(bits, ELEMENT: tl.constexpr, RULE: tl.constexpr):
    """Biased scale exponents (int32, 255 for a poisoned block) of the bits of amax."""
    EMAX: tl.constexpr = emax_of(ELEMENT)
    CARRY: tl.constexpr = carry_of(ELEMENT, RULE)
    biased = ((bits + CARRY) >> 23) - EMAX
    biased = tl.minimum(tl.maximum(biased, 0), 254)
    return tl.where(bits >= 0x7F800000, 255, biased)


@triton.jit
def encode_multiplier(biased):
    """float32 2^(127 - biased); 2^-127 for a poisoned block, whose codes the caller clears."""
    exponent = (254 - tl.minimum(biased, 254)) << 23
    return tl.where(biased >= 254, 0x400000, exponent).to(tl.float32, bitcast=True)


@triton.jit
def decode_multiplier(biased):
    """float32 2^(biased - 127): 0 gives the subnormal 2^-127, 255 NaN."""
    bits = tl.where(biased == 0, 0x400000, biased << 23)
    return tl.where(biased == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def stored_scale(biased, E8M0: tl.constexpr):
    """The scale as it is stored: a byte, or the float32 power of two."""
    return biased.to(tl.uint8) if E8M0 else decode_multiplier(biased)


@triton.jit
def _encode_integer(values, ELEMENT: tl.constexpr):
    FIELDS: tl.constexpr = layout_of(ELEMENT)
    MANTISSA: tl.constexpr = FIELDS[0]
    BIAS: tl.constexpr = FIELDS[1]
    SIGN: tl.constexpr = FIELDS[2]
    MAX_CODE: tl.constexpr = FIELDS[3]
    SHIFT: tl.constexpr = 23 - MANTISSA
    # Adding 2^23 quanta rounds a magnitude below the smallest normal to whole quanta.
    MAGIC: tl.constexpr = (127 + 1 - BIAS - MANTISSA + 23) << 23
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    half_to_even = ((1 << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)
    normal = ((magnitude + half_to_even) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # Larger magnitudes are cleared first: they are not used, and the sum stays in its binade.
    tiny = tl.where(magnitude < ((128 - BIAS) << 23), magnitude, 0).to(tl.float32, bitcast=True)
    magic = ((magnitude & 0) + MAGIC).to(tl.float32, bitcast=True)  # in any layout
    subnormal = (tiny + magic).to(tl.int32, bitcast=True) - MAGIC
    code = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)
    code = tl.minimum(code, MAX_CODE)
    return (code | (((bits >> 31) & 1) << SIGN)).to(tl.uint8)


@triton.jit
def encode(values, ELEMENT: tl.constexpr, INTEGER: tl.constexpr):
    """Codes (uint8) of float32 values that are not NaN: nearest, ties to even, saturating."""
    HARDWARE: tl.constexpr = hardware_cast(ELEMENT)
    if INTEGER or not HARDWARE:
        codes = _encode_integer(values, ELEMENT)
    elif ELEMENT == "e4m3":
        codes = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        codes = values.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return codes


@triton.jit
def encode_random(values, words, ELEMENT: tl.constexpr):
    """Codes (uint8) of float32 values that are not NaN, up or down by random words (int32).

    As reference.encode_stochastic: what is cut from a normal value against the low bits of the
    word, what is cut from a subnormal one, in 28 bits, against its upper 28.
    """
    FIELDS: tl.constexpr = layout_of(ELEMENT)
    MANTISSA: tl.constexpr = FIELDS[0]
    BIAS: tl.constexpr = FIELDS[1]
    SIGN: tl.constexpr = FIELDS[2]
    MAX_CODE: tl.constexpr = FIELDS[3]
    SHIFT: tl.constexpr = 23 - MANTISSA
    # 2^28 quanta, as a multiplier: a magnitude below the smallest normal stays below 2^31.
    FIXED: tl.constexpr = 2.0 ** (28 + BIAS - 1 + MANTISSA)
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + (words & ((1 << SHIFT) - 1))) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # Larger magnitudes are cleared first: their conversion to an integer is not defined. Shifting
    # significands by their exponents gives the same and took a fifth longer on an H200.
    small = magnitude < ((128 - BIAS) << 23)
    tiny = tl.where(small, magnitude, 0).to(tl.float32, bitcast=True)
    fixed = (tiny * FIXED).to(tl.int32).to(tl.uint32, bitcast=True)
    chance = words.to(tl.uint32, bitcast=True) >> 4
    subnormal = ((fixed + chance) >> 28).to(tl.int32, bitcast=True)
    code = tl.minimum(tl.where(small, subnormal, normal), MAX_CODE)
    return (code | (((bits >> 31) & 1) << SIGN)).to(tl.uint8)


@triton.jit
def smallest(values, axis: tl.constexpr):
    """Smallest magnitude of float32 values along an axis, zeros passed over; 0 if all are."""
    bits = values.to(tl.uint32, bitcast=True)
    # The sign is shifted out, and 0 becomes the largest number.
    found = tl.min(bits + bits - 1, axis)
    return ((found + 1) >> 1).to(tl.float32, bitcast=True)


@triton.jit
def any_hard(least, bits, multiplier, ELEMENT: tl.constexpr):
    """Whether encode_normal may not encode some block: poisoned, or with values below the normals.

    least: the smallest magnitudes of blocks; bits: of their amax; multiplier: of their values.
    """
    FIELDS: tl.constexpr = layout_of(ELEMENT)
    NORMAL: tl.constexpr = 2.0 ** (1 - FIELDS[1])
    hard = (bits >= 0x7F800000) | ((least * multiplier < NORMAL) & (bits != 0))
    return tl.max(tl.max(hard.to(tl.int32), 1), 0) != 0


@triton.jit
def encode_kept(values, keep, ELEMENT: tl.constexpr, INTEGER: tl.constexpr):
    """encode, cleared where keep (int32) is 0 rather than -1, four at once; values may be NaN."""
    HARDWARE: tl.constexpr = hardware_cast(ELEMENT)
    if INTEGER or not HARDWARE:
        codes = encode(tl.where(keep == 0, 0.0, values), ELEMENT, INTEGER)
    else:
        CONVERT: tl.constexpr = "cvt.rn.satfinite." + ELEMENT + "x2.f32"
        codes = tl.inline_asm_elementwise(
            "{ .reg .b16 m, n; .reg .b32 a, b, c;"
            + CONVERT
            + " m, $2, $1;"
            + CONVERT
            + " n, $4, $3;"
            "mov.b32 a, {m, n}; prmt.b32 b, $5, $6, 0x40; prmt.b32 c, $7, $8, 0x40;"
            "prmt.b32 b, b, c, 0x5410; and.b32 $0, a, b; }",
            "=r,r,r,r,r,r,r,r,r",
            [values, keep],
            tl.uint8,
            True,
            4,
        )
    return codes


@triton.constexpr_function
def _cut_and_convert(element):
    """Assembly: four float32 and four random words to four codes; see encode_normal."""
    cut = (1 << (23 - _FACTS[element][0])) - 1
    lines = [f"and.b32 r{i}, ${i + 5}, {cut};" for i in range(4)]
    lines += [f"add.s32 r{i}, r{i}, ${i + 1};" for i in range(4)]
    lines += [f"and.b32 r{i}, r{i}, {~cut};" for i in range(4)]
    lines += [f"cvt.rn.satfinite.{element}x2.f32 h{i}, r{2 * i + 1}, r{2 * i};" for i in (0, 1)]
    body = "".join(lines)
    return "{ .reg .b32 r<4>; .reg .b16 h<2>;" + body + "mov.b32 $0, {h0, h1}; }"


@triton.jit
def encode_normal(values, words, ELEMENT: tl.constexpr, INTEGER: tl.constexpr):
    """As encode_random for values that are 0 or normal: what is left after the cut is exact.

    A thread must have four values in a row.
    """
    FIELDS: tl.constexpr = layout_of(ELEMENT)
    CUT: tl.constexpr = (1 << (23 - FIELDS[0])) - 1
    if INTEGER:
        bits = values.to(tl.int32, bitcast=True)
        cut = (bits + (words & CUT)) & ~CUT
        codes = encode(cut.to(tl.float32, bitcast=True), ELEMENT, INTEGER)
    else:
        ASSEMBLY: tl.constexpr = _cut_and_convert(ELEMENT)
        codes = tl.inline_asm_elementwise(
            ASSEMBLY, "=r,r,r,r,r,r,r,r,r", [values, words], tl.uint8, True, 4
        )
    return codes


@triton.jit
def decode(codes, ELEMENT: tl.constexpr):
    """float32 values of codes, NaN and Inf codes excepted (a cast never writes them)."""
    WIDEN: tl.constexpr = widening(ELEMENT)
    SHIFT: tl.constexpr = WIDEN[0]
    MASK: tl.constexpr = WIDEN[1]
    FACTOR: tl.constexpr = WIDEN[2]
    SIGN: tl.constexpr = layout_of(ELEMENT)[2]
    wide = codes.to(tl.int32)
    magnitude = ((wide << SHIFT) & MASK).to(tl.float32, bitcast=True) * FACTOR
    sign = ((wide >> SIGN) & 1) << 31
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def as_float32(loaded):
    """float32 of what was loaded: a float, or the bits of a bf16 as int16.

    The interpreter reads subnormal bf16 numbers wrongly, hence the bits.
    """
    if loaded.dtype == tl.int16:
        values = (loaded.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        values = loaded.to(tl.float32)
    return values


@triton.jit
def round_to(values, DTYPE: tl.constexpr, INTEGER: tl.constexpr):
    """float32 values rounded to float32, bf16 or fp16, in the type that memory of it is stored as.

    With INTEGER bf16 comes back as its bits (int16): the interpreter truncates instead of rounding.
    """
    if DTYPE == "bfloat16" and INTEGER:
        bits = values.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nan = (bits >> 16) | 0x40
        narrow = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, nan, rounded).to(tl.int16)
    elif DTYPE == "bfloat16":
        narrow = values.to(tl.bfloat16)
    elif DTYPE == "float16":
        narrow = values.to(tl.float16)
    else:
        narrow = values
    return narrow


@triton.jit
def round_through(values, DTYPE: tl.constexpr, INTEGER: tl.constexpr):
    """float32 values that have been rounded to DTYPE on the way."""
    return as_float32(round_to(values, DTYPE, INTEGER))

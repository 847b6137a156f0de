# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""Device functions for 8-bit operands of attention: tiles of BLOCK tokens with one scale each.

Tiles start with their sequence; the last one of a sequence is filled up with zeros.
"""

import triton
import triton.language as tl

from lowprec.backends.triton_kernels.codec import (
    amax_bits,
    decode,
    decode_multiplier,
    encode,
    encode_multiplier,
    scale_bytes,
)

_SMALLEST = tl.constexpr(127 - 40)
_LARGEST = tl.constexpr(127 + 40)


@triton.jit
def tile_scale(bits, RULE: tl.constexpr):
    """The scale of a tile by the bits of its amax: biased exponent (255: not finite) and value."""
    biased = scale_bytes(bits, "e4m3", RULE)
    bounded = tl.minimum(tl.maximum(biased, _SMALLEST), _LARGEST)
    biased = tl.where(biased == 255, biased, bounded)
    return biased, decode_multiplier(biased)


@triton.jit
def encode_scaled(values, biased, INTEGER: tl.constexpr):
    """Codes (uint8) of float32 values under their tile's scale, zeros where it is not finite."""
    bounded = tl.minimum(biased, _LARGEST)
    codes = encode(values * encode_multiplier(bounded), "e4m3", INTEGER)
    return tl.where(biased == 255, 0, codes).to(tl.uint8)


@triton.jit
def encode_tile(tile, RULE: tl.constexpr, INTEGER: tl.constexpr):
    """Codes (uint8) of a tile and its one scale (float32; NaN where the tile is not finite)."""
    values = tile.to(tl.float32)
    biased, scale = tile_scale(tl.max(amax_bits(values, 1, INTEGER), 0), RULE)
    return encode_scaled(values, biased, INTEGER), scale


@triton.jit
def first_tile(cu, sequence, BLOCK: tl.constexpr):
    """The place of a sequence's first tile of BLOCK, for sequences laid out in whole tiles."""
    return tl.load(cu + sequence) // BLOCK + sequence


@triton.jit
def operand(codes, INTEGER: tl.constexpr):
    """Codes as an operand of a product: E4M3, or float32 where operands are that."""
    return decode(codes, "e4m3") if INTEGER else codes.to(tl.float8e4nv, bitcast=True)

# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""Block-diagonal Hadamard rotation and the cast of its result, in one read.

The sums run in the order of lowprec.rotation: pairs 1 apart, then 2, 4 and so on. A tile is held as
two halves, the first and the second 16 of every 32 values along the contraction: a thread that
stores 16 codes at once then has both values of every pair up to 16 apart, and the largest magnitude
of a block of 32, without asking another.
"""

import triton
import triton.language as tl

from lowprec.backends.triton_kernels.codec import (
    amax_bits,
    any_hard,
    as_float32,
    encode_kept,
    encode_multiplier,
    encode_normal,
    encode_random,
    hardware_cast,
    scale_bytes,
    smallest,
)
from lowprec.backends.triton_kernels.draws import call_words
from lowprec.backends.triton_kernels.places import place, start
from lowprec.backends.triton_kernels.tiles import store_scales


@triton.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@triton.jit
def _levels(v, STEP: tl.constexpr, COUNT: tl.constexpr):
    """COUNT levels of sums and differences of values [A, B, D], the first of pairs STEP apart."""
    A: tl.constexpr = v.shape[0]
    B: tl.constexpr = v.shape[1]
    D: tl.constexpr = v.shape[2]
    for k in tl.static_range(COUNT):
        pairs = v.reshape(A * B * D // (2 * STEP << k), 2, STEP << k)
        upper, lower = tl.split(tl.permute(pairs, (0, 2, 1)))
        joined = tl.join(upper + lower, upper - lower)
        v = tl.permute(joined, (0, 2, 1)).reshape(A, B, D)
    return v


@triton.jit
def _line(NB: tl.constexpr, SECOND: tl.constexpr):
    """Where the values [NB, 16] of a half lie along the contraction of a tile."""
    return tl.arange(0, NB)[:, None] * 32 + tl.arange(0, 16)[None, :] + SECOND


@triton.jit
def _along(TILE_M: tl.constexpr, NB: tl.constexpr, SECOND: tl.constexpr):
    """`_line` for every line of a tile, [TILE_M, NB, 16]: shared by what is loaded and stored.

    The compiler then gives both one layout, 16 neighbours a thread.
    """
    return tl.broadcast_to(_line(NB, SECOND)[None, :, :], (TILE_M, NB, 16))


@triton.jit
def _load_half(
    source,
    signs,
    batch_at,
    first_m,
    first_n,
    majors,
    minors,
    stride,
    SECOND: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    NB: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Values [TILE_M, NB, 16] of a half, float32, times their signs; 0 past the contraction."""
    m, n = tl.arange(0, TILE_M), _line(NB, SECOND)
    if BY_COLUMN:
        down = n.reshape(NB * 16)
        reach = down.to(tl.int64) if WIDE else down
        at = source + batch_at + start(0, 0, first_n, stride, first_m)
        inside = (first_n + down < minors)[:, None] & (first_m + m < majors)[None, :]
        stored = tl.load(at + reach[:, None] * stride + m[None, :], mask=inside, other=0)
        half = as_float32(tl.trans(stored).reshape(TILE_M, NB, 16))
    else:
        reach = m.to(tl.int64) if WIDE else m
        at = source + batch_at + start(0, 0, first_m, stride, first_n)
        along = _along(TILE_M, NB, SECOND)
        inside = (first_m + m < majors)[:, None, None] & (first_n + along < minors)
        at += reach[:, None, None] * stride + along
        half = as_float32(tl.load(at, mask=inside, other=0))
    if signs is not None:
        half = half * tl.load(signs + _along(TILE_M, NB, SECOND) % SIZE)
    return half


@triton.jit
def _half_words(
    words,
    first_call,
    key_0,
    key_1,
    batch,
    first_m,
    first_n,
    majors,
    length,
    SECOND: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE_M: tl.constexpr,
    NB: tl.constexpr,
):
    """Words int32 [TILE_M, NB, 16] of a half.

    GROUPS: "inner", those of a call lie along the contraction; "outer", across it; "stored".
    """
    if GROUPS == "inner":
        line = batch * majors + first_m + tl.arange(0, TILE_M)
        group = (first_n + SECOND) // 16 + 2 * tl.arange(0, NB)
        call = first_call + line[:, None] * (length // 16) + group[None, :]
        found = call_words(call, key_0, key_1)
    elif GROUPS == "outer":
        line = batch * length + first_n + _line(NB, SECOND).reshape(NB * 16)
        group = first_m // 16 + tl.arange(0, TILE_M // 16)
        call = first_call + line[None, :] * (majors // 16) + group[:, None]
        found = tl.permute(call_words(call, key_0, key_1), (0, 2, 1)).reshape(TILE_M, NB, 16)
    else:
        m, n = first_m + tl.arange(0, TILE_M), first_n + _line(NB, SECOND)
        inside = (m < majors)[:, None, None] & (n < length)[None, :, :]
        line = (batch * majors + m)[:, None, None]
        found = tl.load(words + line * length + n[None, :, :], mask=inside, other=0)
    return found


@triton.jit
def _blocks(half, PER: tl.constexpr):
    """Values [TILE_M, NB / PER, PER * 16] of a half by blocks."""
    return half.reshape(half.shape[0], half.shape[1] // PER, PER * 16)


@triton.jit
def _least(a, b):
    """The smaller of two magnitudes of which 0 stands for none."""
    return tl.where((a == 0) | (b == 0), tl.maximum(a, b), tl.minimum(a, b))


@triton.jit
def _encoded(
    half, biased, multiplier, drawn,
    ELEMENT: tl.constexpr, PER: tl.constexpr, EASY: tl.constexpr, INTEGER: tl.constexpr,
):  # fmt: skip
    """Codes of a half. EASY: no block is poisoned or has values below the normals."""
    blocks = _blocks(half, PER)
    scaled = blocks * multiplier[:, :, None]
    keep = tl.broadcast_to(tl.where(biased == 255, 0, -1)[:, :, None], blocks.shape)
    keep = keep.reshape(half.shape)
    scaled = scaled.reshape(half.shape)
    if drawn is None:
        codes = encode_kept(scaled, keep, ELEMENT, INTEGER)
    elif EASY:
        codes = encode_normal(scaled, drawn, ELEMENT, INTEGER)
    else:
        codes = encode_random(tl.where(keep == 0, 0.0, scaled), drawn, ELEMENT)
    return codes


@triton.jit
def _store_half(q, codes, batch, first_m, first_n, majors, length, SECOND: tl.constexpr):
    """Store the codes of a half, `length` bytes a line."""
    TILE_M: tl.constexpr = q.shape[0]
    NB: tl.constexpr = q.shape[1]
    m, along = first_m + tl.arange(0, TILE_M), _along(TILE_M, NB, SECOND)
    inside = (m < majors)[:, None, None] & (first_n + along < length)
    to = codes + start(batch, majors.to(tl.int64) * length, first_m, length, first_n)
    to += tl.arange(0, TILE_M).to(tl.int64)[:, None, None] * length + along
    tl.store(to, q, mask=inside)


@triton.jit(
    do_not_specialize=[
        "rows",
        "units",
        "source_batch",
        "source_unit",
        "length_units",
        "first_call",
        "key_0",
        "key_1",
    ]
)
def rotate_tiles(
    source,
    signs,
    codes,
    scales,
    words,
    rows,
    units,
    source_batch,
    source_unit,
    length_units,
    first_call,
    key_0,
    key_1,
    UNIT: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    SIZE: tl.constexpr,
    FACTOR: tl.constexpr,
    SPEC: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE_M: tl.constexpr,
    NB: tl.constexpr,
    ACROSS: tl.constexpr,
    WIDE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Rotate and cast a tile of TILE_M lines by NB x 32 values along the contraction.

    The contraction runs along rows or, BY_COLUMN, down columns; it is padded with zeros to a length
    of length_units x 16. Codes are [batch, lines, length]; scales [batch, lines, blocks], by column
    transposed. SPEC: element, rule, block along the contraction, is E8M0. ACROSS: tiles along the
    contraction, known for a single matrix by row, else 0. See tiles.cast_tiles.
    """
    cols = units * UNIT
    stride = source_unit * UNIT
    length = length_units * 16
    majors = cols if BY_COLUMN else rows
    minors = rows if BY_COLUMN else cols
    ELEMENT: tl.constexpr = SPEC[0]
    RULE: tl.constexpr = SPEC[1]
    PER: tl.constexpr = SPEC[2] // 32
    if ACROSS > 0:
        tile = tl.program_id(0)
        batch = tl.full([], 0, tl.int64)
        first_m, first_n = (tile // ACROSS) * TILE_M, (tile % ACROSS) * (NB * 32)
    else:
        batch, first_m, first_n = place(majors, length, TILE_M, NB * 32)
    batch_at = batch * source_batch * UNIT
    a = _load_half(
        source, signs, batch_at, first_m, first_n, majors, minors, stride,
        0, BY_COLUMN, SIZE, TILE_M, NB, WIDE,
    )  # fmt: skip
    b = _load_half(
        source, signs, batch_at, first_m, first_n, majors, minors, stride,
        16, BY_COLUMN, SIZE, TILE_M, NB, WIDE,
    )  # fmt: skip
    a, b = _levels(a, 1, 4), _levels(b, 1, 4)
    if SIZE > 16:
        a, b = a + b, a - b
    if SIZE > 32:
        a, b = _levels(a, 16, _log2(SIZE) - 5), _levels(b, 16, _log2(SIZE) - 5)
    # A factor is exact on sums of 16-bit numbers, and is then left to the multiplier of a block.
    NARROW: tl.constexpr = source.dtype.element_ty.primitive_bitwidth == 16
    if not NARROW:
        a, b = a * FACTOR, b * FACTOR
    bits = tl.maximum(
        amax_bits(_blocks(a, PER), 2, INTEGER), amax_bits(_blocks(b, PER), 2, INTEGER)
    )
    if NARROW:
        bits = (bits.to(tl.float32, bitcast=True) * FACTOR).to(tl.int32, bitcast=True)
    biased = scale_bytes(bits, ELEMENT, RULE)
    multiplier = encode_multiplier(biased)
    if NARROW:
        multiplier = multiplier * FACTOR
    if GROUPS == "":
        q_a = _encoded(a, biased, multiplier, None, ELEMENT, PER, False, INTEGER)
        q_b = _encoded(b, biased, multiplier, None, ELEMENT, PER, False, INTEGER)
    else:
        w_a = _half_words(
            words, first_call, key_0, key_1, batch, first_m, first_n, majors, length,
            0, GROUPS, TILE_M, NB,
        )  # fmt: skip
        w_b = _half_words(
            words, first_call, key_0, key_1, batch, first_m, first_n, majors, length,
            16, GROUPS, TILE_M, NB,
        )  # fmt: skip
        least = _least(smallest(_blocks(a, PER), 2), smallest(_blocks(b, PER), 2))
        HARDWARE: tl.constexpr = hardware_cast(ELEMENT)
        if not HARDWARE or any_hard(least, bits, multiplier, ELEMENT):
            q_a = _encoded(a, biased, multiplier, w_a, ELEMENT, PER, False, INTEGER)
            q_b = _encoded(b, biased, multiplier, w_b, ELEMENT, PER, False, INTEGER)
        else:
            q_a = _encoded(a, biased, multiplier, w_a, ELEMENT, PER, True, INTEGER)
            q_b = _encoded(b, biased, multiplier, w_b, ELEMENT, PER, True, INTEGER)
    _store_half(q_a, codes, batch, first_m, first_n, majors, length, 0)
    _store_half(q_b, codes, batch, first_m, first_n, majors, length, 16)
    blocks = tl.cdiv(length, SPEC[2])
    store_scales(
        scales, biased, batch, first_m, first_n // SPEC[2], majors, blocks, BY_COLUMN, SPEC[3]
    )

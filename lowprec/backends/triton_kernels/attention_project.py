# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""From a projection to its attention in one pass: norm, rotary embedding, cast; and back.

x is read once where the projection left it. What attention reads is written in bf16, or in E4M3 at
the places of the tokens, without padding, with one power-of-two scale for each tile of 128 tokens
of a sequence and head in the order in which the kernel takes them. (v has no front: it is cast into
tiles that are turned, attention_fp8.encode_pair, because 8-bit operands lie along the contraction.)
"""

import triton
import triton.language as tl

from lowprec.backends.triton_kernels.attention_codes import first_tile, tile_scale
from lowprec.backends.triton_kernels.attention_parts import loop_end, run_of
from lowprec.backends.triton_kernels.attention_rotary import (
    load_pairs,
    pair_columns,
    pairs_of,
    reciprocal_root,
    store_pairs,
    turned,
    wave_tile,
    weights_of,
    words_of,
)
from lowprec.backends.triton_kernels.codec import amax_bits, encode, encode_multiplier


@triton.jit
def _larger(a, b):
    """The larger magnitudes of words of two bf16, with any signs; NaN stays on top."""
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1
    )


@triton.jit
def _amax(word, INTEGER: tl.constexpr):
    """Bits of the largest magnitude, as a float32, in words of two bf16."""
    if INTEGER:
        a, b = pairs_of(word)
        bits = tl.maximum(amax_bits(a, None, INTEGER), amax_bits(b, None, INTEGER))
    else:
        found = tl.reduce(word, None, _larger) & 0x7FFF7FFF
        bits = tl.maximum(found & -0x10000, found << 16)
    return bits


@triton.jit
def _scaled(word, biased, INTEGER: tl.constexpr):
    """float32 of words of two bf16 over their tile's scale, zeros where that is not finite.

    A product is exact unless it is subnormal in bf16, and then its code is that of a zero anyway.
    """
    multiplier = encode_multiplier(biased)
    if not INTEGER:
        bits = multiplier.to(tl.int32, bitcast=True)
        word = tl.inline_asm_elementwise(
            "mul.bf16x2 $0, $1, $2;", "=r,r,r", [word, bits | (bits >> 16)], tl.int32, True, 1
        )
    # As pairs_of splits them, and the zeros come at no cost.
    poisoned = biased == 255
    a = (word * tl.where(poisoned, 0, 0x10000)).to(tl.float32, bitcast=True)
    b = (word & tl.where(poisoned, 0, -0x10000)).to(tl.float32, bitcast=True)
    if INTEGER:
        a, b = a * multiplier, b * multiplier
    return a, b


@triton.jit
def _pair_codes(a, b, INTEGER: tl.constexpr):
    """Codes of pairs, in words (int16): b above a.

    The conversion makes the word. Words joined from single codes are wrong on a GPU: ptxas of CUDA
    12.8 and 12.9 compiles {w, w >> 8}, w just converted, so that w is read before it is written.
    """
    if INTEGER:
        low, high = encode(a, "e4m3", INTEGER), encode(b, "e4m3", INTEGER)
        word = low.to(tl.int16) | (high.to(tl.int16) << 8)
    else:
        word = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,r,r", [a, b], tl.int16, True, 1
        )
    return word


@triton.jit
def _store_codes(
    to,
    row,
    have,
    stride,
    word,
    biased,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    TOGETHER: tl.constexpr,
    FILLED: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Store codes (uint8) of pairs where load_pairs reads those, zeros up to FILLED channels.

    word: the pairs in bf16, as words_of gives them. A thread stores no more codes in a row than it
    loads channels in 16 bytes. Told nothing it stores 16, and so loads 32 bytes, one half of each
    sector at a time, and adds a row's squares in another order than where bf16 is written.
    """
    first, second, paired = pair_columns(HALF, PAIRS, TOGETHER, word.shape[1])
    line = row[:, None] * stride
    a, b = _scaled(word, biased, INTEGER)
    if TOGETHER:
        # All FILLED / 2 of them: codes of pairs that are not there are zeros.
        at = tl.max_contiguous(line + tl.arange(0, word.shape[1])[None, :], (1, 4))
        tl.store(to + at, _pair_codes(a, b, INTEGER), mask=have)
    else:
        inside = have & paired[None, :]
        # What turns and what does not are apart, and a run that holds both is not one.
        RUN: tl.constexpr = 8 if HALF % 8 == 0 or HALF == PAIRS else HALF & -HALF
        at_a = tl.max_contiguous(line + first[None, :], (1, RUN))
        at_b = tl.max_contiguous(line + second[None, :], (1, RUN))
        tl.store(to + at_a, encode(a, "e4m3", INTEGER), mask=inside)
        tl.store(to + at_b, encode(b, "e4m3", INTEGER), mask=inside)
        if FILLED > 2 * PAIRS:
            column = tl.arange(0, FILLED)[None, :]
            tl.store(to + (line + column), 0, mask=have & (column >= 2 * PAIRS))


@triton.jit(do_not_specialize=["batch", "tiles"])
def project(
    x,
    weight,
    steps,
    out,
    codes,
    scales,
    cu,
    cu_keys,
    starts,
    owners,
    batch,
    tiles,
    heads,
    x_row,
    x_head,
    eps,
    RULE: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    TOGETHER: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
    STAGES: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """x' of one tile of tokens and HEADS heads a program; see lowprec.attention_front.

    weight [WIDTH] of the norm or None; steps int64 [HALF] of the pairs that turn or None. out bf16
    [tokens, heads, WIDTH] or None; codes uint8 [tokens, heads, D], zeros past the width, with
    scales float32 [heads, tiles], or None. cu_keys: the keys that rows are counted against. P: a
    power of two that holds the pairs. TOGETHER: pairs are neighbours; x, out and codes are in words
    of a pair, and x_row and x_head count words.
    """
    UNIT: tl.constexpr = 2 if TOGETHER else 1
    PAIRS: tl.constexpr = WIDTH // 2
    live, sequence, group, tile = run_of(starts, owners, batch, tl.cdiv(heads, HEADS))
    if not live:
        return
    begin = tl.load(cu + sequence)
    rows = tl.load(cu + sequence + 1) - begin
    first = tile * TILE
    row = tl.arange(0, TILE)
    have = (first + row < rows)[:, None]
    token, head = begin.to(tl.int64) + first, group * HEADS
    at, from_head = x + (token * x_row + head.to(tl.int64) * x_head), token * heads + head
    if steps is not None:
        keys = tl.load(cu_keys + sequence + 1) - tl.load(cu_keys + sequence)
        sine, cosine = wave_tile(steps, first + row + (keys - rows), HALF, P)
    if weight is not None:
        col_a, col_b, paired = pair_columns(HALF, PAIRS, TOGETHER, P)
        weight_a, weight_b = weights_of(weight, col_a, paired), weights_of(weight, col_b, paired)
    if codes is not None:
        place = head.to(tl.int64) * tiles + first_tile(cu, sequence, TILE) + tile
    count = tl.minimum(HEADS, heads - head)
    start, end = 0, loop_end(count, INTEGER)
    for one in tl.range(start, end, num_stages=STAGES):
        here = at + tl.cast(one, tl.int64) * x_head
        a, b = load_pairs(here, row, have, x_row, HALF, PAIRS, TOGETHER, P)
        if weight is not None:
            root = reciprocal_root(a, b, eps, WIDTH)
            a, b = a * root * weight_a, b * root * weight_b
        if steps is not None:
            a, b = turned(a, b, sine, cosine, HALF)
        if out is not None:
            to = out + (from_head + one) * (WIDTH // UNIT)
            stride = heads * (WIDTH // UNIT)
            store_pairs(to, row, have, stride, a, b, HALF, PAIRS, TOGETHER, INTEGER)
        if codes is not None:
            word = words_of(a, b, INTEGER)
            biased, scale = tile_scale(_amax(word, INTEGER), RULE)
            to = codes + (from_head + one) * (D // UNIT)
            _store_codes(
                to, row, have, heads * (D // UNIT), word, biased,
                HALF, PAIRS, TOGETHER, D, INTEGER,
            )  # fmt: skip
            tl.store(scales + place + tl.cast(one, tl.int64) * tiles, scale)


@triton.jit(do_not_specialize=["batch"])
def project_backward(
    d,
    x,
    weight,
    steps,
    dx,
    partial,
    cu,
    cu_keys,
    starts,
    owners,
    batch,
    heads,
    x_row,
    x_head,
    eps,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    TOGETHER: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
    HEADS: tl.constexpr,
    STAGES: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """dx [tokens, heads, WIDTH] from d, the gradient of x', laid out alike, of one tile a program.

    With a weight also its gradient, as partial float32 [programs, WIDTH], left alone where a
    program has no tile; x is read only then. The other arguments are those of project.
    """
    UNIT: tl.constexpr = 2 if TOGETHER else 1
    PAIRS: tl.constexpr = WIDTH // 2
    live, sequence, group, tile = run_of(starts, owners, batch, tl.cdiv(heads, HEADS))
    if not live:
        return
    begin = tl.load(cu + sequence)
    rows = tl.load(cu + sequence + 1) - begin
    first = tile * TILE
    row = tl.arange(0, TILE)
    there = (first + row < rows)[:, None]
    token = begin.to(tl.int64) + first
    stride = heads * (WIDTH // UNIT)
    if steps is not None:
        keys = tl.load(cu_keys + sequence + 1) - tl.load(cu_keys + sequence)
        sine, cosine = wave_tile(steps, first + row + (keys - rows), HALF, P)
        sine = -sine
    if weight is not None:
        col_a, col_b, paired = pair_columns(HALF, PAIRS, TOGETHER, P)
        weight_a, weight_b = weights_of(weight, col_a, paired), weights_of(weight, col_b, paired)
        sum_a = tl.zeros((TILE, P), tl.float32)
        sum_b = tl.zeros((TILE, P), tl.float32)
    for one in tl.range(0, HEADS, num_stages=STAGES):
        head = group * HEADS + one
        have = there & (head < heads)
        to = (token * heads + head) * (WIDTH // UNIT)
        a, b = load_pairs(d + to, row, have, stride, HALF, PAIRS, TOGETHER, P)
        if steps is not None:
            a, b = turned(a, b, sine, cosine, HALF)
        if weight is not None:
            at = x + token * x_row + head.to(tl.int64) * x_head
            n_a, n_b = load_pairs(at, row, have, x_row, HALF, PAIRS, TOGETHER, P)
            root = reciprocal_root(n_a, n_b, eps, WIDTH)
            n_a, n_b = n_a * root, n_b * root
            sum_a += a * n_a
            sum_b += b * n_b
            a, b = a * weight_a, b * weight_b
            mean = ((tl.sum(a * n_a, 1) + tl.sum(b * n_b, 1)) * (1.0 / WIDTH))[:, None]
            a, b = root * (a - n_a * mean), root * (b - n_b * mean)
        store_pairs(dx + to, row, have, stride, a, b, HALF, PAIRS, TOGETHER, INTEGER)
    if weight is not None:
        here = partial + tl.program_id(0).to(tl.int64) * WIDTH
        tl.store(here + col_a, tl.sum(sum_a, 0), mask=paired)
        tl.store(here + col_b, tl.sum(sum_b, 0), mask=paired)

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

from lowprec.backends.triton_kernels.attention_codes import encode_scaled, first_tile, tile_scale
from lowprec.backends.triton_kernels.attention_parts import run_of
from lowprec.backends.triton_kernels.attention_rotary import (
    load_pairs,
    pair_columns,
    reciprocal_root,
    store_pairs,
    turned,
    wave_tile,
    weights_of,
)
from lowprec.backends.triton_kernels.codec import amax_bits, encode_multiplier, round_through


@triton.jit
def _amax(values, INTEGER: tl.constexpr):
    return tl.max(amax_bits(values, 1, INTEGER), 0)


@triton.jit
def _pair_codes(a, b, biased, INTEGER: tl.constexpr):
    """Codes of pairs under their tile's scale as encode_scaled gives them, in words (int16).

    The conversion makes the word. Words joined from single codes are wrong on a GPU: ptxas of CUDA
    12.8 and 12.9 compiles {w, w >> 8}, w just converted, so that w is read before it is written.
    """
    if INTEGER:
        low, high = encode_scaled(a, biased, INTEGER), encode_scaled(b, biased, INTEGER)
        word = low.to(tl.int16) | (high.to(tl.int16) << 8)
    else:
        multiplier = encode_multiplier(biased)
        word = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;",
            "=h,r,r",
            [a * multiplier, b * multiplier],
            tl.int16,
            True,
            1,
        )
        word = tl.where(biased == 255, 0, word)
    return word


@triton.jit
def _store_codes(
    to,
    row,
    have,
    stride,
    a,
    b,
    biased,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    TOGETHER: tl.constexpr,
    FILLED: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Store codes (uint8) of pairs where load_pairs reads those, zeros up to FILLED channels."""
    first, second, paired = pair_columns(HALF, PAIRS, TOGETHER, a.shape[1])
    line = row[:, None] * stride
    if TOGETHER:
        # All FILLED / 2 of them: codes of pairs that are not there are zeros.
        word = _pair_codes(a, b, biased, INTEGER)
        tl.store(to + (line + tl.arange(0, a.shape[1])[None, :]), word, mask=have)
    else:
        inside = have & paired[None, :]
        tl.store(to + (line + first[None, :]), encode_scaled(a, biased, INTEGER), mask=inside)
        tl.store(to + (line + second[None, :]), encode_scaled(b, biased, INTEGER), mask=inside)
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
    there = (first + row < rows)[:, None]
    token = begin.to(tl.int64) + first
    if steps is not None:
        keys = tl.load(cu_keys + sequence + 1) - tl.load(cu_keys + sequence)
        sine, cosine = wave_tile(steps, first + row + (keys - rows), HALF, P)
    if weight is not None:
        col_a, col_b, paired = pair_columns(HALF, PAIRS, TOGETHER, P)
        weight_a, weight_b = weights_of(weight, col_a, paired), weights_of(weight, col_b, paired)
    for one in tl.range(0, HEADS, num_stages=STAGES):
        head = group * HEADS + one
        have = there & (head < heads)
        at = x + token * x_row + head.to(tl.int64) * x_head
        a, b = load_pairs(at, row, have, x_row, HALF, PAIRS, TOGETHER, P)
        if weight is not None:
            root = reciprocal_root(a, b, eps, WIDTH)
            a, b = a * root * weight_a, b * root * weight_b
        if steps is not None:
            a, b = turned(a, b, sine, cosine, HALF)
        if out is not None:
            to = out + (token * heads + head) * (WIDTH // UNIT)
            stride = heads * (WIDTH // UNIT)
            store_pairs(to, row, have, stride, a, b, HALF, PAIRS, TOGETHER, INTEGER)
        if codes is not None:
            a = round_through(a, "bfloat16", INTEGER)
            b = round_through(b, "bfloat16", INTEGER)
            bits = tl.maximum(_amax(a, INTEGER), _amax(b, INTEGER))
            biased, scale = tile_scale(bits, RULE)
            to = codes + (token * heads + head) * (D // UNIT)
            _store_codes(
                to, row, have, heads * (D // UNIT), a, b, biased,
                HALF, PAIRS, TOGETHER, D, INTEGER,
            )  # fmt: skip
            place = head.to(tl.int64) * tiles + first_tile(cu, sequence, TILE) + tile
            tl.store(scales + place, scale, mask=head < heads)


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

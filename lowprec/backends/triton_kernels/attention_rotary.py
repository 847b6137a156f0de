# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""Device functions of what comes before an attention: pairs of channels, norm, rotary embedding.

A tile of rows is held as the first and the second channels of pairs: first those that turn, then
the others, in pairs that mean nothing. Numbers are those of lowprec.attention_front, and in the
turn its bits: launch with enable_fp_fusion off, since every operation is rounded by itself.
"""

import triton
import triton.language as tl

from lowprec.backends.triton_kernels.codec import as_float32, round_to
from lowprec.rotary import COSINE, SINE

_S0 = tl.constexpr(SINE[0])
_S1 = tl.constexpr(SINE[1])
_S2 = tl.constexpr(SINE[2])
_S3 = tl.constexpr(SINE[3])
_C0 = tl.constexpr(COSINE[0])
_C1 = tl.constexpr(COSINE[1])
_C2 = tl.constexpr(COSINE[2])
_C3 = tl.constexpr(COSINE[3])


@triton.jit
def waves(phase):
    """Sine and cosine, float32, of turns in units of 2^-64, int64; see lowprec.rotary.waves."""
    turns = (phase >> 32).to(tl.int32)
    quarter = (turns + 0x20000000) & -0x40000000
    z = (turns - quarter).to(tl.float32) * (2.0**-29)
    y = z * z
    s = z * (_S0 + y * (_S1 + y * (_S2 + y * _S3)))
    c = 1.0 + y * (_C0 + y * (_C1 + y * (_C2 + y * _C3)))
    odd = (quarter & 0x40000000) != 0
    sine, cosine = tl.where(odd, c, s), tl.where(odd, s, c)
    return _signed(sine, quarter), _signed(cosine, quarter + 0x40000000)


@triton.jit
def _signed(values, sign):
    """float32 values, negated where `sign` (int32) is negative."""
    bits = values.to(tl.int32, bitcast=True) ^ (sign & -0x80000000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def wave_tile(steps, position, HALF: tl.constexpr, P: tl.constexpr):
    """Sine and cosine [rows, P] of the pairs at `position` [rows]."""
    i = tl.arange(0, P)
    step = tl.load(steps + i, mask=i < HALF, other=0)
    return waves(position.to(tl.int64)[:, None] * step[None, :])


@triton.jit
def turned(a, b, sine, cosine, HALF: tl.constexpr):
    """Pairs turned; those that do not turn keep their bits, whatever the other number is."""
    one, other = a * cosine - b * sine, b * cosine + a * sine
    if a.shape[1] != HALF:
        turns = (tl.arange(0, a.shape[1]) < HALF)[None, :]
        one, other = tl.where(turns, one, a), tl.where(turns, other, b)
    return one, other


@triton.jit
def pair_columns(HALF: tl.constexpr, PAIRS: tl.constexpr, TOGETHER: tl.constexpr, P: tl.constexpr):
    """Channels of the first and of the second of each pair [P], and which of P pairs there are.

    HALF pairs turn, channel i with i + HALF, or TOGETHER with its neighbour.
    """
    i = tl.arange(0, P)
    if TOGETHER:
        first, second = i * 2, i * 2 + 1
    elif HALF == PAIRS:
        first, second = i, i + PAIRS
    else:
        first, second = tl.where(i < HALF, i, i + HALF), tl.where(i < HALF, i + HALF, i + PAIRS)
    return first, second, i < PAIRS


@triton.jit
def _part(at, row, column, inside, stride):
    """float32 of the channels `column` of rows, zeros outside."""
    loaded = tl.load(at + (row[:, None] * stride + column[None, :]), mask=inside, other=0)
    if loaded.dtype == tl.bfloat16:
        # Two at once, one instruction each; the compiler's way takes three.
        values = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=&r,=r,r",
            [loaded],
            tl.float32,
            True,
            2,
        )
    else:
        values = as_float32(loaded)
    return values


@triton.jit
def pairs_of(word):
    """float32 of the first and of the second channels in words of two bf16."""
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def load_pairs(
    at,
    row,
    have,
    stride,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    TOGETHER: tl.constexpr,
    P: tl.constexpr,
):
    """float32 of the first and of the second channels, [rows, P] each, zeros where there are none.

    TOGETHER: read as words of two channels; `at` and `stride` are of words.
    """
    first, second, paired = pair_columns(HALF, PAIRS, TOGETHER, P)
    inside = have & paired[None, :]
    if TOGETHER:
        i = tl.arange(0, P)
        word = tl.load(at + (row[:, None] * stride + i[None, :]), mask=inside, other=0)
        a, b = pairs_of(word)
    else:
        a = _part(at, row, first, inside, stride)
        b = _part(at, row, second, inside, stride)
    return a, b


@triton.jit
def words_of(a, b, INTEGER: tl.constexpr):
    """Pairs of float32 values rounded to bf16, in words (int32) of their bits: b above a."""
    if INTEGER:
        low, high = round_to(a, "bfloat16", INTEGER), round_to(b, "bfloat16", INTEGER)
        word = (high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)
    else:
        word = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [a, b], tl.int32, True, 1
        )
    return word


@triton.jit
def store_pairs(
    to,
    row,
    have,
    stride,
    a,
    b,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    TOGETHER: tl.constexpr,
    INTEGER: tl.constexpr,
):
    """Store pairs where load_pairs reads them, rounded to bf16."""
    first, second, paired = pair_columns(HALF, PAIRS, TOGETHER, a.shape[1])
    inside, line = have & paired[None, :], row[:, None] * stride
    if TOGETHER:
        word = words_of(a, b, INTEGER)
        tl.store(to + (line + tl.arange(0, a.shape[1])[None, :]), word, mask=inside)
    else:
        tl.store(to + (line + first[None, :]), round_to(a, "bfloat16", INTEGER), mask=inside)
        tl.store(to + (line + second[None, :]), round_to(b, "bfloat16", INTEGER), mask=inside)


@triton.jit
def reciprocal_root(a, b, eps, WIDTH: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of each row [rows, 1]."""
    squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
    return tl.rsqrt(squares * (1.0 / WIDTH) + eps)[:, None]


@triton.jit
def weights_of(weight, column, inside):
    """float32 of the norm's weight [1, columns], zeros outside."""
    return as_float32(tl.load(weight + column, mask=inside, other=0))[None, :]

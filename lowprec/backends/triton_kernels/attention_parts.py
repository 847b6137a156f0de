# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""Device functions that the attention kernels share: places, bounds of masks, loads, activations.

Of every row the visible keys are one range, and of every key the rows that see it: both ends of
either never fall from one row or key to the next. So a tile needs its mask at its edges alone.
"""

import triton
import triton.language as tl

from lowprec.backends.triton_kernels.codec import as_float32, round_through, round_to

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Below every score that can be finite after a product of bf16 operands that makes sense, and far
# enough from the end of float32 that a difference of two scores stays finite.
LOWEST = tl.constexpr(-1.0e30)
# Half the logit of the normal distribution over x, a polynomial of x^2 on [0, 5.5^2] fitted to
# the value of gelu: to 3e-5 there, its slope to 1.1e-4; beyond, gelu is 0 or x to 1e-7.
_PHI_0 = tl.constexpr(0.7975596075)
_PHI_1 = tl.constexpr(0.03696530758)
_PHI_2 = tl.constexpr(-0.0003457188593)


@triton.jit
def parts_of(rows, steps, TILE: tl.constexpr, FEW: tl.constexpr, CHUNK: tl.constexpr):
    """Programs of one head of a sequence, by its own lengths: a tile of its rows each.

    Where at most FEW rows loop over more than CHUNK steps, a chunk of these each.
    """
    parts = tl.cdiv(rows, TILE)
    if CHUNK:
        split = (rows > 0) & (rows <= FEW) & (steps > CHUNK)
        parts = tl.where(split, tl.cdiv(steps, CHUNK), parts)
    return parts


@triton.jit
def place_of(
    starts,
    owners,
    cu_rows,
    batch,
    heads,
    TILE: tl.constexpr,
    cu_steps=None,
    FEW: tl.constexpr = 0,
    CHUNK: tl.constexpr = 0,
):
    """Sequence, head and tile of this program, of the list that attention_schedule wrote.

    Returns (live, sequence, head, tile); programs past the end of the list are not live. Tiles of
    one head of one sequence follow each other, so that they share its keys in the cache. With CHUNK
    `tile` is the number of the chunk where parts_of splits.
    """
    program = tl.program_id(0)
    entry = program // heads
    live = entry < tl.load(starts + batch)
    sequence = tl.load(owners + entry, mask=live, other=0)
    first = tl.load(starts + sequence)
    rows = tl.load(cu_rows + sequence + 1) - tl.load(cu_rows + sequence)
    steps = rows
    if CHUNK:
        steps = tl.load(cu_steps + sequence + 1) - tl.load(cu_steps + sequence)
    parts = tl.maximum(parts_of(rows, steps, TILE, FEW, CHUNK), 1)
    inside = program - first * heads
    return live, sequence, inside // parts, inside % parts


@triton.jit
def run_of(starts, owners, batch, heads):
    """Sequence, head and run of tiles of this program, of the same list, as place_of says it.

    For kernels that read everything once: heads of the same tokens lie side by side in memory, and
    are taken by programs that follow each other.
    """
    program = tl.program_id(0)
    entry = program // heads
    live = entry < tl.load(starts + batch)
    sequence = tl.load(owners + entry, mask=live, other=0)
    return live, sequence, program % heads, entry - tl.load(starts + sequence)


@triton.jit
def exponents_of(lse, there):
    """Exponents of two that P is divided by; +inf, which makes it zero, for rows without keys."""
    power = tl.load(lse, mask=there, other=float("-inf")) * LOG2E
    return tl.where(power == float("-inf"), float("inf"), power)


@triton.jit
def loop_end(x, INTEGER: tl.constexpr):
    """A scalar as the end of a loop; the interpreter has arrays for it, which range refuses.

    Assign it in a tuple: of `a = b` the interpreter makes an array again.
    """
    return x.handle.data.item() if INTEGER else x


@triton.jit
def key_range(row, queries, keys, left, right, size, MASK: tl.constexpr):
    """First key that a row sees and the first one after those; equal where it sees none."""
    position = row + (keys - queries)
    if MASK == "causal":
        low = position * 0
        high = position + 1
    elif MASK == "window":
        low = position - left
        high = position + right + 1
    elif MASK == "blocks":
        low = (row // size) * size
        high = low + size
    else:
        low = position * 0
        high = position * 0 + keys
    low = tl.minimum(tl.maximum(low, 0), keys)
    high = tl.minimum(tl.maximum(high, low), keys)
    return low, high


@triton.jit
def row_range(key, queries, keys, left, right, size, MASK: tl.constexpr):
    """First row that sees a key and the first one after those."""
    row = key - (keys - queries)
    if MASK == "causal":
        low = row
        high = row * 0 + queries
    elif MASK == "window":
        low = row - right
        high = row + left + 1
    elif MASK == "blocks":
        low = (key // size) * size
        high = low + size
    else:
        low = row * 0
        high = row * 0 + queries
    low = tl.minimum(tl.maximum(low, 0), queries)
    high = tl.minimum(tl.maximum(high, low), queries)
    return low, high


@triton.jit
def stretch(low_first, high_first, low_last, high_last, STEP: tl.constexpr):
    """Where a loop over tiles of STEP starts, needs no mask from and to, and ends.

    From the ranges of the first and of the last row of the stationary tile. One loop goes over all
    of it and masks on condition: of two pipelined loops ptxas would serialize the products.
    """
    start = low_first // STEP * STEP
    clear = tl.cdiv(low_last, STEP) * STEP
    unclear = tl.maximum(high_first // STEP * STEP, clear)
    return start, clear, unclear, high_last


@triton.jit
def seen_by(low, high, first, TILE: tl.constexpr):
    """Which of TILE keys from `first` on each row sees, [rows, TILE], from its range."""
    key = first + tl.arange(0, TILE)
    return (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])


@triton.jit
def load_rows(at, first, rows, stride, TILE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """A tile [TILE, D] of rows from `first` on, zeros past `rows` and past the width.

    float32 of bf16 bits (int16), else as stored.
    """
    r, c = tl.arange(0, TILE), tl.arange(0, D)
    pointers = at + tl.cast(first, tl.int64) * stride + (r[:, None] * stride + c[None, :])
    inside = (first + r < rows)[:, None]
    if D != WIDTH:
        inside &= (c < WIDTH)[None, :]
    tile = tl.load(pointers, mask=inside, other=0)
    return as_float32(tile) if tile.dtype == tl.int16 else tile


@triton.jit
def store_rows(to, first, rows, stride, values, WIDTH: tl.constexpr, INTEGER: tl.constexpr):
    """Round a float32 tile to bf16 and store those of its rows and columns that exist."""
    TILE: tl.constexpr = values.shape[0]
    D: tl.constexpr = values.shape[1]
    r, c = tl.arange(0, TILE), tl.arange(0, D)
    pointers = to + tl.cast(first, tl.int64) * stride + (r[:, None] * stride + c[None, :])
    inside = (first + r < rows)[:, None] & (c < WIDTH)[None, :]
    tl.store(pointers, round_to(values, "bfloat16", INTEGER), mask=inside)


@triton.jit
def narrow(values, INTEGER: tl.constexpr):
    """float32 values as a bf16 operand; rounded through bf16 where operands are float32."""
    return round_through(values, "bfloat16", True) if INTEGER else values.to(tl.bfloat16)


@triton.jit
def product(a, b, acc=None):
    """a b, added to acc, in float32; float32 operands (the interpreter's) are not rounded."""
    return tl.dot(a, b, acc, input_precision="ieee" if a.dtype == tl.float32 else "tf32")


@triton.jit
def _tanh(x, INTEGER: tl.constexpr):
    """tanh in one instruction, to 2^-11; exactly where there is no such instruction."""
    if INTEGER:
        found = 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0
    else:
        found = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return found


@triton.jit
def _half_logit(x):
    """Of the normal distribution, and its slope."""
    z = tl.minimum(x * x, 30.25)
    u = x * (_PHI_0 + z * (_PHI_1 + z * _PHI_2))
    return u, _PHI_0 + z * (3.0 * _PHI_1 + z * (5.0 * _PHI_2))


@triton.jit
def activated(x, KIND: tl.constexpr, INTEGER: tl.constexpr):
    """Value of gelu (x * Phi(x)) or silu in float32."""
    half = 0.5 * x
    if KIND == "silu":
        value = half + half * _tanh(half, INTEGER)
    else:
        u, _ = _half_logit(x)
        value = half + half * _tanh(u, INTEGER)
    return value


@triton.jit
def activated_slope(x, KIND: tl.constexpr, INTEGER: tl.constexpr):
    """Value and derivative of gelu or silu in float32."""
    half = 0.5 * x
    if KIND == "silu":
        t = _tanh(half, INTEGER)
        slope = 0.5 + 0.5 * t + 0.5 * half * (1.0 - t * t)
    else:
        u, du = _half_logit(x)
        t = _tanh(u, INTEGER)
        slope = 0.5 + 0.5 * t + half * (1.0 - t * t) * du
    return half + half * t, slope

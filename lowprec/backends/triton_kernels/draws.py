# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""The random words of lowprec.rng.RandomStream, made where they are used.

One Philox call serves 16 elements: the word of element i of a call is word i // 4 rotated right by
8 (i % 4) bits. The call of an element is its index in the whole tensor over 16.
"""

import triton
import triton.language as tl


@triton.jit
def _round(a, b, c, d, key_0, key_1):
    """A round of Philox 4x32: whole products, which a GPU gives in one instruction."""
    first = a.to(tl.uint64) * 0xD2511F53
    second = c.to(tl.uint64) * 0xCD9E8D57
    a = (second >> 32).to(tl.uint32) ^ b ^ key_0
    c = (first >> 32).to(tl.uint32) ^ d ^ key_1
    return a, second.to(tl.uint32), c, first.to(tl.uint32)


@triton.jit
def _philox(low, high, key_0, key_1):
    """Four words of Philox 4x32-10, its counter the two words of a call."""
    a, b, c, d = low, high, tl.zeros_like(low), tl.zeros_like(low)
    for _ in tl.static_range(10):
        a, b, c, d = _round(a, b, c, d, key_0, key_1)
        key_0 = tl.add(key_0, 0x9E3779B9, sanitize_overflow=False)
        key_1 = tl.add(key_1, 0xBB67AE85, sanitize_overflow=False)
    return a, b, c, d


@triton.jit
def call_words(call, key_0, key_1):
    """Words int32 [A, B, 16] of Philox calls (int64 [A, B]) under a key of two int32."""
    low = call.to(tl.uint32)
    high = (call >> 32).to(tl.uint32)
    key_0 = key_0.to(tl.uint32, bitcast=True)
    key_1 = key_1.to(tl.uint32, bitcast=True)
    a, b, c, d = _philox(low, high, key_0, key_1)
    # The index that join adds is the last: 2 x (b or d, not a or c) + (second of a pair).
    w = tl.join(tl.join(a, c), tl.join(b, d)).reshape(call.shape[0], call.shape[1], 4)
    half = (w >> 16) | (w << 16)
    quarter = (w >> 8) | (w << 24)
    rest = (w >> 24) | (w << 8)
    turned = tl.join(tl.join(w, half), tl.join(quarter, rest))
    return turned.reshape(call.shape[0], call.shape[1], 16).to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize=["first", "calls", "key_0", "key_1"])
def fill_words(words, first, calls, key_0, key_1, CALLS: tl.constexpr):
    """The words of `calls` calls from call `first` on, 16 each, in order."""
    i = tl.program_id(0).to(tl.int64) * CALLS + tl.arange(0, CALLS)
    found = call_words((first + i)[:, None], key_0, key_1).reshape(CALLS, 16)
    to = i[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(words + to, found, mask=(i < calls)[:, None])


@triton.jit
def tile_words(
    words,
    first_call,
    key_0,
    key_1,
    batch,
    first_r,
    first_c,
    rows,
    cols,
    GROUPS: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Words int32 [TILE_R, TILE_C] of a tile of [batch, rows, cols].

    GROUPS says how the elements of a call lie: "across", 16 neighbours in a row (cols is a multiple
    of 16 and the index runs along rows); "down", 16 in a column (rows is, and the index runs down
    columns); "stored": `words` holds every word, in the order of the matrix.
    """
    if GROUPS == "across":
        r = first_r + tl.arange(0, TILE_R)
        c = first_c // 16 + tl.arange(0, TILE_C // 16)
        line = batch * rows + r.to(tl.int64)
        found = call_words(first_call + line[:, None] * (cols // 16) + c[None, :], key_0, key_1)
        found = found.reshape(TILE_R, TILE_C)
    elif GROUPS == "down":
        r = first_r // 16 + tl.arange(0, TILE_R // 16)
        c = first_c + tl.arange(0, TILE_C)
        line = batch * cols + c.to(tl.int64)
        found = call_words(first_call + line[None, :] * (rows // 16) + r[:, None], key_0, key_1)
        found = tl.permute(found, (0, 2, 1)).reshape(TILE_R, TILE_C)
    else:
        r, c = tl.arange(0, TILE_R), tl.arange(0, TILE_C)
        base = (batch * rows + first_r) * cols + first_c
        r = r.to(tl.int64) if WIDE else r
        inside = (first_r + r < rows)[:, None] & (first_c + c < cols)[None, :]
        found = tl.load(words + base + r[:, None] * cols + c[None, :], mask=inside, other=0)
    return found

# mypy: ignore-errors
# Bodies of @gluon.jit functions are Triton's language, not typed Python.
"""Scores to weights in the kernels that stream, and weights to the operand of the next product."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _tanh(x):
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def weights(x, unit, peak, total, FACTOR: gl.constexpr, KIND: gl.constexpr):
    """P of a tile of scores, what the sums shrink by, and the new peak and total.

    Scores are x times unit to base 2 for a softmax; else twice that, and P lacks the factor unit.
    """
    if KIND == "softmax":
        higher = gl.maximum(peak, gl.max(x, 1) * unit)
        p = exp2(x * unit - gl.expand_dims(higher - FACTOR, 1))
        shrink = exp2(peak - higher)
        total = total * shrink + gl.sum(p, 1)
    else:
        # GELU, x Phi(x), as x (1 + tanh(x (a + b x^2))) / 2: within 2.8e-4 of it, where this tanh
        # is right to 2^-11. Each further instruction an element is seen in the time.
        slope = unit
        if KIND == "gelu":
            slope = 1.6003 * unit + (0.2776 * unit * unit * unit) * (x * x)
        p = x + x * _tanh(x * slope)
        higher, shrink = peak, peak
    return p, shrink, higher, total


@gluon.jit
def packed(p, EIGHT: gl.constexpr):
    """P as it is kept until it is an operand: bf16, or int32 [rows, keys / 4] of four E4M3 codes.

    A register has scores of keys 0, 1, 8 and 9 of some eight side by side, in a thread's order.
    """
    if EIGHT:
        M: gl.constexpr = p.shape[0]
        N: gl.constexpr = p.shape[1]
        parts = gl.permute(gl.reshape(p, (M, N // 16, 2, 4, 2)), (0, 1, 3, 2, 4))
        even, odd = gl.split(gl.reshape(parts, (M, N // 4, 2, 2)))
        a, c = gl.split(even)
        b, d = gl.split(odd)
        found = gl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f",
            [a, b, c, d],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        found = p.to(gl.bfloat16)
    return found


@gluon.jit
def operand(p, EIGHT: gl.constexpr, layout: gl.constexpr):
    """What `packed` kept as the left operand of a product; no thread gives anything away."""
    if EIGHT:
        M: gl.constexpr = p.shape[0]
        N: gl.constexpr = p.shape[1] * 4
        low = gl.join(p.to(gl.int8), (p >> 8).to(gl.int8))
        high = gl.join((p >> 16).to(gl.int8), (p >> 24).to(gl.int8))
        both = gl.permute(gl.join(low, high), (0, 1, 3, 2))
        found = gl.reshape(both, (M, N)).to(gl.float8e4nv, bitcast=True)
    else:
        found = p
    return gl.convert_layout(found, layout)

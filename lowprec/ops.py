"""The ops: argument checks, then the backend that the plan names."""

from __future__ import annotations

from typing import Any, Literal

import torch

from lowprec.attention_call import NO_MASK, AttentionCall, Mask
from lowprec.attention_checks import check_offsets, check_tensors
from lowprec.attention_front import Front
from lowprec.attention_policy import AttentionPolicy
from lowprec.backends import MODULES, choose, triton_kernels
from lowprec.backends.attention import ATTENTION_MODULES
from lowprec.backends.facts import Facts
from lowprec.errors import UnsupportedError
from lowprec.formats import Cast
from lowprec.hardware import NAMED, Hardware, current
from lowprec.rng import RandomStream
from lowprec.rotary import Rotary
from lowprec.tensor import QuantizedTensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def quantize(
    x: torch.Tensor,
    cast: Cast | str,
    *,
    axis: int = -1,
    generator: RandomStream | None = None,
    backend: str | None = None,
) -> QuantizedTensor:
    """Cast a tensor to a low-precision format along `axis`, the contraction axis.

    x: any shape, float32, bfloat16, float16 or float64 (read as float32); strided views are fine.
    cast: a Cast or its text (`mxfp8`, `mxfp8:floor`, `mxfp4:sr`). Returns codes of x's shape and a
    scale for each block; a block with Inf or NaN gets a NaN scale (E8M0 255) and codes 0, so it
    decodes to NaN; zeros get the smallest scale. The bits are the same on every backend.
    generator: the random bits of a stochastic cast (others draw none); torch's own generators are
    never touched. backend: a name, or None for the first that does not refuse. Raises
    UnsupportedError for an unknown format, a missing axis, a dtype that is not floating, a tensor
    that is quantized already, and a stochastic cast without generator.
    """
    cast = Cast.parse(cast) if isinstance(cast, str) else cast
    if isinstance(x, QuantizedTensor):
        raise UnsupportedError(
            f"quantize to {cast}: the tensor is {x.format.name} already, and casting twice loses "
            "more than casting once (up to 1.4 dB in FP4); cast the high-precision source"
        )
    if not isinstance(cast, Cast) or not isinstance(x, torch.Tensor):
        raise UnsupportedError(
            "quantize takes a tensor and a Cast or its text such as 'mxfp8'; "
            f"got {type(x).__qualname__} and {cast!r}"
        )
    if x.dtype not in FLOATS:
        raise UnsupportedError(
            f"quantize to {cast}: x is {x.dtype}, not one of {', '.join(map(str, FLOATS))}"
        )
    if cast.stochastic and not isinstance(generator, RandomStream):
        raise UnsupportedError(
            f"quantize to {cast}: stochastic rounding needs generator=lowprec.RandomStream(seed, "
            f"...), not {type(generator).__qualname__}: the bits must be the same when a step is "
            "computed again"
        )
    if backend is None:
        backend = choose("quantize", Facts(_hardware_of(x), cast, None)).backend
    stream = generator if cast.stochastic else None
    result: QuantizedTensor = _module(backend).quantize(x, cast, axis=axis, stream=stream)
    return result


def quantize_both(
    x: torch.Tensor,
    casts: tuple[Cast, Cast],
    *,
    generators: tuple[RandomStream | None, RandomStream | None] = (None, None),
    backend: str,
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """`quantize` x [..., R, C] along its last axis and along the one before.

    A backend that has a kernel for both reads x once; the bits are those of two calls.
    """
    both = getattr(_module(backend), "quantize_both", None)
    if both is not None:
        found: tuple[QuantizedTensor, QuantizedTensor] = both(x, *casts, streams=generators)
        return found
    return (
        quantize(x, casts[0], axis=-1, generator=generators[0], backend=backend),
        quantize(x, casts[1], axis=-2, generator=generators[1], backend=backend),
    )


def dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of a quantized tensor: code x scale (x outer), in `dtype`, shape of the source."""
    if not isinstance(q, QuantizedTensor):
        raise UnsupportedError(f"dequantize takes a QuantizedTensor, not {type(q).__qualname__}")
    narrow = dtype in (torch.bfloat16, torch.float16, torch.float32)
    backend = "triton" if narrow and _decodes_on_gpu(q) else "reference"
    return MODULES[backend].dequantize(q, dtype=dtype)  # type: ignore[no-any-return]


def matmul(
    a: torch.Tensor | QuantizedTensor,
    b: torch.Tensor | QuantizedTensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "emulated",
) -> torch.Tensor:
    """Product of a [M, K] and b [N, K] transposed, plus bias [N]: [M, N] in `out_dtype`.

    Quantized operands must be cast along K; unquantized ones are rounded to bf16 first (float64
    stays float64). Sums are float32 or wider and are rounded once. Raises UnsupportedError when
    shapes or cast axes do not fit.
    """
    a_shape, b_shape = a.shape, b.shape
    for side, t, shape in (("a", a, a_shape), ("b", b, b_shape)):
        if len(shape) != 2:
            raise UnsupportedError(f"matmul: {side} has shape {tuple(shape)}, not two dimensions")
        if isinstance(t, QuantizedTensor) and t.axis != -1:
            raise UnsupportedError(f"matmul: {side} was cast along axis {t.axis}, not along K (-1)")
    if a_shape[1] != b_shape[1]:
        raise UnsupportedError(
            f"matmul: a {tuple(a_shape)} and b {tuple(b_shape)} differ in K, their last dimension"
        )
    if backend == "emulated":
        a, b = _values_on_gpu(a), _values_on_gpu(b)
    result: torch.Tensor = _module(backend).matmul(a, b, bias=bias, out_dtype=out_dtype)
    return result


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    policy: AttentionPolicy | str,
    activation: Literal["softmax", "gelu", "silu"] = "softmax",
    mask: Mask = NO_MASK,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
    rotary: Rotary | None = None,
    check_lengths: bool = True,
    backend: str = "",
) -> torch.Tensor:
    """Attention over sequences of any lengths laid end to end: o [Tq, H, D], differentiable.

    q [Tq, H, D], k and v [Tk, Hkv, D] with Hkv dividing H, bfloat16, float32 or float64 (without
    casts float64 is exact, the others multiply in bfloat16); D a multiple of 16 up to 256.
    cu_seqlens_q, cu_seqlens_k: int32 [B + 1], 0 and then the end of each sequence; None for the
    keys takes the queries'. policy: an AttentionPolicy or its text. bias: [H or 1, longest query,
    longest key], added before the activation, shared by the sequences. scale: of q k^T, None for
    1 / sqrt(D). rotary: turns q and k by their positions first, query i at i + (Lk - Lq), in the
    pass that casts them where kernels do. Formulas, masks and layouts: lowprec.attention_call. A
    query without keys gives zeros. check_lengths: whether the values of cu_seqlens are looked at,
    which on a GPU waits for it once for each pair of tensors; False trusts them. backend: a name,
    or "" for the first that does not refuse. Raises UnsupportedError for shapes, dtypes, offsets, a
    bias or a mask that do not fit.
    """
    from lowprec.attention_ops import How, attend  # registers ops, slower than all other imports

    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    check_tensors(q, k, v, bias)
    check_offsets("cu_seqlens_q", cu_seqlens_q, q)
    check_offsets("cu_seqlens_k", cu_seqlens_k, q)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    call = AttentionCall(activation, mask, scale, bias is not None and bias.requires_grad)
    if backend not in ("", *ATTENTION_MODULES):
        raise UnsupportedError(
            f"unknown attention backend {backend!r}; known: {', '.join(ATTENTION_MODULES)}"
        )
    text = policy if isinstance(policy, str) else policy.text
    front = None if rotary is None else Front(1.0, rotary)
    how = How(call, text, backend, check=check_lengths, front=front)
    return attend((q, k, v), cu_seqlens_q, cu_seqlens_k, bias, how)


def _decodes_on_gpu(q: QuantizedTensor) -> bool:
    """Whether a proven kernel gives the values of these codes where they are."""
    return q.codes.is_cuda and triton_kernels.fits_values(q.format)


def _values_on_gpu(t: torch.Tensor | QuantizedTensor) -> torch.Tensor | QuantizedTensor:
    """The bf16 values of codes on a GPU by one kernel, where it is proven; the rest as it is."""
    if not isinstance(t, QuantizedTensor) or not _decodes_on_gpu(t):
        return t
    return triton_kernels.dequantize(t, dtype=torch.bfloat16)


def _hardware_of(x: torch.Tensor) -> Hardware:
    return current() if x.is_cuda else NAMED["cpu"]


def _module(backend: str) -> Any:
    if backend not in MODULES:
        raise UnsupportedError(f"unknown backend {backend!r}; known: {', '.join(MODULES)}")
    return MODULES[backend]

"""The ops: argument checks, then the backend that the plan names."""

from __future__ import annotations

from typing import Any

import torch

from lowprec.backends import MODULES, choose
from lowprec.backends.facts import Facts
from lowprec.errors import UnsupportedError
from lowprec.formats import Cast
from lowprec.hardware import NAMED, Hardware, current
from lowprec.rng import RandomStream
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


def dequantize(q: QuantizedTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of a quantized tensor: code x scale (x outer), in `dtype`, shape of the source."""
    if not isinstance(q, QuantizedTensor):
        raise UnsupportedError(f"dequantize takes a QuantizedTensor, not {type(q).__qualname__}")
    return MODULES["reference"].dequantize(q, dtype=dtype)  # type: ignore[no-any-return]


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
    for side, t in (("a", a), ("b", b)):
        if len(t.shape) != 2:
            raise UnsupportedError(f"matmul: {side} has shape {tuple(t.shape)}, not two dimensions")
        if isinstance(t, QuantizedTensor) and t.axis != -1:
            raise UnsupportedError(f"matmul: {side} was cast along axis {t.axis}, not along K (-1)")
    if a.shape[1] != b.shape[1]:
        raise UnsupportedError(
            f"matmul: a {tuple(a.shape)} and b {tuple(b.shape)} differ in K, their last dimension"
        )
    result: torch.Tensor = _module(backend).matmul(a, b, bias=bias, out_dtype=out_dtype)
    return result


def _hardware_of(x: torch.Tensor) -> Hardware:
    return current() if x.is_cuda else NAMED["cpu"]


def _module(backend: str) -> Any:
    if backend not in MODULES:
        raise UnsupportedError(f"unknown backend {backend!r}; known: {', '.join(MODULES)}")
    return MODULES[backend]

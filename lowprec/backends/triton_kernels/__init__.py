"""Kernels in Triton, and in Gluon where plain Triton cannot reach memory speed.

Not in ORDER, so nothing chooses them: they equal the reference under the interpreter, which is not
yet shown for each of them on a GPU (tests/gpu/test_kernels_on_gpu.py).
Triton is imported by the first call of an op, never by importing this package.
"""

from __future__ import annotations

import importlib.metadata
import math
from functools import cache
from typing import Any

import torch

from lowprec.backends.facts import Facts
from lowprec.blocks import Matrix
from lowprec.errors import UnsupportedError
from lowprec.formats import ALL, Cast
from lowprec.rng import RandomStream
from lowprec.tensor import QuantizedTensor

OLDEST = (3, 6)
_CAPABILITY = {"e4m3": (8, 9), "e5m2": (8, 9)}


@cache
def missing() -> str | None:
    """Why Triton cannot be used here at all, or None."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "Triton is not installed"
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        return f"Triton {version} is too old; needs {OLDEST[0]}.{OLDEST[1]}"
    return None


def refuse(op: str, facts: Facts) -> str | None:
    """Casts to every format without an outer scale on CUDA devices; no products."""
    if op == "matmul":
        return "no products in these kernels"
    if facts.hardware.capability is None:
        return f"needs a CUDA device, this is {facts.hardware.name}"
    if reason := missing():
        return reason
    casts = [one for one in (facts.left, facts.right) if one is not None]
    for cast in casts:
        if cast.format.outer:
            return f"no cast to {cast.format.name}: its scale needs the whole tensor first"
        if cast.stochastic:
            return f"no stochastic rounding in the cast to {cast.format.name}"
        needed = _CAPABILITY.get(cast.format.element.name, (8, 0))
        if facts.hardware.capability < needed:
            return f"needs sm{needed[0]}{needed[1]}, this is {facts.hardware}"
    return None


def quantize(
    x: torch.Tensor, cast: Cast, *, axis: int, stream: RandomStream | None = None
) -> QuantizedTensor:
    """Cast `x` along `axis`; codes are contiguous along the contraction, whatever x's strides."""
    if cast.stochastic or cast.format.outer or stream is not None:
        raise UnsupportedError(f"triton: no cast to {cast}; use the reference")
    view = _View(x, cast, axis)
    text = str(cast)
    ops = _ops()
    if ALL in cast.format.block:
        codes, scales = ops.cast_spans(view.data, text, view.by_column)
        turned = view.by_column and cast.format.block != (ALL, ALL)
    else:
        row, column = ("", text) if view.by_column else (text, "")
        codes, scales = ops.cast_tiles(view.data, row, column)
        turned = view.by_column
    return view.result(codes, scales, turned=turned, scales_turned=False)


def quantize_both(
    x: torch.Tensor, row_cast: Cast, column_cast: Cast
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Cast `x` [..., R, C] along its last axis and along the one before, in one read of `x`."""
    if x.ndim < 2 or ALL in (*row_cast.format.block, *column_cast.format.block):
        return quantize(x, row_cast, axis=-1), quantize(x, column_cast, axis=-2)
    row, column = _View(x, row_cast, -1, merge=False), _View(x, column_cast, -2, merge=False)
    # Where x lies transposed in memory, the cast along its last axis runs down the columns.
    across, down = (column, row) if row.by_column else (row, column)
    found = _ops().cast_tiles(row.data, str(across.cast), str(down.cast))
    first = across.result(found[0], found[1], turned=False, scales_turned=True)
    second = down.result(found[2], found[3], turned=True, scales_turned=False)
    return (second, first) if row.by_column else (first, second)


def dequantize(q: QuantizedTensor, *, dtype: torch.dtype) -> torch.Tensor:
    """Values of `q` in `dtype`, in the order of memory that the codes have."""
    if q.outer is not None:
        raise UnsupportedError(f"triton: no values of {q.format.name}; use the reference")
    codes, scales = Matrix.of(q.codes, q.format, q.axis), Matrix.of(q.scales, q.format, q.axis)
    data, by_column, flipped = _in_memory_order(codes.data, codes.axis)
    scale = scales.data.mT if flipped else scales.data
    scale = scale.reshape(data.shape[0], *scale.shape[-2:]).contiguous()
    narrow = torch.float32 if dtype == torch.float64 else dtype
    out = _ops().decode_tiles(data, scale, q.format.name, by_column, narrow)
    out = (out.mT if flipped else out).reshape(codes.data.shape)
    return codes.restore(out, is_scale=False).to(dtype)


def round_trip(
    x: torch.Tensor, cast: Cast, *, axis: int, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """The values that `x` has after a cast along `axis`, in one pass and in x's order of memory.

    For products that are emulated. Raises UnsupportedError for scales that span a whole extent.
    """
    if ALL in cast.format.block or cast.format.outer:
        raise UnsupportedError(f"triton: no one-pass round trip through {cast.format.name}")
    view = _View(x, cast, axis)
    out = _ops().round_trip(view.data, str(cast), view.by_column, dtype)
    return view.restore(out, turned=False, is_scale=False)


def _in_memory_order(x: torch.Tensor, axis: int) -> tuple[torch.Tensor, bool, bool]:
    """[..., R, C] as [B, R, C] with unit stride along C; cast by column?; R and C exchanged?"""
    flipped = x.stride(-1) != 1 and x.stride(-2) == 1
    data, axis = (x.mT, -3 - axis) if flipped else (x, axis)
    data = data.reshape(math.prod(data.shape[:-2]), *data.shape[-2:])
    if data.stride(-1) != 1:
        # A single column has any stride; others are brought into order.
        one = data.shape[-1] == 1
        data = data.as_strided(data.shape, (*data.stride()[:-1], 1)) if one else data.contiguous()
    return data, axis == -2, flipped


class _View:
    """A tensor as the ops take it, and the way back to its own shape."""

    def __init__(self, x: torch.Tensor, cast: Cast, axis: int, *, merge: bool = True) -> None:
        self.cast = cast
        self.matrix = Matrix.of(x, cast.format, axis)
        source = self.matrix.data.detach()
        source = source.float() if source.dtype == torch.float64 else source
        data, self.by_column, self.flipped = _in_memory_order(source, self.matrix.axis)
        self.batch, self.rows, self.cols = data.shape
        # Rows that are cast alone need no batches.
        mergeable = self.rows > 0 and data.stride(0) == self.rows * data.stride(1)
        alone = cast.format.block[0] == 1 and not self.by_column
        self.merged = merge and alone and mergeable and self.batch > 1
        self.data = data.reshape(1, -1, self.cols) if self.merged else data

    def restore(self, t: torch.Tensor, *, turned: bool, is_scale: bool) -> torch.Tensor:
        """Give codes, scales or values in the order of memory the layout of the source."""
        if self.merged:
            t = t[0].unflatten(0, (self.batch, self.rows))
        t = t.mT if self.flipped != turned else t
        lead = self.matrix.data.shape[:-2]
        t = t.unflatten(0, lead) if lead else t[0]
        return self.matrix.restore(t, is_scale=is_scale)

    def result(
        self, codes: torch.Tensor, scales: torch.Tensor, *, turned: bool, scales_turned: bool
    ) -> QuantizedTensor:
        """The tensor that the ops' codes and scales are."""
        codes = codes[..., : self.rows if turned else self.cols]
        return QuantizedTensor(
            codes=self.restore(codes, turned=turned, is_scale=False),
            scales=self.restore(scales, turned=scales_turned, is_scale=True),
            format=self.cast.format,
            axis=self.matrix.source_axis,
        )


def _ops() -> Any:
    from lowprec.backends.triton_kernels import launch  # registers the ops

    del launch
    return torch.ops.lowprec

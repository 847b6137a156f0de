"""Both casts of a matrix as a layer makes them in every step, with little to do for the host.

Finding launch shapes, outputs and the compiled kernel anew takes the host longer than many of these
casts take the GPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from lowprec.backends.triton_kernels import launch, pipelined
from lowprec.backends.triton_kernels.span_ops import raise_to_maximum
from lowprec.backends.triton_kernels.starting import repeated
from lowprec.formats import ALL, Cast
from lowprec.tensor import QuantizedTensor


class _Kind(NamedTuple):
    """Whether one scale is the whole tensor's; whether both casts have the same square blocks, and
    so the same scales."""

    whole: bool
    square: bool


def cast_both(
    x: torch.Tensor, row: Cast, column: Cast
) -> tuple[QuantizedTensor, QuantizedTensor] | None:
    """x [R, C] cast to nearest along C and along R by the pipelined kernel; None if it cannot."""
    row_text, column_text = row.text, column.text
    kind = _kind(row_text, column_text)
    if kind is None or x.data_ptr() % 16:
        return None
    amax = torch.zeros(1, dtype=torch.int32, device=x.device) if kind.whole else None
    out = _cast(x, amax, row_text, column_text)
    if not out:
        return None
    codes, codes_t, *scales = out
    rows, cols = x.shape
    if codes.shape[1] != cols:
        codes = codes[:, :cols]
    if codes_t.shape[0] != rows:
        codes_t = codes_t[:rows]
    if kind.square:  # either holds the numbers; products read them along the contraction
        scales.reverse()
    return (
        QuantizedTensor(codes, scales[0], row.format, -1),
        QuantizedTensor(codes_t, scales[-1], column.format, -2),
    )


@lru_cache(maxsize=256)
def _kind(row: str, column: str) -> _Kind | None:
    """None for casts that the kernel does not make."""
    casts = Cast.parse(row), Cast.parse(column)
    whole = row == column and casts[0].format.block == (ALL, ALL)
    if not whole and any(ALL in cast.format.block or cast.format.outer for cast in casts):
        return None
    if not pipelined.has_elements(row, column) or any(cast.stochastic for cast in casts):
        return None
    return _Kind(whole, row == column and casts[0].format.transposable)


@repeated
def _cast(x: torch.Tensor, amax: torch.Tensor | None, row: str, column: str) -> list[torch.Tensor]:
    """Codes by row and by column, scales by row and, unless they are the tensor's, by column.

    amax: zero, int32 [1], where one scale is the whole tensor's. Codes may have more columns, and
    those by column more rows, than x [R, C]. Nothing for an x that the copy engine cannot move.
    """
    data, (rows, cols), device = x[None], x.shape, x.get_device()
    if 0 in x.shape or not pipelined.takes_matrix(x.shape, x.stride(), x.dtype, device):
        return []
    if amax is None:
        out = launch.outputs(data, row, column)
        pipelined.cast(data, row, column, out)
        codes, scales, codes_t, scales_t = (one[0] for one in out)
        return [codes, codes_t.mT, scales.mT, scales_t]
    raise_to_maximum(data, amax)
    codes, codes_t = (
        torch.empty(shape, dtype=torch.uint8, device=x.device)
        for shape in ((rows, launch.padded(cols)), (cols, launch.padded(rows)))
    )
    scale = torch.empty((1, 1), dtype=torch.float32, device=x.device)
    every = [one[None] for one in (codes, scale, codes_t, scale)]
    pipelined.cast(data, row, column, every, amax=amax)
    return [codes, codes_t.mT, scale]

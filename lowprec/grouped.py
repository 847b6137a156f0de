"""Grouped products: rows of one tensor by the weights of several experts, each its own group."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch.nn import functional

from lowprec import ops
from lowprec.errors import UnsupportedError
from lowprec.formats import ALL, Format
from lowprec.hardware import Hardware, current
from lowprec.tensor import QuantizedTensor

Operand = torch.Tensor | QuantizedTensor
_ALIGNED = 16
"""FP8 codes in a line of 16 bytes, the alignment of the GPU's grouped product."""


def grouped_matmul(
    a_MK: Operand, b_ENK: Operand, counts: Sequence[int], *, native: bool = False
) -> torch.Tensor:
    """Rows of a [M, K] by b [E, N, K] transposed, bfloat16 [M, N].

    counts: how many consecutive rows belong to each of E experts, summing to M; zeros are fine.
    Quantized operands are cast along K, a in blocks of one row, b in blocks within an expert, so
    that a result never depends on the tokens of another expert. Each product is that of
    `lowprec.ops.matmul`, one call for each expert with tokens. native: one call of torch's
    scaled_grouped_mm for all of them, on sm90 with fp8_rowwise. Raises UnsupportedError for what
    does not fit, and for a native product that `native_refusal` refuses.
    """
    _check(a_MK, b_ENK, counts)
    if native:
        return _native(a_MK, b_ENK, counts)
    rows, columns = a_MK.shape[0], b_ENK.shape[1]
    device = a_MK.codes.device if isinstance(a_MK, QuantizedTensor) else a_MK.device
    out = torch.zeros((rows, columns), dtype=torch.bfloat16, device=device)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            own = slice(start, start + count)
            out[own] = ops.matmul(_part(a_MK, own), _part(b_ENK, expert))
        start += count
    return out


def native_refusal(left: Format, right: Format, hardware: Hardware) -> str | None:
    """Why scaled_grouped_mm cannot multiply these formats on `hardware`, or None."""
    if hardware.capability != (9, 0):
        return f"the grouped native product is for sm90, this is {hardware}"
    for fmt in (left, right):
        if fmt.block != (1, ALL) or fmt.power_of_two or fmt.element.torch_dtype is None:
            return f"the grouped native product takes fp8_rowwise, not {fmt.name}"
    if not hasattr(functional, "scaled_grouped_mm"):
        return f"torch {torch.__version__} has no scaled_grouped_mm"
    return None


def _check(a_MK: Operand, b_ENK: Operand, counts: Sequence[int]) -> None:
    if len(a_MK.shape) != 2 or len(b_ENK.shape) != 3 or a_MK.shape[1] != b_ENK.shape[2]:
        raise UnsupportedError(
            f"grouped_matmul: a {tuple(a_MK.shape)} and b {tuple(b_ENK.shape)} are not [M, K] and "
            "[E, N, K]"
        )
    if len(counts) != b_ENK.shape[0] or sum(counts) != a_MK.shape[0] or min(counts) < 0:
        raise UnsupportedError(
            f"grouped_matmul: counts {list(counts)} need one number, zero or more, for each of "
            f"{b_ENK.shape[0]} experts, and {a_MK.shape[0]} rows in all"
        )
    for name, t in (("a", a_MK), ("b", b_ENK)):
        if not isinstance(t, QuantizedTensor):
            continue
        if t.axis != -1:
            raise UnsupportedError(f"grouped_matmul: {name} was cast along axis {t.axis}, not K")
        if t.format.outer or t.format.block[0] == ALL or (name == "a" and t.format.block[0] != 1):
            raise UnsupportedError(
                f"grouped_matmul: a scale of {t.format.name} in {name} reaches over several "
                "experts; mxfp8 for a, mxfp8 or mxfp8_32x32 for b do not"
            )


def _part(t: Operand, which: int | slice) -> Operand:
    if isinstance(t, QuantizedTensor):
        return QuantizedTensor(t.codes[which], t.scales[which], t.format, -1)
    return t[which]


def _native(a_MK: Operand, b_ENK: Operand, counts: Sequence[int]) -> torch.Tensor:
    if not isinstance(a_MK, QuantizedTensor) or not isinstance(b_ENK, QuantizedTensor):
        raise UnsupportedError("grouped_matmul: a native product has both operands quantized")
    reason = native_refusal(a_MK.format, b_ENK.format, current())
    if reason is None and (a_MK.shape[1] % _ALIGNED or b_ENK.shape[1] % _ALIGNED):
        reason = f"the grouped native product needs K and N in multiples of {_ALIGNED}"
    if reason is not None:
        raise UnsupportedError(f"grouped_matmul: {reason}")
    if not a_MK.shape[0]:
        return a_MK.codes.new_zeros((0, b_ENK.shape[1]), dtype=torch.bfloat16)
    ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=a_MK.codes.device)
    torch_functional: Any = functional  # torch's stubs leave it out
    row_wise = functional.ScalingType.RowWise
    product: torch.Tensor = torch_functional.scaled_grouped_mm(
        _codes(a_MK),
        _codes(b_ENK).mT,
        a_MK.scales.reshape(-1),
        row_wise,
        b_ENK.scales.reshape(b_ENK.shape[:2]),
        row_wise,
        offs=ends,
        output_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    return product


def _codes(q: QuantizedTensor) -> torch.Tensor:
    dtype = q.format.element.torch_dtype
    assert dtype is not None  # a refusal otherwise
    return q.codes.contiguous().view(dtype)

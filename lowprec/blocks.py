"""Cutting a tensor into scale blocks, and the exact integer rule from amax to scale."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from lowprec.errors import UnsupportedError
from lowprec.formats import ALL, Element, Format, ScaleRule


@dataclass(frozen=True)
class Blocking:
    """How the last two dimensions of a tensor are cut: block size and zero padding of each."""

    rows: int
    cols: int
    pad_rows: int
    pad_cols: int

    @classmethod
    def of(cls, shape: torch.Size, fmt: Format, axis: int) -> Blocking:
        """Blocking of [..., R, C] for a cast along `axis` (-1 or -2).

        Whole-extent blocks pad an empty dimension to one zero, so that they still have a scale.
        """
        across, along = fmt.block
        extents = (across, along) if axis == -1 else (along, across)
        sizes = [max(n, 1) if e == ALL else e for e, n in zip(extents, shape[-2:], strict=True)]
        pads = [
            1 if e == ALL and n == 0 else -n % size
            for e, n, size in zip(extents, shape[-2:], sizes, strict=True)
        ]
        return cls(*sizes, *pads)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """View [..., R, C] as [..., R/r, r, C/c, c], padded with zeros to whole blocks."""
        if self.pad_rows or self.pad_cols:
            x = functional.pad(x, (0, self.pad_cols, 0, self.pad_rows))
        *lead, rows, cols = x.shape
        return x.view(*lead, rows // self.rows, self.rows, cols // self.cols, self.cols)

    def join(self, blocks: torch.Tensor) -> torch.Tensor:
        """Undo `split`: [..., R/r, r, C/c, c] back to [..., R, C] without the padding."""
        *lead, r_count, r, c_count, c = blocks.shape
        x = blocks.reshape(*lead, r_count * r, c_count * c)
        if self.pad_rows or self.pad_cols:
            x = x[..., : x.shape[-2] - self.pad_rows, : x.shape[-1] - self.pad_cols]
        return x


def per_block(scales: torch.Tensor) -> torch.Tensor:
    """Scales [..., R/r, C/c] shaped to multiply blocks [..., R/r, r, C/c, c]."""
    return scales.unsqueeze(-1).unsqueeze(-3)


@dataclass(frozen=True)
class Matrix:
    """A tensor of any rank laid out as [..., R, C] with the contraction along -1 or -2."""

    data: torch.Tensor
    axis: int
    source_shape: torch.Size
    source_axis: int

    @classmethod
    def of(cls, x: torch.Tensor, fmt: Format, axis: int) -> Matrix:
        """Lay out `x` for a cast along `axis`; raises UnsupportedError for an unusable axis."""
        source_axis = canonical_axis(x, axis)
        shape = x.shape
        if fmt.block == (ALL, ALL):
            return cls(x.reshape(math.prod(shape[:-1]), shape[-1]), -1, shape, source_axis)
        if x.ndim == 1:
            return cls(x.unsqueeze(0), -1, shape, source_axis)
        if source_axis in (-1, -2):
            return cls(x, source_axis, shape, source_axis)
        if fmt.block[0] != 1:
            raise UnsupportedError(
                f"format {fmt.name} has two-dimensional blocks: axis must be one of the last two, "
                f"not {axis} of shape {tuple(shape)}"
            )
        return cls(x.movedim(source_axis, -1), -1, shape, source_axis)

    def restore(self, y: torch.Tensor, *, is_scale: bool) -> torch.Tensor:
        """Give codes, values or scales computed from `data` the layout of the source tensor."""
        if self.data.ndim == len(self.source_shape) and self.source_axis in (-1, -2):
            return y
        if is_scale and y.numel() == 1:
            return y.reshape([1] * len(self.source_shape))
        if self.data.ndim == len(self.source_shape):
            return y.movedim(-1, self.source_axis)
        return (
            y.reshape([*self.source_shape[:-1], -1]) if is_scale else y.reshape(self.source_shape)
        )


def amax_of(blocks: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each block, float32 [..., R/r, 1, C/c, 1]; NaN and Inf stay on top."""
    # The last abs: on a CPU amax over an outer dimension gives NaN with its sign set.
    return blocks.abs().amax((-3, -1), keepdim=True).float().abs()


def e8m0_bytes(amax: torch.Tensor, element: Element, rule: ScaleRule) -> torch.Tensor:
    """Biased scale exponents (int32, 0..254; 255 for a block with Inf or NaN) from float32 amax.

    The integer rule on float32 bits, exponent field E and fraction m: clamp(E - emax + inc, 0, 254)
    with inc 0 for FLOOR, [m > fraction of max] for RCEIL, [m > 0] for CEIL, the carry of half-up
    rounding to the element's mantissa for EVEN. Adding the right constant to the bits makes the
    fraction carry into the exponent exactly when inc is 1. Exact for subnormal amax as well.
    """
    carry = {
        ScaleRule.FLOOR: 0,
        ScaleRule.RCEIL: 0x7FFFFF - element.max_fraction,
        ScaleRule.CEIL: 0x7FFFFF,
        ScaleRule.EVEN: 1 << (22 - element.mantissa_bits),
    }
    bits = amax.view(torch.int32)
    biased = ((bits + carry[rule]) >> 23) - element.emax
    return biased.clamp_(0, 254).masked_fill_(bits >= 0x7F800000, 255)


def power_of_two(biased: torch.Tensor) -> torch.Tensor:
    """float32 2^(biased - 127) of int32 scale bytes: 0 gives the subnormal 2^-127, 255 NaN."""
    bits = (biased << 23).masked_fill_(biased == 0, 0x400000)
    return bits.masked_fill_(biased == 255, 0x7FC00000).view(torch.float32)


def reciprocal_power(biased: torch.Tensor) -> torch.Tensor:
    """float32 2^(127 - biased), the exact encoding multiplier; 0 where the block is poisoned."""
    bits = ((254 - biased) << 23).masked_fill_(biased == 254, 0x400000)
    return bits.masked_fill_(biased == 255, 0).view(torch.float32)


def float_scales(amax: torch.Tensor, element: Element) -> torch.Tensor:
    """Free float32 scales amax / max, at least the smallest normal; NaN for a poisoned block."""
    # By a tensor: CUDA turns division by a Python number into a product with its reciprocal.
    scales = (amax / torch.full_like(amax, element.max)).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.where(amax.isfinite(), scales, torch.nan)


def canonical_axis(x: torch.Tensor, axis: int) -> int:
    """`axis` as a negative number; raises UnsupportedError when `x` has no such axis."""
    if not -x.ndim <= axis < x.ndim or x.ndim == 0:
        raise UnsupportedError(f"axis {axis} does not exist in a tensor of shape {tuple(x.shape)}")
    return axis - x.ndim if axis >= 0 else axis

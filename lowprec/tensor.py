"""The quantized tensor: codes and scales side by side, and what they stand for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from lowprec.errors import UnsupportedError
from lowprec.formats import Format


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Codes, scales, format and contraction axis; value = code x scale (x outer).

    codes: uint8 with the shape of the source, one code a byte, 4- and 6-bit codes in the low bits.
    scales: one entry a block, the shape of the source divided by the block, rounded up; uint8 for
    E8M0 (255 is NaN) and E4M3, float32 otherwise. axis: the contraction axis, negative.
    outer: the float32 scale of the whole tensor (0-d), for formats that have one.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    format: Format
    axis: int
    outer: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape of the source tensor."""
        return self.codes.shape

    @property
    def mT(self) -> QuantizedTensor:
        """The same values with the last two dimensions exchanged; nothing is recomputed.

        The contraction axis moves along: a tensor cast along its rows stays cast along them.
        """
        if self.axis not in (-1, -2) or self.codes.ndim < 2:
            raise UnsupportedError(
                f"mT exchanges the last two axes, this one was cast along {self.axis}"
            )
        axis = -3 - self.axis
        return QuantizedTensor(self.codes.mT, self.scales.mT, self.format, axis, self.outer)

    def along(self, axis: int) -> QuantizedTensor:
        """The same codes read as cast along `axis` (-1 or -2), for formats with square blocks.

        Raises UnsupportedError for other formats: there the codes along another axis are other
        numbers, so cast again from the high-precision source.
        """
        if axis == self.axis:
            return self
        if not self.format.transposable or axis not in (-1, -2):
            raise UnsupportedError(
                f"{self.format.name} codes cast along axis {self.axis} do not serve axis {axis}; "
                "cast the high-precision source along that axis instead"
            )
        return dataclasses.replace(self, axis=axis)

    @property
    def nbytes(self) -> int:
        """Bytes held by codes and scales as stored here."""
        outer = 0 if self.outer is None else self.outer.nbytes
        return self.codes.nbytes + self.scales.nbytes + outer

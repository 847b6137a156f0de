"""Block-diagonal Hadamard rotation of both operands of a product along its contraction.

(H S a)^T (H S b) = a^T S H^T H S b = d a^T b for a Sylvester matrix H of size d and signs S, so the
product is unchanged while an outlier is spread over its block of d. 1/sqrt(d) is not a power of two
for d = 32 and 128: the left operand is scaled by 2^-floor(k/2), the right by 2^-ceil(k/2), d = 2^k,
which is exact. The order of the additions is fixed, so every device gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

import torch
from torch.nn import functional

from lowprec.errors import UnsupportedError
from lowprec.formats import nearest_names
from lowprec.rng import RandomStream, signs_of

SIZES: Final = (16, 32, 64, 128)
_CPU_CHUNK: Final = 1 << 17  # elements that stay in a CPU's cache
Side = Literal["left", "right"]

# The first 16 are those of Transformer Engine's NVFP4 recipe (mask 55272); the rest are the bits of
# Philox at counter 0, key 0.
_TE: Final = tuple(-1 if 55272 >> i & 1 else 1 for i in range(16))


class Signs(StrEnum):
    """Signs before the transform: none, the same ones always, or drawn by layer, product, step."""

    NONE = "none"
    FIXED = "fixed"
    SEEDED = "seeded"


@dataclass(frozen=True)
class Rotation:
    """A Hadamard block size (16, 32, 64, 128) and its signs; written `rht32`, `rht32:none`."""

    size: int
    signs: Signs = Signs.FIXED

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            allowed = ", ".join(map(str, SIZES))
            raise UnsupportedError(f"rotation block {self.size} is not one of {allowed}")

    @classmethod
    def parse(cls, text: str) -> Rotation:
        """Read `rhtSIZE[:none|fixed|seeded]`; raises UnsupportedError with what is allowed."""
        name, colon, signs = text.strip().partition(":")
        known = [f"rht{size}" for size in SIZES]
        if name not in known:
            raise UnsupportedError(f"unknown rotation {name!r}; {nearest_names(name, known)}")
        if colon and signs not in list(Signs):
            raise UnsupportedError(
                f"unknown signs {signs!r} in {text!r}; {nearest_names(signs, Signs)}"
            )
        return cls(int(name[3:]), Signs(signs) if colon else Signs.FIXED)

    def __str__(self) -> str:
        name = f"rht{self.size}"
        return name if self.signs is Signs.FIXED else f"{name}:{self.signs}"

    @property
    def seeded(self) -> bool:
        """True when the signs come from a random stream."""
        return self.signs is Signs.SEEDED

    def padded(self, length: int) -> int:
        """Length of a contraction of `length` after padding to whole blocks."""
        return length + -length % self.size

    def sign_values(self, stream: RandomStream | None) -> tuple[int, ...] | None:
        """The signs of one block, or None for no signs; seeded ones need a stream."""
        if self.signs is Signs.NONE:
            return None
        if self.signs is Signs.FIXED:
            return FIXED_SIGNS[: self.size]
        if stream is None:
            raise UnsupportedError(
                f"rotation {self}: seeded signs need a RandomStream (seed, layer, role, step)"
            )
        return stream.signs(self.size)


FIXED_SIGNS: Final = _TE + signs_of((0, 0), SIZES[-1])[16:]


def rotate(
    x: torch.Tensor,
    rotation: Rotation,
    *,
    axis: int,
    side: Side,
    stream: RandomStream | None = None,
    pad: bool = True,
) -> torch.Tensor:
    """`x` [..., R, C] rotated along `axis` (-1 or -2) as the left or right operand of a product.

    x: any floating dtype; float32 (float64 for float64) comes back, padded with zeros along `axis`
    to whole blocks. The product of a rotated left and a rotated right operand equals the product
    before. Raises UnsupportedError for another axis, and without `pad` for a ragged length.
    """
    if axis not in (-1, -2) or x.ndim < -axis:
        raise UnsupportedError(f"rotation runs along axis -1 or -2, not {axis} of {x.ndim}-D")
    length, extra = x.shape[axis], -x.shape[axis] % rotation.size
    if extra:
        if not pad:
            raise UnsupportedError(
                f"rotation {rotation}: length {length} along axis {axis} is not a multiple of "
                f"{rotation.size} and may not be padded here"
            )
        x = functional.pad(x, (0, extra) if axis == -1 else (0, 0, 0, extra))
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    values = rotation.sign_values(stream)
    signs = None if values is None else torch.tensor(values, dtype=dtype, device=x.device)
    power = rotation.size.bit_length() - 1
    factor = 2.0 ** -(power // 2 if side == "left" else power - power // 2)
    inner = 1 if axis == -1 else x.shape[-1]
    row = rotation.size * max(inner, 1)
    source = x.detach().reshape(x.numel() // row, rotation.size, inner)
    out = source.new_empty(source.shape, dtype=dtype)
    step = max(1, _CPU_CHUNK // row) if x.device.type == "cpu" else max(1, len(source))
    for part, rotated in zip(source.split(step), out.split(step), strict=True):
        if axis == -1:  # blocks as columns: additions then run along memory
            part, rotated = part[..., 0].mT, rotated[..., 0].mT
        work = part.new_empty(part.shape, dtype=dtype).copy_(part)
        if signs is not None:
            work *= signs[:, None]
        rotated.copy_(_sylvester(work).mul_(factor))
    return out.view(x.shape)


def _sylvester(blocks: torch.Tensor) -> torch.Tensor:
    """Unscaled H of Sylvester order along the last dim but one, d = 2^k: additions in pairs.

    Overwrites `blocks`.
    """
    *lead, size, inner = blocks.shape
    spare = torch.empty_like(blocks)
    step = 1
    while step < size:
        shape = (*lead, size // (2 * step), 2, step, inner)
        upper, lower = blocks.view(shape).unbind(-3)
        total, difference = spare.view(shape).unbind(-3)
        torch.add(upper, lower, out=total)
        torch.sub(upper, lower, out=difference)
        blocks, spare = spare, blocks
        step *= 2
    return blocks

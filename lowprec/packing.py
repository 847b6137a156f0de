"""Dense storage of codes: two 4-bit codes in a byte, four 6-bit codes in three bytes.

The codes, flattened in logical order and padded with zeros, are cut into 2 (4) runs of equal length
and the runs are laid over each other. Each step then reads and writes contiguous bytes, which is
several times faster than joining neighbours. The order is for storage alone: it is not the order
of neighbouring pairs that hardware reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch.nn import functional

from lowprec.errors import UnsupportedError

_GROUP: Final = {4: (2, 1), 6: (4, 3), 8: (1, 1)}
"""Bits of a code: codes in a group, bytes in a group."""


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of `count` codes of `bits` bits; raises UnsupportedError as `pack_codes` does."""
    codes, size = _group(bits)
    return -(-count // codes) * size


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Store codes (uint8, any shape and strides, values below 2^bits) densely.

    Returns the very tensor for 8 bits, else a new uint8 tensor [packed_bytes(numel, bits)].
    Raises UnsupportedError for a width other than 4, 6 or 8, and for codes that are not uint8.
    """
    group, _ = _group(bits)
    _check_dtype(codes)
    if bits == 8:
        return codes
    flat = codes.reshape(-1)
    if missing := -flat.numel() % group:
        flat = functional.pad(flat, (0, missing))
    runs = flat.view(group, -1)
    if bits == 4:
        low, high = runs.unbind()
        return low | (high << 4)
    a, b, c, d = runs.unbind()
    # Masks before the shifts to the left: nothing then depends on how a shift treats lost bits.
    return torch.cat((a | ((b & 3) << 6), (b >> 2) | ((c & 15) << 4), (c >> 4) | (d << 2)))


def unpack_codes(packed: torch.Tensor, bits: int, shape: Sequence[int]) -> torch.Tensor:
    """Undo `pack_codes`: uint8 codes of `shape`, contiguous unless the codes have 8 bits.

    Raises UnsupportedError when `packed` does not hold exactly the codes of this shape.
    """
    count = math.prod(shape)
    _check_dtype(packed)
    if packed.numel() != packed_bytes(count, bits):
        raise UnsupportedError(
            f"{packed.numel()} bytes do not hold {bits}-bit codes of shape {tuple(shape)}: that "
            f"takes {packed_bytes(count, bits)}"
        )
    if bits == 8:
        return packed.reshape(shape)
    if bits == 4:
        flat = torch.cat((packed & 15, packed >> 4))
    else:
        x, y, z = packed.view(3, -1).unbind()
        flat = torch.cat((x & 63, (x >> 6) | ((y & 15) << 2), (y >> 4) | ((z & 3) << 4), z >> 2))
    return flat[:count].view(shape)


def _group(bits: int) -> tuple[int, int]:
    if bits not in _GROUP:
        raise UnsupportedError(f"codes of {bits} bits cannot be packed; allowed: 4, 6, 8")
    return _GROUP[bits]


def _check_dtype(codes: torch.Tensor) -> None:
    if codes.dtype != torch.uint8:
        raise UnsupportedError(f"codes are uint8, got {codes.dtype}")

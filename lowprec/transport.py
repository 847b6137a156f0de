"""Activations that cross the network as codes: all-to-all in MXFP8, forward and backward.

Expert parallelism sends every token to the ranks of its experts and back. Rows are cast where they
are, travel as codes and scales in one message, and are decoded where they arrive: 8.25 bits a value
for MXFP8 instead of 16. The gradient takes the same way back in the same format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional

from lowprec import ops
from lowprec.errors import UnsupportedError
from lowprec.formats import ALL, Cast
from lowprec.packing import pack_codes, unpack_codes
from lowprec.tensor import QuantizedTensor

_GROUP: Final = 4


def all_to_all(
    x_MK: torch.Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    *,
    cast: Cast | str = "mxfp8",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Send rows of x [M, K] to the ranks of a group and return those that came, [sum(receive), K].

    send: how many consecutive rows go to each rank, summing to M; receive: how many come from each,
    in rank order; zeros are fine. cast: a row-wise cast with nearest rounding, of x in forward and
    of the gradient in backward. The result has x's dtype; rows that stay on their rank are cast as
    well, so a value does not depend on where its expert lives. A block with NaN or Inf arrives as
    NaN. Raises UnsupportedError for shapes, splits or casts that do not fit.
    """
    cast = Cast.parse(cast) if isinstance(cast, str) else cast
    ranks = dist.get_world_size(group)
    if x_MK.ndim != 2 or sum(send) != x_MK.shape[0]:
        raise UnsupportedError(
            f"all_to_all: x has shape {tuple(x_MK.shape)}, send {list(send)}; it sends all rows of "
            "a two-dimensional tensor"
        )
    if len(send) != ranks or len(receive) != ranks or min((*send, *receive)) < 0:
        raise UnsupportedError(
            f"all_to_all: send {list(send)} and receive {list(receive)} need one count, zero or "
            f"more, for each of {ranks} ranks"
        )
    rows, columns = cast.format.block
    if rows != 1 or columns == ALL or cast.format.outer or cast.stochastic:
        raise UnsupportedError(
            f"all_to_all: {cast} does not cast each row by itself in blocks with nearest rounding; "
            "mxfp8 and mxfp4 do"
        )
    way = (list(send), list(receive), cast, group)
    return _AllToAll.apply(x_MK, *way)  # type: ignore[no-untyped-call, no-any-return]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MK: torch.Tensor, send: list[int], receive: list[int], cast: Cast, group: Any
    ) -> torch.Tensor:
        ctx.back = (receive, send, cast, group)
        return _exchanged(x_MK, send, receive, cast, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MK: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchanged(dy_MK, *ctx.back), None, None, None, None


def _exchanged(
    x_MK: torch.Tensor, send: list[int], receive: list[int], cast: Cast, group: Any
) -> torch.Tensor:
    columns, bits = x_MK.shape[1], cast.format.element.bits
    q = ops.quantize(x_MK, cast)
    codes = packed_rows(q.codes, bits)
    message = torch.cat((codes, q.scales.view(torch.uint8)), dim=1)
    arrived = message.new_empty((sum(receive), message.shape[1]))
    dist.all_to_all_single(arrived, message, receive, send, group=group)
    scales = arrived[:, codes.shape[1] :].contiguous().view(q.scales.dtype)
    codes = unpacked_rows(arrived[:, : codes.shape[1]], bits, columns)
    return ops.dequantize(QuantizedTensor(codes, scales, cast.format, -1), x_MK.dtype)


def packed_rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Each row of codes [M, K] packed by itself, in whole groups of four codes: [M, bytes]."""
    if bits == 8:
        return codes
    codes = functional.pad(codes, (0, -codes.shape[1] % _GROUP))
    # The runs that pack_codes lays over each other are then whole columns.
    width = codes.shape[1] * bits // 8
    return pack_codes(codes.mT, bits).view(width, codes.shape[0]).mT


def unpacked_rows(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Undo `packed_rows`: codes [M, columns]."""
    if bits == 8:
        return packed
    whole = columns + -columns % _GROUP
    return unpack_codes(packed.mT.reshape(-1), bits, (whole, packed.shape[0])).mT[:, :columns]

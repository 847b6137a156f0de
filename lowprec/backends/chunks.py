"""Cutting a matrix into chunks that stay in a CPU's cache, along the borders of its scale blocks.

Temporaries as large as the tensor would cost page faults and leave the cache; a chunk's are reused.
Other devices get one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import torch

CHUNK: Final = 1 << 17
"""Elements of a chunk for each thread: half a MiB of float32."""


class Span(NamedTuple):
    """start:stop of a dimension, and first:last of its blocks.

    Either whole blocks or a part of one: a ragged end, or a block that is longer than a chunk.
    """

    start: int
    stop: int
    first: int
    last: int


def is_eager_cpu(x: torch.Tensor) -> bool:
    """True for data on the CPU: to chunk it pays, and to look at it costs no synchronization."""
    return (
        type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.device.type == "cpu"
        and not torch.compiler.is_compiling()
    )


def row_limit(x: torch.Tensor) -> int:
    """Rows of `x` [R, C] in a chunk."""
    rows, columns = x.shape
    if not is_eager_cpu(x):
        return max(rows, 1)
    return max(1, CHUNK * torch.get_num_threads() // max(columns, 1))


def spans(length: int, block: int, limit: int) -> Iterator[Span]:
    """Cut a dimension with blocks of `block` into spans of at most `limit`, in order."""
    start, whole = 0, length - length % block
    while start < length:
        first = start // block
        if start < whole and limit >= block:
            stop = min(start + limit - limit % block, whole)
        else:
            stop = min(start + limit, (first + 1) * block, length)
        yield Span(start, stop, first, -(-stop // block))
        start = stop


def blocks(x: torch.Tensor, rows: Span, cols: Span) -> torch.Tensor:
    """`x` [R, C], rows cut already, seen as [row blocks, r, column blocks, c] in columns `cols`."""
    part = x[:, cols.start : cols.stop]
    row_blocks, column_blocks = rows.last - rows.first, cols.last - cols.first
    height, width = part.shape
    return part.view(row_blocks, height // row_blocks, column_blocks, width // column_blocks)


def per_block(x: torch.Tensor, rows: Span, cols: Span) -> torch.Tensor:
    """The numbers of these blocks, out of `x` [row blocks, column blocks], to go with `blocks`."""
    return x[rows.first : rows.last, None, cols.first : cols.last, None]


class Chunks(NamedTuple):
    """A matrix [R, C] cut into chunks of rows, each with its whole and its ragged blocks."""

    rows: list[Span]
    cols: list[Span]
    limit: int

    @classmethod
    def of(cls, x: torch.Tensor, height: int, width: int) -> Chunks:
        """Chunks of `x` [R, C] with scale blocks of height x width."""
        rows, columns = x.shape
        limit = min(row_limit(x), max(rows, 1))
        cols = list(spans(columns, width, columns))
        return cls(list(spans(rows, height, limit)), cols, limit)

"""A tensor of any rank, axis and order of memory as the kernels take it, and the way back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from lowprec.blocks import Matrix
from lowprec.formats import Cast
from lowprec.rng import ELEMENTS_PER_CALL, RandomStream
from lowprec.tensor import QuantizedTensor


def signed(word: int) -> int:
    """A 32-bit word as the int32 with the same bits."""
    return word - (1 << 32) if word >> 31 else word


class Draws(NamedTuple):
    """The random words of a cast, as draws.tile_words takes them; no groups rounds to nearest."""

    groups: str = ""
    first_call: int = 0
    key_0: int = 0
    key_1: int = 0
    words: torch.Tensor | None = None

    @classmethod
    def of(
        cls, groups: str, call: int, stream: RandomStream, words: torch.Tensor | None = None
    ) -> Draws:
        """The draws of a stream from a call on, or the words that it gave."""
        key_0, key_1 = (signed(word) for word in stream.key)
        return cls(groups, call, key_0, key_1, words)

    @classmethod
    def read(cls, words: torch.Tensor | None, numbers: list[int], groups: str) -> Draws:
        """The arguments of an op as `flat` wrote them."""
        first_call, key_0, key_1 = numbers
        return cls(groups, first_call, key_0, key_1, words)

    def flat(self) -> tuple[torch.Tensor | None, list[int], str]:
        """As the arguments of an op: words, numbers, groups."""
        return self.words, [self.first_call, self.key_0, self.key_1], self.groups


NEAREST: Final = Draws()


def random_words(stream: RandomStream, shape: torch.Size, device: torch.device) -> torch.Tensor:
    """RandomStream.words_like for a tensor of `shape`, by the kernel: int32."""
    columns = shape[-1] if shape else 1
    start, skip = divmod(stream.first_row * columns, ELEMENTS_PER_CALL)
    calls = -(-(skip + shape.numel()) // ELEMENTS_PER_CALL)
    keys = [signed(word) for word in stream.key]
    ops: Any = torch.ops.lowprec
    words: torch.Tensor = ops.random_words(start, calls, *keys, device=device)
    return words[skip : skip + shape.numel()].view(shape)


def in_memory_order(x: torch.Tensor, axis: int) -> tuple[torch.Tensor, bool, bool]:
    """[..., R, C] as [B, R, C] with unit stride along C; cast by column?; R and C exchanged?"""
    flipped = x.stride(-1) != 1 and x.stride(-2) == 1
    data, axis = (x.mT, -3 - axis) if flipped else (x, axis)
    data = data.reshape(math.prod(data.shape[:-2]), *data.shape[-2:])
    if data.stride(-1) != 1:
        # A single column has any stride; others are brought into order.
        one = data.shape[-1] == 1
        data = data.as_strided(data.shape, (*data.stride()[:-1], 1)) if one else data.contiguous()
    return data, axis == -2, flipped


@dataclass(frozen=True)
class View:
    """A tensor as the ops take it: data [B, R, C] with unit stride along C, cast by row or column.

    flipped: R and C are exchanged against the tensor. merged: batches were joined as rows.
    """

    cast: Cast
    matrix: Matrix
    data: torch.Tensor
    by_column: bool
    flipped: bool
    merged: bool
    batch: int
    rows: int
    cols: int

    @classmethod
    def of(cls, x: torch.Tensor, cast: Cast, axis: int, *, merge: bool = True) -> View:
        """The view of `x` for a cast along `axis`; `merge` lets batches be joined."""
        matrix = Matrix.of(x, cast.format, axis)
        source = matrix.data.detach()
        source = source.float() if source.dtype == torch.float64 else source
        data, by_column, flipped = in_memory_order(source, matrix.axis)
        batch, rows, cols = data.shape
        # Rows that are cast alone need no batches.
        mergeable = rows > 0 and data.stride(0) == rows * data.stride(1)
        alone = cast.format.block[0] == 1 and not by_column
        merged = merge and alone and mergeable and batch > 1
        data = data.reshape(1, -1, cols) if merged else data
        return cls(cast, matrix, data, by_column, flipped, merged, batch, rows, cols)

    def draws(self, stream: RandomStream, x: torch.Tensor) -> Draws:
        """The words of the source `x`, whose elements are counted in their logical order."""
        inner, groups = (self.rows, "down") if self.flipped else (self.cols, "across")
        in_order = self.matrix.source_axis in (-1, -2) and inner == x.shape[-1]
        if in_order and inner and inner % ELEMENTS_PER_CALL == 0:
            return Draws.of(groups, stream.first_row * inner // ELEMENTS_PER_CALL, stream)
        words = random_words(stream, x.shape, x.device)
        words = Matrix.of(words, self.cast.format, self.matrix.source_axis).data
        words = words.mT if self.flipped else words
        return Draws.of("stored", 0, stream, words.reshape(self.data.shape).contiguous())

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

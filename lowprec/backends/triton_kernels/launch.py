"""The casts as torch.library ops: launch shapes, outputs, and what the compiler may assume.

Ops take a matrix [B, R, C] with unit stride along C. A cast "by row" has codes [B, R, C] and scales
in the order of blocks; one "by column" has both transposed, codes [B, C, R], so that codes are
contiguous along their contraction in either case. Rows of codes may be padded to 16 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import torch
import triton

from lowprec.backends.triton_kernels import draws, tiles
from lowprec.backends.triton_kernels.starting import repeated, start
from lowprec.backends.triton_kernels.views import NEAREST, Draws
from lowprec.formats import Cast

LIBRARY: Final = torch.library.Library("lowprec", "FRAGMENT")
INTEGER: Final[bool] = bool(triton.knobs.runtime.interpret)
"""Whether casts use integer arithmetic; see codec."""

DTYPES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Spec(NamedTuple):
    """A cast as the kernels read it: block extents are those of memory."""

    element: str
    rule: str
    block_r: int
    block_c: int
    e8m0: bool


@lru_cache(maxsize=256)
def spec_of(text: str, *, by_column: bool) -> Spec:
    """The cast written as `text`, along rows of memory or down its columns."""
    cast = Cast.parse(text)
    across, along = cast.format.block
    block = (along, across) if by_column else (across, along)
    return Spec(cast.format.element.name, str(cast.scale_rule), *block, cast.format.scale == "e8m0")


def specs_of(row: str, column: str) -> tuple[Spec | None, Spec | None]:
    """The casts of both outputs; an empty text is none."""
    return (
        spec_of(row, by_column=False) if row else None,
        spec_of(column, by_column=True) if column else None,
    )


def constant(spec: Spec | None, *, turned: bool = False) -> tuple[Any, ...] | None:
    """A spec as the constant of a kernel; `turned` exchanges the extents of its block."""
    if spec is None:
        return None
    block = (spec.block_c, spec.block_r) if turned else (spec.block_r, spec.block_c)
    return (spec.element, spec.rule, *block, spec.e8m0)


class Source(NamedTuple):
    """A matrix [B, R, C] as the kernels address it."""

    data: torch.Tensor
    unit: int
    """Elements that every row starts and ends at a multiple of, at most 16."""

    @classmethod
    def of(cls, x: torch.Tensor) -> Source:
        """`x` [B, R, C] with unit stride along C."""
        batch_stride, row_stride, _ = x.stride()
        batch = batch_stride if x.shape[0] > 1 else 0
        return cls(x, math.gcd(x.shape[2], row_stride, batch, 16))

    @property
    def extents(self) -> tuple[int, int, int, int]:
        """Rows, and in units: columns, batch stride, row stride."""
        batch, rows, cols = self.data.shape
        strides = self.data.stride()
        apart = strides[0] if batch > 1 else 0
        return rows, cols // self.unit, apart // self.unit, strides[1] // self.unit

    def programs(self, tile_r: int, tile_c: int) -> int:
        """Tiles that cover the matrix."""
        batch, rows, cols = self.data.shape
        return batch * -(-rows // tile_r) * -(-cols // tile_c)

    def wide(self, tile_r: int, tile_c: int, *turned: torch.Tensor | None) -> bool:
        """Whether offsets inside a tile need 64 bits, here or in transposed outputs."""
        reach = [tile_r * self.data.stride(1), tile_r * self.data.shape[2]]
        reach += [tile_c * one.stride(-2) for one in turned if one is not None]
        return max(reach) + max(tile_r, tile_c) >= 2**31


def padded(count: int) -> int:
    """Bytes of a row of `count` codes: whole 16s, and whole sectors of memory in longer rows."""
    return count + -count % (16 if count < 512 else 32)


def outputs(x: torch.Tensor, row: str, column: str) -> list[torch.Tensor]:
    """Codes and scales by row, then by column; in company those by row are transposed."""
    batch, rows, cols = x.shape
    found = []
    for spec, by_column in zip(specs_of(row, column), (False, True), strict=True):
        if spec is None:
            continue
        shape = (cols, padded(rows)) if by_column else (rows, padded(cols) if column else cols)
        counts = [-(-rows // spec.block_r), -(-cols // spec.block_c)]
        if column and not by_column:
            counts.reverse()
        scale_type = torch.uint8 if spec.e8m0 else torch.float32
        found += [
            torch.empty((batch, *shape), dtype=torch.uint8, device=x.device),
            torch.empty((batch, *counts), dtype=scale_type, device=x.device),
        ]
    return found


def parted(row: str, column: str, out: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Codes and scales by row, then by column, with None for what is not asked for."""
    found: list[torch.Tensor | None] = [None] * 4
    if row:
        found[:2] = out[:2]
    if column:
        found[2:] = out[-2:]
    return found


def pitches(codes: torch.Tensor | None, codes_t: torch.Tensor | None) -> tuple[int, int, int]:
    """Rows of codes and codes_t in units of bytes, and the unit."""
    widths = [1 if one is None else one.shape[-1] for one in (codes, codes_t)]
    unit = math.gcd(16, *(w for w in widths if w > 1)) if max(widths) > 1 else 1
    return widths[0] // unit, widths[1] // unit, unit


def tile_shape(rows: int, cols: int, row: Spec | None, column: Spec | None) -> tuple[int, int]:
    """Rows and columns of the tile of one program of the plain kernels."""
    specs = [one for one in (row, column) if one is not None]
    tall = max(one.block_r for one in specs)
    wide = max(one.block_c for one in specs)
    if tall > 1:
        return max(tall, 64 if column else 32), max(wide, 128)
    whole = triton.next_power_of_2(max(cols, 1))
    across = max(2048 if whole > 4096 or cols % 2048 == 0 else whole, wide)
    # Where a tile reaches past the columns, more rows in flight make up for its idle threads.
    values = 2048 if cols % across == 0 else 8192 if across == 1024 else 4096
    down = min(max(values // across, 1), triton.next_power_of_2(max(rows, 1)))
    return down, across


def warps_for(elements: int) -> int:
    """Warps of a program that holds so many float32 values in registers."""
    return 4 if elements <= 4096 else 8 if elements <= 8192 else 16


def stored_as(t: torch.Tensor | None, *, integer: bool) -> torch.Tensor | None:
    """`t` as the kernels read it: bf16 by its bits where encoding is by integers."""
    narrow = integer and t is not None and t.dtype == torch.bfloat16
    return t.view(torch.int16) if narrow and t is not None else t


def cast_plain(
    x: torch.Tensor,
    row: str,
    column: str,
    out: list[torch.Tensor],
    *,
    integer: bool,
    by_row: Draws = NEAREST,
    by_column: Draws = NEAREST,
) -> None:
    """Fill `out` by the plain kernel; `integer` selects integer encoding."""
    source, (row_spec, column_spec) = Source.of(x), specs_of(row, column)
    _, rows, cols = x.shape
    tile_r, tile_c = tile_shape(rows, cols, row_spec, column_spec)
    drawn = by_row.groups != "" and by_column.groups != ""
    if "down" in (by_row.groups, by_column.groups) and tile_r < 16:
        tile_r, tile_c = 16, max(128, row_spec.block_c if row_spec else 1)
    if "across" in (by_row.groups, by_column.groups):
        tile_c = max(tile_c, 16)
    codes, scales, codes_t, scales_t = parted(row, column, out)
    pitch, pitch_t, pitch_unit = pitches(codes, codes_t)
    start(
        tiles.cast_tiles,
        source.programs(tile_r, tile_c),
        stored_as(x, integer=integer),
        codes,
        scales,
        codes_t,
        scales_t,
        by_row.words,
        by_column.words,
        *source.extents,
        pitch,
        pitch_t,
        by_row.first_call,
        by_row.key_0,
        by_row.key_1,
        by_column.first_call,
        by_column.key_0,
        by_column.key_1,
        UNIT=source.unit,
        PITCH_UNIT=pitch_unit,
        ROW=constant(row_spec),
        COLUMN=constant(column_spec, turned=True),
        GROUPS=by_row.groups,
        GROUPS_T=by_column.groups,
        TILE_R=tile_r,
        TILE_C=tile_c,
        WIDE=source.wide(tile_r, tile_c, codes, codes_t),
        INTEGER=integer,
        # What is rounded both ways at random holds twice the registers.
        num_warps=8 if tile_r * tile_c >= (8192 if drawn else 16384) else 4,
    )


def pipelines(x: torch.Tensor, row: str, column: str) -> bool:
    """Whether the pipelined kernel casts x [B, R, C] by column, and by row if asked for."""
    if not column or not may_pipeline(x):
        return False
    from lowprec.backends.triton_kernels import pipelined

    return pipelined.takes(x, row, column)


def may_pipeline(x: torch.Tensor) -> bool:
    """Whether x is where the pipelined kernels run, and encoding is not by integers."""
    return x.is_cuda and not INTEGER


LIBRARY.define("cast_tiles(Tensor x, str row, str column) -> Tensor[]")


def _cast_tiles_fake(x: torch.Tensor, row: str, column: str) -> list[torch.Tensor]:
    return outputs(x, row, column)


@repeated
def _cast_tiles(x: torch.Tensor, row: str, column: str) -> list[torch.Tensor]:
    out = outputs(x, row, column)
    if x.numel() == 0:
        return out
    if pipelines(x, row, column):
        from lowprec.backends.triton_kernels import pipelined

        pipelined.cast(x, row, column, out)
        return out
    cast_plain(x, row, column, out, integer=INTEGER)
    return out


LIBRARY.define(
    "cast_tiles_random(Tensor x, str row, str column, Tensor? words, int[] numbers, str groups,"
    " Tensor? words_t, int[] numbers_t, str groups_t) -> Tensor[]"
)


def _cast_tiles_random_fake(
    x: torch.Tensor, row: str, column: str, *draws: Any
) -> list[torch.Tensor]:
    return outputs(x, row, column)


def _cast_tiles_random(
    x: torch.Tensor,
    row: str,
    column: str,
    words: torch.Tensor | None,
    numbers: list[int],
    groups: str,
    words_t: torch.Tensor | None,
    numbers_t: list[int],
    groups_t: str,
) -> list[torch.Tensor]:
    out = outputs(x, row, column)
    if x.numel():
        by_row = Draws.read(words, numbers, groups)
        by_column = Draws.read(words_t, numbers_t, groups_t)
        cast_plain(x, row, column, out, integer=INTEGER, by_row=by_row, by_column=by_column)
    return out


LIBRARY.define(
    "random_words(int first, int calls, int key_0, int key_1, *, Device device) -> Tensor"
)
_CALLS = 128


def _random_words_fake(
    first: int, calls: int, key_0: int, key_1: int, *, device: torch.device
) -> torch.Tensor:
    return torch.empty(calls * 16, dtype=torch.int32, device=device)


def random_words(
    first: int, calls: int, key_0: int, key_1: int, *, device: torch.device
) -> torch.Tensor:
    """The words of Philox calls first .. first + calls - 1, int32 [16 calls]."""
    out = _random_words_fake(first, calls, key_0, key_1, device=device)
    if calls:
        start(
            draws.fill_words,
            -(-calls // _CALLS),
            out,
            first,
            calls,
            key_0,
            key_1,
            CALLS=_CALLS,
            num_warps=4,
        )
    return out


_DIRECT: Final = SimpleNamespace()


def ops_for(x: torch.Tensor) -> Any:
    """The ops for `x`: the kernels' own functions, or the registered ops where something traces.

    Going through the dispatcher costs more than most of these kernels run.
    """
    return _DIRECT if is_direct(x) else torch.ops.lowprec


def is_direct(x: torch.Tensor) -> bool:
    """Whether nothing traces or intercepts what is done with `x`."""
    plain = type(x) in (torch.Tensor, torch.nn.Parameter)
    return plain and not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()


def register(bound: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]]) -> None:
    """Bind each op to its kernel and to what the compiler may assume of it."""
    for name, (kernel, fake) in bound.items():
        setattr(_DIRECT, name, kernel)
        LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"lowprec::{name}", fake, lib=LIBRARY)


register(
    {
        "cast_tiles": (_cast_tiles, _cast_tiles_fake),
        "cast_tiles_random": (_cast_tiles_random, _cast_tiles_random_fake),
        "random_words": (random_words, _random_words_fake),
    }
)

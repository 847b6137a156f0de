# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""The list of tiles that really exist, written on the device: no length is known to the host.

Sequences are ordered by the length that each of their tiles loops over, longest first (equal ones
by their place in the batch). One program a tile is launched in the order of the list; the hardware
hands the next one to whichever processor is free, so long work starts first and short work fills
the gaps. The host launches as many programs as the totals allow; those past the list end at once.

Sequences that other kernels compute, by their own lengths alone, are not in the list of the rest.
"""

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from lowprec.backends.triton_kernels.attention_parts import parts_of

_SORTED: Final = 4096
"""Batches up to this size are ordered; each program compares its sequence with all others."""


class Apart(NamedTuple):
    """Which sequences are computed apart, by their own lengths; 0 for none.

    "split": of at most `few` rows with more than `chunk` of all `steps`; their places in the list
    are chunks of the steps. "short": of at most `short` steps, which are less than a chunk.
    """

    few: int = 0
    chunk: int = 0
    short: int = 0
    steps: int = 0


ALL: Final = Apart()


@triton.jit
def listed(
    rows,
    steps,
    TILE: tl.constexpr,
    FEW: tl.constexpr,
    CHUNK: tl.constexpr,
    SHORT: tl.constexpr,
    ONLY: tl.constexpr,
):
    """Places in the list of a sequence: of all, or ONLY of those set apart, or of the rest."""
    parts = parts_of(rows, steps, TILE, FEW, CHUNK)
    if ONLY != "":
        split, short = rows < 0, rows < 0
        if CHUNK:
            split = (rows <= FEW) & (steps > CHUNK)
        if SHORT:
            short = steps <= SHORT
        if ONLY == "split":
            parts = tl.where(split, parts, 0)
        elif ONLY == "short":
            parts = tl.where(short, parts, 0)
        else:
            parts = tl.where(split | short, 0, parts)
    return parts


@triton.jit
def _fill(
    cu_rows,
    cu_steps,
    starts,
    owners,
    batch,
    TILE: tl.constexpr,
    SORTED: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    CHUNK: tl.constexpr,
    SHORT: tl.constexpr,
    ONLY: tl.constexpr,
):
    own = tl.program_id(0)
    rows = tl.load(cu_rows + own + 1) - tl.load(cu_rows + own)
    steps = tl.load(cu_steps + own + 1) - tl.load(cu_steps + own)
    before, total = own * 0, own * 0
    first = batch * 0
    while first < batch:
        other = first + tl.arange(0, BLOCK)
        there = other < batch
        low = tl.load(cu_rows + other, mask=there, other=0)
        their_rows = tl.load(cu_rows + other + 1, mask=there, other=0) - low
        low = tl.load(cu_steps + other, mask=there, other=0)
        others = tl.load(cu_steps + other + 1, mask=there, other=0) - low
        tiles = listed(their_rows, others, TILE, FEW, CHUNK, SHORT, ONLY)
        tiles = tl.where(there, tiles, 0)
        earlier = other < own
        if SORTED:
            earlier = (others > steps) | ((others == steps) & earlier)
        before += tl.sum(tl.where(earlier, tiles, 0), 0)
        total += tl.sum(tiles, 0)
        first += BLOCK
    tl.store(starts + own, before)
    if own == 0:
        tl.store(starts + batch, total)
    count = listed(rows, steps, TILE, FEW, CHUNK, SHORT, ONLY)
    first = count * 0
    while first < count:
        tile = first + tl.arange(0, BLOCK)
        tl.store(owners + before + tile, tile * 0 + own, mask=tile < count)
        first += BLOCK


@triton.jit(do_not_specialize=["batch"])
def fill_schedule(
    cu_rows,
    cu_steps,
    starts,
    owners,
    batch,
    TILE: tl.constexpr,
    SORTED: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    CHUNK: tl.constexpr,
    SHORT: tl.constexpr,
    ONLY: tl.constexpr,
):
    """Write where the tiles of one sequence start in the list, and the sequence at each of them.

    cu_rows, cu_steps int32 [batch + 1]: of what is tiled and of what each tile loops over. starts
    int32 [batch + 1]; owners int32 [at least the number of tiles]. The last four: see listed.
    """
    _fill(cu_rows, cu_steps, starts, owners, batch, TILE, SORTED, BLOCK, FEW, CHUNK, SHORT, ONLY)


@triton.jit(do_not_specialize=["batch"])
def fill_apart(
    cu_rows,
    cu_steps,
    starts_split,
    owners_split,
    starts_short,
    owners_short,
    starts,
    owners,
    batch,
    TILE: tl.constexpr,
    TILE_SPLIT: tl.constexpr,
    TILE_SHORT: tl.constexpr,
    SORTED: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
    CHUNK: tl.constexpr,
    SHORT: tl.constexpr,
):
    """The lists of what is split, of what is short and of the rest, one of them a program."""
    which = tl.program_id(1)
    if which == 0:
        _fill(
            cu_rows, cu_steps, starts, owners, batch,
            TILE, SORTED, BLOCK, FEW, CHUNK, SHORT, "rest",
        )  # fmt: skip
    elif which == 1:
        _fill(
            cu_rows, cu_steps, starts_split, owners_split, batch,
            TILE_SPLIT, SORTED, BLOCK, FEW, CHUNK, SHORT, "split",
        )  # fmt: skip
    else:
        _fill(
            cu_rows, cu_steps, starts_short, owners_short, batch,
            TILE_SHORT, SORTED, BLOCK, FEW, CHUNK, SHORT, "short",
        )  # fmt: skip


def bound(total: int, batch: int, tile: int) -> int:
    """Tiles that `batch` sequences of `total` rows have at most."""
    return total // tile + min(batch, total)


def slots(total: int, chunk: int) -> int:
    """Chunks that all sequences of more than `chunk` of `total` steps have at most.

    A sequence of n steps has at most 2 n // chunk, so those of the one at `first` can start at
    2 first // chunk.
    """
    return 2 * total // chunk if chunk else 0


List = tuple[torch.Tensor, torch.Tensor]
"""Where each sequence's tiles start, int32 [B + 1], and the sequence at each place, int32."""


def _sizes(batch: int) -> dict[str, int]:
    return {
        "SORTED": batch <= _SORTED,
        "BLOCK": min(1024, max(32, triton.next_power_of_2(batch))),
        "num_warps": 1 if batch <= 256 else 4,
    }


def _blank(cu_rows: torch.Tensor, room: int) -> List:
    owners = torch.empty(room, dtype=torch.int32, device=cu_rows.device)
    return torch.empty_like(cu_rows), owners


def schedule(
    cu_rows: torch.Tensor,
    cu_steps: torch.Tensor,
    total: int,
    tile: int,
    *,
    apart: Apart = ALL,
) -> List:
    """Where each sequence's tiles start in the list, and the sequence at each place of it.

    int32 [B + 1] (the last is the number of tiles) and int32 [bound], on the device of cu_rows.
    Sequences that `apart` splits have chunks instead of tiles; its short ones are like others.
    """
    batch = cu_rows.shape[0] - 1
    found = _blank(cu_rows, bound(total, batch, tile) + slots(apart.steps, apart.chunk))
    fill_schedule[(batch,)](
        cu_rows,
        cu_steps,
        *found,
        batch,
        TILE=tile,
        FEW=apart.few,
        CHUNK=apart.chunk,
        SHORT=0,
        ONLY="",
        **_sizes(batch),
    )
    return found


def schedule_apart(
    cu_rows: torch.Tensor,
    cu_steps: torch.Tensor,
    total: int,
    tiles: tuple[int, int, int],
    apart: Apart,
) -> tuple[List, List, List]:
    """Three lists of one launch: of what `apart` splits, of what it calls short, of the rest.

    tiles: of each; every sequence is in one list.
    """
    batch = cu_rows.shape[0] - 1
    tile_split, tile_short, tile = tiles
    split = _blank(cu_rows, slots(apart.steps, apart.chunk))
    short = _blank(cu_rows, bound(total, batch, tile_short) if apart.short else 0)
    rest = _blank(cu_rows, bound(total, batch, tile))
    fill_apart[(batch, 3)](
        cu_rows,
        cu_steps,
        *(*split, *short, *rest),
        batch,
        TILE=tile,
        TILE_SPLIT=tile_split,
        TILE_SHORT=tile_short,
        FEW=apart.few,
        CHUNK=apart.chunk,
        SHORT=apart.short,
        **_sizes(batch),
    )
    return split, short, rest

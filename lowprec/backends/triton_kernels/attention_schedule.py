# mypy: ignore-errors
# Bodies of @triton.jit functions are Triton's language, not typed Python.
"""The list of tiles that really exist, written on the device: no length is known to the host.

Sequences are ordered by the length that each of their tiles loops over, longest first (equal ones
by their place in the batch). One program a tile is launched in the order of the list; the hardware
hands the next one to whichever processor is free, so long work starts first and short work fills
the gaps. The host launches as many programs as the totals allow; those past the list end at once.
"""

import torch
import triton
import triton.language as tl

_SORTED = 4096
"""Batches up to this size are ordered; each program compares its sequence with all others."""


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
):
    """Write where the tiles of one sequence start in the list, and the sequence at each of them.

    cu_rows, cu_steps int32 [batch + 1]: of what is tiled and of what each tile loops over. starts
    int32 [batch + 1]; owners int32 [at least the number of tiles].
    """
    own = tl.program_id(0)
    rows = tl.load(cu_rows + own + 1) - tl.load(cu_rows + own)
    steps = tl.load(cu_steps + own + 1) - tl.load(cu_steps + own)
    before, total = own * 0, own * 0
    first = batch * 0
    while first < batch:
        other = first + tl.arange(0, BLOCK)
        there = other < batch
        low = tl.load(cu_rows + other, mask=there, other=0)
        tiles = tl.cdiv(tl.load(cu_rows + other + 1, mask=there, other=0) - low, TILE)
        tiles = tl.where(there, tiles, 0)
        earlier = other < own
        if SORTED:
            low = tl.load(cu_steps + other, mask=there, other=0)
            others = tl.load(cu_steps + other + 1, mask=there, other=0) - low
            earlier = (others > steps) | ((others == steps) & earlier)
        before += tl.sum(tl.where(earlier, tiles, 0), 0)
        total += tl.sum(tiles, 0)
        first += BLOCK
    tl.store(starts + own, before)
    if own == 0:
        tl.store(starts + batch, total)
    count = tl.cdiv(rows, TILE)
    first = count * 0
    while first < count:
        tile = first + tl.arange(0, BLOCK)
        tl.store(owners + before + tile, tile * 0 + own, mask=tile < count)
        first += BLOCK


def bound(total: int, batch: int, tile: int) -> int:
    """Tiles that `batch` sequences of `total` rows have at most."""
    return total // tile + min(batch, total)


def schedule(
    cu_rows: torch.Tensor, cu_steps: torch.Tensor, total: int, tile: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each sequence's tiles start in the list, and the sequence at each place of it.

    int32 [B + 1] (the last is the number of tiles) and int32 [bound], on the device of cu_rows.
    """
    batch = cu_rows.shape[0] - 1
    starts = torch.empty_like(cu_rows)
    owners = torch.empty(bound(total, batch, tile), dtype=torch.int32, device=cu_rows.device)
    fill_schedule[(batch,)](
        cu_rows,
        cu_steps,
        starts,
        owners,
        batch,
        TILE=tile,
        SORTED=batch <= _SORTED,
        BLOCK=min(1024, max(32, triton.next_power_of_2(batch))),
        num_warps=1 if batch <= 256 else 4,
    )
    return starts, owners

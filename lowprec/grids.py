"""Measured times on a grid of sizes, and the time between its points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SKIPPED = 0.0


@dataclass(frozen=True)
class Estimate:
    """A time in microseconds, and whether it lies outside of what was measured."""

    us: float
    extrapolated: bool


@dataclass(frozen=True)
class Table:
    """Microseconds of one op by size; `us` runs with the last axis fastest, 0.0 was not measured.

    op and what name the kernel as lowprec.predicting asks for it; each axis increases.
    """

    op: str
    what: str
    axes: tuple[tuple[int, ...], ...]
    us: tuple[float, ...]

    def points(self) -> Iterator[tuple[tuple[int, ...], float]]:
        """Sizes and microseconds of every point that was measured."""
        for sizes, us in zip(itertools.product(*self.axes), self.us, strict=True):
            if us != SKIPPED:
                yield sizes, us

    def at(self, sizes: Sequence[int]) -> Estimate | None:
        """The time at `sizes`, linear between points in the logarithms of sizes and time.

        A power law comes out exactly. Above the grid time grows in proportion to the size, below
        it stays that of the edge; both are marked, and so is a size next to a point that was not
        measured. None where no cell of the grid is complete.
        """
        wanted = [
            _cell(axis, min(max(size, axis[0]), axis[-1]))
            for axis, size in zip(self.axes, sizes, strict=True)
        ]
        cell = self._complete_cell(wanted)
        if cell is None:
            return None
        inside = [
            min(max(size, axis[at]), axis[min(at + 1, len(axis) - 1)])
            for axis, at, size in zip(self.axes, cell, sizes, strict=True)
        ]
        beyond = math.prod(max(s / i, 1.0) for s, i in zip(sizes, inside, strict=True))
        return Estimate(self._between(cell, inside) * beyond, list(sizes) != inside)

    def _complete_cell(self, wanted: Sequence[int]) -> tuple[int, ...] | None:
        """Lower corner of the nearest cell whose corners were all measured."""
        cells = itertools.product(*(range(max(len(axis) - 1, 1)) for axis in self.axes))
        near = sorted(cells, key=lambda cell: math.dist(cell, wanted))
        return next((cell for cell in near if all(self._corners(cell).values())), None)

    def _corners(self, cell: Sequence[int]) -> dict[tuple[int, ...], float]:
        found = {}
        for step in itertools.product((0, 1), repeat=len(cell)):
            index = tuple(
                min(at + up, len(axis) - 1)
                for at, up, axis in zip(cell, step, self.axes, strict=True)
            )
            place = 0
            for one, axis in zip(index, self.axes, strict=True):
                place = place * len(axis) + one
            found[step] = self.us[place]
        return found

    def _between(self, cell: Sequence[int], inside: Sequence[int]) -> float:
        shares = [
            math.log(size / axis[at]) / math.log(axis[at + 1] / axis[at]) if len(axis) > 1 else 0.0
            for size, axis, at in zip(inside, self.axes, cell, strict=True)
        ]
        total = 0.0
        for step, us in self._corners(cell).items():
            weight = math.prod(s if up else 1 - s for s, up in zip(shares, step, strict=True))
            total += weight * math.log(us)
        return math.exp(total)


def _cell(axis: Sequence[int], size: int) -> int:
    """Index of the lower end of the interval that holds `size`."""
    below = sum(one <= size for one in axis) - 1
    return max(min(below, len(axis) - 2), 0)

"""Counts of the products a layer executed: plain integers, kept by an opaque op when compiled.

Not a buffer: DistributedDataParallel would broadcast it, meta initialisation would lose it, and a
compiled backward that increments a tensor refuses to run after a second forward.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Final

import torch

from lowprec.policy import PRODUCTS

PLANNED, FLOAT64 = 0, 1

_ids = itertools.count()
_live: weakref.WeakValueDictionary[int, Counter] = weakref.WeakValueDictionary()


class Counter:
    """Executed products of one layer: counts[product] = [as planned, in float64]."""

    def __init__(self) -> None:
        self.counts: list[list[int]] = [[0, 0] for _ in PRODUCTS]
        self._register()

    def _register(self) -> None:
        number = next(_ids)
        _live[number] = self
        # A tensor, because an integer would make torch.compile build one graph for each layer.
        self.key = torch.tensor(number, dtype=torch.int64, device="cpu")

    def counted(self, result: torch.Tensor, product: int) -> torch.Tensor:
        """`result`, and one more execution of PRODUCTS[product] on record."""
        column = FLOAT64 if result.dtype == torch.float64 else PLANNED
        if not torch.compiler.is_compiling():
            self.counts[product][column] += 1
            return result
        # Adding -0.0 changes no value, and ties the op to a result that cannot be optimised away.
        zero: torch.Tensor = _count(result.new_empty(0), self.key, product, column)
        return result + zero

    def __getstate__(self) -> dict[str, Any]:
        return {"counts": [list(row) for row in self.counts]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.counts = state["counts"]
        self._register()


@torch.library.custom_op("lowprec::count", mutates_args=())
def _count(like: torch.Tensor, key: torch.Tensor, product: int, column: int) -> torch.Tensor:
    _live[int(key)].counts[product][column] += 1
    return like.new_full((), -0.0)


@_count.register_fake
def _(like: torch.Tensor, key: torch.Tensor, product: int, column: int) -> torch.Tensor:
    return like.new_empty(())


__all__: Final = ["FLOAT64", "PLANNED", "Counter"]

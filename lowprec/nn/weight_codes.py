"""Weights cast once: for both products that take them, and for all micro-batches of a step.

Codes are taken again only where witnesses agree. From forward to its backward those are the
tensor's memory and its version count, as autograd itself asks. From one micro-batch to the next,
`lowprec.set_step` must have named the same step and a later micro-batch as well: writes through
`.data` leave no trace. Where FSDP may have gathered the weight nothing is held at all: codes of
every whole weight would take the memory that sharding saves, and it fills one parameter anew.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lowprec.nn.position import At
from lowprec.policy import Gemm, Product
from lowprec.tensor import QuantizedTensor


class _Witness(NamedTuple):
    data_ptr: int
    version: int
    shape: torch.Size
    stage: int

    @classmethod
    def of(cls, weight: torch.Tensor, stage: int) -> _Witness:
        """Of a weight outside of inference mode, where nothing counts versions."""
        return cls(weight.data_ptr(), weight._version, weight.shape, stage)


class _Held(NamedTuple):
    witness: _Witness
    at: At | None
    ahead: bool
    operand: torch.Tensor | QuantizedTensor


def reusable(precision: Product) -> bool:
    """True for a product whose weight has the same codes in every micro-batch."""
    return isinstance(precision, Gemm) and not precision.random


def may_be_gathered() -> bool:
    """Whether weights may be those that FSDP gathers: a process group is there.

    A gathered parameter itself cannot be told from a plain one.
    """
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class WeightCodes:
    """The weight of one layer as its products take it, by product.

    Before the first micro-batch with a number above 0, codes are held from forward to backward
    only: training without accumulation keeps no second copy of its weights.
    """

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._accumulates = False

    def get(
        self, product: int, weight: torch.Tensor, stage: int, told: At | None
    ) -> torch.Tensor | QuantizedTensor | None:
        """The operand, cast ahead by the forward pass or in an earlier micro-batch, or None."""
        held = self._held.get(product)
        if held is None or weight.is_inference():
            return None
        if held.witness != _Witness.of(weight, stage):
            del self._held[product]
            return None
        if held.ahead:
            if not self._accumulates:
                del self._held[product]
            else:  # from now on as what this product cast itself
                self._held[product] = held._replace(ahead=False)
            return held.operand
        if told is None or held.at is None:
            return None
        later = held.at.step == told.step and held.at.micro_batch < told.micro_batch
        return held.operand if later else None

    def put(
        self,
        product: int,
        weight: torch.Tensor,
        stage: int,
        told: At | None,
        operand: torch.Tensor | QuantizedTensor,
        *,
        ahead: bool = False,
    ) -> None:
        """Hold an operand: `ahead` for this backward pass, else for later micro-batches."""
        self._accumulates |= told is not None and told.micro_batch > 0
        if (ahead or self._accumulates) and not weight.is_inference() and not may_be_gathered():
            self._held[product] = _Held(_Witness.of(weight, stage), told, ahead, operand)

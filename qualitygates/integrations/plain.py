"""A gate around a training loop written by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..own_loop import LoopReport
from .scored import ScoredModel


@dataclass(frozen=True, kw_only=True)
class PlainWorkload(ScoredModel):
    """Your model and your loop: `loop(model, seed=, steps=, batch_size=, report=)` trains in place.

    The loop takes exactly `steps` optimizer steps, draws all randomness from `seed`, and has two
    lines for the gate: `report.batch(batch)` before each forward pass and `report.step(loss)` after
    each backward pass.
    """

    loop: Callable[..., Any]

    def train(
        self, model: nn.Module, *, seed: int, steps: int, batch_size: int, report: LoopReport
    ) -> None:
        """Run the loop."""
        self.loop(model, seed=seed, steps=steps, batch_size=batch_size, report=report)

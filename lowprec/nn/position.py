"""Where in training a layer is: what its random bits are keyed by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class At(NamedTuple):
    """One moment: step, micro-batch, and the rank among those that share a batch by rows."""

    step: int
    micro_batch: int
    data_rank: int


@dataclass
class Position:
    """Set by `lowprec.set_step`; before that, a count of the layer's forward calls."""

    told: At | None = None
    calls: int = 0

    def now(self) -> At:
        """The moment of a forward call; one more call on record where nobody sets the step.

        A forward inside a running backward is activation checkpointing computing again: it gets the
        moment of the latest forward.
        """
        if self.told is not None:
            return self.told
        if torch._C._current_graph_task_id() != -1:
            return At(max(self.calls - 1, 0), 0, 0)
        self.calls += 1
        return At(self.calls - 1, 0, 0)

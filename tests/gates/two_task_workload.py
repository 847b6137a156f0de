"""The toy workload with two tasks: every row may be clicked, only clicked rows may be bought."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from qualitygates.workload import Batch
from tests.gates.toy_workload import WIDTH, Toy


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 2)

    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.head(self.body(features["x"]))


class TwoTasks(Toy):
    name = "two tasks"
    tasks = ("click", "buy")

    def __init__(self, rows: int) -> None:
        super().__init__(rows, explode_at=0, crash=False)
        rng = np.random.default_rng(1)
        self.bought = self.y * (rng.random(self.y.shape) < 0.4)

    def model(self) -> nn.Module:
        return TwoHeads()

    def _batch(self, part: int, rows: np.ndarray) -> Batch:
        one = super()._batch(part, rows)
        bought = torch.from_numpy(self.bought[part][rows].astype(np.float32))
        labels = torch.stack([one.labels, bought], dim=1)
        weights = torch.stack([one.weights, one.labels], dim=1)
        return Batch(one.features, labels, weights, one.ids)


def build(rows: int = 6000) -> TwoTasks:
    return TwoTasks(rows)

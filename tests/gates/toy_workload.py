"""A workload of milliseconds: logistic data, a small network, faults that tests can ask for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from qualitygates.workload import Batch, EvaluationBatch

WIDTH = 32


class Net(nn.Module):
    def __init__(self, *, explode_at: int, crash: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Dropout(0.1))
        self.top = nn.Linear(64, 64)
        self.head = nn.Linear(64, 1)
        self.explode_at, self.crash, self.calls = explode_at, crash, 0

    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        self.calls += self.training
        hidden = self.top(self.body(features["x"]))
        quantized = "mxfp" in repr(self.top)
        if self.crash and quantized:
            raise RuntimeError("the kernel fell over")
        logits = self.head(torch.relu(hidden)).squeeze(-1)
        if quantized and self.training and self.calls == self.explode_at:
            # The loss of one step is NaN and its gradient zero: the last metric stays finite.
            return logits.detach() * torch.nan + 0 * logits.nan_to_num()
        return logits


class Toy:
    name = "toy"

    def __init__(self, rows: int, explode_at: int, crash: bool) -> None:
        rng = np.random.default_rng(0)
        truth = rng.standard_normal(WIDTH) / 3
        self.facts: dict[str, str | int | float] = {"rows": rows}
        self.explode_at, self.crash = explode_at, crash
        self.x = rng.standard_normal((2, rows, WIDTH)).astype(np.float32)
        p = 1 / (1 + np.exp(1 - self.x @ truth))
        self.y = (rng.random((2, rows)) < p).astype(np.float32)

    def model(self) -> nn.Module:
        return Net(explode_at=self.explode_at, crash=self.crash)

    def training_batches(self, *, seed: int, steps: int, batch_size: int) -> Iterator[Batch]:
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            yield self._batch(0, rng.integers(0, self.x.shape[1], batch_size))

    def evaluation_batches(self, *, batch_size: int) -> Iterator[EvaluationBatch]:
        for start in range(0, self.x.shape[1], batch_size):
            i = np.arange(start, min(start + batch_size, self.x.shape[1]))
            batch = self._batch(1, i)
            yield EvaluationBatch(
                **vars(batch),
                clusters={"user": i % 200},
                groups=i % 200,
                slices={"even": i % 2 == 0},
            )

    def _batch(self, part: int, rows: np.ndarray) -> Batch:
        ones = torch.ones(len(rows))
        x, y = (torch.from_numpy(a[part][rows]) for a in (self.x, self.y))
        return Batch({"x": x}, y, ones, torch.from_numpy(rows))

    def optimizer(self, model: nn.Module, *, steps: int):
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
        return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, steps)


def build(rows: int = 6000, explode_at: int = 0, crash: bool = False) -> Toy:
    return Toy(rows, explode_at, crash)

"""A recommendation model in small: towers that each read an input of their own, and shared layers.

x [B, T, W] is normal; the label comes from the sum of T random tanh networks of one input each,
weighted from 1 to 0.2. Tower i multiplies its output by a factor of the row to the power e_i and
divides its input by it, so that its exact products mean what they meant; e_i is 0, 0.5 or 1, and
the factor heavy-tailed. So layers differ in what they matter and in how hard their wgrad is. The
shared layers add their output to their input. Everything is smooth: paired trainings stay together.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from qualitygates.workload import Batch, EvaluationBatch

HIDDEN = 16
SIGMA = 2.0


class Net(nn.Module):
    def __init__(self, towers: int, shared: int, width: int) -> None:
        super().__init__()
        self.powers = [i % 3 / 2 for i in range(towers)]
        self.towers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(towers))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(shared))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(shared + 1))
        self.head = nn.Parameter(torch.randn(width) * 0.1 * width**-0.5)

    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        x, factor = features["x"], features["factor"]
        h = torch.zeros_like(x[:, 0])
        for i, (tower, power) in enumerate(zip(self.towers, self.powers, strict=True)):
            scale = factor**power
            h = h + F.gelu(tower(x[:, i] / scale) * scale)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            h = h + F.gelu(layer(norm(h)))
        return (self.norms[-1](h) * self.head).sum(-1)


class Towers:
    name = "towers"

    def __init__(self, **options: float) -> None:
        self.options = options
        self.towers, self.width = int(options["towers"]), int(options["width"])
        rng = np.random.default_rng(int(options["data_seed"]))
        self.first = rng.standard_normal((self.towers, self.width, HIDDEN)) / self.width**0.5
        weights = 0.2 ** (rng.permutation(self.towers) / (self.towers - 1))
        second = rng.standard_normal((self.towers, HIDDEN)) / HIDDEN**0.5
        self.second = second * (weights / np.linalg.norm(weights))[:, None]
        rows = int(options["rows"])
        self.held_out = self._rows(np.random.default_rng([int(options["data_seed"]), 1]), rows)
        self.facts: dict[str, str | int | float] = {"rows": rows, "width": self.width}

    def model(self) -> nn.Module:
        return Net(self.towers, int(self.options["shared"]), self.width)

    def _rows(self, rng: np.random.Generator, count: int) -> Batch:
        x = rng.standard_normal((count, self.towers, self.width)).astype(np.float32)
        hidden = np.tanh(np.einsum("btw,twh->bth", x, self.first, optimize=True))
        score = self.options["signal"] * np.einsum("bth,th->b", hidden, self.second)
        y = (rng.random(count) < 1 / (1 + np.exp(-score))).astype(np.float32)
        # Within what the block scales of NVFP4 can span, so that fprop keeps every row.
        factor = np.exp((SIGMA * rng.standard_normal((count, 1))).clip(-3, 3)).astype(np.float32)
        features = {"x": torch.from_numpy(x), "factor": torch.from_numpy(factor)}
        return Batch(features, torch.from_numpy(y), torch.ones(count), torch.arange(count))

    def training_batches(self, *, seed: int, steps: int, batch_size: int) -> Iterator[Batch]:
        for step in range(steps):
            yield self._rows(np.random.default_rng([seed, step, 7]), batch_size)

    def evaluation_batches(self, *, batch_size: int) -> Iterator[EvaluationBatch]:
        data = self.held_out
        for start in range(0, len(data.labels), batch_size):
            part = slice(start, start + batch_size)
            ids = data.ids[part]
            yield EvaluationBatch(
                {name: value[part] for name, value in data.features.items()},
                data.labels[part],
                data.weights[part],
                ids,
                clusters={"user": (ids // 8).numpy()},
                groups=None,
                slices={},
            )

    def optimizer(self, model: nn.Module, *, steps: int):
        optimizer = torch.optim.Adam(model.parameters(), lr=self.options["learning_rate"])
        return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)


def build(
    *,
    folder: Path | None = None,
    towers: int = 8,
    shared: int = 4,
    width: int = 32,
    signal: float = 6.0,
    rows: int = 12000,
    data_seed: int = 0,
    learning_rate: float = 2e-3,
) -> Towers:
    del folder
    return Towers(
        towers=towers,
        shared=shared,
        width=width,
        signal=signal,
        rows=rows,
        data_seed=data_seed,
        learning_rate=learning_rate,
    )

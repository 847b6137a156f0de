"""A deep network with planted numerics: which layer hurts in which product is known.

x [B, W] and side [B, W] are normal, the label comes from a random tanh network of both. `outliers`
names the layer whose input has one channel in 16 that is `outlier` times larger than the others.
`heavy` names the layer that alone reads `side`: its output gradients are multiplied by a
heavy-tailed factor of the row and its input divided by it, so that its exact products mean what
they meant; it starts near zero, so what its wgrad loses is not learned. `tiny` adds a 16 x 16.
The option `side` is the weight of the side input in the label. `graded` gives every layer outliers,
from none to 64 times, and adds its output to its input. `smooth` does the latter too, with GELU in
place of ReLU and a learning rate that ends at 1 %: two trainings that start an ulp apart then stay
together, where with ReLU they part.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from qualitygates.workload import Batch, EvaluationBatch

BLOCK = 16


class Layer(nn.Module):
    """LayerNorm, Linear, ReLU or GELU; with outliers the Linear sees some channels larger."""

    def __init__(self, width: int, *, outlier: float, smooth: bool) -> None:
        super().__init__()
        self.activation = nn.GELU() if smooth else nn.ReLU()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        scale = torch.ones(width)
        scale[::BLOCK] = outlier
        self.register_buffer("scale", scale)
        with torch.no_grad():
            self.linear.weight /= scale

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.activation(self.linear(self.norm(h) * self.scale))


class Side(nn.Module):
    """The side input: (W (x / f)) f, which is W x, with rows of very different gradients."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        with torch.no_grad():
            self.linear.weight *= 0.05

    def forward(self, side: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return self.linear(side / factor) * factor


class Net(nn.Module):
    def __init__(
        self, width: int, outliers: list[float], *, side: int, residual: bool, smooth: bool
    ) -> None:
        super().__init__()
        self.second, self.residual = side, residual
        self.layers = nn.ModuleList(
            Side(width) if i == side else Layer(width, outlier=one, smooth=smooth)
            for i, one in enumerate(outliers)
        )
        self.tiny: nn.Linear | None = None
        self.norm = nn.LayerNorm(width)
        self.head = nn.Parameter(torch.randn(width) * 0.1 * width**-0.5)

    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        h = features["x"]
        if self.tiny is not None:
            h = torch.cat([h[:, :16] + self.tiny(h[:, :16]), h[:, 16:]], dim=1)
        for i, layer in enumerate(self.layers):
            sides = (features["side"], features["factor"])
            if i == self.second or self.residual:
                h = h + (layer(*sides) if i == self.second else layer(h))
            else:
                h = layer(h)
        return (self.norm(h) * self.head).sum(-1)


class Planted:
    name = "planted"

    def __init__(self, **options: float) -> None:
        self.options = options
        self.width = int(options["width"])
        rng = np.random.default_rng(int(options["data_seed"]))
        self.first = rng.standard_normal((2 * self.width, 64)) / self.width**0.5
        self.second = rng.standard_normal(64) / 64**0.5
        rows = int(options["rows"])
        self.held_out = self._rows(np.random.default_rng([int(options["data_seed"]), 1]), rows)
        self.facts: dict[str, str | int | float] = {"rows": rows, "width": self.width}

    def model(self) -> nn.Module:
        o = self.options
        count, graded, smooth = range(int(o["layers"])), bool(o["graded"]), bool(o["smooth"])
        outliers = [o["outlier"] if i == o["outliers"] else 1.0 for i in count]
        if graded:
            outliers = [2.0 ** (i * 5 % 7) for i in count]
        residual = graded or smooth
        net = Net(self.width, outliers, side=int(o["heavy"]), residual=residual, smooth=smooth)
        if o["tiny"]:
            net.tiny = nn.Linear(16, 16)
        return net

    def _rows(self, rng: np.random.Generator, count: int) -> Batch:
        both = rng.standard_normal((count, 2 * self.width)).astype(np.float32)
        x, side = both[:, : self.width], both[:, self.width :]
        weighted = np.concatenate([x, self.options["side"] * side], axis=1)
        score = self.options["signal"] * np.tanh(weighted @ self.first) @ self.second
        score += self.options["intercept"]
        y = (rng.random(count) < 1 / (1 + np.exp(-score))).astype(np.float32)
        # Within what the block scales of NVFP4 can span, so that fprop keeps every row.
        tail = (self.options["sigma"] * rng.standard_normal((count, 1))).clip(-3, 3)
        factor = np.exp(tail).astype(np.float32)
        columns = {"x": x, "side": side, "factor": factor}
        features = {name: torch.from_numpy(value.copy()) for name, value in columns.items()}
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
        last = 0.01 if self.options["smooth"] else 0.1
        return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, last, steps)


def build(
    *,
    folder: Path | None = None,
    layers: int = 8,
    width: int = 32,
    outliers: int = 2,
    heavy: int = 5,
    outlier: float = 32.0,
    sigma: float = 2.0,
    tiny: bool = False,
    graded: bool = False,
    smooth: bool = False,
    signal: float = 15.0,
    side: float = 1.0,
    intercept: float = 0.0,
    rows: int = 8000,
    data_seed: int = 0,
    learning_rate: float = 1e-3,
) -> Planted:
    del folder
    return Planted(
        layers=layers,
        width=width,
        outliers=outliers,
        heavy=heavy,
        outlier=outlier,
        sigma=sigma,
        tiny=tiny,
        graded=graded,
        smooth=smooth,
        signal=signal,
        side=side,
        intercept=intercept,
        rows=rows,
        data_seed=data_seed,
        learning_rate=learning_rate,
    )

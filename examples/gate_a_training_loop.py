"""Gate a training loop that you wrote yourself: it gains two lines, your model none."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import nn

from qualitygates import Experiment, run
from qualitygates.integrations import EvaluationSet, PlainWorkload
from qualitygates.own_loop import LoopReport
from qualitygates.report import summary

generator = torch.Generator().manual_seed(0)
visits = torch.randn(16000, 32, generator=generator)
odds = visits @ torch.randn(32, generator=generator) / 3 - 1
clicked = (torch.rand(16000, generator=generator) < odds.sigmoid()).float()


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )


def loop(net: nn.Module, *, seed: int, steps: int, batch_size: int, report: LoopReport) -> None:
    order = np.random.default_rng(seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(steps):
        rows = torch.from_numpy(order.integers(0, 8000, batch_size))
        report.batch(rows)  # before the forward pass: what it trains on
        logits = net(visits[rows]).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, clicked[rows])
        optimizer.zero_grad()
        loss.backward()
        report.step(loss)  # after the backward pass
        optimizer.step()


def build() -> PlainWorkload:
    users = np.arange(8000) % 200
    held_out = EvaluationSet({"x": visits[8000:]}, clicked[8000:], {"user": users}, groups=users)
    return PlainWorkload(
        name="visits",
        build=model,
        loop=loop,
        evaluation=held_out,
        logits=lambda net, features: net(features["x"]).squeeze(-1),
    )


if __name__ == "__main__":
    gate = Experiment.from_toml(Path(__file__).with_name("own-loops") / "training_loop.toml")
    with TemporaryDirectory() as folder:
        print(summary(run(gate, out=Path(folder), workers=1, progress=False)))
        print("acceptance written:", (Path(folder) / "acceptance.json").exists())

"""Gate a LightningModule as it is: Trainer.fit trains every run, the gate watches and judges."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from qualitygates import Experiment, run
from qualitygates.integrations import EvaluationSet, LightningWorkload
from qualitygates.report import summary

generator = torch.Generator().manual_seed(0)
visits = torch.randn(16000, 32, generator=generator)
odds = visits @ torch.randn(32, generator=generator) / 3 - 1
clicked = (torch.rand(16000, generator=generator) < odds.sigmoid()).float()


class Clicks(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(x)).squeeze(-1)
        return logits

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def data(*, seed: int, batch_size: int) -> DataLoader[Any]:
    order, rows = torch.Generator().manual_seed(seed), TensorDataset(visits[:8000], clicked[:8000])
    return DataLoader(rows, batch_size, shuffle=True, drop_last=True, generator=order)


def build() -> LightningWorkload:
    users = np.arange(8000) % 200
    held_out = EvaluationSet({"x": visits[8000:]}, clicked[8000:], {"user": users}, groups=users)
    return LightningWorkload(
        name="visits", build=Clicks, data=data, evaluation=held_out, logits=lambda m, f: m(f["x"])
    )


if __name__ == "__main__":
    gate = Experiment.from_toml(Path(__file__).with_name("own-loops") / "lightning_module.toml")
    with TemporaryDirectory() as folder:
        print(summary(run(gate, out=Path(folder), workers=1, progress=False)))
        print("acceptance written:", (Path(folder) / "acceptance.json").exists())

"""The toy workload with the accidents of several processes: one that dies, one that fails alone."""

from __future__ import annotations

import os
import runpy
import signal
from pathlib import Path
from typing import Any

from torch import nn

Toy: Any = runpy.run_path(str(Path(__file__).with_name("toy_workload.py")))["Toy"]


class Accident(Toy):
    def __init__(self, rows: int, deaths: str, fails_on_rank: int, dropout: float) -> None:
        super().__init__(rows, 0, False)
        self.deaths, self.fails_on_rank, self.dropout = deaths, fails_on_rank, dropout

    def model(self) -> nn.Module:
        net: nn.Module = super().model()
        net.body[2].p = self.dropout
        net.register_forward_pre_hook(self.accident)
        return net

    def accident(self, net: nn.Module, features: Any) -> None:
        # Every file there is one death to come; whoever removes it dies.
        for file in sorted(Path(self.deaths).glob("death-*")) if self.deaths else []:
            file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if net.calls == 5 and os.environ.get("RANK") == str(self.fails_on_rank):
            raise RuntimeError(f"rank {self.fails_on_rank} fell over")


def build(
    rows: int = 2000, deaths: str = "", fails_on_rank: int = -1, dropout: float = 0.0
) -> Accident:
    return Accident(rows, deaths, fails_on_rank, dropout)

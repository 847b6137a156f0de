"""Peak memory of a training step of a 12-layer MLP by recipe against BF16, on a GPU.

    python benchmarks/memory.py [--rows N] [--layers N] [--width N] [--hidden N] [--out FILE]

A layer is x + down(silu(up(norm(x)))) in plain torch modules, in bfloat16; AdamW updates float32
masters. Arms: BF16, the recipe alone, the recipe under lowprec.saved_activations("mxfp8"), and the
same by NormLinear and GatedLinear. One JSON line an arm: `peak_mib` is
torch.cuda.max_memory_allocated over a whole step, weights and optimizer included, `kept_mib` what
forward leaves for backward, each with its ratio to BF16, and ms of a step (median, host included).
The bar is a peak of at most 0.75 of BF16's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import lowprec
from benchmarks.casts import machine
from benchmarks.training import Masters

BAR: Final = 0.75
MIB: Final = 2**20


@dataclass(frozen=True)
class Arm:
    """What an arm trains with: a recipe or "" for torch, what backward keeps, and its modules."""

    recipe: str
    saved: str = ""
    fused: bool = False

    @property
    def name(self) -> str:
        """In tables and records."""
        parts = [self.recipe or "bf16", f"saved {self.saved}" if self.saved else ""]
        return ", ".join(part for part in (*parts, "fused layers" if self.fused else "") if part)

    def context(self) -> AbstractContextManager[Any]:
        """Around the forward pass."""
        return lowprec.saved_activations(self.saved) if self.saved else nullcontext()


ARMS: Final = (
    Arm(""),
    Arm("mxfp8-portable"),
    Arm("mxfp8-portable", "mxfp8"),
    Arm("mxfp8-portable", "mxfp8", fused=True),
)


class Layer(nn.Module):
    """x + down(silu(up(norm(x))))."""

    def __init__(self, width: int, hidden: int, *, fused: bool) -> None:
        super().__init__()
        norm = nn.RMSNorm(width, eps=1e-6)
        up, down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)
        if fused:
            up_step: nn.Module = lowprec.NormLinear(norm, up)
            self.steps = nn.Sequential(up_step, lowprec.GatedLinear(down, gated=False))
        else:
            self.steps = nn.Sequential(norm, up, nn.SiLU(), down)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, width] to the same."""
        y: Tensor = x + self.steps(x)
        return y


def model_of(arm: Arm, layers: int, width: int, hidden: int, device: str) -> nn.Module:
    """The MLP as an arm trains it."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        *(Layer(width, hidden, fused=arm.fused) for _ in range(layers))
    ).to(device, torch.bfloat16)
    if arm.recipe:
        lowprec.apply(model, lowprec.plan(model, lowprec.load_recipe(arm.recipe)))
    return model


def measure(arm: Arm, rows: int, layers: int, width: int, hidden: int) -> dict[str, Any]:
    """Bytes and time of a step of one arm."""
    torch.cuda.empty_cache()
    model = model_of(arm, layers, width, hidden, "cuda")
    masters = Masters(list(model.parameters()), 1e-4)
    x = torch.randn(rows, width, device="cuda").bfloat16()
    kept, times = 0, []
    for step in range(8):
        if step == 2:  # optimizer states are there, kernels compiled
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start, before = time.perf_counter(), torch.cuda.memory_allocated()
        with arm.context():
            y = model(x)
        kept = torch.cuda.memory_allocated() - before
        y.float().square().mean().backward()
        del y
        masters.step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return {
        "arm": arm.name,
        "shape": [rows, layers, width, hidden],
        "peak_mib": round(torch.cuda.max_memory_allocated() / MIB, 1),
        "kept_mib": round(kept / MIB, 1),
        "ms": round(statistics.median(times[2:]), 3),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every arm, print a table and append JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("rows", 32768), ("layers", 12), ("width", 1024), ("hidden", 4096)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("not measurable here: this machine has no CUDA device")
    base: dict[str, Any] = {}
    for arm in ARMS:
        line = measure(arm, chosen.rows, chosen.layers, chosen.width, chosen.hidden)
        base = base or line
        for what in ("peak", "kept"):
            line[f"{what}_of_bf16"] = round(line[f"{what}_mib"] / base[f"{what}_mib"], 4)
        line["bar"] = BAR
        print(
            f"{line['arm']:<44} peak {line['peak_mib']:9.1f} MiB {line['peak_of_bf16']:.3f}  "
            f"kept {line['kept_mib']:9.1f} MiB {line['kept_of_bf16']:.3f}  {line['ms']:.2f} ms",
            flush=True,
        )
        if chosen.out:
            with chosen.out.open("a") as file:
                file.write(json.dumps(line | machine()) + "\n")


if __name__ == "__main__":
    main()

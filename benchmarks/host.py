"""What a step of one small layer costs the host, on a GPU that waits for it: ours against torch.

    python benchmarks/host.py [--recipes NAME ...] [--profile N] [--out FILE]

A layer of 512 x 512 on 512 rows keeps an H200 busy for less time than any host needs to issue it:
the wall time of a step, forward and backward, is the host's. One JSON line an arm: microseconds of
a step, the 20th, 50th and 80th percentile over blocks of 50, and how many torch's own layer takes.
--profile prints the N Python functions with the most time of their own, under cProfile.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.casts import machine
from benchmarks.module_arms import Arm, Size, arms_of, inputs_of

SIZES: Final = (Size("linear", 512, 512, 512), Size("norm_linear", 512, 512, 512))
RECIPES: Final = ("mxfp8-portable", "fp8-tensorwise", "mxfp8")
BLOCKS, STEPS = 21, 50


def step_us(arm: Arm, x: torch.Tensor, dy: torch.Tensor) -> list[float]:
    """Microseconds of a step over each block."""
    found = []
    for _ in range(BLOCKS + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            arm.step(x, dy)
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) * 1e6 / STEPS)
    return found[3:]


def profiled(arm: Arm, x: torch.Tensor, dy: torch.Tensor, top: int) -> None:
    """Print what takes the time of 200 steps."""
    seen = cProfile.Profile()
    seen.enable()
    for _ in range(200):
        arm.step(x, dy)
    seen.disable()
    pstats.Stats(seen).sort_stats("tottime").print_stats(top)


def main() -> None:
    """Measure, print a table and append JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--profile", type=int, default=0, help="functions to print")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("not measurable here: this machine has no CUDA device")
    for size in SIZES:
        x, dy = inputs_of(size, "cuda")
        base = 0.0
        for arm in arms_of(
            size, chosen.recipes, device="cuda", hardware=None, peers=False, quick=True
        ):
            if not isinstance(arm, Arm) or "compiled" in arm.name:
                continue
            times = step_us(arm, x, dy)
            fifths, median = statistics.quantiles(times, n=5), statistics.median(times)
            base = base or median
            line: dict[str, Any] = {"module": size.kind, "arm": arm.name}
            line["us"] = [round(one, 1) for one in (fifths[0], median, fifths[3])]
            line["of_torch"] = round(median / base, 2)
            print(f"{size.kind:<12} {arm.name:<24} {median:8.1f} us a step, {median / base:.2f}x")
            if chosen.profile and arm.name.startswith("ours"):
                profiled(arm, x, dy, chosen.profile)
            if chosen.out:
                with chosen.out.open("a") as file:
                    file.write(json.dumps(line | machine()) + "\n")


if __name__ == "__main__":
    main()

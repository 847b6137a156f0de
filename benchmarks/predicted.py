"""Predicted against measured time of modules at shapes outside of the calibration, as JSON lines.

    python benchmarks/predicted.py [--calibration NAME_OR_FILE] [--recipe NAME] [--out FILE]

20 shapes, Linear and NormLinear, forward and backward with every cast inside and the weight cast
anew each time, as after an optimizer step; BF16 interleaved. `graph_us` are CUDA-graph replays,
what a calibration predicts; `eager_us` is the time of the same calls one by one, which the host may
bound. The last line has the share within 12 % and the decisions that were right; the exit code is
1 when fewer than 18 of 20 decisions are, or a time is further off than 12 %.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import lowprec  # noqa: E402
from lowprec.calibration import Calibration  # noqa: E402
from lowprec.timing import machine, timed  # noqa: E402

# (rows, N, K): none of these widths is on the grid, and half of the rows are between its points.
SHAPES = [
    *((12288, 640, 640), (49152, 640, 640), (65536, 896, 896), (24576, 1280, 1280)),
    *((98304, 640, 1792), (32768, 1792, 640), (49152, 1408, 1408), (12288, 2560, 2560)),
    *((24576, 5120, 1280), (16384, 6144, 6144)),
]
WITHIN, EAGER = 0.12, 10


def modules(norm: bool, n: int, k: int, recipe: str) -> tuple[nn.Module, nn.Module]:
    """The module in BF16 and the same one converted by the recipe."""
    torch.manual_seed(0)
    linear = nn.Linear(k, n, bias=False)
    plain: nn.Module = lowprec.NormLinear(nn.RMSNorm(k, eps=1e-6), linear) if norm else linear
    model = nn.ModuleDict({"m": plain.to("cuda", torch.bfloat16)})
    low = copy.deepcopy(model)
    lowprec.apply(low, lowprec.plan(low, lowprec.load_recipe(recipe)))
    return model["m"], low["m"]


def step(module: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> Callable[[], Any]:
    """Forward and backward of a module whose weight has just changed."""
    weight = (module.linear if isinstance(module, lowprec.NormLinear) else module).weight
    wanted = [x, *module.parameters()]

    def run() -> Any:
        # A new version of the weight without a kernel: what is kept of its cast is stale.
        weight.detach()[:0].zero_()
        return torch.autograd.grad(module(x), wanted, dy)

    return run


def replay(run: Callable[[], Any]) -> Callable[[], Any]:
    """The run as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def eager(runs: list[Callable[[], Any]]) -> list[float]:
    """Median microseconds of a call, host and device, interleaved."""
    found: list[list[float]] = [[] for _ in runs]
    for _ in range(5):
        for one, run in zip(found, runs, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(EAGER):
                run()
            torch.cuda.synchronize()
            one.append(1e6 * (time.perf_counter() - start) / EAGER)
    return [statistics.median(one) for one in found]


def measure(
    norm: bool, shape: tuple[int, int, int], calibration: Calibration, recipe: str
) -> dict[str, Any]:
    """One shape, predicted and measured."""
    rows, n, k = shape
    plain, low = modules(norm, n, k, recipe)
    x = torch.randn(rows, k, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn(rows, n, device="cuda").bfloat16()
    runs = [step(module, x, dy) for module in (plain, low)]
    eager_us = eager(runs)
    graph_us = timed([replay(run) for run in runs])
    linear = nn.Linear(k, n, bias=False, device="meta")
    model: nn.Module = lowprec.NormLinear(nn.RMSNorm(k, device="meta"), linear) if norm else linear
    (layer,) = lowprec.plan(
        nn.ModuleDict({"m": model}),
        lowprec.load_recipe(recipe),
        calibration=calibration,
        rows=rows,
    ).layers
    guess = layer.predicted
    if guess is None:
        sys.exit(f"{recipe} at {shape}: {layer.why}")
    keeps, ratio = graph_us[0] <= graph_us[1], graph_us[0] / graph_us[1]
    return {
        "module": "NormLinear" if norm else "Linear",
        "shape": [rows, n, k],
        "recipe": recipe,
        "predicted_us": [round(guess.bf16_us, 1), round(guess.us, 1)],
        "graph_us": [round(us, 1) for us in graph_us],
        "eager_us": [round(us, 1) for us in eager_us],
        "off": [
            round(a / b - 1, 3) for a, b in zip((guess.bf16_us, guess.us), graph_us, strict=True)
        ],
        "predicted_speedup": round(guess.speedup, 3),
        "speedup": round(ratio, 3),
        "eager_speedup": round(eager_us[0] / eager_us[1], 3),
        "keeps_bf16": guess.keeps_bf16,
        "right": guess.keeps_bf16 == keeps,
        "extrapolated": guess.extrapolated,
    }


def main() -> int:
    """Read the arguments; 0 when the predictions hold, 1 when they do not, 3 on wrong input."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--calibration", default="h200", help="a shipped one, or a file")
    parser.add_argument("--recipe", default="mxfp8-portable")
    parser.add_argument("--out", type=Path, help="file for the JSON lines; they are printed anyway")
    arguments = parser.parse_args()
    try:
        return score(arguments)
    except lowprec.LowprecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3


def score(arguments: argparse.Namespace) -> int:
    """Measure, print, and say whether the predictions hold."""
    facts = machine()._asdict() | {"hardware": str(machine().hardware)}
    calibration = lowprec.load_calibration(arguments.calibration)
    lines = [
        measure(norm, shape, calibration, arguments.recipe) | {"machine": facts}
        for norm in (False, True)
        for shape in SHAPES
    ]
    close = sum(abs(line["off"][1]) <= WITHIN for line in lines)
    summary = {
        "of": len(lines),
        "within_12_percent": close,
        "bf16_within_12_percent": sum(abs(line["off"][0]) <= WITHIN for line in lines),
        "decisions_right": sum(line["right"] for line in lines),
        "calibration": calibration.text,
    }
    text = "".join(json.dumps(line) + "\n" for line in [*lines, summary])
    print(text, end="")
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")
    return 0 if close == len(lines) and summary["decisions_right"] >= 18 else 1


if __name__ == "__main__":
    sys.exit(main())

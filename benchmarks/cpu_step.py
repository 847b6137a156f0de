"""Time of one training step on the CPU: an MLP of plain nn.Linear against the wrapped one.

Prints one JSON line a policy. The two models take turns, so that a slow spell of the machine hits
both; the medians are compared. Run: `python benchmarks/cpu_step.py [POLICY ...]`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from pathlib import Path

import torch

from lowprec import Linear
from lowprec.policy import LinearPolicy

WIDTH, BATCH, DEPTH = 1024, 1024, 4
WARMUP, REPEATS = 2, 9
TILES = "mxfp8 x mxfp8_32x32"
POLICIES = (
    "bf16",
    "mxfp8",
    f"{TILES} / {TILES} / mxfp8",
    "mxfp8_e5m2",
    "mxfp6_e2m3",
    "mxfp6_e3m2",
    "mxfp4",
    "nvfp4 x nvfp4_16x16 / nvfp4:sr x nvfp4_16x16 / nvfp4:sr x nvfp4 + rht16",
    "fp8_rowwise",
    "fp8_tensorwise",
    "fp8_1x128 x fp8_128x128 / fp8_1x128 x fp8_128x128 / fp8_1x128",
    "bf16 / mxfp4:sr + rht32:seeded / mxfp4:sr + rht32:seeded",
)


def mlp(policy: LinearPolicy | None) -> torch.nn.Module:
    """DEPTH layers of WIDTH x WIDTH with ReLU: nn.Linear, or Linear under `policy`."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for i in range(DEPTH):
        if policy is None:
            layers.append(torch.nn.Linear(WIDTH, WIDTH))
        else:
            layers.append(Linear(WIDTH, WIDTH, policy=policy, name=f"layers.{i}"))
        layers.append(torch.nn.ReLU())
    return torch.nn.Sequential(*layers)


def step_ms(model: torch.nn.Module, x: torch.Tensor) -> float:
    """Milliseconds of forward and backward; the loss is the sum of squares."""
    start = time.perf_counter()
    model.zero_grad()
    model(x).square().sum().backward()
    return (time.perf_counter() - start) * 1e3


def compare(text: str) -> dict[str, object]:
    """The record of one policy."""
    plain, wrapped = mlp(None), mlp(LinearPolicy.parse(text))
    x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0))
    times: dict[torch.nn.Module, list[float]] = {plain: [], wrapped: []}
    for turn in range(WARMUP + REPEATS):
        for model, kept in times.items():
            took = step_ms(model, x)
            if turn >= WARMUP:
                kept.append(took)
    plain_ms, wrapped_ms = (statistics.median(kept) for kept in times.values())
    return {
        "what": f"training step, {DEPTH} x [Linear {WIDTH} + ReLU], batch {BATCH}, float32",
        "policy": text,
        "plain_ms": round(plain_ms, 1),
        "wrapped_ms": round(wrapped_ms, 1),
        "ratio": round(wrapped_ms / plain_ms, 2),
        "repeats": REPEATS,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cpu": cpu_model(),
        "date": datetime.date.today().isoformat(),
    }


def cpu_model() -> str:
    """The processor's name, from /proc/cpuinfo where there is one."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else "unknown"


def main() -> None:
    """Compare every policy named on the command line, else all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("policies", nargs="*", default=list(POLICIES))
    for text in parser.parse_args().policies:
        print(json.dumps(compare(text)), flush=True)


if __name__ == "__main__":
    main()

"""What lowprec.watch costs: 4 x (Linear + ReLU) in recipe mxfp8, sampled every 100 steps.

python benchmarks/telemetry.py [--device cuda] [--width 1024] [--batch 1024] [--append FILE]

Two measurements, both interleaved step by step so that whatever else the machine does meets every
arm alike:
- steps: the time of a plain step, of a sampled one, of the one after it, whose caches are cold, and
  of one that is watched but not sampled;
  sampling = (sampled + after - 2 watched) / (every plain), the amortized share of a plain step.
- run: two equal models trained side by side for real, one of them watched and writing JSON lines.
Times are medians (steps) and sums (run) in seconds of wall clock and of CPU time of the process; on
a busy machine the CPU time is the steadier of the two. On a GPU only the wall clock counts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowprec
from lowprec.hardware import current
from lowprec.watching import WHAT_IF, watch

LAYERS, EVERY = 4, 100


@dataclass(frozen=True)
class Setting:
    """Device, width of the layers, rows of the batch."""

    device: str
    width: int
    batch: int


def training_step(setting: Setting) -> tuple[nn.Module, Callable[[], None]]:
    """The model, and a step of SGD on one fixed batch."""
    torch.manual_seed(0)
    width, device = setting.width, setting.device
    parts = [part for _ in range(LAYERS) for part in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*parts).to(device)
    lowprec.apply(model, lowprec.plan(model, lowprec.load_recipe("mxfp8")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(setting.batch, width, device=device)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if device != "cpu":
            torch.cuda.synchronize()

    return model, step


def clocks() -> tuple[float, float]:
    """Wall clock and CPU time of this process, seconds."""
    return time.perf_counter(), time.process_time()


def timed(call: Callable[[], None]) -> tuple[float, float]:
    """Seconds of wall clock and of CPU time."""
    before = clocks()
    call()
    return tuple(b - a for a, b in zip(before, clocks(), strict=True))  # type: ignore[return-value]


def steps(setting: Setting, repeats: int) -> dict[str, Any]:
    """Medians of a plain, a sampled, the next and a watched step."""
    model, step = training_step(setting)
    seen: dict[str, list[tuple[float, float]]] = {
        n: [] for n in ("plain", "sampled", "after", "watched")
    }
    for index in range(repeats + 1):
        found = {"plain": timed(step)}
        with watch(model, every=3):
            for name in ("sampled", "after", "watched"):
                found[name] = timed(step)
        if index:  # the first round warms up
            for name, one in found.items():
                seen[name].append(one)
    result: dict[str, Any] = {"measurement": "steps", "repeats": repeats}
    for place, clock in enumerate(("wall", "cpu")):
        medians = {n: statistics.median(one[place] for one in times) for n, times in seen.items()}
        plain, sampled, after, watched = medians.values()
        result[clock] = {
            **{f"{name}_s": round(one, 6) for name, one in medians.items()},
            "sampling": round((sampled + after - 2 * watched) / EVERY / plain, 5),
        }
    return result


def run(setting: Setting, count: int) -> dict[str, Any]:
    """`count` steps of two equal models side by side, one of them watched."""
    (_, plain_step), (model, watched_step) = training_step(setting), training_step(setting)
    plain_step()
    watched_step()
    times: dict[str, list[tuple[float, float]]] = {"plain": [], "watched": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "stats.jsonl")
        with watch(model, every=EVERY, path=path):
            for index in range(count):
                arms = [("plain", plain_step), ("watched", watched_step)]
                for name, step in arms if index % 2 else reversed(arms):
                    times[name].append(timed(step))
        samples = sum('"sample"' in line for line in path.read_text().splitlines())
    result: dict[str, Any] = {"measurement": "run", "steps_each": count, "lines": samples}
    for place, clock in enumerate(("wall", "cpu")):
        plain, watched = (sum(one[place] for one in times[n]) for n in ("plain", "watched"))
        result[clock] = {
            "plain_s": round(plain, 3),
            "watched_s": round(watched, 3),
            "overhead": round(watched / plain - 1, 5),
        }
    return result


def main() -> None:
    """Measure and print one JSON line a measurement."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--steps", type=int, default=300, help="steps of the run, for each arm")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--append", type=Path, help="file of records")
    asked = parser.parse_args()
    setting = Setting(asked.device, asked.width, asked.batch)
    facts = {
        "what": f"lowprec.watch, {LAYERS} x (Linear({asked.width}, {asked.width}) + ReLU), "
        f"batch {asked.batch}, recipe mxfp8",
        "every": EVERY,
        "what_if": list(WHAT_IF),
        "hardware": str(current()) if asked.device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    for result in (steps(setting, asked.repeats), run(setting, asked.steps)):
        line = json.dumps({**facts, **result})
        print(line, flush=True)
        if asked.append is not None:
            with asked.append.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()

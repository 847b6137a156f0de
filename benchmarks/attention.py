"""Speed of attention on a GPU against its peers in the same run, as JSON lines.

    python benchmarks/attention.py [--quick] [--only NAME ...] [--tune] [--no-peers] [--out FILE]

Every shape is checked against float64 before it is timed; a wrong one ends the run. Times are of
single launches, outputs allocated, queued behind a pause so that the host is never waited for,
interleaved with the peers over repetitions. `tflops` counts two products forward, five backward,
on the lengths that exist; `of_copy` is bytes / median time over the copy bandwidth of the run;
`times_faster` is another's median over that of our bf16 kernels. --tune times every candidate tile
shape of ours alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.attention_cases import (  # noqa: E402
    DP_BF16,
    NATIVE,
    Problem,
    Run,
    check,
    of_codes,
    ours,
    peers,
    problems,
)
from benchmarks.cast_cases import Case  # noqa: E402
from benchmarks.casts import machine, timed  # noqa: E402
from lowprec.attention_policy import ATTENTION_BF16  # noqa: E402
from lowprec.backends.triton_kernels import attention_fp8_ops, attention_ops  # noqa: E402
from lowprec.backends.triton_kernels.attention_ops import Shape  # noqa: E402

COPIED = 1 << 30

# Tile shapes worth timing, by head dim.
CANDIDATES: dict[str, dict[int, list[Any]]] = {
    "FORWARD": {
        64: [Shape(128, 64, 3, 4), Shape(128, 128, 2, 8), Shape(128, 64, 3, 8)],
        128: [
            Shape(128, 64, 3, 8),
            Shape(128, 128, 2, 8),
            Shape(128, 64, 2, 8),
            Shape(64, 64, 2, 4),
            Shape(64, 128, 2, 4),
        ],
    },
    "KEYS": {
        64: [Shape(64, 128, 2, 8), Shape(64, 64, 2, 4), Shape(128, 128, 2, 8)],
        128: [Shape(64, 128, 2, 8), Shape(64, 64, 2, 4), Shape(32, 128, 2, 8)],
    },
    "QUERIES": {
        64: [Shape(128, 128, 2, 8), Shape(64, 64, 2, 4), Shape(128, 64, 3, 8)],
        128: [Shape(128, 64, 2, 8), Shape(128, 64, 3, 8), Shape(64, 64, 2, 4)],
    },
    # Keys of a tile, stages, warps.
    "FP8": {128: [(128, 3, 8), (128, 2, 8), (64, 3, 8)]},
}


def copy_speed(repetitions: int) -> float:
    """Bytes a millisecond that a copy of 1 GiB reads and writes."""
    x = torch.empty(COPIED // 2, dtype=torch.bfloat16, device="cuda").normal_()
    y = torch.empty_like(x)
    times = timed([Case("copy", "", "", lambda: y.copy_(x), 0)], repetitions)[0]
    return 2 * COPIED / statistics.median(times)


def described(problem: Problem, direction: str, backend: str, times: list[float]) -> dict[str, Any]:
    """A line without what it is compared to."""
    fifths, median = statistics.quantiles(times, n=5), statistics.median(times)
    return {
        "op": "attention",
        "problem": problem.name,
        "direction": direction,
        "backend": backend,
        "activation": problem.activation,
        "mask": str(problem.mask),
        "sequences": len(problem.queries),
        "tokens": [sum(problem.queries), sum(problem.keys)],
        "heads": problem.heads,
        "head_dim": problem.width,
        "dtype": "bfloat16",
        "ms": [round(t, 5) for t in (fifths[0], median, fifths[3])],
        "tflops": round(problem.flops(direction) / median / 1e9, 1),
        "bytes": problem.bytes(direction),
    }


def measure(
    problem: Problem, speed: float, arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Check and time one shape: ours and the peers, forward and backward."""
    errors = {"triton": check(problem)}
    runs: list[tuple[str, Run, Run | None]] = [("triton", *ours(problem))]
    if problem.bound == "compute" and problem.activation == "softmax" and problem.width == 128:
        errors["triton fp8"] = check(problem, NATIVE)
        runs.append(("triton fp8", *ours(problem, NATIVE)))
        runs.append(("triton fp8, dP in bf16", *ours(problem, DP_BF16)))
        errors["triton fp8, dP in bf16"] = check(problem, DP_BF16)
        runs.append(("triton fp8, of codes", of_codes(problem), None))
        errors["triton fp8, of codes"] = errors["triton fp8"]
    if not arguments.no_peers:
        runs += peers(problem)
    for index, direction in ((1, "forward"), (2, "backward")):
        some = [one for one in runs if one[index] is not None]
        cases: list[Any] = [Case("attention", direction, "", one[index], 0) for one in some]
        times = timed(cases, 7 if arguments.quick else 20)
        own = statistics.median(times[0])
        for (backend, *_), found in zip(some, times, strict=True):
            line = described(problem, direction, backend, found)
            if problem.bound == "memory":
                line["of_copy"] = round(line["bytes"] / statistics.median(found) / speed, 3)
            if backend in errors:
                names = ("o",) if direction == "forward" else ("dq", "dk", "dv")
                line["errors"] = {name: round(errors[backend][name], 6) for name in names}
            if backend != "triton":
                line["times_faster"] = round(statistics.median(found) / own, 3)
            yield line


def tune() -> Iterator[dict[str, Any]]:
    """Time our candidates at the jagged and the dense shape, one table at a time."""
    chosen = [one for one in problems(quick=True) if one.name in ("jagged", "dense")]
    for problem in (one for one in chosen if one.activation == "softmax"):
        for name, by_width in CANDIDATES.items():
            table: Any = attention_fp8_ops.SHAPES if name == "FP8" else getattr(attention_ops, name)
            kept = table[problem.width]
            policy = NATIVE if name == "FP8" else ATTENTION_BF16
            backward = name in ("KEYS", "QUERIES")
            for shape in by_width.get(problem.width, []):
                table[problem.width] = shape
                direction = "backward" if backward else "forward"
                case: Any = Case(
                    "attention", direction, "", ours(problem, policy)[int(backward)], 0
                )
                times = timed([case], 7)[0]
                line = described(problem, direction, "triton", times)
                yield line | {"table": name, "shape": list(shape), "chosen": shape == kept}
            table[problem.width] = kept


def short(line: dict[str, Any]) -> str:
    """One line for a person."""
    what = f"{line['problem']} {line['head_dim']} {line['activation']}, {line['mask']}"
    text = f"{what:38} {line['direction']:8} {line['backend']:16} {line['ms'][1]:8.4f} ms"
    text += f" {line['tflops']:7.1f} TF"
    for key in ("of_copy", "times_faster", "table", "shape", "errors"):
        text += f"  {key} {line[key]}" if key in line else ""
    return text


def main() -> None:
    """Read the arguments, measure every shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes, 7 repetitions")
    parser.add_argument("--only", nargs="*", help="names of shapes")
    parser.add_argument("--tune", action="store_true", help="time candidate tile shapes instead")
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--out", type=Path, help="file for the JSON lines; else they are printed")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    facts = machine()
    if arguments.tune:
        lines = tune()
    else:
        chosen = [
            one
            for one in problems(quick=arguments.quick)
            if not arguments.only or one.name in arguments.only
        ]
        speed = copy_speed(10)
        facts |= {"copy_tb_per_s": round(speed / 1e9, 3)}
        lines = (line for one in chosen for line in measure(one, speed, arguments))
    for line in lines:
        text = json.dumps(line | facts) + "\n"
        if arguments.out is None:
            print(text, end="", flush=True)
            continue
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(text)
        print(short(line), flush=True)


if __name__ == "__main__":
    main()

"""Forward and backward of whole modules on a GPU: ours by recipe, torch in BF16 and the peers.

    python benchmarks/modules.py [--quick] [--peers] [--only TEXT ...] [--recipes NAME ...]
                                 [--profile] [--out FILE]

Every conversion is inside, the cast of the weights too: each step counts them as changed. Before
anything is timed, y, dx and dw of every arm are held against float32 torch; a wrong arm is not
timed. Arms are timed in interleaved blocks of steps in one process, once as the host
issues them and once as a replay of a CUDA graph (both sides), each block between two CUDA events.
One JSON line an arm: ms are the 20th, 50th and 80th percentile of a step over blocks; `faster` is
the median of BF16 over it, eager and compiled, under the same condition. --only keeps the sizes
(or arms, written `arm:TEXT`) whose names contain a text; --profile prints the kernels of an arm.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.casts import machine, said
from benchmarks.module_arms import Arm, Size, arms_of, errors_of, exact_step, inputs_of

SHAPES = [(65536, 2048, 2048), (16384, 4096, 4096), (8192, 8192, 8192), (32768, 1024, 1024)]
SIZES = [Size(kind, *shape) for kind in ("linear", "norm_linear") for shape in SHAPES]
SIZES.append(Size("mlp", 32768, 1024, 4096))
SIZES += [Size("emulated", *shape) for shape in ((8192, 8192, 8192), (16384, 4096, 4096))]
QUICK = [SIZES[1], SIZES[5], SIZES[8]]
RECIPES = ["mxfp8-portable", "fp8-tensorwise", "fp8-rowwise", "mxfp8"]
BLOCK_MS = 15.0
GEMMS = ("gemm", "cutlass", "nvjet", "cublas", "xmma")

Step = Callable[[], Any]


def block_ms(step: Step, steps: int) -> float:
    """Milliseconds of a step over one block; the device is idle before and after."""
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps):
        step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / steps


def interleaved(steps: dict[str, Step], blocks: int) -> dict[str, list[float]]:
    """Milliseconds of a step of each, a number for each block; the order turns with every round."""
    sizes = {}
    for name, step in steps.items():
        step()
        sizes[name] = max(2, min(50, round(BLOCK_MS / max(block_ms(step, 2), 1e-3))))
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for index in range(blocks):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            times[name].append(block_ms(steps[name], sizes[name]))
    return times


def replayed(step: Step) -> Step:
    """The step as one CUDA graph; raises what capturing raises."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()

    def replay() -> Any:
        graph.replay()
        return kept

    return replay


def peak_mib(step: Step) -> float:
    """MiB that a step needs beyond what is there before it."""
    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def kernels(step: Step, steps: int = 5) -> list[tuple[str, float, float]]:
    """Name, microseconds and launches a step of every kernel, the longest first."""
    step()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    found = [
        (one.key, one.self_device_time_total / steps, one.count / steps)
        for one in seen.key_averages()
        if one.device_type == torch.autograd.DeviceType.CUDA and one.self_device_time_total > 0
    ]
    return sorted(found, key=lambda one: -one[1])


def is_product(name: str) -> bool:
    """Whether a kernel is a matrix product."""
    return any(word in name.lower() for word in GEMMS)


def breakdown(name: str, found: list[tuple[str, float, float]], top: int) -> str:
    """The kernels of a step as text."""
    total = sum(us for _, us, _ in found) or 1.0
    products = sum(us for kernel, us, _ in found if is_product(kernel))
    launches = sum(count for *_, count in found)
    lines = [
        f"  {name}: {total:.0f} us of kernels, {launches:.0f} launches, products "
        f"{products / total:.0%}, the rest (conversions, norms) {1 - products / total:.0%}"
    ]
    for kernel, us, count in found[:top]:
        lines.append(f"    {us:9.1f} us {us / total:6.1%} x{count:<4.0f} {kernel[:90]}")
    return "\n".join(lines)


def usable(
    size: Size, x: torch.Tensor, dy: torch.Tensor, arguments: argparse.Namespace
) -> list[tuple[Arm, list[float]]]:
    """The arms at one size that give right results, with their errors; says what is left out."""
    want = exact_step(size, x, dy)
    wanted = [one.removeprefix("arm:") for one in arguments.only if one.startswith("arm:")]
    found = []
    for arm in arms_of(
        size,
        arguments.recipes,
        device="cuda",
        hardware=None,
        peers=arguments.peers,
        quick=arguments.quick,
    ):
        name = arm.name if isinstance(arm, Arm) else arm[0]
        if wanted and not name.startswith("bf16") and not any(one in name for one in wanted):
            continue
        if not isinstance(arm, Arm):
            print(f"  left out: {arm[0]}: {arm[1]}", flush=True)
            continue
        try:
            errors = errors_of(arm, x, dy, want)
        except Exception as error:  # an arm that cannot run must not end the others'
            print(f"  left out: {name}: {type(error).__name__}: {error}"[:300], flush=True)
            continue
        shown = ", ".join(f"{one:.4f}" for one in errors)
        if not all(one <= arm.limit for one in errors):  # NaN too
            print(f"  WRONG: {name}: relative errors {shown}, limit {arm.limit}", flush=True)
            continue
        found.append((arm, errors))
    return found


def measure(size: Size, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Check and time every arm at one size: a line for each."""
    torch.compiler.reset()
    x, dy = inputs_of(size, "cuda")
    checked = usable(size, x, dy, arguments)
    eager: dict[str, Step] = {
        arm.name: lambda arm=arm: arm.step(x, dy)  # type: ignore[misc]
        for arm, _ in checked
    }
    peaks = {name: peak_mib(step) for name, step in eager.items()}
    clocks = [said("nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader")]
    blocks = 7 if arguments.quick else 21
    times = {"eager": interleaved(eager, blocks)}
    if arguments.profile:
        for name, step in eager.items():
            if "compiled" not in name:
                print(breakdown(name, kernels(step), arguments.top), flush=True)
    graphs: dict[str, Step] = {}
    refused = {}
    for name, step in eager.items():
        try:
            graphs[name] = replayed(step)
        except Exception as error:  # some peers cannot be captured
            refused[name] = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            torch.cuda.synchronize()
    times["graph"] = interleaved(graphs, blocks)
    clocks.append(said("nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader"))
    facts = machine() | {"clocks_before_after": clocks}
    lines = []
    for arm, errors in checked:
        line = {"module": size.kind, "shape": [size.rows, size.columns, size.features]}
        line |= {"arm": arm.name, "errors": [round(one, 5) for one in errors]}
        line |= {"peak_mib": peaks[arm.name]}
        for condition, found in times.items():
            if arm.name in found:
                line[condition] = figures(size, arm.name, found)
        if arm.name in refused:
            line["no_graph"] = refused[arm.name]
        lines.append(line | facts)
    return lines


def figures(size: Size, name: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """Percentiles, rate, and the ratio to each form of BF16 under one condition."""
    fifths = statistics.quantiles(times[name], n=5)
    median = statistics.median(times[name])
    faster = {
        base: round(statistics.median(times[base]) / median, 3)
        for base in ("bf16", "bf16, compiled")
        if base in times
    }
    return {
        "ms": [round(one, 4) for one in (fifths[0], median, fifths[3])],
        "tflops": round(size.flops / median / 1e9, 1),
        "faster": faster,
    }


def row(line: dict[str, Any]) -> str:
    """One arm as a line of a table."""
    parts = [f"  {line['arm']:<32}"]
    for condition in ("eager", "graph"):
        if condition not in line:
            parts.append(f"{condition} -".ljust(34))
            continue
        found = line[condition]
        ratios = " / ".join(f"{one:.2f}x" for one in found["faster"].values())
        parts.append(f"{condition} {found['ms'][1]:8.3f} ms {ratios:<15}".ljust(34))
    return "".join(parts) + f" {line['peak_mib']:8.0f} MiB  err {max(line['errors']):.3f}"


def main() -> None:
    """Measure, print a table and write JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--quick", action="store_true", help="three sizes, fewer blocks")
    parser.add_argument("--peers", action="store_true", help="torchao and Transformer Engine too")
    parser.add_argument("--only", nargs="*", default=[], help="sizes, or arm:TEXT")
    parser.add_argument("--recipes", nargs="*", default=RECIPES)
    parser.add_argument("--profile", action="store_true", help="print the kernels of an arm")
    parser.add_argument("--top", type=int, default=14, help="kernels to print")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("not measurable here: this machine has no CUDA device")
    named = [one for one in arguments.only if not one.startswith("arm:")]
    # Compiled arms of one class share their code object's cache.
    torch._dynamo.config.recompile_limit = 64
    for size in QUICK if arguments.quick and not named else SIZES:
        if named and not any(one in str(size) for one in named):
            continue
        print(size, flush=True)
        for line in measure(size, arguments):
            print(row(line), flush=True)
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""What a step of one small layer costs the host, on a GPU that waits for it: ours against torch.

    python benchmarks/host.py [--dry] [--recipes NAME ...] [--profile N] [--out FILE]

A layer of 512 x 512 on 512 rows keeps an H200 busy for less time than any host needs to issue it:
the wall time of a step, forward and backward, is the host's. One JSON line an arm: microseconds of
a step, the 20th, 50th and 80th percentile over blocks, how many torch's own layer takes, and the
median of a forward pass and of what backward adds. One line an op that layers start: its median.
--profile prints the N Python functions with the most time of their own, under cProfile.
--dry needs no GPU: on this CPU, as on an H200, with launches and native products that allocate
their results and do nothing. What is left is Python and torch's bookkeeping; what CUDA, cuBLASLt
and the driver take on top is not in it, and torch's own layer, which would multiply, is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import json
import platform
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.casts import machine
from benchmarks.module_arms import Arm, Size, arms_of, inputs_of
from lowprec import ops
from lowprec.backends import scaled_mm, triton_kernels
from lowprec.backends.triton_kernels import fused
from lowprec.formats import FORMATS, Cast
from lowprec.hardware import NAMED

SIZES: Final = (
    Size("linear", 512, 512, 512),
    Size("norm_linear", 512, 512, 512),
    Size("mlp", 512, 512, 512),
)
RECIPES: Final = ("mxfp8-portable", "fp8-tensorwise", "mxfp8")
BLOCKS, STEPS = 21, 50


def compiled(arguments: tuple[Any, ...]) -> Any:
    """A kernel that does nothing, behind the launcher in Python that Triton would give it."""
    from triton.backends.nvidia import driver

    from lowprec.backends.triton_kernels.starting import Tiled

    description = {"swizzle": 3, "elem_size": 2, "elem_type": 8, "block_size": [], "fp4_padded": 0}
    tiled = [at for at, one in enumerate(arguments) if isinstance(one, Tiled)]
    signature = {at: "tensordesc" if at in tiled else "" for at in range(len(arguments))}
    nothing = functools.partial(lambda *given: None)
    run = object.__new__(driver.CudaLauncher)
    run.launch = driver.wrap_handle_tensordesc(nothing, signature, [description] * len(tiled))
    run.num_ctas, run.launch_cooperative_grid, run.launch_pdl = 1, False, False
    run.global_scratch_size = run.profile_scratch_size = 0
    run.global_scratch_align = run.profile_scratch_align = 1
    return SimpleNamespace(function=0, packed_metadata=(), run=run)


@contextlib.contextmanager
def dry() -> Iterator[None]:
    """The host's part of an H200 alone: kernels and native products are given and do nothing."""
    from triton.backends.nvidia import driver

    from lowprec.backends.triton_kernels import launch, norm_ops, pipelined, starting, streamed

    @functools.cache
    def sides(device: torch.device, left: str, right: str) -> Any:
        kinds = scaled_mm._kinds(NAMED["h200"], FORMATS[left], FORMATS[right])
        return tuple(scaled_mm._side(one, right=n == 1) for n, one in enumerate(kinds))

    def product(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
        return torch.empty((a.shape[0], b.shape[1]), dtype=rest[7], device=a.device)

    utilities = SimpleNamespace(fill_tma_descriptor=lambda *description: description)
    replaced = [
        (driver.triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace(utils=utilities))),
        (starting, "_direct", True),
        (starting, "_through_triton", lambda kernel, programs, given, more: compiled(given)),
        (starting, "_ready", {}),
        (starting, "_known", {}),
        (starting, "_repeats", lambda x: True),
        (torch.cuda, "current_device", lambda: -1),
        (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
        (launch, "may_pipeline", lambda x: True),
        (triton_kernels, "check_device", lambda x: None),
        *((one, "_major", lambda device: 9) for one in (pipelined, streamed)),
        *((one, "_processors", lambda device: 132) for one in (norm_ops, streamed)),
        (pipelined, "processors", lambda device: 132),
        (scaled_mm, "_sides", sides),
        (torch, "_scaled_mm_v2", product),
    ]
    with contextlib.ExitStack() as stack:
        for where, name, value in replaced:
            stack.enter_context(mock.patch.object(where, name, value, create=True))
        # What is decided for this machine stays neither here nor there.
        pipelined.decided.cache_clear()
        stack.callback(pipelined.decided.cache_clear)
        yield


def wait() -> None:
    """For the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def call_us(call: Callable[[], object], blocks: int) -> list[float]:
    """Microseconds of a call over each block of 50."""
    found = []
    for _ in range(blocks + 3):
        wait()
        start = time.perf_counter()
        for _ in range(STEPS):
            call()
        wait()
        found.append((time.perf_counter() - start) * 1e6 / STEPS)
    return found[3:]


def ops_of(device: str) -> dict[str, Callable[[], object]]:
    """What layers start in a step, each by itself, on 512 x 512 in bfloat16."""
    x, dy, both = (
        torch.zeros(512, n, dtype=torch.bfloat16, device=device) for n in (512, 512, 1024)
    )
    weight = torch.ones(512, dtype=torch.bfloat16, device=device)
    line, tile = Cast.parse("fp8_1x128"), Cast.parse("fp8_128x128")
    by_row, _ = triton_kernels.quantize_both(x, line, line)
    w, _ = triton_kernels.quantize_both(x, tile, tile)
    done = fused.normalize(x, None, weight=weight)
    gate, up = both.chunk(2, 1)
    return {
        "cast both ways": lambda: triton_kernels.quantize_both(x, line, line),
        "product": lambda: ops.matmul(by_row, w, backend="scaled_mm"),
        "norm and cast": lambda: fused.normalize(x, line, weight=weight),
        "norm again": lambda: fused.normalize_again(done, line, axis=-2, weight=weight),
        "norm backward": lambda: fused.normalize_backward(dy, done, weight=weight),
        "activation and cast": lambda: fused.activate(gate, up, line),
        "activation backward": lambda: fused.activate_halves_backward(dy, both),
    }


def profiled(arm: Arm, x: torch.Tensor, dy: torch.Tensor, top: int) -> None:
    """Print what takes the time of 200 steps."""
    seen = cProfile.Profile()
    seen.enable()
    for _ in range(200):
        arm.step(x, dy)
    seen.disable()
    pstats.Stats(seen).sort_stats("tottime").print_stats(top)


def line_of(arm: Arm, x: torch.Tensor, dy: torch.Tensor, blocks: int) -> dict[str, Any]:
    """Microseconds of a step of an arm, and of its parts."""
    times = call_us(lambda: arm.step(x, dy), blocks)
    fifths, median = statistics.quantiles(times, n=5), statistics.median(times)
    forward = statistics.median(call_us(lambda: arm.call(x), blocks))
    return {
        "arm": arm.name,
        "us": [round(one, 1) for one in (fifths[0], median, fifths[3])],
        "forward_us": round(forward, 1),
        "backward_us": round(median - forward, 1),
    }


def lines_of(chosen: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line an arm, then a line an op."""
    device, hardware = ("cpu", "h200") if chosen.dry else ("cuda", None)
    for size in SIZES:
        x, dy = inputs_of(size, device)
        base = None
        for arm in arms_of(
            size, chosen.recipes, device=device, hardware=hardware, peers=False, quick=True
        ):
            if not isinstance(arm, Arm) or "compiled" in arm.name:
                continue
            ours = arm.name.startswith("ours")
            if chosen.dry and not ours:
                continue
            line = {"module": size.kind, **line_of(arm, x, dy, chosen.blocks)}
            if not chosen.dry:
                base = base or line["us"][1]
                line["of_torch"] = round(line["us"][1] / base, 2)
            yield line
            if chosen.profile and ours:
                profiled(arm, x, dy, chosen.profile)
    for name, call in ops_of(device).items():
        yield {"op": name, "us": round(statistics.median(call_us(call, chosen.blocks)), 1)}


def shown(line: dict[str, Any]) -> str:
    """A line for a reader."""
    if "op" in line:
        return f"{line['op']:<24} {line['us']:8.1f} us"
    of_torch = f", {line['of_torch']:.2f}x of torch" if "of_torch" in line else ""
    parts = f"forward {line['forward_us']:.1f}, backward {line['backward_us']:.1f}"
    return f"{line['module']:<12} {line['arm']:<24} {line['us'][1]:8.1f} us ({parts}){of_torch}"


def main() -> None:
    """Measure, print a table and append JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES))
    parser.add_argument("--dry", action="store_true", help="the host alone, without a GPU")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="blocks of 50 calls")
    parser.add_argument("--profile", type=int, default=0, help="functions to print")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    chosen = parser.parse_args()
    if not chosen.dry and not torch.cuda.is_available():
        sys.exit("not measurable here: this machine has no CUDA device; --dry runs the host alone")
    where = {"dry": platform.platform(), "torch": torch.__version__} if chosen.dry else machine()
    torch.set_num_threads(1 if chosen.dry else torch.get_num_threads())
    with dry() if chosen.dry else contextlib.nullcontext():
        for line in lines_of(chosen):
            print(shown(line), flush=True)
            if chosen.out:
                with chosen.out.open("a") as file:
                    file.write(json.dumps(line | where) + "\n")


if __name__ == "__main__":
    main()

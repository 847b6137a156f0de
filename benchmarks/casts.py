"""Speed of the cast kernels on a GPU against the copy bandwidth of the same run, as JSON lines.

    python benchmarks/casts.py [--quick] [--peers] [--only NAME ...]

Every result is checked against the reference before it is timed; a wrong one ends the run. Times
are of single launches with outputs allocated, queued behind a pause so that the host is never
waited for, interleaved over repetitions. `of_copy` is bytes / median time over the copy bandwidth.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from lowprec.backends import emulated, reference, triton_kernels  # noqa: E402
from lowprec.backends.triton_kernels import fused  # noqa: E402
from lowprec.formats import Cast  # noqa: E402
from lowprec.tensor import QuantizedTensor  # noqa: E402

SHAPES = [(65536, 2048), (65536, 1024)]
WIDTHS = [256, 512, 4096, 8192, 100, 1000, 2880]
ELEMENTS = 1 << 27
PAUSE = 20_000_000  # clock cycles, about 10 ms


@dataclass
class Case:
    """One op at one shape: what to run, what it must read and write, and where it is checked."""

    op: str
    direction: str
    format: str
    backend: str
    run: Callable[[], Any]
    bytes: int


def size(found: Any) -> int:
    """Bytes of the tensors that an op returned, without padding."""
    if isinstance(found, QuantizedTensor):
        return sum(t.numel() * t.element_size() for t in (found.codes, found.scales))
    if isinstance(found, torch.Tensor):
        return found.numel() * found.element_size()
    if isinstance(found, fused.Normalized):
        return size(found.result) + size(found.rstd) + size(found.mean)
    return sum(size(one) for one in found) if isinstance(found, (tuple, list)) else 0


def same(got: QuantizedTensor, want: QuantizedTensor, what: str) -> None:
    """End the run unless codes and scales are equal."""
    equal = torch.equal(got.codes, want.codes) and torch.equal(got.scales, want.scales)
    if not equal:
        sys.exit(f"{what}: codes or scales differ from the reference; nothing is timed")


def checked(x: torch.Tensor, name: str) -> None:
    """Compare the casts of x with the reference on its first 4096 rows and 64 columns."""
    cast = Cast.parse(name)
    row, column = triton_kernels.quantize_both(x, cast, cast)
    head, left = x[:4096], x[:, :128]
    alone = triton_kernels.quantize(x, cast, axis=-1)
    down = triton_kernels.quantize(x, cast, axis=-2)
    law_r, law_c = (reference.quantize(t, cast, axis=a) for t, a in ((head, -1), (left, -2)))
    for one in (row, alone):
        part = QuantizedTensor(
            one.codes[:4096], one.scales[: len(law_r.scales)], cast.format, one.axis
        )
        same(part, law_r, f"{name} by row")
    for one in (column, down):
        part = QuantizedTensor(
            one.codes[:, :128], one.scales[:, : law_c.scales.shape[1]], cast.format, one.axis
        )
        same(part, law_c, f"{name} by column")


def casts_of(x: torch.Tensor, *, peers: bool) -> list[Case]:
    """The casts of x [rows, columns]."""
    mx, tile = Cast.parse("mxfp8"), Cast.parse("mxfp8_32x32")
    wide, square = Cast.parse("mxfp8_1x128"), Cast.parse("mxfp8_128x128")
    free = Cast.parse("fp8_rowwise")

    def one(cast: Cast, axis: int) -> Callable[[], Any]:
        return lambda: triton_kernels.quantize(x, cast, axis=axis)

    def both(cast: Cast) -> Callable[[], Any]:
        return lambda: triton_kernels.quantize_both(x, cast, cast)

    rows = [
        ("cast", "row", mx, one(mx, -1)),
        ("cast", "column", mx, one(mx, -2)),
        ("cast", "both", mx, both(mx)),
        ("cast", "row", tile, one(tile, -1)),
        ("cast", "both", tile, both(tile)),
        ("cast", "both", wide, both(wide)),
        ("cast", "both", square, both(square)),
        ("cast", "row", free, one(free, -1)),
        ("round trip", "row", mx, lambda: triton_kernels.round_trip(x, mx, axis=-1)),
    ]
    held = triton_kernels.quantize(x, mx, axis=-1)
    rows.append(
        ("dequantize", "row", mx, lambda: triton_kernels.dequantize(held, dtype=torch.bfloat16))
    )
    found = []
    for op, direction, cast, run in rows:
        read = size(held) if op == "dequantize" else size(x)
        written = run()
        shared = size(written[0].scales) if direction == "both" and cast is tile else 0
        found.append(Case(op, direction, str(cast), "triton", run, read + size(written) - shared))
    if peers:
        compiled = torch.compile(lambda t: emulated.quantize(t, mx, axis=-1))
        compiled(x)
        found.append(
            Case("cast", "row", "mxfp8", "torch.compile", lambda: compiled(x), found[0].bytes)
        )
    return found


def fused_of(x: torch.Tensor) -> list[Case]:
    """Norms and activations with the cast, and their backward."""
    mx = Cast.parse("mxfp8")
    cols = x.shape[1]
    weight, bias = (torch.randn(cols, device="cuda").bfloat16() for _ in range(2))
    other = torch.randn_like(x)
    rms = fused.normalize(x, mx, weight=weight)
    layer = fused.normalize(x, mx, weight=weight, bias=bias, centered=True)
    for done, centered in ((rms, False), (layer, True)):
        plain = fused.normalize(
            x, None, weight=weight, bias=bias if centered else None, centered=centered
        )
        same(done.result, reference.quantize(plain.result, mx, axis=-1), "norm")  # type: ignore[arg-type]
    gated = fused.activate(x, other, None)
    same(fused.activate(x, other, mx), reference.quantize(gated, mx, axis=-1), "gate")  # type: ignore[arg-type]
    rows: list[tuple[str, str, Callable[[], Any], int]] = [
        ("rmsnorm", "row", lambda: fused.normalize(x, mx, weight=weight), 1),
        (
            "layernorm",
            "row",
            lambda: fused.normalize(x, mx, weight=weight, bias=bias, centered=True),
            1,
        ),
        (
            "rmsnorm + residual",
            "row",
            lambda: fused.normalize(x, mx, weight=weight, residual=other),
            2,
        ),
        (
            "rmsnorm backward",
            "",
            lambda: fused.normalize_backward(other, rms, weight=weight),
            2,
        ),
        (
            "layernorm backward",
            "",
            lambda: fused.normalize_backward(other, layer, weight=weight, has_bias=True),
            2,
        ),
        ("silu gate", "row", lambda: fused.activate(x, other, mx), 2),
        ("gelu", "row", lambda: fused.activate(x, None, mx, kind="gelu"), 1),
        ("silu gate backward", "", lambda: fused.activate_backward(other, x, other), 3),
    ]
    found = []
    for op, direction, run, reads in rows:
        extra = size(x) if "residual" in op else 0
        total = reads * size(x) + size(run()) + extra
        found.append(Case(op, direction, "mxfp8" if direction else "", "triton", run, total))
    return found


def timed(cases: list[Case], repetitions: int) -> list[list[float]]:
    """Milliseconds of each case, interleaved."""
    times: list[list[float]] = [[] for _ in cases]
    for case in cases:
        for _ in range(2):
            case.run()
    for _ in range(repetitions):
        marks = []
        torch.cuda._sleep(PAUSE)
        for case in cases:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            case.run()
            end.record()
            marks.append((start, end))
        torch.cuda.synchronize()
        for one, (start, end) in zip(times, marks, strict=True):
            one.append(start.elapsed_time(end))
    return times


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    import triton

    query = "clocks.sm,clocks.mem,driver_version"
    clocks = subprocess.run(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    sources = sorted((ROOT / "lowprec" / "backends" / "triton_kernels").glob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    return {
        "gpu": torch.cuda.get_device_name(),
        "clocks_and_driver": clocks,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "kernels": digest[:16],
    }


def measure(rows: int, cols: int, arguments: argparse.Namespace) -> None:
    """Check and time everything at one shape, and print a line for each op."""
    torch.manual_seed(0)
    x = torch.randn(rows, cols, device="cuda").bfloat16()
    target = torch.empty_like(x)
    copy = Case("copy", "", "", "torch", lambda: target.copy_(x), 2 * size(x))
    for name in ("mxfp8", "mxfp8_32x32", "mxfp8_1x128", "fp8_rowwise"):
        checked(x, name)
    # Each group has a copy of its own among it: what is not right yet stops only its own group.
    report([copy, *casts_of(x, peers=arguments.peers)], [rows, cols], arguments)
    report([copy, *fused_of(x)], [rows, cols], arguments)


def report(cases: list[Case], shape: list[int], arguments: argparse.Namespace) -> None:
    """Time the cases and print a line for each."""
    if arguments.only:
        cases = [cases[0], *(one for one in cases if one.op in arguments.only)]
    facts = machine()
    times = timed(cases, 10 if arguments.quick else 30)
    speed = cases[0].bytes / statistics.median(times[0])
    for case, one in zip(cases, times, strict=True):
        fifths = statistics.quantiles(one, n=5)
        rate = case.bytes / statistics.median(one)
        line = {
            "op": case.op,
            "direction": case.direction,
            "format": case.format,
            "backend": case.backend,
            "shape": shape,
            "dtype": "bfloat16",
            "ms": [round(t, 5) for t in (fifths[0], statistics.median(one), fifths[3])],
            "gb_per_s": round(rate / 1e6, 1),
            "of_copy": round(rate / speed, 3),
        }
        print(json.dumps(line | facts), flush=True)


def main() -> None:
    """Read the arguments and measure every shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="10 repetitions, two shapes")
    parser.add_argument("--peers", action="store_true", help="time the compiled emulated cast too")
    parser.add_argument("--only", nargs="*", help="names of ops")
    arguments = parser.parse_args()
    shapes = list(SHAPES)
    if not arguments.quick:
        shapes += [(math.ceil(ELEMENTS / width), width) for width in WIDTHS]
    for rows, cols in shapes:
        measure(rows, cols, arguments)


if __name__ == "__main__":
    main()

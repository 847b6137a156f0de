"""Speed of the cast kernels on a GPU against the copy bandwidth of the same run, as JSON lines.

    python benchmarks/casts.py [--quick] [--peers] [--widths] [--only NAME ...] [--out FILE]

Every result is checked against the reference before it is timed; a wrong one ends the run. A time
is the mean of four launches in a row with outputs allocated, after one that is not timed, so that
each op, the copy too, finds in the cache what it leaves there itself; queued behind a pause so that
the host is never waited for, interleaved over repetitions. `of_copy` is bytes / median time over
the copy bandwidth, `bar` what is asked of it, `times_faster` the median of a peer over ours.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.cast_cases import Case, casts_of, checked, fused_of, peers_of, size  # noqa: E402

SHAPES = [(65536, 2048), (65536, 1024)]
WIDTHS = [256, 512, 4096, 8192, 100, 1000, 2880]
ELEMENTS = 1 << 27
PAUSE = 20_000_000  # clock cycles, about 10 ms
LAUNCHES = 4


def timed(cases: list[Case], repetitions: int, launches: int = 1) -> list[list[float]]:
    """Milliseconds of each case, interleaved; the mean of `launches` in a row after one more.

    Every repetition has its own order: what comes first finds another clock than what follows.
    """
    times: list[list[float]] = [[] for _ in cases]
    for case in cases:
        for _ in range(2):
            case.run()
    order = random.Random(0)
    for _ in range(repetitions):
        marks = {}
        torch.cuda._sleep(PAUSE)
        for number in order.sample(range(len(cases)), len(cases)):
            case = cases[number]
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if launches > 1:
                case.run()
            start.record()
            for _ in range(launches):
                case.run()
            end.record()
            marks[number] = start, end
        torch.cuda.synchronize()
        for number, (start, end) in marks.items():
            times[number].append(start.elapsed_time(end) / launches)
    return times


def said(*command: str) -> str:
    """What a command prints, or nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    except OSError:
        return ""
    return done.stdout.strip()


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    import triton

    query = "--query-gpu=clocks.sm,clocks.mem,driver_version"
    sources = sorted((ROOT / "lowprec" / "backends" / "triton_kernels").glob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    return {
        "gpu": torch.cuda.get_device_name(),
        "clocks_and_driver": said("nvidia-smi", query, "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": said("git", "rev-parse", "HEAD"),
        "kernels": digest[:16],
    }


def measure(rows: int, cols: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Check and time everything at one shape: a line for each op."""
    torch.manual_seed(0)
    x = torch.randn(rows, cols, device="cuda").bfloat16()
    target = torch.empty_like(x)
    copy = Case("copy", "", "", lambda: target.copy_(x), 2 * size(x), backend="torch")
    for name in ("mxfp8", "mxfp8_32x32", "mxfp8_1x128", "fp8_rowwise"):
        checked(x, name)
    lines = []
    # Each group has a copy of its own among it: what is not right yet stops only its own group.
    for group in (casts_of, fused_of):
        cases = list(group(x))
        if arguments.peers:
            ours = {case.key for case in cases}
            cases += [peer for peer in peers_of(x) if peer.key in ours]
        lines += timed_lines([copy, *cases], [rows, cols], arguments)
    return lines


def timed_lines(
    cases: list[Case], shape: list[int], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Time the cases, the first of which is the copy."""
    if arguments.only:
        cases = [cases[0], *(one for one in cases if one.op in arguments.only)]
    facts = machine()
    times = timed(cases, 10 if arguments.quick else 30, LAUNCHES)
    medians = [statistics.median(one) for one in times]
    own = {c.key: m for c, m in zip(cases, medians, strict=True) if c.backend == "triton"}
    speed = cases[0].bytes / medians[0]
    found = []
    for case, one, median in zip(cases, times, medians, strict=True):
        fifths = statistics.quantiles(one, n=5)
        line: dict[str, Any] = {
            "op": case.op,
            "direction": case.direction,
            "format": case.format,
            "backend": case.backend,
            "shape": shape,
            "dtype": "bfloat16",
            "launches": LAUNCHES,
            "ms": [round(t, 5) for t in (fifths[0], median, fifths[3])],
        }
        if case.bytes:
            line["gb_per_s"] = round(case.bytes / median / 1e6, 1)
            line["of_copy"] = round(case.bytes / median / speed, 3)
            line["bar"] = case.bar
        else:
            line["times_faster"] = round(median / own[case.key], 2)
        found.append(line | facts)
    return found


def table(lines: Iterable[dict[str, Any]]) -> str:
    """A short table of the lines."""
    rows = []
    for line in lines:
        what = " ".join(filter(None, (line["op"], line["direction"], line["format"])))
        shape = "x".join(map(str, line["shape"]))
        if "of_copy" in line:
            bar = f" (bar {line['bar']})" if line["bar"] else ""
            says = f"{line['of_copy']:.3f} of copy{bar}"
        else:
            says = f"ours {line['times_faster']:.2f}x faster than {line['backend']}"
        rows.append(f"{shape:>12} {what:32} {line['ms'][1]:8.4f} ms  {says}")
    return "\n".join(rows)


def main() -> None:
    """Read the arguments and measure every shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="10 repetitions")
    parser.add_argument("--peers", action="store_true", help="time others' ways as well")
    parser.add_argument("--widths", action="store_true", help="2^27 elements at other widths too")
    parser.add_argument("--only", nargs="*", help="names of ops")
    parser.add_argument("--out", type=Path, help="file for the JSON lines; else they are printed")
    arguments = parser.parse_args()
    shapes = list(SHAPES)
    if arguments.widths:
        shapes += [(math.ceil(ELEMENTS / width), width) for width in WIDTHS]
    for rows, cols in shapes:
        lines = measure(rows, cols, arguments)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        if arguments.out is None:
            print(text, end="", flush=True)
            continue
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(text)
        print(table(lines), flush=True)


if __name__ == "__main__":
    main()

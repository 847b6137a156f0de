"""Speed of the pass before attention, and of the kernels that stream, on a GPU, as JSON lines.

    python benchmarks/attention_front.py [--quick] [--tune] [--out FILE]

Norm and rotary embedding of q and k (131072 tokens of 128 jagged sequences, 8 heads), in bf16 and
into 8 bits with v, against the same in PyTorch, eager and compiled; each is compared with the law
first. --tune times candidate shapes of the kernels for short keys, blocks and few queries, through
the kernels themselves, whether they are proven or not. `of_copy` is the bytes that must be read and
written over median time and the copy bandwidth of the run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.attention import copy_speed  # noqa: E402
from benchmarks.attention_cases import NATIVE, Problem, drawn_lengths, problems  # noqa: E402
from benchmarks.cast_cases import Case  # noqa: E402
from benchmarks.casts import machine, timed  # noqa: E402
from lowprec.attention_front import Front, apply_front, places  # noqa: E402
from lowprec.attention_policy import ATTENTION_BF16  # noqa: E402
from lowprec.backends.triton_kernels import (  # noqa: E402
    attention_block_ops,
    attention_cross_ops,
    attention_ops,
    attention_project_ops,
)
from lowprec.rotary import Rotary  # noqa: E402

FORMS = {
    "norm, rotary": Front(1e-6, Rotary()),
    "norm, rotary of neighbours": Front(1e-6, Rotary(interleaved=True)),
    "norm": Front(1e-6, None),
}
HEADS = 8


def given(problem: Problem, policy: Any = ATTENTION_BF16) -> Any:
    """The call as the kernels take it."""
    q, k, v, _, cu_q, cu_k = problem.tensors
    return attention_ops.given((q, k, v), (cu_q, cu_k), None, problem.call, policy)


def fronts(problem: Problem, form: str) -> Iterator[Case]:
    """Ours and PyTorch's ways from the projection to what attention reads."""
    front, (q, k, v, do, cu_q, cu_k) = FORMS[form], problem.tensors
    weights = (torch.rand(problem.width, device="cuda"), torch.rand(problem.width, device="cuda"))
    at = places(cu_q, cu_k, (q.shape[0], k.shape[0]))
    one, eight = given(problem), given(problem, NATIVE)

    def law() -> list[torch.Tensor]:
        return [apply_front(front, *part) for part in zip((q, k), weights, at, strict=True)]

    for got, want in zip(attention_project_ops.fronted(one, front, weights), law(), strict=True):
        if not torch.allclose(got.float(), want.float(), rtol=2.0**-7, atol=1e-6):
            raise SystemExit(f"{form}, head dim {problem.width}: not what the law says")
    size, name = q.nbytes, f"front, {form}"
    yield Case(
        name, "", "bf16", lambda: attention_project_ops.fronted(one, front, weights), 4 * size
    )
    yield Case(name, "", "bf16", law, 4 * size, backend="eager")
    yield Case(name, "", "bf16", torch.compile(law), 4 * size, backend="compiled")
    cast: Callable[[], Any] = lambda: attention_project_ops.encoded(  # noqa: E731
        eight, front, weights, "rceil"
    )
    yield Case(name, "", "e4m3", cast, 3 * size + 3 * size // 2)
    back: Callable[[], Any] = lambda: attention_project_ops.gradients(  # noqa: E731
        one, (do, v), front, weights
    )
    yield Case(name, "backward", "bf16", back, 6 * size)


def streams(problem: Problem) -> Iterator[tuple[Case, list[int]]]:
    """Candidate shapes of the kernel that streams this problem, forward."""
    one = given(problem)
    blocks: Any = attention_block_ops
    ops: Any = attention_ops
    o, lse = torch.empty_like(one.q), torch.empty(HEADS, one.tokens, device="cuda")

    def case(kernel: str, run: Callable[[], Any]) -> Case:
        return Case(kernel, "forward", problem.name, run, problem.bytes("forward"))

    if problem.name == "cross":
        for shape in (
            (64, 16, 4, 4),
            (64, 8, 4, 4),
            (64, 32, 4, 4),
            (64, 16, 3, 4),
            (128, 8, 3, 8),
        ):
            attention_cross_ops.SHAPES[problem.width] = attention_cross_ops.Shape(*shape)
            yield case("attend_cross", lambda: attention_cross_ops.forward(one, o, lse)), [*shape]
    elif problem.name == "blocks":
        for run, stages in ((8, 2), (4, 2), (16, 2), (8, 3), (32, 2)):
            blocks.RUN, blocks.STAGES = run, stages
            yield case("attend_blocks", lambda: blocks.forward(one, o, lse)), [run, stages]
    else:
        for chunk, stages in ((2048, 3), (1024, 3), (4096, 3), (2048, 4), (8192, 3)):
            ops.CHUNK = chunk
            ops.FORWARD_FEW[problem.width] = attention_ops.Shape(64, 64, stages, 4)
            yield case("attend, few", lambda: ops._forward(one, o, lse)), [chunk, stages]


def measured(*, quick: bool) -> Iterator[tuple[Case, dict[str, Any], float]]:
    """Every case with what its line says besides, and its times, one problem after the other."""
    repetitions = 7 if quick else 20
    lengths = drawn_lengths("uniform", 128, 100, 1948)
    for width in (128,) if quick else (64, 128):
        problem = Problem("jagged", lengths, lengths, HEADS, width)
        for form in FORMS:
            cases = list(fronts(problem, form))
            for case, times in zip(cases, timed(cases, repetitions), strict=True):
                yield case, {"head_dim": width, "tokens": sum(lengths)}, statistics.median(times)


def tuned() -> Iterator[tuple[Case, dict[str, Any], float]]:
    """The same of candidate shapes; each is run alone, because shapes are those of a module."""
    for problem in problems(quick=True):
        if problem.bound == "memory":
            for case, shape in streams(problem):
                facts = {"problem": problem.name, "head_dim": problem.width, "shape": shape}
                yield case, facts, statistics.median(timed([case], 10)[0])


def main() -> None:
    """Read the arguments, measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="head dim 128, 7 repetitions")
    parser.add_argument("--tune", action="store_true", help="time candidate shapes instead")
    parser.add_argument("--out", type=Path, help="file for the JSON lines; else they are printed")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    speed = copy_speed(10)
    facts = machine() | {"copy_tb_per_s": round(speed / 1e9, 3)}
    for case, more, median in tuned() if arguments.tune else measured(quick=arguments.quick):
        line = {
            "op": case.op,
            "direction": case.direction,
            "format": case.format,
            "backend": case.backend,
            **more,
            "ms": round(median, 5),
            "of_copy": round(case.bytes / median / speed, 3),
        }
        text = json.dumps(line | facts)
        if arguments.out is not None:
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(text + "\n")
            text = json.dumps(line)
        print(text, flush=True)


if __name__ == "__main__":
    main()

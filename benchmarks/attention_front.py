"""Speed of the pass before attention, alone and with all around it, on a GPU, as JSON lines.

    python benchmarks/attention_front.py [--quick] [--tune {front,streams}] [--out FILE]

"front": norm and rotary embedding of q and k (131072 tokens of 128 jagged sequences, 8 heads), in
bf16 and into 8 bits with v, against the same in PyTorch, eager and compiled, of sines and cosines
that are there. "whole": from the tokens through the projection to q, k, v (torch, bf16) to what
attention gives, forward: front and attention by kernels in 8 bits and in bf16, against the same
projection, a front in PyTorch and the attention of our bf16 kernels, of varlen_attn, of cuDNN.
All are compared with the law first. --tune times candidate shapes, through the kernels themselves,
whether they are proven or not: front, of the pass into 8 bits and of the cast of v, each compared
with the shape that is in use, bit by bit; streams, of the kernels for short keys, blocks and few
queries. `of_copy` is the bytes that must be read and written over median time and the copy
bandwidth of the run; `tflops` counts the projection and two products; `times_faster` is a median
over that of 8 bits, ours.
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
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

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
    attention_fp8_ops,
    attention_fronted,
    attention_ops,
    attention_project_ops,
)
from lowprec.rotary import Rotary, steps_of, waves  # noqa: E402

FORMS = {
    "norm, rotary": Front(1e-6, Rotary()),
    "norm, rotary of neighbours": Front(1e-6, Rotary(interleaved=True)),
    "norm": Front(1e-6, None),
}
HEADS = 8
# Tokens of a tile, heads of a program, stages, warps; most registers of a thread (0: no bound).
# Bounded so two programs of 8 warps fit on a multiprocessor, with about 30 registers spilled.
SHAPES = (
    ((128, 8, 3, 16), 0),
    ((128, 4, 3, 16), 0),
    ((128, 8, 4, 16), 0),
    ((128, 8, 3, 32), 0),
    ((128, 8, 3, 8), 128),
    ((128, 4, 3, 8), 128),
    ((128, 8, 2, 8), 128),
)
Pair = tuple[torch.Tensor, torch.Tensor]
Line = tuple[Case, dict[str, Any], float]


def given(problem: Problem, policy: Any = ATTENTION_BF16) -> Any:
    """The call as the kernels take it."""
    q, k, v, _, cu_q, cu_k = problem.tensors
    return attention_ops.given((q, k, v), (cu_q, cu_k), None, problem.call, policy)


def weights_of(problem: Problem) -> Pair:
    """Those of the norms of q and k."""
    return torch.rand(problem.width, device="cuda"), torch.rand(problem.width, device="cuda")


def in_pytorch(problem: Problem, front: Front, weights: Pair) -> Callable[[Pair], list[Any]]:
    """The front of q and k [T, H, D] as a model writes it, of tables of sines and cosines."""
    rotary, (q, k, *_, cu_q, cu_k) = front.rotary, problem.tensors
    tables: list[Any] = [None, None]
    if rotary is not None:
        steps = torch.tensor(steps_of(rotary.base, rotary.turning(problem.width)), device="cuda")
        at = places(cu_q, cu_k, (len(q), len(k)))
        tables = [waves(one.long()[:, None, None] * steps) for one in at]

    def one(x: torch.Tensor, weight: torch.Tensor, table: Any) -> torch.Tensor:
        wide = functional.rms_norm(x.float(), (x.shape[2],), weight, front.eps)
        if rotary is None:
            return wide.to(x.dtype)
        a, b = (wide[..., 0::2], wide[..., 1::2]) if rotary.interleaved else wide.chunk(2, -1)
        sine, cosine = table
        pair = (a * cosine - b * sine, b * cosine + a * sine)
        turned = torch.stack(pair, -1).flatten(-2) if rotary.interleaved else torch.cat(pair, -1)
        return turned.to(x.dtype)

    return lambda pair: [one(*of) for of in zip(pair, weights, tables, strict=True)]


def compiled(run: Callable[[Pair], list[Any]]) -> Callable[[Pair], list[Any]]:
    """The same by torch.compile, for these shapes alone and whatever was compiled before."""
    torch.compiler.reset()
    return torch.compile(run, dynamic=False)


def fronts(problem: Problem, form: str, *, quick: bool) -> Iterator[Case]:
    """Ours and PyTorch's ways from the projection to what attention reads."""
    front, (q, k, v, do, cu_q, cu_k) = FORMS[form], problem.tensors
    weights, at = weights_of(problem), places(cu_q, cu_k, (q.shape[0], k.shape[0]))
    one, eight = given(problem), given(problem, NATIVE)
    plain = in_pytorch(problem, front, weights)
    want = [apply_front(front, *part) for part in zip((q, k), weights, at, strict=True)]
    for way in (attention_project_ops.fronted(one, front, weights), plain((q, k))):
        for got, wanted in zip(way, want, strict=True):
            if not torch.allclose(got.float(), wanted.float(), rtol=2.0**-7, atol=1e-5):
                raise SystemExit(f"{form}, head dim {problem.width}: not what the law says")
    size, name = q.nbytes, f"front, {form}"
    yield Case(
        name, "", "bf16", lambda: attention_project_ops.fronted(one, front, weights), 4 * size
    )
    yield Case(name, "", "bf16", lambda: plain((q, k)), 4 * size, backend="eager")
    if not quick:
        fast = compiled(plain)
        yield Case(name, "", "bf16", lambda: fast((q, k)), 4 * size, backend="compiled")
    cast: Callable[[], Any] = lambda: attention_project_ops.encoded(  # noqa: E731
        eight, front, weights, "rceil"
    )
    yield Case(name, "", "e4m3", cast, 3 * size + 3 * size // 2)
    back: Callable[[], Any] = lambda: attention_project_ops.gradients(  # noqa: E731
        one, (do, v), front, weights
    )
    yield Case(name, "backward", "bf16", back, 6 * size)


def attentions(problem: Problem) -> Iterator[tuple[str, Callable[..., torch.Tensor]]]:
    """Ways from q, k and v that are normalized and turned to what attention gives, in bf16."""
    from torch.nn.attention.varlen import varlen_attn

    cu_q, cu_k = problem.tensors[4:]
    longest = max(problem.queries), max(problem.keys)
    how: dict[str, Any] = {"call": problem.call, "policy": ATTENTION_BF16, "bias": None}
    yield "triton", lambda *qkv: attention_ops.attention_forward(*qkv, cu_q, cu_k, **how)[0]
    yield "varlen_attn", lambda *qkv: varlen_attn(*qkv, cu_q, cu_k, *longest)
    batch = len(problem.queries)

    def dense(*qkv: torch.Tensor) -> torch.Tensor:
        parts = [t.unflatten(0, (batch, -1)).transpose(1, 2) for t in qkv]
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(0, 1)

    if len(set(problem.queries)) == 1:
        yield "cuDNN", dense


def whole(problem: Problem, form: str) -> list[Case]:
    """From tokens [T, H D] to what attention gives [T, H, D]: ours, then with parts of others.

    Every one is compared with the parts in PyTorch and our attention in bf16, and that is compared
    with others' attention.
    """
    front, weights, heads, width = FORMS[form], weights_of(problem), problem.heads, problem.width
    cu_q, cu_k = problem.tensors[4:]
    model = heads * width
    x = torch.randn(sum(problem.queries), model, device="cuda").bfloat16()
    weight = (torch.randn(3 * model, model, device="cuda") * model**-0.5).bfloat16()
    plain = in_pytorch(problem, front, weights)
    fast = compiled(plain)

    def projected() -> tuple[torch.Tensor, ...]:
        return functional.linear(x, weight).view(-1, 3, heads, width).unbind(1)

    def ours(policy: Any) -> torch.Tensor:
        how: dict[str, Any] = {"front": front, "call": problem.call, "policy": policy, "bias": None}
        return attention_fronted.forward((*projected(), cu_q, cu_k), weights, **how)[0]

    def parts(turn: Any, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        q, k, v = projected()
        return attend(*turn((q, k)), v)

    ways = dict(attentions(problem))
    runs: dict[str, Callable[[], torch.Tensor]] = {
        "front and attention e4m3": lambda: ours(NATIVE),
        "front and attention bf16": lambda: ours(ATTENTION_BF16),
        "front eager, attention bf16": lambda: parts(plain, ways["triton"]),
    }
    for name, attend in ways.items():
        runs[f"front compiled, {name}"] = lambda attend=attend: parts(fast, attend)
    want = runs["front eager, attention bf16"]().double()
    found = []
    for name, run in runs.items():
        try:
            got = run()
        except RuntimeError:
            if "cuDNN" in name:  # Which has no kernel for every layout.
                continue
            raise
        error = float((got.double() - want).norm() / want.norm())
        if not error < (0.1 if "e4m3" in name else 2e-2):
            raise SystemExit(f"{problem.name}, {form}: {name} is wrong, relative error {error:.4f}")
        found.append(Case(f"whole, {form}", "forward", "", run, 0, name))
    return found


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


def exact(codes: Any, problem: Problem) -> list[torch.Tensor]:
    """What encoded wrote: codes of tokens, and scales of the tiles that there are."""
    cu = problem.tensors[5].tolist()
    tiles = [cu[b] // 128 + b + t for b, n in enumerate(problem.keys) for t in range(-(-n // 128))]
    places, tokens = torch.tensor(tiles, device="cuda"), cu[-1]
    scales = [one[:, places] for one in (codes.scales_q, codes.scales_k, codes.scales_v)]
    return [codes.q[:tokens], codes.k[:tokens], codes.v[:, places], *scales]


def front_shapes(problem: Problem, form: str) -> Iterator[tuple[Case, list[int]]]:
    """Candidate shapes of the pass into 8 bits: of q and k with v, then of v alone."""
    front, weights, one = FORMS[form], weights_of(problem), given(problem, NATIVE)
    ops: Any = attention_project_ops
    size, constants = problem.tensors[0].nbytes, ops._constants

    def encoded() -> Any:
        return ops.encoded(one, front, weights, "rceil", turn="for registers")

    def checked(shape: list[int]) -> None:
        for got, want in zip(exact(encoded(), problem), wanted, strict=True):
            if not torch.equal(got, want):
                raise SystemExit(f"{form}, {shape}: other bits than those of the shape in use")

    wanted = exact(encoded(), problem)
    for shape, registers in SHAPES:
        ops.CAST[problem.width] = ops.Shape(*shape)
        bound = {"maxnreg": registers} if registers else {}
        ops._constants = lambda *of, bound=bound: constants(*of) | bound
        checked([*shape, registers])
        case = Case(f"front, {form}", "forward", "e4m3", encoded, 3 * size + 3 * size // 2)
        yield case, [*shape, registers]
    ops._constants = constants
    of_v: Any = attention_fp8_ops
    for warps in (8, 16, of_v.WARPS):
        of_v.WARPS = warps
        checked([warps])
        alone: Callable[[], Any] = lambda: of_v.encode(  # noqa: E731
            one.v, one.cu_k, "rceil", turn="for registers"
        )
        yield Case("v", "forward", "e4m3", alone, 3 * size // 2), [warps]


def measured(*, quick: bool) -> Iterator[Line]:
    """Every case with what its line says besides, and its times, one problem after the other."""
    repetitions = 7 if quick else 20
    forms = list(FORMS)[: 2 if quick else 3]
    lengths, dense = drawn_lengths("uniform", 128, 100, 1948), [4096] * 16
    for width in (128,) if quick else (64, 128):
        problem = Problem("jagged", lengths, lengths, HEADS, width)
        for form in forms:
            cases = list(fronts(problem, form, quick=quick))
            for case, times in zip(cases, timed(cases, repetitions), strict=True):
                yield case, {"head_dim": width, "tokens": sum(lengths)}, statistics.median(times)
    for problem in (
        Problem("jagged", lengths, lengths, HEADS, 128),
        Problem("dense", dense, dense, 2 * HEADS, 128),
    ):
        for form in forms[:1] if quick else forms[:2]:
            yield from measured_whole(problem, form, repetitions)


def measured_whole(problem: Problem, form: str, repetitions: int) -> Iterator[Line]:
    """All ways through one problem."""
    cases = whole(problem, form)
    medians = [statistics.median(times) for times in timed(cases, repetitions)]
    tokens, model = sum(problem.queries), problem.heads * problem.width
    flops = 6.0 * tokens * model * model + problem.flops("forward")
    facts = {"problem": problem.name, "head_dim": problem.width, "tokens": tokens}
    for case, median in zip(cases, medians, strict=True):
        speeds = {
            "tflops": round(flops / median / 1e9, 1),
            "times_faster": round(median / medians[0], 3),
        }
        yield case, facts | speeds, median


def tuned(which: str) -> Iterator[Line]:
    """The same of candidate shapes; each is run alone, because shapes are those of a module."""
    lengths = drawn_lengths("uniform", 128, 100, 1948)
    if which == "front":
        pairs = [(Problem("jagged", lengths, lengths, HEADS, 128), next(iter(FORMS)))]
    else:
        pairs = [(one, "") for one in problems(quick=True) if one.bound == "memory"]
    for problem, form in pairs:
        for case, shape in front_shapes(problem, form) if form else streams(problem):
            facts = {"problem": problem.name, "head_dim": problem.width, "shape": shape}
            yield case, facts, statistics.median(timed([case], 10)[0])


def main() -> None:
    """Read the arguments, measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer forms, 7 repetitions")
    parser.add_argument(
        "--tune", choices=("front", "streams"), help="time candidate shapes instead"
    )
    parser.add_argument("--out", type=Path, help="file for the JSON lines; else they are printed")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    speed = copy_speed(10)
    facts = machine() | {"copy_tb_per_s": round(speed / 1e9, 3)}
    lines = tuned(arguments.tune) if arguments.tune else measured(quick=arguments.quick)
    for case, more, median in lines:
        line = {
            "op": case.op,
            "direction": case.direction,
            "format": case.format,
            "backend": case.backend,
            **more,
            "ms": round(median, 5),
        }
        if case.bytes:
            line["of_copy"] = round(case.bytes / median / speed, 3)
        text = json.dumps(line | facts)
        if arguments.out is not None:
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(text + "\n")
            text = json.dumps(line)
        print(text, flush=True)


if __name__ == "__main__":
    main()

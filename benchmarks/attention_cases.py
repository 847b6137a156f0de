"""What benchmarks/attention.py times: shapes, our attention, and the peers of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attention_sqnr import policies
from lowprec.attention_call import AttentionCall, Mask
from lowprec.attention_policy import ATTENTION_BF16, AttentionPolicy
from lowprec.backends.triton_kernels import attention_ops, attention_stream_ops

Lengths = list[int]
Run = Callable[[], Any]


@dataclass
class Problem:
    """One shape: lengths of the sequences, heads, head dim, and how keys are seen.

    bound: what its speed is measured by, "compute" or "memory".
    """

    name: str
    queries: Lengths
    keys: Lengths
    heads: int = 8
    width: int = 64
    mask: Mask = field(default_factory=Mask)
    activation: str = "softmax"
    bound: str = "compute"

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """q, k, v, do, cu_q, cu_k."""
        generator = torch.Generator("cuda").manual_seed(1)

        def drawn(count: int) -> torch.Tensor:
            shape = (count, self.heads, self.width)
            return torch.randn(shape, device="cuda", generator=generator).bfloat16()

        tq, tk = sum(self.queries), sum(self.keys)
        ends = [
            torch.tensor([0, *torch.tensor(one).cumsum(0).tolist()], dtype=torch.int32).cuda()
            for one in (self.queries, self.keys)
        ]
        if self.queries == self.keys:
            ends[1] = ends[0]
        return drawn(tq), drawn(tk), drawn(tk), drawn(tq), *ends

    @property
    def call(self) -> AttentionCall:
        """The call, with the usual scale."""
        activation: Any = self.activation
        return AttentionCall(activation, self.mask, self.width**-0.5)

    @cached_property
    def pairs(self) -> float:
        """Queries times the keys that each sees."""
        if self.mask.kind == "none":
            return float(sum(a * b for a, b in zip(self.queries, self.keys, strict=True)))
        return float(
            sum(
                int(seen(self.mask, rows, cols).sum())
                for rows, cols in zip(self.queries, self.keys, strict=True)
            )
        )

    def flops(self, direction: str) -> float:
        """Of two products forward, of five backward."""
        return (4.0 if direction == "forward" else 10.0) * self.pairs * self.heads * self.width

    def bytes(self, direction: str) -> int:
        """q, k, v, o forward; those, do and three gradients backward."""
        tq, tk = sum(self.queries), sum(self.keys)
        rows = 2 * (tq + tk) if direction == "forward" else 4 * (tq + tk)
        return 2 * rows * self.heads * self.width


def seen(mask: Mask, rows: int, cols: int) -> torch.Tensor:
    """Which keys each query sees, bool [rows, cols]."""
    i = torch.arange(rows, device="cuda").unsqueeze(1)
    j = torch.arange(cols, device="cuda")
    p = i + (cols - rows)
    if mask.kind == "causal":
        return j <= p
    if mask.kind == "window":
        return (j >= p - mask.left) & (j <= p + mask.right)
    if mask.kind == "blocks":
        return i // mask.size == j // mask.size
    return (j >= 0).expand(rows, cols)


NATIVE = policies()["fp8-attention"]
"""The recipe: S and dP of codes backward, dV, dQ and dK in bf16."""
DP_BF16 = policies()["fp8-attention, backward rounded"]
"""All but S bf16 backward, of the operands that the forward pass read."""


def ours(problem: Problem, policy: AttentionPolicy = ATTENTION_BF16) -> tuple[Run, Run]:
    """Forward and backward of our kernels, casts inside."""
    q, k, v, do, cu_q, cu_k = problem.tensors
    how: dict[str, Any] = {"call": problem.call, "policy": policy, "bias": None}
    o, lse = attention_ops.attention_forward(q, k, v, cu_q, cu_k, **how)
    return (
        lambda: attention_ops.attention_forward(q, k, v, cu_q, cu_k, **how),
        lambda: attention_ops.attention_backward(do, q, k, v, o, lse, cu_q, cu_k, **how)[:3],
    )


def of_codes(problem: Problem) -> Run:
    """The forward pass alone, of codes that are there: what a projection that casts leaves.

    Ends the run unless it has the bits of the one that casts.
    """
    q, k, v, _, cu_q, cu_k = problem.tensors
    one = attention_ops.given((q, k, v), (cu_q, cu_k), None, problem.call, NATIVE)
    o, lse = torch.empty_like(one.q), torch.empty(q.shape[1], len(q), device="cuda")
    qkv = attention_stream_ops.sources(one, one.native)
    run = lambda: attention_stream_ops.attend(one, one.native, qkv, o, lse)  # noqa: E731
    run()
    if not torch.equal(o, ours(problem, NATIVE)[0]()[0]):
        raise SystemExit(f"{problem.name}: attention of codes is not the one that casts")
    return run


def check(problem: Problem, policy: AttentionPolicy = ATTENTION_BF16) -> dict[str, float]:
    """Relative errors against float64 on the shortest and the longest sequence; ends the run if
    one is above what attention in bf16, or with 3 bits of mantissa, has.
    """
    forward, backward = ours(problem, policy)
    o, (dq, dk, dv) = forward()[0], backward()
    q, k, v, do, cu_q, cu_k = problem.tensors
    order = sorted(range(len(problem.queries)), key=lambda b: problem.keys[b])
    found: dict[str, float] = {}
    for b in {order[0], order[-1]}:
        rows, cols = (slice(int(cu[b]), int(cu[b + 1])) for cu in (cu_q, cu_k))
        for head in {0, problem.heads - 1}:
            leaves = [
                t[part, head].double().requires_grad_()
                for t, part in ((q, rows), (k, cols), (v, cols))
            ]
            want = exact(problem, *leaves)
            grads = torch.autograd.grad(want, leaves, do[rows, head].double())
            pairs = zip(
                ("o", "dq", "dk", "dv"),
                (o[rows, head], dq[rows, head], dk[cols, head], dv[cols, head]),
                (want, *grads),
                strict=True,
            )
            for name, got, wanted in pairs:
                error = (got.double() - wanted).norm() / wanted.norm().clamp_min(1e-30)
                found[name] = max(found.get(name, 0.0), float(error))
    if not all(error < (0.1 if policy.quantizes else 1e-2) for error in found.values()):
        raise SystemExit(f"{problem.name}: wrong, relative errors {found}")
    return found


def exact(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of one head of one sequence in float64."""
    s = q @ k.T * problem.call.scale
    visible = seen(problem.mask, len(q), len(k))
    if problem.activation == "softmax":
        return s.masked_fill(~visible, -math.inf).softmax(-1) @ v
    act = functional.gelu if problem.activation == "gelu" else functional.silu
    return act(s).masked_fill(~visible, 0) @ v


def peers(problem: Problem) -> Iterator[tuple[str, Run, Run]]:
    """Name, forward and backward of others' ways to the same result."""
    if problem.activation != "softmax":
        yield from _padded_activation(problem)
        return
    if problem.mask.kind in ("none", "causal", "window"):
        yield _varlen(problem)
    if problem.mask.kind == "none":
        name = "" if len(set(problem.queries)) == len(set(problem.keys)) == 1 else "padded "
        yield from _sdpa(problem, len(problem.queries), name)
    if problem.mask.kind == "blocks":
        yield from _sdpa(problem, sum(problem.queries) // problem.mask.size, "cut ")


def _backward(o: torch.Tensor, leaves: list[torch.Tensor], do: torch.Tensor) -> Run:
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


def _varlen(problem: Problem) -> tuple[str, Run, Run]:
    from torch.nn.attention.varlen import varlen_attn

    *qkv, do, cu_q, cu_k = problem.tensors
    leaves = [t.detach().requires_grad_() for t in qkv]
    longest = max(problem.queries), max(problem.keys)
    mask = problem.mask
    windows = {"none": (-1, -1), "causal": (-1, 0), "window": (mask.left, mask.right)}
    how: dict[str, Any] = {}
    if mask.kind != "none":
        how["window_size"] = windows[mask.kind]

    def forward(some: list[torch.Tensor]) -> Any:
        return varlen_attn(*some, cu_q, cu_k, *longest, **how)

    return "varlen_attn", lambda: forward(qkv), _backward(forward(leaves), leaves, do)


def _sdpa(problem: Problem, batch: int, name: str) -> Iterator[tuple[str, Run, Run]]:
    """SDPA on [batch, heads, length, width]; jagged sequences padded to the longest."""
    tensors = problem.tensors[:4]
    whole = not name.startswith("padded")

    def dense(t: torch.Tensor, longest: int) -> torch.Tensor:
        if whole:
            return t.view(batch, -1, *t.shape[1:]).transpose(1, 2).contiguous()
        shape = (batch, problem.heads, longest, problem.width)
        return torch.randn(shape, device="cuda").bfloat16()

    longest = [max(problem.queries), max(problem.keys), max(problem.keys), max(problem.queries)]
    if not whole and batch * longest[0] * longest[1] > 8 * problem.pairs:
        return
    *qkv, do = (dense(t, one) for t, one in zip(tensors, longest, strict=True))
    leaves = [t.detach().requires_grad_() for t in qkv]
    kinds = (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("FA2", SDPBackend.FLASH_ATTENTION))
    for label, backend in kinds:

        def forward(some: list[torch.Tensor], backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(*some)

        try:
            o = forward(leaves)
        except RuntimeError:
            continue
        run: Run = lambda forward=forward: forward(qkv)  # noqa: E731
        yield f"{name}{label}", run, _backward(o, leaves, do)


def _padded_activation(problem: Problem) -> Iterator[tuple[str, Run, Run]]:
    """Compiled eager PyTorch on inputs padded to the longest sequence."""
    batch, act = len(problem.queries), problem.activation
    longest, scale = max(problem.queries), problem.call.scale
    if batch * problem.heads * longest * longest >= 1 << 32:
        return

    @torch.compile
    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        s = q @ k.mT * scale
        return (functional.gelu(s) if act == "gelu" else functional.silu(s)) @ v

    shape = (batch, problem.heads, longest, problem.width)
    qkv = [torch.randn(shape, device="cuda").bfloat16() for _ in range(3)]
    leaves = [t.detach().requires_grad_() for t in qkv]
    o = forward(*leaves)
    yield "compiled, padded", lambda: forward(*qkv), _backward(o, leaves, torch.randn_like(o))


def drawn_lengths(kind: str, count: int, low: int, high: int) -> Lengths:
    """Lengths from low to high, even ("uniform") or with many short and few long ones."""
    generator = torch.Generator().manual_seed(3)
    if kind == "uniform":
        return torch.randint(low, high, (count,), generator=generator).tolist()
    normal = torch.randn(count, generator=generator)
    return (math.sqrt(low * high) * (normal * 1.2).exp()).clamp(low, high).int().tolist()


def problems(*, quick: bool) -> list[Problem]:
    """The shapes of the table; a quick run takes those on which a target stands."""
    jagged = drawn_lengths("uniform", 128, 100, 2000)
    heavy = drawn_lengths("heavy", 128, 16, 16384)
    long = drawn_lengths("uniform", 128, 200, 20000)
    # Of the same work as the heavy-tailed set.
    root = int(math.sqrt(sum(one * one for one in heavy) / 128))
    blocks = Mask("blocks", size=64)
    gelu: dict[str, Any] = {"activation": "gelu"}
    found = [
        Problem("jagged", jagged, jagged, 8, 128),
        Problem("jagged", jagged, jagged, 8, 64),
        Problem("heavy-tailed", heavy, heavy, 8, 128),
        Problem("dense", [4096] * 16, [4096] * 16, 16, 128),
        Problem("blocks", [4096] * 64, [4096] * 64, 8, 64, blocks, bound="memory"),
        Problem("cross", [4096] * 128, [64] * 128, 8, 64, bound="memory"),
        Problem("pooled", [32] * 128, [8192] * 128, 8, 64, bound="memory"),
        Problem("pooled jagged", [32] * 128, long, 8, 64, bound="memory"),
        Problem("dense", [4096] * 16, [4096] * 16, 16, 128, activation="silu"),
        Problem("dense", [4096] * 16, [4096] * 16, 16, 128, **gelu),
        Problem("balanced", [root] * 128, [root] * 128, 8, 128),
        Problem("jagged", jagged, jagged, 8, 128, activation="silu"),
        Problem("jagged", jagged, jagged, 8, 128, **gelu),
    ]
    if quick:
        return found
    return [
        *found,
        Problem("heavy-tailed", heavy, heavy, 8, 64),
        Problem("jagged", jagged, jagged, 8, 128, Mask("causal")),
        Problem("jagged", jagged, jagged, 8, 128, Mask("window", left=256, right=0)),
        Problem("jagged", jagged, jagged, 8, 64, **gelu),
    ]

"""Data and an independent formula for attention tests: autograd over one sequence at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional

from lowprec import ops
from lowprec.attention_call import NO_MASK, Mask

SMALL = (0, 1, 31, 33, 64)
HEAVY = (1, 2, 3, 3, 5, 8, 90, 1, 0, 12)
MASKS = (Mask(), Mask("causal"), Mask("window", left=20, right=3), Mask("blocks", size=16))
MXFP8 = "mxfp8_32x32 / {0} / mxfp8_32x32 / {0} / {0} / {0}".format("mxfp8 x mxfp8_32x32")
FP8 = (
    "fp8_128x128 / e4m3*256 x fp8_128x128 / fp8_128x128 / e4m3*256 x fp8_128x128 / fp8_128x128 / "
    "fp8_128x128"
)
ROUNDED = "fp8_128x128 / e4m3*256 x fp8_128x128 / {0} / bf16 / {0} / {0}".format(
    "bf16 x fp8_128x128"
)
ROUNDED_DP = ROUNDED.replace(" / bf16 x fp8_128x128 / bf16 /", " / fp8_128x128 / bf16 /")


@dataclass(frozen=True)
class Case:
    """Lengths of queries and keys, heads, head dim, activation, mask, planes of the bias (or 0)."""

    queries: tuple[int, ...] = SMALL
    keys: tuple[int, ...] = SMALL
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 32
    activation: Any = "softmax"
    mask: Mask = NO_MASK
    planes: int = 0

    def __str__(self) -> str:
        lengths = f"{sum(self.queries)}x{sum(self.keys)}"
        heads = f"{self.heads[0]}over{self.heads[1]}x{self.head_dim}"
        return f"{self.activation}-{self.mask.kind}-{lengths}-{heads}-bias{self.planes}"


class Operands(NamedTuple):
    """q, k, v, the gradient of o, offsets and bias."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    bias: torch.Tensor | None

    def to(self, dtype: torch.dtype) -> Operands:
        wide = [t.to(dtype) for t in self[:4]]
        bias = None if self.bias is None else self.bias.to(dtype)
        return Operands(*wide, self.cu_q, self.cu_k, bias)


def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def operands(case: Case, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Operands:
    """Operands of N(0, 1), rounded to bf16 so that every dtype holds the same numbers."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).bfloat16().to(dtype)

    (h, hkv), d = case.heads, case.head_dim
    tq, tk = sum(case.queries), sum(case.keys)
    q, k, v, do = draw(tq, h, d), draw(tk, hkv, d), draw(tk, hkv, d), draw(tq, h, d)
    shape = (case.planes, max(case.queries), max(case.keys))
    bias = draw(*shape) if case.planes else None
    return Operands(q, k, v, do, offsets(case.queries), offsets(case.keys), bias)


def hidden(mask: Mask, rows: int, cols: int) -> torch.Tensor:
    """bool [rows, cols], by diagonals and blocks."""
    seen, last = torch.ones(rows, cols, dtype=torch.bool), cols - rows
    if mask.kind == "causal":
        seen = seen.tril(last)
    if mask.kind == "window":
        seen = seen.tril(last + mask.right).triu(last - mask.left)
    if mask.kind == "blocks":
        whole = torch.block_diag(*[torch.ones(mask.size, mask.size)] * -(-rows // mask.size))
        seen = whole[:rows, :cols].bool()
    return ~seen


def one_sequence(case: Case, qkvb: tuple[Any, ...], *, fused: bool) -> torch.Tensor:
    """[L, H, D] of one sequence in torch's own arithmetic for its dtype."""
    q, k, v, bias = qkvb
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    group = case.heads[0] // case.heads[1]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    gone = hidden(case.mask, q.shape[1], k.shape[1])
    scale = case.head_dim**-0.5
    if fused and case.activation == "softmax":
        added = torch.zeros_like(gone, dtype=q.dtype).masked_fill(gone, float("-inf"))
        added = added if bias is None else added + bias
        o = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=added.expand(1, q.shape[0], *gone.shape)
        )
        return o[0].transpose(0, 1)
    s = q @ k.mT * scale
    s = s if bias is None else s + bias
    if case.activation == "softmax":
        p = s.masked_fill(gone, float("-inf")).softmax(-1)
        p = torch.where(gone.all(-1, keepdim=True), 0.0, p)
    else:
        p = getattr(functional, case.activation)(s).masked_fill(gone, 0)
    return (p @ v).transpose(0, 1)


def by_torch(case: Case, given: Operands, *, fused: bool = False) -> list[torch.Tensor]:
    """o, dq, dk, dv and dbias, if there is one, by autograd."""
    leaves = [t.detach().requires_grad_() for t in (given.q, given.k, given.v)]
    bias = None if given.bias is None else given.bias.detach().requires_grad_()
    parts = []
    for b in range(len(case.queries)):
        at_q, at_k = slice(*given.cu_q[b : b + 2].tolist()), slice(*given.cu_k[b : b + 2].tolist())
        r, c = case.queries[b], case.keys[b]
        if r and c:
            q, k, v = leaves[0][at_q], leaves[1][at_k], leaves[2][at_k]
            part = None if bias is None else bias[:, :r, :c]
            parts.append(one_sequence(case, (q, k, v, part), fused=fused))
        else:
            parts.append(given.q.new_zeros(r, *given.q.shape[1:]))
    o = torch.cat(parts)
    wanted = leaves if bias is None else [*leaves, bias]
    return [o.detach(), *torch.autograd.grad(o, wanted, given.do)]


def by_ours(case: Case, given: Operands, policy: str = "bf16", **more: Any) -> list[torch.Tensor]:
    """The same by ops.attention."""
    leaves = [t.detach().requires_grad_() for t in (given.q, given.k, given.v)]
    bias = None if given.bias is None else given.bias.detach().requires_grad_()
    o = ops.attention(
        *leaves,
        given.cu_q,
        given.cu_k,
        policy=policy,
        activation=case.activation,
        mask=case.mask,
        bias=bias,
        **more,
    )
    wanted = leaves if bias is None else [*leaves, bias]
    return [o.detach(), *torch.autograd.grad(o, wanted, given.do)]


def cases() -> list[Case]:
    """Activation x mask x bias x lengths x head dim x GQA, a few of each."""
    found = []
    for activation in ("softmax", "gelu", "silu"):
        for mask in MASKS:
            for planes in (0, 1, 4):
                found.append(Case(activation=activation, mask=mask, planes=planes))
        base = Case(activation=activation)
        found += [
            replace(base, queries=(5, 0, 3, 40), keys=(33, 7, 0, 41), planes=4),
            replace(base, queries=(5, 0, 40), keys=(33, 7, 41), mask=Mask("causal")),
            replace(base, queries=(5, 1, 40), keys=(33, 7, 41), mask=Mask("window", 3, 0)),
            replace(base, queries=HEAVY, keys=HEAVY, heads=(2, 2), head_dim=48),
            replace(base, queries=(2, 9), keys=(300, 17), heads=(4, 1), head_dim=64),
            replace(base, queries=(17,), keys=(17,), heads=(1, 1), head_dim=256, planes=1),
        ]
    return found


COMPILERS = pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products here are small: more threads only wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

"""ops.attention on a GPU: its backends against float64, and lengths that are read only once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowprec import ops
from lowprec.attention_call import Mask
from lowprec.errors import UnsupportedError
from tests.core.attention_cases import (
    FP8,
    MASKS,
    MXFP8,
    ROUNDED,
    ROUNDED_DP,
    SMALL,
    Case,
    Operands,
    by_ours,
    by_torch,
    offsets,
    operands,
)
from tests.gpu.waiting import never_waiting

pytestmark = pytest.mark.gpu
NAMES = ("o", "dq", "dk", "dv", "dbias")


def on_gpu(given: Operands) -> Operands:
    return Operands(*(None if t is None else t.cuda() for t in given))


@pytest.mark.parametrize("activation", ["softmax", "gelu", "silu"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("planes", [0, 1, 4])
def test_bf16_is_within_twice_the_error_of_torch(activation: Any, mask: Mask, planes: int) -> None:
    case = Case((*SMALL, 300), (*SMALL, 300), (4, 2), 64, activation, mask, planes)
    given = operands(case)
    exact = by_torch(case, given)
    narrow = given.to(torch.bfloat16)
    theirs = by_torch(case, narrow, fused=True)
    ours = by_ours(case, on_gpu(narrow))
    for name, a, b, x in zip(NAMES, ours, theirs, exact, strict=False):
        error = float((a.cpu().double() - x).norm())
        assert error <= 2 * float((b.double() - x).norm()) + 1e-6 * float(x.norm()), name


@pytest.mark.parametrize(
    "policy",
    [MXFP8, FP8, ROUNDED, ROUNDED_DP],
    ids=["mxfp8", "fp8", "rounded", "rounded dp"],
)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_quantized_products_are_the_references(policy: str, mask: Mask) -> None:
    case = Case((*SMALL, 300), (*SMALL, 300), (4, 2), 64, "softmax", mask)
    given = operands(case, dtype=torch.bfloat16)
    law = by_ours(case, given, policy, backend="reference")
    for name, a, b in zip(NAMES, by_ours(case, on_gpu(given), policy), law, strict=False):
        apart = float((a.cpu().double() - b.double()).norm())
        # A score on the other side of a rounding step moves P or dS by one step of E4M3; kernels
        # in 8 bits cast P against the highest score so far.
        close = 4e-2 if policy in (ROUNDED, ROUNDED_DP) else 1e-2
        assert apart <= close * float(b.double().norm()), name


def test_lengths_are_read_back_once() -> None:
    q, cu = torch.randn(8, 2, 64, device="cuda").bfloat16(), offsets((3, 5)).cuda()
    ops.attention(q, q, q, cu, policy="bf16", mask=Mask("causal"))  # compiles, and reads
    with never_waiting():
        ops.attention(q, q, q, cu, policy="bf16", mask=Mask("causal"))
        fresh = cu.clone()
        ops.attention(q, q, q, fresh, policy="bf16", check_lengths=False)
        with pytest.raises(RuntimeError, match="synchroniz"):
            ops.attention(q, q, q, fresh, policy="bf16")
    cu[1] = 9  # changed in place: read again
    with pytest.raises(UnsupportedError, match="goes down"):
        ops.attention(q, q, q, cu, policy="bf16", mask=Mask("causal"))

"""Attention: the formulas, PyTorch's own error, gradients, independence of neighbours, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import lowprec
from lowprec import ops
from lowprec.attention_call import Mask
from lowprec.attention_policy import AttentionGemm, AttentionPolicy
from lowprec.errors import UnsupportedError
from tests.core.attention_cases import (
    COMPILERS,
    FP8,
    HEAVY,
    MASKS,
    MXFP8,
    ROUNDED,
    ROUNDED_DP,
    Case,
    Operands,
    by_ours,
    by_torch,
    cases,
    offsets,
    one_thread,
    operands,
)
from tests.core.attention_kernel_cases import rounded

__all__ = ["one_thread"]

NAMES = ("o", "dq", "dk", "dv", "dbias")
BACKENDS = ("emulated", "reference")


@pytest.mark.parametrize("case", cases(), ids=str)
def test_float64_is_the_formula(case: Case) -> None:
    given = operands(case)
    expected = by_torch(case, given)
    for backend in BACKENDS:
        for name, a, b in zip(NAMES, by_ours(case, given, backend=backend), expected, strict=False):
            # lse is kept in float64 too, so nothing is lost but the order of sums.
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, msg=f"{backend} {name}")


def error(a: torch.Tensor, exact: torch.Tensor) -> float:
    return float((a.double() - exact).norm())


def assert_within_twice_torch(case: Case, *, seed: int = 0) -> None:
    given = operands(case, seed=seed)
    exact = by_torch(case, given)
    narrow = given.to(torch.bfloat16)
    theirs, ours = by_torch(case, narrow, fused=True), by_ours(case, narrow)
    for name, a, b, x in zip(NAMES, ours, theirs, exact, strict=False):
        assert a.dtype == torch.bfloat16
        assert error(a, x) <= 2 * error(b, x) + 1e-6 * float(x.norm()), name


@pytest.mark.parametrize("case", cases(), ids=str)
def test_bf16_is_within_twice_the_error_of_torch(case: Case) -> None:
    assert_within_twice_torch(case)


LONG = (1000, 0, 33, 1, 31, 64, 1)


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["softmax", "gelu", "silu"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize(("head_dim", "planes"), [(32, 0), (64, 4), (128, 1), (256, 0)])
def test_bf16_at_full_size(activation: str, mask: Mask, head_dim: int, planes: int) -> None:
    for lengths in (LONG, (4096,), HEAVY * 4):
        heads = (4, 2) if len(lengths) > 1 else (1, 1)
        shape = {"queries": lengths, "keys": lengths, "heads": heads, "head_dim": head_dim}
        kept = planes if planes in (0, 1, heads[0]) else 0
        assert_within_twice_torch(Case(**shape, activation=activation, mask=mask, planes=kept))


@pytest.mark.parametrize("activation", ["softmax", "gelu", "silu"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_gradcheck(activation: Any, mask: Mask) -> None:
    case = Case((3, 0, 5), (3, 0, 5), (2, 1), 16, activation, replace(mask, size=2, left=1), 2)
    given = operands(case)
    inputs = [given.q, given.k, given.v, given.bias]

    def attend(q: Any, k: Any, v: Any, bias: Any) -> torch.Tensor:
        return ops.attention(
            *(q, k, v, given.cu_q, given.cu_k),
            policy="bf16",
            activation=case.activation,
            mask=case.mask,
            bias=bias,
        )

    leaves = [t.clone().requires_grad_() for t in inputs if t is not None]
    assert torch.autograd.gradcheck(attend, leaves, fast_mode=True)


POLICIES = {"bf16": "bf16", "mxfp8": MXFP8, "fp8": FP8, "rounded": ROUNDED}
POLICIES |= {"rounded dp": ROUNDED_DP}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_backends_agree(policy: str, mask: Mask) -> None:
    case = Case(mask=mask, planes=1)
    given = operands(case, dtype=torch.bfloat16)
    pairs = zip(NAMES, *(by_ours(case, given, policy, backend=b) for b in BACKENDS), strict=True)
    for name, a, b in pairs:
        # A score on the other side of a rounding step moves P or dS by one step of E4M3.
        assert error(a, b.double()) <= 5e-3 * float(b.double().norm()), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("product", "changed"), [("bf16 x mxfp8", "k"), ("mxfp8 x bf16", "q"), ("mxfp8", "qk")]
)
def test_one_operand_may_stay_bf16(product: str, changed: str, backend: str) -> None:
    case = Case((40, 3), (20, 5))
    given = operands(case, dtype=torch.bfloat16)
    casts = {name: ops.quantize(getattr(given, name), "mxfp8") for name in changed}
    read = given._replace(
        **{name: ops.dequantize(one, torch.bfloat16) for name, one in casts.items()}
    )
    found = by_ours(case, given, f"{product} / bf16 / bf16 / bf16 / bf16 / bf16", backend=backend)
    assert torch.equal(found[0], by_ours(case, read, backend=backend)[0])
    assert not torch.equal(found[0], by_ours(case, given, backend=backend)[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", [MASKS[0], MASKS[2]], ids=str)
def test_a_backward_pass_of_what_the_forward_pass_read(mask: Mask, backend: str) -> None:
    """A cast changes nothing that it has cast: gradients of q, k, v are those of their casts."""
    case = Case((140, 0, 3), (150, 2, 3), head_dim=16, mask=mask)
    given = operands(case, dtype=torch.bfloat16)
    ends = {"q": given.cu_q, "k": given.cu_k, "v": given.cu_k}
    read = given._replace(**{name: rounded(getattr(given, name), cu) for name, cu in ends.items()})
    plain = f"{ROUNDED.partition(' / bf16 x')[0]} / bf16 / bf16 / bf16 / bf16"
    for a, b in zip(
        by_ours(case, given, ROUNDED, backend=backend),
        by_ours(case, read, plain, backend=backend),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("policy", ["bf16", MXFP8, FP8], ids=["bf16", "mxfp8", "fp8"])
@pytest.mark.parametrize("activation", ["softmax", "gelu"])
def test_rows_do_not_depend_on_neighbours_or_order(policy: str, activation: str) -> None:
    if activation == "gelu" and "*" in policy:
        policy = MXFP8
    lengths = (33, 1, 0, 64, 31)
    case = Case(lengths, lengths, activation=activation, mask=Mask("causal"))
    given = operands(case, dtype=torch.bfloat16)
    together = by_ours(case, given, policy)
    order = [4, 2, 0, 3, 1]
    turned = tuple(lengths[b] for b in order)
    rows = torch.cat([torch.arange(given.cu_q[b], given.cu_q[b + 1]) for b in order])
    moved = Operands(*(t[rows] for t in given[:4]), offsets(turned), offsets(turned), None)
    for name, a, b in zip(NAMES, together, by_ours(case, moved, policy), strict=False):
        assert torch.equal(a[rows], b), name
    for b, length in enumerate(lengths):
        at = slice(int(given.cu_q[b]), int(given.cu_q[b + 1]))
        alone = Operands(*(t[at] for t in given[:4]), offsets((length,)), offsets((length,)), None)
        for name, x, y in zip(NAMES, together, by_ours(case, alone, policy), strict=False):
            assert torch.equal(x[at], y), name


def test_rows_without_keys_give_zeros_and_no_gradient() -> None:
    case = Case((3, 2), (0, 2), (2, 2), 16)
    found = by_ours(case, operands(case, dtype=torch.bfloat16), MXFP8)
    assert not any(t.isnan().any() for t in found)
    assert not found[0][:3].any()
    assert not found[1][:3].any()


def test_huge_logits_stay_finite() -> None:
    case = Case((40,), (40,), (2, 2), 32)
    given = operands(case, dtype=torch.bfloat16)
    huge = given._replace(q=given.q * 1e4, k=given.k * 1e4)
    for policy in ("bf16", MXFP8, FP8):
        o, *gradients = by_ours(case, huge, policy)
        assert o.isfinite().all()
        assert all(t.isfinite().all() for t in gradients)
        # One key wins each row: the result is its v, or what its cast left of it.
        best = (huge.q.double().transpose(0, 1) @ huge.k.double().permute(1, 2, 0)).argmax(-1)
        chosen = torch.stack([huge.v[best[h], h] for h in range(2)], 1)
        far = (o.double() - chosen.double()).abs().amax((1, 2)) > 0.3
        assert far.float().mean() <= 0.15  # rows in which two keys are as good


def test_an_infinite_bias_hides_keys() -> None:
    case = Case((20,), (20,), (2, 1), 16, planes=1)
    given = operands(case, dtype=torch.bfloat16)
    bias = torch.zeros(1, 20, 20, dtype=torch.bfloat16)
    bias[:, torch.ones(20, 20).triu(1).bool()] = float("-inf")
    masked = by_ours(replace(case, mask=Mask("causal"), planes=0), given._replace(bias=None))
    for name, a, b in zip(NAMES, by_ours(case, given._replace(bias=bias)), masked, strict=False):
        assert torch.equal(a, b), name


def test_a_row_hidden_by_the_bias_alone_gives_zeros() -> None:
    case = Case((3,), (3,), (1, 1), 16, planes=1)
    given = operands(case)
    bias = torch.zeros(1, 3, 3, dtype=torch.float64)
    bias[:, 1] = float("-inf")
    for policy in ("bf16", MXFP8):
        o, dq, *rest = by_ours(case, given._replace(bias=bias), policy)
        assert not o[1].any()
        assert not dq[1].any()
        assert all(t.isfinite().all() for t in (o, dq, *rest))


@pytest.mark.parametrize("backend", BACKENDS)
def test_unquantized_products_read_bf16(backend: str) -> None:
    case = Case((40,), (40,), (2, 2), 32)
    given = operands(case, dtype=torch.float32)
    fine = given._replace(q=given.q * (1 + 2.0**-12), do=given.do * (1 + 2.0**-12))
    found = [by_ours(case, one, backend=backend) for one in (fine, given)]
    for name, a, b in zip(NAMES, *found, strict=False):
        assert torch.equal(a, b), name
    # Two keys of weights 1 and 1/3: P is rounded before it multiplies, its sum is not.
    q, v = torch.zeros(1, 1, 16), torch.zeros(2, 1, 16)
    q[..., 0], v[1] = 1, 1
    k = torch.zeros(2, 1, 16)
    bias = torch.tensor([[[0.0, float(torch.tensor(1 / 3).log())]]])
    two = (q, k, v, offsets((1,)), offsets((2,)))
    o = ops.attention(*two, policy="bf16", bias=bias, backend=backend)
    expected = torch.tensor(1 / 3).bfloat16().double() / (4 / 3)
    torch.testing.assert_close(o[0, 0, 0].double(), expected, rtol=1e-6, atol=0)


def test_strided_inputs_and_expanded_gradients() -> None:
    case = Case((7, 9), (7, 9), (2, 2), 16)
    qkv = torch.randn(16, 3, 2, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    views, cu = qkv.unbind(1), offsets((7, 9))
    whole = Operands(
        *(t.contiguous() for t in views), torch.ones(16, 2, 16).bfloat16(), cu, cu, None
    )
    strided = Operands(*views, torch.ones(1, 1, 1).bfloat16().expand(16, 2, 16), cu, cu, None)
    for a, b in zip(by_ours(case, strided, MXFP8), by_ours(case, whole, MXFP8), strict=True):
        assert torch.equal(a, b)


def test_nothing_at_all() -> None:
    for lengths in ((), (0, 0)):
        q = torch.zeros(0, 2, 16, requires_grad=True)
        o = ops.attention(q, q, q, offsets(lengths), policy=MXFP8, mask=Mask("causal"))
        o.sum().backward()
        assert o.shape == (0, 2, 16)


@COMPILERS
def test_compiled_is_eager(compiler: str) -> None:
    case = Case(mask=Mask("causal"), planes=1)
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend=compiler)
    def attend(q: Any, k: Any, v: Any, cu: Any, bias: Any) -> torch.Tensor:
        return ops.attention(q, k, v, cu, policy=MXFP8, mask=Mask("causal"), bias=bias)

    for lengths in ((5, 0, 7), (33, 1), (64, 3)):
        given = operands(replace(case, queries=lengths, keys=lengths))
        given = given.to(torch.float32)
        leaves = [
            t.requires_grad_() for t in (given.q, given.k, given.v, given.bias) if t is not None
        ]
        o = attend(*leaves[:3], given.cu_q, leaves[3])
        found = [o, *torch.autograd.grad(o, leaves, given.do)]
        for a, b in zip(found, by_ours(case, given, MXFP8), strict=True):
            assert torch.equal(a, b)


Q = torch.zeros(6, 4, 32)
CU = offsets((2, 4))
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "goes down": ({"cu_seqlens_q": torch.tensor([0, 4, 2, 6]).int()}, "goes down, from 4 to 2"),
    "int64": ({"cu_seqlens_q": CU.long()}, "must be an int32 tensor"),
    "not a tensor": ({"cu_seqlens_q": [0, 2, 6]}, "must be an int32 tensor"),
    "empty": ({"cu_seqlens_q": CU[:0]}, "must be an int32 tensor"),
    "starts at 1": ({"cu_seqlens_q": torch.tensor([1, 2, 6]).int()}, "starts at 1, not at 0"),
    "total": ({"cu_seqlens_q": offsets((2, 5))}, "ends at 7, but there are 6 rows of q"),
    "number": ({"cu_seqlens_k": offsets((6,))}, "2 sequences, cu_seqlens_k 1"),
    "window": (
        {"cu_seqlens_k": offsets((5, 1)), "mask": Mask("window", 1, 1)},
        "4 queries and 1 keys; the mask window 1 back, 1 ahead sets the last query on the last key",
    ),
    "causal": ({"cu_seqlens_k": offsets((5, 1)), "mask": Mask("causal")}, "may not be fewer"),
    "blocks": ({"cu_seqlens_k": offsets((5, 1)), "mask": Mask("blocks")}, "needs equal lengths"),
    "bias shape": ({"bias": torch.zeros(4, 4)}, r"bias has shape \(4, 4\), not \[4 or 1"),
    "bias planes": ({"bias": torch.zeros(2, 4, 4)}, "one plane a head or one for all"),
    "bias short": ({"bias": torch.zeros(1, 3, 4)}, "more than the bias, 3 x 4, has"),
    "bias dtype": ({"bias": torch.zeros(1, 4, 4).int()}, "it must be floating"),
    "head dim": ({"q": Q[..., :24], "k": Q[..., :24], "v": Q[..., :24]}, "head dim 24 is not"),
    "head dim 512": (dict.fromkeys("qkv", torch.zeros(6, 1, 512)), "from 16 to 256; pad"),
    "dtype": (dict.fromkeys("qkv", Q.half()), "they must have one dtype"),
    "dtypes": ({"k": Q.double()}, "torch.float64, torch.float32; they must have one dtype"),
    "dense": ({"q": Q[None]}, "lowprec.Attention also takes dense batches"),
    "k and v": ({"v": Q[:, :2]}, "k and v must have one shape"),
    "heads": ({"k": Q[:, :3], "v": Q[:, :3]}, "4 query heads do not share 3 key heads evenly"),
    "scale": ({"scale": float("nan")}, "scale must be a finite number, not nan"),
    "static gelu": ({"policy": FP8, "activation": "gelu"}, "gelu gives P no bound"),
    "activation": ({"activation": "relu"}, "unknown activation 'relu'; did you mean"),
    "backend": ({"backend": "tritn"}, "unknown attention backend 'tritn'"),
    "policy": ({"policy": "mxfp8 / bf16"}, "one product for all six"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what: str) -> None:
    changed, message = REFUSED[what]
    given: dict[str, Any] = {
        **dict.fromkeys("qkv", Q),
        "cu_seqlens_q": CU,
        "cu_seqlens_k": CU,
        "policy": "bf16",
        **changed,
    }
    with pytest.raises(UnsupportedError, match=message):
        ops.attention(**given)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("e4m3*256 x mxfp8 / bf16 / bf16 / bf16 / bf16 / bf16", "q in qk has no bound"),
        ("bf16 / e4m3*300 x mxfp8 / bf16 / bf16 / bf16 / bf16", "power of two from 1 to 256"),
        ("bf16 / e4m3*512 x mxfp8 / bf16 / bf16 / bf16 / bf16", "power of two from 1 to 256"),
        ("bf16 / e4m4*256 x mxfp8 / bf16 / bf16 / bf16 / bf16", "did you mean e4m3"),
        ("bf16 / e4m3*256 / bf16 / bf16 / bf16 / bf16", "for P alone"),
        ("mxfp8:sr", "rounds to nearest only"),
        ("mxfp8 + rht32", "take no rotation"),
        ("fp8_tensorwise", "depend on what else is in the batch"),
        ("fp8_rowwise", "depend on what else is in the batch"),
        ("nvfp4", "depend on what else is in the batch"),
        ("skip", "no product of attention is skipped"),
        ("bf16 x bf16", "a product in bf16 is written 'bf16'"),
        ("bf16 x mxfp8:sr", "rounds to nearest only"),
        ("bf16 x mxfp8 + rht32", "take no rotation"),
        ("bf16 x fp8_rowwise", "depend on what else is in the batch"),
        ("bf16 x skip", "no product of attention is skipped"),
        ("bf16 x mxfp9", "did you mean"),
        ("bf16 x ", "one of the two may be bf16"),
        ("mxfp8 x bf16 x mxfp8", "one of the two may be bf16"),
        ("bf16 / mxfp8 x e4m3*256 / bf16 / bf16 / bf16 / bf16", "the left operand of pv and dv"),
        ("mxfp9", "did you mean"),
    ],
)
def test_policies_that_cannot_be_meant(text: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        AttentionPolicy.parse(text)


def test_policies_read_what_they_write() -> None:
    one_sided = "mxfp8 x bf16 / e4m3*256 x bf16 / bf16 x mxfp8 / bf16 / bf16 / bf16 x mxfp8:floor"
    for text in ("bf16", MXFP8, FP8, "mxfp4", ROUNDED, one_sided):
        policy = AttentionPolicy.parse(text)
        assert str(policy) == (text if "/" in text else " / ".join([text] * 6))
        assert AttentionPolicy.parse(str(policy)) == policy
    assert isinstance(policy.pv, AttentionGemm)
    assert [str(one) for one in policy.pv.casts] == ["e4m3*256", "None"]
    assert lowprec.AttentionPolicy is AttentionPolicy


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ({"kind": "diagonal"}, "unknown mask 'diagonal'"),
        ({"kind": "window", "left": -1}, "left is a number of tokens"),
        ({"kind": "blocks", "size": 0}, "at least 1"),
        ({"kind": "window", "right": 1.5}, "not 1.5"),
    ],
)
def test_masks_that_cannot_be_meant(mask: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        Mask(**mask)

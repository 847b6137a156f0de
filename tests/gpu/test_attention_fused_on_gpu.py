"""On a GPU: the pass before attention, the kernel for short keys, keys split by their own lengths.

Proven by this file, to be added to lowprec.backends.triton_kernels.proven once it passes:
"attention bf16, short keys", "front + attention bf16" and "front + attention " with the text of
each 8-bit policy.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from lowprec.attention_call import AttentionCall, Mask
from lowprec.attention_policy import ATTENTION_BF16
from tests.core import attention_front_cases as fronts
from tests.core import attention_kernel_cases as cases
from tests.core.attention_kernel_cases import kernels
from tests.gpu.waiting import never_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton"),
]
QUERIES = [0, 1, 31, 33, 64, 1000, 129, 127, 300]
KEYS = [3, 1, 70, 0, 64, 513, 128, 127, 300]
WIDTHS = [16, 48, 64, 80, 128, 256]
MASKS = {"none": Mask(), "causal": Mask("causal"), "window": Mask("window", left=100)}


def drawn(
    queries: list[int], keys: list[int], heads: tuple[int, int], width: int
) -> list[torch.Tensor]:
    return cases.drawn(queries, keys, heads, width, "cuda")


def needs_eight_bits() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs sm90")


@pytest.fixture
def short_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the kernel for short keys were proven."""
    from lowprec.backends.triton_kernels import attention_cross_ops

    monkeypatch.setattr(attention_cross_ops, "PROVEN", {attention_cross_ops.NAME})


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("form", fronts.ROTARY)
def test_turns_have_the_bits_of_the_law(form: str, width: int) -> None:
    """Those of the CPU, too."""
    if width < 20:
        form = "halves" if form == "odd" else form
    tensors = drawn(QUERIES, KEYS, (9, 9), width)
    tensors[2] = tensors[2].flip(0).contiguous()
    fronts.assert_turns_are_the_law(tensors, fronts.ROTARY[form])
    rotary, at = fronts.ROTARY[form], torch.randint(-9, 1 << 30, (7,))
    x = torch.randn(7, 2, 32).bfloat16()
    assert torch.equal(rotary.rotate(x, at), rotary.rotate(x.cuda(), at.cuda()).cpu())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("form", [None, "halves", "neighbours", "some"])
def test_norms_are_those_of_the_law(form: str | None, width: int) -> None:
    rotary = None if form is None else fronts.ROTARY[form]
    fronts.assert_norms_are_close(drawn(QUERIES, KEYS, (4, 4), width), rotary)


@pytest.mark.parametrize("width", [48, 64, 96, 128])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("form", [None, *fronts.ROTARY])
def test_codes_are_those_of_the_reference(form: str | None, norm: bool, width: int) -> None:
    rotary = None if form is None else fronts.ROTARY[form]
    tensors = drawn(QUERIES, KEYS, (5, 3), width)
    tensors[0][32:160, 0] = 0
    tensors[1][:2] *= 2.0**-126
    tensors[2][20:23] *= 2.0**30
    fronts.assert_codes_are_the_reference(tensors, rotary, norm=norm)


@pytest.mark.parametrize("form", ["halves", "neighbours"])
def test_fronts_do_not_depend_on_other_sequences(form: str) -> None:
    tensors = drawn([100, 33], [100, 33], (2, 2), 64)
    fronts.assert_what_is_not_finite_stays_in_its_sequence(tensors, fronts.ROTARY[form])


@pytest.mark.parametrize("width", [48, 64, 128])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_from_codes_is_the_one_that_casts(mask: str, width: int) -> None:
    needs_eight_bits()
    queries = QUERIES if mask == "none" else KEYS
    tensors = drawn(queries, KEYS, (4, 2), width)
    fronts.assert_same_from_codes(tensors, fronts.ROTARY["halves"], MASKS[mask])


@pytest.mark.parametrize("policy", ["bf16", "NATIVE", "ROUNDED", "ROUNDED_DP"])
@pytest.mark.parametrize("form", ["halves", "neighbours"])
def test_the_whole_op(form: str, policy: str) -> None:
    """Against the reference in PyTorch, gradients of what the projection wrote."""
    what: Any = ATTENTION_BF16
    if policy != "bf16":
        needs_eight_bits()
        what = getattr(cases, policy)
    tensors = drawn(QUERIES, KEYS, (4, 2), 64)
    got = fronts.gradients(tensors, fronts.ROTARY[form], what, "triton")
    want = fronts.gradients(tensors, fronts.ROTARY[form], what, "reference")
    for found, wanted in zip(got, want, strict=True):
        assert cases.error(found, wanted) < (6e-3 if policy == "bf16" else 4e-2)


def test_views_of_one_projection() -> None:
    from lowprec.attention_front import Front
    from lowprec.backends.triton_kernels import attention_project_ops

    x = torch.randn(300, 3, 4, 64, device="cuda").bfloat16()
    ends = cases.cu([100, 200], "cuda")
    front, weights = Front(1e-6, fronts.ROTARY["halves"]), fronts.weights_of(64, "cuda")
    views = fronts.given([*x.unbind(1), x[:, 0], ends, ends], cases.NATIVE)
    copies = [t.contiguous() for t in x.unbind(1)]
    whole = fronts.given([*copies, copies[0], ends, ends], cases.NATIVE)
    got, want = (attention_project_ops.encoded(t, front, weights, "rceil") for t in (views, whole))
    assert torch.equal(got.q[:300], want.q[:300])
    assert torch.equal(got.k[:300], want.k[:300])
    # Places for more tiles than there are stay as they were.
    assert torch.equal(got.scales_q.nan_to_num(), want.scales_q.nan_to_num())


def test_nothing_waits_for_the_device() -> None:
    tensors = drawn([100, 20, 300], [100, 20, 300], (2, 2), 64)
    fronts.gradients(tensors, fronts.ROTARY["halves"], ATTENTION_BF16, "triton")
    *qkv, do, cu_q, cu_k = tensors
    from lowprec import ops

    leaves = [t.detach().requires_grad_() for t in qkv]
    with never_waiting():
        how: Any = {"policy": "bf16", "rotary": fronts.ROTARY["halves"], "backend": "triton"}
        o = ops.attention(*leaves, cu_q, cu_k, check_lengths=False, **how)
        torch.autograd.grad(o, leaves, do)


@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.parametrize("width", [16, 48, 64, 128])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_short_keys_have_the_bits_of_the_other_kernel(
    heads: tuple[int, int], width: int, activation: Any
) -> None:
    queries = [4096, 0, 1, 1000, 63, 2048, 700]
    tensors = drawn(queries, [64, 5, 0, 33, 1, 200, 17], heads, width)
    fronts.assert_short_keys_have_the_same_bits(tensors, activation)


@pytest.mark.usefixtures("short_keys")
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("activation", ["softmax", "gelu"])
def test_sequences_apart_are_right(activation: Any, width: int) -> None:
    """Short keys, keys that are split and the rest in one batch: three kernels, one result."""
    tensors = drawn([3000, 32, 700, 0, 64], [50, 5000, 700, 10, 0], (4, 2), width)
    cases.assert_close(tensors, AttentionCall(activation, Mask(), width**-0.5))


@pytest.mark.usefixtures("short_keys")
@pytest.mark.parametrize("width", [32, 48, 64, 96, 128])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_no_bit_depends_on_the_batch(mask: str, width: int) -> None:
    """Across every choice that totals make: tiles, short keys, keys that are split."""
    lengths = {
        "pooled": (32, 8192),
        "short keys": (3000, 60),
        "short": (40, 40),
        "long": (1500, 1500),
        "one": (1, 5000),
    }
    if mask == "causal":
        lengths.pop("short keys")
    call = AttentionCall("softmax", MASKS[mask], width**-0.5)
    queries, keys = ([one[side] for one in lengths.values()] for side in (0, 1))
    tensors = drawn(queries, keys, (2, 2), width)
    whole = kernels(tensors, call)
    cu_q, cu_k = tensors[4:]
    for b, name in enumerate(lengths):
        rows, cols = (slice(int(cu[b]), int(cu[b + 1])) for cu in (cu_q, cu_k))
        parts = [t[part] for t, part in zip(tensors[:4], (rows, cols, cols, rows), strict=True)]
        ends = [cases.cu([lengths[name][side]], "cuda") for side in (0, 1)]
        alone = kernels([*parts, *ends], call)
        many = kernels(
            [
                *(torch.cat([t] * 3) for t in parts),
                *(cases.cu([int(e[1])] * 3, "cuda") for e in ends),
            ],
            call,
        )
        for key, part in (("o", rows), ("dq", rows), ("dk", cols), ("dv", cols)):
            assert torch.equal(alone[key], whole[key][part]), (name, key)
            last = many[key][-len(alone[key]) :]
            assert torch.equal(last, whole[key][part]), (name, key)
        assert torch.equal(alone["lse"], whole["lse"][:, rows]), name

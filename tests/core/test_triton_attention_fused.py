"""Rotary embedding, QK-norm and casts in the pass before attention; kernels for short keys.

In Triton's interpreter, chosen when Triton is imported: a process of its own runs these tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lowprec.attention_call import AttentionCall, Mask
from lowprec.attention_policy import ATTENTION_BF16
from lowprec.backends import attention_reference
from tests.core import attention_front_cases as fronts
from tests.core import attention_kernel_cases as cases
from tests.core.kernel_cases import INTERPRETED, inside, needs_triton

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ROOT = Path(__file__).parents[2]
SLOW = pytest.mark.slow


def drawn(
    queries: list[int], keys: list[int], heads: tuple[int, int] = (3, 1), width: int = 32
) -> list[torch.Tensor]:
    return cases.drawn(queries, keys, heads, width, "cpu")


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the subprocess")
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=SLOW)])
def test_the_tests_below_pass_in_the_interpreter(which: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", which]
    done = subprocess.run(
        [*command, __file__],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout


@inside
@pytest.mark.parametrize(
    ("form", "width"),
    [
        ("some", 48),
        ("odd", 48),
        *[pytest.param(form, width, marks=SLOW) for form in fronts.ROTARY for width in (32, 80)],
    ],
)
def test_turns_have_the_bits_of_the_law(form: str, width: int) -> None:
    tensors = drawn([40, 0, 5, 1], [35, 3, 2, 0], (3, 1), width)
    tensors[2] = tensors[2].flip(0).contiguous()
    fronts.assert_turns_are_the_law(tensors, fronts.ROTARY[form])


@inside
@pytest.mark.parametrize(
    "form", ["halves", *[pytest.param(one, marks=SLOW) for one in (None, "some", "odd")]]
)
def test_norms_are_those_of_the_law(form: str | None) -> None:
    rotary = None if form is None else fronts.ROTARY[form]
    fronts.assert_norms_are_close(drawn([40, 0, 5], [33, 3, 9], (2, 2)), rotary)


@inside
@pytest.mark.parametrize(
    ("form", "norm", "width"),
    [
        ("halves", True, 48),
        pytest.param("neighbours", False, 48, marks=SLOW),
        pytest.param(None, True, 128, marks=SLOW),
        pytest.param("some", True, 80, marks=SLOW),
    ],
)
def test_codes_are_those_of_the_reference(form: str | None, norm: bool, width: int) -> None:
    rotary = None if form is None else fronts.ROTARY[form]
    tensors = drawn([130, 0, 5], [20, 3, 129], (2, 1), width)
    tensors[0][:128, 0] = 0
    tensors[1][:2] *= 2.0**-126
    tensors[2][20:23] *= 2.0**30
    fronts.assert_codes_are_the_reference(tensors, rotary, norm=norm)


@inside
@pytest.mark.parametrize(
    "mask", ["causal", *[pytest.param(one, marks=SLOW) for one in ("none", "window")]]
)
def test_attention_from_codes_is_the_one_that_casts(mask: str) -> None:
    masks = {"none": Mask(), "causal": Mask("causal"), "window": Mask("window", left=20)}
    tensors = drawn([33, 0, 5], [140, 3, 9], (2, 1), 32)
    fronts.assert_same_from_codes(tensors, fronts.ROTARY["halves"], masks[mask])


@inside
@pytest.mark.parametrize(
    "policy",
    [cases.NATIVE, *[pytest.param(one, marks=SLOW) for one in (ATTENTION_BF16, cases.ROUNDED)]],
)
def test_the_whole_op(policy: Any) -> None:
    """Against the reference in PyTorch, gradients of what the projection wrote."""
    tensors = drawn([33, 0, 5], [33, 0, 5], (1, 1))
    got = fronts.gradients(tensors, fronts.ROTARY["halves"], policy, "triton")
    want = fronts.gradients(tensors, fronts.ROTARY["halves"], policy, "reference")
    for found, wanted in zip(got, want, strict=True):
        assert cases.error(found, wanted) < 6e-3


@inside
@pytest.mark.parametrize("form", ["neighbours", pytest.param("halves", marks=SLOW)])
def test_fronts_do_not_depend_on_other_sequences(form: str) -> None:
    tensors = drawn([40, 33], [40, 33], (1, 1))
    fronts.assert_what_is_not_finite_stays_in_its_sequence(tensors, fronts.ROTARY[form])


@inside
@pytest.mark.parametrize(
    ("activation", "heads", "width"),
    [
        ("softmax", (1, 1), 48),
        pytest.param("silu", (2, 1), 32, marks=SLOW),
        pytest.param("gelu", (4, 2), 64, marks=SLOW),
    ],
)
def test_short_keys_have_the_bits_of_the_other_kernel(
    activation: Any, heads: tuple[int, int], width: int
) -> None:
    """No keys, one, a whole tile, more than one; runs of two tiles of 32 queries."""
    tensors = drawn([100, 33, 1, 40, 0, 64], [20, 0, 3, 70, 5, 32], heads, width)
    fronts.assert_short_keys_have_the_same_bits(tensors, activation)


@needs_triton
def test_which_calls_have_short_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU only once the kernel is proven there."""
    from lowprec.backends.triton_kernels import attention_cross_ops

    def takes(queries: list[int], keys: list[int], mask: Mask, width: int = 32) -> bool:
        q, k, _, _, cu_q, cu_k = drawn(queries, keys, (1, 1), width)
        from lowprec.backends.triton_kernels.attention_ops import Given

        call = AttentionCall("softmax", mask, 0.2)
        return attention_cross_ops.takes(Given(q, k, k, cu_q, cu_k, None, call))

    if not INTERPRETED:
        assert not takes([900, 20], [64, 3], Mask())
        monkeypatch.setattr(attention_cross_ops, "PROVEN", {attention_cross_ops.NAME})
    assert takes([900, 20], [64, 3], Mask())
    assert not takes([900, 20], [64, 65], Mask())
    assert not takes([64, 20], [64, 3], Mask())
    assert not takes([900, 20], [64, 3], Mask("blocks"))
    assert not takes([900, 20], [64, 3], Mask(), 256)


@inside
def test_every_sequence_is_in_one_list() -> None:
    """By its own lengths: chunks of keys for few queries, short keys, and the rest."""
    from lowprec.backends.triton_kernels.attention_schedule import Apart, schedule_apart, slots

    queries, keys = [3, 40, 32, 0, 2, 100, 7], [150, 70, 65, 300, 20, 0, 64]
    ends = cases.cu(queries, "cpu"), cases.cu(keys, "cpu")
    apart = Apart(few=32, chunk=64, short=20, steps=sum(keys))
    lists = schedule_apart(*ends, sum(queries), (64, 32, 32), apart)
    want: list[dict[int, int]] = [{0: 3, 2: 2}, {4: 1, 5: 4}, {1: 2, 6: 1}]
    for (starts, owners), places in zip(lists, want, strict=True):
        found = owners[: int(starts[-1])].tolist()
        assert {b: found.count(b) for b in set(found)} == places
        assert all(found[int(starts[b])] == b for b in places)
    assert len(lists[0][1]) == slots(apart.steps, apart.chunk) >= 5


@inside
@pytest.mark.parametrize("activation", ["softmax", pytest.param("silu", marks=SLOW)])
def test_sequences_apart_are_right(activation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by its own kernel; `attend` over the rest stands for the one that streams."""
    from lowprec.backends.triton_kernels import (
        attention_cross_ops,
        attention_ops,
        attention_stream_ops,
    )

    def rest(one: Any, how: Any, o: Any, lse: Any, which: Any) -> None:
        monkeypatch.setattr(attention_ops, "CHUNK", 1 << 30)
        attention_ops._forward(one, o, lse, which)
        monkeypatch.setattr(attention_ops, "CHUNK", 64)

    monkeypatch.setattr(attention_ops, "CHUNK", 64)
    monkeypatch.setattr(attention_cross_ops, "TILE_K", 32)
    monkeypatch.setattr(attention_stream_ops, "takes", lambda one: True)
    monkeypatch.setattr(attention_stream_ops, "TILE_Q", 32)
    monkeypatch.setattr(attention_stream_ops, "forward", rest)
    tensors = drawn([3, 40, 32, 0, 2, 70], [150, 70, 65, 300, 20, 0], (2, 1))
    q, k, v, _, cu_q, cu_k = tensors
    call = AttentionCall(activation, Mask(), 0.2)
    how: dict[str, Any] = {"call": call, "policy": ATTENTION_BF16, "bias": None}
    o, lse = attention_ops.attention_forward(q, k, v, cu_q, cu_k, **how)
    wide = [t.double() for t in (q, k, v)]
    want, lse_want = attention_reference.attention_forward(*wide, cu_q, cu_k, **how)
    assert cases.error(o, want) < 5e-3
    torch.testing.assert_close(lse.double(), lse_want, atol=1e-5, rtol=1e-5)

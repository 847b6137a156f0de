"""The attention kernels in Triton's interpreter, against the reference in float64.

Tiles are 32 x 32 there. The interpreter is chosen when Triton is imported, so a process of its own
runs these tests. Errors are at most twice those of plain PyTorch in bf16.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lowprec.attention_call import AttentionCall, Mask
from lowprec.attention_policy import ATTENTION_BF16, AttentionPolicy
from lowprec.backends import attention_reference
from lowprec.errors import UnsupportedError
from tests.core import attention_kernel_cases as cases
from tests.core.attention_kernel_cases import assert_close, error, kernels, law
from tests.core.kernel_cases import INTERPRETED, inside, needs_triton

# numpy, in which the interpreter computes, warns of the very NaN and Inf that are tested.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
ROOT = Path(__file__).parents[2]
LENGTHS = [33, 0, 1, 100, 31, 64]
MASKS = {
    "none": Mask(),
    "causal": Mask("causal"),
    "window": Mask("window", left=40, right=3),
    "blocks": Mask("blocks", size=32),
    "odd blocks": Mask("blocks", size=20),
}


def drawn(
    queries: list[int], keys: list[int], heads: tuple[int, int] = (2, 1), width: int = 32
) -> list[torch.Tensor]:
    return cases.drawn(queries, keys, heads, width, "cpu")


@needs_triton
@pytest.mark.skipif(INTERPRETED, reason="this is the subprocess")
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
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


QUICK = [("softmax", mask) for mask in ("causal", "window", "blocks")]
QUICK += [("gelu", "causal")]
ALL = [(activation, mask) for activation in ("softmax", "gelu", "silu") for mask in MASKS]


@inside
@pytest.mark.parametrize(
    ("activation", "mask"),
    [pytest.param(*one, marks=[] if one in QUICK else [pytest.mark.slow]) for one in ALL],
)
def test_every_mask_and_activation(activation: Any, mask: str) -> None:
    lengths = LENGTHS[:4] if mask == "causal" else [70, 0, 1, 33]
    assert_close(drawn(lengths, lengths), AttentionCall(activation, MASKS[mask], 0.2))


@inside
@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
def test_all_lengths(mask: str) -> None:
    lengths = [*LENGTHS, 150, 2]
    tensors = drawn(lengths, lengths, (4, 2), 64)
    assert_close(tensors, AttentionCall("softmax", MASKS[mask], 0.125))


@inside
@pytest.mark.parametrize(
    "width", [48, *[pytest.param(w, marks=pytest.mark.slow) for w in (16, 80, 256)]]
)
def test_head_dims_that_are_no_power_of_two(width: int) -> None:
    assert_close(drawn([33, 5], [33, 5], (2, 2), width), AttentionCall("softmax", Mask(), 0.15))


@inside
@pytest.mark.parametrize(
    "mask", ["causal", *[pytest.param(one, marks=pytest.mark.slow) for one in ("none", "window")]]
)
def test_more_keys_than_queries(mask: str) -> None:
    tensors = drawn([5, 0, 1, 32], [70, 3, 1, 33])
    assert_close(tensors, AttentionCall("softmax", MASKS[mask], 0.2))


@inside
@pytest.mark.parametrize(
    ("activation", "mask"),
    [
        ("softmax", "none"),
        ("silu", "window"),
        pytest.param("softmax", "causal", marks=pytest.mark.slow),
    ],
)
def test_keys_split_over_programs(
    activation: Any, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the lengths of their own sequence: alone, it has the bits that it has in a batch."""
    from lowprec.backends.triton_kernels import attention_ops

    monkeypatch.setattr(attention_ops, "CHUNK", 64)
    queries, keys = [3, 40, 32, 0, 2, 1], [150, 70, 65, 300, 64, 129]
    q, k, v, _, cu_q, cu_k = drawn(queries, keys, (2, 1))
    how: dict[str, Any] = {"call": AttentionCall(activation, MASKS[mask], 0.2), "bias": None}
    how["policy"] = ATTENTION_BF16
    o, lse = attention_ops.attention_forward(q, k, v, cu_q, cu_k, **how)
    wide = [t.double() for t in (q, k, v)]
    o_law, lse_law = attention_reference.attention_forward(*wide, cu_q, cu_k, **how)
    assert error(o, o_law) < 5e-3
    torch.testing.assert_close(lse.double(), lse_law, atol=1e-5, rtol=1e-5)
    for b in (0, 5):
        rows, cols = (slice(int(cu[b]), int(cu[b + 1])) for cu in (cu_q, cu_k))
        ends = cases.cu([queries[b]], "cpu"), cases.cu([keys[b]], "cpu")
        alone, _ = attention_ops.attention_forward(q[rows], k[cols], v[cols], *ends, **how)
        assert torch.equal(alone, o[rows])
    monkeypatch.setattr(attention_ops, "CHUNK", 256)
    unsplit, _ = attention_ops.attention_forward(q, k, v, cu_q, cu_k, **how)
    assert activation != "softmax" or not torch.equal(unsplit, o)


@inside
@pytest.mark.parametrize(
    ("activation", "heads"),
    [("softmax", 1), pytest.param("softmax", 2, marks=pytest.mark.slow), ("gelu", 1)],
)
def test_blocks_in_one_pass(activation: Any, heads: int) -> None:
    """The same lengths for queries and keys, as one tensor; 300 tokens are more than a run."""
    tensors = drawn([300, 0, 1, 33], [300, 0, 1, 33], (heads, 1))
    tensors[5] = tensors[4]
    assert_close(tensors, AttentionCall(activation, MASKS["blocks"], 0.2))


@inside
def test_queries_without_keys_give_zeros() -> None:
    from lowprec.backends.triton_kernels import attention_ops

    tensors = drawn([5, 40, 3], [0, 7, 0])
    call = AttentionCall("softmax", Mask(), 0.2)
    assert_close(tensors, call)
    got = kernels(tensors, call)
    eight = cases.run(attention_ops, tensors, call, policy=cases.NATIVE)
    assert (eight["o"][:5] == 0).all()
    assert (eight["dq"][:5] == 0).all()
    for rows in (slice(0, 5), slice(45, 48)):
        assert (got["o"][rows] == 0).all()
        assert (got["dq"][rows] == 0).all()
        assert (got["lse"][:, rows] == -torch.inf).all()


@inside
def test_nothing_at_all() -> None:
    call = AttentionCall("softmax", Mask(), 0.2)
    for queries, keys in (([0, 0], [0, 3]), ([0], [0])):
        got = kernels(drawn(queries, keys), call)
        assert got["o"].numel() == got["dq"].numel() == 0
        assert (got["dk"] == 0).all()
        assert (got["dv"] == 0).all()


@inside
@pytest.mark.parametrize("scale", [-0.3, 0.0, pytest.param(30.0, marks=pytest.mark.slow)])
def test_any_scale(scale: float) -> None:
    tensors = drawn([40, 9], [40, 9])
    call = AttentionCall("softmax", Mask("causal"), scale)
    got, want = kernels(tensors, call), law(tensors, call)
    assert error(got["o"], want["o"]) < 1e-2
    assert error(got["dv"], want["dv"]) < 1e-2
    assert all(got[name].isfinite().all() for name in ("dq", "dk"))


@inside
@pytest.mark.parametrize(
    ("activation", "planes", "dtype"),
    [
        ("softmax", 2, torch.float32),
        pytest.param("softmax", 1, torch.bfloat16, marks=pytest.mark.slow),
        ("gelu", 1, torch.float32),
    ],
)
def test_bias_and_its_gradient(activation: Any, planes: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    bias = torch.randn(planes, 40, 45, generator=generator).to(dtype)
    bias[:, 3, :] = -torch.inf if activation == "softmax" and planes == 2 else 0
    tensors = drawn([33, 0, 7], [36, 3, 9])
    call = AttentionCall(activation, Mask("causal"), 0.2)
    got, want = kernels(tensors, call, bias), law(tensors, call, bias)
    for name in ("o", "dq", "dk", "dv"):
        assert error(got[name], want[name]) < 6e-3, name
    assert got["dbias"].dtype == dtype
    assert error(got["dbias"], want["dbias"]) < 6e-3
    assert (got["dbias"][:, 33:] == 0).all()


@inside
@pytest.mark.slow
def test_heavy_tails() -> None:
    tensors = drawn([40, 33], [40, 33])
    for t in tensors[:4]:
        t *= torch.exp2(2 * torch.randn(t.shape, generator=torch.Generator().manual_seed(2)))
    assert_close(tensors, AttentionCall("softmax", Mask(), 0.1))


@inside
def test_sequences_do_not_depend_on_their_neighbours() -> None:
    """Nor on the order of the batch, to the bit; NaN and Inf of a neighbour stay with it."""
    lengths = [40, 33, 7]
    tensors = drawn(lengths, lengths, (1, 1))
    call = AttentionCall("softmax", Mask(), 0.2)
    whole = kernels(tensors, call)
    ends = [0, *itertools.accumulate(lengths)]
    order = [2, 0, 1]
    turned = [torch.cat([t[ends[b] : ends[b + 1]] for b in order]) for t in tensors[:4]]
    new = cases.cu([lengths[b] for b in order], "cpu")
    moved = kernels([*turned, new, new], call)
    poisoned = [t.clone() for t in tensors]
    for t in poisoned[:4]:
        t[ends[1] : ends[2]] = torch.nan
        t[ends[2] :] = torch.inf
    spoiled = kernels(poisoned, call)
    for name in ("o", "dq", "dk", "dv"):
        for place, b in enumerate(order):
            part = moved[name][new[place] : new[place + 1]]
            assert torch.equal(part, whole[name][ends[b] : ends[b + 1]]), name
        assert torch.equal(spoiled[name][: ends[1]], whole[name][: ends[1]]), name


@inside
def test_views_of_one_projection() -> None:
    x = torch.randn(50, 3, 2, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    do = x[:, 0].flip(0).transpose(0, 1).contiguous().transpose(0, 1)
    ends = cases.cu([20, 30], "cpu")
    call = AttentionCall("softmax", Mask("causal"), 0.2)
    got = kernels([*x.unbind(1), do, ends, ends], call)
    copies = [t.contiguous() for t in (*x.unbind(1), do)]
    want = kernels([*copies, ends, ends], call)
    assert all(torch.equal(got[name], want[name]) for name in ("o", "lse", "dq", "dk", "dv"))


@inside
def test_the_schedule_lists_each_tile_once_and_long_ones_first() -> None:
    from lowprec.backends.triton_kernels.attention_schedule import bound, schedule

    for count in (1, 5, 70):
        generator = torch.Generator().manual_seed(count)
        rows, steps = (torch.randint(0, 100, (count,), generator=generator) for _ in range(2))
        total = int(rows.sum())
        starts, owners = schedule(
            cases.cu(rows.tolist(), "cpu"), cases.cu(steps.tolist(), "cpu"), total, 32
        )
        tiles = -(-rows // 32)
        listed = int(starts[-1])
        assert listed == int(tiles.sum()) <= bound(total, count, 32) == len(owners)
        found = owners[:listed].tolist()
        assert [found.count(b) for b in range(count)] == tiles.tolist()
        for b in range(count):
            assert found[starts[b] : starts[b] + tiles[b]] == [b] * int(tiles[b])
        lengths = [int(steps[b]) for b in found]
        assert lengths == sorted(lengths, reverse=True)


@inside
@pytest.mark.parametrize(
    ("lengths", "mask", "width", "policy"),
    [
        ([70, 0, 1], "causal", 32, cases.NATIVE),
        ([33], "none", 48, cases.BF16_DP),
        ([9], "window", 32, cases.ROUNDED),
        ([9], "window", 32, cases.ROUNDED_DP),
        pytest.param([128, 127], "window", 128, cases.NATIVE, marks=pytest.mark.slow),
        pytest.param([90], "blocks", 64, cases.BF16_DP, marks=pytest.mark.slow),
        pytest.param([70, 0, 1], "causal", 48, cases.ROUNDED, marks=pytest.mark.slow),
        pytest.param([90, 128], "blocks", 128, cases.ROUNDED, marks=pytest.mark.slow),
        pytest.param([90, 128], "blocks", 128, cases.ROUNDED_DP, marks=pytest.mark.slow),
        pytest.param([70, 0, 1], "causal", 48, cases.ROUNDED_DP, marks=pytest.mark.slow),
    ],
)
def test_eight_bits_within_one_tile(
    lengths: list[int], mask: str, width: int, policy: AttentionPolicy
) -> None:
    """The running maximum is the row's: what remains is float32 against float64 sums."""
    call = AttentionCall("softmax", MASKS[mask], width**-0.5)
    cases.assert_as_the_reference(drawn(lengths, lengths, (2, 1), width), call, policy, close=3e-3)


@inside
@pytest.mark.parametrize("policy", [cases.NATIVE, cases.BF16_DP, cases.ROUNDED, cases.ROUNDED_DP])
def test_eight_bits_within_blocks(policy: AttentionPolicy) -> None:
    """By the kernel that takes blocks in one pass."""
    tensors = drawn([70, 0, 5], [70, 0, 5], (2, 2), 48)
    tensors[5] = tensors[4]
    call = AttentionCall("softmax", Mask("blocks", size=32), 0.2)
    cases.assert_as_the_reference(tensors, call, policy, close=3e-3)


@inside
@pytest.mark.parametrize("policy", [cases.NATIVE, cases.BF16_DP, cases.ROUNDED, cases.ROUNDED_DP])
def test_eight_bits_without_queries(policy: AttentionPolicy) -> None:
    cases.assert_no_queries_leave_zeros(policy, "cpu")


@inside
@pytest.mark.slow
@pytest.mark.parametrize("policy", [cases.NATIVE, cases.BF16_DP, cases.ROUNDED, cases.ROUNDED_DP])
def test_eight_bits_over_several_tiles(policy: AttentionPolicy) -> None:
    """P is cast against the maximum so far, not against the row's."""
    tensors = drawn([40], [200], (1, 1))
    call = AttentionCall("softmax", Mask(), 0.2)
    cases.assert_as_the_reference(tensors, call, policy, close=3e-2)


@inside
def test_eight_bits_with_scales_far_apart() -> None:
    """The scale of v changes by 2^20 from tile to tile; a tile of zeros has none."""
    tensors = drawn([20], [390], (1, 1))
    tensors[2][:128] *= 2.0**20
    tensors[2][256:384] = 0
    call = AttentionCall("softmax", Mask(), 0.2)
    cases.assert_as_the_reference(tensors, call, cases.BF16_DP, close=3e-2)


@inside
@pytest.mark.parametrize("width", [48, pytest.param(128, marks=pytest.mark.slow)])
def test_codes_stand_for_what_the_other_products_read(width: int) -> None:
    tensors = drawn([3, 0, 130, 5], [140, 2, 131, 6], (2, 1), width)
    tensors[0][:, 1] *= 2.0**9
    tensors[1][:130] *= 2.0**20
    tensors[1][-1, 0, 3] = torch.inf
    views = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in tensors[:4]]
    for policy in (cases.NATIVE, cases.BF16_DP, cases.ROUNDED, cases.ROUNDED_DP):
        cases.assert_codes_stand_for_what_is_read([*views, *tensors[4:]], policy)


@inside
@pytest.mark.parametrize("width", [48, pytest.param(128, marks=pytest.mark.slow)])
def test_a_bf16_backward_pass_reads_what_the_forward_pass_read(width: int) -> None:
    """Sequences of several tiles and of none; magnitudes far apart, zeros, NaN, Inf; views."""
    tensors = drawn([3, 0, 130, 5], [140, 2, 131, 6], (2, 1), width)
    spread = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(1))
    tensors[0] *= torch.exp2(3 * spread)
    tensors[1][:130] *= 2.0**20
    tensors[2][142:270] = 0
    tensors[2][-1] = torch.nan
    tensors[1][-1, 0, 3] = torch.inf
    views = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in tensors[:4]]
    cases.assert_rounds_as_the_reference([*views, *tensors[4:]])
    few = drawn([5, 0], [5, 3], (2, 1), width)
    call = AttentionCall("softmax", Mask("causal"), 0.2)
    for policy in (cases.ROUNDED, cases.ROUNDED_DP):
        cases.assert_reads_what_was_read(few, call, policy)


@inside
def test_a_bf16_backward_pass_within_blocks() -> None:
    """By the kernel that takes blocks in one pass."""
    tensors = drawn([7], [7], (1, 1))
    tensors[5] = tensors[4]
    call = AttentionCall("softmax", MASKS["blocks"], 0.2)
    for policy in (cases.ROUNDED, cases.ROUNDED_DP):
        cases.assert_reads_what_was_read(tensors, call, policy)


@inside
@pytest.mark.parametrize(
    "policy", [cases.NATIVE, pytest.param(cases.ROUNDED, marks=pytest.mark.slow)]
)
def test_eight_bits_do_not_depend_on_neighbours(policy: AttentionPolicy) -> None:
    from lowprec.backends.triton_kernels import attention_ops

    lengths = [30, 20]
    tensors = drawn(lengths, lengths, (1, 1))
    call = AttentionCall("softmax", Mask(), 0.2)
    whole = cases.run(attention_ops, tensors, call, policy=policy)
    tensors[0][30:] = torch.nan
    tensors[1][30:] = torch.inf
    tensors[2][30:] *= 1000
    spoiled = cases.run(attention_ops, tensors, call, policy=policy)
    assert all(torch.equal(whole[n][:30], spoiled[n][:30]) for n in ("o", "dq", "dk", "dv"))
    assert not spoiled["o"][30:].isfinite().any()


STATIC = "e4m3*256 x fp8_128x128"
FORWARD = f"fp8_128x128 / {STATIC}"
REFUSED = {
    "mxfp8": "cast alike",
    "bf16 / bf16 / fp8_128x128 / bf16 / bf16 / bf16": "both or neither",
    "fp8_128x128 / e4m3*256 x fp8_128x128 / bf16 / bf16 / fp8_128x128 / bf16": "dq",
    "fp8_128x128 / fp8_128x128 / bf16 / bf16 / bf16 / bf16": "fixed factor",
    "fp8_128x128 / e4m3*256 x mxfp8 / bf16 / bf16 / bf16 / bf16": "cast alike",
    f"{FORWARD} / bf16 x fp8_128x128 / bf16 / bf16 / bf16": "where dq and dk cast k and q",
    f"{FORWARD} / bf16 / bf16 / bf16 x fp8_128x128 / bf16": "all three or none",
    f"{FORWARD} / fp8_128x128 / bf16 / bf16 x fp8_128x128 / bf16": "all three",
    f"{FORWARD} / fp8_128x128 x bf16 / bf16 / bf16 / bf16": "only together with v",
    f"{FORWARD} / bf16 x mxfp8 / bf16 / bf16 x fp8_128x128 / bf16 x fp8_128x128": "cast alike",
    f"{FORWARD} / bf16 x fp8_128x128 / bf16 / bf16 x fp8_128x128 / fp8_128x128 x bf16": "dq",
    f"fp8_128x128 x bf16 / {STATIC} / bf16 / bf16 / bf16 / bf16": "cast alike",
    "fp8_128x128 / bf16 x fp8_128x128 / bf16 / bf16 / bf16 / bf16": "fixed factor",
}


@pytest.mark.parametrize("text", REFUSED)
def test_policies_without_a_kernel_say_why(text: str) -> None:
    from lowprec.backends.triton_kernels.attention_native import refuse_native

    how: dict[str, Any] = {"head_dim": 64, "capability": (9, 0)}
    said = refuse_native(AttentionPolicy.parse(text), "softmax", **how)
    assert said
    assert REFUSED[text] in said or "dv, dq and dk" in said


def test_what_the_eight_bit_kernels_take() -> None:
    from lowprec.backends.triton_kernels.attention_native import refuse_native

    how: dict[str, Any] = {"head_dim": 128, "capability": (9, 0)}
    for policy in (cases.NATIVE, cases.BF16_DP, cases.ROUNDED, cases.ROUNDED_DP):
        assert refuse_native(policy, "softmax", **how) is None
        assert "gelu" in str(refuse_native(policy, "gelu", **how))
        assert "256" in str(refuse_native(policy, "softmax", **how | {"head_dim": 256}))
        assert "sm90" in str(refuse_native(policy, "softmax", **how | {"capability": (8, 0)}))
    assert refuse_native(ATTENTION_BF16, "softmax", **how) == "nothing is quantized"


@inside
def test_what_the_kernels_do_not_compute() -> None:
    from lowprec.backends.triton_kernels import attention_ops

    q, k, v, _, cu_q, cu_k = drawn([3], [3])
    call = AttentionCall("softmax", Mask(), 0.2)
    mx = AttentionPolicy.parse("mxfp8")
    with pytest.raises(UnsupportedError, match="mxfp8"):
        attention_ops.attention_forward(q, k, v, cu_q, cu_k, call=call, policy=mx, bias=None)
    wide = [t.float() for t in (q, k, v)]
    with pytest.raises(UnsupportedError, match="float32"):
        attention_ops.attention_forward(
            *wide, cu_q, cu_k, call=call, policy=ATTENTION_BF16, bias=None
        )

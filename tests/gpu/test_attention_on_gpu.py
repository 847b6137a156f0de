"""The attention kernels on a GPU against float64, at most twice the error of PyTorch in bf16."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import pytest
import torch

from lowprec.attention_call import AttentionCall, Mask
from tests.core import attention_kernel_cases as cases
from tests.core.attention_kernel_cases import assert_close, error, kernels, law
from tests.gpu.waiting import never_waiting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton"),
]
SHORT = [0, 1, 31, 33, 64, 0, 100]
LENGTHS = [*SHORT, 1000, 129, 127, 128, 257]
RAGGED = [1, 63, 64, 65, 127, 128, 129, 300, 1000]
MASKS = {
    "none": Mask(),
    "causal": Mask("causal"),
    "window": Mask("window", left=100, right=3),
    "narrow": Mask("window", left=5, right=0),
    "blocks": Mask("blocks", size=64),
    "odd blocks": Mask("blocks", size=48),
}


def cu(lengths: list[int]) -> torch.Tensor:
    return cases.cu(lengths, "cuda")


def drawn(
    queries: list[int], keys: list[int], heads: tuple[int, int], width: int
) -> list[torch.Tensor]:
    return cases.drawn(queries, keys, heads, width, "cuda")


@pytest.mark.parametrize("activation", ["softmax", "gelu", "silu"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("width", [64, 128])
def test_every_mask_and_activation(width: int, mask: str, activation: Any) -> None:
    tensors = drawn(LENGTHS, LENGTHS, (4, 2), width)
    assert_close(tensors, AttentionCall(activation, MASKS[mask], width**-0.5))


@pytest.mark.parametrize("activation", ["softmax", "gelu", "silu"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("width", [32, 64, 80, 128])
@pytest.mark.parametrize("size", [32, 64])
def test_blocks_in_one_pass(size: int, width: int, heads: tuple[int, int], activation: Any) -> None:
    tensors = drawn(LENGTHS, LENGTHS, heads, width)
    tensors[5] = tensors[4]
    assert_close(tensors, AttentionCall(activation, Mask("blocks", size=size), width**-0.5))


@pytest.mark.parametrize("width", [16, 32, 48, 80, 96, 160, 192, 256])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_every_head_dim(width: int, mask: str) -> None:
    tensors = drawn([*SHORT, 300], [*SHORT, 300], (2, 1), width)
    assert_close(tensors, AttentionCall("softmax", MASKS[mask], width**-0.5))


@pytest.mark.parametrize("mask", ["none", "causal", "window"])
def test_more_keys_than_queries(mask: str) -> None:
    queries, keys = [0, 1, 5, 64, 100, 32, 0], [0, 1, 33, 64, 1000, 513, 7]
    tensors = drawn(queries, keys, (4, 4), 64)
    assert_close(tensors, AttentionCall("softmax", MASKS[mask], 0.125))


def test_more_queries_than_keys_and_queries_without_keys() -> None:
    tensors = drawn([1000, 33, 5, 64], [64, 1, 0, 64], (2, 2), 64)
    assert_close(tensors, AttentionCall("softmax", Mask(), 0.125))
    assert (kernels(tensors, AttentionCall("softmax", Mask(), 0.125))["o"][1033:1038] == 0).all()


def test_long_and_heavy_tailed_sequences() -> None:
    lengths = [4096, 16, 40, 700, 3, 2500, 90]
    assert_close(drawn(lengths, lengths, (2, 2), 128), AttentionCall("softmax", Mask(), 0.09))


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("activation", ["softmax", "silu"])
def test_pooled_queries(activation: Any, width: int) -> None:
    """Keys that are split over programs, and keys that are not."""
    from lowprec.backends.triton_kernels import attention_ops

    keys = [8192, 20, 1000, 0, 40000, attention_ops.CHUNK, attention_ops.CHUNK + 1]
    tensors = drawn([32, 32, 1, 32, 7, 64, 64], keys, (4, 2), width)
    assert_close(tensors, AttentionCall(activation, Mask(), width**-0.5))


def test_short_sequences_have_the_bits_of_long_batches() -> None:
    """Smaller tiles where sequences are short change no bit."""
    call = AttentionCall("softmax", Mask("causal"), 0.125)
    for width in (32, 64, 128):
        tensors = drawn([40, 60, 33], [40, 60, 33], (2, 2), width)
        more = drawn([500], [500], (2, 2), width)
        whole = [torch.cat(pair) for pair in zip(tensors[:4], more[:4], strict=True)]
        ends = cu([40, 60, 33, 500])
        short, long = kernels(tensors, call), kernels([*whole, ends, ends], call)
        for name in ("o", "dq", "dk", "dv"):
            assert torch.equal(short[name], long[name][:133]), (name, width)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 40.0])
def test_any_scale(scale: float) -> None:
    tensors = drawn([100, 64], [100, 64], (2, 2), 64)
    call = AttentionCall("softmax", Mask("causal"), scale)
    got, want = kernels(tensors, call), law(tensors, call)
    for name in ("o", "dv"):
        assert error(got[name], want[name]) < 1e-2
    for name in ("dq", "dk"):
        assert got[name].isfinite().all()


@pytest.mark.parametrize("activation", ["softmax", "silu"])
@pytest.mark.parametrize("planes", [1, 4])
@pytest.mark.parametrize("mask", ["none", "causal", "blocks"])
def test_bias_and_its_gradient(mask: str, planes: int, activation: Any) -> None:
    lengths = [100, 0, 257, 33]
    bias = torch.randn(planes, 260, 300, device="cuda")
    tensors = drawn(lengths, lengths, (4, 2), 64)
    assert_close(tensors, AttentionCall(activation, MASKS[mask], 0.125), bias)


def test_sequences_do_not_depend_on_their_neighbours() -> None:
    """Nor on the order of the batch, to the bit; NaN and Inf of a neighbour stay with it."""
    lengths = [100, 257, 33, 640]
    tensors = drawn(lengths, lengths, (2, 2), 64)
    call = AttentionCall("softmax", Mask(), 0.125)
    whole = kernels(tensors, call)
    ends = [0, *itertools.accumulate(lengths)]
    order = [2, 0, 3, 1]
    turned = [torch.cat([t[ends[b] : ends[b + 1]] for b in order]) for t in tensors[:4]]
    new = [lengths[b] for b in order]
    turned_ends = [0, *itertools.accumulate(new)]
    moved = kernels([*turned, cu(new), cu(new)], call)
    alone = [t[ends[1] : ends[2]] for t in tensors[:4]]
    single = kernels([*alone, cu([257]), cu([257])], call)
    poisoned = [t.clone() for t in tensors]
    for t in poisoned[:4]:
        t[ends[2] : ends[3]] = torch.nan
        t[ends[3] : ends[3] + 3] = torch.inf
    spoiled = kernels(poisoned, call)
    for name in ("o", "dq", "dk", "dv"):
        for place, b in enumerate(order):
            part = moved[name][turned_ends[place] : turned_ends[place + 1]]
            assert torch.equal(part, whole[name][ends[b] : ends[b + 1]]), name
        assert torch.equal(single[name], whole[name][ends[1] : ends[2]]), name
        assert torch.equal(spoiled[name][: ends[2]], whole[name][: ends[2]]), name


def test_views_of_one_projection() -> None:
    x = torch.randn(300, 3, 4, 64, device="cuda").bfloat16()
    do = torch.randn(4, 300, 64, device="cuda").bfloat16().transpose(0, 1)
    ends = cu([100, 200])
    call = AttentionCall("softmax", Mask("causal"), 0.125)
    got = kernels([*x.unbind(1), do, ends, ends], call)
    copies = [t.contiguous() for t in (*x.unbind(1), do)]
    want = kernels([*copies, ends, ends], call)
    assert all(torch.equal(got[name], want[name]) for name in ("o", "lse", "dq", "dk", "dv"))


def test_nothing_waits_for_the_device() -> None:
    tensors = drawn([100, 20, 300], [100, 20, 300], (2, 2), 64)
    call = AttentionCall("softmax", Mask("causal"), 0.125)
    want = kernels(tensors, call)
    with never_waiting():
        got = kernels(tensors, call)
    assert torch.equal(got["dk"], want["dk"])


def test_many_sequences() -> None:
    """More than the schedule sorts."""
    lengths = torch.randint(0, 12, (5000,), generator=torch.Generator().manual_seed(0)).tolist()
    tensors = drawn(lengths, lengths, (1, 1), 32)
    call = AttentionCall("softmax", Mask(), 0.2)
    got = kernels(tensors, call)
    first = sum(lengths[:200])
    some = [t[:first] for t in tensors[:4]]
    want = kernels([*some, cu(lengths[:200]), cu(lengths[:200])], call)
    assert all(torch.equal(got[n][:first], want[n]) for n in ("o", "dq", "dk", "dv"))
    assert all(got[n].isfinite().all() for n in ("o", "dq", "dk", "dv"))


@pytest.mark.parametrize("policy", ["NATIVE", "BF16_DP", "ROUNDED", "ROUNDED_DP"])
@pytest.mark.parametrize("width", [32, 48, 64, 128])
@pytest.mark.parametrize("mask", ["none", "causal", "window", "blocks"])
def test_eight_bits(mask: str, width: int, policy: str) -> None:
    """Head dim 128 runs in 8 bits at sm90 speed; the numbers are right at any."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs sm90")
    tensors = drawn(LENGTHS, LENGTHS, (4, 2), width)
    call = AttentionCall("softmax", MASKS[mask], width**-0.5)
    cases.assert_as_the_reference(tensors, call, getattr(cases, policy), close=4e-2)


@pytest.mark.parametrize("policy", ["NATIVE", "BF16_DP", "ROUNDED", "ROUNDED_DP"])
@pytest.mark.parametrize("width", [64, 96, 128])
@pytest.mark.parametrize("size", [32, 64])
def test_eight_bits_within_blocks(size: int, width: int, policy: str) -> None:
    """By the kernel that takes blocks in one pass."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs sm90")
    tensors = drawn(LENGTHS, LENGTHS, (2, 2), width)
    tensors[5] = tensors[4]
    call = AttentionCall("softmax", Mask("blocks", size=size), width**-0.5)
    cases.assert_as_the_reference(tensors, call, getattr(cases, policy), close=4e-2)


@pytest.mark.parametrize("policy", ["NATIVE", "BF16_DP", "ROUNDED", "ROUNDED_DP"])
@pytest.mark.parametrize("width", [48, 128])
def test_eight_bits_without_queries(width: int, policy: str) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs sm90")
    cases.assert_no_queries_leave_zeros(getattr(cases, policy), "cuda", width)


@pytest.mark.parametrize("policy", ["NATIVE", "ROUNDED", "ROUNDED_DP"])
def test_eight_bits_over_many_tiles(policy: str) -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs sm90")
    tensors = drawn([4096, 300], [4096, 300], (2, 2), 128)
    call = AttentionCall("softmax", Mask(), 128**-0.5)
    cases.assert_as_the_reference(tensors, call, getattr(cases, policy), close=5e-2)


@pytest.mark.parametrize("width", [16, 32, 48, 64, 96, 128])
def test_operands_of_a_bf16_backward_pass_are_rounded_as_the_reference_does(width: int) -> None:
    """Sequences of several tiles and of none; magnitudes far apart, zeros, NaN, Inf; views."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs sm90")
    tensors = drawn(LENGTHS, LENGTHS, (4, 2), width)
    tensors[0] *= torch.exp2(3 * torch.randn(tensors[0].shape, device="cuda"))
    tensors[1][:130] *= 2.0**20
    tensors[2][230:500] = 0
    tensors[2][-1] = torch.nan
    tensors[1][-300, 0, 3] = torch.inf
    views = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in tensors[:4]]
    ends = cu(LENGTHS)
    for some in (tensors, [*views, ends, ends]):
        cases.assert_rounds_as_the_reference(some)
        cases.assert_codes_stand_for_what_is_read(some)


def without_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of the backward pass are of what codes stand for, in bf16; no kernel streams."""
    from lowprec.backends.triton_kernels import attention_stream_ops

    for name in ("takes_backward", "takes_backward_of_codes"):
        monkeypatch.setattr(attention_stream_ops, name, lambda one: False)


@pytest.mark.parametrize("width", [48, 64, 128])
@pytest.mark.parametrize("mask", ["none", "causal", "window", "blocks"])
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)])
@pytest.mark.parametrize("policy", ["ROUNDED", "ROUNDED_DP"])
def test_a_bf16_backward_pass_reads_what_the_forward_pass_read(
    policy: str, heads: tuple[int, int], mask: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernels that hold tiles, and that take blocks in one pass; S and dP are BF16."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs sm90")
    without_codes(monkeypatch)
    tensors = drawn(LENGTHS, LENGTHS, heads, width)
    tensors[5] = tensors[4]
    call = AttentionCall("softmax", MASKS[mask], width**-0.5)
    cases.assert_reads_what_was_read(tensors, call, getattr(cases, policy))


def drawn_by_tiles(heads: tuple[int, int], width: int) -> list[torch.Tensor]:
    """RAGGED between two more; scales of all operands differ by tile and by head."""
    lengths = [70, *RAGGED, 130]
    tensors = drawn(lengths, lengths, heads, width)
    for t in tensors[:4]:
        tile = torch.arange(t.shape[0], device="cuda").unsqueeze(1) // 64
        head = torch.arange(t.shape[1], device="cuda")
        t *= torch.exp2(-((tile + head) % 3)).unsqueeze(2)
    return tensors


@pytest.mark.parametrize("heads", [(4, 2), (2, 2)])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("policy", ["ROUNDED", "NATIVE", "ROUNDED_DP"])
def test_products_of_codes_in_a_bf16_backward_pass(
    policy: str, mask: str, width: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the reference, and next to those of what the codes stand for.

    The sums of an 8-bit product have 13 bits below their largest term.
    """
    from lowprec.backends.triton_kernels import attention_ops, attention_round_ops

    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs sm90")
    call = AttentionCall("softmax", MASKS[mask], width**-0.5)
    plain = drawn(RAGGED, RAGGED, heads, width)
    how = getattr(cases, policy)
    cases.assert_as_the_reference(plain, call, how, close=4e-2)
    tensors = drawn_by_tiles(heads, width)
    got = cases.run(attention_ops, tensors, call, policy=how)
    with monkeypatch.context() as patch:
        without_codes(patch)
        want = cases.run(attention_ops, tensors, call, policy=how)
    for name in ("dq", "dk", "dv"):
        assert error(got[name], want[name]) <= 1e-2, name
    # Codes are read: with other scales they say something else.
    coded = attention_round_ops.coded

    def doubled(one: Any) -> Any:
        read = coded(one)
        codes = read.codes
        if codes.scales_v is None:
            return read._replace(codes=codes._replace(q=(codes.q[0], 2 * codes.q[1])))
        return read._replace(codes=codes._replace(scales_v=2 * codes.scales_v))

    monkeypatch.setattr(attention_round_ops, "coded", doubled)
    wrong = cases.run(attention_ops, tensors, call, policy=how)
    assert error(wrong["dq"], got["dq"]) > 0.1


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("policy", ["ROUNDED", "NATIVE", "ROUNDED_DP"])
def test_products_of_codes_read_nothing_of_neighbours(policy: str, mask: str, width: int) -> None:
    """NaN and Inf of the sequences around, and of the memory around all, change no bit."""
    from lowprec.backends.triton_kernels import attention_ops

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs sm90")
    call = AttentionCall("softmax", MASKS[mask], width**-0.5)
    tensors = drawn_by_tiles((4, 2), width)
    inside = slice(70, 70 + sum(RAGGED))
    how = getattr(cases, policy)
    want = cases.run(attention_ops, tensors, call, policy=how)
    around = []
    for t in tensors[:4]:
        room = torch.full((t.shape[0] + 256, *t.shape[1:]), torch.nan, device="cuda").bfloat16()
        room[128:198] = torch.inf
        room[198 : 198 + sum(RAGGED)] = t[inside]
        around.append(room[128:-128])
    got = cases.run(attention_ops, [*around, *tensors[4:]], call, policy=how)
    for name in ("o", "dq", "dk", "dv"):
        assert want[name].isfinite().all(), name
        assert torch.equal(got[name][inside], want[name][inside]), name


@pytest.mark.parametrize("policy", ["ROUNDED", "NATIVE", "ROUNDED_DP"])
def test_a_bf16_backward_pass_streams_and_waits_for_nothing(policy: str) -> None:
    from lowprec.backends.triton_kernels import (
        attention_ops,
        attention_round_ops,
        attention_stream_ops,
    )

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs sm90")
    tensors = drawn([100, 20, 300], [100, 20, 300], (2, 2), 128)
    call, how = AttentionCall("softmax", Mask("causal"), 0.125), getattr(cases, policy)
    want = cases.run(attention_ops, tensors, call, policy=how)
    with never_waiting():
        got = cases.run(attention_ops, tensors, call, policy=how)
    assert all(torch.equal(got[name], want[name]) for name in ("o", "dq", "dk", "dv"))
    q, k, v, _, *ends = tensors
    one = attention_ops.given((q, k, v), (ends[0], ends[1]), None, call, how)
    assert not attention_stream_ops.takes_backward(one)
    if torch.cuda.get_device_capability()[0] == 9:
        read = attention_round_ops.coded(one)
        assert attention_stream_ops.takes_backward(read)

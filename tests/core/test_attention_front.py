"""Norm and rotary embedding as part of an attention: bits of the turn, gradients, what is kept."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from lowprec import Attention, Mask, Rotary, ops
from lowprec.attention_call import AttentionCall
from lowprec.attention_front import Front
from lowprec.attention_ops import How, attend
from lowprec.attention_policy import AttentionPolicy
from lowprec.backends.attention_fronts import Fronted
from lowprec.errors import UnsupportedError
from lowprec.rotary import positions, steps_of, waves
from tests.core.attention_cases import MXFP8, offsets


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("base", [100.0, 10000.0, 5e6])
def test_waves_are_right_at_any_position(base: float) -> None:
    """To two units of float32's last place, where float32 angles would be off by a whole turn."""
    at = torch.cat([torch.arange(4096), torch.randint(0, 2**31 - 1, (999,)), -torch.arange(99)])
    sine, cosine = waves(at[:, None] * torch.tensor(steps_of(base, 64)))
    turns = torch.tensor([base ** (-i / 32) for i in range(32)], dtype=torch.float64)
    # float64 holds an angle of 2^31 to 5e-7.
    angles = at.double()[:, None] * turns
    close = 2.5 * 2.0**-24 + at.double().abs()[:, None] * turns * 2.0**-51
    assert ((sine.double() - angles.sin()).abs() <= close).all()
    assert ((cosine.double() - angles.cos()).abs() <= close).all()


def test_waves_have_these_bits() -> None:
    """Integers and single roundings: the same on every machine."""
    at = torch.tensor([0, 1, 2, 1000, 123456789, -7])
    sine, cosine = waves(at[:, None] * torch.tensor(steps_of(10000.0, 4)))
    found = torch.stack((sine, cosine)).view(torch.int32).flatten().tolist()
    assert sine[0].tolist() == [0.0, 0.0]
    assert cosine[0].tolist() == [1.0, 1.0]
    assert found == BITS


BITS = [
    0, 0, 1062693541, 1008981590, 1063831479, 1017369663,
    1062448737, -1089780488, 1065187369, -1090712454, -1087885242, -1114685902,
    1065353216, 1065353216, 1057640769, 1065352377, -1093332684, 1065349861,
    1058011155, -1084830364, 1041211452, -1084322746, 1061224381, 1065312129,
]  # fmt: skip


@pytest.mark.parametrize("interleaved", [False, True])
def test_turning_back_is_the_gradient(interleaved: bool) -> None:
    rotary = Rotary(base=100.0, dims=12, interleaved=interleaved)
    x = drawn(5, 2, 16, dtype=torch.float64).requires_grad_()
    d, at = drawn(5, 2, 16, seed=1, dtype=torch.float64), torch.tensor([0, 3, -2, 100, 7])
    (want,) = torch.autograd.grad(rotary.rotate(x, at), x, d)
    torch.testing.assert_close(rotary.rotate(d, at, back=True), want)


def test_a_turn_is_traced_whole() -> None:
    rotary, x, at = Rotary(dims=8), drawn(5, 2, 16), torch.arange(5)
    compiled: Any = torch.compile(rotary.rotate, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, at), rotary.rotate(x, at))


def test_gradients_in_float64() -> None:
    """Of q, k, v and of both weights, through norm, turn and attention."""
    cu_q, cu_k = offsets((2, 0, 1)), offsets((3, 1, 2))
    rotary = Rotary(base=50.0, dims=8)
    leaves = [drawn(n, 2, 16, seed=n, dtype=torch.float64).requires_grad_() for n in (3, 6, 7)]
    leaves[2] = drawn(6, 2, 16, seed=9, dtype=torch.float64).requires_grad_()
    weights = [drawn(16, seed=5 + i, dtype=torch.float64).requires_grad_() for i in range(2)]
    call = AttentionCall("softmax", Mask("causal"), 0.3)

    def run(q: Any, k: Any, v: Any, weight_q: Any, weight_k: Any) -> torch.Tensor:
        how = How(call, "bf16", "", None, True, Front(1e-3, rotary), (weight_q, weight_k))
        return attend((q, k, v), cu_q, cu_k, None, how)

    assert torch.autograd.gradcheck(run, (*leaves, *weights), fast_mode=True)


def test_the_op_turns_by_position() -> None:
    q, k, v = (drawn(8, 2, 32, seed=seed) for seed in range(3))
    cu, rotary = offsets((3, 5)), Rotary(interleaved=True)
    at = positions(cu, cu, 8)
    found = ops.attention(q, k, v, cu, policy=MXFP8, rotary=rotary)
    turned = (rotary.rotate(q, at), rotary.rotate(k, at))
    assert torch.equal(found, ops.attention(*turned, v, cu, policy=MXFP8))
    assert not torch.equal(found, ops.attention(q, k, v, cu, policy=MXFP8))


def test_what_came_in_is_kept_and_nothing_else() -> None:
    """The backward pass makes x' again."""
    layer = Attention(policy=MXFP8, qk_norm=32, rotary=Rotary())
    x = drawn(8, 3, 2, 32).requires_grad_()
    kept: list[torch.Tensor] = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        o = layer(*x.unbind(1), offsets((3, 5)))
    storage = x.untyped_storage().data_ptr()
    wide = [t for t in kept if t.shape == (8, 2, 32)]
    assert sum(t.untyped_storage().data_ptr() == storage for t in wide) == 3
    assert len(wide) == 4
    o.sum().backward()


def test_a_norm_that_something_acts_on_runs_as_a_module() -> None:
    layer = Attention(qk_norm=32, rotary=Rotary())
    q, k, v = (drawn(8, 2, 32, seed=seed, dtype=torch.float32) for seed in range(3))
    cu = offsets((3, 5))
    plain = layer(q, k, v, cu)
    assert layer.q_norm is not None
    seen: list[torch.Size] = []
    handle = layer.q_norm.register_forward_hook(lambda m, args, out: seen.append(out.shape))
    torch.testing.assert_close(layer(q, k, v, cu), plain)
    assert seen == [q.shape]
    handle.remove()
    layer.q_norm.eps = 1e-2
    other = layer(q, k, v, cu)
    assert not torch.equal(other, plain)
    assert isinstance(layer.q_norm, nn.RMSNorm)


@pytest.mark.parametrize(
    "register",
    [
        lambda norm, seen: norm.register_forward_pre_hook(lambda m, args: seen.append("pre")),
        lambda norm, seen: norm.register_forward_hook(lambda m, args, out: seen.append("out")),
        lambda norm, seen: norm.register_full_backward_pre_hook(lambda m, g: seen.append("back")),
        lambda norm, seen: norm.register_full_backward_hook(lambda m, a, b: seen.append("grad")),
        lambda norm, seen: nn.modules.module.register_module_forward_hook(
            lambda m, args, out: seen.append("all") if m is norm else None
        ),
    ],
)
def test_every_kind_of_hook_of_a_norm_runs(register: Any) -> None:
    layer = Attention(qk_norm=32)
    q, k, v = (drawn(8, 2, 32, seed=seed, dtype=torch.float32) for seed in range(3))
    seen: list[str] = []
    handle = register(layer.q_norm, seen)
    try:
        layer(q.requires_grad_(), k, v, offsets((3, 5))).sum().backward()
    finally:
        handle.remove()
    assert len(seen) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norm_without_an_epsilon_has_that_of_torch(dtype: torch.dtype) -> None:
    """Small q and k, of which bf16's own epsilon would make a tenth."""
    layer = Attention(qk_norm=32).to(dtype)
    assert isinstance(layer.q_norm, nn.RMSNorm)
    assert layer.q_norm.eps is None
    q, k, v = (drawn(8, 2, 32, seed=seed, dtype=dtype) for seed in range(3))
    q, k, cu = q * 0.01, k * 0.01, offsets((3, 5))
    found = layer(q, k, v, cu)
    exact = Attention(qk_norm=32).double()
    for norm in (exact.q_norm, exact.k_norm):
        assert norm is not None
        norm.eps = torch.finfo(torch.float32).eps
    want = exact(q.double(), k.double(), v.double(), cu)
    assert (found - want).norm() <= 2e-2 * want.norm()


def test_a_norm_of_another_head_dim_is_refused() -> None:
    q, k, v = (drawn(8, 2, 32, seed=seed) for seed in range(3))
    with pytest.raises(UnsupportedError, match=r"qk_norm=64 .* q \(8, 2, 32\) has heads of 32"):
        Attention(qk_norm=64).bfloat16()(q, k, v, offsets((3, 5)))


def test_kernels_that_are_not_proven_leave_the_front_to_pytorch() -> None:
    call, policy = AttentionCall("softmax", Mask(), 1.0), AttentionPolicy.parse("bf16")
    front = Front(1e-6, Rotary())
    assert not Fronted("emulated", front, call, policy).in_kernels
    assert not Fronted("triton", None, call, policy, forced=True).in_kernels
    assert Fronted("triton", front, call, policy, forced=True).in_kernels


@pytest.mark.parametrize(
    "front", [Front(1e-6, None), Front(0.5, Rotary()), Front(1e-5, Rotary(7.0, 12, True))]
)
def test_fronts_survive_being_numbers(front: Front) -> None:
    assert Front.of(front.numbers) == front
    assert Front.of([]) is None
    assert all(math.isfinite(one) for one in front.numbers)

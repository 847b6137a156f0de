"""What the tests of fused fronts compare, in the interpreter or on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from lowprec import ops
from lowprec.attention_call import AttentionCall, Mask
from lowprec.attention_front import Front, apply_front, front_backward, places
from lowprec.attention_policy import ATTENTION_BF16, AttentionPolicy
from lowprec.backends import reference
from lowprec.formats import Cast
from lowprec.rotary import Rotary
from tests.core import attention_kernel_cases as cases

ROTARY = {
    "halves": Rotary(base=1000.0),
    "neighbours": Rotary(base=1000.0, interleaved=True),
    "some": Rotary(base=50.0, dims=16),
    "odd": Rotary(base=1000.0, dims=20, interleaved=True),
    "few": Rotary(base=50.0, dims=12),
}
Tensors = list[torch.Tensor]


def given(tensors: Tensors, policy: AttentionPolicy = ATTENTION_BF16) -> Any:
    """The call as the kernels take it."""
    from lowprec.backends.triton_kernels import attention_ops

    q, k, v, _, cu_q, cu_k = tensors
    call = AttentionCall("softmax", Mask(), q.shape[2] ** -0.5)
    return attention_ops.given((q, k, v), (cu_q, cu_k), None, call, policy)


def weights_of(width: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(width)
    q, k = (1 + 0.3 * torch.randn(width, device=device, generator=generator) for _ in range(2))
    return q, k


def law(
    tensors: Tensors, front: Front, weights: tuple[torch.Tensor | None, torch.Tensor | None]
) -> Tensors:
    """q' and k' by lowprec.attention_front."""
    q, k, _, _, cu_q, cu_k = tensors
    at = places(cu_q, cu_k, (q.shape[0], k.shape[0]))
    return [apply_front(front, *one) for one in zip((q, k), weights, at, strict=True)]


def assert_turns_are_the_law(tensors: Tensors, rotary: Rotary) -> None:
    """To the bit, forward and backward."""
    from lowprec.backends.triton_kernels import attention_project_ops

    one, front = given(tensors), Front(1.0, rotary)
    none: Any = (None, None)
    got = attention_project_ops.fronted(one, front, none)
    for found, want in zip(got, law(tensors, front, none), strict=True):
        assert torch.equal(found, want)
    q, k, v, do, cu_q, cu_k = tensors
    back = attention_project_ops.gradients(one, (do, v), front, none)
    at = places(cu_q, cu_k, (q.shape[0], k.shape[0]))
    for found_, d, x, here in zip(back[:2], (do, v), (q, k), at, strict=True):
        assert found_ is not None
        assert torch.equal(found_, front_backward(front, d, x, None, here)[0])
    assert back[2:] == [None, None]


def assert_norms_are_close(tensors: Tensors, rotary: Rotary | None) -> None:
    """To one rounding of bf16 in each value, of few; gradients of the weights to float32 sums."""
    from lowprec.backends.triton_kernels import attention_project_ops

    q, k, v, do, cu_q, cu_k = tensors
    one, front = given(tensors), Front(1e-6, rotary)
    weights = weights_of(q.shape[2], str(q.device))
    got = attention_project_ops.fronted(one, front, weights)
    for found, want in zip(got, law(tensors, front, weights), strict=True):
        torch.testing.assert_close(found, want, rtol=2.0**-7, atol=1e-6)
        assert (found != want).float().mean() < 0.01
    back = attention_project_ops.gradients(one, (do, v), front, weights)
    at = places(cu_q, cu_k, (q.shape[0], k.shape[0]))
    for index, (d, x, weight, here) in enumerate(zip((do, v), (q, k), weights, at, strict=True)):
        dx, dweight = front_backward(front, d.double(), x.double(), weight.double(), here)
        found_x, found_weight = back[index], back[2 + index]
        assert found_x is not None
        assert found_weight is not None
        torch.testing.assert_close(found_x.double(), dx, rtol=2.0**-7, atol=2e-3)
        assert cases.error(found_weight, dweight.double() if dweight is not None else d) < 1e-5


def assert_codes_are_the_reference(tensors: Tensors, rotary: Rotary | None, *, norm: bool) -> None:
    """Codes and scales of what the same kernels write in bf16, tile by tile, to the bit."""
    from lowprec.backends.triton_kernels import attention_project_ops

    v, _, cu_q, cu_k = tensors[2:]
    front, width = Front(1e-6, rotary), v.shape[2]
    weights: Any = weights_of(width, str(v.device)) if norm else (None, None)
    one = given(tensors, cases.NATIVE)
    turned = attention_project_ops.fronted(one, front, weights)
    codes = attention_project_ops.encoded(one, front, weights, "rceil")
    cast = Cast.parse("mxfp8_128x128")
    for x, cu, found, scales in (
        (turned[0], cu_q, codes.q, codes.scales_q),
        (turned[1], cu_k, codes.k, codes.scales_k),
        (v, cu_k, None, codes.scales_v),
    ):
        for b in range(len(cu) - 1):
            begin, end = int(cu[b]), int(cu[b + 1])
            for first in range(begin, end, 128):
                tile = slice(first, min(first + 128, end))
                place = begin // 128 + b + (first - begin) // 128
                for head in range(x.shape[1]):
                    want = reference.quantize(x[tile, head], cast, axis=-1)
                    rows = tile.stop - tile.start
                    if found is None:
                        part = codes.v[head, place].T
                        assert (part[rows:] == 0).all()
                        part = part[:rows]
                    else:
                        part = found[tile, head]
                    assert torch.equal(part[:, :width], want.codes.view(torch.uint8))
                    assert (part[:, width:] == 0).all()
                    biased = int(want.scales.flatten()[0])
                    assert float(scales[head, place]) == 2.0 ** max(biased - 127, -40)


def assert_what_is_not_finite_stays_in_its_sequence(tensors: Tensors, rotary: Rotary) -> None:
    """Of two sequences of one tile each: NaN in the second gives it scales of NaN, codes of 0."""
    from lowprec.backends.triton_kernels import attention_project_ops

    q, k, v, _, cu, _ = tensors
    end, last = int(cu[1]), int(cu[2])
    front, weights = Front(1e-6, rotary), weights_of(q.shape[2], str(q.device))

    def encoded() -> Any:
        one = given(tensors, cases.NATIVE)
        return attention_project_ops.encoded(one, front, weights, "rceil")

    whole = encoded()
    for t in (q, k, v):
        t[end:] = torch.nan
    spoiled = encoded()
    for before, after in zip(whole[:2], spoiled[:2], strict=True):
        assert torch.equal(before[:end], after[:end])
        assert (after[end:last] == 0).all()
    assert torch.equal(whole.v[:, 0], spoiled.v[:, 0])
    for before, after in zip(whole[3:6], spoiled[3:6], strict=True):
        assert torch.equal(before[:, 0], after[:, 0])
        assert after[:, 1].isnan().all()


def assert_same_from_codes(tensors: Tensors, rotary: Rotary | None, mask: Mask) -> None:
    """Attention from codes that the projection left is the one that casts by itself, to the bit."""
    from lowprec.backends.triton_kernels import (
        attention_fronted,
        attention_ops,
        attention_project_ops,
    )

    q, k, v, _, cu_q, cu_k = tensors
    front, weights = Front(1e-6, rotary), weights_of(q.shape[2], str(q.device))
    call = AttentionCall("softmax", mask, q.shape[2] ** -0.5)
    how: dict[str, Any] = {"call": call, "policy": cases.NATIVE, "bias": None}
    got = attention_fronted.forward((q, k, v, cu_q, cu_k), weights, front=front, **how)
    turned = attention_project_ops.fronted(given(tensors), front, weights)
    want = attention_ops.attention_forward(*turned, v, cu_q, cu_k, **how)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def assert_short_keys_have_the_same_bits(tensors: Tensors, activation: Any) -> None:
    """The kernel for short keys gives the bits of attention.attend, and those are right."""
    from lowprec.backends.triton_kernels import attention_cross_ops, attention_ops

    q, k, v, _, cu_q, cu_k = tensors
    call = AttentionCall(activation, Mask(), q.shape[2] ** -0.5)
    one = attention_ops.given((q, k, v), (cu_q, cu_k), None, call, ATTENTION_BF16)
    found = []
    for forward in (attention_cross_ops.forward, attention_ops._forward):
        o = torch.full_like(q, torch.nan)
        rows = (q.shape[1], q.shape[0]) if activation == "softmax" else (0,)
        lse = torch.full(rows, torch.nan, device=q.device)
        forward(one, o, lse)
        found.append((o, lse))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert cases.error(found[0][0], cases.law(tensors, call)["o"]) < 5e-3


def gradients(tensors: Tensors, rotary: Rotary | None, policy: Any, backend: str) -> Tensors:
    """o and gradients of q, k, v by lowprec.ops.attention."""
    *qkv, do, cu_q, cu_k = tensors
    leaves = [t.detach().requires_grad_() for t in qkv]
    o = ops.attention(*leaves, cu_q, cu_k, policy=policy, rotary=rotary, backend=backend)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]

"""What GatedLinear computes: activation and product forward, the activation again and its gradient.

Functions of plain tensors, run eagerly; `lowprec.nn.gate_opaque` wraps them for tracing. x is
[M, 2K], gate and up side by side, or [M, K] where the activation is alone. Where the plan names the
Triton kernels for the cast of the activation, it is computed inside that cast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple

import torch
from torch.nn import functional

from lowprec.backends import triton_kernels
from lowprec.backends.triton_kernels import fused
from lowprec.formats import Cast
from lowprec.nn.operands import Which
from lowprec.nn.products import Products
from lowprec.policy import Gemm
from lowprec.tensor import QuantizedTensor

Function = Callable[..., torch.Tensor]
_aten = torch.ops.aten
# Each with its gradient, of (dy, x): what autograd itself calls.
ACTIVATIONS: Final[Mapping[str, tuple[Function, Function]]] = MappingProxyType(
    {
        "silu": (functional.silu, _aten.silu_backward),
        "gelu": (functional.gelu, _aten.gelu_backward),
        "gelu_tanh": (
            partial(functional.gelu, approximate="tanh"),
            partial(_aten.gelu_backward, approximate="tanh"),
        ),
    }
)


class Activation(NamedTuple):
    """A key of ACTIVATIONS, and whether a second input multiplies its result."""

    kind: str
    gated: bool

    def halves(self, x_MX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """gate, and up if there is one."""
        if not self.gated:
            return x_MX, None
        gate, up = x_MX.chunk(2, -1)
        return gate, up


def values(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """act(gate), times up, as torch computes it."""
    gate, up = activation.halves(x)
    act = ACTIVATIONS[activation.kind][0](gate)
    return act if up is None else act * up


def project(
    products: Products,
    which: Which,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    at: torch.Tensor | None,
    activation: Activation,
    *,
    keep: bool,
) -> list[torch.Tensor]:
    """y [M, N], and if `keep` what wgrad needs of the activation; tensors: x, w [N, K], b [N]."""
    x_MX, w_NK, b_N = tensors
    inside = products.inside[which.stage]
    # What watches wants to see values, and a cast for wgrad too needs them.
    cast = None if keep or products.monitor is not None else inside.gate
    a_MK = _activated(x_MX, activation, cast, by_kernel=inside.by_kernel)
    if keep:
        assert isinstance(a_MK, torch.Tensor)
        y_MN, kept = products.project_now(which, a_MK, w_NK, bias=b_N, at=at)
        return [y_MN, *kept]
    return [products.run_now(which, a_MK, [w_NK], bias=b_N, at=at)]


def keep_again(
    products: Products,
    stage_index: int,
    x_MX: torch.Tensor,
    at: torch.Tensor | None,
    activation: Activation,
) -> list[torch.Tensor]:
    """What wgrad needs of the activation, made again: see Products.keep_now."""
    by_kernel = products.inside[stage_index].by_kernel
    a_MK = _activated(x_MX, activation, None, by_kernel=by_kernel)
    assert isinstance(a_MK, torch.Tensor)
    quantized = isinstance(products.stages[stage_index].policy.wgrad, Gemm)
    return products.keep_now(a_MK, at, stage_index) if quantized else [a_MK]


def gradient(
    da_MK: torch.Tensor, x_MX: torch.Tensor, activation: Activation, *, by_kernel: bool
) -> torch.Tensor:
    """dx from the gradient of the activation, in one tensor like x."""
    kind = activation.kind
    if by_kernel and activation.gated:
        return fused.activate_halves_backward(da_MK, x_MX, kind=kind)
    if by_kernel:
        return fused.activate_backward(da_MK, x_MX, None, kind=kind)[0]
    gate, up = activation.halves(x_MX)
    act, slope = ACTIVATIONS[kind]
    dx_MX = x_MX.new_empty(x_MX.shape)
    if up is None:
        return dx_MX.copy_(slope(da_MK, gate))
    dgate, dup = dx_MX.chunk(2, -1)
    dgate.copy_(slope(da_MK * up, gate))
    torch.mul(da_MK, act(gate), out=dup)
    return dx_MX


def _activated(
    x_MX: torch.Tensor, activation: Activation, cast: Cast | None, *, by_kernel: bool
) -> torch.Tensor | QuantizedTensor:
    if not by_kernel:
        return values(x_MX, activation)
    triton_kernels.check_device(x_MX)
    gate, up = activation.halves(x_MX)
    return fused.activate(gate, up, cast, kind=activation.kind)

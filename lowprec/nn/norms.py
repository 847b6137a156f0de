"""What NormLinear computes: norm and product forward, the norm again and its gradient backward.

Functions of plain tensors [M, K], run eagerly; `lowprec.nn.norm_opaque` wraps them for tracing.
Where the plan names the Triton kernels for the cast of x, the norm runs inside that cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from lowprec.backends import triton_kernels
from lowprec.backends.triton_kernels import fused
from lowprec.nn.operands import Which, parts_of
from lowprec.nn.products import Products
from lowprec.policy import Gemm
from lowprec.tensor import QuantizedTensor


class Norm(NamedTuple):
    """RMSNorm, or LayerNorm if `centered`; eps as a number."""

    eps: float
    centered: bool


class Parameters(NamedTuple):
    """Weight and bias [K] of a norm, where it has them."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None


def values(x_MK: torch.Tensor, parameters: Parameters, norm: Norm) -> torch.Tensor:
    """The normalized x, as torch.nn.functional computes it."""
    shape = (x_MK.shape[1],)
    if norm.centered:
        return functional.layer_norm(x_MK, shape, *parameters, norm.eps)
    return functional.rms_norm(x_MK, shape, parameters.weight, norm.eps)


def project(
    products: Products,
    which: Which,
    tensors: Sequence[torch.Tensor | None],
    at: torch.Tensor | None,
    norm: Norm,
    *,
    keep: bool,
) -> list[torch.Tensor]:
    """y [M, N], then x + residual if there is one, then rstd and mean [M] from the kernels.

    tensors: x [M, K], residual, weight and bias of the norm, w [N, K], b [N]. With `keep`, for
    a stage whose norm keeps codes, what wgrad needs comes last.
    """
    x_MK, residual, weight, bias, w_NK, b_N = tensors
    assert x_MK is not None
    assert w_NK is not None
    inside = products.inside[which.stage]
    if not inside.by_kernel:
        source = x_MK if residual is None else x_MK + residual
        n_MK = values(source, Parameters(weight, bias), norm)
        y_MN = products.run_now(which, n_MK, [w_NK], bias=b_N, at=at)
        return [y_MN] if residual is None else [y_MN, source]
    triton_kernels.check_device(x_MK)
    how: dict[str, Any] = {"weight": weight, "bias": bias, "residual": residual}
    how |= {"eps": norm.eps, "centered": norm.centered}
    kept: list[torch.Tensor] = []
    # What watches wants to see values.
    whole = inside.norm_whole if keep and products.monitor is None else None
    if whole is not None:
        done, column = fused.normalize_whole(x_MK, whole, **how)
        kept = parts_of(column)
    else:
        done = fused.normalize(x_MK, None if products.monitor else inside.norm, **how)
    if keep and whole is None:
        assert isinstance(done.result, torch.Tensor)
        y_MN, kept = products.project_now(which, done.result, w_NK, bias=b_N, at=at)
    else:
        y_MN = products.run_now(which, done.result, [w_NK], bias=b_N, at=at)
    summed = [] if residual is None else [done.source]
    return [y_MN, *summed, *done.statistics, *kept]


def keep_again(
    products: Products,
    stage: int,
    tensors: Sequence[torch.Tensor | None],
    statistics: Sequence[torch.Tensor],
    at: torch.Tensor | None,
    norm: Norm,
) -> list[torch.Tensor]:
    """What wgrad needs of the normalized x, made again: see Products.project.

    tensors: what was normalized [M, K], weight and bias of the norm.
    """
    source, weight, bias = tensors
    assert source is not None
    gemm = products.stages[stage].policy.wgrad
    if statistics:
        cast = products.inside[stage].norm_again
        done = fused.normalized(source, statistics)
        if cast is not None and products.monitor is None:
            q_MK = fused.normalize_again(done, cast, axis=-2, weight=weight, bias=bias)
            assert isinstance(q_MK, QuantizedTensor)
            return parts_of(q_MK)
        n_MK = fused.normalize_again(done, None, weight=weight, bias=bias)
        assert isinstance(n_MK, torch.Tensor)
    else:
        n_MK = values(source, Parameters(weight, bias), norm)
    return products.keep_now(n_MK, at, stage) if isinstance(gemm, Gemm) else [n_MK]


def gradient(
    gradients: tuple[torch.Tensor, torch.Tensor | None],
    source: torch.Tensor,
    parameters: Parameters,
    statistics: Sequence[torch.Tensor],
    norm: Norm,
) -> list[torch.Tensor]:
    """dx in the dtype of x, then dweight and dbias, from the gradient of the normalized x.

    gradients: that one, and the one that skips the norm, which is added to dx.
    """
    dn_MK, passed = gradients
    if statistics:
        done = fused.normalized(source, statistics)
        has_bias = parameters.bias is not None
        found = fused.normalize_backward(
            dn_MK, done, weight=parameters.weight, has_bias=has_bias, passed=passed
        )
        return [one for one in found if one is not None]
    return (_layer_gradient if norm.centered else _rms_gradient)(
        dn_MK, source, parameters, passed, norm.eps
    )


def _layer_gradient(
    dn_MK: torch.Tensor,
    x_MK: torch.Tensor,
    parameters: Parameters,
    passed: torch.Tensor | None,
    eps: float,
) -> list[torch.Tensor]:
    shape = [x_MK.shape[1]]
    _, mean, rstd = torch.native_layer_norm(x_MK, shape, *parameters, eps)
    wanted = [True, parameters.weight is not None, parameters.bias is not None]
    found = torch.ops.aten.native_layer_norm_backward(
        dn_MK, x_MK, shape, mean, rstd, *parameters, wanted
    )
    dx_MK = found[0] if passed is None else found[0] + passed
    return [dx_MK, *(one for one, want in zip(found[1:], wanted[1:], strict=True) if want)]


def _rms_gradient(
    dn_MK: torch.Tensor,
    x_MK: torch.Tensor,
    parameters: Parameters,
    passed: torch.Tensor | None,
    eps: float,
) -> list[torch.Tensor]:
    """With n = x rstd and g = dn weight: dx = rstd (g - n avg(g n)), dweight = sum(dn n)."""
    wide, grad = x_MK.float(), dn_MK.float()
    rstd = (wide.square().mean(1, keepdim=True) + eps).rsqrt()
    n_MK = wide * rstd
    g = grad if parameters.weight is None else grad * parameters.weight.float()
    dx_MK = (rstd * (g - n_MK * (g * n_MK).mean(1, keepdim=True))).to(x_MK.dtype)
    found = [dx_MK if passed is None else dx_MK + passed]
    return found if parameters.weight is None else [*found, (grad * n_MK).sum(0)]

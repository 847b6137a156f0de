"""NormLinear: a norm and the linear layer behind it; the normalized activation is never kept.

Dimensions as in lowprec.nn.linear; n is the normalized x (or x + residual), cast inside the norm:
    y_MN = n_MK w_NK^T + b_N
Backward makes n again from what was normalized, bit for bit: 2 bytes a value are kept, not 4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from lowprec.errors import UnsupportedError
from lowprec.nn import norms
from lowprec.nn.linear import Linear, is_one_step
from lowprec.nn.norms import Norm, Parameters
from lowprec.nn.operands import DGRAD, FPROP, WGRAD, Which
from lowprec.nn.products import Products


class NormLinear(nn.Module):
    """RMSNorm or LayerNorm and the linear layer behind it, for `lowprec.apply` to make one step.

    norm: nn.RMSNorm or nn.LayerNorm over the last dimension; linear: nn.Linear, which a plan covers
    like any other. Both stay modules of their own: names in state_dict are `norm.weight`,
    `linear.weight` and so on. Before `apply`, and wherever the two cannot be one step (autocast,
    hooks on one of them, mixed dtypes, float64), the result is linear(norm(x)). Raises
    UnsupportedError for other modules and for shapes that do not fit.
    """

    def __init__(self, norm: nn.RMSNorm | nn.LayerNorm, linear: nn.Linear) -> None:
        super().__init__()
        if type(norm) not in (nn.RMSNorm, nn.LayerNorm) or not isinstance(linear, nn.Linear):
            raise UnsupportedError(
                "NormLinear takes an nn.RMSNorm or nn.LayerNorm and an nn.Linear, got "
                f"{type(norm).__qualname__} and {type(linear).__qualname__}"
            )
        if tuple(norm.normalized_shape) != (linear.in_features,):
            raise UnsupportedError(
                f"NormLinear: the norm runs over {tuple(norm.normalized_shape)}, the linear layer "
                f"takes {linear.in_features} features; both must be the last dimension"
            )
        self.norm = norm
        self.linear = linear

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """linear(norm(x)); with a residual, linear(norm(x + residual)) and x + residual."""
        if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
            raise UnsupportedError(
                f"NormLinear: x is {tuple(x.shape)} {x.dtype}, the residual "
                f"{tuple(residual.shape)} {residual.dtype}; both must be alike"
            )
        norm, linear = self.norm, self.linear
        bias = norm.bias if isinstance(norm, nn.LayerNorm) else None
        parameters = norm.weight, bias, linear.weight, linear.bias
        if not is_one_step(linear, (x, *parameters), norm) or not self._fits(x):
            source = x if residual is None else x + residual
            y = linear(norm(source))
            return y if residual is None else (y, source)
        assert isinstance(linear, Linear)
        return _one_step(norm, linear, parameters, x, residual)

    def _fits(self, x: torch.Tensor) -> bool:
        return x.ndim > 0 and x.shape[-1] == self.linear.in_features


def _one_step(
    norm: nn.RMSNorm | nn.LayerNorm,
    linear: Linear,
    parameters: tuple[torch.Tensor | None, ...],
    x: torch.Tensor,
    residual: torch.Tensor | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """parameters: weight and bias of the norm and of the linear layer."""
    norm_weight, norm_bias, weight, bias = parameters
    assert weight is not None
    weight, out_dtype, (_, for_wgrad) = linear._prepared(x, weight, bias)
    eps = norm.eps if norm.eps is not None else torch.finfo(torch.float32).eps
    before = (x, residual, norm_weight, norm_bias)
    for_dgrad = torch.is_grad_enabled() and any(
        one is not None and one.requires_grad for one in before
    )
    keep = for_dgrad, for_wgrad
    centered = isinstance(norm, nn.LayerNorm)
    call = _Call(linear.lowprec_products, Norm(eps, centered), out_dtype, keep)
    rows, added = x, residual
    if x.ndim != 2:
        shape = (x.shape[:-1].numel(), linear.in_features)
        rows, added = x.reshape(shape), None if residual is None else residual.reshape(shape)
    found: Any = _NormLinearFunction.apply(  # type: ignore[no-untyped-call]
        call, rows, added, norm_weight, norm_bias, weight, bias
    )
    if x.ndim == 2:
        return found  # type: ignore[no-any-return]
    wide = (*x.shape[:-1], linear.out_features)
    if residual is None:
        return found.reshape(wide)  # type: ignore[no-any-return]
    y_MN, summed = found
    return y_MN.reshape(wide), summed.reshape(x.shape)


class _Call(NamedTuple):
    products: Products
    norm: Norm
    out_dtype: torch.dtype
    keep: tuple[bool, bool]


def _traced() -> Any:
    from lowprec.nn import norm_opaque

    return norm_opaque


class _NormLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor | None) -> Any:
        x_MK, residual, norm_weight, norm_bias, w_NK, b_N = tensors
        assert x_MK is not None
        assert w_NK is not None
        products, norm = call.products, call.norm
        for_dgrad, for_wgrad = call.keep
        ctx.call, ctx.stage = call, products.active
        at = products.now(x_MK)
        which = Which(FPROP, products.active, w_NK.shape[0], ahead=for_dgrad)
        inside = products.inside[products.active]
        ctx.count = 1 + norm.centered if inside.by_kernel else 0
        keep = for_wgrad and inside.norm_keeps
        if torch.compiler.is_compiling():
            facts = (keep, products.stage.turns_x, norm.centered)
            where = [*which, ctx.count, *map(int, facts)]
            text = products.wgrad_texts[products.active]
            found = _traced().norm_project(list(tensors), at, products.key, where, text, norm.eps)
        else:
            found = norms.project(products, which, tensors, at, norm, keep=keep)
        # By index: torch 2.11 traces neither a starred target nor pop on what an op returned.
        y_MN, rest = found[0], found[1:]
        source = x_MK
        if residual is not None:
            source, rest = rest[0], rest[1:]
        ctx.columns, ctx.bias_dtype = w_NK.shape[1], None if b_N is None else b_N.dtype
        ctx.weight = w_NK if products.main_grad else None
        keeps = for_dgrad or for_wgrad
        ctx.save_for_backward(
            w_NK if for_dgrad else None,
            at,
            source if keeps else None,
            norm_weight if keeps else None,
            norm_bias if keeps else None,
            *(rest if keeps else []),
        )
        y_MN = y_MN if y_MN.dtype == call.out_dtype else y_MN.to(call.out_dtype)
        return y_MN if residual is None else (y_MN, source)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dy_MN: torch.Tensor, passed: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        w_NK, at, source, weight, bias, *rest = ctx.saved_tensors
        statistics, kept = rest[: ctx.count], rest[ctx.count :]
        products = ctx.call.products
        needs = ctx.needs_input_grad[1:]
        dx_MK = dn_MK = dw_NK = db_N = None
        sums: list[torch.Tensor | None] = [None, None]
        of_norm, of_w = any(needs[:4]), needs[4]
        which = Which(DGRAD, ctx.stage, ctx.columns)
        if of_w and not kept:
            kept = _kept_again(ctx, source, (weight, bias), statistics, at)
        if of_norm and of_w:
            dn_MK, dw_NK = products.gradients(which, dy_MN, w_NK, kept, at=at)
        elif of_norm:
            dn_MK = products.run(which, dy_MN, [w_NK], at=at)
        elif of_w:
            dw_NK = products.run(which._replace(product=WGRAD), dy_MN, kept, at=at)
        dw_NK = products.weight_gradient(ctx.weight, dw_NK, source.dtype)
        if dn_MK is not None:
            dn_MK = dn_MK if dn_MK.dtype == source.dtype else dn_MK.to(source.dtype)
            found = _through_norm(ctx, (dn_MK, passed), source, statistics)
            dx_MK, at_next = found[0], 1
            for index, one in enumerate((weight, bias)):
                if one is not None:
                    sums[index] = found[at_next].to(one.dtype)
                    at_next += 1
        if ctx.bias_dtype is not None and needs[5]:
            wide = torch.promote_types(dy_MN.dtype, torch.float32)
            db_N = dy_MN.sum(0, dtype=wide).to(ctx.bias_dtype)
        every = (dx_MK, dx_MK, *sums, dw_NK, db_N)
        return (None, *(one if need else None for one, need in zip(every, needs, strict=True)))


def _through_norm(
    ctx: Any,
    gradients: tuple[torch.Tensor, torch.Tensor | None],
    source: torch.Tensor,
    statistics: list[torch.Tensor],
) -> list[torch.Tensor]:
    """dx, then the gradients of weight and bias of the norm where it has them."""
    weight, bias = ctx.saved_tensors[3:5]
    norm: Norm = ctx.call.norm
    if torch.compiler.is_compiling():
        tensors = [gradients[0], source, weight, bias, gradients[1], *statistics]
        found: list[torch.Tensor] = _traced().norm_gradient(tensors, *norm)
        return found
    return norms.gradient(gradients, source, Parameters(weight, bias), statistics, norm)


def _kept_again(
    ctx: Any,
    source: torch.Tensor,
    parameters: tuple[torch.Tensor | None, torch.Tensor | None],
    statistics: list[torch.Tensor],
    at: torch.Tensor | None,
) -> list[torch.Tensor]:
    """What wgrad needs of the normalized activation, made again."""
    products, norm, stage = ctx.call.products, ctx.call.norm, ctx.stage
    if torch.compiler.is_compiling():
        tensors = [source, *parameters, *statistics]
        turned = int(products.stages[stage].turns_x)
        where, text = [stage, int(norm.centered), turned], products.wgrad_texts[stage]
        found: list[torch.Tensor] = _traced().norm_keep(
            tensors, at, products.key, where, text, norm.eps
        )
        return found
    return norms.keep_again(products, stage, (source, *parameters), statistics, at, norm)

"""GatedLinear: an activation and the linear layer behind it; its result is never kept.

Dimensions as in lowprec.nn.linear; x is [M, 2K], gate and up side by side, or gate alone [M, K]:
    a_MK = act(gate_MK) up_MK    cast inside the activation
    y_MN = a_MK w_NK^T + b_N
Backward makes a again from x, bit for bit: x alone is kept, where torch keeps act(gate) and a too.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from lowprec.errors import UnsupportedError
from lowprec.nn import gates
from lowprec.nn.gates import ACTIVATIONS, Activation
from lowprec.nn.linear import Linear, is_one_step
from lowprec.nn.operands import DGRAD, FPROP, WGRAD, Which
from lowprec.nn.products import Products


class GatedLinear(nn.Module):
    """The down projection of an MLP, linear(act(gate) * up), for `lowprec.apply` to make one step.

    Input [..., 2K] holds gate and up side by side (`gate, up = x.chunk(2, -1)`), as one up
    projection of 2K features gives them; with gated=False it is [..., K] and the result
    linear(act(x)). linear: nn.Linear with in_features K, which a plan covers like any other and
    whose names in state_dict are `linear.weight`, `linear.bias`. activation: "silu", "gelu" (by
    erf) or "gelu_tanh". Before `apply`, and wherever the two cannot be one step (autocast, hooks on
    the layer, mixed dtypes, float64), torch computes the activation by itself. Raises
    UnsupportedError for another module, activation or width.
    """

    def __init__(self, linear: nn.Linear, *, activation: str = "silu", gated: bool = True) -> None:
        super().__init__()
        if not isinstance(linear, nn.Linear):
            raise UnsupportedError(
                f"GatedLinear takes an nn.Linear, got {type(linear).__qualname__}"
            )
        if activation not in ACTIVATIONS:
            raise UnsupportedError(
                f"GatedLinear: activation {activation!r} is not one of {', '.join(ACTIVATIONS)}"
            )
        self.linear = linear
        self.activation = activation
        self.gated = gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., N] of [..., 2K], or of [..., K] where the activation is alone."""
        width = self.linear.in_features * (2 if self.gated else 1)
        if x.ndim == 0 or x.shape[-1] != width:
            what = "gate and up side by side" if self.gated else "no second input"
            raise UnsupportedError(
                f"GatedLinear with in_features={self.linear.in_features} and {what} got an input "
                f"of shape {tuple(x.shape)}; its last dimension must be {width}"
            )
        if not self._is_one_step(x):
            return cast(torch.Tensor, self.linear(gates.values(x, self._activation)))
        return self._one_step(x)

    @property
    def _activation(self) -> Activation:
        return Activation(self.activation, self.gated)

    def _is_one_step(self, x: torch.Tensor) -> bool:
        linear = self.linear
        return is_one_step(linear, (x, linear.weight, linear.bias))

    def _one_step(self, x: torch.Tensor) -> torch.Tensor:
        linear = self.linear
        assert isinstance(linear, Linear)
        # Of the layer's input only dtype and gradient are asked here, and the width is another.
        gate = x[..., : linear.in_features]
        bias = linear.bias
        weight, out_dtype, keep = linear._prepared(gate, linear.weight, bias)
        call = _Call(linear.lowprec_products, self._activation, out_dtype, keep)
        x_MX = x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])
        y_MN: torch.Tensor = _GatedLinearFunction.apply(  # type: ignore[no-untyped-call]
            call, x_MX, weight, bias
        )
        return y_MN if x.ndim == 2 else y_MN.reshape(*x.shape[:-1], linear.out_features)

    def extra_repr(self) -> str:
        """The activation, and whether a second input multiplies it."""
        return f"activation={self.activation}, gated={self.gated}"


class _Call(NamedTuple):
    products: Products
    activation: Activation
    out_dtype: torch.dtype
    keep: tuple[bool, bool]


def _traced() -> Any:
    from lowprec.nn import gate_opaque

    return gate_opaque


class _GatedLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: _Call, x_MX: torch.Tensor, w_NK: torch.Tensor, b_N: torch.Tensor | None
    ) -> torch.Tensor:
        products, activation = call.products, call.activation
        for_dgrad, for_wgrad = call.keep
        ctx.call, ctx.stage = call, products.active
        at, inside = products.now(x_MX), products.inside[products.active]
        which = Which(FPROP, products.active, w_NK.shape[0], ahead=for_dgrad)
        keep = for_wgrad and inside.gate_keeps
        if torch.compiler.is_compiling():
            where = [*which, *map(int, (keep, products.stage.turns_x, activation.gated))]
            text = products.wgrad_texts[products.active]
            tensors = [x_MX, w_NK, b_N]
            found = _traced().gate_project(tensors, at, products.key, where, text, activation.kind)
        else:
            found = gates.project(products, which, (x_MX, w_NK, b_N), at, activation, keep=keep)
        # By index: torch 2.11 traces neither a starred target nor pop on what an op returned.
        y_MN: torch.Tensor = found[0]
        kept = found[1:]
        ctx.columns, ctx.bias_dtype = w_NK.shape[1], None if b_N is None else b_N.dtype
        ctx.weight = w_NK if products.main_grad else None
        ctx.by_kernel = inside.by_kernel
        of_x = for_dgrad or (for_wgrad and not keep)
        ctx.x_dtype = x_MX.dtype
        ctx.save_for_backward(w_NK if for_dgrad else None, at, x_MX if of_x else None, *kept)
        return y_MN if y_MN.dtype == call.out_dtype else y_MN.to(call.out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        w_NK, at, x_MX, *kept = ctx.saved_tensors
        products: Products = ctx.call.products
        dx_MX = da_MK = dw_NK = db_N = None
        _, of_x, of_w, of_b = ctx.needs_input_grad
        which = Which(DGRAD, ctx.stage, ctx.columns)
        if of_w and not kept:
            kept = _kept_again(ctx, x_MX, at)
        if of_x and of_w:
            da_MK, dw_NK = products.gradients(which, dy_MN, w_NK, kept, at=at)
        elif of_x:
            da_MK = products.run(which, dy_MN, [w_NK], at=at)
        elif of_w:
            dw_NK = products.run(which._replace(product=WGRAD), dy_MN, kept, at=at)
        dw_NK = products.weight_gradient(ctx.weight, dw_NK, ctx.x_dtype)
        if da_MK is not None:
            da_MK = da_MK if da_MK.dtype == ctx.x_dtype else da_MK.to(ctx.x_dtype)
            dx_MX = _through_activation(ctx, da_MK, x_MX)
        if ctx.bias_dtype is not None and of_b:
            wide = torch.promote_types(dy_MN.dtype, torch.float32)
            db_N = dy_MN.sum(0, dtype=wide).to(ctx.bias_dtype)
        return None, dx_MX, dw_NK, db_N


def _through_activation(ctx: Any, da_MK: torch.Tensor, x_MX: torch.Tensor) -> torch.Tensor:
    activation: Activation = ctx.call.activation
    if torch.compiler.is_compiling():
        dx_MX: torch.Tensor = _traced().gate_gradient(da_MK, x_MX, *activation, ctx.by_kernel)
        return dx_MX
    return gates.gradient(da_MK, x_MX, activation, by_kernel=ctx.by_kernel)


def _kept_again(ctx: Any, x_MX: torch.Tensor, at: torch.Tensor | None) -> list[torch.Tensor]:
    """What wgrad needs of the activation, made again."""
    products: Products = ctx.call.products
    activation, stage = ctx.call.activation, ctx.stage
    if torch.compiler.is_compiling():
        where = [stage, int(products.stages[stage].turns_x), int(activation.gated)]
        text = products.wgrad_texts[stage]
        found: list[torch.Tensor] = _traced().gate_keep(
            x_MX, at, products.key, where, text, activation.kind
        )
        return found
    return gates.keep_again(products, stage, x_MX, at, activation)

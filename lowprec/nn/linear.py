"""Linear: nn.Linear whose three products run in the precision that the plan says.

Dimensions: M rows (tokens), K in_features, N out_features.
    y_MN = x_MK w_NK^T + b_N        fprop, contracts K
    dx_MK = dy_MN w_NK              dgrad, contracts N
    dw_NK = dy_MN^T x_MK            wgrad, contracts M
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowprec.errors import UnsupportedError
from lowprec.hardware import current
from lowprec.nn import main_grad
from lowprec.nn.hooks import hooked
from lowprec.nn.operands import DGRAD, WGRAD, Which, autocast_dtype
from lowprec.nn.products import Products
from lowprec.policy import SKIP, LinearPolicy
from lowprec.stages import Stage


class Linear(torch.nn.Linear):
    """A linear layer with a precision for each of fprop, dgrad and wgrad.

    Parameters, names, dtypes, hooks and state_dict are those of nn.Linear. Input [..., K] of any
    number of rows, zero included; output [..., N] in the dtype that nn.Linear would give (the
    autocast dtype when autocast is on, else the input's). Every product is rounded to bfloat16.
    For wgrad it keeps x as it was cast, never a second copy in high precision. `lowprec.apply`
    turns the nn.Linear layers of a model into this class in place; built by hand, `name` and `seed`
    key its random bits. Not available: float16, double backward, torch.func, torch.jit.
    """

    lowprec_products: Products
    lowprec_applied: bool

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,  # nn.Linear's own signature
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        policy: LinearPolicy,
        name: str = "",
        seed: int = 0,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.lowprec_products = Products((Stage.of(policy, current()),), layer=name, seed=seed)
        self.lowprec_applied = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # nn.Linear's own name
        """Apply the layer; raises UnsupportedError for a shape or dtype that it cannot take."""
        x, bias = input, self.bias
        weight, out_dtype, keep = self._prepared(x, self.weight, bias)
        x_MK = x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), self.in_features)
        y_MN = _LinearFunction.apply(  # type: ignore[no-untyped-call]
            x_MK, weight, bias, self.lowprec_products, out_dtype, keep
        )
        # Outside the function: what a custom function returns as a view cannot be changed in place.
        # In two dimensions y_MN is the output, as in nn.Linear: FSDP hangs its hooks on no view.
        if x.ndim == 2:
            return cast(torch.Tensor, y_MN)
        return cast(torch.Tensor, y_MN).reshape(*x.shape[:-1], self.out_features)

    def _prepared(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.dtype, tuple[bool, bool]]:
        """Weight, dtype of the output, and what backward needs: for dgrad and for wgrad.

        weight and bias are the layer's own, which modules find slowly.
        """
        for tensor in (x, weight):
            if is_traceable_wrapper_subclass(tensor):
                raise UnsupportedError(
                    f"linear layer got a {type(tensor).__name__}, but casts read plain ones: "
                    "leave layers with tensor-parallel weights out of the recipe, and apply it "
                    "before fully_shard (FSDP hands plain tensors to the forward pass)"
                )
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise UnsupportedError(
                f"linear layer with in_features={self.in_features} got an input of shape "
                f"{tuple(x.shape)}; its last dimension must be {self.in_features}"
            )
        out_dtype = _output_dtype(x, weight, bias)
        products = self.lowprec_products
        training = torch.is_grad_enabled()
        if training and products.untold:
            raise UnsupportedError(
                f"layer {products.layer!r} changes its precision on a schedule: call "
                "lowprec.set_step(model, step) before every training step"
            )
        if products.stage.policy.wgrad is SKIP:
            weight = weight.detach()
        for_wgrad = training and weight.requires_grad
        if for_wgrad and products.main_grad:
            main_grad.check(weight, products.layer)
        return weight, out_dtype, (training and x.requires_grad, for_wgrad)

    def extra_repr(self) -> str:
        """nn.Linear's own text and the precision of each product."""
        policy = self.lowprec_products.stage.policy
        products = ", ".join(f"{name}={product}" for name, product in policy.items())
        return f"{super().extra_repr()}, {products}"


def _output_dtype(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.dtype:
    autocast = autocast_dtype(x)
    bias_dtype = weight.dtype if bias is None else bias.dtype
    if autocast is None and not x.dtype == weight.dtype == bias_dtype:
        raise UnsupportedError(
            f"linear layer got {x.dtype} input for a {weight.dtype} weight and a "
            f"{bias_dtype} bias; convert them to one dtype, or use autocast"
        )
    out_dtype = autocast or x.dtype
    if out_dtype == torch.float16:
        raise UnsupportedError(
            "linear layer would give a float16 output, but its products are rounded to "
            "bfloat16; use bfloat16 or float32, or lowprec.restore this model"
        )
    return out_dtype


def is_one_step(
    linear: torch.nn.Module,
    tensors: tuple[torch.Tensor | None, ...],
    *before: torch.nn.Module,
) -> bool:
    """Whether a layer and what stands before it can be one step.

    The layer is wrapped, nobody looks at what lies between, and all tensors, the input first, have
    one dtype that needs no autocast.
    """
    x = tensors[0]
    if x is None or type(linear) is not Linear:
        return False
    for module in (*before, linear):
        if hooked(module):
            return False
    dtype = x.dtype
    for one in tensors:
        if one is not None and one.dtype != dtype:
            return False
    return dtype in (torch.float32, torch.bfloat16) and autocast_dtype(x) is None


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MK: torch.Tensor,
        w_NK: torch.Tensor,
        b_N: torch.Tensor | None,
        products: Products,
        out_dtype: torch.dtype,
        keep: tuple[bool, bool],
    ) -> torch.Tensor:
        for_dgrad, _ = keep
        ctx.products, ctx.stage = products, products.active
        at = products.now(x_MK)
        y_MN, kept = products.project(x_MK, w_NK, bias=b_N, at=at, keep=keep)
        ctx.save_for_backward(w_NK if for_dgrad else None, at, *kept)
        ctx.columns, ctx.x_dtype, ctx.w_dtype = w_NK.shape[1], x_MK.dtype, w_NK.dtype
        ctx.weight = w_NK if products.main_grad else None
        ctx.bias_dtype = None if b_N is None else b_N.dtype
        # No conversion to the same dtype: torch 2.11 traces it as a second output without gradient,
        # and as both are one tensor the whole backward pass would run on zeros.
        return y_MN if y_MN.dtype == out_dtype else y_MN.to(out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        w_NK, at, *kept = ctx.saved_tensors
        products: Products = ctx.products
        dx_MK = dw_NK = db_N = None
        of_x, of_w = ctx.needs_input_grad[:2]
        which = Which(DGRAD, ctx.stage, ctx.columns)
        if of_x and of_w:
            dx_MK, dw_NK = products.gradients(which, dy_MN, w_NK, kept, at=at)
        elif of_x:
            dx_MK = products.run(which, dy_MN, [w_NK], at=at)
        elif of_w:
            dw_NK = products.run(which._replace(product=WGRAD), dy_MN, kept, at=at)
        if dx_MK is not None and dx_MK.dtype != ctx.x_dtype:
            dx_MK = dx_MK.to(ctx.x_dtype)
        dw_NK = products.weight_gradient(ctx.weight, dw_NK, ctx.w_dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            wide = torch.promote_types(dy_MN.dtype, torch.float32)
            db_N = dy_MN.sum(0, dtype=wide).to(ctx.bias_dtype)
        return dx_MK, dw_NK, db_N, None, None, None

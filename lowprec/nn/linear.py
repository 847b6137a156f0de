"""Linear: nn.Linear whose three products run in the precision that the plan says.

Dimensions: M rows (tokens), K in_features, N out_features.
    y_MN = x_MK w_NK^T + b_N        fprop, contracts K
    dx_MK = dy_MN w_NK              dgrad, contracts N
    dw_NK = dy_MN^T x_MK            wgrad, contracts M
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from lowprec import ops
from lowprec.backends import GemmBackends
from lowprec.counting import Counter
from lowprec.errors import UnsupportedError
from lowprec.policy import PRODUCTS, LinearPolicy

_FPROP, _DGRAD, _WGRAD = range(3)


@dataclass(frozen=True)
class Products:
    """How the three products of one layer run, and how often each one has run."""

    policy: LinearPolicy
    backends: Mapping[str, GemmBackends]
    counter: Counter = field(default_factory=Counter)

    def run(
        self,
        index: int,
        left: torch.Tensor,
        right: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute and count one product, left [R, C] by right [S, C] transposed."""
        name = PRODUCTS[index]
        result = ops.product(
            left,
            right,
            precision=getattr(self.policy, name),
            backends=self.backends[name],
            bias=bias,
        )
        return self.counter.counted(result, index)


class Linear(torch.nn.Linear):
    """A linear layer with a precision for each of fprop, dgrad and wgrad.

    Parameters, names, dtypes, hooks and state_dict are those of nn.Linear. Input [..., K] of any
    number of rows, zero included; output [..., N] in the dtype that nn.Linear would give (the
    autocast dtype when autocast is on, else the input's). Every product is rounded to bfloat16.
    `lowprec.apply` turns the nn.Linear layers of a model into this class in place. Not available:
    float16, double backward, torch.func transforms, torch.jit.
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
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.lowprec_products = Products(policy, ops.linear_backends(policy, None))
        self.lowprec_applied = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer; raises UnsupportedError for a shape or dtype that it cannot take."""
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise UnsupportedError(
                f"linear layer with in_features={self.in_features} got an input of shape "
                f"{tuple(x.shape)}; its last dimension must be {self.in_features}"
            )
        out_dtype = self._output_dtype(x)
        x_MK = x.reshape(x.shape[:-1].numel(), self.in_features)
        with _no_autocast(x):
            y_MN = _LinearFunction.apply(  # type: ignore[no-untyped-call]
                x_MK, self.weight, self.bias, self.lowprec_products, out_dtype
            )
        # Outside the function: what a custom function returns as a view cannot be changed in place.
        return cast(torch.Tensor, y_MN).reshape(*x.shape[:-1], self.out_features)

    def _output_dtype(self, x: torch.Tensor) -> torch.dtype:
        autocast = _autocast_dtype(x)
        bias_dtype = self.weight.dtype if self.bias is None else self.bias.dtype
        if autocast is None and not x.dtype == self.weight.dtype == bias_dtype:
            raise UnsupportedError(
                f"linear layer got {x.dtype} input for a {self.weight.dtype} weight and a "
                f"{bias_dtype} bias; convert them to one dtype, or use autocast"
            )
        out_dtype = autocast or x.dtype
        if out_dtype == torch.float16:
            raise UnsupportedError(
                "linear layer would give a float16 output, but its products are rounded to "
                "bfloat16; use bfloat16 or float32, or lowprec.restore this model"
            )
        return out_dtype

    def extra_repr(self) -> str:
        """nn.Linear's own text and the precision of each product."""
        policy = self.lowprec_products.policy
        products = ", ".join(f"{name}={product}" for name, product in policy.items())
        return f"{super().extra_repr()}, {products}"


def _autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype that autocast gives a linear layer on x, or None where it has no say."""
    device = x.device.type
    if device == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _no_autocast(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Autocast would round the float32 operands of an emulated product."""
    if _autocast_dtype(x) is None:
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MK: torch.Tensor,
        w_NK: torch.Tensor,
        b_N: torch.Tensor | None,
        products: Products,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.save_for_backward(x_MK, w_NK)
        ctx.products = products
        ctx.bias_dtype = None if b_N is None else b_N.dtype
        return products.run(_FPROP, x_MK, w_NK, bias=b_N).to(out_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Tracing already runs without autocast, and must not see it switched.
        with nullcontext() if torch.compiler.is_compiling() else _no_autocast(dy_MN):
            return _gradients(ctx, dy_MN)


def _gradients(ctx: Any, dy_MN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x_MK, w_NK = ctx.saved_tensors
    products: Products = ctx.products
    dx_MK = dw_NK = db_N = None
    if ctx.needs_input_grad[0]:
        dx_MK = products.run(_DGRAD, dy_MN, w_NK.mT).to(x_MK.dtype)
    if ctx.needs_input_grad[1]:
        dw_NK = products.run(_WGRAD, dy_MN.mT, x_MK.mT).to(w_NK.dtype)
    if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
        wide = torch.promote_types(dy_MN.dtype, torch.float32)
        db_N = dy_MN.sum(0, dtype=wide).to(ctx.bias_dtype)
    return dx_MK, dw_NK, db_N, None, None

"""Linear: nn.Linear whose three products run in the precision that the plan says.

Dimensions: M rows (tokens), K in_features, N out_features.
    y_MN = x_MK w_NK^T + b_N        fprop, contracts K
    dx_MK = dy_MN w_NK              dgrad, contracts N
    dw_NK = dy_MN^T x_MK            wgrad, contracts M
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from lowprec import ops
from lowprec.backends import GemmBackends
from lowprec.errors import UnsupportedError
from lowprec.policy import PRODUCTS, LinearPolicy

_FPROP, _DGRAD, _WGRAD = range(3)


class Linear(torch.nn.Linear):
    """A linear layer with a precision for each of fprop, dgrad and wgrad.

    Parameters, names, dtypes, hooks and state_dict are those of nn.Linear. Input [..., K] of any
    number of rows, zero included; output [..., N] in the dtype that nn.Linear would give (the
    autocast dtype when autocast is on, else the input's). Every product is rounded to bfloat16.
    `lowprec.apply` turns the nn.Linear layers of a model into this class in place.
    """

    policy: LinearPolicy
    backends: Mapping[str, GemmBackends]
    gemm_counts: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        policy: LinearPolicy,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.install(policy, ops.linear_backends(policy, None))

    def install(self, policy: LinearPolicy, backends: Mapping[str, GemmBackends]) -> None:
        """Set the precision and start the counts of executed products at zero."""
        self.policy = policy
        self.backends = backends
        # [product, 0 as planned | 1 in float64]; a buffer follows .to(device) and needs no sync.
        counts = torch.zeros(len(PRODUCTS), 2, dtype=torch.int64, device=self.weight.device)
        self.register_buffer("gemm_counts", counts, persistent=False)

    def uninstall(self) -> None:
        """Remove what `install` set; the layer is then an nn.Linear in all but its class."""
        del self.policy, self.backends, self.gemm_counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer; raises UnsupportedError for a shape or dtype that nn.Linear refuses."""
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise UnsupportedError(
                f"linear layer with in_features={self.in_features} got an input of shape "
                f"{tuple(x.shape)}; its last dimension must be {self.in_features}"
            )
        device = x.device.type
        if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
            out_dtype = torch.get_autocast_dtype(device)
        elif x.dtype == self.weight.dtype:
            out_dtype = x.dtype
        else:
            raise UnsupportedError(
                f"linear layer got {x.dtype} input for a {self.weight.dtype} weight; "
                "convert one of them, or use autocast"
            )
        y = _LinearFunction.apply(x, self.weight, self.bias, self, out_dtype)  # type: ignore[no-untyped-call]
        return cast(torch.Tensor, y)

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
        self.gemm_counts[index, int(result.dtype == torch.float64)] += 1
        return result

    def extra_repr(self) -> str:
        """nn.Linear's own text and the precision of each product."""
        products = ", ".join(f"{name}={product}" for name, product in self.policy.items())
        return f"{super().extra_repr()}, {products}"


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w_NK: torch.Tensor,
        b_N: torch.Tensor | None,
        layer: Linear,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, w_NK)
        ctx.layer = layer
        ctx.bias_dtype = None if b_N is None else b_N.dtype
        with torch.autocast(x.device.type, enabled=False):
            x_MK = x.reshape(-1, w_NK.shape[1])
            y_MN = layer.run(_FPROP, x_MK, w_NK, bias=b_N)
        return y_MN.to(out_dtype).reshape(*x.shape[:-1], w_NK.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w_NK = ctx.saved_tensors
        layer: Linear = ctx.layer
        dx = dw_NK = db_N = None
        dy_MN = dy.reshape(-1, w_NK.shape[0])
        with torch.autocast(dy.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                dx_MK = layer.run(_DGRAD, dy_MN, w_NK.mT)
                dx = dx_MK.to(x.dtype).reshape(x.shape)
            if ctx.needs_input_grad[1]:
                x_MK = x.reshape(-1, w_NK.shape[1])
                dw_NK = layer.run(_WGRAD, dy_MN.mT, x_MK.mT).to(w_NK.dtype)
            if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
                wide = torch.promote_types(dy.dtype, torch.float32)
                db_N = dy_MN.sum(0, dtype=wide).to(ctx.bias_dtype)
        return dx, dw_NK, db_N, None, None

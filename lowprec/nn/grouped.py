"""GroupedLinear: the linear layers of several experts, tokens sorted by expert.

Dimensions: M tokens, E experts, K in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from lowprec import ops
from lowprec.errors import UnsupportedError
from lowprec.formats import Cast
from lowprec.grouped import grouped_matmul
from lowprec.policy import SKIP, Gemm, LinearPolicy, casts


class GroupedLinear(torch.nn.Module):
    """One linear layer without bias for each of several experts, weight [E, N, K].

    forward(x [M, K], counts): counts says how many consecutive rows of x each expert gets; zeros
    are fine, and an expert without tokens gets a gradient of zeros. Output [M, N] in x's dtype.
    Each expert's numbers are those of a `lowprec.Linear` of its own with the same policy: blocks
    never reach over two experts. x is kept in its own dtype for wgrad. native: fprop and dgrad run
    as one scaled_grouped_mm (sm90, fp8_rowwise; see `lowprec.grouped.native_refusal`). Raises
    UnsupportedError for rotations, stochastic casts, and scales that span several experts.
    """

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        *,
        policy: LinearPolicy,
        native: bool = False,
    ) -> None:
        super().__init__()
        if policy.random or any(
            isinstance(one, Gemm) and one.rotation is not None for _, one in policy.items()
        ):
            raise UnsupportedError(
                f"GroupedLinear takes casts with nearest rounding and no rotation, not {policy}"
            )
        self.policy, self.native = policy, native
        self.weight = torch.nn.Parameter(torch.empty(experts, out_features, in_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw each expert's weight as nn.Linear does: uniform within 1 / sqrt(K)."""
        bound = self.weight.shape[2] ** -0.5
        torch.nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x_MK: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Apply each expert to its rows; raises UnsupportedError for shapes that do not fit."""
        if x_MK.dtype != self.weight.dtype:
            raise UnsupportedError(
                f"GroupedLinear got {x_MK.dtype} tokens for a {self.weight.dtype} weight; convert "
                "them to one dtype"
            )
        weight = self.weight.detach() if self.policy.wgrad is SKIP else self.weight
        how = (list(counts), self.policy, self.native)
        return cast(torch.Tensor, _Grouped.apply(x_MK, weight, *how))  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        """Shape and precision of each product."""
        products = ", ".join(f"{name}={product}" for name, product in self.policy.items())
        experts, n, k = self.weight.shape
        return f"experts={experts}, in_features={k}, out_features={n}, {products}"


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MK: torch.Tensor,
        w_ENK: torch.Tensor,
        counts: list[int],
        policy: LinearPolicy,
        native: bool,  # autograd functions take no keywords
    ) -> torch.Tensor:
        ctx.save_for_backward(x_MK, w_ENK)
        ctx.counts, ctx.policy, ctx.native = counts, policy, native
        left, right = casts(policy.fprop)
        a_MK, b_ENK = _cast(x_MK, left, -1), _cast(w_ENK, right, -1)
        return grouped_matmul(a_MK, b_ENK, counts, native=native).to(x_MK.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_MN: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_MK, w_ENK = ctx.saved_tensors
        dx_MK = dw_ENK = None
        if ctx.needs_input_grad[0]:
            left, right = casts(ctx.policy.dgrad)
            a_MN, b_EKN = _cast(dy_MN, left, -1), _cast(w_ENK, right, -2).mT
            dx_MK = grouped_matmul(a_MN, b_EKN, ctx.counts, native=ctx.native).to(x_MK.dtype)
        if ctx.needs_input_grad[1]:
            dw_ENK = _wgrad(dy_MN, x_MK, w_ENK, ctx.counts, casts(ctx.policy.wgrad))
        return dx_MK, dw_ENK, None, None, None


def _wgrad(
    dy_MN: torch.Tensor,
    x_MK: torch.Tensor,
    w_ENK: torch.Tensor,
    counts: list[int],
    how: tuple[Cast | None, Cast | None],
) -> torch.Tensor:
    """dy^T x of each expert: blocks along the tokens start anew with each of them."""
    dw_ENK = torch.zeros_like(w_ENK)
    rows = zip(dy_MN.split(counts), x_MK.split(counts), strict=True)
    for expert, (dy, x) in enumerate(rows):
        if counts[expert]:
            dw_ENK[expert] = ops.matmul(_cast(dy, how[0], -2).mT, _cast(x, how[1], -2).mT)
    return dw_ENK


def _cast(t: torch.Tensor, how: Cast | None, axis: int) -> Any:
    return t if how is None else ops.quantize(t, how, axis=axis)

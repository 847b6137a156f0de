"""Attention from where the projection left q and k: the front in kernels, else in PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lowprec.attention_call import AttentionCall
from lowprec.attention_front import Front, apply_front, front_backward, places
from lowprec.attention_policy import AttentionPolicy
from lowprec.backends import attention_triton
from lowprec.backends.attention import ATTENTION_MODULES

Weights = tuple[torch.Tensor | None, torch.Tensor | None]


class Fronted(NamedTuple):
    """An attention with what comes before it; weights of the norms of q and k, or None.

    forced: the backend was asked for by name, so that its kernels run whether proven or not.
    """

    backend: str
    front: Front | None
    call: AttentionCall
    policy: AttentionPolicy
    forced: bool = False

    @property
    def in_kernels(self) -> bool:
        """Whether the front runs in the kernels."""
        ready = self.forced or attention_triton.refuse_front(self.policy) is None
        return self.backend == "triton" and self.front is not None and ready

    def forward(
        self, tensors: tuple[torch.Tensor, ...], weights: Weights, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """o and lse of q, k, v, cu_q, cu_k."""
        q, k, v, cu_q, cu_k = tensors
        if self.in_kernels and self.front is not None:
            return attention_triton.fronted_forward(
                tensors, weights, front=self.front, call=self.call, policy=self.policy, bias=bias
            )
        if self.front is not None:
            q, k = self._applied((q, k), (cu_q, cu_k), weights)
        found: tuple[torch.Tensor, torch.Tensor] = ATTENTION_MODULES[
            self.backend
        ].attention_forward(q, k, v, cu_q, cu_k, call=self.call, policy=self.policy, bias=bias)
        return found

    def backward(
        self, tensors: tuple[torch.Tensor, ...], weights: Weights, bias: torch.Tensor | None
    ) -> list[torch.Tensor | None]:
        """dq, dk, dv, dbias and gradients of the weights, of do, q, k, v, o, lse, cu_q, cu_k."""
        do, q, k, v, o, lse, cu_q, cu_k = tensors
        if self.in_kernels and self.front is not None:
            return attention_triton.fronted_backward(
                tensors, weights, front=self.front, call=self.call, policy=self.policy, bias=bias
            )
        x = (q, k)
        if self.front is not None:
            x = self._applied(x, (cu_q, cu_k), weights)
        dq, dk, dv, dbias = ATTENTION_MODULES[self.backend].attention_backward(
            do, *x, v, o, lse, cu_q, cu_k, call=self.call, policy=self.policy, bias=bias
        )
        if self.front is None:
            return [dq, dk, dv, dbias, None, None]
        at = places(cu_q, cu_k, (q.shape[0], k.shape[0]))
        found = [
            front_backward(self.front, *one)
            for one in zip((dq, dk), (q, k), weights, at, strict=True)
        ]
        return [found[0][0], found[1][0], dv, dbias, found[0][1], found[1][1]]

    def _applied(
        self,
        x: tuple[torch.Tensor, torch.Tensor],
        cu: tuple[torch.Tensor, torch.Tensor],
        weights: Weights,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.front is not None
        at = places(*cu, (x[0].shape[0], x[1].shape[0]))
        q, k = (apply_front(self.front, *one) for one in zip(x, weights, at, strict=True))
        return q, k

"""Attention: softmax, GELU or SiLU over jagged or dense sequences, a precision for each product."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

from lowprec.attention_call import NO_MASK, AttentionCall, Mask
from lowprec.attention_checks import check_call, check_dense, check_offsets, check_tensors
from lowprec.attention_front import Front
from lowprec.attention_ops import AttentionRecord, How, attend
from lowprec.attention_policy import AttentionPolicy
from lowprec.attention_stages import AttentionStage
from lowprec.errors import UnsupportedError
from lowprec.hardware import current
from lowprec.nn.hooks import hooked
from lowprec.nn.operands import autocast_dtype
from lowprec.nn.position import At
from lowprec.rotary import Rotary

Weights = tuple[torch.Tensor, torch.Tensor]


class AttentionProducts:
    """How the products of one attention run, by step, and what has run."""

    def __init__(self, stages: tuple[AttentionStage, ...], *, layer: str = "") -> None:
        self.layer = layer
        self.stages = stages
        self.active = 0
        self.started = False
        self.told: At | None = None
        self.record = AttentionRecord()

    @property
    def stage(self) -> AttentionStage:
        """The stage in force."""
        return self.stages[self.active]

    @property
    def untold(self) -> bool:
        """True when precision follows the step, and nobody has said which step it is."""
        return len(self.stages) > 1 and not self.started

    def tell(self, at: At) -> None:
        """Set the moment in training, and with it the stage."""
        self.told, self.started = at, True
        self.active = sum(stage.from_step <= at.step for stage in self.stages) - 1

    def replan(self, stages: tuple[AttentionStage, ...]) -> None:
        """Go on by another plan; counts and the position in training stay."""
        self.stages, self.active = stages, 0
        if self.told is not None:
            self.tell(self.told)

    def attend(
        self,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        cu: tuple[torch.Tensor, torch.Tensor],
        call: AttentionCall,
        bias: torch.Tensor | None,
        *,
        check: bool,
        before: tuple[Front | None, Weights | None] = (None, None),
    ) -> torch.Tensor:
        """o [Tq, H, D] by the stage in force, counted; before: `front` and `weights` of How."""
        if torch.is_grad_enabled() and self.untold:
            raise UnsupportedError(
                f"attention {self.layer!r} changes its precision on a schedule: call "
                "lowprec.set_step(model, step) before every training step"
            )
        check_tensors(*qkv, bias)
        # The backend by what arrives: a plan knows neither head dim nor dtype.
        text, key = self.stage.policy.text, self.record.key
        how = How(call, text, "", key, check, *before)
        return attend(qkv, *cu, bias, how)


class Attention(nn.Module):
    """Attention without projections: q, k, v in, o out, each of six products in its precision.

    Jagged: q [Tq, H, D], k and v [Tk, Hkv, D] with cu_seqlens as in lowprec.ops.attention. Dense:
    q [B, Lq, H, D], k and v [B, Lk, Hkv, D] without cu_seqlens, the case of equal lengths. Output
    in the shape and dtype of q (the autocast dtype when autocast is on). policy: until a plan says
    otherwise. qk_norm: the head dim, for an RMSNorm of q and k with a weight each. rotary: applied
    after it. Both are part of the attention (lowprec.attention_front): kernels compute them in the
    pass that casts, and q and k are kept for the backward pass as they came. The other arguments:
    lowprec.ops.attention.
    """

    def __init__(
        self,
        *,
        activation: Literal["softmax", "gelu", "silu"] = "softmax",
        mask: Mask = NO_MASK,
        scale: float | None = None,
        policy: AttentionPolicy | str = "bf16",
        qk_norm: int | None = None,
        rotary: Rotary | None = None,
    ) -> None:
        super().__init__()
        AttentionCall(activation, mask)  # says what is wrong with them
        self.activation: Literal["softmax", "gelu", "silu"] = activation
        self.mask, self.scale, self.rotary = mask, scale, rotary
        policy = AttentionPolicy.parse(policy) if isinstance(policy, str) else policy
        check_call(AttentionCall(activation, mask), policy)
        stage = AttentionStage.of(policy, current(), activation, mask)
        self.lowprec_attention = AttentionProducts((stage,))
        self.q_norm = None if qk_norm is None else nn.RMSNorm(qk_norm)
        self.k_norm = None if qk_norm is None else nn.RMSNorm(qk_norm)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        *,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend; raises UnsupportedError for what lowprec.ops.attention refuses."""
        if cu_seqlens_q is None:
            if cu_seqlens_k is not None:
                raise UnsupportedError("attention: cu_seqlens_k came without cu_seqlens_q")
            return self._dense(q, k, v, bias)
        check_offsets("cu_seqlens_q", cu_seqlens_q, q)
        cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        check_offsets("cu_seqlens_k", cu_seqlens_k, q)
        return self._jagged((q, k, v), (cu_seqlens_q, cu_seqlens_k), bias, check=True)

    def _dense(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        if q.ndim != 4 or k.ndim != 4 or v.ndim != 4 or not q.shape[0] == k.shape[0] == v.shape[0]:
            raise UnsupportedError(
                f"attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: without "
                "cu_seqlens all are dense, [B, L, heads, head dim] of one B"
            )
        batch = q.shape[0]
        # Offsets of a dense batch are right by making; lengths are looked at here, as shapes.
        check_dense((q.shape[1], k.shape[1]), self.mask, bias)
        cu = [
            torch.arange(batch + 1, dtype=torch.int32, device=q.device) * t.shape[1] for t in (q, k)
        ]
        flat = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
        o = self._jagged(flat, (cu[0], cu[1]), bias, check=False)
        return o.view(q.shape)

    def _jagged(
        self,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        cu: tuple[torch.Tensor, torch.Tensor],
        bias: torch.Tensor | None,
        *,
        check: bool,
    ) -> torch.Tensor:
        q, k, v = qkv
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
        if norms is not None and norms[0].normalized_shape != q.shape[-1:]:
            raise UnsupportedError(
                f"attention: qk_norm={norms[0].normalized_shape[0]} normalizes heads of that many "
                f"channels, q {tuple(q.shape)} has heads of {q.shape[-1]}; give the head dim"
            )
        weights = None if norms is None else _weights(norms)
        if norms is not None and weights is None:
            q, k = (_normed(norm, x) for norm, x in zip(norms, (q, k), strict=True))
        dtype = autocast_dtype(v)
        if dtype is not None:
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        call = AttentionCall(
            self.activation,
            self.mask,
            q.shape[-1] ** -0.5 if self.scale is None else self.scale,
            bias is not None and bias.requires_grad,
        )
        front = None
        if weights is not None or self.rotary is not None:
            front = Front(1.0 if norms is None else _eps(norms[0]), self.rotary)
        return self.lowprec_attention.attend(
            (q, k, v), cu, call, bias, check=check, before=(front, weights)
        )

    def extra_repr(self) -> str:
        """Activation, mask and the precision of each product."""
        policy = self.lowprec_attention.stage.policy
        products = ", ".join(f"{name}={product}" for name, product in policy.items())
        return f"{self.activation}, mask={self.mask}, {products}"


def _weights(norms: tuple[nn.RMSNorm, nn.RMSNorm]) -> Weights | None:
    """Weights of norms that are what they look like; None where something acts on the modules."""
    for one in norms:
        plain = type(one) is nn.RMSNorm and type(one.weight) in (torch.Tensor, nn.Parameter)
        if hooked(one) or not plain or _eps(one) != _eps(norms[0]):
            return None
    return norms[0].weight, norms[1].weight


def _eps(norm: nn.RMSNorm) -> float:
    """As torch reads None: the epsilon of what it computes in, at least float32."""
    if norm.eps is not None:
        return norm.eps
    return torch.finfo(torch.promote_types(norm.weight.dtype, torch.float32)).eps


def _normed(norm: nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    # In the weight's dtype: torch has no fused norm for mixed ones, and warns.
    return norm(x.to(norm.weight.dtype)).to(x.dtype)  # type: ignore[no-any-return]

"""The Triton kernels of attention, as a backend; Triton is imported by the first call."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

import torch

from lowprec.attention_call import AttentionCall
from lowprec.attention_front import Front
from lowprec.attention_policy import AttentionPolicy
from lowprec.backends.attention_facts import AttentionFacts
from lowprec.backends.triton_kernels import missing
from lowprec.backends.triton_kernels.attention_native import refuse_native
from lowprec.backends.triton_kernels.proven import PROVEN

_OLDEST: Final = (8, 0)  # bf16 on tensor cores


def refuse_attention(facts: AttentionFacts) -> str | None:
    """Products in bf16, and those 8-bit ones that tensor cores of a GPU have."""
    capability = facts.hardware.capability
    if capability is None:
        return f"needs a CUDA device, this is {facts.hardware.name}"
    if capability < _OLDEST:
        return f"needs sm{_OLDEST[0]}{_OLDEST[1]}, this is {facts.hardware}"
    if facts.policy.quantizes:
        reason = refuse_native(
            facts.policy, facts.activation, head_dim=facts.head_dim, capability=capability
        )
        if reason is not None:
            return reason
        if not facts.plain:
            return "8-bit products take no bias, and a positive scale"
    if facts.dtype not in (None, torch.bfloat16):
        return f"reads bfloat16, not {facts.dtype}"
    return missing() or _unproven(facts.policy)


def refuse_front(policy: AttentionPolicy) -> str | None:
    """Why norm and rotary embedding run in PyTorch before the kernels of a policy, or None."""
    return _unproven(policy, "front + ")


def _unproven(policy: AttentionPolicy, before: str = "") -> str | None:
    """Why kernels that have not passed their tests on a GPU are not taken."""
    what = policy.text if policy.quantizes else "bf16"
    if f"{before}attention {what}" in PROVEN:
        return None
    return f"the kernels of {before}{what} attention are not proven on a GPU yet"


def _kernels(name: str = "attention_ops") -> Any:
    return import_module(f"lowprec.backends.triton_kernels.{name}")


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    *,
    call: AttentionCall,
    policy: AttentionPolicy,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse; see lowprec.attention_call."""
    how: dict[str, Any] = {"call": call, "policy": policy, "bias": bias}
    with torch.cuda.device_of(q):  # Triton launches on the current device
        o, lse = _kernels().attention_forward(q, k, v, cu_q, cu_k, **how)
    return o, lse


def attention_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    *,
    call: AttentionCall,
    policy: AttentionPolicy,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """dq, dk, dv and dbias; see lowprec.attention_call."""
    tensors = (do, q, k, v, o, lse, cu_q, cu_k)
    how: dict[str, Any] = {"call": call, "policy": policy, "bias": bias}
    with torch.cuda.device_of(q):
        dq, dk, dv, dbias = _kernels().attention_backward(*tensors, **how)
    return dq, dk, dv, dbias


def fronted_forward(
    tensors: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor | None, torch.Tensor | None],
    *,
    front: Front,
    call: AttentionCall,
    policy: AttentionPolicy,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of q, k, v, cu_q, cu_k before their front, which the kernels compute."""
    how: dict[str, Any] = {"front": front, "call": call, "policy": policy, "bias": bias}
    with torch.cuda.device_of(tensors[0]):
        o, lse = _kernels("attention_fronted").forward(tensors, weights, **how)
    return o, lse


def fronted_backward(
    tensors: tuple[torch.Tensor, ...],
    weights: tuple[torch.Tensor | None, torch.Tensor | None],
    *,
    front: Front,
    call: AttentionCall,
    policy: AttentionPolicy,
    bias: torch.Tensor | None,
) -> list[torch.Tensor | None]:
    """dq, dk, dv, dbias and gradients of the weights, of do, q, k, v, o, lse, cu_q, cu_k."""
    how: dict[str, Any] = {"front": front, "call": call, "policy": policy, "bias": bias}
    with torch.cuda.device_of(tensors[0]):
        return list(_kernels("attention_fronted").backward(tensors, weights, **how))

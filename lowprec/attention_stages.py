"""A stage of an attention: policy and backend from one step of training on."""

from __future__ import annotations

from dataclasses import dataclass

from lowprec.attention_call import Mask
from lowprec.attention_policy import AttentionPolicy
from lowprec.backends.attention import AttentionFacts, choose_attention
from lowprec.hardware import Hardware


@dataclass(frozen=True)
class AttentionStage:
    """Policy and backend of an attention from `from_step` (0 for the first stage) on.

    backend: what is expected to compute it; a call whose head dim or dtype this one refuses takes
    the next.
    """

    from_step: int
    policy: AttentionPolicy
    backend: str

    @classmethod
    def of(
        cls,
        policy: AttentionPolicy,
        hardware: Hardware,
        activation: str,
        mask: Mask,
        *,
        from_step: int = 0,
    ) -> AttentionStage:
        """The stage with the backend that `hardware` offers."""
        facts = AttentionFacts(hardware, policy, activation, mask.kind)
        return cls(from_step, policy, choose_attention(facts).backend)

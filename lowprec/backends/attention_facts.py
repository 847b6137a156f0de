"""The static facts from which a backend accepts or refuses an attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lowprec.attention_policy import AttentionPolicy
from lowprec.hardware import Hardware


@dataclass(frozen=True)
class AttentionFacts:
    """What a backend accepts or refuses an attention by; None for what a plan does not know.

    mask: the kind of a lowprec.attention_call.Mask. plain: without bias, and with a positive scale.
    """

    hardware: Hardware
    policy: AttentionPolicy
    activation: str
    mask: str
    head_dim: int | None = None
    dtype: torch.dtype | None = None
    plain: bool = True

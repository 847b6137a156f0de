"""Which backend computes an attention: the first that does not refuse, every refusal kept."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Final

from lowprec.backends import attention_emulated, attention_reference, attention_triton
from lowprec.backends.attention_facts import AttentionFacts

ATTENTION_ORDER: Final = ("triton", "emulated", "reference")
ATTENTION_MODULES: Final[MappingProxyType[str, ModuleType]] = MappingProxyType(
    {
        "triton": attention_triton,
        "emulated": attention_emulated,
        "reference": attention_reference,
    }
)
ATTENTION_NATIVE: Final = frozenset({"triton"})
"""Backends whose low-precision products run on low-precision units."""


@dataclass(frozen=True)
class AttentionChoice:
    """The backend chosen, and what the ones before it said."""

    backend: str
    refusals: tuple[tuple[str, str], ...]

    @property
    def native(self) -> bool:
        """True when the products run on low-precision units."""
        return self.backend in ATTENTION_NATIVE


def choose_attention(facts: AttentionFacts) -> AttentionChoice:
    """The first backend in ATTENTION_ORDER that does not refuse; the emulated one never does."""
    refusals: list[tuple[str, str]] = []
    for name in ATTENTION_ORDER:
        reason = ATTENTION_MODULES[name].refuse_attention(facts)
        if reason is None:
            return AttentionChoice(name, tuple(refusals))
        refusals.append((name, reason))
    raise AssertionError("the reference backend refuses nothing")


__all__ = [
    "ATTENTION_MODULES",
    "ATTENTION_NATIVE",
    "ATTENTION_ORDER",
    "AttentionChoice",
    "AttentionFacts",
    "choose_attention",
]

"""Which backend computes an op: the first in ORDER that does not refuse, every refusal kept."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType, ModuleType
from typing import Final

from lowprec.backends import emulated, reference, scaled_mm, triton_kernels
from lowprec.backends.facts import Facts
from lowprec.formats import Cast
from lowprec.hardware import Hardware

ORDER: Final = ("triton", "scaled_mm", "emulated", "reference")
MODULES: Final[MappingProxyType[str, ModuleType]] = MappingProxyType(
    {
        "triton": triton_kernels,
        "scaled_mm": scaled_mm,
        "emulated": emulated,
        "reference": reference,
    }
)
NATIVE: Final = frozenset({"scaled_mm"})
"""Backends whose low-precision products run on low-precision units."""


@dataclass(frozen=True)
class Choice:
    """The backend chosen for an op and what the ones before it said."""

    backend: str
    refusals: tuple[tuple[str, str], ...]

    @property
    def native(self) -> bool:
        """True when the products run on low-precision units."""
        return self.backend in NATIVE


def choose(op: str, facts: Facts) -> Choice:
    """The first backend in ORDER that does not refuse `op`; the reference never does."""
    refusals: list[tuple[str, str]] = []
    for name in ORDER:
        reason = MODULES[name].refuse(op, facts)
        if reason is None:
            return Choice(name, tuple(refusals))
        refusals.append((name, reason))
    raise AssertionError("the reference backend refuses nothing")


@dataclass(frozen=True)
class GemmBackends:
    """Backend names for one product: the cast of each operand and the product itself."""

    left: str
    right: str
    product: str

    @property
    def native(self) -> bool:
        """True when the product runs on low-precision units."""
        return self.product in NATIVE


def choose_gemm(left: Cast | None, right: Cast | None, hardware: Hardware) -> GemmBackends:
    """Backends of one product on `hardware`; a cast of None leaves that operand unquantized."""
    product = choose("matmul", Facts(hardware, left, right))
    casts = [choose("quantize", Facts(hardware, cast, None)).backend for cast in (left, right)]
    return GemmBackends(casts[0], casts[1], product.backend)


__all__ = ["MODULES", "ORDER", "Choice", "Facts", "GemmBackends", "choose", "choose_gemm"]

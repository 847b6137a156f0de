"""The static facts from which a backend accepts or refuses an op."""

from __future__ import annotations

from dataclasses import dataclass

from lowprec.formats import Cast
from lowprec.hardware import Hardware


@dataclass(frozen=True)
class Facts:
    """The machine and the casts of both operands (None: the operand stays unquantized)."""

    hardware: Hardware
    left: Cast | None
    right: Cast | None

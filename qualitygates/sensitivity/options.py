"""What a product may be: the rungs of the format ladder, and the fixes tried before BF16.

A product is text, as recipes write it: `bf16`, `CAST` or `LEFT x RIGHT`, with ` + rht16` for a
rotation. A policy of a layer is `FPROP / DGRAD / WGRAD`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import lowprec

from ..errors import ExperimentError

PRODUCTS: Final = ("fprop", "dgrad", "wgrad")
BF16: Final = "bf16"
ALL_BF16: Final = " / ".join([BF16] * 3)


@dataclass(frozen=True)
class Option:
    """One quantized product: casts of the left and right operand, rotation or ""."""

    left: str
    right: str
    rotation: str = ""

    @classmethod
    def parse(cls, text: str) -> Option:
        """Read `CAST` or `LEFT x RIGHT`, with ` + ROTATION`; raises ExperimentError."""
        operands, _, rotation = text.partition(" + ")
        parts = [part.strip() for part in operands.split(" x ")]
        try:
            for part in parts:
                lowprec.Cast.parse(part)
        except lowprec.LowprecError as error:
            raise ExperimentError(f"formats: {text!r}: {error}") from error
        if len(parts) > 2:
            raise ExperimentError(f"formats: {text!r}; write 'FORMAT' or 'LEFT x RIGHT'")
        return cls(parts[0], parts[-1], rotation.strip())

    def __str__(self) -> str:
        text = self.left if self.left == self.right else f"{self.left} x {self.right}"
        return f"{text} + {self.rotation}" if self.rotation else text

    @property
    def formats(self) -> tuple[lowprec.Format, lowprec.Format]:
        """Formats of the left and the right operand."""
        return lowprec.Cast.parse(self.left).format, lowprec.Cast.parse(self.right).format

    @property
    def bits(self) -> int:
        """Width of the widest element of either operand."""
        return max(one.element.bits for one in self.formats)


def rungs_of(text: str) -> dict[str, str]:
    """Product texts of one rung by product; `text` is one product, or three joined by ` / `."""
    parts = [part.strip() for part in text.split(" / ")]
    if len(parts) not in (1, 3):
        raise ExperimentError(
            f"formats: {text!r}; write one product for all three, or 'FPROP / DGRAD / WGRAD'"
        )
    products = dict(zip(PRODUCTS, parts * (3 // len(parts)), strict=True))
    return {name: str(Option.parse(one)) for name, one in products.items()}


@dataclass(frozen=True)
class Fixes:
    """Which fixes are tried for a harmful operand before its product goes back to BF16."""

    sr: bool
    rotation: str
    higher: bool

    def of(self, product: str, rung: str, higher: Sequence[str]) -> list[str]:
        """Product texts to try in place of `rung`, cheapest first.

        Stochastic rounding is for gradients (the left operand of dgrad and wgrad); a rotation for
        every product; `higher` are the rungs above, which cost speed.
        """
        base = Option.parse(rung)
        found: list[Option] = []
        if self.sr and product != "fprop" and not base.left.endswith(":sr"):
            found += _checked(replace(base, left=f"{base.left}:sr"))
        if self.rotation and not base.rotation:
            found += _checked(replace(base, rotation=self.rotation))
            found += [replace(one, rotation=self.rotation) for one in found[:1] if self.sr]
        texts = [str(one) for one in found if str(one) != rung]
        return list(dict.fromkeys([*texts, *(higher if self.higher else [])]))


def _checked(option: Option) -> list[Option]:
    """The option, or nothing where the format cannot round stochastically."""
    try:
        lowprec.Cast.parse(option.left)
    except lowprec.LowprecError:
        return []
    return [option]


def policy_text(products: Mapping[str, str]) -> str:
    """`FPROP / DGRAD / WGRAD`, products that are not named in BF16."""
    return " / ".join(products.get(name, BF16) for name in PRODUCTS)


def products_of(policy: str) -> dict[str, str]:
    """The three products of a policy text."""
    return dict(zip(PRODUCTS, policy.split(" / "), strict=True))

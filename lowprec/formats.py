"""What the bits of a low-precision tensor mean: elements, block formats and casts, in one table.

Sources: OCP Microscaling Formats (MX) v1.0 for elements, the block of 32 and E8M0; IEEE 754 for
float32.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType
from typing import Final, Literal

import torch

from lowprec.errors import UnsupportedError

ALL: Final = -1
"""A block extent that stands for the whole dimension."""


def nearest_names(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the closest known names, else all of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(names)}"


class ScaleRule(StrEnum):
    """How the largest magnitude of a block becomes its scale.

    FLOOR, RCEIL, CEIL and EVEN give powers of two; EXACT gives amax / max for free float scales.
    """

    FLOOR = "floor"
    RCEIL = "rceil"
    CEIL = "ceil"
    EVEN = "even"
    EXACT = "exact"

    @property
    def clips(self) -> bool:
        """True when the largest values of a block may lie above what its scale can hold."""
        return self in (ScaleRule.FLOOR, ScaleRule.EVEN)


class Rounding(StrEnum):
    """How a scaled value becomes a code.

    NEAREST: to the nearest, ties to even. STOCHASTIC: up or down with the probability that makes
    the expected value exact, for what the scale does not clip.
    """

    NEAREST = "nearest"
    STOCHASTIC = "sr"


@dataclass(frozen=True)
class Element:
    """A sign, exponent and mantissa layout of 4 to 8 bits; every other fact is derived."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    max: float
    specials: Literal["none", "nan", "ieee"]
    torch_dtype: torch.dtype | None = None

    @property
    def bits(self) -> int:
        """Width of one code in bits, the sign included."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """Exponent bias, 2^(e-1) - 1."""
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal value."""
        return 1 - self.bias

    @property
    def emax(self) -> int:
        """Exponent of the largest value."""
        return math.frexp(self.max)[1] - 1

    @property
    def quantum(self) -> float:
        """The smallest positive value, 2^(emin - mantissa bits)."""
        return math.ldexp(1.0, self.emin - self.mantissa_bits)

    @property
    def max_code(self) -> int:
        """Code of the largest finite value, sign bit clear."""
        fraction = round((math.ldexp(self.max, -self.emax) - 1) * (1 << self.mantissa_bits))
        return ((self.emax + self.bias) << self.mantissa_bits) | fraction

    @property
    def max_fraction(self) -> int:
        """The 23 fraction bits that `max` has as a float32: RCEIL's threshold."""
        return round((math.ldexp(self.max, -self.emax) - 1) * (1 << 23))

    @cached_property
    def values(self) -> tuple[float, ...]:
        """Value of every code 0 .. 2^bits - 1; NaN and infinities where the element has them."""
        return tuple(self._value(code) for code in range(1 << self.bits))

    def _value(self, code: int) -> float:
        fraction = code & ((1 << self.mantissa_bits) - 1)
        exponent = (code >> self.mantissa_bits) & ((1 << self.exponent_bits) - 1)
        magnitude = code & ((1 << (self.bits - 1)) - 1)
        sign = -1.0 if code >> (self.bits - 1) else 1.0
        if magnitude > self.max_code:
            return sign * math.inf if self.specials == "ieee" and fraction == 0 else math.nan
        if exponent == 0:
            return sign * fraction * self.quantum
        power = exponent - self.bias - self.mantissa_bits
        return sign * math.ldexp((1 << self.mantissa_bits) + fraction, power)


E4M3: Final = Element("e4m3", 4, 3, 448.0, "nan", torch.float8_e4m3fn)
E5M2: Final = Element("e5m2", 5, 2, 57344.0, "ieee", torch.float8_e5m2)
E2M3: Final = Element("e2m3", 2, 3, 7.5, "none")
E3M2: Final = Element("e3m2", 3, 2, 28.0, "none")
E2M1: Final = Element("e2m1", 2, 1, 6.0, "none")
ELEMENTS: Final = MappingProxyType({e.name: e for e in (E4M3, E5M2, E2M3, E3M2, E2M1)})

ScaleEncoding = Literal["e8m0", "float32", "e4m3"]
_SCALE_BITS: Final = {"e8m0": 8, "float32": 32, "e4m3": 8}


@dataclass(frozen=True)
class Format:
    """An element, the block that shares one scale, and how the scale is stored.

    `block` is (rows, values along the contraction axis); ALL stands for the whole extent.
    `power_of_two` says that every scale is a power of two. `outer` says that the tensor carries one
    more float32 scale. A value is code x block scale (x outer scale).
    """

    name: str
    element: Element
    block: tuple[int, int]
    scale: ScaleEncoding
    power_of_two: bool
    outer: bool = False

    @property
    def transposable(self) -> bool:
        """True when the cast along either axis gives the same codes and scales."""
        return self.block[0] == self.block[1]

    @property
    def scale_after_product(self) -> bool:
        """True when a free float scale spans the contraction and so multiplies the product."""
        return self.block[1] == ALL and not self.power_of_two

    @property
    def scale_rules(self) -> tuple[ScaleRule, ...]:
        """The scale rules a cast to this format may use; the first is the default."""
        if self.power_of_two:
            return (ScaleRule.RCEIL, ScaleRule.FLOOR, ScaleRule.CEIL, ScaleRule.EVEN)
        return (ScaleRule.EXACT,)

    @property
    def bits_per_value(self) -> float:
        """Stored bits a value, scales included; scales over a whole extent count as none."""
        if ALL in self.block:
            return float(self.element.bits)
        rows, cols = self.block
        return self.element.bits + _SCALE_BITS[self.scale] / (rows * cols)


def _table() -> MappingProxyType[str, Format]:
    rows = [
        Format("mxfp8", E4M3, (1, 32), "e8m0", power_of_two=True),
        Format("mxfp8_32x32", E4M3, (32, 32), "e8m0", power_of_two=True),
        Format("mxfp8_1x128", E4M3, (1, 128), "e8m0", power_of_two=True),
        Format("mxfp8_128x128", E4M3, (128, 128), "e8m0", power_of_two=True),
        Format("mxfp8_e5m2", E5M2, (1, 32), "e8m0", power_of_two=True),
        Format("mxfp8_e5m2_32x32", E5M2, (32, 32), "e8m0", power_of_two=True),
        Format("fp8_1x128", E4M3, (1, 128), "float32", power_of_two=True),
        Format("fp8_128x128", E4M3, (128, 128), "float32", power_of_two=True),
        Format("fp8_rowwise", E4M3, (1, ALL), "float32", power_of_two=False),
        Format("fp8_tensorwise", E4M3, (ALL, ALL), "float32", power_of_two=False),
        Format("mxfp6_e2m3", E2M3, (1, 32), "e8m0", power_of_two=True),
        Format("mxfp6_e2m3_32x32", E2M3, (32, 32), "e8m0", power_of_two=True),
        Format("mxfp6_e3m2", E3M2, (1, 32), "e8m0", power_of_two=True),
        Format("mxfp6_e3m2_32x32", E3M2, (32, 32), "e8m0", power_of_two=True),
        Format("mxfp4", E2M1, (1, 32), "e8m0", power_of_two=True),
        Format("mxfp4_32x32", E2M1, (32, 32), "e8m0", power_of_two=True),
        Format("nvfp4", E2M1, (1, 16), "e4m3", power_of_two=False, outer=True),
        Format("nvfp4_16x16", E2M1, (16, 16), "e4m3", power_of_two=False, outer=True),
    ]
    return MappingProxyType({row.name: row for row in rows})


FORMATS: Final = _table()
"""Every format by name."""


@dataclass(frozen=True)
class Cast:
    """How to get into a format: the format, the scale rule and the rounding.

    Written `FORMAT[:RULE][:sr]`, for example `mxfp8` (RCEIL, nearest), `mxfp8:floor`, `mxfp4:sr`.
    Raises UnsupportedError when the format cannot use the scale rule, and for stochastic rounding
    under a rule that clips: what is clipped is always rounded down, which biases it. NVFP4's block
    scales are rounded to nearest themselves, so the largest values of half of its blocks are
    clipped, by up to 1/16: that is how the format is defined.
    """

    format: Format
    scale_rule: ScaleRule
    rounding: Rounding = Rounding.NEAREST
    text: str = field(init=False, repr=False, compare=False)
    """As it is written. Made at once: torch.compile traces no method that makes text."""

    def __post_init__(self) -> None:
        text = self.format.name
        if self.scale_rule is not self.format.scale_rules[0]:
            text += f":{self.scale_rule}"
        text = f"{text}:{self.rounding}" if self.stochastic else text
        object.__setattr__(self, "text", text)
        if self.scale_rule not in self.format.scale_rules:
            allowed = ", ".join(self.format.scale_rules)
            raise UnsupportedError(
                f"format {self.format.name}: scale rule {self.scale_rule} does not apply; "
                f"allowed: {allowed}"
            )
        if self.stochastic and self.scale_rule.clips:
            allowed = ", ".join(rule for rule in self.format.scale_rules if not rule.clips)
            raise UnsupportedError(
                f"format {self.format.name}: stochastic rounding needs a scale rule that clips "
                f"nothing, or the largest values of a block are biased; {self.scale_rule} clips, "
                f"allowed: {allowed}"
            )

    @property
    def stochastic(self) -> bool:
        """True when the cast draws random bits."""
        return self.rounding is Rounding.STOCHASTIC

    @classmethod
    def parse(cls, text: str) -> Cast:
        """Read `FORMAT[:RULE][:sr]`; raises UnsupportedError with the nearest known name."""
        name, *options = text.strip().split(":")
        if name not in FORMATS:
            raise UnsupportedError(f"unknown format {name!r}; {nearest_names(name, FORMATS)}")
        fmt = FORMATS[name]
        rounding = Rounding.NEAREST
        if options[-1:] == [Rounding.STOCHASTIC.value]:
            rounding = Rounding.STOCHASTIC
            del options[-1]
        if not options:
            return cls(fmt, fmt.scale_rules[0], rounding)
        if len(options) > 1 or options[0] not in list(ScaleRule):
            shown = ":".join(options)
            known = (*ScaleRule, Rounding.STOCHASTIC)
            raise UnsupportedError(
                f"unknown scale rule {shown!r} in {text!r}; {nearest_names(shown, known)} "
                "(write FORMAT, FORMAT:RULE, FORMAT:sr or FORMAT:RULE:sr)"
            )
        return cls(fmt, ScaleRule(options[0]), rounding)

    def __str__(self) -> str:
        return self.text

"""The precision of an attention: each of its six products is BF16, or casts its operands or one.

    S = Q K^T     qk  contracts D    q along D    k along D
    O = P V       pv  contracts Lk   P along Lk   v along Lk
    dP = dO V^T   dp  contracts D    do along D   v along D
    dV = P^T dO   dv  contracts Lq   P along Lq   do along Lq
    dQ = dS K     dq  contracts Lk   dS along Lk  k along Lk
    dK = dS^T Q   dk  contracts Lq   dS along Lq  q along Lq

Blocks along tokens start at the first token of each sequence, in each head by itself, and never
reach into another. P in pv is exp(s - rowmax), in [0, 1], and its sum is taken before it is cast;
P in dv is exp(s - lse). delta = rowsum(dO * O) takes dO as dp casts it and O as it was returned: a
row that one key has nearly for itself has dP - delta near 0, and there only errors that both share
cancel. For the same reason dp should read v as pv does (docs/attention.md has the measurement).
`bf16 x CAST` does that without a cast of dO: with dq and dk so too, and dv in BF16, the backward
pass is the gradient of what the forward pass computed from the casts of q, k and v.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from lowprec.errors import UnsupportedError
from lowprec.formats import ELEMENTS, Cast, Element, nearest_names
from lowprec.policy import BF16, Gemm, Unquantized, parse_product

ATTENTION_PRODUCTS: Final = ("qk", "pv", "dp", "dv", "dq", "dk")
OPERANDS: Final = {
    "qk": ("q", "k"),
    "pv": ("p", "v"),
    "dp": ("do", "v"),
    "dv": ("p", "do"),
    "dq": ("ds", "k"),
    "dk": ("ds", "q"),
}


@dataclass(frozen=True)
class StaticCast:
    """An element under one fixed factor: value = code / factor; for P of softmax, in [0, 1].

    Written `e4m3*256`: 256 is the largest power of two whose product with 1 E4M3 holds. Saturates.
    """

    element: Element
    factor: float

    def __str__(self) -> str:
        return f"{self.element.name}*{self.factor:g}"


@dataclass(frozen=True)
class AttentionGemm:
    """A quantized product of attention: how its left and its right operand are cast.

    One of them may stay BF16. Raises UnsupportedError where both do.
    """

    left: Cast | StaticCast | Unquantized
    right: Cast | Unquantized

    def __post_init__(self) -> None:
        if self.left is BF16 and self.right is BF16:
            raise UnsupportedError("'bf16 x bf16': a product in bf16 is written 'bf16'")

    @property
    def casts(self) -> tuple[Cast | StaticCast | None, Cast | None]:
        """Casts of the left and the right operand; None for the one that stays unquantized."""
        left = None if isinstance(self.left, Unquantized) else self.left
        return left, None if isinstance(self.right, Unquantized) else self.right

    def __str__(self) -> str:
        return str(self.left) if self.left == self.right else f"{self.left} x {self.right}"


AttentionProduct = Unquantized | AttentionGemm


def parse_attention_product(text: str, name: str) -> AttentionProduct:
    """Read `bf16`, `CAST`, `CAST x CAST`, `bf16 x CAST` or `CAST x bf16` of the product `name`.

    P may be cast as `e4m3*256`. Raises UnsupportedError for anything that attention cannot mean:
    rotations, random rounding, and scales over a whole tensor or row, by which the rows of a
    sequence would depend on its neighbours in the batch.
    """
    if text.strip() == BF16.value:
        return BF16
    left, times, right = text.partition(" x ")
    if not times and "*" in text:
        static = _static(left.strip(), name)
        raise UnsupportedError(f"{text!r}: a fixed factor is for P alone; write '{static} x RIGHT'")
    if not times:
        cast = _cast(text, text)
        return AttentionGemm(cast, cast)
    if not left.strip() or not right.strip() or " x " in right:
        raise UnsupportedError(_FORMS.format(text))
    first = _static(left.strip(), name) if "*" in left else _operand(left, text)
    return AttentionGemm(first, _operand(right, text))


_FORMS: Final = (
    "{!r}: write 'bf16', 'FORMAT', 'LEFT x RIGHT' (one of the two may be bf16) or, for P, "
    "'e4m3*256 x RIGHT'; no product of attention is skipped"
)


def _operand(part: str, text: str) -> Cast | Unquantized:
    return BF16 if part.strip() == BF16.value else _cast(part, text)


def _cast(part: str, text: str) -> Cast:
    """The cast `part` of the product `text`."""
    if "*" in part:
        raise UnsupportedError(f"{text!r}: a fixed factor is for P, the left operand of pv and dv")
    product = parse_product(part)
    if not isinstance(product, Gemm):
        raise UnsupportedError(_FORMS.format(text))
    if product.rotation is not None:
        raise UnsupportedError(f"{text!r}: the products of attention take no rotation")
    cast = product.left
    if cast.stochastic:
        raise UnsupportedError(f"{cast}: attention rounds to nearest only")
    if not cast.format.power_of_two:
        raise UnsupportedError(
            f"{cast}: a scale over a whole tensor or row would make the rows of a sequence "
            "depend on what else is in the batch; use a format with blocks, such as mxfp8_32x32"
        )
    return cast


def _static(text: str, name: str) -> StaticCast:
    element, _, factor = text.partition("*")
    if OPERANDS[name][0] != "p":
        raise UnsupportedError(
            f"{text!r}: a fixed factor is for P, the left operand of pv and dv, which softmax "
            f"keeps in [0, 1]; {OPERANDS[name][0]} in {name} has no bound"
        )
    if element not in ELEMENTS:
        raise UnsupportedError(f"unknown element {element!r}; {nearest_names(element, ELEMENTS)}")
    found = ELEMENTS[element]
    powers = [2**i for i in range(17) if 2**i <= found.max]
    if factor not in map(str, powers):
        raise UnsupportedError(
            f"{text!r}: the factor must be a power of two from 1 to {powers[-1]}, so that P = 1 "
            f"fits {element}"
        )
    return StaticCast(found, float(factor))


@dataclass(frozen=True)
class AttentionPolicy:
    """The precision of the six products of an attention."""

    qk: AttentionProduct
    pv: AttentionProduct
    dp: AttentionProduct
    dv: AttentionProduct
    dq: AttentionProduct
    dk: AttentionProduct
    # Text that torch.compile need not make: it cannot trace __str__.
    text: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", " / ".join(str(product) for _, product in self.items()))

    @classmethod
    def parse(cls, text: str) -> AttentionPolicy:
        """Read `PRODUCT` for all six, or `QK / PV / DP / DV / DQ / DK`."""
        parts = text.split(" / ")
        if len(parts) not in (1, len(ATTENTION_PRODUCTS)):
            raise UnsupportedError(
                f"cannot read the attention policy {text!r}; write one product for all six, or "
                "'QK / PV / DP / DV / DQ / DK'"
            )
        parts *= len(ATTENTION_PRODUCTS) // len(parts)
        pairs = zip(parts, ATTENTION_PRODUCTS, strict=True)
        return cls(*(parse_attention_product(part, name) for part, name in pairs))

    def __str__(self) -> str:
        return self.text

    @property
    def quantizes(self) -> bool:
        """True when at least one product is quantized."""
        return any(isinstance(product, AttentionGemm) for _, product in self.items())

    @property
    def random(self) -> bool:
        """False: attention draws no random bits."""
        return False

    def items(self) -> Iterator[tuple[str, AttentionProduct]]:
        """(name, product) of the six products, in order."""
        return ((name, getattr(self, name)) for name in ATTENTION_PRODUCTS)


ATTENTION_BF16: Final = AttentionPolicy(*[BF16] * 6)

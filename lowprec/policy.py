"""Precision, said per product: each GEMM of a layer is BF16 or a pair of casts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from lowprec.errors import UnsupportedError
from lowprec.formats import FORMATS, Cast, nearest_names


class Unquantized(Enum):
    """A product whose operands are not quantized: bf16 operands, float32 sums, bf16 result."""

    BF16 = "bf16"

    def __str__(self) -> str:
        return self.value


BF16: Final = Unquantized.BF16


@dataclass(frozen=True)
class Gemm:
    """A quantized product: the cast of the left operand and the cast of the right one.

    Both run along the contraction. Left x right is x by w in fprop, dy by w in dgrad, dy by x in
    wgrad. Written `CAST x CAST`, or one `CAST` when they are equal.
    """

    left: Cast
    right: Cast

    def __str__(self) -> str:
        return str(self.left) if self.left == self.right else f"{self.left} x {self.right}"


Product = Unquantized | Gemm


def casts(product: Product) -> tuple[Cast | None, Cast | None]:
    """Casts of the left and the right operand; None for operands that stay unquantized."""
    return (product.left, product.right) if isinstance(product, Gemm) else (None, None)


PRODUCTS: Final = ("fprop", "dgrad", "wgrad")
_SAME_AS_BF16: Final = ("bf16", "bfloat16", "torch.bfloat16")
_WIDER: Final = ("fp32", "float32", "tf32", "fp16", "float16", "half", "none")


def parse_product(text: str) -> Product:
    """Read `bf16`, `CAST` or `CAST x CAST`; raises UnsupportedError with the nearest known name."""
    if text.strip() == BF16.value:
        return BF16
    parts = [part.strip() for part in text.split(" x ")]
    if len(parts) > 2 or not all(parts):
        raise UnsupportedError(
            f"cannot read the product {text!r}; write 'bf16', 'FORMAT' or 'LEFT x RIGHT', "
            "for example 'mxfp8 x mxfp8_32x32'"
        )
    if BF16.value in parts:
        raise UnsupportedError(
            f"{text!r} quantizes one operand only; a product is 'bf16' or has both operands cast"
        )
    casts = [_cast(part) for part in parts]
    return Gemm(casts[0], casts[-1])


def _cast(text: str) -> Cast:
    name = text.partition(":")[0]
    if name in FORMATS:
        return Cast.parse(text)
    plain = name.lower()
    if name == BF16.value:
        hint = "bf16 is not quantized and takes no scale rule"
    elif plain == "skip":
        hint = "leaving a product out (skipping wgrad) is not available; write bf16"
    elif plain in _SAME_AS_BF16:
        hint = "did you mean bf16?"
    elif plain in _WIDER:
        hint = "bf16 is the one product that is not quantized; its sums are float32"
    else:
        hint = nearest_names(plain, (BF16.value, *FORMATS))
    raise UnsupportedError(f"unknown format {text!r}; {hint}")


@dataclass(frozen=True)
class LinearPolicy:
    """The precision of the three products of a linear layer.

    y = x w^T (fprop, contracts K), dx = dy w (dgrad, contracts N), dw = dy^T x (wgrad, contracts
    the rows).
    """

    fprop: Product
    dgrad: Product
    wgrad: Product

    @property
    def quantizes(self) -> bool:
        """True when at least one product is quantized."""
        return any(isinstance(product, Gemm) for _, product in self.items())

    def items(self) -> Iterator[tuple[str, Product]]:
        """(name, product) of the three products, in order."""
        return iter((("fprop", self.fprop), ("dgrad", self.dgrad), ("wgrad", self.wgrad)))


ALL_BF16: Final = LinearPolicy(BF16, BF16, BF16)

"""Precision, said per product: each GEMM of a layer is BF16 or a pair of casts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

from lowprec.errors import UnsupportedError
from lowprec.formats import FORMATS, Cast, nearest_names
from lowprec.rotation import Rotation


class Unquantized(Enum):
    """A product whose operands are not quantized: bf16 operands, float32 sums, bf16 result."""

    BF16 = "bf16"

    def __str__(self) -> str:
        return self.value


BF16: Final = Unquantized.BF16


class Skipped(Enum):
    """A product that is not computed: only wgrad, whose weight then gets no gradient from it."""

    SKIP = "skip"

    def __str__(self) -> str:
        return self.value


SKIP: Final = Skipped.SKIP


@dataclass(frozen=True)
class Gemm:
    """A quantized product: the casts of both operands, and the rotation of both, if any.

    All run along the contraction. Left x right is x by w in fprop, dy by w in dgrad, dy by x in
    wgrad. Written `CAST x CAST`, or one `CAST` when they are equal, with ` + rht32` for a rotation.
    """

    left: Cast
    right: Cast
    rotation: Rotation | None = None

    @property
    def random(self) -> bool:
        """True when the product draws random bits."""
        seeded = self.rotation is not None and self.rotation.seeded
        return self.left.stochastic or self.right.stochastic or seeded

    def __str__(self) -> str:
        text = str(self.left) if self.left == self.right else f"{self.left} x {self.right}"
        return text if self.rotation is None else f"{text} + {self.rotation}"


Product = Unquantized | Skipped | Gemm


def casts(product: Product) -> tuple[Cast | None, Cast | None]:
    """Casts of the left and the right operand; None for operands that stay unquantized."""
    return (product.left, product.right) if isinstance(product, Gemm) else (None, None)


PRODUCTS: Final = ("fprop", "dgrad", "wgrad")
_SAME_AS_BF16: Final = ("bf16", "bfloat16", "torch.bfloat16")
_WIDER: Final = ("fp32", "float32", "tf32", "fp16", "float16", "half", "none")


def parse_product(text: str) -> Product:
    """Read `bf16`, `skip`, `CAST` or `CAST x CAST`, the casts with ` + ROTATION` if wanted.

    Raises UnsupportedError with the nearest known name.
    """
    for whole in (BF16, SKIP):
        if text.strip() == whole.value:
            return whole
    operands, plus, rotation = text.partition(" + ")
    parts = [part.strip() for part in operands.split(" x ")]
    if len(parts) > 2 or not all(parts) or bool(plus) != bool(rotation.strip()):
        raise UnsupportedError(
            f"cannot read the product {text!r}; write 'bf16', 'FORMAT' or 'LEFT x RIGHT', with "
            "' + rht32' for a rotation, for example 'mxfp8 x mxfp8_32x32'"
        )
    if set(parts) == {BF16.value}:
        raise UnsupportedError(
            f"{text!r}: a product in bf16 is written 'bf16', and rotates nothing"
        )
    if BF16.value in parts:
        raise UnsupportedError(
            f"{text!r} quantizes one operand only; a product is 'bf16' or has both operands cast"
        )
    casts = [_cast(part) for part in parts]
    return Gemm(casts[0], casts[-1], Rotation.parse(rotation) if plus else None)


def _cast(text: str) -> Cast:
    name = text.partition(":")[0]
    if name in FORMATS:
        return Cast.parse(text)
    plain = name.lower()
    if name == BF16.value:
        hint = "bf16 is not quantized and takes no scale rule"
    elif plain == "skip":
        hint = "skip stands alone, and only for wgrad"
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
    the rows). Raises UnsupportedError when anything but wgrad is skipped.
    """

    fprop: Product
    dgrad: Product
    wgrad: Product

    def __post_init__(self) -> None:
        for name in ("fprop", "dgrad"):
            if getattr(self, name) is SKIP:
                raise UnsupportedError(f"{name} cannot be skipped; only wgrad can")

    @classmethod
    def parse(cls, text: str) -> LinearPolicy:
        """Read `PRODUCT` for all three, or `FPROP / DGRAD / WGRAD`."""
        parts = text.split(" / ")
        if len(parts) not in (1, 3):
            raise UnsupportedError(
                f"cannot read the policy {text!r}; write one product for all three, or "
                "'FPROP / DGRAD / WGRAD'"
            )
        return cls(*map(parse_product, parts * (3 // len(parts))))

    def __str__(self) -> str:
        return " / ".join(str(product) for _, product in self.items())

    @property
    def random(self) -> bool:
        """True when at least one product draws random bits."""
        return any(isinstance(product, Gemm) and product.random for _, product in self.items())

    @property
    def quantizes(self) -> bool:
        """True when at least one product is quantized."""
        return any(isinstance(product, Gemm) for _, product in self.items())

    def items(self) -> Iterator[tuple[str, Product]]:
        """(name, product) of the three products, in order."""
        return iter((("fprop", self.fprop), ("dgrad", self.dgrad), ("wgrad", self.wgrad)))


ALL_BF16: Final = LinearPolicy(BF16, BF16, BF16)

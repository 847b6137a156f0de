"""What a cast loses in one product: errors against the same product of the unquantized operands."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

import torch
from scipy.linalg import hadamard

import lowprec

from .options import PRODUCTS, Option

# Rows, and columns of a weight, that are looked at: contractions are always whole.
ROWS: Final = 128
COLUMNS: Final = 64
_GROUP: Final = 32
_SLACK: Final = 1 + 2.0**-20


@dataclass(frozen=True)
class Operands:
    """x [M, K], w [N, K] and dy [M, N] of one call of a layer, and the loss of its batch."""

    x: torch.Tensor
    w: torch.Tensor
    dy: torch.Tensor
    loss: float


@dataclass
class Sums:
    """Additive sums of one product under one option; ranks and batches add up.

    error, signal: squared norms of the result's error and of the result. fisher: 1/2 sum over rows
    of (g dy)^2, where g is the gradient of a row's own loss, over the loss. nonzero, flushed,
    values, clipped: counts over both operands. broken: calls whose numbers were not finite.
    """

    error: float = 0.0
    signal: float = 0.0
    fisher: float = 0.0
    nonzero: float = 0.0
    flushed: float = 0.0
    values: float = 0.0
    clipped: float = 0.0
    calls: int = 0
    broken: int = 0

    def add(self, other: Mapping[str, float]) -> None:
        """Add the sums of one call; a call with a number that is not finite only counts."""
        if not all(math.isfinite(value) for value in other.values()):
            self.broken += 1
            return
        self.calls += 1
        for name, value in other.items():
            setattr(self, name, getattr(self, name) + value)

    def proxies(self) -> dict[str, float | int | None]:
        """The numbers that order the branches; None where no call gave a finite one."""
        known = self.calls > 0 and self.signal > 0
        ratio = self.error / self.signal if known else 0.0
        return {
            "relative_error": math.sqrt(ratio) if known else None,
            "sqnr_db": -10 * math.log10(ratio) if known and ratio > 0 else None,
            "fisher": self.fisher / self.calls if self.calls else None,
            "underflow": self.flushed / self.nonzero if self.nonzero else None,
            "saturation": self.clipped / self.values if self.values else None,
            "calls": self.calls,
            "broken": self.broken,
        }


@dataclass
class Probe:
    """The sums of one layer for every product and option."""

    options: Mapping[str, tuple[str, ...]]
    sums: dict[str, dict[str, Sums]] = field(init=False)
    calls: int = 0

    def __post_init__(self) -> None:
        self.sums = {
            product: {text: Sums() for text in texts} for product, texts in self.options.items()
        }

    @torch.no_grad()
    def saw(self, operands: Operands) -> None:
        """Add what every option loses on one call."""
        self.calls += 1
        for product in PRODUCTS:
            view = _View.of(product, operands)
            for text, sums in self.sums[product].items():
                sums.add(view.loss_of(Option.parse(text)))


@dataclass
class _View:
    """Sampled operands of one product, contraction last: left [R, C] x right [S, C].

    gradient: dy of the sampled results for fprop, scaled to the gradient of a row's own loss.
    """

    left: torch.Tensor
    right: torch.Tensor
    gradient: torch.Tensor | None
    scale: float
    exact: torch.Tensor

    @classmethod
    def of(cls, product: str, operands: Operands) -> _View:
        x, w, dy = (t.detach().float() for t in (operands.x, operands.w, operands.dy))
        rows, n, k = (
            _sample(size, most, t.device)
            for size, most, t in ((len(x), ROWS, x), (len(w), COLUMNS, w), (w.shape[1], COLUMNS, w))
        )
        if product == "fprop":
            left, right = x[rows], w[n]
            gradient = dy[rows][:, n] * len(x)
            share = left.shape[0] * right.shape[0] / (len(x) * len(w))
            scale = 0.5 / (len(x) * share * max(operands.loss, 1e-12))
            return cls(left, right, gradient, scale, left @ right.T)
        if product == "dgrad":
            left, right = dy[rows], w[:, k].T
        else:
            left, right = dy[:, n].T, x[:, k].T
        return cls(left, right, None, 0.0, left @ right.T)

    def loss_of(self, option: Option) -> dict[str, float]:
        """Sums of this product under one option."""
        left, right = self.left, self.right
        if option.rotation:
            left, right = (_rotated(one, option.rotation) for one in (left, right))
        cast = [_cast(one, text) for one, text in ((left, option.left), (right, option.right))]
        error = cast[0].values @ cast[1].values.T - self.exact
        terms = [error.square().sum(), self.exact.square().sum()]
        if self.gradient is None:
            terms.append(error.new_zeros(()))
        else:
            terms.append(self.scale * (self.gradient * error).square().sum())
        terms += [a + b for a, b in zip(cast[0].counts, cast[1].counts, strict=True)]
        names = ("error", "signal", "fisher", "nonzero", "flushed", "values", "clipped")
        numbers = torch.stack([term.double() for term in terms]).tolist()
        return dict(zip(names, numbers, strict=True))


def _sample(size: int, most: int, device: torch.device) -> Any:
    """Everything, or groups of 32 neighbours evenly spread: tiles of up to 32 rows stay whole,
    larger ones see a sample of theirs.
    """
    if size <= most:
        return slice(None)
    groups, places = most // _GROUP, size // _GROUP
    starts = torch.tensor([(2 * i + 1) * places // (2 * groups) for i in range(groups)])
    index = starts[:, None] * _GROUP + torch.arange(_GROUP)
    return index.flatten().to(device)


@dataclass(frozen=True)
class _Cast:
    values: torch.Tensor
    counts: list[torch.Tensor]


@cache
def _parsed(text: str) -> lowprec.Cast:
    return lowprec.Cast.parse(text)


def _cast(source: torch.Tensor, text: str) -> _Cast:
    """What a cast along the last axis decodes to, and counts of what it flushed and clipped."""
    cast = _parsed(text)
    generator = lowprec.RandomStream(0, "screen", text) if cast.stochastic else None
    q = lowprec.quantize(source.contiguous(), cast, generator=generator)
    values = lowprec.dequantize(q)
    element = cast.format.element
    largest = (q.codes & ((1 << (element.bits - 1)) - 1)) == element.max_code
    nonzero = source.count_nonzero()
    flushed = nonzero - values.count_nonzero()
    clipped = (largest & (source.abs() > values.abs() * _SLACK)).count_nonzero()
    count = torch.tensor(float(source.numel()), device=source.device)
    return _Cast(values, [nonzero, flushed, count, clipped])


@cache
def _matrix(size: int) -> torch.Tensor:
    signs = torch.where(torch.arange(size) * 2654435761 % 7 < 3, -1.0, 1.0)
    return signs[:, None] * torch.from_numpy(hadamard(size)).float() / math.sqrt(size)


def _rotated(source: torch.Tensor, rotation: str) -> torch.Tensor:
    """Blocks of the last axis rotated by a Hadamard matrix with fixed signs, zero-padded."""
    size = int(rotation.partition(":")[0].removeprefix("rht"))
    padding = -source.shape[1] % size
    padded = torch.nn.functional.pad(source, (0, padding))
    blocks = padded.reshape(len(source), -1, size) @ _matrix(size).to(source.device)
    return blocks.reshape(len(source), -1)

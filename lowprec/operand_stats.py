"""What a cast does to an operand, in numbers, measured on a sample of whole blocks.

Every number is of the sample, without approximation: a float32 value minus what it decodes to is a
float32, and squares are summed in float64. SQNR is 10 log10(sum v^2 / sum (v - d)^2) over values v
and what they decode to, d.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

import torch

from lowprec import ops
from lowprec.backends import reference
from lowprec.formats import Cast, Format
from lowprec.rng import RandomStream
from lowprec.tensor import QuantizedTensor

SAMPLE: Final = 1 << 17
"""Most elements of an operand that are looked at (its amax is over all of them)."""
GROUP: Final = 128
"""Rows of a group: a multiple of every block, so that casts along both axes see true blocks."""

# A free float scale is rounded: beyond what it can hold only by more than that counts as clipped.
_SLACK: Final = 1 + 2.0**-20
_NO_EXPONENT: Final = 1 << 14


@dataclass(frozen=True)
class Loss:
    """What a cast loses; None where nothing is defined (no finite values, all of them zero).

    sqnr_db: signal to quantization noise, dB; inf for an exact cast. underflow: share of the
    nonzero values that became zero. saturation: share of the values whose magnitude is beyond what
    the codes of their block can hold. Blocks with NaN or Inf are left out of all three.
    """

    sqnr_db: float | None
    underflow: float | None
    saturation: float | None


@dataclass(frozen=True)
class OperandStats:
    """One sample of one operand of one product; what_if[cast] is what that cast would lose.

    step: told by set_step, else the count of forward calls. call: that count. cast: the operand's
    own, or bf16 / float64. elements: in the sample. amax: largest magnitude of the whole operand,
    None when it holds NaN or Inf. mean_square: over the finite values. nonfinite: share of NaN and
    Inf values; nonfinite_blocks: of blocks with one. scale_min, scale_max: smallest and largest
    floor(log2) of the block scales, scales_distinct: how many differ; blocks of zeros are left out.
    """

    step: int
    call: int
    cast: str
    elements: int
    amax: float | None
    mean_square: float | None
    nonfinite: float | None
    loss: Loss
    scale_min: int | None = None
    scale_max: int | None = None
    scales_distinct: int | None = None
    nonfinite_blocks: float | None = None
    what_if: Mapping[str, Loss] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def rms(self) -> float | None:
        """Root of the mean square."""
        return None if self.mean_square is None else math.sqrt(self.mean_square)

    @property
    def sqnr_db(self) -> float | None:
        """SQNR of the operand's own cast, dB."""
        return self.loss.sqnr_db

    @property
    def underflow(self) -> float | None:
        """Share of nonzero values that the operand's own cast made zero."""
        return self.loss.underflow

    @property
    def saturation(self) -> float | None:
        """Share of values that the operand's own cast clipped."""
        return self.loss.saturation


@dataclass(frozen=True)
class Taken:
    """A sample of an operand: whole tiles [n, rows, columns], a copy, and the amax of all of it."""

    tiles: torch.Tensor
    amax: torch.Tensor


def take(source: torch.Tensor) -> Taken:
    """Sample an operand [R, C] of any float dtype: all of it, else at most about SAMPLE elements.

    Groups of 128 whole rows, evenly spread. Where one group would be too large already (C > 1024),
    tiles of 128 rows and a multiple of 128 columns, evenly spread along both dimensions.
    """
    source = source.detach()
    if not source.numel():
        return Taken(source[None], source.new_zeros(()))
    low, high = source.aminmax()
    amax = torch.maximum(high, -low)  # NaN where there is one
    rows, columns = source.shape
    if rows * columns <= SAMPLE:
        return Taken(source[None].clone(), amax)
    height, width = min(rows, GROUP), columns
    if height * columns > SAMPLE:
        width = max(SAMPLE // 8 // height // GROUP, 1) * GROUP
    down, across = rows // height, columns // width
    count = min(SAMPLE // (height * width), max(down, across))
    tiles = [
        source[r * height : (r + 1) * height, c * width : (c + 1) * width]
        for r, c in zip(_spread(count, down), _spread(count, across), strict=True)
    ]
    return Taken(torch.stack(tiles), amax)


def _spread(count: int, places: int) -> Iterator[int]:
    """`count` of `places`, at the middles of equal parts."""
    return ((2 * i + 1) * places // (2 * count) for i in range(count))


@dataclass(frozen=True)
class Where:
    """Which sample it is: the step and the count of forward calls, and bits for random casts."""

    step: int
    call: int
    stream: RandomStream


@torch.no_grad()
def measure(
    taken: Taken, cast: Cast | None, what_if: Sequence[Cast], *, axis: int, where: Where
) -> OperandStats:
    """Statistics of a sample under its own cast (None: bf16) and under others, along `axis`.

    All of it is computed on the device of the sample and brought over in one transfer. A stochastic
    cast is measured with the bits of `where.stream`.
    """
    tiles = taken.tiles
    values = tiles if tiles.dtype == torch.float64 else tiles.float()
    own = str(cast) if cast else ("float64" if tiles.dtype == torch.float64 else "bf16")
    if not tiles.numel():
        nothing = Loss(None, None, None)
        empty = {str(one): nothing for one in what_if}
        return OperandStats(
            where.step, where.call, own, 0, None, None, None, nothing, what_if=empty
        )
    finite = values.isfinite()
    terms = [taken.amax, finite.sum(), _squares(torch.where(finite, values, 0.0))]
    losses: dict[str, list[torch.Tensor]] = {}
    scale_terms: list[torch.Tensor] = []
    for one in dict.fromkeys((cast, *what_if)):
        if one is None:
            losses[own] = _unquantized_terms(tiles, values)
            continue
        generator = where.stream if one.stochastic else None
        q = ops.quantize(tiles, one, axis=axis, generator=generator)
        losses[str(one)] = _loss_terms(values, *_decoded(q, values))
        if one == cast:
            scale_terms = _scale_terms(q)
    every = [*terms, *scale_terms, *(term for loss in losses.values() for term in loss)]
    numbers = iter(torch.stack([term.double() for term in every]).tolist())
    amax, finite_count, square = (next(numbers) for _ in terms)
    scales = _scale_facts([next(numbers) for _ in scale_terms])
    found = {name: _loss([next(numbers) for _ in loss]) for name, loss in losses.items()}
    return OperandStats(
        step=where.step,
        call=where.call,
        cast=own,
        elements=tiles.numel(),
        amax=_real(amax),
        mean_square=_real(square / finite_count) if finite_count else None,
        nonfinite=(tiles.numel() - finite_count) / tiles.numel(),
        loss=found[own],
        what_if=MappingProxyType({str(one): found[str(one)] for one in what_if}),
        **scales,
    )


def _decoded(q: QuantizedTensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the codes decode to, and which values were beyond the largest code."""
    element = q.format.element
    decoded = ops.dequantize(q)
    magnitude = q.codes & ((1 << (element.bits - 1)) - 1)
    holds = decoded.abs() if q.format.power_of_two else decoded.abs() * _SLACK
    return decoded, (magnitude == element.max_code) & (values.abs() > holds)


def _unquantized_terms(tiles: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor]:
    """Of a bf16 product: values are rounded to bf16, where the largest float32 become Inf."""
    decoded = values if tiles.dtype == torch.float64 else tiles.bfloat16().float()
    return _loss_terms(values, decoded, values.isfinite() & decoded.isinf())


def _loss_terms(
    values: torch.Tensor, decoded: torch.Tensor, beyond: torch.Tensor
) -> list[torch.Tensor]:
    """Good values, nonzero ones, those of them that became zero, those beyond; sums of squares."""
    good = decoded.isfinite()  # never where the value is not
    signal = torch.where(good, values, 0.0)
    noise = torch.where(good, values - decoded, 0.0)
    nonzero, kept = signal.count_nonzero(), torch.where(good, decoded, 0.0).count_nonzero()
    clipped = beyond.count_nonzero()
    count = (good | beyond).count_nonzero()
    return [count, nonzero, nonzero - kept, clipped, _squares(signal), _squares(noise)]


def _squares(x: torch.Tensor) -> torch.Tensor:
    """Sum of squares in float64, where no square of a float32 is lost."""
    norm: torch.Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm.square()


def _loss(terms: Sequence[float]) -> Loss:
    good, nonzero, lost, beyond, signal, noise = terms
    sqnr = None
    if 0 < signal < math.inf and noise < math.inf:
        sqnr = 10 * (math.log10(signal) - math.log10(noise)) if noise else math.inf
    return Loss(sqnr, lost / nonzero if nonzero else None, beyond / good if good else None)


def _scale_terms(q: QuantizedTensor) -> list[torch.Tensor]:
    """Blocks, those with NaN or Inf, those that are not zero; their exponents; distinct scales."""
    scales = reference.block_scales(q).flatten()
    poisoned = scales.isnan()
    if q.outer is not None:
        poisoned = poisoned | q.outer.isnan()
    live = (scales > _scale_of_zeros(q.format)) & ~poisoned
    exponents = torch.frexp(scales).exponent - 1
    ordered = torch.where(live, scales, 0.0).sort().values
    changes = (ordered[1:] > 0) & (ordered[1:] != ordered[:-1])
    return [
        torch.full_like(ordered[0], scales.numel()),
        poisoned.sum(),
        live.sum(),
        torch.where(live, exponents, _NO_EXPONENT).amin(),
        torch.where(live, exponents, -_NO_EXPONENT).amax(),
        changes.sum() + (ordered[0] > 0),
    ]


def _scale_of_zeros(fmt: Format) -> float:
    """The block scale that a block of zeros gets, the smallest of the format."""
    if fmt.power_of_two:
        return 2.0**-127
    return 0.0 if fmt.outer else 2.0**-126


def _scale_facts(terms: Sequence[float]) -> dict[str, Any]:
    if not terms:
        return {}
    blocks, poisoned, live, low, high, distinct = terms
    return {
        "scale_min": int(low) if live else None,
        "scale_max": int(high) if live else None,
        "scales_distinct": int(distinct),
        "nonfinite_blocks": poisoned / blocks,
    }


def _real(value: float) -> float | None:
    return value if math.isfinite(value) else None

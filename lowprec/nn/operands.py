"""Operands of a layer's products as they enter the GEMM: rotated and cast, once where that will do.

Dimensions: M rows (tokens), K in_features, N out_features.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple, Protocol

import torch

from lowprec import ops
from lowprec.backends import triton_kernels
from lowprec.errors import UnsupportedError
from lowprec.formats import Cast
from lowprec.nn.position import At, Position
from lowprec.nn.weight_codes import WeightCodes, may_be_gathered, reusable
from lowprec.packing import pack_codes, unpack_codes
from lowprec.policy import PRODUCTS, Gemm, Product
from lowprec.rng import RandomStream
from lowprec.rotation import Side, rotate
from lowprec.stages import Stage, same_weight_values
from lowprec.tensor import QuantizedTensor

FPROP, DGRAD, WGRAD = range(3)
OPERANDS: Final = (("x", "w"), ("dy", "w"), ("dy", "x"))
# The axis of each operand, as it lies in memory, that the product contracts.
_AXES: Final = ((-1, -1), (-1, -2), (-2, -2))
_SIDES: Final[tuple[Side, Side]] = ("left", "right")


class Which(NamedTuple):
    """A product of a stage, the columns of its result, and whether dgrad will want w as well."""

    product: int
    stage: int
    columns: int
    ahead: bool = False

    @classmethod
    def read(cls, numbers: Sequence[int]) -> Which:
        """From the numbers that traced ops pass, whatever follows them."""
        return cls(numbers[0], numbers[1], numbers[2], bool(numbers[3]))


class Facts(NamedTuple):
    """What a stage says of one of its products, read once."""

    precision: Product
    label: str
    backend: str
    reusable: bool


def facts_of(stage: Stage) -> tuple[Facts | None, ...]:
    """Of each product of a stage, None for one that is skipped."""
    found: list[Facts | None] = []
    for name, precision in stage.policy.items():
        backends = stage.backends.get(name)
        if backends is None:
            found.append(None)
            continue
        found.append(Facts(precision, str(precision), backends.product, reusable(precision)))
    return tuple(found)


class Inside(NamedTuple):
    """What a stage leaves to kernels: what happens to x where a norm or an activation makes it, and
    to w."""

    by_kernel: bool
    """Whether it is one of ours at all; it casts x as well where it can."""
    norm: Cast | None
    """By row, for fprop."""
    norm_again: Cast | None
    """By column, for wgrad, from statistics that are known."""
    norm_whole: Cast | None
    """Both ways at once, with one scale for the tensor."""
    gate: Cast | None
    """By row, for fprop."""
    norm_keeps: bool
    """Whether wgrad keeps the codes of x: no cast can happen inside the norm, x is in memory."""
    gate_keeps: bool
    """The same behind an activation."""
    same_weight: bool
    """Whether fprop and dgrad take the very values of w, in bf16, turned."""

    @classmethod
    def of(cls, stage: Stage) -> Inside:
        """From the plan of a stage."""
        by_row, by_column = _kernel_cast(stage, FPROP, 0), _kernel_cast(stage, WGRAD, 1)
        same = same_weight_values(stage)
        if not isinstance(stage.policy.fprop, Gemm) or stage.backends["fprop"].left != "triton":
            return cls(False, None, None, None, None, False, False, same_weight=same)
        norm = by_row if by_row and triton_kernels.fits_norm(by_row) else None
        gate = by_row if by_row and triton_kernels.fits_gate(by_row) else None
        fits_again = by_column and triton_kernels.fits_norm(by_column, again=True)
        again = by_column if fits_again else None
        whole = by_row if by_row and by_row == by_column else None
        whole = whole if whole and triton_kernels.fits_norm_whole(whole) else None
        quantized = isinstance(stage.policy.wgrad, Gemm)
        norm_keeps = quantized and norm is None and again is None
        gate_keeps = quantized and gate is None
        return cls(True, norm, again, whole, gate, norm_keeps, gate_keeps, same_weight=same)


def _kernel_cast(stage: Stage, product: int, side: int) -> Cast | None:
    """The cast of an operand by our kernels that turns nothing first, or None."""
    gemm, backends = getattr(stage.runs, PRODUCTS[product]), stage.backends.get(PRODUCTS[product])
    if not isinstance(gemm, Gemm) or backends is None or gemm.rotation is not None:
        return None
    return (gemm.left, gemm.right)[side] if getattr(backends, _SIDES[side]) == "triton" else None


def enters_as_values(stage: Stage, name: str, cast: Cast) -> bool:
    """Whether an operand that is cast by the kernels enters an emulated product as bf16 values."""
    return stage.backends[name].product == "emulated" and triton_kernels.fits_round_trip(cast)


class Pair(NamedTuple):
    """Two casts of one tensor, along its rows and down its columns, that one read can make.

    Not where both enter emulated products: each as values by one kernel moves fewer bytes.
    """

    casts: tuple[Cast, Cast]
    roles: tuple[str, str]
    """What random bits are drawn for; empty for a cast that draws none."""

    @classmethod
    def of(cls, stage: Stage, across: tuple[int, int], down: tuple[int, int]) -> Pair | None:
        """Each is named by product and side. None for a rotation, an unquantized operand, and a
        backend that would read the tensor twice."""
        casts, roles, values = [], [], []
        for product, side in (across, down):
            name = PRODUCTS[product]
            gemm = getattr(stage.runs, name)
            if not isinstance(gemm, Gemm) or gemm.rotation is not None:
                return None
            if getattr(stage.backends[name], _SIDES[side]) != "triton":
                return None
            cast = (gemm.left, gemm.right)[side]
            casts.append(cast)
            roles.append(f"{name}.{OPERANDS[product][side]}" if cast.stochastic else "")
            kept = (product, side) == (WGRAD, 1)  # as codes, for backward
            values.append(not kept and enters_as_values(stage, name, cast))
        if all(values):
            return None
        return cls((casts[0], casts[1]), (roles[0], roles[1]))


class CastAlready(NamedTuple):
    """A weight whose codes arrived from elsewhere, and the cast that made them."""

    q: QuantizedTensor
    cast: Cast

    def operand(self, layer: str, cast: Cast | None, axis: int) -> QuantizedTensor:
        """The codes with the contraction last; raises UnsupportedError if `cast` is another."""
        if cast != self.cast:
            raise UnsupportedError(
                f"layer {layer!r}: its weight was gathered as {self.cast}, the plan in force wants "
                f"{cast or 'bf16'}; apply that plan before shard_quantized"
            )
        return self.q if axis == -1 else self.q.along(axis).mT


class Monitor(Protocol):
    """What watches the operands of a layer; see lowprec.telemetry."""

    def forward_begins(self) -> None:
        """A forward call starts."""

    def saw(
        self, product: str, operand: str, source: torch.Tensor, axis: int, cast: Cast | None
    ) -> None:
        """An operand [R, C] is about to be cast along `axis` (None: stays bf16), rotation done."""


class Operands:
    """How the operands of one layer are cast, by stage, and the weights that are cast already."""

    layer: str
    stages: tuple[Stage, ...]
    seeds: tuple[int, ...]
    facts: tuple[tuple[Facts | None, ...], ...]
    """By stage and product."""
    inside: tuple[Inside, ...]
    """By stage."""
    pairs: dict[tuple[int, int, int], Pair | None]
    """By stage and the two operands, as `cast_both` is asked for them."""
    position: Position
    weights: WeightCodes
    monitor: Monitor | None

    def weight(
        self, which: Which, w_NK: torch.Tensor, at: torch.Tensor | None
    ) -> torch.Tensor | QuantizedTensor:
        """w as it enters fprop or dgrad, cast before if it is the same w still.

        fprop casts it for dgrad too where one read does both.
        """
        product, index, told = which.product, which.stage, self.position.told
        facts = self.facts[index]
        of_product, of_dgrad = facts[product], facts[DGRAD]
        if self.monitor is not None or of_product is None or not of_product.reusable:
            return self.operand(product, 1, w_NK, at, index)
        held = self.weights.get(product, w_NK, index, told)
        if held is not None:
            return held
        both = None
        ahead = which.ahead and not may_be_gathered()
        for_both = product == FPROP and ahead and of_dgrad is not None and of_dgrad.reusable
        if for_both:
            both = self.cast_both((FPROP, 1), (DGRAD, 1), w_NK, at, index)
        if both is None:
            held = self.operand(product, 1, w_NK, at, index)
            if for_both and self.inside[index].same_weight:
                self.weights.put(DGRAD, w_NK, index, told, held.mT, ahead=True)
        else:
            held = both[0]
            self.weights.put(DGRAD, w_NK, index, told, both[1].mT, ahead=True)
        self.weights.put(product, w_NK, index, told, held)
        return held

    def cast_both(
        self,
        across: tuple[int, int],
        down: tuple[int, int],
        t: torch.Tensor,
        at: torch.Tensor | None,
        index: int,
    ) -> tuple[QuantizedTensor, QuantizedTensor] | None:
        """t [R, C] cast along C for one product and along R for another, in one read.

        Each is named by product and side. None where they cannot be: see Pair, and where someone
        watches or the tensor is cast already.
        """
        if self.monitor is not None or hasattr(t, "lowprec_quantized"):
            return None
        key = index, 2 * across[0] + across[1], 2 * down[0] + down[1]
        try:
            pair = self.pairs[key]
        except KeyError:
            pair = self.pairs[key] = Pair.of(self.stages[index], across, down)
        if pair is None:
            return None
        if pair.roles == ("", ""):
            return triton_kernels.quantize_both(t, *pair.casts)
        seed, rows = self.seeds[index], t.shape[0]
        first, second = (
            self._stream(role, at, seed, rows=rows) if role else None for role in pair.roles
        )
        return triton_kernels.quantize_both(t, *pair.casts, streams=(first, second))

    def operand(
        self,
        product: int,
        side: int,
        t: torch.Tensor,
        at: torch.Tensor | None,
        index: int,
        *,
        codes: bool = False,
    ) -> torch.Tensor | QuantizedTensor:
        """An operand as it enters the GEMM: contraction last, rotated and cast by stage `index`.

        Where the product is emulated, the kernels may give its values in bf16 in place of codes,
        unless `codes` are asked for.
        """
        stage, seed = self.stages[index], self.seeds[index]
        name, operand, axis = PRODUCTS[product], OPERANDS[product][side], _AXES[product][side]
        rows = t.shape[0]
        gemm = getattr(stage.policy, name)
        cast = rotation = signs = None
        if isinstance(gemm, Gemm):
            cast, rotation = (gemm.left, gemm.right)[side], gemm.rotation
            if rotation is not None and rotation.seeded:
                signs = self._stream(f"{name}.signs", at, seed)
        backend = getattr(stage.backends[name], _SIDES[side])
        fused = rotation is not None and self._rotates_in_cast(cast, backend)
        if rotation is not None and not fused:
            t = rotate(t, rotation, axis=axis, side=_SIDES[side], stream=signs)
        arrived: CastAlready | None = getattr(t, "lowprec_quantized", None)
        if arrived is not None:
            return arrived.operand(self.layer, cast, axis)
        if self.monitor is not None:
            self.monitor.saw(name, operand, t, axis, cast)
        if cast is None:
            return t if axis == -1 else t.mT
        generator = None
        if cast.stochastic:
            shared = operand == "w"  # every rank holds the same weight
            rows = 0 if shared else rows
            generator = self._stream(f"{name}.{operand}", at, seed, rows=rows)
        if fused and rotation is not None:
            streams = (signs, generator)
            q: Any = triton_kernels.rotate_quantize(
                t, rotation, cast, axis=axis, side=_SIDES[side], streams=streams
            )
        elif backend == "triton" and not codes and enters_as_values(stage, name, cast):
            q = triton_kernels.round_trip(t, cast, axis=axis)
        else:
            runs = getattr(stage.runs, name)
            q = ops.quantize(
                t, (runs.left, runs.right)[side], axis=axis, generator=generator, backend=backend
            )
        result: torch.Tensor | QuantizedTensor = q if axis == -1 else q.mT
        return result

    def _rotates_in_cast(self, cast: Cast | None, backend: str) -> bool:
        """Whether one kernel rotates and casts; what watches wants to see the rotated values."""
        fits = backend == "triton" and cast is not None and triton_kernels.fits_rotation(cast)
        return fits and self.monitor is None

    def _stream(
        self, role: str, at: torch.Tensor | None, seed: int, rows: int | None = None
    ) -> RandomStream:
        """The random bits of an operand with `rows` local rows, or of signs (no rows)."""
        assert at is not None  # a random policy always has its moment
        moment = At(*at.tolist())
        if rows is None:  # signs: the same for every micro-batch and rank
            return RandomStream(seed, self.layer, role, moment.step)
        return RandomStream(
            seed,
            self.layer,
            role,
            moment.step,
            moment.micro_batch,
            first_row=moment.data_rank * rows,
        )


def parts_of(q_MK: QuantizedTensor) -> list[torch.Tensor]:
    """What is kept of a quantized x: packed codes, scales, and the outer scale if there is one."""
    parts = [pack_codes(q_MK.codes, q_MK.format.element.bits), q_MK.scales]
    return parts if q_MK.outer is None else [*parts, q_MK.outer]


def restored(
    parts: Sequence[torch.Tensor], gemm: Gemm, *, rows: int, columns: int
) -> QuantizedTensor:
    """x cast along M, as [K, M], from what was kept; `rows` without the rotation's padding."""
    rows = rows if gemm.rotation is None else gemm.rotation.padded(rows)
    fmt = gemm.right.format
    codes = parts[0]
    if codes.shape != (rows, columns) or fmt.element.bits != 8:
        codes = unpack_codes(codes, fmt.element.bits, (rows, columns))
    outer = parts[2] if fmt.outer else None
    return QuantizedTensor(codes.mT, parts[1].mT, fmt, -1, outer)


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype that autocast gives a linear layer on x, or None where it has no say."""
    device = x.device.type
    if device == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


_AS_IT_IS: Final = nullcontext()


def no_autocast(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Autocast would round the float32 operands of an emulated product."""
    if autocast_dtype(x) is None:
        return _AS_IT_IS
    return torch.autocast(x.device.type, enabled=False)

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
from lowprec.policy import PRODUCTS, Gemm
from lowprec.rng import RandomStream
from lowprec.rotation import Side, rotate
from lowprec.stages import Stage
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
        policy = self.stages[index].policy
        if self.monitor is not None or not reusable(getattr(policy, PRODUCTS[product])):
            return self.operand(product, 1, w_NK, at, index)
        held = self.weights.get(product, w_NK, index, told)
        if held is not None:
            return held
        both = None
        ahead = which.ahead and not may_be_gathered()
        if product == FPROP and ahead and reusable(policy.dgrad):
            both = self.cast_both((FPROP, 1), (DGRAD, 1), w_NK, at, index)
        if both is None:
            held = self.operand(product, 1, w_NK, at, index)
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

        Each is named by product and side. None where they cannot be: a rotation, an unquantized
        operand, someone who watches, a backend that would read t twice.
        """
        if self.monitor is not None or hasattr(t, "lowprec_quantized"):
            return None
        stage, seed = self.stages[index], self.seeds[index]
        casts, streams, backends = [], [], set()
        for product, side in (across, down):
            name = PRODUCTS[product]
            gemm = getattr(stage.runs, name)
            if not isinstance(gemm, Gemm) or gemm.rotation is not None:
                return None
            cast, role = (gemm.left, gemm.right)[side], f"{name}.{OPERANDS[product][side]}"
            casts.append(cast)
            backends.add(getattr(stage.backends[name], _SIDES[side]))
            drawn = cast.stochastic
            streams.append(self._stream(role, at, seed, rows=t.shape[0]) if drawn else None)
        if backends != {"triton"}:
            return None
        with no_autocast(t):
            return ops.quantize_both(
                t, (casts[0], casts[1]), generators=(streams[0], streams[1]), backend="triton"
            )

    def operand(
        self, product: int, side: int, t: torch.Tensor, at: torch.Tensor | None, index: int
    ) -> torch.Tensor | QuantizedTensor:
        """An operand as it enters the GEMM: contraction last, rotated and cast by stage `index`."""
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
            q: QuantizedTensor = triton_kernels.rotate_quantize(
                t, rotation, cast, axis=axis, side=_SIDES[side], streams=streams
            )
        else:
            runs = getattr(stage.runs, name)
            q = ops.quantize(
                t, (runs.left, runs.right)[side], axis=axis, generator=generator, backend=backend
            )
        return q if axis == -1 else q.mT

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
    codes = unpack_codes(parts[0], fmt.element.bits, (rows, columns))
    outer = parts[2] if fmt.outer else None
    return QuantizedTensor(codes, parts[1], fmt, -2, outer).mT


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype that autocast gives a linear layer on x, or None where it has no say."""
    device = x.device.type
    if device == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def no_autocast(x: torch.Tensor) -> AbstractContextManager[Any]:
    """Autocast would round the float32 operands of an emulated product."""
    if autocast_dtype(x) is None:
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)

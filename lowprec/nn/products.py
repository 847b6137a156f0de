"""The three products of one layer: cast both operands, multiply, and put it on record.

Under torch.compile each product is one opaque op that runs the same eager code, so compiled results
are the eager ones bit for bit and what changes every step never recompiles anything.
Dimensions: M rows (tokens), K in_features, N out_features.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from types import ModuleType
from typing import Any, Final, NamedTuple, Protocol

import torch

from lowprec import ops
from lowprec.backends import triton_kernels
from lowprec.errors import UnsupportedError
from lowprec.formats import Cast
from lowprec.nn.position import At, Position
from lowprec.packing import pack_codes, unpack_codes
from lowprec.policy import PRODUCTS, Gemm, Product
from lowprec.rng import RandomStream
from lowprec.rotation import Side, rotate
from lowprec.stages import Stage, stage_at
from lowprec.tensor import QuantizedTensor

FPROP, DGRAD, WGRAD = range(3)
OPERANDS: Final = (("x", "w"), ("dy", "w"), ("dy", "x"))
# The axis of each operand, as it lies in memory, that the product contracts.
_AXES: Final = ((-1, -1), (-1, -2), (-2, -2))
_SIDES: Final[tuple[Side, Side]] = ("left", "right")

_ids = itertools.count()
_live: weakref.WeakValueDictionary[int, Products] = weakref.WeakValueDictionary()
_traced: list[ModuleType] = []


def live(key: torch.Tensor) -> Products:
    """The products that a key stands for."""
    return _live[int(key)]


def traced() -> Any:
    """The ops that stand in for the products under torch.compile; made with the first layer."""
    return _traced[0]


class Which(NamedTuple):
    """A product of a stage, and the columns of its result."""

    product: int
    stage: int
    columns: int


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


class Products:
    """How the products of one layer run, where in training it is, and what has run."""

    def __init__(self, stages: tuple[Stage, ...], *, layer: str, seed: int) -> None:
        # A flag beside `position.told`, which changes every step: tracing guards on what it reads.
        self.started = False
        self.layer = layer
        self.stages: tuple[Stage, ...] = ()
        self.seeds: tuple[int, ...] = ()
        self._take(stages, seed)
        self.position = Position()
        self.counts: tuple[dict[str, int], ...] = ({}, {}, {})
        self.monitor: Monitor | None = None
        self._register()

    def _take(self, stages: tuple[Stage, ...], seed: int) -> None:
        # Earlier stages stay: a backward pass that is still to come runs by the one of its forward.
        self.first = self.active = len(self.stages)
        self.stages = (*self.stages, *stages)
        self.seeds = (*self.seeds, *[seed] * len(stages))
        # Text that tracing cannot make by itself.
        self.wgrad_texts = tuple(str(stage.policy.wgrad) for stage in self.stages)

    def _register(self) -> None:
        if not _traced:  # registering ops takes longer than all of `import lowprec`
            _traced.append(import_module("lowprec.nn.opaque"))
        number = next(_ids)
        _live[number] = self
        # A tensor, because an integer would make torch.compile build one graph for each layer.
        self.key = torch.tensor(number, dtype=torch.int64, device="cpu")

    def __getstate__(self) -> dict[str, Any]:
        kept = {k: v for k, v in self.__dict__.items() if k not in ("key", "monitor")}
        return {**kept, "counts": tuple(dict(count) for count in self.counts)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, monitor=None)
        self._register()

    @property
    def stage(self) -> Stage:
        """The stage in force."""
        return self.stages[self.active]

    def now(self, x_MK: torch.Tensor) -> torch.Tensor | None:
        """The moment of this forward call, int64 [3], or None where no random bits are drawn."""
        if not self.stage.policy.random:
            return None
        if torch.compiler.is_compiling():
            moment: torch.Tensor = traced().moment(x_MK, self.key)
            return moment
        return torch.tensor(self.position.now(), dtype=torch.int64, device="cpu")

    @property
    def untold(self) -> bool:
        """True when precision follows the step, and nobody has said which step it is."""
        return len(self.stages) - self.first > 1 and not self.started

    def tell(self, at: At) -> None:
        """Set the moment in training, and with it the stage."""
        self.position.told = at
        self.started = True
        self.active = self.first + stage_at(self.stages[self.first :], at.step)

    def replan(self, stages: tuple[Stage, ...], *, seed: int) -> None:
        """Go on by another plan; counts and the position in training stay."""
        if stages == self.stages[self.first :] and seed == self.seeds[self.first]:
            return
        self._take(stages, seed)
        if self.position.told is not None:
            self.tell(self.position.told)

    def run(
        self,
        which: Which,
        left: torch.Tensor,
        right: Sequence[torch.Tensor],
        *,
        bias: torch.Tensor | None = None,
        at: torch.Tensor | None,
    ) -> torch.Tensor:
        """One product, cast, multiplied and counted: [rows, columns], bf16 (float64 stays).

        left and right are operands as they lie in memory: x [M, K], w [N, K], dy [M, N]; the right
        operand of wgrad is what `keep` returned.
        """
        if torch.compiler.is_compiling():
            policy = self.stages[which.stage].policy
            dtype = result_dtype(left, getattr(policy, PRODUCTS[which.product]))
            where = [*which, int(dtype == torch.float64)]
            result: torch.Tensor = traced().product(left, list(right), bias, at, self.key, where)
            return result
        return self.run_now(which, left, right, bias=bias, at=at)

    def run_now(
        self,
        which: Which,
        left: torch.Tensor | QuantizedTensor,
        right: Sequence[torch.Tensor],
        *,
        bias: torch.Tensor | None,
        at: torch.Tensor | None,
    ) -> torch.Tensor:
        """`run` outside of tracing; a left operand that is cast already is taken as it is."""
        product, stage = which.product, self.stages[which.stage]
        precision = getattr(stage.policy, PRODUCTS[product])
        if self.monitor is not None and product == FPROP:
            self.monitor.forward_begins()
        dtype = torch.bfloat16
        if not isinstance(left, QuantizedTensor):
            dtype = result_dtype(left, precision)
        with no_autocast(left.codes if isinstance(left, QuantizedTensor) else left):
            a: Any = left
            if not isinstance(left, QuantizedTensor):
                a = self._operand(product, 0, left, at, which.stage)
            if product == WGRAD and isinstance(precision, Gemm):
                b: Any = _restored(right, precision, rows=left.shape[0], columns=which.columns)
            else:
                b = self._operand(product, 1, right[0], at, which.stage)
            backend = stage.backends[PRODUCTS[product]].product
            result = ops.matmul(a, b, bias=bias, out_dtype=dtype, backend=backend)
        key = "float64" if dtype == torch.float64 else str(precision)
        self.counts[product][key] = self.counts[product].get(key, 0) + 1
        return result

    def keep(self, x_MK: torch.Tensor, at: torch.Tensor | None) -> list[torch.Tensor]:
        """What backward needs of x for wgrad: its codes, packed, and scales; bf16 keeps x."""
        gemm = self.stage.policy.wgrad
        if not isinstance(gemm, Gemm):
            narrow = x_MK.dtype == torch.float32 and autocast_dtype(x_MK) is not None
            return [x_MK.bfloat16() if narrow else x_MK]
        if torch.compiler.is_compiling():
            kept: list[torch.Tensor] = traced().keep(
                x_MK, at, self.key, self.active, self.wgrad_texts[self.active]
            )
            return kept
        return self.keep_now(x_MK, at, self.active)

    def keep_now(
        self, x_MK: torch.Tensor, at: torch.Tensor | None, stage_index: int
    ) -> list[torch.Tensor]:
        """`keep` of a quantized wgrad outside of tracing."""
        with no_autocast(x_MK):
            q_KM: Any = self._operand(WGRAD, 1, x_MK, at, stage_index)
        return parts_of(q_KM.mT)

    def _operand(
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
            q = ops.quantize(t, cast, axis=axis, generator=generator, backend=backend)
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


def result_dtype(left: torch.Tensor, precision: Product) -> torch.dtype:
    """bfloat16, and float64 for unquantized float64 operands."""
    wide = left.dtype == torch.float64 and not isinstance(precision, Gemm)
    return torch.float64 if wide else torch.bfloat16


def parts_of(q_MK: QuantizedTensor) -> list[torch.Tensor]:
    """What is kept of a quantized x: packed codes, scales, and the outer scale if there is one."""
    parts = [pack_codes(q_MK.codes, q_MK.format.element.bits), q_MK.scales]
    return parts if q_MK.outer is None else [*parts, q_MK.outer]


def _restored(
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

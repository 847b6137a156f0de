"""The three products of one layer: cast both operands, multiply, and put it on record.

Under torch.compile each product is one opaque op that runs the same eager code, so compiled results
are the eager ones bit for bit and what changes every step never recompiles anything.
Dimensions: M rows (tokens), K in_features, N out_features.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from lowprec import ops
from lowprec.nn import main_grad
from lowprec.nn.operands import (
    DGRAD,
    FPROP,
    WGRAD,
    Facts,
    Inside,
    Monitor,
    Operands,
    Pair,
    Which,
    autocast_dtype,
    facts_of,
    no_autocast,
    parts_of,
    restored,
)
from lowprec.nn.position import At, Position
from lowprec.nn.weight_codes import WeightCodes
from lowprec.policy import PRODUCTS, Gemm, Product
from lowprec.stages import Stage, stage_at
from lowprec.tensor import QuantizedTensor

_ids = itertools.count()
_live: weakref.WeakValueDictionary[int, Products] = weakref.WeakValueDictionary()
_traced: list[ModuleType] = []


def live(key: torch.Tensor) -> Products:
    """The products that a key stands for."""
    return _live[int(key)]


def traced() -> Any:
    """The ops that stand in for the products under torch.compile; made with the first layer."""
    return _traced[0]


class Products(Operands):
    """How the products of one layer run, where in training it is, and what has run."""

    def __init__(self, stages: tuple[Stage, ...], *, layer: str, seed: int) -> None:
        # A flag beside `position.told`, which changes every step: tracing guards on what it reads.
        self.started = False
        self.main_grad = False
        self.made_main_grad = False
        self.layer = layer
        self.stages: tuple[Stage, ...] = ()
        self.seeds: tuple[int, ...] = ()
        self.facts: tuple[tuple[Facts | None, ...], ...] = ()
        self.inside: tuple[Inside, ...] = ()
        self.pairs: dict[tuple[int, int, int], Pair | None] = {}
        self._take(stages, seed)
        self.position = Position()
        self.weights = WeightCodes()
        self.counts: tuple[dict[str, int], ...] = ({}, {}, {})
        self.monitor: Monitor | None = None
        self._register()

    def _take(self, stages: tuple[Stage, ...], seed: int) -> None:
        # Earlier stages stay: a backward pass that is still to come runs by the one of its forward.
        self.first = self.active = len(self.stages)
        self.stages = (*self.stages, *stages)
        self.seeds = (*self.seeds, *[seed] * len(stages))
        self.facts = (*self.facts, *map(facts_of, stages))
        self.inside = (*self.inside, *map(Inside.of, stages))
        self.random = tuple(stage.policy.random for stage in self.stages)
        # Text that tracing cannot make by itself.
        self.wgrad_texts = tuple(str(stage.runs.wgrad) for stage in self.stages)

    def _register(self) -> None:
        if not _traced:  # registering ops takes longer than all of `import lowprec`
            _traced.append(import_module("lowprec.nn.opaque"))
        number = next(_ids)
        _live[number] = self
        # A tensor, because an integer would make torch.compile build one graph for each layer.
        self.key = torch.tensor(number, dtype=torch.int64, device="cpu")

    def __getstate__(self) -> dict[str, Any]:
        kept = {k: v for k, v in self.__dict__.items() if k not in ("key", "monitor", "weights")}
        return {**kept, "counts": tuple(dict(count) for count in self.counts)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, monitor=None, weights=WeightCodes())
        self._register()

    @property
    def stage(self) -> Stage:
        """The stage in force."""
        return self.stages[self.active]

    def now(self, x_MK: torch.Tensor) -> torch.Tensor | None:
        """The moment of this forward call, int64 [3], or None where no random bits are drawn."""
        if not self.random[self.active]:
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
        operand of wgrad is what `project` kept.
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
        facts = self.facts[which.stage][product]
        assert facts is not None  # a skipped product never runs
        if self.monitor is not None and product == FPROP:
            self.monitor.forward_begins()
        codes = left.codes if isinstance(left, QuantizedTensor) else left
        dtype = torch.bfloat16
        if not isinstance(left, QuantizedTensor):
            dtype = result_dtype(left, facts.precision)
        if product == WGRAD and self.main_grad and dtype == torch.bfloat16:
            dtype = torch.float32
        with no_autocast(codes):
            a: Any = left
            if not isinstance(left, QuantizedTensor):
                a = self.operand(product, 0, left, at, which.stage)
            kept = stage.runs.wgrad
            if product == WGRAD and isinstance(kept, Gemm):
                # dy comes as [M, N], or cast already as [N, M].
                rows = left.shape[0] if left is codes else left.shape[1]
                b: Any = restored(right, kept, rows=rows, columns=which.columns)
            elif product == WGRAD:
                b = self.operand(product, 1, right[0], at, which.stage)
            else:
                b = self.weight(which, right[0], at)
            result = ops.matmul(a, b, bias=bias, out_dtype=dtype, backend=facts.backend)
        key = "float64" if dtype == torch.float64 else facts.label
        self.counts[product][key] = self.counts[product].get(key, 0) + 1
        return result

    def project(
        self,
        x_MK: torch.Tensor,
        w_NK: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        at: torch.Tensor | None,
        keep: tuple[bool, bool],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """y [M, N], and what backward needs of x for wgrad; keep: is there a dgrad, a wgrad.

        That is the codes of x, packed, and their scales, made in the one read of x that fprop needs
        as well; a bf16 wgrad keeps x.
        """
        which = Which(FPROP, self.active, w_NK.shape[0], ahead=keep[0])
        gemm = self.stage.policy.wgrad
        if not keep[1] or not isinstance(gemm, Gemm):
            y_MN = self.run(which, x_MK, [w_NK], bias=bias, at=at)
            narrow = x_MK.dtype == torch.float32 and autocast_dtype(x_MK) is not None
            return y_MN, [x_MK.bfloat16() if narrow else x_MK] if keep[1] else []
        if torch.compiler.is_compiling():
            dtype = result_dtype(x_MK, self.stage.policy.fprop)
            where = [*which, int(dtype == torch.float64), int(self.stage.turns_x)]
            text = self.wgrad_texts[self.active]
            found = traced().project([x_MK, w_NK], bias, at, self.key, where, text)
            return found[0], found[1:]
        return self.project_now(which, x_MK, w_NK, bias=bias, at=at)

    def project_now(
        self,
        which: Which,
        x_MK: torch.Tensor,
        w_NK: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        at: torch.Tensor | None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """`project` of a quantized wgrad outside of tracing."""
        pair = self.cast_both((FPROP, 0), (WGRAD, 1), x_MK, at, which.stage)
        if pair is None:
            y_MN = self.run_now(which, x_MK, [w_NK], bias=bias, at=at)
            return y_MN, self.keep_now(x_MK, at, which.stage)
        return self.run_now(which, pair[0], [w_NK], bias=bias, at=at), parts_of(pair[1])

    def gradients(
        self,
        which: Which,
        dy_MN: torch.Tensor,
        w_NK: torch.Tensor,
        kept: Sequence[torch.Tensor],
        *,
        at: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """dx and dw, with dy read once for both; `which` names the stage and the columns of x."""
        if torch.compiler.is_compiling():
            policy = self.stages[which.stage].policy
            both = (policy.dgrad, policy.wgrad)
            wide = [int(result_dtype(dy_MN, one) == torch.float64) for one in both]
            where = [*which, *wide]
            dx_MK, dw_NK = traced().gradients(dy_MN, w_NK, list(kept), at, self.key, where)
            return dx_MK, dw_NK
        return self.gradients_now(which, dy_MN, w_NK, kept, at=at)

    def gradients_now(
        self,
        which: Which,
        dy_MN: torch.Tensor,
        w_NK: torch.Tensor,
        kept: Sequence[torch.Tensor],
        *,
        at: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`gradients` outside of tracing."""
        pair = self.cast_both((DGRAD, 0), (WGRAD, 0), dy_MN, at, which.stage)
        by_row, by_column = (dy_MN, dy_MN) if pair is None else (pair[0], pair[1].mT)
        dgrad, wgrad = (Which(one, which.stage, which.columns) for one in (DGRAD, WGRAD))
        dx_MK = self.run_now(dgrad, by_row, [w_NK], bias=None, at=at)
        return dx_MK, self.run_now(wgrad, by_column, kept, bias=None, at=at)

    def weight_gradient(
        self, weight: torch.Tensor, dw_NK: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """What autograd gets of dw: dw in `dtype`, or nothing where it goes to main_grad."""
        if dw_NK is None or not self.main_grad:
            return dw_NK if dw_NK is None or dw_NK.dtype == dtype else dw_NK.to(dtype)
        return main_grad.accumulate(weight, dw_NK)

    def keep_now(
        self, x_MK: torch.Tensor, at: torch.Tensor | None, stage_index: int
    ) -> list[torch.Tensor]:
        """What a quantized wgrad needs of x, cast by itself, outside of tracing."""
        with no_autocast(x_MK):
            q_KM: Any = self.operand(WGRAD, 1, x_MK, at, stage_index, codes=True)
        return parts_of(q_KM.mT)


def result_dtype(left: torch.Tensor, precision: Product) -> torch.dtype:
    """bfloat16, and float64 for unquantized float64 operands."""
    wide = left.dtype == torch.float64 and not isinstance(precision, Gemm)
    return torch.float64 if wide else torch.bfloat16

"""watch: sample the operands of every product while a model trains."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lowprec.errors import UnsupportedError
from lowprec.formats import Cast
from lowprec.hardware import current
from lowprec.nn import Linear, Products
from lowprec.nn.operands import OPERANDS
from lowprec.operand_stats import SAMPLE, OperandStats, Taken, Where, measure, take
from lowprec.policy import PRODUCTS
from lowprec.policy import casts as casts_of
from lowprec.rank_stats import over_ranks
from lowprec.rng import RandomStream
from lowprec.stats_output import JsonLines, Output, TensorBoard

Stats = dict[str, dict[str, dict[str, OperandStats]]]
"""The latest sample by layer, product and operand."""
WHAT_IF: Final = ("mxfp8", "mxfp4", "nvfp4")


@dataclass
class _Outputs:
    """Where samples go; one that fails is dropped with a warning, and training goes on."""

    open: list[Output] = field(default_factory=list)

    def write(self, layer: str, product: str, operand: str, stats: OperandStats) -> None:
        for output in list(self.open):
            try:
                output.write(layer, product, operand, stats)
            except OSError as error:
                self.open.remove(output)
                output.close()
                warnings.warn(
                    f"lowprec.watch stops writing to {type(output).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def close(self) -> None:
        while self.open:
            self.open.pop().close()


class LayerMonitor:
    """Samples one layer: every N-th forward call that keeps something for backward, and backward.

    That a forward call is one of training shows when something is kept for wgrad, else when its
    backward runs. Until then fprop's operands are held as small copies, and dropped at the next
    forward call, so that calls without gradients leave no trace. A forward call inside a running
    backward is activation checkpointing computing again: the same call, not a new one.
    """

    def __init__(
        self,
        name: str,
        products: Products,
        every: int,
        what_if: tuple[Cast, ...],
        outputs: _Outputs,
    ) -> None:
        self.name, self.products = name, products
        self.every, self.what_if, self.outputs = every, what_if, outputs
        self.latest: dict[str, dict[str, OperandStats]] = {}
        self.calls = 0
        self._due = self._counted = self._backward_ran = False
        self._step = 0
        self._held: dict[str, tuple[Taken, int, Cast | None]] = {}
        self._sample: tuple[int, int] | None = None  # step and call of the sample in progress
        self._done: set[tuple[str, str]] = set()

    def forward_begins(self) -> None:
        """A forward call starts; every N-th may become a sample."""
        if torch._C._current_graph_task_id() != -1:
            return
        if self._backward_ran:
            self._sample, self._backward_ran = None, False
        told = self.products.position.told
        self._step = self.calls if told is None else told.step
        self._due = self.calls % self.every == 0
        self._counted = False
        self._held.clear()

    def saw(
        self, product: str, operand: str, source: torch.Tensor, axis: int, cast: Cast | None
    ) -> None:
        """An operand is about to be cast; what is not sampled costs a comparison or two."""
        if product == "fprop":
            if self._due and not self._counted and operand not in self._held and _real(source):
                self._held[operand] = (take(source), axis, cast)
            return
        if not self._counted:
            self._count()
        if operand == "dy":
            self._backward_ran = True
        if self._sample and (product, operand) not in self._done and _real(source):
            self._measure(product, operand, take(source), axis, cast)

    def _count(self) -> None:
        """The latest forward call is one of training: number it, and sample it when due."""
        self._counted = True
        call, self.calls = self.calls, self.calls + 1
        if not self._due:
            return
        self._sample = (self._step, call)
        self._done.clear()
        while self._held:
            operand = next(iter(self._held))
            self._measure("fprop", operand, *self._held.pop(operand))

    def _measure(
        self, product: str, operand: str, taken: Taken, axis: int, cast: Cast | None
    ) -> None:
        assert self._sample is not None
        self._done.add((product, operand))
        step, call = self._sample
        # Counter-based bits of its own: no generator and no stream of training moves.
        stream = RandomStream(0, self.name, f"watch.{product}.{operand}", step)
        where = Where(step, call, stream)
        stats = measure(taken, cast, self.what_if, axis=axis, where=where)
        self.latest.setdefault(product, {})[operand] = stats
        self.outputs.write(self.name, product, operand, stats)

    def sampled(self, product: str, operand: str) -> OperandStats | None:
        """The latest sample of an operand, if there is one."""
        return self.latest.get(product, {}).get(operand)

    def cast(self, product: str, operand: str) -> str:
        """How the plan in force casts an operand."""
        side = OPERANDS[PRODUCTS.index(product)].index(operand)
        cast = casts_of(getattr(self.products.stage.policy, product))[side]
        return str(cast) if cast else "bf16"


def _real(source: torch.Tensor) -> bool:
    return source.device.type != "meta" and not isinstance(source, FakeTensor)


class Watch:
    """A running watch; `close` detaches it. Also a context manager."""

    def __init__(self, monitors: list[LayerMonitor], outputs: _Outputs) -> None:
        self._monitors, self._outputs = monitors, outputs
        for monitor in monitors:
            monitor.products.monitor = monitor

    @property
    def stats(self) -> Stats:
        """The latest sample by layer, product and operand; stays after `close`."""
        return {m.name: {k: dict(v) for k, v in m.latest.items()} for m in self._monitors}

    def over_ranks(self, group: Any = None) -> Stats:
        """The latest samples of all ranks as one; every rank of `group`, all watching the same
        layers, has to call it.

        elements, mean_square and nonfinite are of all samples; everything else is the worst that a
        rank saw: the largest amax, underflow and saturation, the smallest sqnr_db, None for amax
        when one rank saw NaN or Inf. The ranks may have sampled at other calls; step and call are
        the latest. Without torch.distributed these are the samples of this process.
        """
        if _rank()[1] == 1:
            return self.stats
        by_name = {m.name: m for m in self._monitors}
        keys = [
            (name, product, operand)
            for name in by_name
            for product, operands in zip(PRODUCTS, OPERANDS, strict=True)
            for operand in operands
        ]
        own = {key: one for key in keys if (one := by_name[key[0]].sampled(*key[1:])) is not None}
        casts = [str(one) for one in self._monitors[0].what_if]
        joined = over_ranks(own, keys, casts, lambda key: by_name[key[0]].cast(*key[1:]), group)
        found: Stats = {}
        for (name, product, operand), stats in joined.items():
            found.setdefault(name, {}).setdefault(product, {})[operand] = stats
        return found

    def close(self) -> None:
        """Stop sampling, flush and close what was opened; a second call does nothing."""
        for monitor in self._monitors:
            if monitor.products.monitor is monitor:
                monitor.products.monitor = None
        self._outputs.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def watch(
    model: torch.nn.Module,
    *,
    every: int = 100,
    what_if: Iterable[Cast | str] = WHAT_IF,
    path: str | os.PathLike[str] | None = None,
    tensorboard: Any = None,
) -> Watch:
    """Sample the numerics of every converted layer while the model trains; changes no bit of it.

    every: each layer is sampled at its 1st, (every + 1)-th, ... forward call in training, and its
    backward with it. what_if: casts to evaluate at each operand, beside its own. path: a file of
    JSON lines, appended to. tensorboard: a folder or a writer. Both are written by rank 0 only when
    torch.distributed is initialized, unless their name has `{rank}`. The latest samples are in
    lowprec.observe(model).stats. Raises UnsupportedError for a model without converted layers, one
    that is watched already, `every` below 1, an unknown cast, and a file that cannot be continued.
    """
    casts = _casts(what_if)
    if type(every) is not int or every < 1:
        raise UnsupportedError(f"watch: every must be a whole number from 1 on, not {every!r}")
    layers = [(name, one) for name, one in model.named_modules() if isinstance(one, Linear)]
    if not layers:
        raise UnsupportedError(
            "watch: the model has no layer of lowprec; call lowprec.apply first (to watch a model "
            "in bf16, with the plan of recipe 'bf16')"
        )
    for name, layer in layers:
        if layer.lowprec_products.monitor is not None:
            raise UnsupportedError(
                f"watch: layer {name!r} is watched already; close the other watch first"
            )
    outputs = _Outputs()
    monitors = [
        LayerMonitor(name, layer.lowprec_products, every, casts, outputs) for name, layer in layers
    ]
    rank, world = _rank()
    facts = {
        "every": every,
        "what_if": [str(cast) for cast in casts],
        "sample": SAMPLE,
        "rank": rank,
        "world": world,
        "hardware": str(current()),
        "layers": {name: _facts(layer) for name, layer in layers},
    }
    file = _name(path, rank)
    if file is not None:
        outputs.open.append(JsonLines(file, facts))
    board = _name(tensorboard, rank)
    if board is not None:
        try:
            outputs.open.append(TensorBoard(board))
        except UnsupportedError:
            outputs.close()
            raise
    return Watch(monitors, outputs)


def _casts(what_if: Iterable[Cast | str]) -> tuple[Cast, ...]:
    if isinstance(what_if, str):
        raise UnsupportedError(f"watch: what_if is a list of casts: what_if=[{what_if!r}]")
    casts = [Cast.parse(one) if isinstance(one, str) else one for one in what_if]
    for one in casts:
        if not isinstance(one, Cast):
            raise UnsupportedError(f"watch: what_if takes casts or their text, not {one!r}")
    return tuple(dict.fromkeys(casts))


def _rank() -> tuple[int, int]:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return 0, 1
    return distributed.get_rank(), distributed.get_world_size()


def _name(target: Any, rank: int) -> Any:
    """Where this rank writes, or None."""
    text = os.fspath(target) if isinstance(target, (str, os.PathLike)) else None
    if text is not None and "{rank}" in text:
        return text.replace("{rank}", str(rank))
    return (target if text is None else text) if rank == 0 else None


def _facts(layer: Linear) -> dict[str, Any]:
    products = layer.lowprec_products
    return {
        "shape": [layer.out_features, layer.in_features],
        "stages": [
            [stage.from_step, str(stage.policy)] for stage in products.stages[products.first :]
        ],
    }

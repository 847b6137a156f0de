"""Numerics counters of a training run, sampled from lowprec.watch every so many steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import nn

import lowprec

SAMPLES: Final = 100
# A sampled step costs 2.3 to 2.9 others (small network, CPU), one in 120 at most 2.4 % more.
LEAST_APART: Final = 120
# An operand whose largest magnitude moves by more than this between two samples has jumped.
JUMP_OCTAVES: Final = 3.0
_PLAIN: Final = ("bf16", "float32", "float64")


class Counters:
    """Watches the converted layers of a model; `values` holds one number a sampled step and name.

    saturation, underflow: mean share of an operand's values over the quantized operands, absent
    where nothing is quantized. amax_jumps: operands whose largest magnitude changed by more than a
    factor 8 since the sample before. weight_drift: root mean square distance of the converted
    layers' weights from their initial values. Watching changes no bit of training. Runs of fewer
    than 120 steps and ranks other than 0 take no sample.
    """

    def __init__(self, model: nn.Module, *, steps: int, rank: int = 0) -> None:
        self.values: dict[str, list[float | None]] = {}
        samples = min(SAMPLES, steps // LEAST_APART) if rank == 0 else 0
        self.every = math.ceil(steps / samples) if samples else steps
        self.step = 0
        self._model = model
        self._first = self.every // 2  # the middle of each stretch, never the untrained start
        modules = model.modules() if samples else ()
        self._layers = [one for one in modules if isinstance(one, lowprec.Linear)]
        self._start = [layer.weight.detach().clone() for layer in self._layers]
        self._amax: dict[tuple[str, str, str], float] = {}
        self._watch: Any = None
        self._begin()

    def after_step(self) -> None:
        """Take the sample of this step, if it is one of those sampled."""
        since = self.step - self._first
        self.step += 1
        if self._watch is not None and since >= 0 and since % self.every == 0:
            for name, value in self._sample():
                self.values.setdefault(name, []).append(value)
        self._begin()

    def _begin(self) -> None:
        """Watch from the first sampled step on: a watch samples the first call that it sees."""
        if self._layers and self.step == self._first:
            self._watch = lowprec.watch(self._model, every=self.every, what_if=())

    def then(self, tick: Callable[[], None]) -> Callable[[], None]:
        """What to call after each step: the sample, then `tick`."""

        def both() -> None:
            self.after_step()
            tick()

        return both

    def __enter__(self) -> Counters:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop watching; the values stay."""
        if self._watch is not None:
            self._watch.close()
        self._start.clear()

    def _sample(self) -> Iterator[tuple[str, float | None]]:
        assert self._watch is not None
        saturation, underflow, jumps = [], [], 0
        for layer, products in self._watch.stats.items():
            for product, operands in products.items():
                for operand, one in operands.items():
                    if one.cast not in _PLAIN:
                        saturation.append(one.loss.saturation)
                        underflow.append(one.loss.underflow)
                    jumps += self._jumped((layer, product, operand), one.amax)
        if saturation:
            yield "saturation", _mean(saturation)
            yield "underflow", _mean(underflow)
        yield "amax_jumps", float(jumps)
        yield "weight_drift", self._drift()

    def _jumped(self, where: tuple[str, str, str], amax: float | None) -> bool:
        before = self._amax.get(where)
        if not amax:
            return False
        self._amax[where] = amax
        return before is not None and abs(math.log2(amax / before)) > JUMP_OCTAVES

    def _drift(self) -> float | None:
        pairs = zip(self._layers, self._start, strict=True)
        squares = [
            (layer.weight.detach().double() - start).square().sum() for layer, start in pairs
        ]
        total = float(torch.stack(squares).sum())
        value = math.sqrt(total / sum(start.numel() for start in self._start))
        return value if math.isfinite(value) else None


def _mean(values: list[float | None]) -> float | None:
    known = [one for one in values if one is not None and math.isfinite(one)]
    return math.fsum(known) / len(known) if known else None

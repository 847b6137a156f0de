"""Samples of all ranks as one: sums where they add up, else the worst of any rank.

A maximum over ranks loses NaN or keeps it, depending on the library and on the order of its
arguments. So NaN never enters the reduction: an amax that is not finite goes in as infinity.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.distributed as dist

from lowprec.operand_stats import Loss, OperandStats

Key = tuple[str, str, str]
Found = Mapping[Key, OperandStats]
"""Layer, product and operand -> a sample."""

_NONE: Final = -math.inf
_EXACT: Final = -sys.float_info.max
_FACTS: Final = ("scale_max", "scales_distinct", "nonfinite_blocks")


def over_ranks(
    own: Found, keys: Sequence[Key], what_if: Sequence[str], cast: Callable[[Key], str], group: Any
) -> dict[Key, OperandStats]:
    """The samples of all ranks of `group`, by key; those that no rank has are absent. Collective.

    keys and what_if: the same on every rank. cast: of a key, where this rank has no sample.
    """
    columns = 4 + len(_FACTS) + 3 * (1 + len(what_if))
    device = _device(group)
    worst = torch.full((len(keys), columns), _NONE, dtype=torch.float64)
    total = torch.zeros((len(keys), 3), dtype=torch.float64)
    for row, key in enumerate(keys):
        if key in own:
            worst[row] = torch.tensor(_worst(own[key], what_if), dtype=torch.float64)
            total[row] = torch.tensor(_terms(own[key]), dtype=torch.float64)
    worst, total = worst.to(device), total.to(device)
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(total, dist.ReduceOp.SUM, group=group)
    found = {}
    for key, maxima, sums in zip(keys, worst.tolist(), total.tolist(), strict=True):
        if maxima[0] != _NONE:
            text = own[key].cast if key in own else cast(key)
            found[key] = _joined(text, maxima, sums, what_if)
    return found


def _device(group: Any) -> torch.device:
    if dist.get_backend(group) == "gloo":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _worst(stats: OperandStats, what_if: Sequence[str]) -> list[float]:
    """What is joined by the maximum; smaller is worse for SQNR, so it goes in negated."""
    empty = not stats.elements
    amax = _NONE if empty else math.inf if stats.amax is None else stats.amax
    low = _NONE if stats.scale_min is None else -stats.scale_min
    facts = [_number(getattr(stats, name)) for name in _FACTS]
    line = [stats.step, stats.call, amax, low, *facts]
    for loss in (stats.loss, *(stats.what_if[name] for name in what_if)):
        sqnr = _NONE if loss.sqnr_db is None else max(-loss.sqnr_db, _EXACT)
        line += [sqnr, _number(loss.underflow), _number(loss.saturation)]
    return line


def _number(value: float | None) -> float:
    return _NONE if value is None else float(value)


def _terms(stats: OperandStats) -> list[float]:
    """Elements, those not finite, and the sum of squares of the others."""
    bad = stats.elements * (stats.nonfinite or 0.0)
    return [stats.elements, bad, (stats.mean_square or 0.0) * (stats.elements - bad)]


def _joined(
    cast: str, maxima: list[float], sums: list[float], what_if: Sequence[str]
) -> OperandStats:
    step, call, amax, low, *rest = maxima
    facts = {name: _read(value) for name, value in zip(_FACTS, rest, strict=False)}
    losses = [_loss(*rest[i : i + 3]) for i in range(len(_FACTS), len(rest), 3)]
    elements, bad, squares = sums
    good = elements - bad
    return OperandStats(
        step=int(step),
        call=int(call),
        cast=cast,
        elements=int(elements),
        amax=amax if math.isfinite(amax) else None,
        mean_square=squares / good if good else None,
        nonfinite=bad / elements if elements else None,
        loss=losses[0],
        scale_min=None if low == _NONE else int(-low),
        scale_max=_whole(facts["scale_max"]),
        scales_distinct=_whole(facts["scales_distinct"]),
        nonfinite_blocks=facts["nonfinite_blocks"],
        what_if=MappingProxyType(dict(zip(what_if, losses[1:], strict=True))),
    )


def _read(value: float) -> float | None:
    return None if value == _NONE else value


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _loss(sqnr: float, underflow: float, saturation: float) -> Loss:
    decibels = None if sqnr == _NONE else math.inf if sqnr == _EXACT else -sqnr
    return Loss(decibels, _read(underflow), _read(saturation))

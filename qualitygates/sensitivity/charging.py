"""What selection charges for a choice: the effects of branches, calibrated by whole trainings.

Branches rank; how much harm a whole training shows is another number, and effects do not add up.
So everything low is trained whole, on the sweep's own seeds and rows, and one factor makes the sum
of the charges of its items the harm that those trainings show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from scipy.special import log_ndtr

from .effects import Effect
from .groups import Group
from .search import Found, Item

Charges = dict[Item, dict[str, float]]
"""(group, product) -> product text -> predicted harm, relative NE."""
_LOG_ROOT_2_PI: Final = 0.5 * math.log(2.0 * math.pi)


def shrunk(effect: Effect) -> float:
    """What an effect is charged without a calibration: shrunk by what noise alone would give.

    The positive part of the James-Stein estimate, max(d - V / d, 0): the sum of the positive parts
    of many effects that are nothing but noise would otherwise spend the whole budget.
    """
    if effect.harm == 0 or not math.isfinite(effect.harm):
        return effect.harm
    return max(effect.harm - (effect.v_seed + effect.v_example) / effect.harm, 0.0)


def expected(effect: Effect) -> float:
    """The mean of the harm given its estimate d with error s, when any harm >= 0 is as likely.

    d + s phi(d / s) / Phi(d / s), which is above 0: an item that its noise hides may do harm. The
    sum of many is too large, which the calibration takes back.
    """
    error = math.sqrt(effect.v_seed + effect.v_example)
    if error == 0 or not math.isfinite(effect.estimate):
        return effect.harm
    z = effect.estimate / error
    return error * max(z + math.exp(-0.5 * z * z - _LOG_ROOT_2_PI - float(log_ndtr(z))), 0.0)


@dataclass(frozen=True)
class Calibration:
    """Everything low over whole trainings, the sum of the items' expected harm, their quotient."""

    training: Effect
    branches: float
    factor: float

    def to_dict(self) -> dict[str, Any]:
        """JSON data."""
        return {
            "training": self.training.to_dict(),
            "branches": self.branches,
            "factor": self.factor,
        }


def measured_items(found: Found) -> dict[str, dict[str, str]]:
    """Group -> product -> lowest text, of every item whose branches ended in finite numbers."""
    low: dict[str, dict[str, str]] = {}
    for (group, product), text in found.base.items():
        effect = found.alone.get((group, product), {}).get(text)
        if effect is not None and math.isfinite(effect.estimate):
            low.setdefault(group, {})[product] = text
    return low


def calibrate(found: Found, training: Effect) -> Calibration | None:
    """The calibration by the effect of `measured_items` over whole trainings; None if it broke."""
    items = [(g, p) for g, products in measured_items(found).items() for p in products]
    total = sum(expected(found.alone[item][found.base[item]]) for item in items)
    if not math.isfinite(training.estimate):
        return None
    factor = expected(training) / total if total > 0 else 1.0
    return Calibration(training, total, factor)


def charges_of(
    found: Found,
    groups: Sequence[Group],
    screened: Mapping[str, Any],
    factor: float | None,
) -> Charges:
    """What every measured choice of every item is charged; `factor` None is without a calibration.

    With one, higher rungs that no branch tried are charged too: an error has its harm by its
    square, so a rung is charged what the lowest is, times the square of the quotient of their
    relative errors in the screen. A rung that was tried is charged that much at most, unless its
    own branches show harm.
    """
    if factor is None:
        return {
            item: {text: shrunk(effect) for text, effect in texts.items()}
            for item, texts in found.alone.items()
        }
    charges: Charges = {}
    by_name = {group.name: group for group in groups}
    for item, texts in found.alone.items():
        charges[item] = {text: expected(effect) for text, effect in texts.items()}
        base = charges[item][found.base[item]]
        for rung in by_name[item[0]].rungs[1:]:
            text = rung[item[1]]
            scale = _error_quotient(by_name[item[0]], item[1], (found.base[item], text), screened)
            if scale is None or not math.isfinite(base) or text == found.base[item]:
                continue
            effect = texts.get(text)
            if effect is None:
                charges[item][text] = base * scale**2
            elif effect.lower <= 0:
                charges[item][text] = min(charges[item][text], base * scale**2)
    return {
        item: {text: value * factor for text, value in texts.items()}
        for item, texts in charges.items()
    }


def _error_quotient(
    group: Group, product: str, texts: tuple[str, str], screened: Mapping[str, Any]
) -> float | None:
    """The largest quotient of the second text's relative error to the first's over the layers."""
    found = []
    for layer in group.layers:
        proxies = screened[layer]["products"][product] if layer in screened else {}
        low, high = (proxies.get(text, {}).get("relative_error") for text in texts)
        if not low or high is None:
            return None
        found.append(min(high / low, 1.0))
    return max(found, default=None)

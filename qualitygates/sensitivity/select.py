"""Selection: one policy a group, least predicted harm for a saving, or most saving for a harm."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from ..errors import ExperimentError
from .cost import SpeedFacts
from .groups import Group
from .options import BF16, PRODUCTS, Option, policy_text

_TIE: Final = 1e-6
UNITS: Final = {
    "time": "step time of the linear layers",
    "memory": "bytes kept of their inputs",
    "flops": "flops of the linear layers",
}


@dataclass(frozen=True)
class Choice:
    """A policy that a group may take: predicted harm (relative NE) and savings by budget."""

    group: str
    products: Mapping[str, str]
    harm: float
    saved: Mapping[str, float]


@dataclass(frozen=True)
class Selection:
    """The chosen policy of every group, and what is predicted for the whole.

    harm: sum of the groups' predicted harm, relative NE. saved: share of the total, by budget.
    """

    choices: tuple[Choice, ...]
    harm: float
    saved: Mapping[str, float]

    @property
    def policies(self) -> dict[str, dict[str, str]]:
        """Group -> product -> text, products in BF16 left out."""
        return {
            one.group: {p: t for p, t in one.products.items() if t != BF16} for one in self.choices
        }


def choices_of(
    groups: Sequence[Group],
    charges: Mapping[tuple[str, str], Mapping[str, float]],
    speed: SpeedFacts,
) -> list[list[Choice]]:
    """Every policy of every group whose products are charged; BF16 is always one.

    A policy that would be slower than BF16, its casts included, is left out.
    """
    found = []
    for group in groups:
        texts = [[BF16, *charges.get((group.name, product), {})] for product in PRODUCTS]
        plain = group.seconds(speed, policy_text({}))
        choices = []
        for combination in itertools.product(*texts):
            products = dict(zip(PRODUCTS, combination, strict=True))
            harms = [
                charges[group.name, product][text]
                for product, text in products.items()
                if text != BF16
            ]
            time = plain - group.seconds(speed, policy_text(products))
            low = any(text != BF16 for text in combination)
            if not np.isfinite(sum(harms)) or (low and speed.rates is not None and time <= 0):
                continue
            saved = {
                "time": time,
                "memory": _bytes_saved(group, products["wgrad"], speed),
                "flops": _flops_low(group, combination),
            }
            choices.append(Choice(group.name, products, sum(harms), saved))
        found.append(choices)
    return found


def _flops_low(group: Group, texts: Sequence[str]) -> float:
    return group.flops * sum(text != BF16 for text in texts) / len(texts)


def _bytes_saved(group: Group, wgrad: str, speed: SpeedFacts) -> float:
    """Bytes of x that backward keeps for wgrad, less than in BF16."""
    if wgrad == BF16:
        return 0.0
    right = Option.parse(wgrad).formats[1]
    kept = right.element.bits / 8 * 1.03
    return sum(k * speed.width * speed.rows * (2 - kept) for _, k in group.shapes)


def totals(
    groups: Sequence[Group], speed: SpeedFacts, all_layers: Sequence[tuple[int, int]]
) -> dict[str, float]:
    """What the savings are shares of: all linear layers of the model, candidates or not."""
    return {
        "time": sum(speed.seconds(shape, policy_text({})) for shape in all_layers),
        "memory": sum(2 * k * speed.width * speed.rows for _, k in all_layers),
        "flops": sum(6.0 * n * k for n, k in all_layers),
    }


def most_saving(
    options: Sequence[Sequence[Choice]], total: Mapping[str, float], *, budget: str, harm: float
) -> Selection:
    """The largest saving with a predicted harm of at most `harm`."""
    found = _solve(options, total, budget=budget, harm=harm, saving=None)
    assert found is not None  # all BF16 is always possible
    return found


def least_harm(
    options: Sequence[Sequence[Choice]],
    total: Mapping[str, float],
    *,
    budget: str,
    saving: float,
    harm: float,
) -> Selection:
    """The least predicted harm that saves a share `saving`.

    Raises ExperimentError when no choice saves that much, or only one that harms beyond `harm`.
    """
    found = _solve(options, total, budget=budget, harm=None, saving=saving)
    best = most_saving(options, total, budget=budget, harm=harm)
    within = (
        f"within the predicted harm of {harm:.4%} relative NE at most {best.saved[budget]:.1%} can "
        f"be saved; lower [select] saving, or add formats or fixes"
    )
    if found is None:
        highest = _solve(options, total, budget=budget, harm=None, saving=None)
        most = highest.saved[budget] if highest else 0.0
        raise ExperimentError(
            f"[select] saving = {saving:g} of the {UNITS[budget]} cannot be met: every measured "
            f"choice together saves at most {most:.1%}; {within}"
        )
    if found.harm > harm:
        raise ExperimentError(
            f"[select] saving = {saving:g} of the {UNITS[budget]} costs a predicted "
            f"{found.harm:.4%} relative NE at least; {within}"
        )
    return found


def _solve(
    options: Sequence[Sequence[Choice]],
    total: Mapping[str, float],
    *,
    budget: str,
    harm: float | None,
    saving: float | None,
) -> Selection | None:
    """One binary variable a choice, exactly one a group (scipy.optimize.milp, HiGHS)."""
    flat = [one for group in options for one in group]
    harms = np.array([one.harm for one in flat])
    saved = np.array([one.saved[budget] for one in flat]) / max(total[budget], 1e-300)
    one_each = np.zeros((len(options), len(flat)))
    at = 0
    for row, group in enumerate(options):
        one_each[row, at : at + len(group)] = 1
        at += len(group)
    constraints = [LinearConstraint(one_each, 1, 1)]
    scale = max(float(harms.max(initial=0.0)), 1e-12)
    if harm is not None:
        constraints.append(LinearConstraint(harms[None] / scale, -np.inf, harm / scale))
    if saving is not None:
        constraints.append(LinearConstraint(saved[None], saving, np.inf))
    goal = harms / scale - _TIE * saved if saving is not None else -saved + _TIE * harms / scale
    result = milp(
        goal,
        constraints=constraints,
        integrality=np.ones(len(flat)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        return None
    chosen = tuple(one for one, x in zip(flat, result.x, strict=True) if x > 0.5)
    return Selection(
        chosen,
        harm=float(sum(one.harm for one in chosen)),
        saved={
            name: sum(one.saved[name] for one in chosen) / whole if whole else 0.0
            for name, whole in total.items()
        },
    )


def pareto(
    options: Sequence[Sequence[Choice]], total: Mapping[str, float], *, budget: str, harm: float
) -> list[dict[str, Any]]:
    """Predicted harm against savings, from no harm at all to the largest saving there is."""
    worst = sum(max(one.harm for one in group) for group in options)
    levels = [0.0, *np.geomspace(harm / 16, max(worst, harm), 15).tolist()]
    found: dict[tuple[float, float], dict[str, Any]] = {}
    for level in sorted({*levels, harm}):
        one = most_saving(options, total, budget=budget, harm=level)
        key = (round(one.harm, 12), round(one.saved[budget], 12))
        found[key] = {"harm": one.harm, **{name: one.saved[name] for name in total}}
    return list(found.values())

"""The plots of a sweep: effects by product, harm against saving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..blocks import Figure
from ..plots import BAD, BASE, CAND, MUTED, NULL, figure_axes
from .options import PRODUCTS

Result = Mapping[str, Any]
_COLOURS: Final = {"fprop": BASE, "dgrad": NULL, "wgrad": CAND}
_MOST: Final = 24


def figures(result: Result) -> list[Figure]:
    """All plots that the result has data for."""
    sink: list[Figure] = []
    _effects(sink, result)
    _pareto(sink, result)
    return sink


def _effects(sink: list[Figure], result: Result) -> None:
    shown = [one for one in result["ranking"] if one["estimate"] is not None][:_MOST]
    if not shown:
        return
    note = (
        f"The {len(shown)} most harmful of {len(result['ranking'])}, with 90 % intervals; right of "
        "zero is worse. Colour: which product."
    )
    with figure_axes(
        sink, "Effect of each product alone", note, height=1 + 0.19 * len(shown)
    ) as axes:
        for product in PRODUCTS:
            rows = [(i, one) for i, one in enumerate(shown) if one["product"] == product]
            if not rows:
                continue
            mid = [100 * one["estimate"] for _, one in rows]
            spread = [
                [100 * _half(one, "lower") for _, one in rows],
                [100 * _half(one, "upper") for _, one in rows],
            ]
            axes.errorbar(
                mid,
                [-i for i, _ in rows],
                xerr=spread,
                fmt="o",
                markersize=4,
                color=_COLOURS[product],
                label=product,
            )
        axes.axvline(0, color=MUTED, linewidth=1)
        axes.set_yticks([-i for i in range(len(shown))], [_short(one["group"]) for one in shown])
        axes.set_xlabel("relative NE, %")
        axes.legend(loc="lower right")


def _half(one: Mapping[str, Any], side: str) -> float:
    return 0.0 if one[side] is None else abs(float(one[side]) - float(one["estimate"]))


def _short(name: str) -> str:
    # A dollar would begin a formula.
    flat = name.replace("$", "\\$")
    return flat if len(flat) <= 28 else f"...{flat[-25:]}"


def _pareto(sink: list[Figure], result: Result) -> None:
    budget = result["selection"]["budget"]
    points = result["pareto"]
    if len(points) < 2:
        return
    label = {
        "time": "predicted time of the linear layers, share of BF16",
        "memory": "bytes kept of their inputs, share of BF16",
        "flops": "share of flops left in BF16",
    }[budget]
    note = (
        "Each point is the best choice of policies for its predicted harm; sums of effects one at "
        "a time. The diamond is the recipe, the dashed line the harm budget."
    )
    with figure_axes(sink, "Predicted NE against cost", note) as axes:
        axes.step(
            [1 - one[budget] for one in points],
            [100 * one["harm"] for one in points],
            where="post",
            color=BASE,
            marker="o",
            markersize=4,
        )
        chosen = result["selection"]
        axes.plot(
            [1 - chosen["saved"][budget]],
            [100 * chosen["harm"]],
            marker="D",
            color=CAND,
            linestyle="none",
            label="recipe",
        )
        axes.axhline(100 * result["harm_budget"], color=BAD, linestyle="--", label="harm budget")
        axes.set_xlabel(label)
        axes.set_ylabel("relative NE, %")
        axes.legend(loc="upper right")

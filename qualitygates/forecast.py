"""What more data would bring: power at the looks to come, seeds and examples needed, futility."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .verdict import INCONCLUSIVE, Design

POWER: Final = 0.9
FUTILE: Final = 0.1


def forecast(
    entry: Mapping[str, Any], *, looks: Sequence[int], look: int, null_sd: float = 0.0
) -> dict[str, Any]:
    """Forecast of one metric entry of a verdict at a look.

    `power`: {look: probability to ACCEPT} at each look after this one, if the true effect is the
    estimate; `power_if_neutral`: the same if it is 0. `seeds_needed`: the fewest seeds with 90 %
    power at the estimate, None when 200 are not enough. `examples_factor`: how many times as many
    evaluation examples bring their error to a quarter of the room to the margin (at least 1).
    `null_sd` is the paired sd of the null control: the larger noise plans the seeds.
    """
    design, neutral = _design(entry, null_sd), _design({**entry, "estimate": 0.0}, null_sd)
    later = [one for one in looks if one > look]
    return {
        "power": {str(one): _power(design, entry, one) for one in later},
        "power_if_neutral": {str(one): _power(neutral, entry, one) for one in later},
        "seeds_needed": design.seeds_needed(power=_each(entry)) if design.room > 0 else None,
        "examples_factor": _examples_factor(design),
        "assumed_effect": entry["estimate"],
        "paired_sd": design.sigma,
        "example_error": design.tau,
    }


def futile(
    forecasts: Mapping[str, Mapping[str, Any]], metrics: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Why going on is hopeless: open metrics with less than 10 % power at the last look, if any.

    All metrics must pass, so the least power bounds that of the gate from above.
    """
    found = []
    for key, one in forecasts.items():
        if metrics[key]["verdict"] != INCONCLUSIVE or not one["power"]:
            continue
        last, power = list(one["power"].items())[-1]
        if power < FUTILE:
            found.append(
                f"{key}: at the effect seen the look at {last} seeds would accept with "
                f"probability {power:.2g}, below {FUTILE:g}"
            )
    return found


def _design(entry: Mapping[str, Any], null_sd: float) -> Design:
    estimate = entry["estimate"]
    worse = abs(estimate) if entry["two_sided"] else estimate
    sigma = max(math.sqrt(entry["seeds"] * entry["v_seed"]), null_sd)
    return Design(
        sigma,
        math.sqrt(entry["v_example"]),
        entry["margin"] - worse,
        alpha=entry["alpha"],
        clusters=int(entry["clusters"]),
    )


def _power(design: Design, entry: Mapping[str, Any], seeds: int) -> float:
    power = design.power(seeds)
    # Both sides of a two-sided margin can fail; far from 0 only the nearer one does.
    if not entry["two_sided"]:
        return power
    far = Design(
        design.sigma,
        design.tau,
        2 * entry["margin"] - design.room,
        alpha=design.alpha,
        clusters=design.clusters,
    )
    return max(0.0, power + far.power(seeds) - 1.0)


def _each(entry: Mapping[str, Any]) -> float:
    return (1 + POWER) / 2 if entry["two_sided"] else POWER


def _examples_factor(design: Design) -> float | None:
    if design.room <= 0:
        return None
    return max(1.0, (design.tau / (design.room / 4)) ** 2)

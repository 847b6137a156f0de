"""Confirmation: the full gate on the written recipe, with seeds and rows that chose nothing.

Only here is anything accepted, and only by the gate's own verdict. While a recipe is not accepted,
the next one is gated, which harms less. All recipes and the level of each gate are fixed before the
first one, and the levels add up to 0.05: whatever the gates have in common (they evaluate the same
rows), the chance that any recipe beyond a margin is confirmed is at most that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scipy.special import stdtr

from ..controls import NOT_RUN
from ..verdict import ACCEPT, INCONCLUSIVE, REJECT

LEVEL: Final = 0.05
_NO_ASSAY: Final = (
    "the gate cannot tell BF16 from BF16 moved by an ulp: its null control is not accepted after "
    "the last look, so no other recipe can be either; train more steps, evaluate on more rows, or "
    "widen the margins"
)


@dataclass(frozen=True)
class Attempt:
    """One recipe that reached a gate: folder, groups that differ from the first recipe, verdict.

    p: see `p_value`; level: what it must not pass.
    """

    folder: Path
    changed: tuple[str, ...]
    verdict: Mapping[str, Any]
    p: float
    level: float

    @property
    def accepted(self) -> bool:
        """True when its gate said ACCEPT, and at the level of this attempt."""
        # The single attempt has the whole level, which is the gate's own.
        kept = self.level == LEVEL or self.p <= self.level
        return bool(self.verdict["verdict"] == ACCEPT) and kept

    def to_dict(self) -> dict[str, Any]:
        """JSON data."""
        return {
            "folder": f"confirm/{self.folder.name}",
            "given_back": list(self.changed),
            "verdict": self.verdict["verdict"],
            "p": self.p,
            "level": self.level,
            "accepted": self.accepted,
            "seeds": self.verdict["seeds"],
        }


def levels(attempts: int) -> tuple[float, ...]:
    """The level of each attempt: half of what is left to each, the rest to the last.

    They add up to `LEVEL`, so that by Bonferroni's inequality it is the level of all together.
    """
    shares = [0.5 ** (k + 1) for k in range(attempts - 1)]
    return tuple(LEVEL * share for share in (*shares, 1.0 - sum(shares)))


def p_value(verdict: Mapping[str, Any], *, looks: int) -> float:
    """The largest one-sided p of all co-primary metrics being beyond their margins.

    Times the number of looks (Bonferroni): one of them is where the gate stopped.
    """
    worst = 0.0
    for entry in verdict["metrics"].values():
        error = (entry["v_seed"] + entry["v_example"]) ** 0.5
        sides = [entry["estimate"]]
        if entry["two_sided"]:
            sides.append(-entry["estimate"])
        for side in sides:
            room = entry["margin"] - side
            p = float(stdtr(entry["dof"], -room / error)) if error else float(room <= 0)
            worst = max(worst, p * looks)
    return min(worst, 1.0) if verdict["metrics"] else 1.0


def confirm(count: int, attempt: Callable[[int, float], Attempt]) -> dict[str, Any]:
    """Gate one recipe after the other, at most `count`, until one is accepted.

    `attempt` gates the recipe of a number at a level. Ends early, with the reason, when the gate
    itself is too noisy for any recipe.
    """
    attempts: list[Attempt] = []
    reason = None
    for number, level in enumerate(levels(count)):
        attempts.append(attempt(number, level))
        if attempts[-1].accepted:
            break
        if no_assay(attempts[-1].verdict):
            reason = _NO_ASSAY
            break
    last = attempts[-1]
    rejected = last.verdict["verdict"] == REJECT
    return {
        "verdict": ACCEPT if last.accepted else (REJECT if rejected else INCONCLUSIVE),
        "accepted": last.folder.name if last.accepted else None,
        "given_back": list(last.changed) if last.accepted else [],
        "reason": reason,
        "attempts": [one.to_dict() for one in attempts],
    }


def no_assay(verdict: Mapping[str, Any]) -> bool:
    """Whether a gate that ended undecided did not accept its own null control either."""
    if verdict["verdict"] != INCONCLUSIVE:
        return False
    return verdict["controls"]["null"]["verdict"] not in (ACCEPT, NOT_RUN)


def changed_groups(
    first: Mapping[str, Mapping[str, str]], other: Mapping[str, Mapping[str, str]]
) -> tuple[str, ...]:
    """Groups whose products differ between two choices, in order."""
    names = dict.fromkeys([*first, *other])
    return tuple(name for name in names if first.get(name, {}) != other.get(name, {}))

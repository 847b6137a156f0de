"""Confirmation: the full gate on the written recipe, with seeds and rows that chose nothing.

Only here is anything accepted, and only by the gate's own verdict. Recipes that are tried one after
another share Holm's correction: the more attempts, the more one of them must show.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scipy.special import stdtr

from ..experiment import Experiment
from ..gate import run
from ..slices import holm

LEVEL: Final = 0.05
_SHARED_ARMS: Final = ("baseline", "null", "known_bad")


@dataclass(frozen=True)
class Attempt:
    """One recipe that reached a gate: its folder, the gate's verdict and p-value."""

    folder: Path
    given_back: tuple[str, ...]
    verdict: Mapping[str, Any]
    p: float

    @property
    def accepted(self) -> bool:
        """True when its gate said ACCEPT."""
        return bool(self.verdict["verdict"] == "ACCEPT")


def run_gate(
    experiment: Experiment, folder: Path, *, earlier: Sequence[Path], workers: int, progress: bool
) -> dict[str, Any]:
    """The verdict of a gate in `folder`; runs of the BF16 arms are taken from `earlier` gates.

    They are records of the same inputs, named by the hash of them; a gate reads no others.
    """
    runs = folder / "runs"
    for other in earlier:
        for arm in _SHARED_ARMS:
            for path in sorted((other / "runs").glob(f"{arm}-*.json")):
                target = runs / path.name
                if not target.exists():
                    runs.mkdir(parents=True, exist_ok=True)
                    part = target.with_name(f".{target.name}.part")
                    shutil.copyfile(path, part)
                    part.replace(target)
    return run(experiment, out=folder, workers=workers, progress=progress)


def p_value(verdict: Mapping[str, Any]) -> float:
    """The largest one-sided p of all co-primary metrics being beyond their margins.

    For looks it is scaled by 0.05 over the level of a look: below 0.05 exactly when the gate's own
    level is met.
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
            worst = max(worst, p * LEVEL / entry["alpha"])
    return min(worst, 1.0) if verdict["metrics"] else 1.0


def confirmed(attempts: Sequence[Attempt]) -> Attempt | None:
    """The first attempt that its gate accepted and Holm's correction over all attempts keeps."""
    passed = holm([one.p for one in attempts], level=LEVEL)
    return next((a for a, kept in zip(attempts, passed, strict=True) if kept and a.accepted), None)


def search_order(
    order: Sequence[str], attempt: Callable[[tuple[str, ...]], Attempt], *, most: int
) -> list[Attempt]:
    """Gates of ever longer prefixes of `order` given back, by binary search; at most `most`.

    The first has nothing given back; when it is accepted there is no second.
    """
    attempts = [attempt(())]
    low, high = 0, len(order)
    while not attempts[0].accepted and len(attempts) < most and high - low > 1:
        middle = (low + high) // 2
        attempts.append(attempt(tuple(order[:middle])))
        if attempts[-1].accepted:
            high = middle
        else:
            low = middle
    return attempts

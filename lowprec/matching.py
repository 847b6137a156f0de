"""Which rule decides which layer: names, positions, and rules that decide nothing."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Final

from lowprec.errors import PlanError, RecipeError
from lowprec.recipe import Recipe, Rule

_SHOWN: Final = 5


def deciding_rules(
    recipe: Recipe,
    layers: Mapping[str, Sequence[str]],
    *,
    steps: int | None,
    kind: str = "linear",
) -> dict[int, dict[str, int]]:
    """Index of the rule that decides each layer, by the step from which it does.

    layers: name -> all names of that layer (a module that is registered twice has two), in the
    model's order. steps: of the whole training, for rules that hold for its last part. Step 0 is
    always there; layers without a rule are absent; rules of another kind are passed over. Raises
    PlanError for a rule that matches no layer or whose every layer is decided by later rules, with
    the nearest layer names.
    """
    owners = {alias: name for name, aliases in layers.items() for alias in aliases}
    matches = [
        _matched(rule, list(layers), owners) if rule.kind == kind else [] for rule in recipe.rules
    ]
    starts = _starts(recipe, steps)
    decided: dict[int, dict[str, int]] = {}
    for start in sorted({0, *starts}):
        decided[start] = {
            name: index
            for index, names in enumerate(matches)
            if starts[index] <= start
            for name in names
        }
    for index, (rule, names) in enumerate(zip(recipe.rules, matches, strict=True)):
        if rule.kind != kind:
            continue
        where = f"recipe {recipe.name}: rule {index + 1} (match = {rule.match!r})"
        if not names:
            raise PlanError(f"{where} matches no {rule.kind} layer; {_nearest(rule.match, layers)}")
        if not any(index in stage.values() for stage in decided.values()):
            later = sorted({decided[starts[index]][name] + 1 for name in names})
            raise PlanError(
                f"{where} decides nothing: rule {' and '.join(map(str, later[:_SHOWN]))} comes "
                f"later and matches the same layers ({', '.join(names[:_SHOWN])}); remove it or "
                "move it down"
            )
    return decided


def _starts(recipe: Recipe, steps: int | None) -> list[int]:
    starts = []
    for index, rule in enumerate(recipe.rules):
        try:
            start = rule.start(steps)
        except RecipeError as error:
            raise PlanError(f"recipe {recipe.name}: rule {index + 1}: {error}") from error
        if rule.scheduled and steps is not None and not 0 < start < steps:
            raise PlanError(
                f"recipe {recipe.name}: rule {index + 1} (match = {rule.match!r}) would hold from "
                f"step {start} of a training of {steps} steps: it must begin after step 0 and "
                "before the end"
            )
        starts.append(start)
    return starts


def _matched(rule: Rule, names: list[str], owners: Mapping[str, str]) -> list[str]:
    # owners: every name of every layer -> the layer, in the model's order
    if position := rule.position(len(names)):
        end, count = position
        return names[:count] if end == "first" else names[-count:] if count else []
    if not any(sign in rule.match for sign in "*?["):
        return [owners[rule.match]] if rule.match in owners else []
    # Compiled here: fnmatch keeps few patterns, and compiles again for every layer beyond that.
    fits = re.compile(fnmatch.translate(rule.match)).match
    return list(dict.fromkeys(name for alias, name in owners.items() if fits(alias)))


def _nearest(pattern: str, layers: Mapping[str, Sequence[str]]) -> str:
    if not layers:
        return "the model has none"
    plain = pattern.replace("*", "").strip(".")
    close = difflib.get_close_matches(plain, layers, n=3, cutoff=0.3)
    if close:
        return f"nearest: {', '.join(close)}"
    shown = list(layers)[:8]
    return f"it has: {', '.join(shown)}" + (" ..." if len(layers) > len(shown) else "")

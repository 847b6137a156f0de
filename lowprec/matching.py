"""Which rule decides which layer: names, positions, and rules that decide nothing."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from lowprec.errors import PlanError
from lowprec.recipe import Recipe, Rule


def deciding_rules(recipe: Recipe, layers: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Index of the rule that decides each layer; layers without a rule are absent.

    layers: name -> all names of that layer (a module that is registered twice has two), in the
    model's order. Raises PlanError for a rule that matches no layer or whose every layer is decided
    by later rules, with the nearest layer names.
    """
    matches = [_matched(rule, layers) for rule in recipe.rules]
    decided = {name: index for index, names in enumerate(matches) for name in names}
    for index, (rule, names) in enumerate(zip(recipe.rules, matches, strict=True)):
        where = f"recipe {recipe.name}: rule {index + 1} (match = {rule.match!r})"
        if not names:
            raise PlanError(f"{where} matches no {rule.kind} layer; {_nearest(rule.match, layers)}")
        if index not in decided.values():
            later = sorted({decided[name] + 1 for name in names})
            raise PlanError(
                f"{where} decides nothing: rule {' and '.join(map(str, later))} comes later and "
                f"matches the same layers ({', '.join(names[:5])}); remove it or move it down"
            )
    return decided


def _matched(rule: Rule, layers: Mapping[str, Sequence[str]]) -> list[str]:
    names = list(layers)
    if rule.position:
        end, count = rule.position
        return names[:count] if end == "first" else names[-count:]
    return [
        name
        for name, aliases in layers.items()
        if any(fnmatchcase(alias, rule.match) for alias in aliases)
    ]


def _nearest(pattern: str, layers: Mapping[str, Sequence[str]]) -> str:
    if not layers:
        return "the model has none"
    plain = pattern.replace("*", "").strip(".")
    close = difflib.get_close_matches(plain, layers, n=3, cutoff=0.3)
    if close:
        return f"nearest: {', '.join(close)}"
    shown = list(layers)[:8]
    return f"it has: {', '.join(shown)}" + (" ..." if len(layers) > len(shown) else "")

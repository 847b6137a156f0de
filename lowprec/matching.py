"""Which rule decides which layer: names, positions, and rules that decide nothing."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import Final

from lowprec.errors import PlanError
from lowprec.recipe import Recipe, Rule

_SHOWN: Final = 5


def deciding_rules(recipe: Recipe, layers: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Index of the rule that decides each layer; layers without a rule are absent.

    layers: name -> all names of that layer (a module that is registered twice has two), in the
    model's order. Raises PlanError for a rule that matches no layer or whose every layer is decided
    by later rules, with the nearest layer names.
    """
    owners = {alias: name for name, aliases in layers.items() for alias in aliases}
    matches = [_matched(rule, list(layers), owners) for rule in recipe.rules]
    decided = {name: index for index, names in enumerate(matches) for name in names}
    deciding = set(decided.values())
    for index, (rule, names) in enumerate(zip(recipe.rules, matches, strict=True)):
        where = f"recipe {recipe.name}: rule {index + 1} (match = {rule.match!r})"
        if not names:
            raise PlanError(f"{where} matches no {rule.kind} layer; {_nearest(rule.match, layers)}")
        if index not in deciding:
            later = sorted({decided[name] + 1 for name in names})
            raise PlanError(
                f"{where} decides nothing: rule {' and '.join(map(str, later[:_SHOWN]))} comes "
                f"later and matches the same layers ({', '.join(names[:_SHOWN])}); remove it or "
                "move it down"
            )
    return decided


def _matched(rule: Rule, names: list[str], owners: Mapping[str, str]) -> list[str]:
    # owners: every name of every layer -> the layer, in the model's order
    if rule.position:
        end, count = rule.position
        return names[:count] if end == "first" else names[-count:]
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

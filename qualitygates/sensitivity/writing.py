"""What a sweep leaves for the user: a recipe with a reason a rule, and the gate that judges it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lowprec

from ..errors import ExperimentError
from ..experiment import Experiment
from ..records import write_text_atomic
from ..workloads.part import source_hash
from .effects import Effect
from .groups import Groups
from .options import BF16, PRODUCTS
from .search import Found
from .spec import SweepSpec

Policies = Mapping[str, Mapping[str, str]]
"""Group -> product -> text; products that are not named stay BF16."""


def recipe_text(name: str, groups: Groups, found: Found, policies: Policies) -> str:
    """A recipe in TOML, one rule a layer, each with what was measured or why it stays BF16."""
    why = (
        f"written by the sweep {name}: chosen by short branch runs, which prove nothing; the gate "
        "beside it judges"
    )
    lines = ["schema = 1", f"why = {_quoted(why)}"]
    for group in groups.candidates:
        chosen = {p: policies.get(group.name, {}).get(p, BF16) for p in PRODUCTS}
        why = "; ".join(_reason(found, group.name, p, chosen[p]) for p in PRODUCTS)
        if len(group.layers) > 1:
            why = f"group {group.name}: {why}"
        for layer in group.layers:
            lines += rule_lines(layer, chosen, why)
    for layer, reason in groups.excluded.items():
        lines += rule_lines(layer, dict.fromkeys(PRODUCTS, BF16), f"stays BF16: {reason}")
    return "\n".join(lines) + "\n"


def rule_lines(layer: str, products: Mapping[str, str], why: str) -> list[str]:
    """The lines of one rule for one layer."""
    return [
        "",
        "[[rule]]",
        f"match = {_quoted(_literal(layer) or '*')}",
        'kind = "linear"',
        *(f"{product} = {_quoted(products[product])}" for product in PRODUCTS),
        f"why = {_quoted(why)}",
    ]


def _reason(found: Found, group: str, product: str, text: str) -> str:
    effects = found.alone.get((group, product), {})
    base = found.base.get((group, product))
    if (group, product) in found.unmeasured:
        return f"{product} was not measured within the budget of branches: BF16"
    if base is None:
        return f"{product} was never tried: BF16"
    if text in effects:
        said = f"{product} {text} {effect_text(effects[text])}"
        return said if text == base else f"{said}, where {base} has {effect_text(effects[base])}"
    if text != BF16:
        return f"{product} {text}, charged by its error; {base} has {effect_text(effects[base])}"
    tried = ", ".join(f"{one} {effect_text(effect)}" for one, effect in effects.items())
    return f"{product} stays BF16 ({tried})"


def effect_text(effect: Effect) -> str:
    """`+0.120 % [+0.040, +0.200] NE` of a branch effect."""
    if effect.to_dict()["estimate"] is None:
        return "broke the training"
    low, high = 100 * effect.lower, 100 * effect.upper
    return f"{100 * effect.estimate:+.3f} % [{low:+.3f}, {high:+.3f}] NE"


def _literal(layer: str) -> str:
    """A layer name as a pattern that matches it alone."""
    return "".join(f"[{char}]" if char in "*?[" else char for char in layer)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def gate_text(
    spec: SweepSpec, folder: Path, *, recipe: str, name: str, attempt: int = 0, swept: bool = False
) -> str:
    """The gate of a recipe in `folder` as TOML: fresh seeds, the evaluation range not swept.

    Every `attempt` has seeds of its own. `swept`: on the sweep's own rows, for a choice by gates.
    """
    gate = spec.gate
    content = gate.to_dict()
    content["name"] = name
    content["workload"] = "part"
    content["first_seed"] = spec.confirm_first_seed + attempt * max(gate.looks)
    content["candidate"] = {"recipe": recipe}
    content["options"] = {
        "of": {
            "workload": gate.workload,
            "options": dict(gate.options),
            "base": os.path.relpath(gate.folder.resolve(), folder.resolve()),
            "source": source_hash(gate.workload, gate.folder),
        },
        "first": 0.0 if swept else spec.evaluation_share,
        "last": spec.evaluation_share if swept else 1.0,
        "clusters": spec.clusters,
    }
    if content["margins"].get("name") != "custom":
        content["margins"] = content["margins"]["name"]
    return toml_text(content)


def write_proposal(
    spec: SweepSpec,
    folder: Path,
    groups: Groups,
    found: Found,
    policies: Policies,
    *,
    attempt: int = 0,
) -> Experiment:
    """Write recipe.toml and gate.toml into `folder` and return the gate as read back."""
    write_text_atomic(folder / "recipe.toml", recipe_text(spec.name, groups, found, policies))
    name = f"{spec.name}-confirm"
    text = gate_text(spec, folder, recipe="./recipe.toml", name=name, attempt=attempt)
    write_text_atomic(folder / "gate.toml", text)
    return Experiment.from_toml(folder / "gate.toml")


def check_recipe(path: Path, plan: lowprec.Plan, model: Any, *, steps: int) -> lowprec.Plan:
    """The plan of a written recipe; ExperimentError unless it decides as `plan` does."""
    made = lowprec.plan(model, lowprec.load_recipe(path), steps=steps)
    differences = plan.diff(made)
    if differences:
        raise ExperimentError(f"{path}: reads back to another plan: {'; '.join(differences)}")
    return made


def toml_text(content: Mapping[str, Any]) -> str:
    """JSON data of text, numbers, booleans, lists and tables as TOML; tables come last."""
    plain = {key: value for key, value in content.items() if not isinstance(value, Mapping)}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    for key, table in content.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{_key(key)}]"]
            lines += [f"{_key(name)} = {_value(value)}" for name, value in table.items()]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else _quoted(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    return "[" + ", ".join(map(_value, value)) + "]"

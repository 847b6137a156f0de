"""The sections of a report that let a reader check it: products, levels, environment, hashes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .blocks import Block, Cell, Facts, Fold, Pre, Section, Table, Text
from .usage_sections import reproduce
from .wording import ARMS, PRODUCTS, evaluation_words, experiment_toml, flatten

Run = Mapping[str, Any]
# More products than this are shown on demand.
_MANY: Final = 36


def products(runs: Sequence[Run]) -> Section:
    """The plan of the candidate layer by layer, beside the products that really ran."""
    mine = [run for run in runs if run["arm"] == "candidate"]
    equal = [run for run in runs if run["gemms_match_plan"] is True]
    unknown = [run for run in runs if run["gemms_match_plan"] is None]
    blocks: list[Block] = []
    if len(unknown) == len(runs):
        said = "Nothing recorded which products ran at which precision: see [[observations]]."
        blocks.append(Text(said, "warn"))
    elif len(equal) == len(runs):
        said = f"In all {len(runs)} runs every product ran in the precision that was planned."
        blocks.append(Text(said, "good"))
    else:
        which = [f"{ARMS[r['arm']]} seed {r['seed']}" for r in runs if r not in equal + unknown]
        if which:
            blocks.append(Text(f"Planned and executed products differ: {', '.join(which)}", "bad"))
        if unknown:
            not_seen = ", ".join(f"{ARMS[r['arm']]} seed {r['seed']}" for r in unknown)
            blocks.append(Text(f"Products that ran were not recorded: {not_seen}", "warn"))
    layers = mine[0]["plan_layers"] if mine else []
    if layers:
        blocks += _layers(layers, mine)
    else:
        blocks.append(Text("No plan was recorded: which layer was meant to run how is not known."))
    plan = mine[0].get("plan_table", "") if mine else ""
    if plan:
        blocks.append(Fold("The plan, with the reason for every layer", [Pre(plan)]))
    return Section("Plan and products that ran", blocks)


def _layers(layers: Sequence[Mapping[str, Any]], runs: Sequence[Run]) -> list[Block]:
    """Every product of every layer; of a long plan what differs is open, the rest on demand."""
    head = ["layer", "product", "planned", "ran, candidate, all seeds", ""]
    rows = [_gemm_row(layer, product, runs) for layer in layers for product in PRODUCTS]
    counts = Counter(str(layer[product]) for layer in layers for product in PRODUCTS)
    split = ", ".join(f"{count} in {precision}" for precision, count in counts.most_common())
    blocks: list[Block] = [Text(f"Planned: {len(layers)} layers, {len(rows)} products, {split}.")]
    if len(rows) <= _MANY:
        return [*blocks, Table(head, rows, "llllc")]
    different = [row for row in rows if isinstance(row[-1], Cell) and row[-1].tone == "bad"]
    if different:
        blocks.append(Table(head, different, "llllc"))
    return [*blocks, Fold(f"All {len(rows)} products", [Table(head, rows, "llllc")])]


def _gemm_row(layer: Mapping[str, Any], product: str, runs: Sequence[Run]) -> list[str | Cell]:
    total: dict[str, int] = {}
    for run in runs:
        for precision, count in run["gemms"].get(layer["name"], {}).get(product, {}).items():
            total[precision] = total.get(precision, 0) + count
    planned = str(layer[product])
    if all(run["gemms_match_plan"] is None for run in runs):
        return [layer["name"], product, planned, "not recorded", Cell("-")]
    ran = ", ".join(f"{count} times {precision}" for precision, count in total.items()) or "never"
    if not layer.get("converted", True):
        ran, mark = "left as it was, not counted", Cell("-")
    elif not total and product == "dgrad":
        ran, mark = "never: nothing below it trains", Cell("-")
    else:
        mark = Cell("equal", "good") if set(total) == {planned} else Cell("differs", "bad")
    return [layer["name"], product, planned, ran, mark]


def appendix(
    gate: Mapping[str, Any], runs: Sequence[Run], verdict: Mapping[str, Any]
) -> list[Section]:
    """Levels per arm and seed, environment, hashes, and how to get the same again."""
    hashes = [
        ("experiment", str(gate.get("experiment_hash", "-"))),
        ("plan", str(verdict["plan_hash"])),
        ("recipe", str(verdict["recipe_hash"])),
    ]
    found = verdict["environment"]
    environments = found if isinstance(found, list) else [found]
    inputs = next((run["inputs"] for run in runs if run["arm"] == "candidate"), None)
    name = "What was promised" if gate.get("inputs") else "The experiment"
    folds: list[Block] = [Fold(name, [Pre(experiment_toml(gate["experiment"]))])]
    if inputs and isinstance(inputs.get("recipe"), str):
        folds.append(Fold("The recipe of the candidate", [Pre(inputs["recipe"])]))
    if inputs:
        text = json.dumps(inputs, indent=2, ensure_ascii=False, sort_keys=True)
        folds.append(Fold("Everything that determines a run (first candidate run)", [Pre(text)]))
    return [
        Section(
            "Levels by arm and seed",
            [Fold(f"{len(runs)} runs, each in every evaluation", [_levels(runs)])],
        ),
        Section(
            "How to reproduce, environment, hashes",
            [
                *reproduce(gate, verdict),
                Facts(hashes),
                *(Facts(flatten(one)) for one in environments if isinstance(one, Mapping)),
                *folds,
            ],
        ),
    ]


def _levels(runs: Sequence[Run]) -> Table:
    names = ("ne", "logloss", "calibration", "auc", "gauc")
    rows: list[list[str | Cell]] = []
    for run in runs:
        for form, evaluation in (run["evaluations"] or {}).items():
            metrics = evaluation.get("metrics") or {}
            values = ["-" if metrics.get(k) is None else f"{metrics[k]:.5f}" for k in names]
            rows.append([ARMS[run["arm"]], str(run["seed"]), evaluation_words(form), *values])
        if run["training"]["crashed"] is not None:
            crash = Cell(f"crashed: {run['training']['crashed']}", "bad")
            rows.append([ARMS[run["arm"]], str(run["seed"]), crash, *["-"] * len(names)])
    head = ["arm", "seed", "form", "NE", "log-loss", "calibration", "AUC", "GAUC"]
    return Table(head, rows, "lrlrrrrr")

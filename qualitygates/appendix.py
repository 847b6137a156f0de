"""The sections of a report that let a reader check it: products, levels, environment, hashes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .blocks import Block, Cell, Facts, Fold, Pre, Section, Table, Text
from .wording import ARMS, FORMS, PRODUCTS, experiment_toml, flatten

Run = Mapping[str, Any]


def products(runs: Sequence[Run]) -> Section:
    mine = [run for run in runs if run["arm"] == "candidate"]
    equal = [run for run in runs if run["gemms_match_plan"] is True]
    blocks: list[Block] = []
    if len(equal) == len(runs):
        said = f"In all {len(runs)} runs every product ran in the precision that was planned."
        blocks.append(Text(said, "good"))
    else:
        which = [f"{ARMS[r['arm']]} seed {r['seed']}" for r in runs if r not in equal]
        blocks.append(Text(f"Planned and executed products differ: {', '.join(which)}", "bad"))
    if mine:
        layers = mine[0]["plan_layers"]
        rows = [_gemm_row(layer, product, mine) for layer in layers for product in PRODUCTS]
        head = ["layer", "product", "planned", "ran, candidate, all seeds", ""]
        blocks.append(Table(head, rows, "llllc"))
        plan = mine[0].get("plan_table", "")
        if plan:
            blocks.append(Fold("The plan, with the reason for every layer", [Pre(plan)]))
    return Section("Products that ran, beside the plan", blocks)


def _gemm_row(layer: Mapping[str, Any], product: str, runs: Sequence[Run]) -> list[str | Cell]:
    total: dict[str, int] = {}
    for run in runs:
        for precision, count in run["gemms"].get(layer["name"], {}).get(product, {}).items():
            total[precision] = total.get(precision, 0) + count
    planned = layer[product]
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
    reproduce = (
        "Save the experiment below as gate.toml; same code, same machine: the same bits. "
        "`python -m qualitygates run gate.toml --out DIR` trains, "
        "`python -m qualitygates judge DIR` judges these records again without training."
    )
    hashes = [
        ("experiment", str(gate.get("experiment_hash", "-"))),
        ("plan", str(verdict["plan_hash"])),
        ("recipe", str(verdict["recipe_hash"])),
    ]
    found = verdict["environment"]
    environments = found if isinstance(found, list) else [found]
    inputs = next((run["inputs"] for run in runs if run["arm"] == "candidate"), None)
    folds: list[Block] = [Fold("The experiment", [Pre(experiment_toml(gate["experiment"]))])]
    if inputs and isinstance(inputs.get("recipe"), str):
        folds.append(Fold("The recipe of the candidate", [Pre(inputs["recipe"])]))
    if inputs:
        text = json.dumps(inputs, indent=2, ensure_ascii=False, sort_keys=True)
        folds.append(Fold("Everything that determines a run (first candidate run)", [Pre(text)]))
    return [
        Section(
            "Levels by arm and seed",
            [Fold(f"{len(runs)} runs, each evaluated in both forms", [_levels(runs)])],
        ),
        Section(
            "Environment, hashes, how to reproduce",
            [
                *(Facts(flatten(one)) for one in environments),
                Facts(hashes),
                Text(reproduce),
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
            rows.append([ARMS[run["arm"]], str(run["seed"]), FORMS.get(form, form), *values])
        if run["training"]["crashed"] is not None:
            crash = Cell(f"crashed: {run['training']['crashed']}", "bad")
            rows.append([ARMS[run["arm"]], str(run["seed"]), crash, *["-"] * len(names)])
    head = ["arm", "seed", "form", "NE", "log-loss", "calibration", "AUC", "GAUC"]
    return Table(head, rows, "lrlrrrrr")

"""sweep: the five stages in order, each resumed from what is on disk."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import lowprec

from ..experiment import Experiment
from ..locking import folder_lock
from ..records import seal, write_json_atomic
from ..workload import load_workload
from .branches import refuse_own_loop
from .confirm import Attempt, confirmed, p_value, run_gate, search_order
from .groups import Groups, find_groups
from .measuring import Measurer
from .options import PRODUCTS, policy_text
from .pool import open_pool
from .report import write_report
from .search import Found, Search, arm_of
from .select import Choice, Selection, choices_of, least_harm, most_saving, pareto, totals
from .spec import SweepSpec
from .store import SweepStore
from .writing import check_recipe, write_proposal

_TIGHTENINGS = 3


@dataclass(frozen=True)
class Models:
    """A fresh model of the workload and its BF16 plan."""

    model: Any
    plan: lowprec.Plan


def sweep(spec: SweepSpec, *, out: Path, workers: int, progress: bool) -> dict[str, Any]:
    """Run a sweep in the folder `out` and return its result; what is measured is never repeated.

    Writes recipe.toml with a reason a rule, gate.toml that judges it, sweep.json, report.md and
    report.html. The result's "confirmation" is None when [confirm] run is false; nothing else in it
    is evidence for acceptance. Killed at any point, the same call resumes and gives the same
    result. Raises GateError and LowprecError.
    """
    started = time.monotonic()
    with folder_lock(out):
        result = _sweep(spec, out, workers=workers, progress=progress)
    return {**result, "seconds": time.monotonic() - started}


def _sweep(spec: SweepSpec, out: Path, *, workers: int, progress: bool) -> dict[str, Any]:
    models = bf16_models(spec.gate)
    groups = find_groups(models.plan, spec)
    with open_pool(workers, device=spec.gate.device) as pool:
        measurer = Measurer(spec, SweepStore(out), pool, progress)
        groups, screened = screened_groups(groups, measurer)
        search = Search(spec, groups, measurer)
        found = search.run(screened)
        chosen = _Chosen(spec, groups, found, models, search)
        selection = chosen.select()
        write_proposal(spec, out, groups, found, selection.policies)
        plan = check_recipe(
            out / "recipe.toml", chosen.plan(selection), models.model, steps=spec.gate.steps
        )
    result = chosen.result(selection, screened, plan)
    # A recipe that lowers nothing is BF16: there is nothing to judge.
    if spec.confirm and any(selection.policies.values()):
        done = chosen.confirm(selection, out, workers=workers, progress=progress)
        result["confirmation"] = done
        if done["given_back"]:
            recipe = lowprec.load_recipe(out / "recipe.toml")
            result |= _plan_facts(lowprec.plan(models.model, recipe, steps=spec.gate.steps))
            for name in done["given_back"]:
                result["selection"]["policies"].pop(name)
    sealed = seal({"schema": 1, "kind": "sweep", **result})
    write_json_atomic(out / "sweep.json", sealed, indent=2)
    write_report(out, sealed)
    return sealed


def _plan_facts(plan: lowprec.Plan) -> dict[str, Any]:
    return {
        "quantized_share": plan.quantized_share,
        "plan_hash": plan.hash,
        "plan_table": str(plan),
    }


def bf16_models(gate: Experiment) -> Models:
    """A fresh model of a gate's workload with its BF16 plan; raises GateError."""
    workload = load_workload(gate.workload, gate.options, folder=gate.folder)
    refuse_own_loop(workload, gate)
    torch.manual_seed(0)
    model = workload.model()
    plan = lowprec.plan(model, lowprec.load_recipe("bf16"), steps=gate.steps)
    return Models(model, plan)


def screened_groups(groups: Groups, measurer: Measurer) -> tuple[Groups, Mapping[str, Any]]:
    """The screen, and the groups without layers that training never calls."""
    options: dict[str, dict[str, None]] = {product: {} for product in PRODUCTS}
    for group in groups.candidates:
        for rung in group.rungs:
            for product in PRODUCTS:
                options[product][rung[product]] = None
    texts = {product: list(found) for product, found in options.items()}
    screened = measurer.screen(groups.layers, texts)
    called = {name for name, one in screened.items() if one["calls"]}
    return groups.only(called, batches=next(iter(screened.values()))["batches"]), screened


class _Chosen:
    """Selection and everything after it."""

    def __init__(
        self, spec: SweepSpec, groups: Groups, found: Found, models: Models, search: Search
    ) -> None:
        self.spec, self.groups, self.found = spec, groups, found
        self.models, self.search = models, search
        shapes = [layer.shape for layer in models.plan.layers]
        self.total = totals(groups.candidates, spec.speed, shapes)
        self.options = choices_of(groups.candidates, found.alone, spec.speed)
        self.measured: dict[str, Any] = {}

    def select(self) -> Selection:
        """The choice whose own branch, all of it together, stays within the harm budget.

        Effects that add up beyond their sum tighten the budget and the choice is made again.
        """
        budget = self.search.budget
        for _ in range(_TIGHTENINGS):
            selection = self._within(budget)
            if not selection.policies or not any(selection.policies.values()):
                break
            effect = self.search.whole({"chosen": selection.policies})["chosen"]
            self.measured = {"effect": effect.to_dict(), "budget": budget}
            if effect.estimate <= self.search.budget or effect.lower <= 0:
                break
            budget = min(budget, selection.harm) / 2
        return selection

    def _within(self, budget: float) -> Selection:
        select = self.spec.select
        if select.saving is None:
            return most_saving(self.options, self.total, budget=select.budget, harm=budget)
        return least_harm(
            self.options,
            self.total,
            budget=select.budget,
            saving=select.saving,
            harm=budget,
        )

    def plan(self, selection: Selection) -> lowprec.Plan:
        """The BF16 plan with the chosen policies."""
        plan = self.models.plan
        for layer, policy in arm_of(selection.policies, self.groups.candidates).items():
            plan = plan.with_layer(layer, policy, why="chosen")
        return plan

    def give_back_order(self, selection: Selection) -> list[str]:
        """Groups in low precision, the most predicted harm for a saving first."""
        low = [one for one in selection.choices if any(t != "bf16" for t in one.products.values())]
        budget = self.spec.select.budget

        def ratio(one: Choice) -> float:
            return one.harm / max(one.saved[budget], 1e-300)

        return [one.group for one in sorted(low, key=ratio, reverse=True)]

    def confirm(
        self, selection: Selection, out: Path, *, workers: int, progress: bool
    ) -> dict[str, Any]:
        """Gate the recipe, and while it is not accepted, recipes with groups given back."""
        folders: list[Path] = []

        def attempt(given_back: tuple[str, ...]) -> Attempt:
            folder = out / "confirm" / f"{len(folders) + 1}"
            policies = {n: p for n, p in selection.policies.items() if n not in given_back}
            gate = write_proposal(self.spec, folder, self.groups, self.found, policies)
            verdict = run_gate(
                gate, folder / "gate", earlier=folders, workers=workers, progress=progress
            )
            folders.append(folder / "gate")
            return Attempt(folder, given_back, verdict, p_value(verdict))

        order = self.give_back_order(selection)
        attempts = search_order(order, attempt, most=self.spec.attempts)
        best = confirmed(attempts)
        if best is not None and best.given_back:
            policies = {n: p for n, p in selection.policies.items() if n not in best.given_back}
            write_proposal(self.spec, out, self.groups, self.found, policies)
        last = attempts[-1].verdict["verdict"]
        return {
            "verdict": "ACCEPT" if best else ("REJECT" if last == "REJECT" else "INCONCLUSIVE"),
            "accepted": None if best is None else best.folder.name,
            "given_back": [] if best is None else list(best.given_back),
            "attempts": [
                {
                    "folder": f"confirm/{one.folder.name}",
                    "given_back": list(one.given_back),
                    "verdict": one.verdict["verdict"],
                    "p": one.p,
                    "seeds": one.verdict["seeds"],
                }
                for one in attempts
            ],
        }

    def result(
        self, selection: Selection, screened: Mapping[str, Any], plan: lowprec.Plan
    ) -> dict[str, Any]:
        """Everything that the report shows, as JSON data."""
        spec, found = self.spec, self.found
        return {
            "name": spec.name,
            "gate": spec.gate_file,
            "experiment": spec.gate.to_dict(),
            "speed": spec.speed.to_dict(),
            "groups": [
                {
                    "name": group.name,
                    "layers": list(group.layers),
                    "shapes": [list(shape) for shape in group.shapes],
                    "rungs": [dict(rung) for rung in group.rungs],
                    "seconds": group.seconds(spec.speed, policy_text({})),
                    "notes": list(group.notes),
                }
                for group in self.groups.candidates
            ],
            "excluded": dict(self.groups.excluded),
            "notes": dict(self.groups.notes),
            "screen": dict(screened),
            "ranking": [
                {
                    "group": g,
                    "product": p,
                    "text": found.base[g, p],
                    **effect.to_dict(),
                    "decided": found.decided.get((g, p), "undecided"),
                }
                for (g, p), effect in found.ranked()
            ],
            "tried": [
                {"group": g, "product": p, "text": text, **effect.to_dict()}
                for (g, p), texts in found.alone.items()
                for text, effect in texts.items()
            ],
            "unmeasured": [list(item) for item in found.unmeasured],
            "whole": {name: effect.to_dict() for name, effect in found.whole.items()},
            "interaction": found.index,
            "seeds": list(spec.branches.seeds),
            "start_steps": list(spec.start_steps),
            "window": spec.window,
            "harm_budget": self.search.budget,
            "selection": {
                "budget": spec.select.budget,
                "harm": selection.harm,
                "saved": dict(selection.saved),
                "policies": selection.policies,
                "measured": self.measured,
            },
            "pareto": pareto(
                self.options, self.total, budget=spec.select.budget, harm=self.search.budget
            ),
            **_plan_facts(plan),
            "confirmation": None,
        }

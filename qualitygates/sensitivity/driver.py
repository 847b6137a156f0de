"""sweep: the five stages in order, each resumed from what is on disk."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

import lowprec

from ..experiment import Experiment
from ..gate import run
from ..locking import folder_lock
from ..records import seal, write_json_atomic
from ..workload import load_workload
from .branches import refuse_own_loop
from .charging import Calibration, calibrate, charges_of, measured_items
from .confirm import Attempt, changed_groups, confirm, p_value
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

_TIGHTENINGS: Final = 3
_LEAST_TIGHTENING, _MOST_TIGHTENING = 1 / 2, 1 / 16
# Each further recipe that is gated has at most this share of the predicted harm of the last one.
_STEP: Final = 1 / 4
_NO_HARM: Final = 1e-9


@dataclass(frozen=True)
class Session:
    """Where a sweep writes, and where it runs."""

    out: Path
    workers: int
    progress: bool
    cluster: str

    def gate(self, experiment: Experiment, folder: Path) -> dict[str, Any]:
        """The verdict of a gate in `folder`, run as the sweep is."""
        return run(
            experiment,
            out=folder,
            workers=self.workers,
            progress=self.progress,
            cluster=self.cluster,
        )


@dataclass(frozen=True)
class Models:
    """A fresh model of the workload and its BF16 plan."""

    model: Any
    plan: lowprec.Plan


def sweep(
    spec: SweepSpec, *, out: Path, workers: int, progress: bool, cluster: str = ""
) -> dict[str, Any]:
    """Run a sweep in the folder `out` and return its result; what is measured is never repeated.

    Measurements and gates run in `workers` processes of this machine, or as Ray tasks: `cluster` is
    "local" for a Ray on this machine, "auto" or an address for one that runs.
    Writes recipe.toml with a reason a rule, gate.toml that judges it, sweep.json, report.md and
    report.html. The result's "confirmation" is None when [confirm] run is false; nothing else in it
    is evidence for acceptance. Killed at any point, the same call resumes and gives the same
    result. Raises GateError and LowprecError.
    """
    started = time.monotonic()
    with folder_lock(out):
        result = _sweep(spec, Session(out, workers, progress, cluster))
    return {**result, "seconds": time.monotonic() - started}


def _sweep(spec: SweepSpec, session: Session) -> dict[str, Any]:
    out = session.out
    models = bf16_models(spec.gate)
    groups = find_groups(models.plan, spec)
    with open_pool(session.workers, device=spec.gate.device, cluster=session.cluster) as pool:
        measurer = Measurer(spec, SweepStore(out), pool, session.progress)
        groups, screened = screened_groups(groups, measurer)
        search = Search(spec, groups, measurer)
        found = search.run(screened)
        chosen = _Chosen(spec, groups, found, models, search)
        chosen.charge(screened)
        selection = chosen.select()
        write_proposal(spec, out, groups, found, selection.policies)
        plan = check_recipe(
            out / "recipe.toml", chosen.plan(selection), models.model, steps=spec.gate.steps
        )
    result = chosen.result(selection, screened, plan)
    # A recipe that lowers nothing is BF16: there is nothing to judge.
    if spec.confirm and any(selection.policies.values()):
        result["confirmation"], accepted = chosen.confirm(selection, session)
        if accepted is not selection:
            recipe = lowprec.load_recipe(out / "recipe.toml")
            result |= _plan_facts(lowprec.plan(models.model, recipe, steps=spec.gate.steps))
            result["selection"] |= _choice_facts(accepted)
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


def _choice_facts(selection: Selection) -> dict[str, Any]:
    return {
        "harm": selection.harm,
        "saved": dict(selection.saved),
        "policies": selection.policies,
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
        self.calibration: Calibration | None = None
        self.tried: list[dict[str, Any]] = []
        self.measured: dict[str, Any] = {}
        """Of `tried`, what belongs to the selection: nothing where it keeps all in BF16."""

    def charge(self, screened: Mapping[str, Any]) -> None:
        """Train everything low whole, and charge every choice by it."""
        if self.spec.branches.trainings:
            low = measured_items(self.found)
            effect = self.search.whole({"all low": low}, trainings=True)["all low"]
            self.calibration = calibrate(self.found, effect)
        factor = self.calibration.factor if self.calibration else None
        self.options = self._options(screened, factor)
        self.cautious = self.options if factor else self._options(screened, 1.0)

    def _options(self, screened: Mapping[str, Any], factor: float | None) -> list[list[Choice]]:
        candidates = self.groups.candidates
        charges = charges_of(self.found, candidates, screened, factor)
        return choices_of(candidates, charges, self.spec.speed)

    def select(self) -> Selection:
        """The choice that, all of it together, stays within the harm budget.

        What it harms is measured, over whole trainings or else in branches. More than the budget
        tightens the budget of the next choice.
        """
        target = budget = self.search.budget
        trainings = self.spec.branches.trainings > 0
        for _ in range(_TIGHTENINGS + 1):
            selection = self._within(budget)
            self.measured = {}
            if not any(selection.policies.values()):
                break
            effect = self.search.whole({"chosen": selection.policies}, trainings=trainings)
            harm = effect["chosen"].estimate
            self.measured = {
                "effect": effect["chosen"].to_dict(),
                "budget": budget,
                "trainings": trainings,
            }
            self.tried.append(self.measured)
            if harm <= target or selection.harm == 0:
                break
            factor = min(max(target / harm, _MOST_TIGHTENING), _LEAST_TIGHTENING)
            budget = min(budget, selection.harm) * factor
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

    def sequence(self, selection: Selection) -> list[Selection]:
        """The recipes that may reach a gate: the choice, then with ever less predicted harm.

        Predicted by charges that are above 0 for every product, so that there is less to go to.
        """
        harm = sum(
            one.harm
            for group in self.cautious
            for one in group
            if Selection((one,), one.harm, {}).policies[one.group]
            == selection.policies.get(one.group)
        )
        found = [selection]
        while len(found) < self.spec.attempts and harm > _NO_HARM:
            harm *= _STEP
            less = most_saving(self.cautious, self.total, budget=self.spec.select.budget, harm=harm)
            if not any(less.policies.values()):
                break
            if less.policies != found[-1].policies:
                found.append(less)
        return found

    def confirm(self, selection: Selection, session: Session) -> tuple[dict[str, Any], Selection]:
        """Gate the recipe, and while it is not accepted, those that harm less.

        Returns what the gates said, and the accepted choice, or else the first.
        """
        recipes = self.sequence(selection)

        def write(folder: Path, number: int) -> Experiment:
            policies = recipes[number].policies
            return write_proposal(
                self.spec, folder, self.groups, self.found, policies, attempt=number
            )

        def attempt(number: int, level: float) -> Attempt:
            folder = session.out / "confirm" / f"{number + 1}"
            gate = write(folder, number)
            verdict = session.gate(gate, folder / "gate")
            p = p_value(verdict, looks=len(gate.looks))
            changed = changed_groups(recipes[0].policies, recipes[number].policies)
            return Attempt(folder, changed, verdict, p, level)

        done = confirm(len(recipes), attempt)
        number = len(done["attempts"]) - 1 if done["accepted"] else 0
        if number:
            write(session.out, number)
        return done, recipes[number]

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
                **_choice_facts(selection),
                "calibration": self.calibration and self.calibration.to_dict(),
                "measured": self.measured,
                "tried": self.tried,
            },
            "pareto": pareto(
                self.options, self.total, budget=spec.select.budget, harm=self.search.budget
            ),
            **_plan_facts(plan),
            "confirmation": None,
        }

"""plan(): every layer, every product, its precision and the reason, before anything is touched."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from lowprec.attention_planning import AttentionPlan, attention_plans, without_rule
from lowprec.attention_planning import table as attention_table
from lowprec.attention_policy import AttentionPolicy
from lowprec.calibration import Calibration, load_calibration
from lowprec.coverage import Uncovered, left_alone_because, linear_layers, tied_names, uncovered
from lowprec.errors import PlanError, UnsupportedError
from lowprec.formats import nearest_names
from lowprec.hardware import Hardware, current, named
from lowprec.layer_plan import LayerPlan, stages_of
from lowprec.matching import deciding_rules
from lowprec.policy import PRODUCTS, SKIP, Gemm, LinearPolicy
from lowprec.predicted_table import lines as predicted_lines
from lowprec.predicting import Work, predict
from lowprec.recipe import Recipe
from lowprec.stages import Stage
from lowprec.table import render

SCHEMA: Final = 2


@dataclass(frozen=True)
class Plan:
    """The decision for a whole model; prints as a table, hashes, diffs, stores as JSON."""

    recipe: str
    recipe_hash: str
    hardware: Hardware
    layers: tuple[LayerPlan, ...]
    uncovered: tuple[Uncovered, ...]
    seed: int = 0
    calibration: str = ""
    attentions: tuple[AttentionPlan, ...] = ()

    @property
    def hash(self) -> str:
        """SHA-256 of every decision: names, shapes, precisions, backends, hardware.

        The seed counts where random bits are drawn.
        """
        decisions = [dataclasses.astuple(self.hardware), [one.decisions() for one in self.layers]]
        if self.attentions:
            decisions.append([one.decisions() for one in self.attentions])
        random = any(stage.policy.random for layer in self.layers for stage in layer.stages)
        return _sha256([*decisions, self.seed] if random else decisions)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Names of the weights that get no gradient from their layer at some step (wgrad skip)."""
        return tuple(
            f"{layer.name}.weight".removeprefix(".")
            for layer in self.layers
            if any(stage.policy.wgrad is SKIP for stage in layer.stages)
        )

    @property
    def quantized_share(self) -> float:
        """Share of the known product flops that runs quantized, 0 to 1."""
        total = sum(layer.flops_per_row for layer in self.layers)
        total += sum(entry.flops_per_row or 0 for entry in self.uncovered)
        quantized = sum(
            layer.flops_per_row * sum(isinstance(p, Gemm) for _, p in layer.policy.items()) / 3
            for layer in self.layers
        )
        return quantized / total if total else 0.0

    @property
    def uncovered_share(self) -> float:
        """Share of the known product flops outside every linear layer, 0 to 1."""
        outside = sum(entry.flops_per_row or 0 for entry in self.uncovered)
        total = outside + sum(layer.flops_per_row for layer in self.layers)
        return outside / total if total else 0.0

    def layer(self, name: str) -> LayerPlan:
        """The plan of one layer; raises PlanError with the nearest names."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        known = [layer.name for layer in self.layers]
        raise PlanError(f"the plan has no layer {name!r}; {nearest_names(name, known)}")

    def with_attention(self, name: str, policy: AttentionPolicy | str, *, why: str) -> Plan:
        """`with_layer` for an attention; policy: an AttentionPolicy or its text."""
        if name not in [one.name for one in self.attentions]:
            known = nearest_names(name, [one.name for one in self.attentions])
            raise PlanError(f"the plan has no attention {name!r}; {known}")
        attentions = tuple(
            one.by_hand(policy, self.hardware, why=why) if one.name == name else one
            for one in self.attentions
        )
        return dataclasses.replace(self, attentions=attentions)

    def with_layer(self, name: str, policy: LinearPolicy | str, *, why: str) -> Plan:
        """The same plan with another policy for one layer at every step, and the reason for it.

        policy: a LinearPolicy or its text, `bf16` or `FPROP / DGRAD / WGRAD`. `lowprec.apply` takes
        the new plan on a model that runs by the old one, in the middle of training too. Raises
        PlanError for a layer that the plan does not know or that cannot be converted.
        """
        policy = LinearPolicy.parse(policy) if isinstance(policy, str) else policy
        old = self.layer(name)
        if not old.converted and old.predicted is None:
            raise PlanError(f"layer {name!r} cannot be converted: {old.why}")
        stages = (Stage.of(policy, self.hardware),)
        new = LayerPlan.of(name, old.shape, stages, rule=f"set by hand: {why}", notes=old.notes)
        layers = tuple(new if layer is old else layer for layer in self.layers)
        return dataclasses.replace(self, layers=layers)

    def _entries(self) -> dict[str, LayerPlan | AttentionPlan]:
        linear: dict[str, LayerPlan | AttentionPlan] = {one.name: one for one in self.layers}
        return linear | {one.name: one for one in self.attentions}

    def diff(self, other: Plan) -> tuple[str, ...]:
        """One line for each layer whose decision differs from `other`; empty when none does."""
        mine, theirs = self._entries(), other._entries()
        lines = []
        if self.hardware != other.hardware:
            lines.append(f"hardware: {self.hardware} -> {other.hardware}")
        for name in sorted(mine.keys() | theirs.keys()):
            a, b = mine.get(name), theirs.get(name)
            if a is None or b is None:
                lines.append(f"{name}: only in the {'second' if a is None else 'first'} plan")
            elif a.decisions() != b.decisions():
                texts = [one.summary() for one in (a, b)]
                if texts[0] == texts[1]:  # the same precisions, computed by others
                    texts = [f"{one.summary()} ({one.runs()})" for one in (a, b)]
                lines.append(f"{name}: {texts[0]} -> {texts[1]}")
        return tuple(lines)

    def to_json(self) -> str:
        """The plan as JSON text that `from_json` reads back to an equal plan."""
        data = {
            "schema": SCHEMA,
            "recipe": self.recipe,
            "recipe_hash": self.recipe_hash,
            "hardware": dataclasses.asdict(self.hardware),
            "seed": self.seed,
            "layers": [layer.to_data() for layer in self.layers],
            "uncovered": [dataclasses.asdict(entry) for entry in self.uncovered],
            **({"calibration": self.calibration} if self.calibration else {}),
            "attentions": [one.to_data() for one in self.attentions],
        }
        return json.dumps({**data, "checksum": _sha256(data)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a stored plan; raises PlanError when it is damaged, edited or of another schema."""
        try:
            data = json.loads(text)
            checksum, schema = data.pop("checksum"), data["schema"]
            if checksum != _sha256(data):
                raise PlanError("stored plan was changed: its checksum does not fit its content")
            if schema != SCHEMA:
                raise PlanError(f"stored plan has schema {schema!r}; this version reads {SCHEMA}")
            hardware = data["hardware"]
            capability = hardware["capability"] and tuple(hardware["capability"])
            machine = Hardware(hardware["name"], hardware["device"], capability)
            return cls(
                recipe=data["recipe"],
                recipe_hash=data["recipe_hash"],
                hardware=machine,
                layers=tuple(LayerPlan.from_data(layer, machine) for layer in data["layers"]),
                uncovered=tuple(Uncovered(**entry) for entry in data["uncovered"]),
                seed=data["seed"],
                calibration=data.get("calibration", ""),
                # Absent in plans that were stored before there were any.
                attentions=tuple(map(AttentionPlan.from_data, data.get("attentions", ()))),
            )
        except (ValueError, KeyError, TypeError, AttributeError, UnsupportedError) as error:
            raise PlanError(f"stored plan cannot be read: {error!r}") from error

    def __str__(self) -> str:
        rows = [
            [
                layer.name or "(model)",
                f"{layer.shape[0]}x{layer.shape[1]}",
                *(str(product) for _, product in layer.policy.items()),
                layer.runs(),
                layer.why,
            ]
            for layer in self.layers
        ]
        head = ["layer", "N x K", *PRODUCTS, "runs", "why"]
        lines = [f"plan {self.hash[:12]} of recipe {self.recipe} for {self.hardware}", ""]
        lines += render(head, rows)
        if self.attentions:
            lines += ["", *attention_table(self.attentions)]
        lines += ["", f"{self.quantized_share:.1%} of the known product flops run quantized."]
        if self.frozen:
            lines += ["", f"No weight gradient (wgrad is skipped): {', '.join(self.frozen)}"]
        if self.uncovered:
            lines += ["", f"Not covered ({self.uncovered_share:.1%} of the known product flops):"]
            entries = [
                [u.name, u.kind, _flops_text(u.flops_per_row), u.reason] for u in self.uncovered
            ]
            lines += render(["parameter", "kind", "flops/row", "why"], entries)
        if self.calibration:
            known = [
                (one.name, one.shape, one.predicted, one.converted)
                for one in self.layers
                if one.predicted is not None
            ]
            lines += ["", *predicted_lines(known, self.calibration)]
        return "\n".join(lines)


def plan(
    model: nn.Module,
    recipe: Recipe,
    *,
    hardware: Hardware | str | None = None,
    steps: int | None = None,
    calibration: Calibration | str | None = None,
    rows: int | None = None,
) -> Plan:
    """Decide the precision of every layer of `model` by `recipe`, touching nothing.

    hardware: facts, a known name, or None for this machine. steps: of the whole training, for
    recipes that change precision for its last part. calibration: one, its file or the name of a
    shipped one, with the rows (tokens) that a layer gets in one forward call on a device: layers
    whose native products would not make forward and backward faster than BF16 then stay BF16. The
    same inputs give the same plan; a model on the meta device is enough. Raises PlanError when the
    model is already converted, when a rule matches nothing or decides nothing, when a quantizing
    recipe or one of its quantizing rules would quantize nothing, and when the calibration is of
    another machine or stale.
    """
    if not isinstance(model, nn.Module) or not isinstance(recipe, Recipe):
        raise PlanError(
            "plan takes a torch.nn.Module and a recipe from lowprec.load_recipe; got "
            f"{type(model).__qualname__} and {type(recipe).__qualname__}"
        )
    if steps is not None and (type(steps) is not int or steps < 1):
        raise PlanError(f"steps is the number of training steps, at least 1, not {steps!r}")
    hardware = named(hardware) if isinstance(hardware, str) else hardware or current()
    prices = _prices(calibration, rows, hardware)
    for name, module in model.named_modules():
        if module.__dict__.get("lowprec_applied"):
            raise PlanError(f"layer {name!r} is already converted; call lowprec.restore(model)")
    found = list(linear_layers(model))
    aliases = {name: others for name, _, _, others in found}
    decided = deciding_rules(recipe, aliases, steps=steps)
    ties = tied_names(model)
    layers = []
    for name, module, parent, others in found:
        indices = {start: stage[name] for start, stage in decided.items() if name in stage}
        notes = [f"also registered as {', '.join(others[1:])}"] if others[1:] else []
        tied = [n for n in ties.get(id(module.weight), []) if n.rpartition(".")[0] not in others]
        if tied:
            notes.append(f"weight tied with {', '.join(tied)}: casts read it, nothing writes it")
        reason = left_alone_because(module, parent=parent)
        layers.append(_layer(name, module, indices, recipe, hardware, notes=notes, reason=reason))
    result = Plan(recipe.name, recipe.hash, hardware, tuple(layers), uncovered(model), recipe.seed)
    attentions = attention_plans(model, recipe, hardware, steps=steps)
    outside = (*result.uncovered, *without_rule(model, recipe))
    result = dataclasses.replace(result, attentions=attentions, uncovered=outside)
    quantizes = [layer.quantizes for layer in layers] + [one.quantizes for one in attentions]
    if recipe.quantizes and not any(quantizes):
        raise PlanError(_nothing_quantized(recipe, layers))
    _check_rules_take_effect(recipe, decided, {layer.name: layer for layer in layers})
    if prices is None or rows is None:
        return result
    norms = {name for name, _, parent, _ in found if _joins_norm(parent)}
    priced = [_priced(layer, prices, rows, norm=layer.name in norms) for layer in layers]
    return dataclasses.replace(result, layers=tuple(priced), calibration=prices.text)


def _prices(
    calibration: Calibration | str | None, rows: int | None, hardware: Hardware
) -> Calibration | None:
    """The calibration, checked against the machine; None without one."""
    if rows is not None and (type(rows) is not int or rows < 1):
        raise PlanError(f"rows is the number of tokens in a forward call, at least 1, not {rows!r}")
    if (calibration is None) != (rows is None):
        raise PlanError(
            "a prediction needs both a calibration and rows, the tokens that a layer gets in one "
            "forward call, as in plan(model, recipe, calibration='h200', rows=65536)"
        )
    if calibration is None:
        return None
    if not isinstance(calibration, Calibration):
        calibration = load_calibration(calibration)
    here = torch.__version__ if hardware == current() else None
    calibration.check_fits(hardware, torch_here=here)
    return calibration


def _joins_norm(parent: nn.Module) -> bool:
    # By name: planning imports no layer of ours.
    kind = type(parent)
    return kind.__name__ == "NormLinear" and kind.__module__.partition(".")[0] == "lowprec"


def _priced(layer: LayerPlan, prices: Calibration, rows: int, *, norm: bool) -> LayerPlan:
    if not layer.converted or not layer.quantizes:
        return layer
    work = Work(layer.shape, rows, norm=norm)
    quantizing = [stage for stage in layer.stages if stage.policy.quantizes]
    return layer.priced([predict(stage, work, prices) for stage in quantizing], prices.gpu)


def _layer(
    name: str,
    module: nn.Linear,
    indices: Mapping[int, int],
    recipe: Recipe,
    hardware: Hardware,
    *,
    notes: list[str],
    reason: str | None,
) -> LayerPlan:
    shape = (module.out_features, module.in_features)
    if indices and 0 not in indices:
        raise PlanError(
            f"recipe {recipe.name}: layer {name!r} is decided from step {min(indices)} on "
            "only; add a rule for the steps before"
        )
    rule = f"rule {indices[0] + 1}: {recipe.rules[indices[0]].why}" if indices else ""
    if reason is None and not indices:
        reason = "no rule matches it"
    if reason is None and 1 in shape:
        side = "N=1 head" if shape[0] == 1 else "K=1 input"
        reason = f"{side}: a vector product has no low-precision gain"
    if reason is not None:
        return LayerPlan.left_alone(name, shape, reason, rule=rule, notes=notes)
    stages = stages_of({at: recipe.rules[i].linear for at, i in indices.items()}, hardware)
    changes = [
        f"from step {stage.from_step} {stage.policy} (rule {indices[stage.from_step] + 1}: "
        f"{recipe.rules[indices[stage.from_step]].why})"
        for stage in stages[1:]
    ]
    return LayerPlan.of(name, shape, stages, rule=rule, notes=[*notes, *changes])


def _check_rules_take_effect(
    recipe: Recipe, decided: Mapping[int, Mapping[str, int]], layers: Mapping[str, LayerPlan]
) -> None:
    deciders: dict[int, dict[str, None]] = {}
    for stage in decided.values():
        for name, index in stage.items():
            deciders.setdefault(index, {})[name] = None
    for index, rule in enumerate(recipe.rules):
        names = list(deciders.get(index, ()))
        linear = rule.kind == "linear" and rule.policy.quantizes
        if linear and not any(layers[name].converted for name in names):
            shown = "; ".join(f"{name}: {layers[name].reasons[0]}" for name in names[:5])
            raise PlanError(
                f"recipe {recipe.name}: rule {index + 1} (match = {rule.match!r}) quantizes "
                f"nothing, every layer it decides is {shown}"
            )


def _nothing_quantized(recipe: Recipe, layers: list[LayerPlan]) -> str:
    shown = [f"  {layer.name or '(model)'}: {layer.why}" for layer in layers[:10]]
    return (
        f"recipe {recipe.name} would quantize no layer of this model:\n"
        + "\n".join(shown or ["  the model has no linear layer"])
        + "\nchange the rules, or use the recipe bf16 if that is what you want"
    )


def _flops_text(flops: int | None) -> str:
    return "unknown" if flops is None else f"{flops:,}"


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()

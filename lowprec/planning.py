"""plan(): every layer, every product, its precision and the reason, before anything is touched."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from lowprec.backends import GemmBackends, choose_gemm
from lowprec.coverage import Uncovered, left_alone_because, linear_layers, tied_names, uncovered
from lowprec.errors import PlanError, UnsupportedError
from lowprec.formats import ALL, nearest_names
from lowprec.hardware import Hardware, current, named
from lowprec.matching import deciding_rules
from lowprec.policy import ALL_BF16, PRODUCTS, Gemm, LinearPolicy, Product, casts, parse_product
from lowprec.recipe import Recipe
from lowprec.table import render

SCHEMA: Final = 1


@dataclass(frozen=True)
class LayerPlan:
    """One linear layer: shape (N, K), policy, backend of each product, and the reasons.

    `converted` is False for a layer that keeps its torch class and runs as it always did. `notes`
    are facts about the layer, `reasons` say why its policy is not simply what the rule asked.
    """

    name: str
    shape: tuple[int, int]
    policy: LinearPolicy
    backends: Mapping[str, GemmBackends]
    converted: bool
    rule: str
    notes: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def why(self) -> str:
        """Rule, notes and reasons in one line."""
        return "; ".join(filter(None, (self.rule, *self.notes, *self.reasons)))

    @property
    def flops_per_row(self) -> int:
        """Forward and backward flops of one row: 6 N K."""
        return 6 * self.shape[0] * self.shape[1]

    def decisions(self) -> list[Any]:
        """What the hash of a plan covers: everything but the prose."""
        backends = [[n, b.left, b.right, b.product] for n, b in self.backends.items()]
        products = [str(product) for _, product in self.policy.items()]
        return [self.name, list(self.shape), products, backends, self.converted]


@dataclass(frozen=True)
class Plan:
    """The decision for a whole model; prints as a table, hashes, diffs, stores as JSON."""

    recipe: str
    recipe_hash: str
    hardware: Hardware
    layers: tuple[LayerPlan, ...]
    uncovered: tuple[Uncovered, ...]

    @property
    def hash(self) -> str:
        """SHA-256 of every decision: names, shapes, precisions, backends, hardware."""
        hardware = dataclasses.astuple(self.hardware)
        return _sha256([hardware, [layer.decisions() for layer in self.layers]])

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

    def with_layer(self, name: str, policy: LinearPolicy, *, why: str) -> Plan:
        """The same plan with another policy for one layer, and the reason for it."""
        old = self.layer(name)
        if not old.converted:
            raise PlanError(f"layer {name!r} cannot be converted: {old.why}")
        new = _layer_plan(
            name, old.shape, policy, self.hardware, rule=f"set by hand: {why}", notes=old.notes
        )
        layers = tuple(new if layer is old else layer for layer in self.layers)
        return dataclasses.replace(self, layers=layers)

    def diff(self, other: Plan) -> tuple[str, ...]:
        """One line for each layer whose decision differs from `other`; empty when none does."""
        mine = {layer.name: layer for layer in self.layers}
        theirs = {layer.name: layer for layer in other.layers}
        lines = []
        if self.hardware != other.hardware:
            lines.append(f"hardware: {self.hardware} -> {other.hardware}")
        for name in sorted(mine.keys() | theirs.keys()):
            a, b = mine.get(name), theirs.get(name)
            if a is None or b is None:
                lines.append(f"{name}: only in the {'second' if a is None else 'first'} plan")
            elif a.decisions() != b.decisions():
                lines.append(f"{name}: {_summary(a)} -> {_summary(b)}")
        return tuple(lines)

    def to_json(self) -> str:
        """The plan as JSON text that `from_json` reads back to an equal plan."""
        layers = [
            {
                "name": layer.name,
                "shape": list(layer.shape),
                "policy": {name: str(product) for name, product in layer.policy.items()},
                "backends": {n: dataclasses.asdict(b) for n, b in layer.backends.items()},
                "converted": layer.converted,
                "rule": layer.rule,
                "notes": list(layer.notes),
                "reasons": list(layer.reasons),
            }
            for layer in self.layers
        ]
        data = {
            "schema": SCHEMA,
            "recipe": self.recipe,
            "recipe_hash": self.recipe_hash,
            "hardware": dataclasses.asdict(self.hardware),
            "layers": layers,
            "uncovered": [dataclasses.asdict(entry) for entry in self.uncovered],
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
            return cls(
                recipe=data["recipe"],
                recipe_hash=data["recipe_hash"],
                hardware=Hardware(hardware["name"], hardware["device"], capability),
                layers=tuple(_read_layer(layer) for layer in data["layers"]),
                uncovered=tuple(Uncovered(**entry) for entry in data["uncovered"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, UnsupportedError) as error:
            raise PlanError(f"stored plan cannot be read: {error!r}") from error

    def __str__(self) -> str:
        rows = [
            [
                layer.name or "(model)",
                f"{layer.shape[0]}x{layer.shape[1]}",
                *(str(product) for _, product in layer.policy.items()),
                _backend_text(layer),
                layer.why,
            ]
            for layer in self.layers
        ]
        head = ["layer", "N x K", *PRODUCTS, "runs", "why"]
        lines = [f"plan {self.hash[:12]} of recipe {self.recipe} for {self.hardware}", ""]
        lines += render(head, rows)
        lines += ["", f"{self.quantized_share:.1%} of the known product flops run quantized."]
        if self.uncovered:
            lines += ["", f"Not covered ({self.uncovered_share:.1%} of the known product flops):"]
            entries = [
                [u.name, u.kind, _flops_text(u.flops_per_row), u.reason] for u in self.uncovered
            ]
            lines += render(["parameter", "kind", "flops/row", "why"], entries)
        return "\n".join(lines)


def plan(model: nn.Module, recipe: Recipe, *, hardware: Hardware | str | None = None) -> Plan:
    """Decide the precision of every layer of `model` by `recipe`, touching nothing.

    hardware: facts, a known name, or None for this machine. The same inputs give the same plan; a
    model on the meta device is enough. Raises PlanError when the model is already converted, when a
    rule matches nothing or decides nothing, and when a quantizing recipe or one of its quantizing
    rules would quantize nothing.
    """
    if not isinstance(model, nn.Module) or not isinstance(recipe, Recipe):
        raise PlanError(
            "plan takes a torch.nn.Module and a recipe from lowprec.load_recipe; got "
            f"{type(model).__qualname__} and {type(recipe).__qualname__}"
        )
    hardware = named(hardware) if isinstance(hardware, str) else hardware or current()
    for name, module in model.named_modules():
        if module.__dict__.get("lowprec_applied"):
            raise PlanError(f"layer {name!r} is already converted; call lowprec.restore(model)")
    found = list(linear_layers(model))
    decided = deciding_rules(recipe, {name: aliases for name, _, _, aliases in found})
    ties = tied_names(model)
    layers = []
    for name, module, parent, aliases in found:
        index = decided.get(name)
        rule = "" if index is None else f"rule {index + 1}: {recipe.rules[index].why}"
        shape = (module.out_features, module.in_features)
        reason = left_alone_because(module, parent=parent)
        if reason is None and index is None:
            reason = "no rule matches it"
        if reason is None and 1 in shape:
            side = "N=1 head" if shape[0] == 1 else "K=1 input"
            reason = f"{side}: a vector product has no low-precision gain"
        notes = [f"also registered as {', '.join(aliases[1:])}"] if aliases[1:] else []
        tied = [n for n in ties.get(id(module.weight), []) if n.rpartition(".")[0] not in aliases]
        if tied:
            notes.append(f"weight tied with {', '.join(tied)}: casts read it, nothing writes it")
        if reason is not None or index is None:
            left = (f"left as it is: {reason}",)
            layers.append(LayerPlan(name, shape, ALL_BF16, {}, False, rule, tuple(notes), left))
            continue
        policy = recipe.rules[index].policy
        layers.append(_layer_plan(name, shape, policy, hardware, rule=rule, notes=notes))
    result = Plan(recipe.name, recipe.hash, hardware, tuple(layers), uncovered(model))
    if recipe.quantizes and not any(layer.policy.quantizes for layer in layers):
        raise PlanError(_nothing_quantized(recipe, layers))
    _check_rules_take_effect(recipe, decided, {layer.name: layer for layer in layers})
    return result


def _check_rules_take_effect(
    recipe: Recipe, decided: Mapping[str, int], layers: Mapping[str, LayerPlan]
) -> None:
    for index, rule in enumerate(recipe.rules):
        names = [name for name, decider in decided.items() if decider == index]
        if rule.policy.quantizes and not any(layers[name].converted for name in names):
            shown = "; ".join(f"{name}: {layers[name].reasons[0]}" for name in names[:5])
            raise PlanError(
                f"recipe {recipe.name}: rule {index + 1} (match = {rule.match!r}) quantizes "
                f"nothing, every layer it decides is {shown}"
            )


def _layer_plan(
    name: str,
    shape: tuple[int, int],
    policy: LinearPolicy,
    hardware: Hardware,
    *,
    rule: str,
    notes: Iterable[str],
) -> LayerPlan:
    reasons = _padding_notes(policy, shape)
    backends = {product: choose_gemm(*casts(one), hardware) for product, one in policy.items()}
    return LayerPlan(name, shape, policy, backends, True, rule, tuple(notes), tuple(reasons))


def _padding_notes(policy: LinearPolicy, shape: tuple[int, int]) -> list[str]:
    (n, k), notes = shape, []
    for product, letter, size in (("fprop", "K", k), ("dgrad", "N", n)):
        gemm: Product = getattr(policy, product)
        if not isinstance(gemm, Gemm):
            continue
        block = max(gemm.left.format.block[1], gemm.right.format.block[1])
        if block != ALL and size % block:
            notes.append(f"{product}: {letter}={size} is padded to {size + -size % block}")
    return notes


def _nothing_quantized(recipe: Recipe, layers: list[LayerPlan]) -> str:
    shown = [f"  {layer.name or '(model)'}: {layer.why}" for layer in layers[:10]]
    return (
        f"recipe {recipe.name} would quantize no layer of this model:\n"
        + "\n".join(shown or ["  the model has no linear layer"])
        + "\nchange the rules, or use the recipe bf16 if that is what you want"
    )


def _flops_text(flops: int | None) -> str:
    return "unknown" if flops is None else f"{flops:,}"


def _backend_text(layer: LayerPlan) -> str:
    if not layer.converted:
        return "as it is"
    if not layer.policy.quantizes:
        return "bf16"
    kinds = {
        "native" if layer.backends[name].native else "emulated"
        for name, product in layer.policy.items()
        if isinstance(product, Gemm)
    }
    return ", ".join(sorted(kinds))


def _summary(layer: LayerPlan) -> str:
    if not layer.converted:
        return "left as it is"
    return " / ".join(f"{name} {product}" for name, product in layer.policy.items())


def _read_layer(data: dict[str, Any]) -> LayerPlan:
    n, k = data["shape"]
    policy = LinearPolicy(**{name: parse_product(data["policy"][name]) for name in PRODUCTS})
    backends = {name: GemmBackends(**entry) for name, entry in data["backends"].items()}
    return LayerPlan(
        name=data["name"],
        shape=(n, k),
        policy=policy,
        backends=backends,
        converted=data["converted"],
        rule=data["rule"],
        notes=tuple(data["notes"]),
        reasons=tuple(data["reasons"]),
    )


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()

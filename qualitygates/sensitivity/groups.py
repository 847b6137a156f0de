"""Groups: the layers of a model that share one choice, and the layers that are no candidates."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import lowprec

from ..errors import ExperimentError
from .cost import SpeedFacts
from .options import PRODUCTS, policy_text
from .spec import GroupRule, SweepSpec


@dataclass(frozen=True)
class Group:
    """Layers that share one choice; shapes are (N, K), aliases other names of the same layers.

    rungs: the rungs of the ladder that may pay, lowest first; notes: what the speed stage said.
    """

    name: str
    layers: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    rungs: tuple[Mapping[str, str], ...]
    notes: tuple[str, ...]

    @property
    def flops(self) -> int:
        """Forward and backward flops of one row: 6 N K over the layers."""
        return sum(6 * n * k for n, k in self.shapes)

    def seconds(self, speed: SpeedFacts, policy: str) -> float:
        """Time of the group in a step under a policy, s."""
        return sum(speed.seconds(shape, policy) for shape in self.shapes)


@dataclass(frozen=True)
class Groups:
    """Candidates, and every layer that stays as it is with the reason."""

    candidates: tuple[Group, ...]
    excluded: Mapping[str, str]
    notes: Mapping[str, str]

    @property
    def layers(self) -> tuple[str, ...]:
        """All candidate layers."""
        return tuple(layer for group in self.candidates for layer in group.layers)

    def only(self, called: Set[str], *, batches: int) -> Groups:
        """The groups without layers that training never calls; ExperimentError if none is left."""
        why = f"never executed in training ({batches} batches were watched)"
        silent = {layer: why for layer in self.layers if layer not in called}
        kept = []
        for group in self.candidates:
            pairs = [p for p in zip(group.layers, group.shapes, strict=True) if p[0] in called]
            if pairs:
                layers, shapes = zip(*pairs, strict=True)
                kept.append(Group(group.name, layers, shapes, group.rungs, group.notes))
        if not kept:
            raise ExperimentError(
                f"no candidate layer is executed in training: {', '.join(silent)}; a function may "
                "read their weights past the module"
            )
        return Groups(tuple(kept), {**self.excluded, **silent}, self.notes)


def find_groups(plan: lowprec.Plan, spec: SweepSpec) -> Groups:
    """Group the layers of a BF16 plan and drop what cannot gain.

    Raises ExperimentError for a rule that matches nothing, for a layer in two groups, and when no
    candidate is left.
    """
    excluded = {one.name: "; ".join(one.reasons) for one in plan.layers if not one.converted}
    excluded |= {
        one.name: f"{'N=1' if one.shape[0] == 1 else 'K=1'}: a vector product has no gain"
        for one in plan.layers
        if one.converted and 1 in one.shape
    }
    shapes = {one.name: one.shape for one in plan.layers if one.name not in excluded}
    if not plan.layers:
        raise ExperimentError("the model has no linear layer: there is nothing to sweep")
    members = members_of(list(shapes), [one.name for one in plan.layers], spec)
    candidates = []
    for name, layers in members.items():
        group = _with_rungs(name, tuple(layers), tuple(shapes[one] for one in layers), spec)
        if group.rungs:
            candidates.append(group)
        else:
            excluded |= dict.fromkeys(layers, "; ".join(group.notes))
    if not candidates:
        shown = "; ".join(f"{name}: {why}" for name, why in list(excluded.items())[:5])
        raise ExperimentError(
            f"no layer is a candidate for a lower format ({shown}); change [speed] or formats, or "
            "stay with BF16"
        )
    notes = {one.name: "; ".join(one.notes) for one in plan.layers if one.notes}
    return Groups(tuple(candidates), excluded, notes)


def members_of(
    layers: Sequence[str], every: Sequence[str], spec: SweepSpec
) -> dict[str, list[str]]:
    """Group name -> layers: first by the rules, the rest by `group_by`."""
    owner: dict[str, str] = {}
    for rule in spec.group_rules:
        matched = [one for one in every if _fits(rule, one)]
        if not matched:
            raise ExperimentError(
                f"[[group]] {rule.name!r} matches no linear layer; the model has: "
                f"{', '.join(every[:8])}"
            )
        for layer in matched:
            if layer not in layers:
                continue
            parent = layer.rpartition(".")[0]
            group = f"{rule.name} of {parent or 'the model'}" if rule.per_parent else rule.name
            if layer in owner:
                raise ExperimentError(
                    f"layer {layer!r} is in two groups, {owner[layer]!r} and {group!r}; a layer "
                    "has one choice: narrow one of the patterns"
                )
            owner[layer] = group
    for index, layer in enumerate(layers):
        owner.setdefault(layer, _automatic(layer, index, len(layers), spec))
    members: dict[str, list[str]] = {}
    for layer in layers:
        members.setdefault(owner[layer], []).append(layer)
    return members


def _fits(rule: GroupRule, layer: str) -> bool:
    return any(fnmatch.fnmatchcase(layer, pattern) for pattern in rule.match)


def _automatic(layer: str, index: int, count: int, spec: SweepSpec) -> str:
    if spec.group_by == "kind":
        return re.sub(r"(?<![^.])\d+(?![^.])", "*", layer)
    if spec.group_by == "depth":
        parts = min(spec.depth, count)
        return f"depth {index * parts // count + 1} of {parts}"
    return layer


def _with_rungs(
    name: str,
    layers: tuple[str, ...],
    shapes: tuple[tuple[int, int], ...],
    spec: SweepSpec,
) -> Group:
    group = Group(name, layers, shapes, (), ())
    if spec.speed.rates is None:
        return Group(name, layers, shapes, spec.ladder, ())
    plain = group.seconds(spec.speed, policy_text({}))
    rungs, refused, slow = [], [], []
    for rung in spec.ladder:
        refusals = [r for p in PRODUCTS if (r := spec.speed.refusal(rung[p]))]
        ratio = plain / group.seconds(spec.speed, policy_text(rung))
        if refusals:
            refused.append(refusals[0])
        elif ratio <= 1:
            slow.append((ratio, rung["fprop"]))
        else:
            rungs.append(rung)
    notes = refused[:1] + ([_below(*max(slow), shapes[0], spec.speed)] if slow else [])
    return Group(name, layers, shapes, tuple(rungs), tuple(notes))


def _below(ratio: float, text: str, shape: tuple[int, int], speed: SpeedFacts) -> str:
    """Why the fastest of the rungs that do not pay is left out."""
    n, k = (round(one * speed.width) for one in shape)
    return (
        f"below break-even: {text} runs at {ratio:.2f}x of BF16 for N x K = {n} x {k} and "
        f"{speed.rows} rows ({speed.source})"
    )

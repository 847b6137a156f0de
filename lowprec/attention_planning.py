"""The attentions of a plan: what each computes, in which precision, from which step on, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from lowprec.attention_call import Mask
from lowprec.attention_coverage import Site, attention_sites
from lowprec.attention_policy import (
    ATTENTION_BF16,
    AttentionGemm,
    AttentionPolicy,
    StaticCast,
)
from lowprec.attention_stages import AttentionStage
from lowprec.backends.attention import ATTENTION_NATIVE, AttentionFacts, choose_attention
from lowprec.coverage import Uncovered
from lowprec.errors import PlanError
from lowprec.hardware import Hardware
from lowprec.matching import deciding_rules
from lowprec.policy import BF16
from lowprec.recipe import Recipe
from lowprec.table import render

HEAD: Final = ["attention", "computes", "products", "runs", "why"]


@dataclass(frozen=True)
class AttentionPlan:
    """One attention: activation and mask, what it does from which step on, and the reasons.

    `converted` is False for a module that runs as it always did.
    """

    name: str
    activation: str
    mask: Mask
    stages: tuple[AttentionStage, ...]
    converted: bool
    rule: str
    notes: tuple[str, ...]

    @property
    def policy(self) -> AttentionPolicy:
        """The policy at the start of training."""
        return self.stages[0].policy

    @property
    def quantizes(self) -> bool:
        """True when some product is quantized at some step."""
        return any(stage.policy.quantizes for stage in self.stages)

    @property
    def why(self) -> str:
        """Rule and notes in one line."""
        return "; ".join(filter(None, (self.rule, *self.notes)))

    def decisions(self) -> list[Any]:
        """What the hash of a plan covers: everything but the prose."""
        stages = [[one.from_step, one.policy.text, one.backend] for one in self.stages]
        mask = list(dataclasses.astuple(self.mask))
        return [self.name, self.activation, mask, stages, self.converted]

    def summary(self) -> str:
        """The decision in one line."""
        if not self.converted:
            return "left as it is"
        first, *later = [_by_precision(one.policy) for one in self.stages]
        steps = [one.from_step for one in self.stages[1:]]
        changes = [f"; from step {at} {text}" for at, text in zip(steps, later, strict=True)]
        return first + "".join(changes)

    def by_hand(
        self, policy: AttentionPolicy | str, hardware: Hardware, *, why: str
    ) -> AttentionPlan:
        """The same attention with another policy at every step, and the reason for it."""
        policy = AttentionPolicy.parse(policy) if isinstance(policy, str) else policy
        if not self.converted:
            raise PlanError(f"attention {self.name!r} cannot be converted: {self.why}")
        policy, notes = bounded(policy, self.activation)
        stage = AttentionStage.of(policy, hardware, self.activation, self.mask)
        return dataclasses.replace(
            self, stages=(stage,), rule=f"set by hand: {why}", notes=tuple(notes)
        )

    def row(self) -> list[str]:
        """A row of the table under HEAD."""
        computes = (
            f"{self.activation}, {self.mask}" if self.mask.kind != "none" else self.activation
        )
        return [self.name or "(model)", computes, self.summary(), self.runs(), self.why]

    def runs(self) -> str:
        """How the products are computed."""
        if not self.converted:
            return "as it is"
        if not self.quantizes:
            return "bf16"
        return ", ".join(sorted({"native" if _native(one) else "emulated" for one in self.stages}))

    def to_data(self) -> dict[str, Any]:
        """The plan as JSON data that `from_data` reads back to an equal one."""
        stages = [[one.from_step, one.policy.text, one.backend] for one in self.stages]
        return {
            "name": self.name,
            "activation": self.activation,
            "mask": dataclasses.asdict(self.mask),
            "stages": stages,
            "converted": self.converted,
            "rule": self.rule,
            "notes": list(self.notes),
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> AttentionPlan:
        """Read `to_data`; raises KeyError, TypeError, ValueError or UnsupportedError on damage."""
        stages = [
            AttentionStage(step, AttentionPolicy.parse(policy), backend)
            for step, policy, backend in data["stages"]
        ]
        return cls(
            name=data["name"],
            activation=data["activation"],
            mask=Mask(**data["mask"]),
            stages=tuple(stages),
            converted=data["converted"],
            rule=data["rule"],
            notes=tuple(data["notes"]),
        )


def _by_precision(policy: AttentionPolicy) -> str:
    """`qk, dp mxfp8_32x32; pv, dv, dq, dk mxfp8 x mxfp8_32x32`."""
    names: dict[str, list[str]] = {}
    for name, product in policy.items():
        names.setdefault(str(product), []).append(name)
    return "; ".join(f"{', '.join(each)} {text}" for text, each in names.items())


def _native(stage: AttentionStage) -> bool:
    return stage.backend in ATTENTION_NATIVE


def attention_plans(
    model: nn.Module, recipe: Recipe, hardware: Hardware, *, steps: int | None
) -> tuple[AttentionPlan, ...]:
    """The attentions of `model` by the rules of kind attention; none where there is no such rule.

    Raises PlanError as `lowprec.plan` does.
    """
    if not any(rule.kind == "attention" for rule in recipe.rules):
        return ()
    sites = {site.names[0]: site for site in attention_sites(model)}
    aliases = {name: site.names for name, site in sites.items()}
    decided = deciding_rules(recipe, aliases, steps=steps, kind="attention")
    plans = []
    for name, site in sites.items():
        indices = {start: stage[name] for start, stage in decided.items() if name in stage}
        plans.append(_plan(name, site, indices, recipe, hardware))
    _check_rules_take_effect(recipe, decided, {one.name: one for one in plans})
    return tuple(plans)


def _plan(
    name: str, site: Site, indices: Mapping[int, int], recipe: Recipe, hardware: Hardware
) -> AttentionPlan:
    if indices and 0 not in indices:
        raise PlanError(
            f"recipe {recipe.name}: attention {name!r} is decided from step {min(indices)} on "
            "only; add a rule for the steps before"
        )
    rule = f"rule {indices[0] + 1}: {recipe.rules[indices[0]].why}" if indices else ""
    notes = [f"also registered as {', '.join(site.names[1:])}"] if site.names[1:] else []
    reason = site.reason if site.reason or indices else "no rule matches it"
    policies: dict[int, AttentionPolicy] = {0: ATTENTION_BF16}
    if reason is None:
        for at, index in indices.items():
            policy, unbounded = bounded(recipe.rules[index].attention, site.activation)
            policies[at] = policy
            notes += [one for one in unbounded if one not in notes]
    else:
        notes.append(f"left as it is: {reason}")
    stages = _stages(policies, site, hardware)
    for stage in stages:
        why = _why_emulated(stage, site, hardware)
        if why and why not in notes:
            notes.append(why)
    return AttentionPlan(
        name=name,
        activation=site.activation,
        mask=site.mask,
        stages=stages,
        converted=reason is None,
        rule=rule,
        notes=tuple(notes),
    )


def _stages(
    policies: Mapping[int, AttentionPolicy], site: Site, hardware: Hardware
) -> tuple[AttentionStage, ...]:
    stages: list[AttentionStage] = []
    for start in sorted(policies):
        if not stages or stages[-1].policy != policies[start]:
            stages.append(
                AttentionStage.of(
                    policies[start], hardware, site.activation, site.mask, from_step=start
                )
            )
    return tuple(stages)


def _why_emulated(stage: AttentionStage, site: Site, hardware: Hardware) -> str:
    """Why a GPU's kernels do not compute a stage in 8 bits; empty where they do, or on a CPU."""
    if hardware.capability is None or not stage.policy.quantizes or _native(stage):
        return ""
    facts = AttentionFacts(hardware, stage.policy, site.activation, site.mask.kind)
    return f"emulated: {dict(choose_attention(facts).refusals)['triton']}"


def bounded(policy: AttentionPolicy, activation: str) -> tuple[AttentionPolicy, list[str]]:
    """The policy without fixed factors on a P that has no bound, and what that means.

    A dp that casts v reads it as pv does, and follows it.
    """
    if activation == "softmax":
        return policy, []
    free = {
        name: product.left
        for name, product in policy.items()
        if isinstance(product, AttentionGemm) and isinstance(product.left, StaticCast)
    }
    products: dict[str, Any] = {
        name: BF16 if name in free else product for name, product in policy.items()
    }
    notes = [
        f"{name} stays bf16: {activation} gives P no bound for {cast}"
        for name, cast in free.items()
    ]
    if "pv" in free and isinstance(policy.dp, AttentionGemm) and policy.dp.right is not BF16:
        products["dp"] = BF16
        notes.append("dp stays bf16: it reads v as pv does")
    return AttentionPolicy(**products), notes


def _check_rules_take_effect(
    recipe: Recipe, decided: Mapping[int, Mapping[str, int]], plans: Mapping[str, AttentionPlan]
) -> None:
    for index, rule in enumerate(recipe.rules):
        names = {name for stage in decided.values() for name, i in stage.items() if i == index}
        if rule.kind != "attention" or not rule.policy.quantizes:
            continue
        if not any(plans[name].converted for name in names):
            shown = "; ".join(f"{name}: {plans[name].notes[-1]}" for name in sorted(names)[:5])
            raise PlanError(
                f"recipe {recipe.name}: rule {index + 1} (match = {rule.match!r}) quantizes "
                f"nothing, every attention it decides is {shown}"
            )


def without_rule(model: nn.Module, recipe: Recipe) -> tuple[Uncovered, ...]:
    """The attentions that a recipe without a rule of that kind says nothing about."""
    if any(rule.kind == "attention" for rule in recipe.rules):
        return ()
    reason = "the recipe has no rule of kind attention: it runs as it is"
    return tuple(
        Uncovered(site.names[0], "attention", reason, None)
        for site in attention_sites(model)
        if not isinstance(site.module, nn.MultiheadAttention)
    )


def table(plans: Iterable[AttentionPlan]) -> list[str]:
    """The attentions as lines of a table."""
    return render(HEAD, [one.row() for one in plans])

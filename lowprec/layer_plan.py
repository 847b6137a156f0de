"""The plan of one layer: shape, stages, reasons; and its form in a stored plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowprec.backends import GemmBackends
from lowprec.formats import ALL
from lowprec.hardware import Hardware
from lowprec.policy import ALL_BF16, PRODUCTS, SKIP, Gemm, LinearPolicy, Product, parse_product
from lowprec.predicted_table import why_bf16
from lowprec.predicting import Prediction
from lowprec.stages import Stage


@dataclass(frozen=True)
class LayerPlan:
    """One linear layer: shape (N, K), what it does from which step on, and the reasons.

    `converted` is False for a layer that keeps its torch class and runs as it always did. `notes`
    are facts about the layer, `reasons` say why its policy is not simply what the rule asked.
    `predicted` is its time where the plan had a calibration, for a layer that stays BF16 because of
    it what it would have been; no decision in itself, it is in no hash.
    """

    name: str
    shape: tuple[int, int]
    stages: tuple[Stage, ...]
    converted: bool
    rule: str
    notes: tuple[str, ...]
    reasons: tuple[str, ...]
    predicted: Prediction | None = None

    @classmethod
    def of(
        cls,
        name: str,
        shape: tuple[int, int],
        stages: Iterable[Stage],
        *,
        rule: str,
        notes: Iterable[str],
    ) -> LayerPlan:
        """The plan of a layer that is converted, with the reasons that its policies give."""
        stages = tuple(stages)
        reasons = [_frozen_note(name)] if any(s.policy.wgrad is SKIP for s in stages) else []
        for stage in stages:
            reasons += [n for n in _padding_notes(stage.policy, shape) if n not in reasons]
        return cls(name, shape, stages, True, rule, tuple(notes), tuple(reasons))

    @classmethod
    def left_alone(
        cls, name: str, shape: tuple[int, int], reason: str, *, rule: str, notes: Iterable[str]
    ) -> LayerPlan:
        """The plan of a layer that keeps its class, for `reason`."""
        stages = (Stage(0, ALL_BF16, {}),)
        return cls(name, shape, stages, False, rule, tuple(notes), (f"left as it is: {reason}",))

    def priced(self, predictions: Sequence[Prediction | str], gpu: str) -> LayerPlan:
        """The layer with what its quantizing stages are predicted to take, or why not.

        It stays BF16 when none of them gains; a time that is not known keeps it as the rule asked.
        """
        known = [one for one in predictions if isinstance(one, Prediction)]
        if not known or len(known) < len(predictions):
            unknown = [f"not predicted: {one}" for one in predictions if isinstance(one, str)]
            return dataclasses.replace(self, notes=(*self.notes, *dict.fromkeys(unknown)))
        best = max(known, key=lambda one: one.speedup)
        if not all(one.keeps_bf16 for one in known):
            return dataclasses.replace(self, predicted=known[0])
        reason = why_bf16(best, self.shape, gpu)
        kept = LayerPlan.left_alone(self.name, self.shape, reason, rule=self.rule, notes=self.notes)
        return dataclasses.replace(kept, predicted=best)

    @property
    def policy(self) -> LinearPolicy:
        """The policy at the start of training."""
        return self.stages[0].policy

    @property
    def backends(self) -> Mapping[str, GemmBackends]:
        """The backends at the start of training."""
        return self.stages[0].backends

    @property
    def quantizes(self) -> bool:
        """True when some product is quantized at some step."""
        return any(stage.policy.quantizes for stage in self.stages)

    @property
    def why(self) -> str:
        """Rule, notes and reasons in one line."""
        return "; ".join(filter(None, (self.rule, *self.notes, *self.reasons)))

    @property
    def flops_per_row(self) -> int:
        """Forward and backward flops of one row: 6 N K."""
        return 6 * self.shape[0] * self.shape[1]

    def precisions(self, product: str) -> set[str]:
        """Every precision that `product` may run in during training; empty when always skipped."""
        every = {getattr(stage.policy, product) for stage in self.stages}
        return {str(one) for one in every if one is not SKIP}

    def decisions(self) -> list[Any]:
        """What the hash of a plan covers: everything but the prose."""
        first, *later = [_decisions(stage) for stage in self.stages]
        changes = [
            [stage.from_step, *one] for stage, one in zip(self.stages[1:], later, strict=True)
        ]
        return [
            self.name,
            list(self.shape),
            *first,
            self.converted,
            *([changes] if changes else []),
        ]

    def summary(self) -> str:
        """The decision in one line."""
        if not self.converted:
            return "left as it is"
        parts = [_products_text(self.policy)]
        parts += [f"from step {s.from_step} {_products_text(s.policy)}" for s in self.stages[1:]]
        return "; ".join(parts)

    def runs(self) -> str:
        """How the quantized products are computed, for a table."""
        if not self.converted:
            return "as it is"
        kinds = {
            "native" if stage.backends[name].native else "emulated"
            for stage in self.stages
            for name, product in stage.policy.items()
            if isinstance(product, Gemm)
        }
        backends = [one for stage in self.stages for one in stage.backends.values()]
        by_kernels = any("triton" in (one.left, one.right) for one in backends)
        text = ", ".join(sorted(kinds)) or "bf16"
        return f"{text}; casts by triton" if by_kernels else text

    def to_data(self) -> dict[str, Any]:
        """The layer as JSON data that `from_data` reads back to an equal plan."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "stages": [
                {
                    "from_step": stage.from_step,
                    "policy": {name: str(product) for name, product in stage.policy.items()},
                    "backends": {n: dataclasses.asdict(b) for n, b in stage.backends.items()},
                }
                for stage in self.stages
            ],
            "converted": self.converted,
            "rule": self.rule,
            "notes": list(self.notes),
            "reasons": list(self.reasons),
            **({"predicted": dataclasses.asdict(self.predicted)} if self.predicted else {}),
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any], hardware: Hardware) -> LayerPlan:
        """Read `to_data` of a plan for `hardware`.

        Raises KeyError, TypeError, ValueError or UnsupportedError on damage.
        """
        n, k = data["shape"]
        stages = [
            Stage.with_backends(
                one["from_step"],
                LinearPolicy(**{key: parse_product(one["policy"][key]) for key in PRODUCTS}),
                {key: GemmBackends(**b) for key, b in one["backends"].items()},
                hardware,
            )
            for one in data["stages"]
        ]
        return cls(
            name=data["name"],
            shape=(n, k),
            stages=tuple(stages),
            converted=data["converted"],
            rule=data["rule"],
            notes=tuple(data["notes"]),
            reasons=tuple(data["reasons"]),
            predicted=Prediction(**data["predicted"]) if "predicted" in data else None,
        )


def stages_of(policies: Mapping[int, LinearPolicy], hardware: Hardware) -> tuple[Stage, ...]:
    """Stages of a layer from its policy by step, those that change nothing left out."""
    stages: list[Stage] = []
    for start in sorted(policies):
        if not stages or stages[-1].policy != policies[start]:
            stages.append(Stage.of(policies[start], hardware, from_step=start))
    return tuple(stages)


def _decisions(stage: Stage) -> list[Any]:
    backends = [[n, b.left, b.right, b.product] for n, b in stage.backends.items()]
    return [[str(product) for _, product in stage.policy.items()], backends]


def _products_text(policy: LinearPolicy) -> str:
    return " / ".join(f"{name} {product}" for name, product in policy.items())


def _frozen_note(name: str) -> str:
    weight = f"{name}.weight" if name else "weight"
    return f"wgrad is skipped: {weight} gets no gradient from this layer"


def _padding_notes(policy: LinearPolicy, shape: tuple[int, int]) -> list[str]:
    (n, k), notes = shape, []
    for product, letter, size in (("fprop", "K", k), ("dgrad", "N", n)):
        gemm: Product = getattr(policy, product)
        if not isinstance(gemm, Gemm):
            continue
        rotated = 1 if gemm.rotation is None else gemm.rotation.size
        block = max(gemm.left.format.block[1], gemm.right.format.block[1], rotated)
        if block != ALL and size % block:
            notes.append(f"{product}: {letter}={size} is padded to {size + -size % block}")
    return notes

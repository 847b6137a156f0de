"""The branch stage: every (group, product) alone at its lowest rung, then fixes, then all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from .branches import Arm
from .effects import Effect, Paired, interaction, summarize, training_bounds
from .groups import Group, Groups
from .measuring import Measurer
from .options import PRODUCTS, policy_text
from .screen import ranking
from .spec import SweepSpec

Item = tuple[str, str]
"""(group, product)."""
_FIRST_SEEDS: Final = 2
_LEFT_OUT: Final = 3  # top offenders that are given back one at a time from the all-low arm


@dataclass
class Found:
    """What the branches measured.

    alone: (group, product) -> product text -> effect of lowering that alone. whole: name -> effect
    of arms of several groups. order: the items as the screen ordered them. decided: what the
    confidence sequence of the training loss said.
    """

    alone: dict[Item, dict[str, Effect]] = field(default_factory=dict)
    pairs: dict[tuple[Item, str], list[Paired]] = field(default_factory=dict)
    whole: dict[str, Effect] = field(default_factory=dict)
    order: list[Item] = field(default_factory=list)
    unmeasured: list[Item] = field(default_factory=list)
    decided: dict[Item, str] = field(default_factory=dict)
    base: dict[Item, str] = field(default_factory=dict)
    index: float | None = None

    def ranked(self) -> list[tuple[Item, Effect]]:
        """Items at their lowest rung, the most harmful first."""
        found = [
            (item, self.alone[item][self.base[item]]) for item in self.order if item in self.alone
        ]
        return sorted(found, key=lambda one: -one[1].estimate)


def arm_of(choices: Mapping[str, Mapping[str, str]], groups: Sequence[Group]) -> dict[str, str]:
    """Layer -> policy from group -> product -> text; groups that are not named stay BF16."""
    return {
        layer: policy_text(choices[group.name])
        for group in groups
        if group.name in choices
        for layer in group.layers
    }


class Search:
    """Runs the branch stage; every step starts from what is on disk."""

    def __init__(self, spec: SweepSpec, groups: Groups, measurer: Measurer) -> None:
        self.spec, self.groups, self.measurer = spec, groups, measurer
        self.by_name = {group.name: group for group in groups.candidates}
        self.seeds = spec.branches.seeds
        self.budget = spec.gate.margins["ne"] * spec.select.harm_share

    def run(self, screened: Mapping[str, Any]) -> Found:
        """Rank all items alone, try fixes for the offenders, then everything together."""
        found = self.rank(screened)
        self._fixes(found)
        self._together(found)
        return found

    def rank(self, screened: Mapping[str, Any]) -> Found:
        """All items alone, by successive halving."""
        found = Found()
        every = self._ordered(screened)
        found.order = every[: self.spec.branches.most]
        found.unmeasured = every[self.spec.branches.most :]
        found.base = {item: self.by_name[item[0]].rungs[0][item[1]] for item in found.order}
        self._halving(found)
        return found

    def _ordered(self, screened: Mapping[str, Any]) -> list[Item]:
        """Items by the screen; a group stands where its first layer does."""
        owner = {layer: group for group in self.groups.candidates for layer in group.layers}
        items: dict[Item, None] = {}
        lowest: dict[str, dict[str, str]] = {product: {} for product in PRODUCTS}
        for layer, group in owner.items():
            for product in PRODUCTS:
                lowest[product][layer] = group.rungs[0][product]
        for layer, product in _interleaved(screened, lowest):
            items[(owner[layer].name, product)] = None
        return list(items)

    def _halving(self, found: Found) -> None:
        """All items with the first seeds, then ever fewer with one more: the worst are kept."""
        alive = list(found.order)
        self._measure_alone(found, alive, self.seeds[:_FIRST_SEEDS])
        for extra in range(_FIRST_SEEDS, len(self.seeds)):
            alive = self._undecided(found, alive)
            keep = max(math.ceil(len(found.order) / 2 ** (extra - _FIRST_SEEDS + 1)), 2)
            effects = summarize({str(i): found.pairs[i, found.base[i]] for i in found.order})
            alive = sorted(alive, key=lambda item: -effects[str(item)].estimate)[:keep]
            if not alive:
                break
            self._measure_alone(found, alive, self.seeds[extra : extra + 1])
        self._undecided(found, found.order)
        self._summarize(found)

    def _measure_alone(self, found: Found, items: Sequence[Item], seeds: Sequence[int]) -> None:
        wanted = [(item, found.base[item]) for item in items]
        self._measure_texts(found, wanted, seeds)

    def _measure_texts(
        self, found: Found, wanted: Sequence[tuple[Item, str]], seeds: Sequence[int]
    ) -> None:
        arms = [self._alone(item, text) for item, text in wanted]
        for key, pairs in zip(wanted, self.measurer.measure(arms, seeds), strict=True):
            found.pairs.setdefault(key, []).extend(pairs)

    def _alone(self, item: Item, text: str) -> Arm:
        group, product = item
        return arm_of({group: {product: text}}, [self.by_name[group]])

    def _undecided(self, found: Found, items: Sequence[Item]) -> list[Item]:
        """Items whose training loss has not yet shown harm beyond, or safely within, bounds."""
        harmless = self.budget / max(len(found.order), 1)
        left = []
        for item in items:
            low, high = training_bounds(found.pairs[item, found.base[item]])
            if low > self.spec.gate.margins["ne"]:
                found.decided[item] = "harmful"
            elif high < harmless:
                found.decided[item] = "harmless"
            else:
                left.append(item)
        return left

    def _summarize(self, found: Found) -> None:
        effects = summarize({repr(key): pairs for key, pairs in found.pairs.items()})
        for item, text in found.pairs:
            found.alone.setdefault(item, {})[text] = effects[repr((item, text))]

    def _fixes(self, found: Found) -> None:
        """For each offender its operand's cheaper fixes and higher rungs, before BF16."""
        wanted = []
        for item, effect in found.ranked():
            if effect.lower <= 0 and effect.harm < self.budget / 4:
                continue
            group, product = item
            higher = [rung[product] for rung in self.by_name[group].rungs[1:]]
            texts = self.spec.fixes.of(product, found.base[item], higher)
            wanted += [(item, text) for text in texts]
        self._measure_texts(found, wanted, self.seeds[:_FIRST_SEEDS])
        self._summarize(found)

    def _together(self, found: Found) -> None:
        """All low, each product low in all groups, and all low but one of the worst."""
        low = self._all_low(found)
        arms = {"all low": low}
        for product in PRODUCTS:
            arms[f"all {product}"] = {
                group: {product: texts[product]} for group, texts in low.items() if product in texts
            }
        for (group, product), _ in found.ranked()[:_LEFT_OUT]:
            less = {name: dict(texts) for name, texts in low.items()}
            less[group].pop(product)
            arms[f"all low but {group} {product}"] = less
        found.whole |= self.whole(arms)
        alone = [found.alone[item][found.base[item]].estimate for item in found.alone]
        found.index = interaction(found.whole["all low"].estimate, alone)

    def _all_low(self, found: Found) -> dict[str, dict[str, str]]:
        low: dict[str, dict[str, str]] = {}
        for (group, product), text in found.base.items():
            low.setdefault(group, {})[product] = text
        return low

    def whole(
        self, arms: Mapping[str, Mapping[str, Mapping[str, str]]], *, trainings: bool = False
    ) -> dict[str, Effect]:
        """Effects of arms of several groups, in branches with all seeds or in whole trainings."""
        made = {name: arm_of(one, self.groups.candidates) for name, one in arms.items()}
        seeds = self.seeds[: self.spec.branches.trainings] if trainings else self.seeds
        pairs = self.measurer.measure(list(made.values()), seeds, whole=trainings)
        return summarize(dict(zip(made, pairs, strict=True)))


def _interleaved(
    screened: Mapping[str, Any], lowest: Mapping[str, Mapping[str, str]]
) -> list[Item]:
    """Layers by the screen at their own lowest rungs."""
    view = {
        layer: {
            **one,
            "products": {
                product: {"": one["products"][product][lowest[product][layer]]}
                for product in PRODUCTS
            },
        }
        for layer, one in screened.items()
        if layer in lowest["fprop"]
    }
    return ranking(view, dict.fromkeys(PRODUCTS, ""))

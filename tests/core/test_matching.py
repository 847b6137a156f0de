"""Deciding rules: names, aliases, patterns, and time that grows with rules times layers only."""

import fnmatch
import time

import pytest

from lowprec.errors import PlanError
from lowprec.matching import deciding_rules
from lowprec.policy import ALL_BF16
from lowprec.recipe import Recipe, Rule


def decided_at_start(recipe: Recipe, layers: dict[str, list[str]]) -> dict[str, int]:
    return deciding_rules(recipe, layers, steps=None)[0]


def recipe_of(*matches: str) -> Recipe:
    return Recipe("test", "w", tuple(Rule(match, "linear", ALL_BF16, "w") for match in matches))


def layers_of(*names: str) -> dict[str, list[str]]:
    return {name: [name] for name in names}


@pytest.mark.parametrize("pattern", ["a.*", "a.?", "a.[01]", "*[!1]", "a.1", "[a.1", "A.*", "*"])
def test_patterns_mean_what_fnmatch_says(pattern: str) -> None:
    layers = layers_of("a.0", "a.1", "a.10", "b.0", "[a.1")
    expected = {name for name in layers if fnmatch.fnmatchcase(name, pattern)}
    try:
        found = set(decided_at_start(recipe_of(pattern), layers))
    except PlanError:
        found = set()
    assert found == expected


def test_every_name_of_a_layer_counts() -> None:
    layers = {"body.0": ["body.0", "tied.head"], "body.1": ["body.1"]}
    assert decided_at_start(recipe_of("*", "tied.head"), layers) == {"body.0": 1, "body.1": 0}
    assert decided_at_start(recipe_of("*", "tied.*"), layers) == {"body.0": 1, "body.1": 0}
    assert decided_at_start(recipe_of("*.*"), layers) == {"body.0": 0, "body.1": 0}


def test_an_error_names_a_handful_of_later_rules() -> None:
    layers = layers_of(*map(str, range(30)))
    with pytest.raises(PlanError, match=r"rule 2 and 3 and 4 and 5 and 6 comes later") as caught:
        decided_at_start(recipe_of("*", *layers), layers)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("form", ["block.{}.linear", "block.{}.lin*"])
def test_many_rules_over_many_layers_take_little_time(form: str) -> None:
    count = 1000
    layers = layers_of(*(f"block.{i}.linear" for i in range(count)))
    recipe = recipe_of(*(form.format(i) for i in range(count)))
    started = time.process_time()
    decided = decided_at_start(recipe, layers)
    assert time.process_time() - started < 1.5
    assert list(decided.values()) == list(range(count))

"""Bisection: the smallest set by an oracle, and what is written of it."""

from __future__ import annotations

import itertools
import random
from contextlib import contextmanager
from pathlib import Path

import pytest

import lowprec
from qualitygates.errors import ExperimentError
from qualitygates.experiment import Experiment
from qualitygates.sensitivity import bisect as bisection
from qualitygates.sensitivity.bisect import smallest
from qualitygates.sensitivity.pool import SamePlace
from qualitygates.sensitivity.spec import SweepSpec

NAMES = tuple("abcdefghij")


def oracle(needed: list[set[str]], asked: list[frozenset[str]], most: int = 1000):
    """Passes when one of the sets of `needed` is given back; None after `most` gates."""

    def passes(given_back: frozenset[str]) -> bool | None:
        if given_back not in asked:
            if len(asked) == most:
                return None
            asked.append(given_back)
        return any(one <= given_back for one in needed)

    return passes


@pytest.mark.parametrize("seed", range(6))
def test_the_guilty_are_found_wherever_they_stand(seed: int) -> None:
    dice = random.Random(seed)
    guilty = set(dice.sample(NAMES, dice.randrange(1, 4)))
    order = dice.sample(NAMES, len(NAMES))
    found = smallest(order, oracle([guilty], []))
    assert found is not None
    assert set(found.given_back) == guilty
    assert found.proven_minimal


def test_a_good_ranking_needs_few_gates() -> None:
    asked: list[frozenset[str]] = []
    found = smallest(NAMES, oracle([{"a", "b"}], asked))
    assert found is not None
    assert found.given_back == ("a", "b")
    assert len(asked) <= 6


def test_the_result_is_minimal_when_either_of_two_would_do() -> None:
    found = smallest(NAMES, oracle([{"c"}, {"b", "d"}], []))
    assert found is not None
    kept = set(found.given_back)
    needed = [{"c"}, {"b", "d"}]
    assert any(one <= kept for one in needed)
    for size in range(len(kept)):
        for fewer in itertools.combinations(kept, size):
            assert not any(one <= set(fewer) for one in needed)


def test_a_recipe_that_is_not_to_blame() -> None:
    assert smallest(NAMES, lambda given_back: False) is None


def test_out_of_gates_it_says_that_nothing_is_proven() -> None:
    found = smallest(NAMES, oracle([{"a", "h"}], [], most=4))
    assert found is not None
    assert {"a", "h"} <= set(found.given_back)
    assert not found.proven_minimal


GATE = """
schema = 1
name = "toy"
workload = "{folder}/toy_workload.py:build"
margins = "demo"
looks = [3]
options = {{ rows = 1000 }}
train = {{ steps = 20, batch_size = 32 }}
baseline = {{ recipe = "bf16" }}
candidate = {{ recipe = "mxfp8" }}
speed = {{ required = false }}
"""
SWEEP = """
schema = 1
name = "toy-sweep"
gate = "gate.toml"
formats = ["mxfp4"]
speed = { hardware = "none" }
branches = { at = [0.2], length = 0.2, seeds = 2 }
evaluation = { rows = 300 }
confirm = { attempts = 5 }
"""


@pytest.fixture
def bisected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Bisect with real branches and gates that ask `guilty`; returns the result and the folder."""
    (tmp_path / "gate.toml").write_text(GATE.format(folder=Path(__file__).parent))
    (tmp_path / "sweep.toml").write_text(SWEEP)

    @contextmanager
    def same_place(workers: int, *, device: str = "cpu", cluster: str = ""):
        yield SamePlace()

    def run(guilty: str) -> tuple[dict, Path]:
        def gate(experiment: Experiment, folder: Path, **options) -> dict:
            recipe = lowprec.load_recipe(experiment.recipe_source(experiment.candidate))
            low = {rule.match for rule in recipe.rules if rule.policy.quantizes}
            verdict = "REJECT" if guilty in low else "ACCEPT"
            return {"verdict": verdict, "seeds": list(experiment.seeds)}

        monkeypatch.setattr(bisection, "open_pool", same_place)
        monkeypatch.setattr(bisection, "run_gate", gate)
        spec = SweepSpec.from_toml(tmp_path / "sweep.toml")
        out = tmp_path / "out"
        return bisection.bisect(spec, "mxfp8", out=out, workers=1, progress=False), out

    return run


@pytest.mark.parametrize("guilty", ["body.0", "top"])
def test_a_rejected_recipe_gets_its_guilty_layer_back_in_bf16(bisected, guilty: str) -> None:
    found, out = bisected(guilty)
    assert found["given_back"] == [guilty]
    assert found["minimal"]
    rules = {rule.match: rule for rule in lowprec.load_recipe(out / "recipe.toml").rules}
    assert [name for name, rule in rules.items() if rule.policy.quantizes] == [
        name for name in ("body.0", "top") if name != guilty
    ]
    assert "given back to BF16" in rules[guilty].why
    assert found["gates"][0]["seeds"] == [101, 102, 103]
    # The gates chose on the sweep's rows; what judges the choice has other rows and other seeds.
    chose = Experiment.from_toml(out / "gates" / found["gates"][0]["key"] / "gate.toml")
    judges = Experiment.from_toml(out / "gate.toml")
    assert (chose.options["first"], chose.options["last"]) == (0.0, 0.4)
    assert (judges.options["first"], judges.options["last"]) == (0.4, 1.0)
    assert list(judges.seeds) == [104, 105, 106]


def test_a_recipe_that_passes_has_nothing_to_give_back(bisected) -> None:
    with pytest.raises(ExperimentError, match="accepted as it is"):
        bisected("no layer")

"""Experiment files: what they mean, and every way in which one is refused."""

from __future__ import annotations

import dataclasses
import json
import pickle
import tomllib
from pathlib import Path
from typing import Any

import pytest

from qualitygates.errors import ExperimentError
from qualitygates.experiment import Experiment
from qualitygates.pairing import read_promise
from qualitygates.verdict import MARGINS
from qualitygates.wording import experiment_toml

GOOD = """
schema = 1
name = "flights-mxfp8"
workload = "flights"
margins = "demo"
looks = [3, 5, 8]
[train]
steps = 200
batch_size = 1024
[baseline]
recipe = "bf16"
[candidate]
recipe = "mxfp8"
[speed]
required = false
"""
FULL = (
    GOOD.replace(
        'margins = "demo"', "margins = { ne = 1e-3, auc = 1e-3, gauc = 1, calibration = 2 }"
    )
    .replace("[train]", 'first_seed = 40\n[options]\nrows = 10\nnames = ["a", "ä"]\n[train]')
    .replace('"mxfp8"', '"mine/best.toml"\nfault = { logit_noise = 0.3 }')
    + "[controls]\nnull = false\nknown_bad_margins = 0\n"
    + '[slices]\nprotected = ["origin=JFK"]\nprotected_margin_factor = 1.5\n'
)


def read(text: str, folder: Path = Path()) -> Experiment:
    return Experiment.from_dict(tomllib.loads(text), where="gate.toml", folder=folder)


def test_defaults_are_written_out() -> None:
    found = read(GOOD)
    assert found.seeds == (1, 2, 3, 4, 5, 6, 7, 8)
    assert found.alpha == 0.021
    assert (found.null_control, found.known_bad_margins) == (True, 2.0)
    assert (found.protected, found.protected_margin_factor) == ((), 2.0)
    assert found.margins == {"name": "demo", **MARGINS["demo"]}
    assert (found.options, found.fault, found.speed.required) == ({}, {}, False)


def test_everything_can_be_said() -> None:
    found = read(FULL)
    assert found.seeds == tuple(range(40, 48))
    assert found.fault == {"logit_noise": 0.3}
    assert (found.null_control, found.known_bad_margins) == (False, 0.0)
    assert (found.protected, found.protected_margin_factor) == (("origin=JFK",), 1.5)
    assert found.margins["name"] == "custom"
    assert found.options == {"rows": 10, "names": ["a", "ä"]}


@pytest.mark.parametrize("text", [GOOD, FULL], ids=["short", "full"])
def test_it_survives_json_pickle_and_toml(text: str) -> None:
    found = read(text)
    again = json.loads(json.dumps(found.to_dict()))
    assert Experiment.from_dict(again) == found
    assert Experiment.from_dict(tomllib.loads(experiment_toml(again))) == found
    assert pickle.loads(pickle.dumps(found)) == found
    assert Experiment.from_dict(again).hash == found.hash


def test_the_hash_is_of_the_content() -> None:
    found = read(GOOD)
    assert dataclasses.replace(found, folder=Path("elsewhere")).hash == found.hash
    assert read(GOOD.replace("steps = 200", "steps = 201")).hash != found.hash
    assert read(GOOD + "[controls]\nnull = false\n").hash != found.hash


def test_recipes_and_files_start_where_the_experiment_lies(tmp_path: Path) -> None:
    path = tmp_path / "gate.toml"
    path.write_text(FULL, encoding="utf-8")
    found = Experiment.from_toml(path)
    assert found.folder == tmp_path
    assert found.recipe_source(found.candidate) == str(tmp_path / "mine/best.toml")
    assert found.recipe_source(found.baseline) == "bf16"
    assert found.recipe_source("own.toml") == str(tmp_path / "own.toml")


def test_the_promise_is_what_judging_reads() -> None:
    found = read(FULL.replace("null = false\nknown_bad_margins = 0", ""))
    gate = found.promise(created="2026-01-01T00:00:00+00:00")
    promise = read_promise(gate)
    assert (promise.seeds, promise.looks, promise.alpha) == (found.seeds, found.looks, found.alpha)
    assert promise.margins == found.margins
    assert (promise.protected, promise.protected_factor) == (("origin=JFK",), 1.5)
    assert gate["experiment_hash"] == found.hash
    assert Experiment.from_dict(gate["experiment"]) == found


REFUSED: dict[str, tuple[str, str, str]] = {
    "other schema": ("schema = 1", "schema = 2", "schema = 2; this version reads schema = 1"),
    "true schema": ("schema = 1", "schema = true", "schema = True"),
    "no schema": ("schema = 1", "", "schema is missing"),
    "no margin": ('margins = "demo"', "", "margins is missing"),
    "unknown margin": ('"demo"', '"demos"', "allowed: strict, standard, demo"),
    "one margin": ('"demo"', "{ ne = 0.1 }", "missing ['auc', 'gauc', 'calibration']"),
    "no looks": ("looks = [3, 5, 8]", "", "looks is missing"),
    "two seeds": ("[3, 5, 8]", "[2]", "a look needs at least 3 seeds"),
    "a look of two": ("[3, 5, 8]", "[2, 5]", "a look needs at least 3 seeds"),
    "empty looks": ("[3, 5, 8]", "[]", "list of seed counts"),
    "looks as number": ("[3, 5, 8]", "5", "list of seed counts"),
    "looks without a level": ("[3, 5, 8]", "[3, 4]", "allowed: [3, 5], [3, 5, 8]"),
    "text as look": ("[3, 5, 8]", '[3, "5"]', "list of seed counts"),
    "misspelt at the top": (
        "name =",
        "nam =",
        "unknown key 'nam' at the top; nearest known: 'name'",
    ),
    "misspelt in a table": ("steps =", "step =", "'step' in [train]; nearest known: 'steps'"),
    "steps for one arm": ('"mxfp8"', '"mxfp8"\nsteps = 300', "'steps' in [candidate]"),
    "no train": ("[train]\nsteps = 200\nbatch_size = 1024", "", "[train] is missing"),
    "no steps": ("steps = 200", "", "[train] steps is missing"),
    "zero steps": ("steps = 200", "steps = 0", "whole number, 1 or more"),
    "half a step": ("steps = 200", "steps = 0.5", "whole number, 1 or more"),
    "true steps": ("steps = 200", "steps = true", "whole number, 1 or more"),
    "no batch size": ("batch_size = 1024", "", "[train] batch_size is missing"),
    "no speed": ("[speed]\nrequired = false", "", "[speed] is missing"),
    "no word on speed": ("required = false", "", "[speed] required is missing"),
    "speed as number": ("required = false", "required = 0", "must be true or false"),
    "no candidate": ('[candidate]\nrecipe = "mxfp8"', "", "[candidate] is missing"),
    "no recipe": ('[candidate]\nrecipe = "mxfp8"', "[candidate]", "[candidate] recipe is missing"),
    "bio-creep": ('"bf16"', '"mxfp8-safe"', "the baseline is always 'bf16'"),
    "empty name": ('"flights-mxfp8"', '"  "', "non-empty line of text"),
    "two-line name": ('"flights-mxfp8"', '"a\\nb"', "non-empty line of text"),
    "no workload": ('workload = "flights"', "", "workload is missing"),
    "workload as file": ('"flights"', '"a.txt:f"', "or 'file.py:function'"),
    "workload without function": ('"flights"', '"a.py:"', "or 'file.py:function'"),
    "negative seed": ("looks", "first_seed = -1\nlooks", "whole number, 0 or more"),
    "fault as number": ('"mxfp8"', '"mxfp8"\nfault = 1', "candidate.fault = 1 must be a table"),
    "unknown fault": ('"mxfp8"', '"mxfp8"\nfault = { noise = 1 }', "nearest known: 'logit_noise'"),
    "no noise": ('"mxfp8"', '"mxfp8"\nfault = { logit_noise = 0 }', "must be above 0"),
    "nan noise": ('"mxfp8"', '"mxfp8"\nfault = { logit_noise = nan }', "finite number"),
    "date in options": (
        "[train]",
        "[options]\nday = 2013-01-01\n[train]",
        "[options] day: allowed",
    ),
    "inf in options": ("[train]", "[options]\nlr = inf\n[train]", "[options] lr: allowed"),
    "weak known-bad": ("[speed]", "[controls]\nknown_bad_margins = 0.5\n[speed]", "above 1"),
    "endless known-bad": (
        "[speed]",
        f"[controls]\nknown_bad_margins = {10**400}\n[speed]",
        "must be a finite number",
    ),
    "huge known-bad": ("[speed]", "[controls]\nknown_bad_margins = 99\n[speed]", "at most 10"),
    "null as text": ("[speed]", '[controls]\nnull = "no"\n[speed]', "must be true or false"),
    "slices as text": ("[speed]", '[slices]\nprotected = "a"\n[speed]', "list of different slice"),
    "slice twice": ("[speed]", '[slices]\nprotected = ["a", "a"]\n[speed]', "list of different"),
    "slice factor": ("[speed]", "[slices]\nprotected_margin_factor = 0\n[speed]", "above 0"),
    "table as value": ("[speed]\nrequired = false", "speed = 1", "must be a table"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    old, new, message = REFUSED[case]
    text = GOOD.replace(old, new, 1)
    if case == "table as value":
        text = "speed = 1\n" + GOOD.replace(old, "")
    assert text != GOOD
    with pytest.raises(ExperimentError) as caught:
        read(text)
    assert str(caught.value).startswith("gate.toml: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"schema = 1\nschema = 2\n", "not valid TOML"),
        (b"schema = = 1", "not valid TOML"),
        ("schema = 1".encode("utf-16"), "not UTF-8"),
        (b"", "schema is missing"),
        (None, "cannot be read"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "gate.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ExperimentError, match=message) as caught:
        Experiment.from_toml(path)
    assert str(path) in str(caught.value)

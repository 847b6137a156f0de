"""The promise in gate.json and the run records that answer it, checked until they form clean pairs.

Two runs of one seed may be compared only when init, data order, steps, evaluation precision and
evaluation set are the same; every refusal names both runs and both values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ExperimentError, RecordError
from .records import content_hash
from .shapes import check_gate, check_run
from .verdict import look_alpha, resolve_margins

Run = Mapping[str, Any]
Table = dict[str, dict[int, Run]]

ARMS = ("baseline", "candidate", "null", "known_bad")
# What the verdict depends on beside the runs: whoever edits one of these makes another promise.
_PROMISED = (
    "experiment_hash",
    "margins",
    "looks",
    "alpha",
    "seeds",
    "controls",
    "slices",
    "speed",
    "acceptance",
)
# As trained, and the same weights served unquantized: both must pass.
DEFAULT_EVALUATIONS = ("trained", "bf16")

_RUN_KEYS = (
    "arm",
    "seed",
    "pairing",
    "plan_hash",
    "recipe_hash",
    "plan_layers",
    "gemms",
    "gemms_match_plan",
    "training",
    "evaluations",
    "environment",
)
_TRAINING_KEYS = ("loss", "grad_norm", "nonfinite", "crashed")
_PAIRED = {
    "init_hash": "the initial weights (before an arm's own perturbation)",
    "batches_hash": "the order of the training data",
    "steps": "the number of steps",
    "evaluation_forms": "the evaluation precision",
    "evaluation_hash": "the evaluation set",
}
# A crashed run ended early, so what it consumed and evaluated may differ; what it started from may
# not.
_PAIRED_AFTER_CRASH = ("init_hash", "steps")


@dataclass(frozen=True)
class Promise:
    """What gate.json fixed before the first run."""

    margins: Mapping[str, Any]
    looks: tuple[int, ...]
    alpha: float
    seeds: tuple[int, ...]
    protected: tuple[str, ...]
    protected_factor: float
    speed_required: bool
    # The arms that were promised: a control can be switched off, at the price of every ACCEPT.
    arms: tuple[str, ...]
    # Names of the evaluations that every run holds, `form` or `form:task`: each is co-primary.
    evaluations: tuple[str, ...]
    recipe_hashes: Mapping[str, str]
    hash: str


def promise_hash(gate: Mapping[str, Any]) -> str:
    """SHA-256 of what the verdict depends on in a gate dict.

    Every run record carries it, so a promise that is edited after the first run no longer fits its
    runs, even when gate.json is sealed anew.
    """
    return content_hash({key: gate.get(key) for key in _PROMISED})


def read_promise(gate: Mapping[str, Any]) -> Promise:
    """The promise of a gate dict; raises ExperimentError for anything missing, altered or not
    allowed.
    """
    check_gate(gate)
    if gate.get("schema") != 1 or gate.get("kind") != "gate":
        raise ExperimentError(
            f"gate: schema {gate.get('schema')!r} of kind {gate.get('kind')!r}; "
            "this version reads gates of schema 1"
        )
    for key in ("looks", "alpha", "seeds", "speed"):
        if key not in gate:
            raise ExperimentError(
                f"gate: {key!r} is missing; it must be fixed before the first run"
            )
    looks = _integers("looks", gate["looks"])
    alpha = look_alpha(looks)
    if gate["alpha"] != alpha:
        raise ExperimentError(
            f"gate: alpha is {gate['alpha']!r}, but looks {list(looks)} have the level {alpha}"
        )
    seeds = _integers("seeds", gate["seeds"])
    if len(seeds) != looks[-1] or len(set(seeds)) != len(seeds):
        raise ExperimentError(
            f"gate: seeds {list(seeds)}; the last look needs {looks[-1]} different seeds, listed "
            "in order"
        )
    speed = gate["speed"].get("required")
    if not isinstance(speed, bool):
        raise ExperimentError(f"gate: speed.required is {speed!r}; it must be true or false")
    slices = gate.get("slices") or {}
    factor = float(slices.get("protected_margin_factor", 2.0))
    if not 0 < factor < float("inf"):
        raise ExperimentError(f"gate: slices.protected_margin_factor is {factor}; must be above 0")
    return Promise(
        margins=resolve_margins(gate.get("margins")),
        looks=looks,
        alpha=alpha,
        seeds=seeds,
        protected=tuple(slices.get("protected", ())),
        protected_factor=factor,
        speed_required=speed,
        arms=_promised_arms(gate),
        evaluations=_promised_evaluations(gate),
        hash=promise_hash(gate),
        recipe_hashes=dict(gate.get("recipe_hashes") or {}),
    )


def _promised_arms(gate: Mapping[str, Any]) -> tuple[str, ...]:
    controls = gate.get("controls") or {}
    off = {
        "null": controls.get("null", True) is False,
        "known_bad": controls.get("known_bad_margins", 1.0) == 0,
    }
    return tuple(arm for arm in ARMS if not off.get(arm, False))


def _promised_evaluations(gate: Mapping[str, Any]) -> tuple[str, ...]:
    names = gate.get("evaluations", DEFAULT_EVALUATIONS)
    listed = isinstance(names, (list, tuple)) and bool(names)
    if not listed or not all(isinstance(one, str) and _is_evaluation(one) for one in names):
        raise ExperimentError(
            f"gate: evaluations is {names!r}; it must list names such as 'trained' or "
            "'trained:click' (form, or form:task; no '/')"
        )
    if len(set(names)) != len(names):
        raise ExperimentError(f"gate: evaluations {list(names)} names one of them twice")
    return tuple(names)


def _is_evaluation(name: str) -> bool:
    form, colon, task = name.partition(":")
    return bool(form) and "/" not in name and name.isprintable() and bool(task) == bool(colon)


def _integers(key: str, values: Any) -> tuple[int, ...]:
    whole = isinstance(values, (list, tuple)) and all(type(value) is int for value in values)
    if not whole or not values:
        raise ExperimentError(f"gate: {key} is {values!r}; it must be a list of whole numbers")
    return tuple(values)


def collect(promise: Promise, runs: Sequence[Run]) -> Table:
    """Runs by arm and seed, checked one by one, within each arm and across the arms of a seed."""
    table: Table = {arm: {} for arm in promise.arms}
    for run in runs:
        _check_run(promise, run)
        of_arm = table[run["arm"]]
        if run["seed"] in of_arm:
            raise RecordError(f"{name(run)}: there are two records of this run; keep one")
        of_arm[run["seed"]] = run
    for of_arm in table.values():
        _check_one_recipe(list(of_arm.values()))
        _check_promised_recipe(promise, list(of_arm.values()))
    for seed in promise.seeds:
        same_seed = [table[arm][seed] for arm in table if seed in table[arm]]
        for other in same_seed[1:]:
            check_pair(same_seed[0], other)
    return table


def largest_look(promise: Promise, table: Table) -> int:
    """The largest look whose seeds are all present in every arm; RecordError says what the
    first one lacks.
    """
    missing: list[str] = []
    complete = 0
    for look in promise.looks:
        missing = [
            f"{arm} seed {seed}"
            for arm in table
            for seed in promise.seeds[:look]
            if seed not in table[arm]
        ]
        if missing:
            break
        complete = look
    if not complete:
        raise RecordError(
            f"runs: the first look needs {promise.looks[0]} seeds in each arm; missing: "
            f"{', '.join(missing)}"
        )
    return complete


def check_pair(first: Run, second: Run) -> None:
    """Raise RecordError unless two runs of one seed share everything but their arm."""
    crashed = any(run["training"]["crashed"] is not None for run in (first, second))
    for key in _PAIRED_AFTER_CRASH if crashed else _PAIRED:
        ours, theirs = first["pairing"][key], second["pairing"][key]
        if ours != theirs:
            raise RecordError(
                f"{key}: {ours!r} in {name(first)}, {theirs!r} in {name(second)}; {_PAIRED[key]} "
                "must be the "
                "same in both, or the difference between the arms is not the recipe's: run them "
                "again"
            )


def name(run: Run) -> str:
    """How messages call a run."""
    return f"{run['arm']} seed {run['seed']}"


def _check_run(promise: Promise, run: Run) -> None:
    if run.get("schema") != 1 or run.get("kind") != "run":
        raise RecordError(
            f"record: schema {run.get('schema')!r} of kind {run.get('kind')!r}; this version "
            "reads runs of schema 1"
        )
    missing = [key for key in _RUN_KEYS if key not in run]
    if missing:
        raise RecordError(f"record {run.get('arm')} seed {run.get('seed')}: {missing} missing")
    check_run(run)
    missing = [key for key in _PAIRED if key not in run["pairing"]]
    missing += [key for key in _TRAINING_KEYS if key not in run["training"]]
    if missing:
        raise RecordError(f"{name(run)}: {missing} missing from the record")
    if run["arm"] not in promise.arms:
        raise RecordError(
            f"{name(run)}: this gate promised no such arm; its arms: {', '.join(promise.arms)}"
        )
    if run.get("promise_hash", promise.hash) != promise.hash:
        raise RecordError(
            f"{name(run)}: it was made under another promise than gate.json now holds (margins, "
            "looks, seeds, controls, slices or speed were edited after it ran); restore gate.json, "
            "or give the new promise a folder and runs of its own"
        )
    if run["seed"] not in promise.seeds:
        raise RecordError(
            f"{name(run)}: this gate promised the seeds {list(promise.seeds)} and no others"
        )
    if run["training"]["crashed"] is None:
        _check_complete(promise, run)


def _check_complete(promise: Promise, run: Run) -> None:
    forms, needed = list(run["pairing"]["evaluation_forms"]), sorted(promise.evaluations)
    if sorted(forms) != needed or sorted(run["evaluations"]) != needed:
        raise RecordError(
            f"{name(run)}: evaluated as {forms}, with records of {sorted(run['evaluations'])}; "
            f"the gate promised {', '.join(promise.evaluations)}"
        )
    steps = run["pairing"]["steps"]
    for key in ("loss", "grad_norm"):
        recorded = len(run["training"][key])
        absent = recorded == 0 and key in run["training"].get("not_recorded", ())
        if recorded != steps and not absent:
            raise RecordError(
                f"{name(run)}: {recorded} values of {key} for {steps} steps; a run that ended "
                "early must say so"
            )


def _check_promised_recipe(promise: Promise, runs: Sequence[Run]) -> None:
    """Runs of another recipe prove nothing about the promised one, however well they pair."""
    for run in runs:
        arm = "candidate" if run["arm"] == "candidate" else "baseline"
        promised = promise.recipe_hashes.get(arm)
        if promised is not None and run["recipe_hash"] != promised:
            raise RecordError(
                f"{name(run)}: recipe_hash is {run['recipe_hash']}, gate.json promised {promised}; "
                "the recipe file was edited, or the run belongs to another gate"
            )


def _check_one_recipe(runs: Sequence[Run]) -> None:
    for other in runs[1:]:
        for key in ("recipe_hash", "plan_hash"):
            if runs[0][key] != other[key]:
                raise RecordError(
                    f"{key}: {runs[0][key]!r} in {name(runs[0])}, {other[key]!r} in {name(other)}; "
                    "the seeds of one arm must run one recipe by one plan"
                )
    evaluated = [run for run in runs if run["training"]["crashed"] is None]
    for other in evaluated[1:]:
        ours, theirs = (run["pairing"]["evaluation_hash"] for run in (evaluated[0], other))
        if ours != theirs:
            raise RecordError(
                f"evaluation_hash: {ours!r} in {name(evaluated[0])}, {theirs!r} in {name(other)}; "
                "all seeds are evaluated on the same examples, or their errors cannot be averaged"
            )

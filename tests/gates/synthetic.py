"""Synthetic clicks and complete run records for the gate tests: no training, known effects."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qualitygates.metrics import evaluate
from qualitygates.verdict import look_alpha, resolve_margins

ARMS = ("baseline", "candidate", "null", "known_bad")
STEPS = 200


@dataclass(frozen=True)
class Clicks:
    """A fixed evaluation set whose true click log-odds are known."""

    truth: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    users: np.ndarray
    days: np.ndarray
    slices: dict[str, np.ndarray]


def clicks(
    seed: int = 0, *, rows: int = 6000, users: int = 400, days: int = 60, base: float = -1.5
) -> Clicks:
    """Rows of `users` users over `days` days; every third row is mobile, 1 % of them rare."""
    rng = np.random.default_rng(seed)
    # Every user and day occurs, so that ids are dense.
    user = np.concatenate([np.arange(users), rng.integers(0, users, rows - users)])
    day = np.concatenate([np.arange(days), rng.integers(0, days, rows - days)])
    truth = base + rng.normal(0, 0.7, users)[user] + rng.normal(0, 1.0, rows)
    labels = (rng.random(rows) < 1 / (1 + np.exp(-truth))).astype(np.float64)
    masks = {"mobile": np.arange(rows) % 3 == 0, "rare": np.arange(rows) % 100 == 0}
    return Clicks(truth, labels, np.ones(rows), user, day, masks)


def evaluation(data: Clicks, logits: np.ndarray, *, grouped: bool = True) -> dict[str, Any]:
    """Evaluation of float32 logits on the set, clustered by user and by day, GAUC by user."""
    return evaluate(
        logits.astype(np.float32),
        data.labels,
        weights=data.weights,
        clusters={"user": data.users, "day": data.days},
        groups=data.users if grouped else None,
        slices=data.slices,
    )


@dataclass(frozen=True)
class Effect:
    """What an arm does to the baseline's logits: noise shared by all seeds, noise of a seed, shift,
    scale.
    """

    shared: float = 0.0
    seed: float = 0.0
    shift: float = 0.0
    scale: float = 1.0
    # A user effect of this sd only inside one slice.
    slice_noise: Mapping[str, float] = field(default_factory=dict)


NULL = Effect(shared=0.003, seed=0.003)
BAD = Effect(shared=0.8)
EFFECTS: dict[str, Effect] = {
    "candidate": Effect(shared=0.01, seed=0.01),
    "null": NULL,
    "known_bad": BAD,
}


def arm_logits(data: Clicks, effect: Effect | None, *, seed: int, arm: str) -> np.ndarray:
    """Logits of one arm; the baseline's own noise is common to all arms of a seed (None is the
    baseline).
    """
    base = data.truth + 0.05 * np.random.default_rng([1, seed]).normal(size=data.truth.size)
    if effect is None:
        return base
    shared = np.random.default_rng([2, ARMS.index(arm)]).normal(size=base.size)
    own = np.random.default_rng([3, ARMS.index(arm), seed]).normal(size=base.size)
    logits = effect.scale * base + effect.shift + effect.shared * shared + effect.seed * own
    for name, noise in effect.slice_noise.items():
        logits = logits + noise * shared * data.slices[name]
    return logits


def record(arm: str, seed: int, evaluations: Mapping[str, Any]) -> dict[str, Any]:
    """A complete, healthy run record around the given evaluations."""
    rng = np.random.default_rng([4, seed])
    loss = 0.5 + 0.2 * np.exp(-np.arange(STEPS) / 20) + rng.normal(0, 0.01, STEPS)
    quantized = "bf16" if arm in ("baseline", "null") else "mxfp8"
    layers = [
        {
            "name": name,
            "fprop": quantized,
            "dgrad": quantized,
            "wgrad": quantized,
            "reason": "rule 1",
        }
        for name in ("mlp.0", "mlp.1")
    ]
    products = ("fprop", "dgrad", "wgrad")
    return {
        "schema": 1,
        "kind": "run",
        "arm": arm,
        "seed": seed,
        "key": f"{arm}-{seed}",
        "inputs": {"seed": seed},
        "pairing": {
            "init_hash": f"init-{seed}",
            "batches_hash": f"batches-{seed}",
            "first_batch_hash": f"first-{seed}",
            "last_batch_hash": f"last-{seed}",
            "evaluation_hash": "evaluation",
            "steps": STEPS,
            "evaluation_forms": ["trained", "bf16"],
        },
        "plan_hash": f"plan-{arm}",
        "recipe_hash": f"recipe-{arm}",
        "plan_table": "",
        "plan_layers": layers,
        "gemms": {one["name"]: {p: {quantized: STEPS} for p in products} for one in layers},
        "gemms_match_plan": True,
        "training": {
            "loss": loss.tolist(),
            "grad_norm": (1 + 0.1 * rng.random(STEPS)).tolist(),
            "nonfinite": [],
            "crashed": None,
        },
        "evaluations": dict(evaluations),
        "timing": {"train_s": 1.0, "evaluate_s": 0.1},
        "environment": {"torch": "2.13", "device": "cpu"},
        "checksum": "",
    }


def records(
    data: Clicks,
    *,
    seeds: Sequence[int],
    effects: Mapping[str, Effect] = EFFECTS,
    served: Mapping[str, Effect] | None = None,
    grouped: bool = True,
) -> list[dict[str, Any]]:
    """All four arms over the seeds; `served` gives other effects to the bf16 form."""
    runs = []
    for seed in seeds:
        for arm in ARMS:
            forms = {}
            for form, table in (("trained", effects), ("bf16", served or effects)):
                logits = arm_logits(data, table.get(arm), seed=seed, arm=arm)
                forms[form] = evaluation(data, logits, grouped=grouped)
            runs.append(record(arm, seed, forms))
    return runs


def gate(
    looks: Sequence[int] = (5,), *, margins: Any = "demo", protected: Sequence[str] = ()
) -> dict[str, Any]:
    """A promise with seeds 11, 12, ... for the looks."""
    return {
        "schema": 1,
        "kind": "gate",
        "experiment": {},
        "experiment_hash": "experiment",
        "margins": resolve_margins(margins),
        "looks": list(looks),
        "alpha": look_alpha(looks),
        "seeds": [11 + index for index in range(looks[-1])],
        "slices": {"protected": list(protected), "protected_margin_factor": 2.0},
        "speed": {"required": False},
        "created": "2026-01-01T00:00:00Z",
    }


def find(runs: Sequence[dict[str, Any]], arm: str, seed: int) -> dict[str, Any]:
    """The record of one arm and seed."""
    return next(run for run in runs if run["arm"] == arm and run["seed"] == seed)


def changed(
    runs: Sequence[dict[str, Any]], arm: str, seed: int, path: str, value: Any
) -> list[dict[str, Any]]:
    """A copy of the runs in which `path` ("pairing.steps") of one record is `value`."""
    fresh = [
        copy.deepcopy(run) if (run["arm"], run["seed"]) == (arm, seed) else run for run in runs
    ]
    target = find(fresh, arm, seed)
    *parents, last = path.split(".")
    for key in parents:
        target = target[key]
    target[last] = value
    return fresh

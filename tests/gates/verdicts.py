"""Gates of three verdicts with everything that a report can show, made of synthetic records."""

from __future__ import annotations

from typing import Any

import numpy as np

from qualitygates.judging import judge_records
from tests.gates.synthetic import ARMS, EFFECTS, Effect, clicks, gate, records
from tests.gates.timings import PROMISE, speed_record

Case = tuple[dict[str, Any], list[dict[str, Any]], dict[str, Any]]
HASH = "0123456789abcdef" * 4
SEEDS = (11, 12, 13)
DATA = clicks(rows=20_000, users=1200)


def _counted(runs: list[dict[str, Any]]) -> None:
    for run in runs:
        rng = np.random.default_rng([7, run["seed"], len(run["arm"])])
        counters = {"amax_jumps": np.zeros(60).tolist(), "weight_drift": rng.random(60).tolist()}
        if run["arm"] == "candidate":
            counters |= {
                "saturation": (1e-4 * rng.random(60)).tolist(),
                "underflow": (0.02 + 1e-3 * rng.random(60)).tolist(),
            }
        run["training"]["counters"] = counters
        run["inputs"] = {"recipe": "schema = 1\n", "seed": run["seed"]}


def _experiment(**changes: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "name": "flights-mxfp8",
        "workload": "flights",
        "train": {"steps": 200, "batch_size": 512},
        "baseline": {"recipe": "bf16"},
        "candidate": {"recipe": "mxfp8"},
        "controls": {"null": True, "known_bad_margins": 2.0},
        **changes,
    }


def accepted() -> Case:
    """ACCEPT of quality and speed, with counters, a plan and an acceptance of known hashes."""
    promise = gate((3, 5), protected=["mobile"]) | {"experiment": _experiment(), "speed": PROMISE}
    runs = records(DATA, seeds=SEEDS)
    _counted(runs)
    for run in runs:
        run["plan_table"] = "layer  fprop  dgrad  wgrad\nmlp.0  mxfp8  mxfp8  mxfp8"
        run["environment"] = {"lowprec": "0.1.0", "torch": "2.13.0", "python": "3.11.7"}
        if run["arm"] == "candidate":
            run |= {"plan_hash": HASH, "recipe_hash": HASH, "model": {"hash": HASH}, "plan": "{}"}
    speed = speed_record()
    speed["inputs"]["recipe_hashes"] = {"baseline": "b", "candidate": "c"}
    return promise, runs, judge_records(promise, runs, speed=speed)


def rejected() -> Case:
    """REJECT: worse predictions, a harmed slice, and a layer that ran otherwise than planned."""
    promise = gate((3, 5), protected=["mobile"]) | {"experiment": _experiment()}
    harm = Effect(shared=0.25, seed=0.1, shift=0.05, slice_noise={"mobile": 0.6})
    runs = records(DATA, seeds=SEEDS, effects=EFFECTS | {"candidate": harm})
    _counted(runs)
    return promise, runs, judge_records(promise, runs)


def undecided_offline() -> Case:
    """INCONCLUSIVE of an offline gate: no plan, no products, no gradient norms, few examples."""
    name = "rank-model-offline"
    promise = gate((3, 5)) | {
        "experiment": _experiment(name=name, train={}, workload="offline: predictions"),
        "inputs": {f"{arm}-{seed}.parquet": HASH for arm in ARMS for seed in SEEDS},
        "facts": {"source": "predictions that another training wrote"},
        "evaluations": ["trained:click", "trained:buy"],
    }
    wide = Effect(shared=0.10, seed=0.08)
    runs = records(clicks(rows=6000, users=400), seeds=SEEDS, effects=EFFECTS | {"candidate": wide})
    for run in runs:
        found = run["evaluations"]
        run["evaluations"] = {"trained:click": found["trained"], "trained:buy": found["bf16"]}
        run["pairing"]["evaluation_forms"] = list(run["evaluations"])
        run |= {"plan_layers": [], "gemms": {}, "gemms_match_plan": None, "inputs": {"arm": "x"}}
        run |= {"plan_hash": "not recorded", "recipe_hash": "not recorded"}
        run["training"] |= {"grad_norm": [], "not_recorded": ["grad_norm"]}
        del run["timing"]
    return promise, runs, judge_records(promise, runs)

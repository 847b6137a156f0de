"""Do early branches rank layers as full training does, and do the screen's proxies?

`python benchmarks/sweep_ranking.py [PROCESSES] [DATA_SEED] [MODEL]` ranks 12 layers in NVFP4: those
of tests/gates/towers_workload.py, or with MODEL `graded` those of tests/gates/planted_workload.py.
Truth: the effect of each layer low in all products over a whole training, paired, with fresh seeds
and, for the towers, on other rows. Ranked by: the sum over products of branch effects, and each
proxy of the screen. Seeds and sizes are fixed here. Prints JSON lines;
docs/records/sweep-ranking.jsonl has all runs that were made.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

WORKLOADS = Path(__file__).parent.parent / "tests" / "gates"
PRODUCTS = ("fprop", "dgrad", "wgrad")
FORMAT = "nvfp4"
STEPS = 120
GATE = """
schema = 1
name = "{name}"
workload = "{workload}:build"
margins = "demo"
looks = [3]
options = {{ {options}, data_seed = {data_seed} }}
train = {{ steps = {steps}, batch_size = 256 }}
baseline = {{ recipe = "bf16" }}
candidate = {{ recipe = "nvfp4" }}
speed = {{ required = false }}
"""


@dataclass(frozen=True)
class Model:
    """What is ranked: branches of `window` steps from step `start`, and the seeds of both kinds.

    parts: share of the evaluation rows by kind.
    """

    workload: str
    options: str
    start: int
    window: int
    seeds: dict[str, tuple[int, ...]]
    parts: dict[str, tuple[float, float]]


MODELS = {
    "towers": Model(
        workload="towers_workload.py",
        options="rows = 20000",
        start=30,
        window=30,
        seeds={"branch": tuple(range(1001, 1007)), "truth": tuple(range(1, 7))},
        parts={"branch": (0.0, 0.4), "truth": (0.4, 1.0)},
    ),
    "graded": Model(
        workload="planted_workload.py",
        options="graded = true, layers = 12, heavy = 9",
        start=18,
        window=18,
        seeds={"branch": tuple(range(1001, 1009)), "truth": tuple(range(1, 13))},
        parts={"branch": (0.0, 0.9), "truth": (0.0, 0.9)},
    ),
}
Job = tuple[str, str, int, int]
"""Model, kind, seed, data seed."""


def setting(folder: Path, job: Job) -> Any:
    from qualitygates.experiment import Experiment
    from qualitygates.sensitivity.branches import Setting

    name, kind, _, data_seed = job
    model = MODELS[name]
    path = folder / "gate.toml"
    workload = WORKLOADS / model.workload
    path.write_text(
        GATE.format(
            name=name, workload=workload, steps=STEPS, options=model.options, data_seed=data_seed
        )
    )
    first, last = model.parts[kind]
    part = {"first": first, "last": last, "clusters": ""}
    window = (0, STEPS) if kind == "truth" else (model.start, model.window)
    rows = 20_000 if name == "towers" else 6000
    return Setting(Experiment.from_toml(path), part, rows, *window)


def one_seed(job: Job) -> tuple[str, int, dict[str, list[float]], Any, float]:
    """Effects of every layer (truth: all products low; branch: each product) in one seed."""
    from qualitygates.sensitivity.branches import Checkpoint, sweep_part
    from qualitygates.sensitivity.effects import pair

    name, kind, seed, _ = job
    torch.set_num_threads(1)
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        chosen = setting(Path(folder), job)
        checkpoint = Checkpoint(chosen, seed, sweep_part(chosen))
        first = kind == "branch" and seed == MODELS[name].seeds[kind][0]
        screened = screen_of(checkpoint) if first else None
    plain = checkpoint.branch({})
    policies = [" / ".join([FORMAT] * 3)]
    if kind == "branch":
        policies = [
            " / ".join(FORMAT if p == one else "bf16" for p in PRODUCTS) for one in PRODUCTS
        ]
    effects = {
        layer: [pair(seed, plain, checkpoint.branch({layer: one})).effect for one in policies]
        for layer in layers_of(checkpoint)
    }
    return kind, seed, effects, screened, time.process_time() - started


def layers_of(checkpoint: Any) -> list[str]:
    return [layer.name for layer in checkpoint.plan.layers]


def screen_of(checkpoint: Any) -> dict[str, Any]:
    from qualitygates.evaluating import mean_task_loss
    from qualitygates.sensitivity.screen import screen

    return screen(
        checkpoint.model,
        checkpoint.batches[:8],
        loss=lambda model, batch: mean_task_loss(model(batch.features), batch, where="screen"),
        options=dict.fromkeys(PRODUCTS, (FORMAT,)),
        layers=layers_of(checkpoint),
    )


def split_half(seeds: list[dict[str, list[float]]]) -> float:
    """Mean Spearman of the means of both halves of the seeds, over all halvings.

    Says how far half of the seeds of the truth can order the layers themselves.
    """
    effects = np.array([[sum(values) for values in one.values()] for one in seeds])
    every = range(len(effects))
    found = []
    for half in combinations(every, len(effects) // 2):
        other = [i for i in every if i not in half]
        found.append(spearmanr(effects[list(half)].mean(0), effects[other].mean(0))[0])
    return round(float(np.mean(found)), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("processes", type=int, nargs="?", default=2)
    parser.add_argument("data_seed", type=int, nargs="?", default=0)
    parser.add_argument("model", choices=("towers", "graded"), nargs="?", default="towers")
    given = parser.parse_args()
    processes, data_seed, model = given.processes, given.data_seed, given.model
    seeds = MODELS[model].seeds
    jobs = [(model, kind, seed, data_seed) for kind, those in seeds.items() for seed in those]
    found: dict[str, list[dict[str, list[float]]]] = {"branch": [], "truth": []}
    screened: dict[str, Any] = {}
    with get_context("spawn").Pool(processes) as pool:
        for kind, seed, effects, proxies, seconds in pool.imap_unordered(one_seed, jobs):
            found[kind].append(effects)
            screened |= proxies or {}
            print(
                json.dumps(
                    {
                        "model": model,
                        "data_seed": data_seed,
                        "kind": kind,
                        "seed": seed,
                        "effects": effects,
                        "cpu_seconds": round(seconds, 1),
                    }
                ),
                flush=True,
            )
    names = list(found["truth"][0])
    truth = [float(np.mean([one[name] for one in found["truth"]])) for name in names]
    spread = [
        float(np.std([one[name] for one in found["truth"]], ddof=1)) / len(seeds["truth"]) ** 0.5
        for name in names
    ]
    columns = {
        "branches": [float(np.mean([sum(o[name]) for o in found["branch"]])) for name in names]
    }
    for label, product, key, sign in (
        ("Fisher, fprop", "fprop", "fisher", 1),
        ("SQNR, fprop (negative dB)", "fprop", "sqnr_db", -1),
        ("relative error, dgrad", "dgrad", "relative_error", 1),
        ("relative error, wgrad", "wgrad", "relative_error", 1),
        ("underflow, fprop", "fprop", "underflow", 1),
    ):
        columns[label] = [sign * screened[name]["products"][product][FORMAT][key] for name in names]
    print(
        json.dumps(
            {
                "model": model,
                "data_seed": data_seed,
                "format": FORMAT,
                "layers": names,
                "truth": truth,
                "truth_se": spread,
                "truth_split_half": split_half(found["truth"]),
                **columns,
            }
        )
    )
    for label, values in columns.items():
        rho, p = spearmanr(values, truth)
        print(
            json.dumps(
                {
                    "model": model,
                    "data_seed": data_seed,
                    "spearman": label,
                    "rho": round(float(rho), 3),
                    "p": float(p),
                    "layers": len(names),
                }
            )
        )


if __name__ == "__main__":
    main()

"""Do early branches rank layers as full training does, and do the screen's proxies?

`python benchmarks/sweep_ranking.py [PROCESSES] [DATA_SEED] [FORMAT]` takes the graded model of
tests/gates/planted_workload.py with 12 layers in NVFP4. Truth: the effect of each layer low in all
products over a whole training, paired, fresh seeds. Ranked by: the sum over products of branch
effects, and each proxy of the screen. Prints JSON lines; one run is in
docs/records/sweep-ranking.jsonl.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

WORKLOAD = Path(__file__).parent.parent / "tests" / "gates" / "planted_workload.py"
PRODUCTS = ("fprop", "dgrad", "wgrad")
FORMAT = sys.argv[3] if len(sys.argv) > 3 else "nvfp4"
LAYERS, STEPS = 12, 120
BRANCH_SEEDS, TRUTH_SEEDS = tuple(range(1001, 1009)), tuple(range(1, 13))
START, WINDOW = 18, 18
GATE = """
schema = 1
name = "graded"
workload = "{workload}:build"
margins = "demo"
looks = [3]
options = {{ graded = true, layers = {layers}, heavy = 9, data_seed = {data_seed} }}
train = {{ steps = {steps}, batch_size = 256 }}
baseline = {{ recipe = "bf16" }}
candidate = {{ recipe = "nvfp4" }}
speed = {{ required = false }}
"""


def setting(folder: Path, data_seed: int, *, start: int, window: int) -> Any:
    from qualitygates.experiment import Experiment
    from qualitygates.sensitivity.branches import Setting

    path = folder / "gate.toml"
    path.write_text(GATE.format(workload=WORKLOAD, layers=LAYERS, steps=STEPS, data_seed=data_seed))
    part = {"first": 0.0, "last": 0.9, "clusters": ""}
    return Setting(Experiment.from_toml(path), part, 6000, start, window)


def one_seed(job: tuple[str, int, int]) -> tuple[str, int, dict[str, list[float]], Any, float]:
    """Effects of every layer (truth: all products low; branch: each product) in one seed."""
    from qualitygates.sensitivity.branches import Checkpoint, sweep_part
    from qualitygates.sensitivity.effects import pair

    kind, seed, data_seed = job
    torch.set_num_threads(1)
    started = time.process_time()
    with tempfile.TemporaryDirectory() as name:
        window = {"truth": (0, STEPS), "branch": (START, WINDOW)}[kind]
        chosen = setting(Path(name), data_seed, start=window[0], window=window[1])
        checkpoint = Checkpoint(chosen, seed, sweep_part(chosen))
        screened = screen_of(checkpoint) if job[:2] == ("branch", BRANCH_SEEDS[0]) else None
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
    return [f"layers.{i}.linear" for i in range(LAYERS)]


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


def main() -> None:
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    data_seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    seeds = {"branch": BRANCH_SEEDS, "truth": TRUTH_SEEDS}
    jobs = [(kind, seed, data_seed) for kind, those in seeds.items() for seed in those]
    found: dict[str, list[dict[str, list[float]]]] = {"branch": [], "truth": []}
    screened: dict[str, Any] = {}
    with get_context("spawn").Pool(processes) as pool:
        for kind, seed, effects, proxies, seconds in pool.imap_unordered(one_seed, jobs):
            found[kind].append(effects)
            screened |= proxies or {}
            print(
                json.dumps(
                    {
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
        float(np.std([one[name] for one in found["truth"]], ddof=1)) / len(TRUTH_SEEDS) ** 0.5
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
                "data_seed": data_seed,
                "format": FORMAT,
                "layers": names,
                "truth": truth,
                "truth_se": spread,
                **columns,
            }
        )
    )
    for label, values in columns.items():
        rho, p = spearmanr(values, truth)
        print(
            json.dumps(
                {
                    "spearman": label,
                    "rho": round(float(rho), 3),
                    "p": float(p),
                    "layers": len(names),
                }
            )
        )


if __name__ == "__main__":
    main()

"""A whole gate in this one process: python gate_in_process.py GATE.toml OUT STEPS prints its facts.

Libraries that take seconds to import are then imported once, not once a worker.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import lowprec
from qualitygates import Experiment, gate, plots
from qualitygates.own_loop import LoopReport
from qualitygates.records import RunStore
from qualitygates.running.executors import work
from qualitygates.workload import load_workload

# A few steps settle nothing about quality: what is tested is everything around it.
WIDE = {"name": "custom", "ne": 0.03, "auc": 0.03, "gauc": 0.03, "calibration": 0.1}


class Here:
    """The executor that runs every job where it stands."""

    def results(self, experiment: Any, jobs: Any, *, shown: Any) -> Any:
        for job in jobs:
            yield job, work(experiment, job.arm, job.seed, tick=lambda: None)


def run(path: Path, out: Path, steps: int) -> dict[str, Any]:
    """Run the gate and return what a test needs to know about its records."""
    experiment = dataclasses.replace(Experiment.from_toml(path), steps=steps, margins=WIDE)
    opened, drawn = gate.open_executor, plots.available
    plots.available = lambda: False  # they have tests of their own, and cost seconds
    gate.open_executor = lambda cluster, *, workers: nullcontext(Here())
    try:
        verdict = gate.run(experiment, out=out, workers=1, progress=False)
    finally:
        gate.open_executor, plots.available = opened, drawn
    workload: Any = load_workload(experiment.workload, {}, folder=experiment.folder)
    return {
        "verdict": verdict["verdict"],
        "reasons": verdict["reasons"],
        "controls": verdict["controls"]["behaved"],
        "runs": [facts(run) for run in RunStore(out).load_all()[0]],
        "accepted": accepted(workload.model(), out, steps=steps),
        "parts": parts(workload),
        "facts": RunStore(out).read_gate()["facts"],
    }


def facts(run: dict[str, Any]) -> dict[str, Any]:
    kept = {key: run[key] for key in ("arm", "seed", "gemms_match_plan", "pairing")}
    training = {key: run["training"][key] for key in ("loss", "grad_norm", "crashed")}
    return {**kept, **training, "quantized": "mxfp8" in json.dumps(run["gemms"])}


def accepted(model: torch.nn.Module, out: Path, *, steps: int) -> bool:
    """True when the acceptance that was written lets a fresh model of this kind be converted."""
    if not (out / "acceptance.json").exists():
        return False
    plan = lowprec.plan(model, lowprec.load_recipe("mxfp8"), steps=steps)
    lowprec.apply(model, plan, require=out / "acceptance.json")
    return True


def parts(workload: Any) -> dict[str, Any]:
    """Three steps of two micro-batches each, their gradients clipped hard."""
    options = {
        "LightningWorkload": ("trainer", "accumulate_grad_batches", "gradient_clip_val"),
        "HuggingFaceWorkload": ("arguments", "gradient_accumulation_steps", "max_grad_norm"),
    }
    if type(workload).__name__ not in options:
        return {}
    name, accumulate, clip = options[type(workload).__name__]
    given = {accumulate: 2, clip: 1e-4}
    workload = dataclasses.replace(workload, **{name: given})
    batches: list[str] = []
    told: list[tuple[float, float]] = []
    torch.manual_seed(0)
    model = workload.model()
    report = LoopReport(
        model, steps=3, order=batches.append, record=lambda *values: told.append(values)
    )
    workload.train(model, seed=1, steps=3, batch_size=64, report=report)
    report.check_complete()
    return {"batches": len(set(batches)), "told": told}


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))))

"""A model that fails its gate with NVFP4 everywhere, and the recipe that a sweep writes for it.

`python benchmarks/sweep_recipe.py FOLDER [WORKERS] [DATA_SEED]` gates NVFP4 in all products of the
smooth model of tests/gates/planted_workload.py, sweeps it, and gates the written recipe on fresh
seeds and other evaluation rows. Resumes in FOLDER. Prints JSON lines, which
docs/records/sweep-recipe.jsonl keeps.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import lowprec
from qualitygates.experiment import Experiment
from qualitygates.gate import run
from qualitygates.sensitivity.driver import sweep
from qualitygates.sensitivity.spec import SweepSpec
from qualitygates.workload import load_workload

WORKLOAD = Path(__file__).parent.parent / "tests" / "gates" / "planted_workload.py"
RECIPE = """
schema = 1
why = "NVFP4 in every product, nearest rounding"
[[rule]]
match = "*"
kind = "linear"
fprop = "nvfp4"
dgrad = "nvfp4"
wgrad = "nvfp4"
why = "to be caught by a gate"
"""
GATE = """
schema = 1
name = "nvfp4-everywhere"
workload = "{workload}:build"
margins = {{ ne = 0.01, auc = 0.006, gauc = 0.01, calibration = 0.05 }}
looks = [3, 5, 8]
options = {{ smooth = true, rows = 20000, data_seed = {data_seed} }}
train = {{ steps = 160, batch_size = 256 }}
baseline = {{ recipe = "bf16" }}
candidate = {{ recipe = "./nvfp4.toml" }}
speed = {{ required = false }}
"""
SWEEP = """
schema = 1
name = "planted-recipe"
gate = "gate.toml"
formats = ["nvfp4", "mxfp8"]
speed = { hardware = "b200", width = 32 }
screen = { batches = 4 }
branches = { at = [0.15], length = 0.15, seeds = 3, trainings = 3 }
evaluation = { rows = 8000 }
confirm = { attempts = 3 }
"""


def estimate_of(outcome: dict[str, Any]) -> list[float]:
    """Estimate and bounds of the relative change of NE, served as trained."""
    entry = outcome["metrics"]["trained/ne"]
    return [entry[key] for key in ("estimate", "lower", "upper")]


def _verdict(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "gate" / "verdict.json").read_text())
    return found


def asked(description: str | None) -> tuple[Path, int, int]:
    """Folder, workers and data seed of the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path)
    parser.add_argument("workers", type=int, nargs="?", default=2)
    parser.add_argument("data_seed", type=int, nargs="?", default=0)
    given = parser.parse_args()
    return given.folder, given.workers, given.data_seed


def main() -> None:
    folder, workers, data_seed = asked(__doc__)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nvfp4.toml").write_text(RECIPE)
    (folder / "gate.toml").write_text(GATE.format(workload=WORKLOAD.resolve(), data_seed=data_seed))
    (folder / "sweep.toml").write_text(SWEEP)
    started = time.monotonic()
    gate = Experiment.from_toml(folder / "gate.toml")
    before = run(gate, out=folder / "nvfp4", workers=workers, progress=False)
    print(
        json.dumps(
            {
                "recipe": "nvfp4 everywhere",
                "data_seed": data_seed,
                "verdict": before["verdict"],
                "seeds": before["seeds"],
                "null_control": before["controls"]["null"]["verdict"],
                "ne": estimate_of(before),
                "null_ne": estimate_of(before["controls"]["null"]),
                "reasons": before["reasons"],
            }
        ),
        flush=True,
    )
    spec = SweepSpec.from_toml(folder / "sweep.toml")
    out = folder / "sweep"
    result = sweep(spec, out=out, workers=workers, progress=True)
    confirmation = result["confirmation"]
    after = Experiment.from_toml(out / "gate.toml")
    torch.manual_seed(0)
    model = load_workload(after.workload, after.options, folder=after.folder).model()
    plan = lowprec.plan(model, lowprec.load_recipe(out / "recipe.toml"), steps=after.steps)
    print(
        json.dumps(
            {
                "recipe": "written by the sweep",
                "data_seed": data_seed,
                "confirmation": confirmation,
                "ranking": [
                    [o["group"], o["product"], o["estimate"]] for o in result["ranking"][:4]
                ],
                "ne": [
                    estimate_of(_verdict(out / one["folder"])) for one in confirmation["attempts"]
                ],
                "calibration": result["selection"]["calibration"],
                "tried": result["selection"]["tried"],
                "policies": result["selection"]["policies"],
                "interaction": result["interaction"],
                "quantized_share": plan.quantized_share,
                "reloads_to_the_same_plan": plan.hash == result["plan_hash"],
                "seconds": round(time.monotonic() - started, 1),
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()

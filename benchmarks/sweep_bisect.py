"""Bisection with real gates: which layers of NVFP4 everywhere must go back to BF16?

`python benchmarks/sweep_bisect.py FOLDER [WORKERS] [DATA_SEED]` gates NVFP4 in all products of 6
layers of the smooth model of tests/gates/planted_workload.py (layer 2 has outliers in its input,
layer 4 heavy-tailed output gradients), bisects the rejected recipe, and runs the gate that
the bisection writes, on seeds and rows that chose nothing. Resumes in FOLDER. Prints JSON lines,
which docs/records/sweep-bisect.jsonl keeps.
"""

from __future__ import annotations

import json
import time

import torch
from sweep_recipe import RECIPE, WORKLOAD, asked, estimate_of

from qualitygates.experiment import Experiment
from qualitygates.gate import run
from qualitygates.sensitivity.bisect import bisect
from qualitygates.sensitivity.spec import SweepSpec

GATE = """
schema = 1
name = "nvfp4-everywhere"
workload = "{workload}:build"
margins = {{ ne = 0.02, auc = 0.012, gauc = 0.02, calibration = 0.05 }}
looks = [3]
options = {{ smooth = true, layers = 6, heavy = 4, rows = 20000, data_seed = {data_seed} }}
train = {{ steps = 100, batch_size = 256 }}
baseline = {{ recipe = "bf16" }}
candidate = {{ recipe = "./nvfp4.toml" }}
speed = {{ required = false }}
"""
SWEEP = """
schema = 1
name = "planted-bisect"
gate = "gate.toml"
formats = ["nvfp4"]
speed = { hardware = "none" }
branches = { at = [0.15], length = 0.15, seeds = 3 }
evaluation = { rows = 10000, share = 0.5 }
confirm = { attempts = 10 }
"""


def main() -> None:
    folder, workers, data_seed = asked(__doc__)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "nvfp4.toml").write_text(RECIPE)
    (folder / "gate.toml").write_text(GATE.format(workload=WORKLOAD.resolve(), data_seed=data_seed))
    (folder / "sweep.toml").write_text(SWEEP)
    options = {"workers": workers, "progress": False}
    first = run(Experiment.from_toml(folder / "gate.toml"), out=folder / "nvfp4", **options)
    started = time.monotonic()
    spec = SweepSpec.from_toml(folder / "sweep.toml")
    out = folder / "bisect"
    found = bisect(spec, str(folder / "nvfp4.toml"), out=out, workers=workers, progress=True)
    seconds = time.monotonic() - started
    after = run(Experiment.from_toml(out / "gate.toml"), out=out / "judged", **options)
    print(
        json.dumps(
            {
                "recipe": "nvfp4 everywhere",
                "data_seed": data_seed,
                "verdict": first["verdict"],
                "rejected_ne": estimate_of(first),
                "given_back": found["given_back"],
                "minimal": found["minimal"],
                "order": [[one["group"], one["estimate"]] for one in found["order"]],
                "gates": [
                    [one["given_back"], one["verdict"], one["seeds"]] for one in found["gates"]
                ],
                "seconds": round(seconds, 1),
                "judged_on_other_seeds_and_rows": after["verdict"],
                "seeds": after["seeds"],
                "ne": estimate_of(after),
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()

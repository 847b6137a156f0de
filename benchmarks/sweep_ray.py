"""The same sweep in processes of this machine and on Ray: equal results, record for record.

`python benchmarks/sweep_ray.py FOLDER [WORKERS]` sweeps 4 layers of the smooth model of
tests/gates/planted_workload.py twice, its confirming gate included. Prints one JSON line, which
docs/records/sweep-ray.jsonl keeps.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from sweep_recipe import WORKLOAD

from qualitygates.sensitivity.driver import sweep
from qualitygates.sensitivity.spec import SweepSpec

GATE = """
schema = 1
name = "small"
workload = "{workload}:build"
margins = {{ ne = 0.02, auc = 0.02, gauc = 0.02, calibration = 0.05 }}
looks = [3]
options = {{ smooth = true, layers = 4, heavy = 3, rows = 4000 }}
train = {{ steps = 60, batch_size = 64 }}
baseline = {{ recipe = "bf16" }}
candidate = {{ recipe = "nvfp4" }}
speed = {{ required = false }}
"""
SWEEP = """
schema = 1
name = "small"
gate = "gate.toml"
formats = ["nvfp4", "mxfp8"]
speed = { hardware = "none" }
select = { budget = "flops" }
branches = { at = [0.2], length = 0.2, seeds = 2 }
evaluation = { rows = 1000 }
confirm = { attempts = 1 }
"""


def measured(folder: Path) -> dict[str, Any]:
    """Every record of a measurement by file name."""
    return {path.name: json.loads(path.read_text()) for path in folder.glob("measured/*.json")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("workers", type=int, nargs="?", default=2)
    given = parser.parse_args()
    folder, workers = given.folder, given.workers
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gate.toml").write_text(GATE.format(workload=WORKLOAD.resolve()))
    (folder / "sweep.toml").write_text(SWEEP)
    spec = SweepSpec.from_toml(folder / "sweep.toml")
    results, seconds = [], []
    for cluster in ("", "local"):
        started = time.monotonic()
        out = folder / (cluster or "processes")
        one = sweep(spec, out=out, workers=workers, progress=True, cluster=cluster)
        seconds.append(round(time.monotonic() - started, 1))
        results.append({key: value for key, value in one.items() if key != "seconds"})
    records = [measured(folder / name) for name in ("processes", "local")]
    print(
        json.dumps(
            {
                "records": [len(one) for one in records],
                "records_equal": records[0] == records[1],
                "results_equal": results[0] == results[1],
                "confirmation": [one["confirmation"]["verdict"] for one in results],
                "seconds": {"processes": seconds[0], "ray": seconds[1]},
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()

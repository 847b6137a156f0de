"""Does the ranking of a sweep find planted layers, and blame the right product?

`python benchmarks/sweep_planted.py [SEEDS] [PROCESSES]` ranks the model of
tests/gates/planted_workload.py (8 layers and a tiny one) for NVFP4 with fresh data and seeds each
time: layer 2 has an outlier in every block of its input, layer 5 heavy-tailed output gradients.
Prints one line a seed and a summary; docs/records/sweep-planted.jsonl holds one run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

WORKLOAD = Path(__file__).parent.parent / "tests" / "gates" / "planted_workload.py"
GATE = """
schema = 1
name = "planted"
workload = "{workload}:build"
margins = "demo"
looks = [3]
options = {{ tiny = true, side = 1.6, data_seed = {seed} }}
train = {{ steps = 160, batch_size = 256 }}
baseline = {{ recipe = "bf16" }}
candidate = {{ recipe = "nvfp4" }}
speed = {{ required = false }}
"""
SWEEP = """
schema = 1
name = "planted-sweep"
gate = "gate.toml"
formats = ["nvfp4"]
speed = {{ hardware = "b200", width = 16 }}
screen = {{ batches = 2 }}
branches = {{ at = [0.15], length = 0.2, seeds = 3, first_seed = {first} }}
evaluation = {{ rows = 4000, share = 0.8 }}
confirm = {{ run = false }}
"""
PLANTED = [("layers.2.linear", "fprop"), ("layers.5.linear", "wgrad")]


def ranked(seed: int) -> dict[str, Any]:
    """The ranking of one model: names, products and effects, the worst first."""
    from qualitygates.sensitivity.driver import bf16_models, screened_groups
    from qualitygates.sensitivity.groups import find_groups
    from qualitygates.sensitivity.measuring import Measurer
    from qualitygates.sensitivity.pool import SamePlace
    from qualitygates.sensitivity.search import Search
    from qualitygates.sensitivity.spec import SweepSpec
    from qualitygates.sensitivity.store import SweepStore

    torch.set_num_threads(1)
    started = time.process_time()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "gate.toml").write_text(GATE.format(workload=WORKLOAD, seed=seed))
        (folder / "sweep.toml").write_text(SWEEP.format(first=1000 + 10 * seed))
        spec = SweepSpec.from_toml(folder / "sweep.toml")
        groups = find_groups(bf16_models(spec.gate).plan, spec)
        measurer = Measurer(spec, SweepStore(folder), SamePlace())
        groups, screened = screened_groups(groups, measurer)
        found = Search(spec, groups, measurer).rank(screened)
    order = [[*item, round(effect.estimate, 6)] for item, effect in found.ranked()]
    return {
        "seed": seed,
        "top": order[:4],
        "both_in_top_2": sorted(map(tuple, (one[:2] for one in order[:2]))) == sorted(PLANTED),
        "screened_first": [list(item) for item in found.order[:4]],
        "tiny": groups.excluded["tiny"],
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="?", default=20)
    parser.add_argument("processes", type=int, nargs="?", default=2)
    given = parser.parse_args()
    seeds, processes = given.seeds, given.processes
    found = []
    with get_context("spawn").Pool(processes) as pool:
        for one in pool.imap_unordered(ranked, range(seeds)):
            found.append(one)
            print(json.dumps(one), flush=True)
    hits = sum(one["both_in_top_2"] for one in found)
    print(json.dumps({"seeds": seeds, "both_in_top_2": hits, "torch": torch.__version__}))


if __name__ == "__main__":
    main()

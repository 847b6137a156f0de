"""Judge predictions that another training wrote: three arms, three seeds, Parquet and JSONL."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from qualitygates.offline.flow import judge_offline
from qualitygates.offline.spec import OfflineSpec
from qualitygates.report import summary

GATE = """schema = 1
name = "toy offline gate"
margins = "demo"
looks = [3]
[columns]
label = "clicked"
logit = "logit"
id = "row"
user = "user"
[slices]
categories = ["country"]
[[predictions]]
path = "{arm}-{seed}.parquet"
[[curves]]
path = "{arm}-{seed}.jsonl"
loss = "loss"
"""
# How far the arm's logits are from the baseline's: nothing, a rounding error, one ulp.
NOISE = {"baseline": 0.0, "candidate": 0.02, "null": 0.001}
ROWS, STEPS = 20_000, 200

folder = Path("offline-toy")
folder.mkdir(exist_ok=True)
rng = np.random.default_rng(0)
user = rng.integers(0, 500, ROWS)
truth = rng.normal(-2, 1, ROWS)
clicked = (rng.random(ROWS) < 1 / (1 + np.exp(-truth))).astype(np.int8)
examples = {"row": np.arange(ROWS), "user": user, "clicked": clicked}
examples["country"] = np.array(["DE", "FR", "US"])[user % 3]
for seed in (1, 2, 3):
    shared = truth + np.random.default_rng(seed).normal(0, 0.1, ROWS)
    batch_noise = np.random.default_rng(seed).normal(0, 0.01, STEPS)
    for arm, noise in NOISE.items():
        logit = shared + noise * np.random.default_rng([seed, len(arm)]).normal(size=ROWS)
        table = pa.table({**examples, "logit": logit.astype(np.float32)})
        pq.write_table(table, folder / f"{arm}-{seed}.parquet")
        loss = 0.4 + 0.3 * np.exp(-np.arange(STEPS) / 30) + batch_noise
        lines = [json.dumps({"step": i, "loss": value}) for i, value in enumerate(loss.tolist())]
        (folder / f"{arm}-{seed}.jsonl").write_text("\n".join(lines))
(folder / "offline.toml").write_text(GATE)

verdict = judge_offline(OfflineSpec.from_toml(folder / "offline.toml"), out=folder / "gate")
print(summary(verdict))

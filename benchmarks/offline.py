"""Time and memory of `python -m qualitygates judge` on 20 million prediction rows.

python benchmarks/offline.py [--only NAME ...] [--rows 20000000] [--append FILE]

Each setting writes its files first (not timed), then judges them in a process of its own, whose
wall clock, CPU time and peak resident memory are measured (wait4). The rows have an id, a user
(text in CSV and JSONL), a label, a weight, a float32 logit, a day, a flag and a country of ten
values; clusters are the user (300,000 of them, so hashed into 4,096) and the day, GAUC is by user.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

PIECE = 500_000


@dataclass(frozen=True)
class Setting:
    """File type, arms, seeds; whether one file holds all runs, and rows come in another order."""

    name: str
    kind: str
    arms: tuple[str, ...]
    seeds: int
    one_file: bool = False
    shuffled: bool = False


TWO, THREE = ("baseline", "candidate"), ("baseline", "candidate", "null")
SETTINGS = (
    Setting("parquet, 2 arms x 5 seeds", "parquet", TWO, 5),
    Setting("parquet, 3 arms x 3 seeds", "parquet", THREE, 3),
    Setting("parquet, 2 arms x 3 seeds", "parquet", TWO, 3),
    Setting("parquet, rows of each arm in another order", "parquet", TWO, 5, shuffled=True),
    Setting("parquet, one file of all runs", "parquet", TWO, 5, one_file=True),
    Setting("csv, 2 arms x 5 seeds", "csv", TWO, 5),
    Setting("jsonl, 2 arms x 5 seeds", "jsonl", TWO, 5),
)


class Examples:
    """One evaluation set, and what an arm predicts on it."""

    def __init__(self, rows: int, *, text: bool) -> None:
        rng = np.random.default_rng(0)
        self.rows = rows
        self.user = rng.integers(0, 300_000, rows)
        self.day = rng.integers(0, 60, rows).astype(np.int16)
        self.truth = (rng.normal(-2.5, 1.0, rows)).astype(np.float32)
        self.label = (rng.random(rows) < 1 / (1 + np.exp(-self.truth))).astype(np.int8)
        self.weight = rng.choice(np.array([0.5, 1.0, 2.0]), rows)
        self.country = rng.integers(0, 10, rows)
        self.text = text

    def table(self, setting: Setting, arm: str, seed: int, *, start: int, end: int) -> pa.Table:
        """Rows start .. end of one run."""
        rows = np.arange(start, end)
        if setting.shuffled and arm != "baseline":
            rows = rows[np.random.default_rng([seed, start]).permutation(len(rows))]
        noise = np.random.default_rng([1, seed, start]).normal(0, 0.05, end - start)
        own = np.random.default_rng([2, len(arm), seed, start]).normal(0, 0.002, end - start)
        logit = (self.truth[start:end] + noise + own).astype(np.float32)[rows - start]
        users = self.user[rows]
        names = pa.array([f"c{i}" for i in range(10)])
        country = pa.DictionaryArray.from_arrays(pa.array(self.country[rows], pa.int8()), names)
        columns = {
            "id": rows,
            "user": pa.array([f"u{u}" for u in users.tolist()]) if self.text else users,
            "label": self.label[rows],
            "weight": self.weight[rows],
            "logit": logit,
            "day": self.day[rows],
            "mobile": rows % 3 == 0,
            "country": country.cast(pa.string()),
        }
        if setting.one_file:
            columns |= {"arm": pa.array([arm] * len(rows)), "seed": np.full(len(rows), seed)}
        return pa.table(columns)


def write(setting: Setting, folder: Path, *, rows: int) -> None:
    """The files of a setting and its TOML; in one file the runs alternate piece by piece."""
    per_run = rows // (len(setting.arms) * setting.seeds)
    examples = Examples(per_run, text=setting.kind != "parquet")
    runs = [(arm, seed) for seed in range(1, setting.seeds + 1) for arm in setting.arms]
    writers: dict[Any, Any] = {}
    for start in range(0, per_run, PIECE):
        for arm, seed in runs:
            end = min(start + PIECE, per_run)
            table = examples.table(setting, arm, seed, start=start, end=end)
            name = "all" if setting.one_file else f"{arm}-{seed}"
            append(writers, folder / f"{name}.{setting.kind}", table)
    for writer in writers.values():
        writer.close()
    path = f"all.{setting.kind}" if setting.one_file else f"{{arm}}-{{seed}}.{setting.kind}"
    (folder / "offline.toml").write_text(toml(setting, path))


def append(writers: dict[Any, Any], path: Path, table: pa.Table) -> None:
    """Write a table to the end of a file that stays open."""
    if path.suffix == ".jsonl":
        with path.open("a") as stream:
            for row in table.to_pylist():
                stream.write(json.dumps(row) + "\n")
        return
    if path not in writers:
        make = pq.ParquetWriter if path.suffix == ".parquet" else pc.CSVWriter
        writers[path] = make(path, table.schema)
    writers[path].write_table(table)


def toml(setting: Setting, path: str) -> str:
    """The offline gate of a setting."""
    roles = ["label", "logit", "weight", "id", "user"]
    roles += ["arm", "seed"] if setting.one_file else []
    columns = "\n".join(f'{role} = "{role}"' for role in roles)
    return f"""schema = 1
name = "benchmark"
margins = "standard"
looks = [{setting.seeds}]
[columns]
{columns}
[clusters]
columns = ["user", "day"]
[slices]
flags = ["mobile"]
categories = ["country"]
[[predictions]]
path = "{path}"
"""


def measure(folder: Path) -> dict[str, Any]:
    """Judge the gate in a process of its own; raises RuntimeError when it gives no verdict."""
    command = [sys.executable, "-m", "qualitygates", "judge", "offline.toml", "--out", "out"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    started = time.perf_counter()
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL) as child:
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - started
    if child.returncode == 3:
        raise RuntimeError("no verdict")
    verdict = json.loads((folder / "out" / "verdict.json").read_text())
    return {
        "verdict": verdict["verdict"],
        "metrics": len(verdict["metrics"]),
        "slices": len(verdict["slices"]),
        "wall_s": round(wall, 1),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_rss_mib": round(usage.ru_maxrss / 1024),
    }


def main() -> None:
    """Measure the settings and print, or append, one JSON line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="names of settings; default: all")
    parser.add_argument("--rows", type=int, default=20_000_000, help="prediction rows in all")
    parser.add_argument("--append", type=Path, help="file of JSON lines")
    arguments = parser.parse_args()
    for setting in SETTINGS:
        if arguments.only and setting.name not in arguments.only:
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write(setting, folder, rows=arguments.rows)
            files = [one for one in folder.iterdir() if one.suffix != ".toml"]
            line = {
                "what": f"python -m qualitygates judge: {setting.name}",
                "rows": arguments.rows,
                "rows_per_run": arguments.rows // (len(setting.arms) * setting.seeds),
                "file_mib": round(sum(one.stat().st_size for one in files) / 2**20),
                **measure(folder),
                "cores": os.cpu_count(),
                "load_1min": round(os.getloadavg()[0], 1),
                "python": platform.python_version(),
                "numpy": np.__version__,
                "pyarrow": pa.__version__,
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            }
        print(json.dumps(line), flush=True)
        if arguments.append:
            with arguments.append.open("a") as stream:
                stream.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()

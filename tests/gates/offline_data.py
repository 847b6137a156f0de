"""Predictions and curves as another training would write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

from qualitygates.offline.flow import judge_offline
from qualitygates.offline.spec import OfflineSpec
from tests.gates.synthetic import STEPS, Clicks, Effect, arm_logits, clicks

ARMS = ("baseline", "candidate", "null")
QUIET = Effect(shared=0.01, seed=0.01)
EFFECTS: dict[str, Effect | None] = {
    "baseline": None,
    "candidate": QUIET,
    "null": Effect(shared=0.003, seed=0.003),
}
ROLES = {"label": "clicked", "logit": "score", "weight": "w", "id": "row", "user": "user"}
Columns = dict[str, Any]


def examples(rows: int = 3000) -> Clicks:
    """The evaluation set of these tests."""
    return clicks(rows=rows, users=60, days=51)


def columns(data: Clicks, arm: str, seed: int, effect: Effect | None) -> Columns:
    """One run's rows; the country is a function of the user."""
    rows = len(data.labels)
    return {
        "row": np.arange(rows) + 10_000,
        "user": data.users,
        "day": data.days,
        "clicked": data.labels.astype(np.int8),
        "w": np.where(np.arange(rows) % 2, 1.0, 0.5),
        "score": arm_logits(data, effect, seed=seed, arm=arm).astype(np.float32),
        "mobile": data.slices["mobile"],
        "country": np.array(["DE", "FR", "US"])[data.users % 3],
    }


def write_rows(path: Path, rows: Columns) -> None:
    """The columns as Parquet, CSV or JSONL, by the name of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(rows)
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".csv":
        pc.write_csv(table, path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


def write_curve(path: Path, seed: int, *, steps: int = STEPS) -> None:
    """A healthy training curve as JSONL."""
    rng = np.random.default_rng([4, seed])
    loss = 0.5 + 0.2 * np.exp(-np.arange(steps) / 20) + rng.normal(0, 0.01, steps)
    lines = [
        {"step": step, "loss": float(value), "grad": 1.0 + 0.1 * float(rng.random())}
        for step, value in enumerate(loss)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_gate(
    folder: Path,
    *,
    seeds: Sequence[int] = (1, 2, 3),
    arms: Sequence[str] = ARMS,
    effects: Mapping[str, Effect | None] = EFFECTS,
    kind: str = "parquet",
    change: Callable[[str, int, Columns], Columns] | None = None,
    data: Clicks | None = None,
) -> Path:
    """Files of every run as ARM-SEED.KIND and ARM-SEED.jsonl.curve, and gate.toml; its path.

    `change` may alter the columns of a run before they are written.
    """
    data = examples() if data is None else data
    for arm in arms:
        for seed in seeds:
            rows = columns(data, arm, seed, effects[arm])
            rows = rows if change is None else change(arm, seed, rows)
            write_rows(folder / f"{arm}-{seed}.{kind}", rows)
            write_curve(folder / f"{arm}-{seed}-curve.jsonl", seed)
    return write_toml(folder, predictions=f"{{arm}}-{{seed}}.{kind}")


def write_toml(
    folder: Path,
    *,
    predictions: str,
    roles: Mapping[str, str] = ROLES,
    curves: bool = True,
    more: str = "",
    top: str = 'margins = "demo"\nlooks = [3]\n',
) -> Path:
    """gate.toml with the default columns; `top` and `more` are put before and after the tables."""
    names = "\n".join(f'{role} = "{column}"' for role, column in roles.items())
    text = f"""schema = 1
name = "toy"
{top}
[columns]
{names}
[clusters]
columns = ["user", "day"]
[slices]
flags = ["mobile"]
categories = ["country"]
[[predictions]]
path = "{predictions}"
"""
    if curves:
        text += '[[curves]]\npath = "{arm}-{seed}-curve.jsonl"\nloss = "loss"\ngrad_norm = "grad"\n'
    path = folder / "gate.toml"
    path.write_text(text + more)
    return path


def judged(gate: Path, out: Path | None = None) -> dict[str, Any]:
    """The verdict on a gate file, in the folder `out` beside it unless told otherwise."""
    return judge_offline(OfflineSpec.from_toml(gate), out=out or gate.parent / "out")


def record(out: Path, arm: str, seed: int) -> dict[str, Any]:
    """The one record of a run in a gate folder."""
    (path,) = (out / "runs").glob(f"{arm}-{seed:03d}-*.json")
    return dict(json.loads(path.read_text()))


def contents(out: Path) -> dict[str, bytes]:
    """Every file of a gate folder but the lock, whose holder changes."""
    files = (path for path in out.rglob("*") if path.is_file() and path.name != ".lock")
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in files}

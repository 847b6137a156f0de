"""Both arms hold the same examples, or the first difference is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from qualitygates import plots
from qualitygates.errors import DataError, RecordError
from qualitygates.offline.examples import dense
from tests.gates import offline_data as toy

NO_ID = {role: column for role, column in toy.ROLES.items() if role != "id"}
Change = Callable[[toy.Columns], None]


@pytest.fixture(autouse=True)
def _without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "available", lambda: False)


def altered(column: str, value: object) -> Change:
    def change(rows: toy.Columns) -> None:
        rows[column] = rows[column].copy()
        rows[column][3] = value

    return change


def without(row: int) -> Change:
    def change(rows: toy.Columns) -> None:
        for name, values in rows.items():
            rows[name] = np.delete(values, row)

    return change


def repeated(row: int) -> Change:
    def change(rows: toy.Columns) -> None:
        for name, values in rows.items():
            rows[name] = np.append(values, values[row])

    return change


def gate(folder: Path, change: Change, *, roles: dict[str, str] = toy.ROLES) -> Path:
    """A gate in which seed 2 of the candidate was changed."""

    def only(arm: str, seed: int, rows: toy.Columns) -> toy.Columns:
        if (arm, seed) == ("candidate", 2):
            change(rows)
        return rows

    toy.write_gate(folder, change=only)
    return toy.write_toml(folder, predictions="{arm}-{seed}.parquet", roles=roles)


WHERE = r"candidate seed 2 \(trained\), id 10003: "
CASES = {
    "label": (altered("clicked", 1), WHERE + "label is 1, in baseline seed 1 .* it is 0"),
    "weight": (altered("w", 2.5), WHERE + "weight is 2.5, in baseline seed 1 .* it is 1"),
    "user": (altered("user", 47), WHERE + "user is 47, .* it is 3"),
    "day": (altered("day", 50), WHERE + "day is 50, .* it is 3"),
    "flag": (altered("mobile", False), WHERE + "mobile is false, .* it is true"),
    "category": (altered("country", "FR"), WHERE + "country is 'FR', .* it is 'DE'"),
    "missing": (without(5), r"candidate seed 2 .*no example with id 10005, which baseline seed 1"),
    "foreign": (altered("row", 5), r"baseline seed 1 .*no example with id 5, which candidate"),
    "twice": (repeated(8), r"candidate seed 2 .*id 10008 is there twice \(its rows 9 and 3001\)"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_difference_is_named(tmp_path: Path, case: str) -> None:
    change, message = CASES[case]
    with pytest.raises(RecordError, match=message):
        toy.judged(gate(tmp_path, change))
    assert not list((tmp_path / "out" / "runs").glob("candidate-002*"))


def test_a_difference_is_found_in_any_order_of_rows(tmp_path: Path) -> None:
    def change(rows: toy.Columns) -> None:
        altered("clicked", 1)(rows)
        for name, values in rows.items():
            rows[name] = values[::-1]

    with pytest.raises(RecordError, match=CASES["label"][1]):
        toy.judged(gate(tmp_path, change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (altered("clicked", 1), r"candidate seed 2 \(trained\), row 4: label is 1"),
        (without(5), r"candidate seed 2 \(trained\): 2999 rows, baseline seed 1 .* has 3000"),
    ],
)
def test_without_an_id_rows_pair_by_place(tmp_path: Path, change: Change, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        toy.judged(gate(tmp_path, change, roles=NO_ID))


def test_text_ids_are_named_as_the_file_writes_them(tmp_path: Path) -> None:
    def texts(arm: str, seed: int, rows: toy.Columns) -> toy.Columns:
        rows["row"] = np.array([f"r-{one}" for one in rows["row"]])
        if (arm, seed) == ("candidate", 2):
            altered("clicked", 1)(rows)
        return rows

    with pytest.raises(RecordError, match=r"candidate seed 2 .*, id 'r-10003': label is 1"):
        toy.judged(toy.write_gate(tmp_path, change=texts))


def test_curves_of_a_seed_cover_the_same_steps(tmp_path: Path) -> None:
    path = toy.write_gate(tmp_path)
    toy.write_curve(tmp_path / "candidate-2-curve.jsonl", 2, steps=150)
    with pytest.raises(RecordError, match=r"candidate seed 2: its curve has 150 .* up to 149"):
        toy.judged(path)
    (tmp_path / "candidate-2-curve.jsonl").unlink()
    with pytest.raises(DataError, match=r"candidate seed 2: no \[\[curves\]\]"):
        toy.judged(path)


def test_many_keys_are_hashed_into_few_clusters_that_stay_whole() -> None:
    rng = np.random.default_rng(0)
    keys = rng.integers(-(2**62), 2**62, 20_000)[rng.integers(0, 20_000, 60_000)]
    bucket = dense(keys, buckets=512)
    assert bucket.min() == 0
    assert bucket.max() == len(np.unique(bucket)) - 1 == 511
    pairs = np.unique(np.stack([keys, bucket]), axis=1)
    assert pairs.shape[1] == len(np.unique(keys))
    # Small consecutive ids, as databases give them, spread like random ones.
    sizes = np.bincount(dense(np.arange(51_200), buckets=512))
    assert sizes.std() == pytest.approx(10, rel=0.2)
    few = np.array([7, -3, 7, 100])
    assert dense(few, buckets=512).tolist() == [1, 0, 1, 2]

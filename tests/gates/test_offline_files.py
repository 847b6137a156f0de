"""Files of every type say the same, and malformed ones end in an error that names the place."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qualitygates import plots
from qualitygates.__main__ import main
from qualitygates.errors import DataError, GateError
from qualitygates.offline.columns import keys
from qualitygates.offline.predictions import CHUNK_ROWS, Layout, PredictionFile, Reader, batches
from tests.gates import offline_data as toy

ROLES = {"logit": "score", "label": "clicked", "user": "user"}
LAYOUT = Layout(
    arms={"baseline": "baseline"},
    seeds=(1,),
    forms=("trained",),
    tasks=(),
    probability=False,
    weighted=False,
    keys=("user",),
    flags=(),
    categories=(),
)
NEEDED = {"score": "number", "user": "key"}


@pytest.fixture(autouse=True)
def _without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "available", lambda: False)


def evaluations(out: Path) -> list[dict]:
    return [
        toy.record(out, arm, seed)["evaluations"]
        for arm in (*toy.ARMS, "known_bad")
        for seed in (1, 2, 3)
    ]


def double(arm: str, seed: int, rows: toy.Columns) -> toy.Columns:
    return {**rows, "score": rows["score"].astype(np.float64)}


def test_parquet_csv_and_jsonl_give_the_same_records(tmp_path: Path) -> None:
    found = []
    for kind in ("parquet", "csv", "jsonl"):
        # Text keeps a float64 exactly, while a float32 is written with fewer digits.
        toy.judged(toy.write_gate(tmp_path / kind, kind=kind, change=double))
        found.append(evaluations(tmp_path / kind / "out"))
    assert found[0] == found[1] == found[2]


def test_one_file_of_all_runs_with_other_names_and_probabilities(tmp_path: Path) -> None:
    toy.judged(toy.write_gate(tmp_path))
    data, tables = toy.examples(), []
    names = {"baseline": "prod", "candidate": "mx", "null": "prod again"}
    for arm, name in names.items():
        for seed in (1, 2, 3):
            rows = toy.columns(data, arm, seed, toy.EFFECTS[arm])
            logit = rows.pop("score").astype(np.float64)
            rows["p"] = 1 / (1 + np.exp(-logit))
            rows["recipe"], rows["run"] = [name] * len(logit), [f"{seed}"] * len(logit)
            tables.append(pa.table(rows))
    mixed = pa.concat_tables(tables)
    mixed = mixed.take(np.random.default_rng(0).permutation(len(mixed)))
    pq.write_table(mixed, tmp_path / "all.parquet")
    roles = {**toy.ROLES, "probability": "p", "arm": "recipe", "seed": "run"}
    del roles["logit"]
    more = '[arms]\nbaseline = "prod"\ncandidate = "mx"\nnull = "prod again"\n'
    gate = toy.write_toml(tmp_path, predictions="all.parquet", roles=roles, more=more, curves=False)
    toy.judged(gate, tmp_path / "mixed")
    for ours, theirs in zip(
        evaluations(tmp_path / "out"), evaluations(tmp_path / "mixed"), strict=True
    ):
        for metric, value in ours["trained"]["metrics"].items():
            assert theirs["trained"]["metrics"][metric] == pytest.approx(value, rel=1e-9)
        assert ours["trained"]["clusterings"].keys() == theirs["trained"]["clusterings"].keys()


def test_forms_and_tasks_are_evaluations(tmp_path: Path) -> None:
    data = toy.examples()
    for arm in toy.ARMS:
        for seed in (1, 2, 3):
            for form in ("trained", "bf16"):
                tasks = []
                for task in ("click", "buy"):
                    rows = toy.columns(data, arm, seed, toy.EFFECTS[arm])
                    rows["what"] = [task] * len(rows["row"])
                    if task == "buy":
                        rows["clicked"] = 1 - rows["clicked"]
                        rows["score"] = -rows["score"]
                    tasks.append(pa.table(rows))
                pq.write_table(pa.concat_tables(tasks), tmp_path / f"{form}-{arm}-{seed}.parquet")
            toy.write_curve(tmp_path / f"{arm}-{seed}-curve.jsonl", seed)
    gate = toy.write_toml(
        tmp_path,
        predictions="{form}-{arm}-{seed}.parquet",
        roles={**toy.ROLES, "task": "what"},
        top='margins = "demo"\nlooks = [3]\nforms = ["trained", "bf16"]\ntasks = ["click", "buy"]',
    )
    verdict = toy.judged(gate)
    assert verdict["verdict"] == "ACCEPT"
    assert {key.partition("/")[0] for key in verdict["metrics"]} == {
        *("trained:click", "trained:buy", "bf16:click", "bf16:buy")
    }


def write_bytes(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


DEEP = b'{"score": 1, "user": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
MALFORMED = {
    "pickle as parquet": (write_bytes("a.parquet", pickle.dumps({"score": 1})), "parquet"),
    "empty parquet": (write_bytes("a.parquet", b""), "parquet"),
    "empty csv": (write_bytes("a.csv", b""), "column 'score' is missing"),
    "csv without the column": (write_bytes("a.csv", b"user,x\n1,2\n"), "it has: 'user', 'x'"),
    "csv with it twice": (write_bytes("a.csv", b"user,score,score\n1,2,3\n"), "is there twice"),
    "csv with NUL": (write_bytes("a.csv", b"user,score\n1,2\x000\n"), "invalid value"),
    "csv with a formula": (write_bytes("a.csv", b"user,score\n1,=1+1\n"), "invalid value '=1.1'"),
    "csv of bytes": (write_bytes("a.csv", b"user,score\n\xff\xfe,1\n"), "UTF8"),
    "csv, a field too many": (write_bytes("a.csv", b"user,score\n1,2,3\n"), "Expected 2 columns"),
    "csv, endless number": (
        write_bytes("a.csv", b"user,score\n1," + b"9" * (17 << 20) + b"\n2,1\n"),
        "block",
    ),
    "jsonl, endless number": (
        write_bytes("a.jsonl", b'{"score": 1, "user": 1}\n{"score": ' + b"9" * (17 << 20)),
        "longer than",
    ),
    "jsonl of thousands of digits": (
        write_bytes("a.jsonl", b'{"user": 1, "score": ' + b"9" * 9000 + b"}\n"),
        "not a JSON object",
    ),
    "jsonl, nested deeply": (
        write_bytes("a.jsonl", b'{"score": 1, "user": 1}\n' + DEEP),
        "changed from number to array",
    ),
    "jsonl, nested at once": (write_bytes("a.jsonl", DEEP), "not a JSON object"),
    "jsonl of arrays": (write_bytes("a.jsonl", b"[1, 2]\n"), "not a JSON object"),
    "jsonl, key changes type": (
        write_bytes("a.jsonl", b'{"score": 1, "user": 1}\n{"score": 1, "user": "b"}\n'),
        "changed from number to string",
    ),
    "compressed": (write_bytes("a.csv.gz", b"\x1f\x8b"), "allowed: .parquet, .csv, .jsonl"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_ends_in_a_clear_error(tmp_path: Path, case: str) -> None:
    make, message = MALFORMED[case]
    path = make(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        list(batches(PredictionFile(path, path.name, {}, {}), NEEDED))
    assert str(caught.value).startswith(path.name)
    assert len(str(caught.value)) < 600


def test_nested_columns_that_nobody_asked_for_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    deep = DEEP.replace(b"user", b"other")
    path.write_bytes(b'{"score": 1, "user": "a"}\n' + deep.replace(b"}", b', "user": "b"}'))
    (found,) = batches(PredictionFile(path, path.name, {}, {}), NEEDED)
    assert found["user"].to_pylist() == ["a", "b"]


BAD_VALUES = {
    "label": ("clicked", 2, r"candidate-2\.parquet: column 'clicked' of row 4 is 2, .*\[0, 1\]"),
    "weight": ("w", -1.0, "column 'w' of row 4 is -1, but a weight"),
    "NaN weight": ("w", np.nan, "column 'w' of row 4 is nan"),
    "country": ("country", "x\ny", "column 'country' of row 4 is .* printable line"),
    "missing user": ("user", None, "column 'user' of row 4 is missing"),
    "fractional user": ("user", 1.5, "column 'user' of row 4 is 1.5; an id is a whole number"),
    "text": ("score", "high", "column 'score' holds string, not numbers"),
    "float16": ("score", np.float16, "column 'score' holds float16"),
    "many": ("country", list(range(3000)), "column 'country' .* different values"),
    "flag": ("mobile", "maybe", "column 'mobile' of row 4 is 'maybe'; a flag is"),
    "missing column": ("w", ..., "column 'w' is missing; it has: 'row', 'user'"),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_a_bad_value_is_named_by_file_column_and_row(tmp_path: Path, case: str) -> None:
    column, value, message = BAD_VALUES[case]

    def change(arm: str, seed: int, rows: toy.Columns) -> toy.Columns:
        if (arm, seed) == ("candidate", 2):
            if value is ...:
                del rows[column]
            elif value is np.float16:
                rows[column] = rows[column].astype(np.float16)
            elif isinstance(value, list):
                rows[column] = value
            else:
                values = rows[column].tolist()
                values = [str(one) for one in values] if isinstance(value, str) else values
                values[3] = value
                rows[column] = values
        return rows

    gate = toy.write_gate(tmp_path, change=change)
    with pytest.raises(DataError, match=message):
        toy.judged(gate)
    assert not (tmp_path / "out" / "gate.json").exists()
    assert not list((tmp_path / "out").glob(".rows-*"))


@pytest.mark.parametrize(("value", "said"), [(1.0, "is 1, which has no logit"), (0.0, "is 0,")])
def test_a_saturated_probability_is_refused(tmp_path: Path, value: float, said: str) -> None:
    roles = {"probability": "p", "label": "clicked", "user": "user"}
    rows = {"p": [0.5, value], "clicked": [1, 0], "user": [1, 2]}
    toy.write_rows(tmp_path / "baseline-1.parquet", rows)
    gate = toy.write_toml(tmp_path, predictions="{arm}-{seed}.parquet", roles=roles, curves=False)
    gate.write_text(gate.read_text().replace('"user", "day"', '"user"').split("[slices]")[0])
    with gate.open("a") as stream:
        stream.write('[[predictions]]\npath = "baseline-1.parquet"\narm = "baseline"\nseed = 1\n')
    with pytest.raises(DataError, match=said):
        toy.judged(gate)


def test_names_from_data_reach_neither_the_page_nor_other_folders(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script>'
    escape = "../../escaped"

    def change(arm: str, seed: int, rows: toy.Columns) -> toy.Columns:
        country = np.where(rows["country"] == "DE", evil, escape)
        return {**rows, "country": country, "recipe": [f"../{arm}"] * len(country)}

    folder = tmp_path / "deep" / "down"
    toy.write_gate(folder, change=change)
    more = "[arms]\n" + "".join(f'{arm} = "../{arm}"\n' for arm in toy.ARMS)
    gate = toy.write_toml(
        folder, predictions="*.parquet", roles={**toy.ROLES, "arm": "recipe"}, curves=False
    )
    text = gate.read_text().replace('name = "toy"', f"name = '{evil}'")
    text = text.replace('"*.parquet"', '"?*-{seed}.parquet"')
    gate.write_text(text + more)
    before = {path for path in tmp_path.rglob("*") if "out" not in path.parts}
    assert main(["judge", str(gate), "--out", str(folder / "out")]) == 2
    after = {path for path in tmp_path.rglob("*") if "out" not in path.parts}
    assert after == before
    page = (folder / "out" / "report.html").read_text()
    assert "<script>alert" not in page
    assert "country=&lt;script&gt;" in page
    runs = sorted(path.name for path in (folder / "out" / "runs").iterdir())
    assert [name.rpartition("-")[0] for name in runs[:3]] == [f"baseline-00{i}" for i in (1, 2, 3)]


def test_a_key_is_the_same_in_every_type() -> None:
    whole = [7, -3, 2**60, 2**63 - 1, -(2**63), 0]
    wanted = np.array(whole)
    assert np.array_equal(keys(pa.array(whole)), wanted)
    assert np.array_equal(keys(pa.array([str(one) for one in whole])), wanted)
    unsigned = keys(pa.array([7, 2**64 - 1], pa.uint64()))
    assert np.array_equal(unsigned, keys(pa.array(["7", str(2**64 - 1)])))
    assert np.array_equal(keys(pa.array(["7", "-3"]).dictionary_encode()), wanted[:2])
    assert np.array_equal(keys(pa.array([7.0, -3.0])), wanted[:2])
    texts = keys(pa.array(["007", "7", "+7", "u7", "7 ", ""]))
    assert len(set(texts.tolist())) == 6
    assert texts[1] == 7
    dates = pa.array([0, 18_000], pa.date32())
    assert np.array_equal(keys(dates), keys(pa.array(["1970-01-01", "2019-04-14"])))


def test_memory_holds_one_chunk_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qualitygates.offline.predictions._BLOCK", 1 << 20)
    rows = CHUNK_ROWS * 2 + 5
    data = {"score": np.zeros(rows, np.float32), "clicked": np.zeros(rows), "user": np.arange(rows)}
    for kind in ("parquet", "csv", "jsonl"):
        if kind == "jsonl":
            line = json.dumps({"score": 0.0, "clicked": 0, "user": 1, "other": "x" * 30}) + "\n"
            (tmp_path / "a.jsonl").write_text(line * rows)
        else:
            toy.write_rows(tmp_path / f"a.{kind}", data)
        file = PredictionFile(tmp_path / f"a.{kind}", "a", {"arm": "baseline", "seed": 1}, ROLES)
        sizes = [len(chunk.which) for chunk in Reader(LAYOUT).chunks(file)]
        assert sum(sizes) == rows
        assert max(sizes) <= CHUNK_ROWS


def test_disk_full_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = toy.write_gate(tmp_path)
    original = Path.open

    def full(self: Path, mode: str = "r", *args: object, **kwargs: object) -> object:
        if mode == "ab":
            raise OSError(28, "No space left on device")
        return original(self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(GateError, match="rows cannot be sorted out by run: No space left"):
        toy.judged(gate)

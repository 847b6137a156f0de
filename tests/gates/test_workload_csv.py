"""The workload csv: what it reads, what it refuses, and how much memory a large file takes."""

import gzip
import json
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pytest
import torch
from pyarrow import csv as arrow_csv
from pyarrow import parquet

from qualitygates.errors import DataError, ExperimentError
from qualitygates.workload import Workload, load_workload
from qualitygates.workloads import features, tables
from qualitygates.workloads.features import Rows, cut, shuffled
from qualitygates.workloads.tables import Layout, read_table

OPTIONS: dict[str, Any] = {
    "train": "train.csv",
    "evaluate": "test.csv",
    "label": "click",
    "weight": "w",
    "dense": ["price", "age"],
    "log": ["price"],
    "categorical": ["ad", "device"],
    "history": "seen",
    "clusters": ["user"],
    "group": "user",
    "slices": ["device=phone"],
    "buckets": 64,
    "history_length": 3,
}


def table(rows: int, seed: int) -> arrow.Table:
    rng = np.random.default_rng(seed)
    price = rng.lognormal(size=rows).round(3)
    age = [None if lost else str(a) for a, lost in enumerate(rng.random(rows) < 0.2)]
    seen = [" ".join(map(str, rng.integers(0, 9, n))) or None for n in rng.integers(0, 6, rows)]
    return arrow.table(
        {
            "click": (rng.random(rows) < 1 / (1 + price)).astype(np.int64),
            "w": rng.integers(0, 3, rows).astype(np.float64),
            "price": price,
            "age": age,
            "ad": rng.integers(0, 50, rows).astype(str),
            "device": rng.choice(["phone", "desktop"], rows),
            "seen": seen,
            "user": rng.integers(0, 80, rows).astype(str),
            "unused": ["x"] * rows,
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    arrow_csv.write_csv(table(700, 0), tmp_path / "train.csv")
    arrow_csv.write_csv(table(400, 1), tmp_path / "test.csv")
    return tmp_path


def load(folder: Path, **changes: Any) -> Workload:
    options = {k: v for k, v in (OPTIONS | changes).items() if v is not None}
    return load_workload("csv", options, folder=folder)


def edit(path: Path, line: int, text: str) -> None:
    """Replace one line; 1 is the header."""
    lines = path.read_text().splitlines()
    lines[line - 1] = text
    path.write_text("\n".join(lines) + "\n")


def edit_value(path: Path, line: int, column: str, value: str) -> None:
    header, old = path.read_text().splitlines()[0], path.read_text().splitlines()[line - 1]
    at = header.replace('"', "").split(",").index(column)
    values = old.split(",")
    values[at] = value
    edit(path, line, ",".join(values))


def test_features_are_those_of_a_plain_loop(folder: Path) -> None:
    workload = load(folder)
    (batch,) = workload.evaluation_batches(batch_size=1000)
    source = table(400, 1).to_pylist()
    training = table(700, 0).to_pylist()
    log = np.log1p([row["price"] for row in training])
    age = np.array([float(row["age"]) for row in training if row["age"] is not None])
    at = 0
    for row, wanted in enumerate(source):
        dense = batch.features["dense"][row]
        price = np.clip((np.log1p(wanted["price"]) - log.mean()) / log.std(), -5, 5)
        lost = wanted["age"] is None
        years = 0.0 if lost else (float(wanted["age"]) - age.mean()) / age.std()
        np.testing.assert_allclose(dense, [price, years, 0, lost], rtol=1e-4, atol=1e-5)
        ids = [zlib.crc32(wanted[name].encode()) % 64 for name in ("ad", "device")]
        assert batch.features["categorical"][row].tolist() == ids
        seen = [zlib.crc32(one.encode()) % 64 for one in (wanted["seen"] or "").split()][-3:]
        offsets = batch.features["history_offsets"]
        assert offsets[row : row + 2].tolist() == [at, at + len(seen)]
        assert batch.features["history_ids"][at : at + len(seen)].tolist() == seen
        at += len(seen)
    assert batch.labels.tolist() == [row["click"] for row in source]
    assert batch.weights.tolist() == [row["w"] for row in source]
    assert batch.slices["device=phone"].tolist() == [row["device"] == "phone" for row in source]
    users = [row["user"] for row in source]
    _, wanted_ids = np.unique(users, return_inverse=True)
    for ids in (batch.clusters["user"], batch.groups):
        pairs = set(zip(ids.tolist(), wanted_ids.tolist(), strict=True))
        assert len(pairs) == len(set(users))


def test_facts_and_training(folder: Path) -> None:
    workload = load(folder)
    assert workload.facts["evaluation rows"] == 400
    assert workload.facts["clusters by user"] == 80
    torch.manual_seed(0)
    model = workload.model()
    optimizer, _ = workload.optimizer(model, steps=20)
    losses = []
    for batch in workload.training_batches(seed=1, steps=20, batch_size=256):
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            model(batch.features), batch.labels, weight=batch.weights
        )
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert np.mean(losses[-5:]) < np.mean(losses[:3])


def test_epochs_hold_every_row_once_in_an_order_of_the_seed(folder: Path) -> None:
    workload = load(folder)
    state = torch.get_rng_state()

    def ids(seed: int) -> list[int]:
        batches = workload.training_batches(seed=seed, steps=14, batch_size=100)
        return [one for batch in batches for one in batch.ids.tolist()]

    first = ids(3)
    assert len(first) == 1400
    for epoch in (first[:700], first[700:]):
        assert sorted(epoch) == list(range(700))
    assert first == ids(3)
    assert first != ids(4)
    assert first[:700] != first[700:]
    held_out = [one for b in workload.evaluation_batches(batch_size=150) for one in b.ids.tolist()]
    assert len(set(held_out)) == 400
    assert not set(held_out) & set(first)
    assert torch.equal(state, torch.get_rng_state())


def test_parquet_gives_the_same_as_csv(folder: Path) -> None:
    for name, rows, seed in (("train", 700, 0), ("test", 400, 1)):
        columns = table(rows, seed)
        lists = [[] if one is None else one.split() for one in columns["seen"].to_pylist()]
        columns = columns.set_column(6, "seen", arrow.array(lists, arrow.list_(arrow.string())))
        columns = columns.set_column(4, "ad", columns["ad"].cast(arrow.int64()))
        columns = columns.set_column(5, "device", columns["device"].dictionary_encode())
        parquet.write_table(columns, folder / f"{name}.parquet", row_group_size=128)
    other = load(folder, train="train.parquet", evaluate="test.parquet")
    for ours, theirs in (
        (load(folder).evaluation_batches(batch_size=90), other.evaluation_batches(batch_size=90)),
        (
            load(folder).training_batches(seed=1, steps=3, batch_size=50),
            other.training_batches(seed=1, steps=3, batch_size=50),
        ),
    ):
        for a, b in zip(ours, theirs, strict=True):
            for name, tensor in a.features.items():
                assert torch.equal(tensor, b.features[name]), name
            assert torch.equal(a.labels, b.labels)
            assert torch.equal(a.ids, b.ids)


def test_blocks_do_not_change_the_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ids() -> list[list[float]]:
        return [
            [*b.features["dense"].flatten().tolist(), *b.features["history_ids"].tolist()]
            for b in load(folder, shuffle_rows=0).training_batches(seed=1, steps=9, batch_size=70)
        ]

    whole = ids()
    monkeypatch.setattr(tables, "BLOCK_BYTES", 512)
    assert ids() == whole


def test_several_files_compression_marks_and_blank_lines(folder: Path) -> None:
    text = (folder / "train.csv").read_bytes()
    (folder / "more.csv.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + text + b"\n\n"))
    workload = load(folder, train=["train.csv", "more.csv.gz"], shuffle_rows=0)
    (batch,) = workload.training_batches(seed=1, steps=1, batch_size=1400)
    assert torch.equal(batch.labels[:700], batch.labels[700:])
    assert len(set(batch.ids.tolist())) == 1400


def test_a_feature_file_without_history_or_dense_columns(folder: Path) -> None:
    for changes in (
        {"history": None},
        {"dense": [], "log": []},
        {"dense": [], "log": [], "categorical": []},
        {"categorical": [], "history": None},
    ):
        workload = load(folder, **changes)
        torch.manual_seed(0)
        model = workload.model()
        for batch in workload.training_batches(seed=1, steps=1, batch_size=7):
            assert model(batch.features).shape == (7,)


def test_the_evaluation_window_is_bounded(folder: Path) -> None:
    edit_value(folder / "test.csv", 300, "click", "7")
    batches = list(load(folder, evaluation_rows=250).evaluation_batches(batch_size=100))
    assert [len(batch.labels) for batch in batches] == [100, 100, 50]


def test_clusters_may_be_blocks_of_several_columns(folder: Path) -> None:
    workload = load(folder, clusters=["user", "device x user"])
    batch = next(iter(workload.evaluation_batches(batch_size=10_000)))
    read = arrow_csv.read_csv(folder / "test.csv")
    columns = [
        np.unique(read[name].to_pylist(), return_inverse=True)[1] for name in ("device", "user")
    ]
    combined = np.unique(np.stack(columns), axis=1, return_inverse=True)[1].ravel()
    found = np.unique(batch.clusters["device x user"], return_inverse=True)[1]
    pairs = np.unique(np.stack([combined, found]), axis=1)
    # One key a combination, and one combination a key.
    assert pairs.shape[1] == combined.max() + 1 == found.max() + 1
    for name in ("device x ", " x user"):
        with pytest.raises(ExperimentError, match="blocks of several"):
            load(folder, clusters=["user", name])


def test_many_clusters_are_hashed(folder: Path) -> None:
    rows = 6000
    columns = table(rows, 1).set_column(7, "user", arrow.array(map(str, range(rows))))
    arrow_csv.write_csv(columns, folder / "test.csv")
    workload = load(folder)
    batches = list(workload.evaluation_batches(batch_size=rows))
    assert 2500 < len(np.unique(batches[0].clusters["user"])) <= 4096
    assert len(np.unique(batches[0].groups)) == rows


def test_shuffling_moves_rows_and_loses_none() -> None:
    def part(first: int) -> Rows:
        ids = np.arange(first, first + 50)
        length = (ids % 3).astype(np.int32)
        blank = np.zeros((50, 0))
        return Rows(
            labels=ids.astype(np.float32),
            weights=np.ones(50, np.float32),
            ids=ids,
            dense=blank.astype(np.float32),
            categorical=blank.astype(np.int32),
            length=length,
            history=np.repeat(ids, length).astype(np.int32),
        )

    parts = [part(50 * number) for number in range(20)]
    mixed = list(shuffled(iter(parts), window=120, rng=np.random.default_rng(0)))
    assert max(map(len, mixed)) < 400
    whole = Rows.joined(mixed)
    assert sorted(whole.ids) == list(range(1000))
    assert abs(np.corrcoef(whole.ids[:200], np.arange(200))[0, 1]) < 0.9
    np.testing.assert_array_equal(whole.history, np.repeat(whole.ids, whole.length))
    pieces = list(cut(iter(mixed), size=64))
    assert [len(piece) for piece in pieces] == [64] * 15
    np.testing.assert_array_equal(Rows.joined(pieces).ids, whole.ids[:960])


# Refusals. Every message names the file, the place, what was found and what to do.


def refused(folder: Path, *words: str, **changes: Any) -> None:
    with pytest.raises(DataError) as caught:
        list(load(folder, **changes).training_batches(seed=1, steps=20, batch_size=100))
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_missing_columns_name_the_nearest(folder: Path) -> None:
    refused(folder, "test.csv", "'prize'", "nearest: price", dense=["prize"], log=[])
    refused(folder, "'nothing_like_it'", "has: click, w, price", categorical=["nothing_like_it"])
    refused(folder, "only column is", "delimiter", delimiter="\t")
    parquet.write_table(table(50, 0), folder / "test.parquet")
    refused(
        folder, "test.parquet", "nearest: unused", evaluate="test.parquet", dense=["used"], log=[]
    )


@pytest.mark.parametrize("name", ["train.csv", "test.csv"])
def test_ragged_lines(folder: Path, name: str) -> None:
    edit(folder / name, 120, "1,1,2.5")
    refused(folder, name, "line 120", "3 values where 9 are expected")


def test_a_line_of_another_block_is_counted_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "BLOCK_BYTES", 512)
    edit(folder / "test.csv", 350, "1,1")
    refused(folder, "line 350")


@pytest.mark.parametrize(
    ("column", "value", "rule"),
    [
        ("click", "2", "0 to 1"),
        ("click", "-0.1", "0 to 1"),
        ("click", "nan", "0 to 1"),
        ("click", "", "is empty"),
        ("click", "yes", "not a number"),
        ("w", "-1", "0 or more"),
        ("w", "inf", "finite"),
        ("w", "", "is empty"),
        ("price", "cheap", "not a number"),
        ("price", "NA", "left empty"),
        ("price", "inf", "finite"),
        ("price", "-3", "no negative"),
    ],
)
@pytest.mark.parametrize("name", ["train.csv", "test.csv"])
def test_bad_values(folder: Path, name: str, column: str, value: str, rule: str) -> None:
    edit_value(folder / name, 33, column, value)
    refused(folder, name, "line 33", repr(column), rule)


def test_bad_values_in_a_later_block(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "BLOCK_BYTES", 512)
    edit_value(folder / "test.csv", 391, "click", "3")
    refused(folder, "line 391", "'3'")


def test_training_rows_behind_the_survey_are_checked_as_they_stream(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qualitygates.workloads.labelled.SURVEYED", 50)
    monkeypatch.setattr(tables, "BLOCK_BYTES", 512)
    edit_value(folder / "train.csv", 600, "click", "3")
    workload = load(folder)
    with pytest.raises(DataError, match="line 600"):
        list(workload.training_batches(seed=1, steps=20, batch_size=100))


def test_parquet_rows_are_named(folder: Path) -> None:
    columns = table(100, 0)
    labels = columns["click"].to_numpy().copy()
    labels[40] = 9
    path = folder / "train.parquet"
    parquet.write_table(columns.set_column(0, "click", arrow.array(labels)), path)
    refused(folder, "train.parquet, row 41", "0 to 1", train="train.parquet")
    path.write_bytes(path.read_bytes()[:500])
    refused(folder, "damaged Parquet file", train="train.parquet")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["is empty"]),
        (b"\n\n \n", ["is empty"]),
        (b"click,w,price,age,ad,device,seen,user\n", ["no row below the header"]),
        ("click,w\n1,1\n".encode("utf-16"), ["UTF-16", "iconv -f UTF-16 -t UTF-8"]),
        ("click,w\n1,1\n".encode("utf-16-le"), ["UTF-16", "iconv"]),
        ("click,w\n1,1\n".encode("utf-32"), ["UTF-32", "iconv"]),
        (b"\x7fELF\x02\x01\x00\x03" + b"\x91\x92\x93\x94" * 30, ["binary file", "NUL byte"]),
        (b"\x91\x92\x93,\xff\xfe\n" * 30, ["not UTF-8", "header line"]),
    ],
)
def test_files_that_are_no_tables(folder: Path, content: bytes, words: list[str]) -> None:
    (folder / "test.csv").write_bytes(content)
    refused(folder, "test.csv", *words)


def test_latin_1_text(folder: Path) -> None:
    lines = (folder / "test.csv").read_bytes().splitlines()
    lines[20] = lines[20].replace(b"phone", b"t\xe9l\xe9phone").replace(b"desktop", b"t\xe9l\xe9")
    (folder / "test.csv").write_bytes(b"\n".join(lines))
    refused(folder, "test.csv", "not UTF-8", "line 21", "iconv -f LATIN1")


def test_paths_that_are_no_files(folder: Path) -> None:
    refused(folder, "absent.csv does not exist", train="absent.csv")
    refused(folder, "is a folder", evaluate=".")
    refused(folder, "training file and an evaluation file", evaluate=["test.csv", "./train.csv"])


@pytest.mark.parametrize(("value", "kind"), [("0", "positive"), ("1", "negative")])
def test_one_class_in_the_evaluation_rows(folder: Path, value: str, kind: str) -> None:
    columns = table(400, 1)
    columns = columns.set_column(0, "click", arrow.array([int(value)] * 400))
    arrow_csv.write_csv(columns, folder / "test.csv")
    refused(folder, "test.csv", f"no {kind} label", "evaluation_rows")


def test_one_class_or_no_weight(folder: Path) -> None:
    columns = table(400, 1)
    zero = arrow.array([0] * 400)
    arrow_csv.write_csv(columns.set_column(1, "w", zero), folder / "test.csv")
    refused(folder, "test.csv", "weights of all 400 evaluation rows are zero")
    arrow_csv.write_csv(columns, folder / "test.csv")
    arrow_csv.write_csv(columns.set_column(0, "click", zero), folder / "train.csv")
    refused(folder, "400 training rows all have the same label")
    arrow_csv.write_csv(columns.set_column(1, "w", zero), folder / "train.csv")
    refused(folder, "all have weight zero")


def test_groups_slices_and_clusters_that_cannot_be_judged(folder: Path) -> None:
    refused(folder, "'ad'", "several clusters of 'user'", group="ad")
    refused(folder, "no evaluation row has device=tablet", slices=["device=tablet"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clusters": []}, "clusters"),
        ({"clusters": None}, "'clusters' is missing"),
        ({"label": None}, "'label' is missing"),
        ({"labels": "x"}, "did you mean 'label'"),
        ({"train": []}, "train = []"),
        ({"train": 3}, "train"),
        ({"dense": "price"}, "allowed: a list of texts"),
        ({"dense": ["price", "price"]}, "names 'price' twice"),
        ({"log": ["w"]}, "not in dense"),
        ({"dense": [], "log": [], "categorical": [], "history": None}, "no feature"),
        ({"categorical": ["click"]}, "told the answer"),
        ({"categorical": ["w"]}, "told the answer"),
        ({"slices": ["phone"]}, "column=value"),
        ({"buckets": 1}, "buckets = 1"),
        ({"buckets": True}, "buckets = True"),
        ({"evaluation_rows": 0}, "evaluation_rows = 0"),
        ({"shuffle_rows": -1}, "shuffle_rows = -1"),
        ({"history_length": 0}, "history_length = 0"),
        ({"delimiter": ";;"}, "one character"),
        ({"separator": ""}, "separator"),
        ({"weight": 1}, "weight = 1"),
    ],
)
def test_options_that_make_no_sense(folder: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        load(folder, **changes)
    assert words in str(caught.value)
    assert "csv" in str(caught.value)


def test_without_pyarrow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "find_spec", lambda name: None)
    refused(folder, "pip install 'lowprec[data]'")


def test_columns_that_cannot_be_text(folder: Path) -> None:
    parquet.write_table(arrow.table({"a": [[1], [2]], "b": [1.5, 2.5]}), folder / "odd.parquet")
    (chunk,) = read_table(folder / "odd.parquet", ["a", "b"], Layout())
    with pytest.raises(DataError, match="cannot be used as text"):
        chunk.texts("a")
    with pytest.raises(DataError, match="not numeric"):
        chunk.numbers("a")
    assert features.hashed(chunk.texts("b"), 97).tolist() == [
        zlib.crc32(b"1.5") % 97,
        zlib.crc32(b"2.5") % 97,
    ]


# Memory.

CHILD = """
import json, sys, time, torch
from pathlib import Path
from qualitygates.workload import load_workload
torch.set_num_threads(1)
folder, rows = Path(sys.argv[1]), int(sys.argv[2])
options = json.loads(sys.argv[3])
started = time.perf_counter()
workload = load_workload("csv", options, folder=folder)
model = workload.model()
optimizer, _ = workload.optimizer(model, steps=10)
seen, size = 0, 2000
for batch in workload.training_batches(seed=1, steps=rows // size, batch_size=size):
    if seen < 10 * size:
        loss = model(batch.features).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    seen += len(batch.labels)
# ru_maxrss would count the parent's memory from before the exec.
status = Path("/proc/self/status").read_text()
peak = int(status.split("VmHWM:")[1].split()[0]) / 2**20
print(json.dumps({"seen": seen, "peak": peak, "seconds": time.perf_counter() - started}))
"""


def write_large(path: Path, rows: int, *, block: int = 100_000) -> None:
    """Blocks of random rows, each with four columns of features and a user; CSV or Parquet."""
    rng = np.random.default_rng(0)
    writer: Any = None
    for start in range(0, rows, block):
        count = min(block, rows - start)
        seen = np.char.add(rng.integers(0, 999, count).astype(str), " 7 11 13")
        part = arrow.table(
            {
                "click": (rng.random(count) < 0.1).astype(np.int64),
                "price": rng.random(count).astype(np.float32),
                "ad": rng.integers(0, 100_000, count),
                "device": rng.integers(0, 4, count),
                "seen": seen,
                "user": rng.integers(0, 10**6, count),
            }
        )
        if writer is None:
            if path.suffix == ".csv":
                writer = arrow_csv.CSVWriter(path, part.schema)
            else:
                writer = parquet.ParquetWriter(path, part.schema)
        writer.write_table(part, **({} if path.suffix == ".csv" else {"row_group_size": 10**6}))
    writer.close()


needs_proc = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="peak memory is read from /proc/self/status"
)


def measured(folder: Path, suffix: str, rows: int) -> dict[str, float]:
    write_large(folder / f"train{suffix}", rows)
    write_large(folder / f"test{suffix}", min(rows, 300_000))
    options = {
        "train": f"train{suffix}",
        "evaluate": f"test{suffix}",
        "label": "click",
        "dense": ["price"],
        "categorical": ["ad", "device"],
        "history": "seen",
        "clusters": ["user"],
        "group": "user",
    }
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), str(rows), json.dumps(options)],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, float] = json.loads(done.stdout)
    (folder / f"train{suffix}").unlink()
    print(f"{suffix}, {rows} rows: {result}")
    assert result["seen"] == rows
    return result


@needs_proc
def test_memory_of_a_small_file(tmp_path: Path) -> None:
    assert measured(tmp_path, ".csv", 60_000)["peak"] < 1


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_ten_million_rows_take_less_than_a_gibibyte(tmp_path: Path, suffix: str) -> None:
    assert measured(tmp_path, suffix, 10_000_000)["peak"] < 1


def test_facts_change_with_the_content_of_a_file(folder: Path) -> None:
    """gate.json holds the facts, so a gate resumed on other data is refused."""
    before = load(folder).facts
    assert load(folder).facts == before
    edit_value(folder / "train.csv", 600, "unused", "y")
    after = load(folder).facts
    assert {key for key in before if before[key] != after[key]} == {"training files"}

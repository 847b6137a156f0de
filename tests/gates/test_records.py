"""Records on disk: whole or absent, checked when read, and nothing finished is ever lost."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qualitygates import records
from qualitygates.errors import ExperimentError, RecordError
from qualitygates.experiment import Experiment
from qualitygates.records import (
    RunStore,
    canonical_json,
    content_hash,
    differences,
    load_evidence,
    read_record,
    seal,
    write_json_atomic,
)

ROOT = Path(__file__).parents[2]


def run(arm: str = "baseline", seed: int = 1, **changes: Any) -> dict[str, Any]:
    inputs = {"arm": arm, "seed": seed, **changes.pop("inputs", {})}
    record = {
        "schema": 1,
        "kind": "run",
        "arm": arm,
        "seed": seed,
        "key": content_hash(inputs),
        "inputs": inputs,
        "pairing": {"steps": 3},
        "training": {"loss": [0.7, 0.69314718, None], "crashed": None},
        "evaluations": {"trained": {"metrics": {"ne": 0.931}}},
    }
    return record | changes


def promise(**changes: Any) -> dict[str, Any]:
    toml = {
        "schema": 1,
        "name": "gate",
        "workload": "flights",
        "margins": "demo",
        "looks": [3, 5],
        "train": {"steps": 3, "batch_size": 8},
        "baseline": {"recipe": "bf16"},
        "candidate": {"recipe": "mxfp8"},
        "speed": {"required": False},
    }
    return Experiment.from_dict(toml | changes).promise(created="2026-01-01T00:00:00+00:00")


def test_canonical_json_is_one_text_for_one_value() -> None:
    assert canonical_json({"b": (1, 2.5), "a": "ä"}) == '{"a":"\\u00e4","b":[1,2.5]}'
    assert canonical_json({10: 1, 9: 2}) == canonical_json(json.loads(json.dumps({9: 2, 10: 1})))
    assert content_hash({"x": 0.1 + 0.2}) == content_hash(json.loads('{"x":0.30000000000000004}'))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"bytes"])
def test_what_json_cannot_carry_is_refused(value: Any) -> None:
    with pytest.raises(RecordError, match="not plain JSON data"):
        canonical_json({"loss": [value]})


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    record = run()
    path = store.save(record)
    assert path == store.path("baseline", 1, record["key"])
    assert read_record(path) == seal(record)
    assert store.load_all() == ([seal(record)], [])


def test_records_come_in_the_order_of_arms_and_seeds(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    for arm, seed in (("null", 2), ("candidate", 10), ("candidate", 9), ("baseline", 9)):
        store.save(run(arm, seed))
    found = [(one["arm"], one["seed"]) for one in store.load_all()[0]]
    assert found == [("baseline", 9), ("candidate", 9), ("candidate", 10), ("null", 2)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arm": "other"}, "arms are baseline"),
        ({"seed": "1"}, "seed '1'"),
        ({"key": "0" * 64}, "key is not the hash of its inputs"),
        ({"schema": 2}, "reads schema 1"),
        ({"kind": "gate"}, "kind 'gate'"),
        ({"training": {"loss": [float("nan")]}}, "not plain JSON data"),
    ],
)
def test_a_wrong_record_is_not_written(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecordError, match=message):
        RunStore(tmp_path).save(run(**changes))
    assert list(tmp_path.rglob("*.json")) == []


def truncate(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip(data: bytes) -> bytes:
    """One bit of the digit in 0.931: still valid JSON, another number."""
    at = data.index(b"0.931") + 4
    return data[:at] + bytes([data[at] ^ 2]) + data[at + 1 :]


DAMAGE = {
    "truncated": (truncate, "not a whole JSON file"),
    "bit flipped": (flip, "checksum does not fit"),
    "empty": (lambda data: b"", "not a whole JSON file"),
    "zeros": (lambda data: b"\0" * len(data), "not a whole JSON file"),
    "not text": (lambda data: b"\xff\xfe" + data, "not a whole JSON file"),
    "a list": (lambda data: b"[1]", "holds a list"),
    "nan": (lambda data: data.replace(b"0.931", b"NaN"), "NaN is not JSON"),
    "other schema": (lambda data: data.replace(b'"schema":1', b'"schema":9'), "schema 9"),
    "field gone": (lambda data: data.replace(b'"pairing"', b'"pairings"'), "without pairing"),
    "deep": (lambda data: b"[" * 100_000, "not a whole JSON file"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_record_is_set_aside_and_the_others_kept(tmp_path: Path, kind: str) -> None:
    damage, message = DAMAGE[kind]
    store = RunStore(tmp_path)
    kept, hurt = run("baseline"), run("candidate")
    store.save(kept)
    path = store.save(hurt)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RecordError, match=message):
        read_record(path)
    assert store.load_all(quarantine=False)[1][0].path == path
    good, damaged = store.load_all()
    assert good == [seal(kept)]
    assert [one.path.name for one in damaged] == [path.name + ".damaged"]
    assert message in damaged[0].reason
    assert not path.exists()
    assert store.load_all() == (good, [])
    store.save(hurt)
    assert len(store.load_all()[0]) == 2


def fail_with(code: int) -> Any:
    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize(
    ("code", "cure"), [(errno.ENOSPC, "free some space"), (errno.EROFS, "folder writable")]
)
def test_a_full_disk_loses_nothing_that_was_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, code: int, cure: str
) -> None:
    store = RunStore(tmp_path)
    store.save(run(seed=1))
    with monkeypatch.context() as patch:
        patch.setattr(records.os, step, fail_with(code))
        with pytest.raises(RecordError) as caught:
            store.save(run(seed=2))
    message = str(caught.value)
    assert "baseline-002" in message
    assert "was not written" in message
    assert "every record finished before it is kept" in message
    assert cure in message
    assert list(tmp_path.rglob("*.tmp")) == []
    assert [one["seed"] for one in store.load_all()[0]] == [1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_device_that_really_is_full(tmp_path: Path) -> None:
    target = tmp_path / "verdict.json"
    (tmp_path / f".verdict.json.{os.getpid()}.tmp").symlink_to("/dev/full")
    with pytest.raises(RecordError, match="No space left on device"):
        write_json_atomic(target, {"verdict": "ACCEPT"})
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(records.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_json_atomic(tmp_path / "verdict.json", {"verdict": "ACCEPT"})
    assert list(tmp_path.iterdir()) == []


# The writer stops, for good, at the named step of its second record.
WRITER = """
import os, sys
from qualitygates import records
from tests.gates.test_records import run
store = records.RunStore(sys.argv[1])
store.save(run(seed=1))
def stop(*_):
    print("there", flush=True)
    sys.stdin.read()
setattr(records.os, sys.argv[2], stop)
store.save(run(seed=2))
"""


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_kill_9_in_the_middle_of_a_write(tmp_path: Path, step: str) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), step],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "there\n"
        store = RunStore(tmp_path)
        assert len(list(tmp_path.rglob("*.tmp"))) == 1
        assert [one["seed"] for one in store.load_all()[0]] == [1]
        assert len(list(tmp_path.rglob("*.tmp"))) == 1, "the file of a living writer was removed"
        writer.send_signal(signal.SIGKILL)
    assert [one["seed"] for one in store.load_all(quarantine=False)[0]] == [1]
    assert store.load_all()[1] == []
    assert list(tmp_path.rglob("*.tmp")) == []
    store.save(run(seed=2))
    assert [one["seed"] for one in store.load_all()[0]] == [1, 2]


def test_the_promise_is_kept(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    first = store.write_gate(promise())
    assert store.read_gate() == first
    later = promise() | {"created": "2027-01-01T00:00:00+00:00"}
    assert store.write_gate(later) == first


def test_another_promise_is_refused_with_the_fields(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    first = store.write_gate(promise())
    with pytest.raises(ExperimentError) as caught:
        store.write_gate(promise(margins="strict", train={"steps": 4, "batch_size": 8}))
    message = str(caught.value)
    assert "margins.ne is 0.005 there and 0.0002 here" in message
    assert "experiment.train.steps is 3 there and 4 here" in message
    assert "--out" in message
    assert store.read_gate() == first


def test_differences_name_fields_that_came_and_went() -> None:
    assert differences({"a": {"x": 1}, "created": 1}, {"a": {"y": 2}, "created": 2}) == [
        "a.x is 1 there and None here",
        "a.y is None there and 2 here",
    ]


def test_a_promise_edited_afterwards_is_not_trusted(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.write_gate(promise())
    text = store.gate_path.read_text(encoding="utf-8")
    store.gate_path.write_text(text.replace('"ne": 0.005', '"ne": 0.05'), encoding="utf-8")
    with pytest.raises(RecordError, match="edited after it was written"):
        store.read_gate()
    with pytest.raises(RecordError, match="edited after it was written"):
        store.write_gate(promise())


def evidence(folder: Path) -> RunStore:
    store = RunStore(folder)
    store.write_gate(promise())
    for seed in (1, 2):
        store.save(run("baseline", seed))
        store.save(run("candidate", seed))
    return store


def test_evidence_from_a_folder_and_from_its_files(tmp_path: Path) -> None:
    store = evidence(tmp_path)
    gate, runs = load_evidence([tmp_path])
    assert gate == store.read_gate()
    assert [(one["arm"], one["seed"]) for one in runs] == [
        ("baseline", 1),
        ("baseline", 2),
        ("candidate", 1),
        ("candidate", 2),
    ]
    files = sorted(store.runs.glob("*.json"))
    assert load_evidence(files) == (gate, runs)
    assert load_evidence([*files, tmp_path]) == (gate, runs)
    assert load_evidence(files[:1])[1] == runs[:1]


def test_evidence_is_refused_when_anything_is_wrong(tmp_path: Path) -> None:
    store, other = evidence(tmp_path / "a"), evidence(tmp_path / "b")
    with pytest.raises(RecordError, match="runs of 2 gates"):
        load_evidence([store.folder, other.folder])
    stray = tmp_path / "stray.json"
    write_json_atomic(stray, seal(run()))
    with pytest.raises(RecordError, match="no margin was promised"):
        load_evidence([stray])
    with pytest.raises(RecordError, match="does not exist"):
        load_evidence([tmp_path])
    store.save(run("candidate", 1, inputs={"code": "newer"}))
    with pytest.raises(RecordError, match="both arm candidate, seed 1"):
        load_evidence([store.folder])
    path = sorted(other.runs.glob("candidate-002*.json"))[0]
    path.write_bytes(truncate(path.read_bytes()))
    with pytest.raises(RecordError, match="give `run` again"):
        load_evidence([other.folder])
    assert path.exists(), "judging must not change the folder"

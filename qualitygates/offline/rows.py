"""Everything that an offline gate's files say, by run: rows on disk, curves, observations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import DataError, RecordError
from .curves import Curve, read_curve
from .inputs import Input
from .observations import read_observation
from .predictions import Layout, PredictionFile, Reader
from .spec import OfflineSpec
from .spill import Spill

ArmSeed = tuple[str, int]


def layout(spec: OfflineSpec) -> Layout:
    """Which fields the gate reads from every row."""
    roles = [role for role in ("id", "user") if role in spec.columns]
    return Layout(
        arms=spec.arms,
        seeds=spec.seeds,
        forms=spec.forms,
        tasks=spec.tasks,
        probability="probability" in spec.columns,
        weighted="weight" in spec.columns,
        keys=tuple(dict.fromkeys([*roles, *spec.clusters])),
        flags=spec.flags,
        categories=spec.categories,
    )


class Rows:
    """What the files say about every run; rows of predictions are kept in `folder`."""

    def __init__(self, spec: OfflineSpec, inputs: Sequence[Input], *, folder: Path) -> None:
        self.spec, self.inputs = spec, list(inputs)
        self.reader = Reader(layout(spec))
        self.spill = Spill(folder, self.reader.layout.fields)
        self.curves: dict[ArmSeed, Curve] = {}
        self.observed: dict[ArmSeed, dict[str, Any]] = {}
        # What each run was made from, as its record keeps it.
        self.sources: dict[ArmSeed, list[dict[str, Any]]] = {}

    @property
    def has_null(self) -> bool:
        """Whether the data holds a null control."""
        return any(arm == "null" for arm, _ in self.runs())

    def runs(self) -> list[ArmSeed]:
        """Every run that has predictions or is declared crashed, baselines first."""
        found = {(arm, seed) for arm, seed, _ in self.spill.rows} | set(self.spec.crashed)
        arms, seeds = list(self.spec.arms.values()), self.spec.seeds
        unknown = [seed for _, seed in found if seed not in seeds]
        if unknown:
            raise DataError(f"[[crashed]] seed = {unknown[0]}; the gate has seeds {list(seeds)}")
        return sorted(found, key=lambda run: (arms.index(run[0]), seeds.index(run[1])))

    def read(self) -> None:
        """Read every file once; raises GateError for whatever cannot carry a gate."""
        for index, one in enumerate(self.inputs):
            if one.kind == "predictions":
                for chunk in self.reader.chunks(_file(one)):
                    self.spill.add(chunk, source=index)
            else:
                self._read_beside(one)
            one.check_unchanged()
        for (arm, seed, _), indices in self.spill.sources.items():
            for index in sorted(indices):
                self._note_source((arm, seed), self.inputs[index])
        self._check_complete()
        self._check_curves()

    def _read_beside(self, one: Input) -> None:
        run = one.run(self.spec)
        kept: dict[ArmSeed, Any] = self.curves if one.kind == "curves" else self.observed
        if run in kept:
            raise DataError(f"{one.label}: a second file of [[{one.kind}]] for {run[0]} {run[1]}")
        if one.kind == "curves":
            kept[run] = read_curve(one.path, one.columns, label=one.label)
        else:
            kept[run] = read_observation(one.path, label=one.label)
        self._note_source(run, one)

    def _note_source(self, run: ArmSeed, one: Input) -> None:
        noted = self.sources.setdefault(run, [])
        if (described := one.described()) not in noted:
            noted.append(described)

    def _check_complete(self) -> None:
        """Every run has every evaluation, and the first look has every run."""
        runs = self.runs()
        for arm, seed in runs:
            lacking = [n for n in self.spec.evaluations if (arm, seed, n) not in self.spill.rows]
            if lacking and (arm, seed) not in self.spec.crashed:
                raise RecordError(
                    f"{arm} seed {seed}: no predictions of {', '.join(lacking)}; every run needs "
                    f"each of {', '.join(self.spec.evaluations)}"
                )
        arms = [arm for arm in self.spec.arms.values() if arm != "null" or self.has_null]
        missing = [
            f"{arm} seed {seed}"
            for arm in arms
            for seed in self.spec.seeds[: self.spec.looks[0]]
            if (arm, seed) not in runs
        ]
        if missing:
            raise RecordError(
                f"no predictions of {', '.join(missing)}; the first look needs the seeds "
                f"{list(self.spec.seeds[: self.spec.looks[0]])} in each arm. A training that died "
                "is a failure, not missing data: say so with [[crashed]] (arm, seed, reason)"
            )

    def _check_curves(self) -> None:
        """All runs have curves or none has, and those of a seed cover the same steps."""
        if not self.curves:
            return
        for arm, seed in self.runs():
            if (arm, seed) in self.spec.crashed:
                continue
            if (arm, seed) not in self.curves:
                raise DataError(
                    f"{arm} seed {seed}: no [[curves]], while other runs have some; a run whose "
                    "curve is lost could hide a failure"
                )
            ours, base = self.curves[arm, seed].steps, self.curves.get(("baseline", seed))
            if base is None or ours == base.steps:
                continue
            pairs = zip([*ours, "nothing"], [*base.steps, "nothing"], strict=False)
            here, there = next(pair for pair in pairs if pair[0] != pair[1])
            raise RecordError(
                f"{arm} seed {seed}: its curve has {len(ours)} recorded steps up to {ours[-1]}, "
                f"the baseline's {len(base.steps)} up to {base.steps[-1]} (first difference: "
                f"{here} against {there}). Both must be recorded at the same steps; a training "
                "that ended early is a failure: say so with [[crashed]]"
            )

    def spell(self, name: str, value: Any) -> str:
        """A value of a field as the data writes it; keys are looked for in the files."""
        kind, _, column = name.partition(":")
        if kind == "category":
            return repr(list(self.reader.vocabularies[column])[int(value)])
        if kind == "flag":
            return str(bool(value)).lower()
        if kind != "key":
            return f"{value:g}" if float(f"{value:g}") == value else repr(float(value))
        for one in self.inputs:
            if one.kind == "predictions":
                found = self.reader.spelled(_file(one), column, int(value))
                if found is not None:
                    return found
        return str(value)


def _file(one: Input) -> PredictionFile:
    return PredictionFile(one.path, one.label, one.fixed, one.columns)

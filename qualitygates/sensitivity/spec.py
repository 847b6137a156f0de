"""SWEEP.toml: what a sweep measures, read strictly before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..errors import ExperimentError
from ..experiment import Experiment
from .cost import CASTS, SpeedFacts
from .options import Fixes, rungs_of
from .reader import Reader, read_toml

SCHEMA: Final = 1
BUDGETS: Final = ("time", "memory", "flops")
_KEYS: Final = (
    *("schema", "name", "gate", "formats", "groups", "group", "fixes", "speed", "screen"),
    *("branches", "evaluation", "select", "confirm"),
)


@dataclass(frozen=True)
class GroupRule:
    """Layers that share one choice: those that match; `per_parent` makes one group a parent."""

    name: str
    match: tuple[str, ...]
    per_parent: bool


@dataclass(frozen=True)
class Branches:
    """Where branch runs start (shares of training), how long they are, and with which seeds.

    trainings: seeds of the whole trainings that calibrate the branches; 0 leaves them out.
    """

    at: tuple[float, ...]
    length: float
    seeds: tuple[int, ...]
    most: int
    trainings: int


@dataclass(frozen=True)
class Select:
    """What is saved, how much of it at least (None: as much as the margin allows)."""

    budget: str
    saving: float | None
    harm_share: float


@dataclass(frozen=True)
class SweepSpec:
    """A sweep: the gate whose training it studies, candidates, and budgets.

    `gate` gives workload, training, margins and looks. `ladder` holds product texts by product,
    lowest format first. `folder` is where relative paths start; it is not content.
    """

    name: str
    gate_file: str
    gate: Experiment
    ladder: tuple[Mapping[str, str], ...]
    group_by: str
    depth: int
    group_rules: tuple[GroupRule, ...]
    fixes: Fixes
    speed: SpeedFacts
    screen_batches: int
    branches: Branches
    evaluation_share: float
    evaluation_rows: int
    clusters: str
    select: Select
    confirm: bool
    confirm_first_seed: int
    attempts: int
    folder: Path = field(default=Path(), compare=False)

    @classmethod
    def from_toml(cls, path: str | Path) -> SweepSpec:
        """Read a sweep file; raises ExperimentError with the file, the key and the cure."""
        path = Path(path)
        try:
            return _spec(read_toml(path), path.parent)
        except ExperimentError as error:
            text = str(error)
            where = "" if text.startswith(str(path)) else f"{path}: "
            raise ExperimentError(f"{where}{text}") from error

    @property
    def start_steps(self) -> tuple[int, ...]:
        """Steps of the shared BF16 checkpoints, one an entry of `branches.at`."""
        return tuple(max(round(share * self.gate.steps), 1) for share in self.branches.at)

    @property
    def window(self) -> int:
        """Steps of one branch."""
        return max(round(self.branches.length * self.gate.steps), 1)

    @property
    def confirm_seeds(self) -> tuple[int, ...]:
        """The seeds that confirmation may use: every attempt has fresh ones, and so has the gate
        of what a bisection found.
        """
        last = self.confirm_first_seed + max(self.attempts, 2) * max(self.gate.looks)
        return tuple(range(self.confirm_first_seed, last))


def _spec(data: Mapping[str, Any], folder: Path) -> SweepSpec:
    top = Reader(data, _KEYS)
    schema = data.get("schema")
    if schema != SCHEMA or isinstance(schema, bool):
        raise ExperimentError(f"schema = {schema!r}; this version reads schema = {SCHEMA}")
    gate_file = top.text("gate")
    gate = Experiment.from_toml(folder / gate_file)
    evaluation = top.inner("evaluation", ("share", "rows", "clusters"))
    confirm = top.inner("confirm", ("run", "first_seed", "attempts"))
    groups = top.inner("groups", ("by", "depth"))
    spec = SweepSpec(
        name=top.text("name"),
        gate_file=gate_file,
        gate=gate,
        ladder=tuple(rungs_of(one) for one in _ladder(top)),
        group_by=groups.choice("by", ("layer", "kind", "depth"), "layer"),
        depth=groups.whole("depth", 4, least=1, most=1000),
        group_rules=_group_rules(data.get("group", [])),
        fixes=_fixes(top),
        speed=_speed(top, folder),
        screen_batches=top.inner("screen", ("batches",)).whole("batches", 8, least=1, most=1000),
        branches=_branches(top, gate),
        evaluation_share=evaluation.number("share", 0.4, low=0, high=0.9),
        evaluation_rows=evaluation.whole("rows", 20_000, least=100, most=10**9),
        clusters=str(evaluation.table.get("clusters", "")),
        select=_select(top),
        confirm=confirm.boolean("run", default=True),
        confirm_first_seed=confirm.whole("first_seed", gate.first_seed + 100, least=0, most=10**9),
        attempts=confirm.whole("attempts", 3, least=1, most=20),
        folder=folder,
    )
    _check_seeds(spec)
    return spec


def _ladder(top: Reader) -> list[str]:
    texts = top.texts("formats")
    if not texts:
        raise ExperimentError(
            "formats = [] leaves nothing to try; name at least one format, lowest first, "
            "such as ['nvfp4', 'mxfp8']"
        )
    return [one for one in texts if one != "bf16"] or _only_bf16()


def _only_bf16() -> list[str]:
    raise ExperimentError("formats holds only 'bf16': there is nothing to sweep; add a format")


def _group_rules(value: Any) -> tuple[GroupRule, ...]:
    if not isinstance(value, list):
        raise ExperimentError("group must be a list of tables: [[group]]")
    rules = []
    for one in value:
        table = Reader(one, ("name", "match", "per_parent"), section="[group]")
        match = table.texts("match")
        if not match:
            raise ExperimentError("[[group]] match = [] matches no layer; give layer patterns")
        per_parent = table.boolean("per_parent", default=False)
        rules.append(GroupRule(table.text("name"), tuple(match), per_parent))
    return tuple(rules)


def _fixes(top: Reader) -> Fixes:
    table = top.inner("fixes", ("sr", "rotation", "higher"))
    rotation = table.text("rotation", "rht16")
    return Fixes(
        sr=table.boolean("sr", default=True),
        rotation="" if rotation == "none" else rotation,
        higher=table.boolean("higher", default=True),
    )


def _speed(top: Reader, folder: Path) -> SpeedFacts:
    table = top.inner("speed", ("hardware", "rows", "casts", "width", "calibration"))
    calibration = table.table.get("calibration")
    return SpeedFacts.of(
        hardware=table.text("hardware", "b200"),
        rows=table.whole("rows", 65536, least=1, most=10**9),
        casts=table.choice("casts", tuple(CASTS), "dual"),
        width=table.number("width", 1.0, low=0, high=10_000),
        calibration=None if calibration is None else folder / table.text("calibration"),
    )


def _branches(top: Reader, gate: Experiment) -> Branches:
    table = top.inner("branches", ("at", "length", "seeds", "first_seed", "most", "trainings"))
    first = table.whole("first_seed", gate.first_seed + 1000, least=0, most=10**9)
    count = table.whole("seeds", 4, least=2, most=100)
    at = table.numbers("at", [0.25], low=0, high=0.9)
    length = table.number("length", 0.15, low=0, high=0.9)
    if max(at) + length > 1:
        raise ExperimentError(
            f"[branches] at = {at} with length = {length:g} goes past the end of training; "
            "their sum must be at most 1"
        )
    return Branches(
        at=tuple(at),
        length=length,
        seeds=tuple(range(first, first + count)),
        most=table.whole("most", 100_000, least=1, most=10**9),
        trainings=_trainings(table, count),
    )


def _trainings(table: Reader, seeds: int) -> int:
    """Seeds of whole trainings, among those of the branches."""
    count = table.whole("trainings", 2, least=0, most=seeds)
    if count == 1:
        raise ExperimentError("[branches] trainings = 1 has no error; give at least 2, or 0")
    return count


def _select(top: Reader) -> Select:
    table = top.inner("select", ("budget", "saving", "harm_share"))
    saving = table.table.get("saving")
    return Select(
        budget=table.choice("budget", BUDGETS, "time"),
        saving=None if saving is None else table.number("saving", low=0, high=1),
        harm_share=table.number("harm_share", 0.5, low=0, high=1),
    )


def _check_seeds(spec: SweepSpec) -> None:
    """A seed that took part in the choice must not confirm it."""
    used = set(spec.branches.seeds)
    for name, seeds in (("confirmation", spec.confirm_seeds), ("the gate", spec.gate.seeds)):
        shared = sorted(used & set(seeds))
        if shared:
            raise ExperimentError(
                f"[branches] seeds {shared} are also seeds of {name}; a sweep chooses by its "
                "seeds, so they prove nothing afterwards: move first_seed"
            )
    shared = sorted(set(spec.confirm_seeds) & set(spec.gate.seeds))
    if shared:
        raise ExperimentError(
            f"[confirm] seeds {shared} are also seeds of {spec.gate_file}, whose verdict led "
            "here; confirmation needs fresh ones: move first_seed"
        )

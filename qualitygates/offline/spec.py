"""OfflineSpec: what an offline gate promises and where its files are, read strictly from TOML."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ..acceptance import KEYS as ACCEPTANCE_KEYS
from ..acceptance import read_rules
from ..errors import ExperimentError
from ..experiment import KNOWN_BAD_RANGE
from ..records import content_hash
from ..speed.promise import SpeedPromise, read_speed_promise
from ..tables import Table
from ..verdict import MIN_SEEDS, look_alpha, resolve_margins

SCHEMA: Final = 1
# The known-bad arm is computed from the baseline's own logits, never read.
DATA_ARMS: Final = ("baseline", "candidate", "null")
ROLES: Final = (
    *("arm", "seed", "form", "task", "label", "logit", "probability", "weight", "id", "user"),
)
CURVES: Final = ("step", "loss", "grad_norm", "skipped")
_FIXED: Final = ("arm", "seed", "form", "task")
_KEYS: Final = (
    *("schema", "name", "margins", "looks", "seeds", "forms", "tasks", "negative_sampling_rate"),
    *("arms", "columns", "clusters", "slices", "controls", "speed", "baseline", "candidate"),
    *("acceptance", "predictions", "curves", "crashed", "observations"),
)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")


@dataclass(frozen=True)
class Source:
    """Files named by one entry of the TOML: a path with *, {arm}, {seed}, {form} or {task}; what
    holds for every row of them; which of their columns plays which role.
    """

    path: str
    fixed: Mapping[str, Any]
    columns: Mapping[str, str]


@dataclass(frozen=True)
class OfflineSpec:
    """The promise of an offline gate, and its files; `folder` is where relative paths start.

    `arms` maps what the data calls an arm to baseline, candidate or null. `clusters` names columns
    (or the roles id and user); one of more than `buckets` keys is hashed into that many clusters.
    `flags` are columns of true and false, `categories` columns of which every value is a slice.
    `recipes` names the recipes of baseline and candidate, for the reader of the report.
    """

    name: str
    margins: Mapping[str, Any]
    looks: tuple[int, ...]
    seeds: tuple[int, ...]
    forms: tuple[str, ...]
    tasks: tuple[str, ...]
    negative_sampling_rate: float
    arms: Mapping[str, str]
    columns: Mapping[str, str]
    clusters: tuple[str, ...]
    buckets: int
    flags: tuple[str, ...]
    categories: tuple[str, ...]
    protected: tuple[str, ...]
    protected_margin_factor: float
    known_bad_margins: float
    speed: SpeedPromise
    acceptance: Mapping[str, Any]
    recipes: Mapping[str, str]
    predictions: tuple[Source, ...] = field(compare=False)
    curves: tuple[Source, ...] = field(compare=False)
    crashed: Mapping[tuple[str, int], str] = field(compare=False)
    observations: tuple[Source, ...] = field(compare=False)
    folder: Path = field(default=Path(), compare=False)

    @property
    def evaluations(self) -> tuple[str, ...]:
        """`form`, or `form:task` when tasks are named: each is co-primary."""
        if not self.tasks:
            return self.forms
        return tuple(f"{form}:{task}" for form in self.forms for task in self.tasks)

    def to_dict(self) -> dict[str, Any]:
        """What must not change once judged, as JSON in the shape of the TOML; files come apart."""
        return {
            "schema": SCHEMA,
            "name": self.name,
            "workload": "offline: predictions that another training wrote",
            "margins": dict(self.margins),
            "looks": list(self.looks),
            "seeds": list(self.seeds),
            "forms": list(self.forms),
            "tasks": list(self.tasks),
            "negative_sampling_rate": self.negative_sampling_rate,
            "arms": {arm: name for name, arm in self.arms.items()},
            "columns": dict(self.columns),
            "clusters": {"columns": list(self.clusters), "buckets": self.buckets},
            "slices": {
                "flags": list(self.flags),
                "categories": list(self.categories),
                "protected": list(self.protected),
                "protected_margin_factor": self.protected_margin_factor,
            },
            "controls": {"known_bad_margins": self.known_bad_margins},
            "baseline": {"recipe": self.recipes["baseline"]},
            "candidate": {"recipe": self.recipes["candidate"]},
            "speed": self.speed.to_dict(),
            "acceptance": dict(self.acceptance),
        }

    def promise(self, *, null_control: bool, created: str) -> dict[str, Any]:
        """What gate.json fixes before the first judging; `created` is an ISO time."""
        content = self.to_dict()
        return {
            "schema": SCHEMA,
            "kind": "gate",
            "experiment": content,
            "experiment_hash": content_hash(content),
            "margins": content["margins"],
            "looks": content["looks"],
            "alpha": look_alpha(self.looks),
            "seeds": content["seeds"],
            "controls": {"null": null_control, **content["controls"]},
            "slices": content["slices"],
            "speed": content["speed"],
            "evaluations": list(self.evaluations),
            "columns": content["columns"],
            "acceptance": content["acceptance"],
            "created": created,
        }

    @classmethod
    def from_toml(cls, path: str | Path) -> OfflineSpec:
        """Read an offline gate; raises ExperimentError with the file, the key and the cure."""
        path = Path(path)
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ExperimentError(f"{path}: cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ExperimentError(f"{path}: not valid TOML in UTF-8: {error}") from error
        try:
            return _spec(data, path.parent)
        except ExperimentError as error:
            raise ExperimentError(f"{path}: {error}") from error


def _spec(data: Mapping[str, Any], folder: Path) -> OfflineSpec:
    if "workload" in data:
        raise ExperimentError(
            "this is an experiment to train: `python -m qualitygates run` takes it; `judge` takes "
            "an offline gate ([columns], [[predictions]]), a gate folder or run files"
        )
    top = Table(data, "", keys=_KEYS)
    if type(schema := top.raw("schema")) is not int or schema != SCHEMA:
        raise ExperimentError(f"schema = {schema!r:.50}; this version reads schema = {SCHEMA}")
    looks = top.wholes("looks")
    if min(looks) < MIN_SEEDS:
        raise ExperimentError(f"looks = {list(looks)}: a look needs at least {MIN_SEEDS} seeds")
    look_alpha(looks)
    columns = _columns(_table(top, "columns", ROLES))
    clusters = _table(top, "clusters", ("columns", "buckets"), default={})
    slices = _table(
        top,
        "slices",
        ("flags", "categories", "protected", "protected_margin_factor"),
        default={},
    )
    arms = _arms(_table(top, "arms", DATA_ARMS, default={}))
    if "task" in columns and not top.raw("tasks", []):
        raise ExperimentError("[columns] task is mapped; name the tasks: tasks = ['click', ...]")
    return OfflineSpec(
        name=top.text("name"),
        margins=resolve_margins(_margins(top.raw("margins"))),
        looks=looks,
        seeds=_seeds(top, looks),
        forms=_names(top, "forms", ("trained",)),
        tasks=_names(top, "tasks", ()),
        negative_sampling_rate=_share(top, "negative_sampling_rate"),
        arms=arms,
        columns=columns,
        clusters=_clusters(clusters, columns),
        buckets=clusters.whole("buckets", 4096, least=64),
        flags=slices.texts("flags"),
        categories=slices.texts("categories"),
        protected=slices.texts("protected"),
        protected_margin_factor=_above_zero(slices, "protected_margin_factor", 2.0),
        known_bad_margins=_known_bad(_table(top, "controls", ("known_bad_margins",), default={})),
        speed=read_speed_promise(_mapping(top, "speed", {"required": False})),
        acceptance=read_rules(_table(top, "acceptance", ACCEPTANCE_KEYS, default={}).data),
        recipes={
            arm: _table(top, arm, ("recipe",), default={}).text("recipe", "not named")
            for arm in ("baseline", "candidate")
        },
        predictions=_sources(top, "predictions", arms, roles=ROLES),
        curves=_sources(top, "curves", arms, roles=CURVES),
        crashed=_crashed(top, arms),
        observations=_sources(top, "observations", arms, roles=()),
        folder=folder,
    )


def _table(top: Table, key: str, keys: tuple[str, ...], *, default: Any = None) -> Table:
    data = top.raw(key) if default is None else top.raw(key, default)
    return Table(data, key, keys=keys)


def _margins(value: Any) -> Any:
    if not isinstance(value, (str, Mapping)):
        raise ExperimentError(f"margins = {value!r:.50} must be a name or a table of four numbers")
    return value


def _seeds(top: Table, looks: tuple[int, ...]) -> tuple[int, ...]:
    seeds = top.wholes("seeds", tuple(range(1, looks[-1] + 1)))
    if len(seeds) != looks[-1] or len(set(seeds)) != len(seeds):
        raise ExperimentError(
            f"seeds = {list(seeds)}; the last look needs {looks[-1]} different seeds, listed in "
            "the order in which they count"
        )
    return seeds


def _names(top: Table, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
    names = top.texts(key, default)
    for name in names:
        if not _NAME.fullmatch(name):
            raise ExperimentError(
                f"{key} = {name!r}: a name has at most 64 of A-Z a-z 0-9 . _ + - and starts with "
                "a letter or a digit"
            )
    if key == "forms" and not names:
        raise ExperimentError("forms = []; name at least one, such as 'trained'")
    return names


def _arms(table: Table) -> dict[str, str]:
    names = {table.text(arm, arm): arm for arm in DATA_ARMS}
    if len(names) != len(DATA_ARMS):
        raise ExperimentError("[arms] gives two arms one name; the data could not tell them apart")
    return names


def _columns(table: Table) -> dict[str, str]:
    columns = {role: table.text(role) for role in table.data}
    if ("logit" in columns) == ("probability" in columns):
        raise ExperimentError(
            "[columns] needs either logit or probability (a logit loses nothing in rounding)"
        )
    if "label" not in columns:
        raise ExperimentError("[columns] label is missing; it has no default")
    return columns


def _clusters(table: Table, columns: Mapping[str, str]) -> tuple[str, ...]:
    names = table.texts("columns", ("user",) if "user" in columns else ())
    if not names:
        raise ExperimentError(
            "[clusters] columns is missing: name what rows share luck by, such as the user and "
            "the day (['id'] when rows are independent)"
        )
    return names


def _share(top: Table, key: str) -> float:
    value = top.number(key, 1.0)
    if not 0 < value <= 1:
        raise top.wrong(key, "the share of the negatives that training kept, above 0, at most 1")
    return value


def _above_zero(table: Table, key: str, default: float) -> float:
    value = table.number(key, default)
    if value == 0:
        raise table.wrong(key, "above 0")
    return value


def _known_bad(table: Table) -> float:
    value = table.number("known_bad_margins", 2.0)
    least, most = KNOWN_BAD_RANGE
    if value != 0 and not least < value <= most:
        raise table.wrong(
            "known_bad_margins",
            f"above {least:g}, at most {most:g} NE margins, or 0: off, and ACCEPT is impossible",
        )
    return value


def _mapping(top: Table, key: str, default: Mapping[str, Any]) -> Mapping[str, Any]:
    value = top.raw(key, default)
    if not isinstance(value, Mapping):
        raise top.wrong(key, f"a table: [{key}]")
    return value


def _sources(
    top: Table, key: str, arms: Mapping[str, str], *, roles: tuple[str, ...]
) -> tuple[Source, ...]:
    """Entries of [[predictions]], which may set form and task too and override columns, of
    [[curves]], which name their series, and of [[observations]].
    """
    own = {"predictions": ("columns",), "curves": (*roles, "counters")}.get(key, roles)
    fixed_keys = _FIXED if key == "predictions" else ("arm", "seed")
    found = []
    for data in top.tables(key):
        table = Table(data, key, keys=("path", *fixed_keys, *own))
        columns = {
            role: table.text(role) for role in roles if key == "curves" and role in table.data
        }
        if key == "curves":
            table.text("loss")
            counters = table.raw("counters", {})
            named = Table(counters, "curves.counters", keys=tuple(counters))
            columns |= {f"counter:{name}": named.text(name) for name in named.data}
        if key == "predictions":
            override = Table(table.raw("columns", {}), f"{key}.columns", keys=roles)
            columns = {role: override.text(role) for role in override.data}
            _check_override(columns, top.raw("columns"))
        found.append(Source(table.text("path"), _fixed(table, arms), columns))
    if key == "predictions" and not found:
        raise ExperimentError("[[predictions]] is missing: it names the files to judge")
    return tuple(found)


def _check_override(columns: Mapping[str, str], shared: Mapping[str, str]) -> None:
    for role in columns:
        if role not in shared and role not in _FIXED:
            raise ExperimentError(
                f"[predictions.columns] {role}: [columns] does not name this role; an entry may "
                "only say that its files call the column otherwise"
            )


def _fixed(table: Table, arms: Mapping[str, str]) -> dict[str, Any]:
    fixed: dict[str, Any] = {}
    for key in _FIXED:
        if key not in table.data:
            continue
        fixed[key] = table.whole(key, least=0) if key == "seed" else table.text(key)
    if "arm" in fixed and fixed["arm"] not in arms:
        raise table.wrong("arm", f"one of {', '.join(arms)} (named in [arms])")
    return fixed


def _crashed(top: Table, arms: Mapping[str, str]) -> dict[tuple[str, int], str]:
    found = {}
    for data in top.tables("crashed"):
        table = Table(data, "crashed", keys=("arm", "seed", "reason"))
        fixed = _fixed(table, arms)
        if len(fixed) != 2:
            raise ExperimentError("[[crashed]] needs arm, seed and reason")
        found[arms[fixed["arm"]], fixed["seed"]] = table.text("reason")
    return found

"""Experiment: what a gate compares and promises, read strictly from TOML before anything runs."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from .acceptance import KEYS as ACCEPTANCE_KEYS
from .acceptance import read_rules
from .errors import ExperimentError, RecordError
from .records import canonical_json, content_hash
from .speed.promise import KEYS as SPEED_KEYS
from .speed.promise import SpeedPromise, read_speed_promise
from .verdict import MIN_SEEDS, look_alpha, resolve_margins

SCHEMA: Final = 1
BASELINE: Final = "bf16"
# A harm below one margin is acceptable by definition; one above ten margins proves no sensitivity.
KNOWN_BAD_RANGE: Final = (1.0, 10.0)
DEVICES: Final = ("cpu", "cuda")
_KEYS: Final[dict[str, tuple[str, ...]]] = {
    "": (
        *("schema", "name", "workload", "margins", "looks", "first_seed", "options", "train"),
        *("baseline", "candidate", "controls", "evaluate", "slices", "speed"),
        "acceptance",
    ),
    "train": ("steps", "batch_size", "processes", "device"),
    "baseline": ("recipe",),
    "candidate": ("recipe", "fault"),
    "candidate.fault": ("logit_noise",),
    "controls": ("null", "known_bad_margins"),
    "evaluate": ("negative_sampling_rate",),
    "slices": ("protected", "protected_margin_factor"),
    "speed": SPEED_KEYS,
    "acceptance": ACCEPTANCE_KEYS,
}


@dataclass(frozen=True)
class Experiment:
    """Two arms that differ in the recipe alone, with margins and looks fixed in advance.

    `steps` and `batch_size` belong to both arms, as do `processes` (that share each batch by rows)
    and the `device` they train on. `fault` is harm planted in the candidate to test
    the gate itself: {"logit_noise": sd of Gaussian noise on the logits at evaluation}.
    `known_bad_margins` is the size of the known-bad control in NE margins, 0 when it is off.
    `negative_sampling_rate` is the share of the negatives that training keeps: predictions of both
    arms are recalibrated for it before they are judged; 1 leaves them as they are.
    `acceptance` says how long an ACCEPT holds and for which versions.
    `folder` is where relative paths start; it is not content.
    """

    name: str
    workload: str
    options: Mapping[str, Any]
    steps: int
    batch_size: int
    baseline: str
    candidate: str
    fault: Mapping[str, float]
    margins: Mapping[str, Any]
    looks: tuple[int, ...]
    first_seed: int
    null_control: bool
    known_bad_margins: float
    protected: tuple[str, ...]
    protected_margin_factor: float
    speed: SpeedPromise
    negative_sampling_rate: float = 1.0
    processes: int = 1
    device: str = "cpu"
    acceptance: Mapping[str, Any] = field(default_factory=lambda: read_rules({}))
    folder: Path = field(default=Path(), compare=False)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of the last look, in the order in which they run."""
        return tuple(range(self.first_seed, self.first_seed + max(self.looks)))

    @property
    def alpha(self) -> float:
        """The one-sided level of every look."""
        return look_alpha(self.looks)

    @property
    def hash(self) -> str:
        """SHA-256 of the resolved content; the folder is left out."""
        return content_hash(self.to_dict())

    def recipe_source(self, recipe: str) -> str:
        """What `lowprec.load_recipe` takes: a shipped name, or a path seen from the experiment."""
        is_path = "/" in recipe or "\\" in recipe or recipe.endswith(".toml")
        return str(self.folder / recipe) if is_path else recipe

    def promise(self, *, created: str) -> dict[str, Any]:
        """What gate.json fixes before the first run; `created` is an ISO time."""
        content = self.to_dict()
        return {
            "schema": SCHEMA,
            "kind": "gate",
            "experiment": content,
            "experiment_hash": self.hash,
            "margins": content["margins"],
            "looks": content["looks"],
            "alpha": self.alpha,
            "seeds": list(self.seeds),
            "controls": content["controls"],
            "slices": content["slices"],
            "speed": content["speed"],
            "acceptance": content["acceptance"],
            "created": created,
        }

    def to_dict(self) -> dict[str, Any]:
        """The experiment as JSON in the shape of the TOML; `from_dict` reads it back."""
        candidate: dict[str, Any] = {"recipe": self.candidate}
        if self.fault:
            candidate["fault"] = dict(self.fault)
        train: dict[str, Any] = {"steps": self.steps, "batch_size": self.batch_size}
        if (self.processes, self.device) != (1, "cpu"):
            train |= {"processes": self.processes, "device": self.device}
        return {
            "schema": SCHEMA,
            "name": self.name,
            "workload": self.workload,
            "margins": dict(self.margins),
            "looks": list(self.looks),
            "first_seed": self.first_seed,
            "options": dict(self.options),
            "train": train,
            "baseline": {"recipe": self.baseline},
            "candidate": candidate,
            "controls": {"null": self.null_control, "known_bad_margins": self.known_bad_margins},
            "evaluate": {"negative_sampling_rate": self.negative_sampling_rate},
            "slices": {
                "protected": list(self.protected),
                "protected_margin_factor": self.protected_margin_factor,
            },
            "speed": self.speed.to_dict(),
            "acceptance": dict(self.acceptance),
        }

    @classmethod
    def from_toml(cls, path: str | Path) -> Experiment:
        """Read an experiment file; raises ExperimentError with the file, the key and the cure."""
        path = Path(path)
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ExperimentError(f"{path}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ExperimentError(f"{path}: not UTF-8 text; TOML files are UTF-8") from error
        except tomllib.TOMLDecodeError as error:
            raise ExperimentError(f"{path}: not valid TOML: {error}") from error
        return cls.from_dict(data, where=str(path), folder=path.parent)

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], *, where: str = "experiment", folder: Path = Path()
    ) -> Experiment:
        """Check and resolve data in the shape of the TOML; ExperimentErrors start with `where`."""
        try:
            return _experiment(data, folder)
        except ExperimentError as error:
            raise ExperimentError(f"{where}: {error}") from error


def _experiment(data: Mapping[str, Any], folder: Path) -> Experiment:
    top = _table({"": data}, "")
    schema = _need(top, "", "schema")
    if schema != SCHEMA or isinstance(schema, bool):
        raise ExperimentError(f"schema = {schema!r}; this version reads schema = {SCHEMA}")
    train, candidate = _table(top, "train"), _table(top, "candidate")
    controls, slices = _table(top, "controls", default={}), _table(top, "slices", default={})
    evaluate = _table(top, "evaluate", default={})
    name, workload = _text(top, "", "name"), _workload(_text(top, "", "workload"))
    return Experiment(
        name=name,
        workload=workload,
        options=_options(top),
        steps=_integer(train, "train", "steps", least=1),
        batch_size=_integer(train, "train", "batch_size", least=1),
        processes=_processes(train),
        device=_device(train),
        baseline=_baseline(top),
        candidate=_text(candidate, "candidate", "recipe"),
        fault=_fault(candidate),
        margins=resolve_margins(_need(top, "", "margins")),
        looks=_looks(_need(top, "", "looks")),
        first_seed=_integer({"first_seed": 1, **top}, "", "first_seed", least=0),
        null_control=_boolean({"null": True, **controls}, "controls", "null"),
        known_bad_margins=_known_bad({"known_bad_margins": 2.0, **controls}),
        protected=_protected(slices),
        protected_margin_factor=_positive(
            {"protected_margin_factor": 2.0, **slices}, "slices", "protected_margin_factor"
        ),
        speed=read_speed_promise(
            _table(top, "speed"), steps=train["steps"], batch_size=train["batch_size"]
        ),
        negative_sampling_rate=_share(
            {"negative_sampling_rate": 1.0, **evaluate}, "evaluate", "negative_sampling_rate"
        ),
        acceptance=read_rules(_table(top, "acceptance", default={})),
        folder=folder,
    )


def nearest(name: str, known: tuple[str, ...]) -> str:
    """ "nearest known: 'steps'; allowed: ..." for an error about an unknown name."""
    close = get_close_matches(name, known, n=1, cutoff=0.0)
    return f"nearest known: {close[0]!r}; allowed: {', '.join(known)}"


def _at(section: str, key: str) -> str:
    return f"[{section}] {key}" if section else key


def _need(table: Mapping[str, Any], section: str, key: str) -> Any:
    if key not in table:
        raise ExperimentError(f"{_at(section, key)} is missing; it has no default")
    return table[key]


def _table(
    parent: Mapping[str, Any], key: str, *, default: Mapping[str, Any] | None = None, path: str = ""
) -> Mapping[str, Any]:
    section = path or key
    if key not in parent and default is None:
        raise ExperimentError(f"[{section}] is missing; it holds {', '.join(_KEYS[section])}")
    table = parent.get(key, default)
    if not isinstance(table, Mapping):
        raise ExperimentError(f"{section} = {table!r} must be a table: [{section}]")
    for one in table:
        if one not in _KEYS[section]:
            place = f"in [{section}]" if section else "at the top"
            raise ExperimentError(f"unknown key {one!r} {place}; {nearest(one, _KEYS[section])}")
    return table


def _text(table: Mapping[str, Any], section: str, key: str) -> str:
    value = _need(table, section, key)
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ExperimentError(f"{_at(section, key)} = {value!r} must be a non-empty line of text")
    return value


def _integer(table: Mapping[str, Any], section: str, key: str, *, least: int) -> int:
    value = _need(table, section, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ExperimentError(
            f"{_at(section, key)} = {value!r} must be a whole number, {least} or more"
        )
    return value


def _processes(train: Mapping[str, Any]) -> int:
    processes = _integer({"processes": 1, **train}, "train", "processes", least=1)
    if train["batch_size"] % processes:
        raise ExperimentError(
            f"[train] processes = {processes} cannot share batch_size = {train['batch_size']} "
            "in equal parts; make the batch a multiple of it"
        )
    return processes


def _device(train: Mapping[str, Any]) -> str:
    device = train.get("device", "cpu")
    if device not in DEVICES:
        raise ExperimentError(f"[train] device = {device!r}; allowed: {', '.join(DEVICES)}")
    return str(device)


def _boolean(table: Mapping[str, Any], section: str, key: str) -> bool:
    value = _need(table, section, key)
    if not isinstance(value, bool):
        raise ExperimentError(f"{_at(section, key)} = {value!r} must be true or false")
    return value


def _number(table: Mapping[str, Any], section: str, key: str) -> float:
    value = _need(table, section, key)
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        # Compared, not converted: a float cannot hold every whole number that TOML can.
        or not 0 <= value < 1e300
    ):
        raise ExperimentError(
            f"{_at(section, key)} = {value!r} must be a finite number, not below 0"
        )
    return float(value)


def _positive(table: Mapping[str, Any], section: str, key: str) -> float:
    value = _number(table, section, key)
    if value == 0:
        raise ExperimentError(f"{_at(section, key)} = 0 must be above 0")
    return value


def _share(table: Mapping[str, Any], section: str, key: str) -> float:
    value = _positive(table, section, key)
    if value > 1:
        raise ExperimentError(f"{_at(section, key)} = {value:g} must be above 0 and at most 1")
    return value


def _workload(text: str) -> str:
    file, colon, function = text.rpartition(":")
    if colon and not (file.endswith(".py") and function.isidentifier()):
        raise ExperimentError(
            f"workload = {text!r}; allowed: the name of a shipped workload, or 'file.py:function'"
        )
    return text


def _options(top: Mapping[str, Any]) -> dict[str, Any]:
    options = top.get("options", {})
    if not isinstance(options, Mapping):
        raise ExperimentError(f"options = {options!r} must be a table: [options]")
    for key, value in options.items():
        try:
            canonical_json(value)
        except RecordError as error:
            raise ExperimentError(
                f"[options] {key}: allowed are text, finite numbers, true/false, lists and tables; "
                f"write a date as text ({error})"
            ) from error
    return dict(options)


def _baseline(top: Mapping[str, Any]) -> str:
    recipe = _text(_table(top, "baseline"), "baseline", "recipe")
    if recipe != BASELINE:
        raise ExperimentError(
            f"[baseline] recipe = {recipe!r}; the baseline is always {BASELINE!r}: small losses "
            "add up unseen when each recipe is compared with the one accepted before it"
        )
    return recipe


def _fault(candidate: Mapping[str, Any]) -> dict[str, float]:
    fault = _table(candidate, "fault", default={}, path="candidate.fault")
    return {key: _positive(fault, "candidate.fault", key) for key in fault}


def _looks(value: Any) -> tuple[int, ...]:
    whole = isinstance(value, (list, tuple)) and all(type(one) is int for one in value)
    if not whole or not value:
        raise ExperimentError(f"looks = {value!r} must be a list of seed counts, such as [3, 5, 8]")
    if min(value) < MIN_SEEDS:
        raise ExperimentError(
            f"looks = {value!r}: a look needs at least {MIN_SEEDS} seeds; fewer accept too often"
        )
    look_alpha(value)
    return tuple(value)


def _known_bad(controls: Mapping[str, Any]) -> float:
    value = _number(controls, "controls", "known_bad_margins")
    least, most = KNOWN_BAD_RANGE
    if value != 0 and not least < value <= most:
        raise ExperimentError(
            f"[controls] known_bad_margins = {value:g}; allowed: above {least:g}, at most {most:g} "
            "NE margins (2 is usual), or 0: the control is off, and ACCEPT is impossible"
        )
    return value


def _protected(slices: Mapping[str, Any]) -> tuple[str, ...]:
    value = slices.get("protected", [])
    texts = isinstance(value, (list, tuple)) and all(isinstance(one, str) and one for one in value)
    if not texts or len(set(value)) != len(value):
        raise ExperimentError(
            f"[slices] protected = {value!r} must be a list of different slice names, "
            "such as ['origin=JFK']"
        )
    return tuple(value)

"""What a quality gate wrote when it accepted a recipe, and whether it covers a training."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from lowprec.errors import AcceptanceError, LowprecError
from lowprec.identity import Fingerprint, fingerprint, unwrapped
from lowprec.planning import Plan
from lowprec.version import __version__

SCHEMA: Final = 1
VERSION_RULES: Final = ("exact", "minor", "any")
_LARGEST: Final = 1 << 28  # bytes; a model of a million parameter tensors stays below
_LINES: Final = 8
# What reading JSON of another shape than ours raises.
_DAMAGE: Final = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
_NAMES: Final = ("lowprec", "torch", "python")


@dataclass(frozen=True)
class Acceptance:
    """A recipe, a plan and a model that a gate accepted, by margins fixed in advance.

    None for a hash means that the gate does not know it, which `check` refuses. `plan` and
    `model` are kept whole where the gate trained itself, so that a difference can be named.
    """

    source: str
    gate_hash: str
    verdict_hash: str
    recipe_hash: str | None
    plan_hash: str | None
    model_hash: str | None
    plan: Plan | None
    model: Fingerprint | None
    margins: Mapping[str, Any]
    versions: Mapping[str, str | None]
    version_rule: str
    any_hardware: bool
    created: datetime
    expires: datetime | None

    def check(self, model: torch.nn.Module, plan: Plan) -> None:
        """Raise AcceptanceError with everything in which the plan, model or versions differ."""
        if self.expires is not None and datetime.now(UTC) >= self.expires:
            self._refuse(
                f"it expired on {self.expires:%Y-%m-%d} (the gate began on "
                f"{self.created:%Y-%m-%d}); run the gate again"
            )
        unknown = [
            name for name in ("recipe", "plan", "model") if getattr(self, f"{name}_hash") is None
        ]
        if unknown:
            self._refuse(
                f"{' and '.join(unknown)} unknown: the gate judged predictions without knowing "
                "what made them; name the hashes in the gate's TOML, or gate with `run`"
            )
        differing = [
            *self._recipe_differences(plan),
            *self._plan_differences(plan),
            *self._model_differences(model),
            *self._version_differences(),
        ]
        if differing:
            self._refuse("; ".join(differing) + ". The model was not touched")

    def _refuse(self, why: str) -> NoReturn:
        raise AcceptanceError(f"{self.source} does not cover this training: {why}")

    def _recipe_differences(self, plan: Plan) -> list[str]:
        if plan.recipe_hash == self.recipe_hash:
            return []
        accepted = "" if self.plan is None else f" ({self.plan.recipe})"
        return [
            f"recipe: accepted {str(self.recipe_hash)[:12]}{accepted}, "
            f"here {plan.recipe_hash[:12]} ({plan.recipe})"
        ]

    def _plan_differences(self, plan: Plan) -> list[str]:
        if plan.hash == self.plan_hash:
            return []
        if self.any_hardware and self.plan is not None and _same_precisions(self.plan, plan):
            return []
        lines = [] if self.plan is None else list(self.plan.diff(plan))
        if self.plan is not None and self.plan.seed != plan.seed:
            lines.append(f"seed: {self.plan.seed} -> {plan.seed}")
        named = f": {', '.join(lines[:_LINES])}" if lines else ""
        more = f" and {len(lines) - _LINES} more" if len(lines) > _LINES else ""
        return [f"plan: accepted {str(self.plan_hash)[:12]}, here {plan.hash[:12]}{named}{more}"]

    def _model_differences(self, model: torch.nn.Module) -> list[str]:
        inner = unwrapped(model)
        if inner is not model:
            return [
                f"model: it is wrapped in {type(model).__name__}, which renames every layer; plan "
                "and apply the model inside, then wrap it"
            ]
        here = fingerprint(model)
        if here.hash == self.model_hash:
            return []
        lines = [] if self.model is None else self.model.differences(here)
        named = f": {', '.join(lines)}" if lines else ""
        return [f"model: accepted {str(self.model_hash)[:12]}, here {here.hash[:12]}{named}"]

    def _version_differences(self) -> list[str]:
        if self.version_rule == "any":
            return []
        here = current_versions()
        return [
            f"{name}: accepted {self.versions.get(name) or 'an unknown version'}, here {version} "
            f"(rule: {self.version_rule})"
            for name, version in here.items()
            if _part(self.versions.get(name), self.version_rule)
            != _part(version, self.version_rule)
        ]


def _same_precisions(accepted: Plan, plan: Plan) -> bool:
    """True when two plans differ in hardware and backends alone."""
    first, second = (
        replace(
            either,
            hardware=accepted.hardware,
            layers=tuple(
                replace(one, stages=tuple(replace(stage, backends={}) for stage in one.stages))
                for one in either.layers
            ),
        ).hash
        for either in (accepted, plan)
    )
    return first == second


def current_versions() -> dict[str, str]:
    """The versions of lowprec, torch and Python in this process."""
    found = (__version__, torch.__version__, platform.python_version())
    return {name: str(one) for name, one in zip(_NAMES, found, strict=True)}


def _part(version: str | None, rule: str) -> str | None:
    if version is None or rule == "exact":
        return version
    return ".".join(version.split(".")[:2])


def load_acceptance(path: str | Path) -> Acceptance:
    """Read acceptance.json; raises AcceptanceError when it is absent, damaged or edited."""
    if not isinstance(path, (str, Path)):
        raise AcceptanceError(
            f"require takes the path of an acceptance.json, or what load_acceptance read, not "
            f"{type(path).__qualname__}"
        )
    path = Path(path)
    record = _read(path)
    try:
        return _acceptance(record, source=str(path))
    except (*_DAMAGE, LowprecError) as error:
        raise AcceptanceError(f"{path}: not an acceptance of this version: {error!r}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            text = stream.read(_LARGEST + 1)
        if len(text) > _LARGEST:
            raise ValueError(f"it is larger than {_LARGEST} bytes")
        record = json.loads(text.decode(), parse_constant=_no_constant)
        if not isinstance(record, dict):
            raise ValueError(f"it holds a {type(record).__name__}")
        if (record.get("schema"), record.get("kind")) != (SCHEMA, "acceptance"):
            found = f"schema {record.get('schema')!r:.40}, kind {record.get('kind')!r:.40}"
            raise ValueError(f"{found}; this version reads schema {SCHEMA}, kind 'acceptance'")
        content = {name: value for name, value in record.items() if name != "checksum"}
        sealed = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except OSError as error:
        raise AcceptanceError(
            f"{path}: cannot be read: {error.strerror or error}; a gate writes it when its verdict "
            "is ACCEPT, and removes it when a later verdict is not"
        ) from error
    except (ValueError, RecursionError) as error:
        raise AcceptanceError(f"{path}: not an acceptance record: {error}") from error
    if hashlib.sha256(sealed.encode()).hexdigest() != record.get("checksum"):
        raise AcceptanceError(
            f"{path}: its checksum does not fit its content: it was damaged or edited after the "
            "gate wrote it; `python -m qualitygates report DIR` writes it anew from the records"
        )
    return record


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _acceptance(record: Mapping[str, Any], *, source: str) -> Acceptance:
    plan, model = record["plan"], record["model"]
    stored = None if plan is None else Plan.from_json(plan)
    known = None if model is None else Fingerprint.from_data(model)
    hashes = {name: record[name] for name in ("recipe_hash", "plan_hash", "model_hash")}
    found = (
        None if stored is None else stored.recipe_hash,
        None if stored is None else stored.hash,
        None if known is None else known.hash,
    )
    for (name, said), inside in zip(hashes.items(), found, strict=True):
        if said is not None and not isinstance(said, str):
            raise TypeError(f"{name} is {said!r}")
        if inside is not None and inside != said:
            raise ValueError(f"{name} is not that of the stored one")
    rule, days = record["expiry"]["versions"], record["expiry"]["days"]
    if rule not in VERSION_RULES:
        raise ValueError(f"versions = {rule!r}; allowed: {', '.join(VERSION_RULES)}")
    if record["hardware"] not in ("same", "any"):
        raise ValueError(f"hardware = {record['hardware']!r}; allowed: same, any")
    created, expires = _time(record["created"]), record["expiry"]["at"]
    if (expires is None) != (days == 0):
        raise ValueError(f"expires at {expires!r} after {days!r} days")
    return Acceptance(
        source=source,
        gate_hash=str(record["gate_hash"]),
        verdict_hash=str(record["verdict_hash"]),
        **hashes,
        plan=stored,
        model=known,
        margins=dict(record["margins"]),
        versions={name: record["versions"][name] for name in _NAMES},
        version_rule=rule,
        any_hardware=record["hardware"] == "any",
        created=created,
        expires=None if expires is None else _time(expires),
    )


def _time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError(f"{text!r} is a time without a zone")
    return time

"""Recipes: pure data that says which layers run in which precision, and why; read strictly."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lowprec.attention_policy import (
    ATTENTION_PRODUCTS,
    AttentionPolicy,
    parse_attention_product,
)
from lowprec.errors import LowprecError, RecipeError
from lowprec.formats import nearest_names
from lowprec.policy import PRODUCTS, LinearPolicy, parse_product

SCHEMA: Final = 1
KINDS: Final = ("linear", "attention")
EMBEDDINGS: Final = ("bf16", "fp8", "mx4", "mxfp8", "mxfp4")
REDUCE: Final = ("fp32", "bf16")
_RECIPE_KEYS: Final = ("schema", "why", "seed", "transport", "rule")
_TRANSPORT_KEYS: Final = ("embeddings", "reduce", "why")
_RULE_KEYS: Final = ("match", "kind", "why", "from_step", "last_fraction")
_PRODUCTS: Final = {"linear": PRODUCTS, "attention": ATTENTION_PRODUCTS}
_POSITION: Final = re.compile(r"(first|last):(.*)", re.DOTALL)
_COUNT: Final = re.compile(r"[1-9][0-9]{0,5}|[1-9][0-9]?%")
_LAST_STEP: Final = 2**32 - 1
_SHOWN: Final = 80


@dataclass(frozen=True)
class Rule:
    """One rule: a pattern on full layer names (or a position), a kind, a policy, and why.

    `match` is a shell-style glob on the full dotted name, or `first:N` / `last:N`: the first or
    last N layers of that kind in the model's order (`last:15%`: that share of them, rounded up).
    A scheduled rule holds from step `from_step` on, or for the `last_fraction` of all steps.
    """

    match: str
    kind: str
    policy: LinearPolicy | AttentionPolicy
    why: str
    from_step: int = 0
    last_fraction: float | None = None

    @property
    def linear(self) -> LinearPolicy:
        """The policy of a rule of kind linear."""
        assert isinstance(self.policy, LinearPolicy)
        return self.policy

    @property
    def attention(self) -> AttentionPolicy:
        """The policy of a rule of kind attention."""
        assert isinstance(self.policy, AttentionPolicy)
        return self.policy

    @property
    def scheduled(self) -> bool:
        """True when the rule does not hold from the first step on."""
        return self.from_step > 0 or self.last_fraction is not None

    def position(self, layers: int) -> tuple[str, int] | None:
        """("first" | "last", N) of a position rule among `layers` layers, None for a pattern."""
        found = _POSITION.fullmatch(self.match)
        if not found:
            return None
        count = found[2]
        share = count.endswith("%")
        return found[1], -(-layers * int(count[:-1]) // 100) if share else int(count)

    def start(self, steps: int | None) -> int:
        """The step from which the rule holds, of a training with `steps` steps in all.

        Raises RecipeError when the rule needs that number and it is not known.
        """
        if self.last_fraction is None:
            return self.from_step
        if steps is None:
            raise RecipeError(
                f"the rule for {self.match!r} holds for the last {self.last_fraction:g} of "
                "training: say how many steps there are, as in plan(model, recipe, steps=10000)"
            )
        return steps - int(steps * self.last_fraction)


@dataclass(frozen=True)
class Transport:
    """In which precision things cross the network; None leaves it to the job.

    embeddings: what the all-to-all of embeddings carries, one of EMBEDDINGS; `fp8` and `mx4` are
    FBGEMM's, `mxfp8` and `mxfp4` this library's casts. reduce: in what gradients are summed over
    ranks, one of REDUCE.
    """

    embeddings: str | None = None
    reduce: str | None = None
    why: str = ""


@dataclass(frozen=True)
class Recipe:
    """An ordered list of rules; the last one that matches a layer decides."""

    name: str
    why: str
    rules: tuple[Rule, ...]
    seed: int = 0
    transport: Transport = Transport()

    @property
    def hash(self) -> str:
        """SHA-256 of the decisions: rules in order, without the name and the prose.

        The seed counts where random bits are drawn, schedule and transport where there is one.
        """
        decisions: list[Any] = []
        for rule in self.rules:
            products = (str(product) for _, product in rule.policy.items())
            schedule = [rule.from_step, rule.last_fraction] if rule.scheduled else []
            decisions.append([rule.match, rule.kind, *products, *schedule])
        if any(rule.policy.random for rule in self.rules):
            decisions.append(self.seed)
        sent = self.transport
        if sent != Transport():
            decisions.append({"embeddings": sent.embeddings, "reduce": sent.reduce})
        return hashlib.sha256(json.dumps(decisions).encode()).hexdigest()

    @property
    def quantizes(self) -> bool:
        """True when at least one rule quantizes a product."""
        return any(rule.policy.quantizes for rule in self.rules)

    def to_toml(self) -> str:
        """The recipe as a TOML file that `load_recipe` reads back to an equal recipe."""
        lines = [f"schema = {SCHEMA}", f"why = {_quote(self.why)}"]
        if self.seed:
            lines.append(f"seed = {self.seed}")
        if self.transport != Transport():
            lines += ["", "[transport]"]
            for key in ("embeddings", "reduce"):
                if value := getattr(self.transport, key):
                    lines.append(f'{key} = "{value}"')
            lines.append(f"why = {_quote(self.transport.why)}")
        for rule in self.rules:
            lines += ["", "[[rule]]", f"match = {_quote(rule.match)}", f'kind = "{rule.kind}"']
            lines += [f'{name} = "{product}"' for name, product in rule.policy.items()]
            if rule.from_step:
                lines.append(f"from_step = {rule.from_step}")
            if rule.last_fraction is not None:
                lines.append(f"last_fraction = {rule.last_fraction!r}")
            lines.append(f"why = {_quote(rule.why)}")
        return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _shipped_folder() -> Path:
    inside = Path(__file__).parent / "recipes"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "recipes"


def shipped_recipes() -> tuple[str, ...]:
    """Names of the recipes that come with lowprec."""
    return tuple(sorted(path.stem for path in _shipped_folder().glob("*.toml")))


def load_recipe(name_or_path: str | Path) -> Recipe:
    """Read a recipe: a bare name is a shipped one, anything with a slash or `.toml` is a file.

    Raises RecipeError with the file, the rule, what is wrong and the nearest known name.
    """
    text = os.fspath(name_or_path) if isinstance(name_or_path, os.PathLike) else name_or_path
    if not isinstance(text, str):
        raise RecipeError(
            "load_recipe takes the name of a shipped recipe, such as 'mxfp8', or the path of a "
            f"TOML file, not {_shown(text)}"
        )
    if "/" not in text and "\\" not in text and not text.endswith(".toml"):
        if text not in shipped_recipes():
            raise RecipeError(
                f"no shipped recipe is called {text!r}; {nearest_names(text, shipped_recipes())} "
                "(a file of your own needs a slash or the ending .toml)"
            )
        path = _shipped_folder() / f"{text}.toml"
    else:
        path = Path(text)
    try:
        return parse_recipe(_read(path), name=path.stem)
    except RecipeError as error:
        raise RecipeError(f"recipe {_path_text(path)}: {error}") from error


def _read(path: Path) -> str:
    try:
        # Some editors put a byte order mark in front of UTF-8.
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"is not UTF-8 text (byte {error.start})") from error
    except ValueError as error:
        raise RecipeError(f"is not the path of a file: {error}") from error


def _path_text(path: Path) -> str:
    return str(path) if str(path).isprintable() else repr(str(path))


def parse_recipe(text: str, *, name: str) -> Recipe:
    """Read a recipe from TOML text; raises RecipeError that names the rule and the key."""
    try:
        data = tomllib.loads(text)
    except ValueError as error:
        # Also an integer of thousands of digits, which tomllib lets through to int().
        raise RecipeError(f"is not TOML: {error}") from error
    except RecursionError as error:
        raise RecipeError("is nested too deeply; a recipe is a flat list of [[rule]]") from error
    _check_keys(data, _RECIPE_KEYS)
    schema = data.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        raise RecipeError(f"schema is {_shown(schema)}; this version reads schema {SCHEMA}")
    rules = data.get("rule")
    if not isinstance(rules, list) or not rules:
        raise RecipeError("has no [[rule]]; a recipe needs at least one")
    return Recipe(
        name=name,
        why=_text(data, "why"),
        rules=tuple(_rules(rules)),
        seed=_whole(data, "seed", least=0, most=2**64 - 1),
        transport=_transport(data["transport"]) if "transport" in data else Transport(),
    )


def _transport(data: Any) -> Transport:
    try:
        if not isinstance(data, dict):
            raise RecipeError("is not a table; write it as [transport]")
        _check_keys(data, _TRANSPORT_KEYS)
        if data.keys() <= {"why"}:
            raise RecipeError("decides nothing; give embeddings, reduce or both")
        for key, known in (("embeddings", EMBEDDINGS), ("reduce", REDUCE)):
            if key in data and _text(data, key) not in known:
                names = nearest_names(data[key], known)
                raise RecipeError(f"unknown {key} {_shown(data[key])}; {names}")
        return Transport(data.get("embeddings"), data.get("reduce"), _text(data, "why"))
    except RecipeError as error:
        raise RecipeError(f"transport: {error}") from error


def _rules(rules: list[Any]) -> Iterator[Rule]:
    for number, data in enumerate(rules, start=1):
        where = f"rule {number}"
        if isinstance(data, dict) and isinstance(data.get("match"), str):
            where += f" (match = {_shown(data['match'])})"
        try:
            yield _rule(data)
        except LowprecError as error:
            raise RecipeError(f"{where}: {error}") from error


def _rule(data: Any) -> Rule:
    if not isinstance(data, dict):
        raise RecipeError("is not a table; write it as [[rule]]")
    kind = data.get("kind", "linear")
    if isinstance(kind, str) and kind.strip() and kind not in KINDS:
        raise RecipeError(f"unknown kind {kind!r}; {nearest_names(kind, KINDS)}")
    products = _PRODUCTS[kind] if isinstance(kind, str) and kind in KINDS else PRODUCTS
    _check_keys(data, (*_RULE_KEYS, *products))
    match, kind, why = (_text(data, key) for key in ("match", "kind", "why"))
    position = _POSITION.fullmatch(match)
    if position and not _COUNT.fullmatch(position[2]):
        raise RecipeError(
            f"position {_shown(match)} needs a count of at least 1 and at most 999999 in the "
            "digits 0 to 9, as in 'first:2', or a share from 1% to 99%, as in 'last:15%'"
        )
    policy: type[LinearPolicy] | type[AttentionPolicy]
    policy = AttentionPolicy if kind == "attention" else LinearPolicy
    parsed = {key: _product(data, key, kind) for key in products}
    if "from_step" in data and "last_fraction" in data:
        raise RecipeError("has both from_step and last_fraction; a schedule has one start")
    return Rule(
        match=match,
        kind=kind,
        policy=policy(**parsed),
        why=why,
        from_step=_whole(data, "from_step", least=1, most=_LAST_STEP) if "from_step" in data else 0,
        last_fraction=_fraction(data, "last_fraction"),
    )


def _whole(data: Mapping[str, Any], key: str, *, least: int, most: int) -> int:
    value = data.get(key, 0)
    if key in data and (type(value) is not int or not least <= value <= most):
        raise RecipeError(
            f"{key} must be a whole number from {least} to {most}, not {_shown(value)}"
        )
    return int(value)


def _fraction(data: Mapping[str, Any], key: str) -> float | None:
    value = data.get(key)
    if value is not None and (type(value) is not float or not 0 < value < 1):
        raise RecipeError(f"{key} must be a number between 0.0 and 1.0, not {_shown(value)}")
    return value


def _product(data: Mapping[str, Any], key: str, kind: str) -> Any:
    try:
        text = _text(data, key)
        return parse_attention_product(text, key) if kind == "attention" else parse_product(text)
    except RecipeError:
        raise
    except LowprecError as error:
        raise RecipeError(f"{key}: {error}") from error


def _text(data: Mapping[str, Any], key: str) -> str:
    value = data.get(key)
    if value is None:
        raise RecipeError(f"key {key!r} is missing")
    if not isinstance(value, str) or not value.strip():
        raise RecipeError(f"{key} must be a non-empty string, not {_shown(value)}")
    return value


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits has no decimal text
        return f"this {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _check_keys(data: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in data:
        if key not in known:
            raise RecipeError(f"unknown key {key!r}; {nearest_names(key, known)}")

"""The files that an offline gate names: found, hashed, and what each run was made from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

from ..errors import DataError, ExperimentError
from .spec import OfflineSpec, Source

_BLOCK: Final = 1 << 20
_WILD: Final = ("*", "?", "[")


@dataclass(frozen=True)
class Input:
    """One file (or folder of event files) of one entry, and the SHA-256 of its content.

    `label` is its path as the TOML writes it; `stamp` tells whether it was written to since.
    """

    kind: str
    path: Path
    label: str
    fixed: Mapping[str, Any]
    columns: Mapping[str, str]
    sha256: str
    stamp: tuple[tuple[str, int, int], ...]

    def described(self) -> dict[str, Any]:
        """What a run record keeps of it."""
        return {
            "kind": self.kind,
            "path": self.label,
            "fixed": dict(self.fixed),
            "columns": dict(self.columns),
            "sha256": self.sha256,
        }

    def run(self, spec: OfflineSpec) -> tuple[str, int]:
        """The arm and seed of a file that belongs to one run; raises DataError without them."""
        missing = [key for key in ("arm", "seed") if key not in self.fixed]
        if missing:
            raise DataError(
                f"{self.label}: its [[{self.kind}]] entry does not say the {missing[0]}; give "
                "arm and seed, or write {arm} and {seed} into the path"
            )
        return spec.arms[self.fixed["arm"]], self.fixed["seed"]

    def check_unchanged(self) -> None:
        """Raise DataError when the file was written to after it was hashed."""
        if _stamp(self.path) != self.stamp:
            raise DataError(
                f"{self.label}: was written to while it was read; judge when it is done"
            )


def find_inputs(spec: OfflineSpec) -> list[Input]:
    """Every file of every entry, in their order; raises DataError for an entry without files."""
    found: list[Input] = []
    hashes: dict[Path, str] = {}
    kinds = {
        "predictions": spec.predictions,
        "curves": spec.curves,
        "observations": spec.observations,
    }
    for kind, sources in kinds.items():
        for source in sources:
            files = list(_files(spec, source))
            if not files:
                raise DataError(f"[[{kind}]] path = {source.path!r}: no such file")
            for path, label, fixed in files:
                if path.is_dir() and kind != "curves":
                    raise DataError(f"{label}: is a folder; name its files, as in '{label}/*'")
                stamp = _stamp(path)
                if path not in hashes:
                    hashes[path] = _hash(path, label)
                merged = {**spec.columns, **source.columns} if kind == "predictions" else None
                columns = source.columns if merged is None else merged
                found.append(Input(kind, path, label, fixed, columns, hashes[path], stamp))
    return found


def check_inputs(promised: Mapping[str, str], inputs: Sequence[Input], *, gate: Path) -> None:
    """Raise ExperimentError when a file that was judged has changed or is gone; new ones may come
    with further seeds.
    """
    now = {one.label: one.sha256 for one in inputs}
    for label, sha256 in promised.items():
        if now.get(label) != sha256:
            what = "has other content now" if label in now else "is gone"
            raise ExperimentError(
                f"{label} {what}; {gate} promises to judge it as it was (SHA-256 {sha256[:16]}...)."
                " Changed predictions are another gate: give it its own folder with --out. Files "
                "of further seeds may be added"
            )


def _files(spec: OfflineSpec, source: Source) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    values: dict[str, Sequence[Any]] = {
        "arm": list(spec.arms),
        "seed": spec.seeds,
        "form": spec.forms,
        "task": spec.tasks,
    }
    used = [name for name in values if f"{{{name}}}" in source.path]
    for name in used:
        if name in source.fixed:
            raise DataError(f"{source.path}: {name} is in the path and in the entry; say it once")
    for combination in product(*(values[name] for name in used)):
        label = source.path
        for name, value in zip(used, combination, strict=True):
            label = label.replace(f"{{{name}}}", str(value))
        fixed = {**source.fixed, **dict(zip(used, combination, strict=True))}
        if any(sign in label for sign in _WILD) and not (spec.folder / label).exists():
            yield from ((path, shown, fixed) for path, shown in _globbed(spec.folder, label))
        elif (spec.folder / label).exists():
            yield spec.folder / label, label, fixed


def _globbed(folder: Path, pattern: str) -> Iterator[tuple[Path, str]]:
    anchor = Path(pattern).anchor
    root = Path(anchor) if anchor else folder
    try:
        paths = sorted(root.glob(pattern[len(anchor) :]))
    except (ValueError, NotImplementedError) as error:
        raise DataError(f"path = {pattern!r} is not a usable pattern: {error}") from error
    for path in paths:
        shown = path if anchor else path.relative_to(folder)
        yield path, shown.as_posix()


def _members(path: Path) -> list[Path]:
    """A file itself, or the event files of a folder."""
    if path.is_dir():
        return sorted(one for one in path.iterdir() if "tfevents" in one.name)
    return [path]


def _stamp(path: Path) -> tuple[tuple[str, int, int], ...]:
    try:
        stats = [(one.name, one.stat()) for one in _members(path)]
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _hash(path: Path, label: str) -> str:
    digest = hashlib.sha256()
    for one in _members(path):
        if not one.is_file():
            raise DataError(f"{label}: is not a regular file")
        try:
            with one.open("rb") as stream:
                if path.is_dir():
                    digest.update(one.name.encode(errors="surrogateescape") + b"\0")
                while block := stream.read(_BLOCK):
                    digest.update(block)
        except OSError as error:
            raise DataError(f"{label}: cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()

"""fingerprint: what a model is, without its weights' values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from lowprec.nn import REPLACEMENTS

_SHOWN = 5
_KINDS = ("modules", "parameters")
_THEIRS: dict[type, type] = {ours: theirs for theirs, ours in REPLACEMENTS.items()}
# Wrappers around a whole model, and the name under which each keeps it.
_WRAPPERS = ((nn.parallel.DistributedDataParallel, "module"), (nn.DataParallel, "module"))


@dataclass(frozen=True)
class Fingerprint:
    """Full names of modules with their types, and of parameters with dtype and shape.

    `modules` maps a name to a class name ("torch.Linear", or the bare name of any other class:
    the file a class lies in is no property of the model). `parameters` maps a name to
    "float32 [64, 32]", or to "is NAME" for a parameter registered again under another name.
    """

    modules: Mapping[str, str]
    parameters: Mapping[str, str]

    @property
    def hash(self) -> str:
        """SHA-256 over both tables in the model's order."""
        tables = [list(self.modules.items()), list(self.parameters.items())]
        return hashlib.sha256(json.dumps(tables).encode()).hexdigest()

    def to_data(self) -> dict[str, Any]:
        """The fingerprint as JSON data that `from_data` reads back to an equal one."""
        tables = {kind: [list(one) for one in getattr(self, kind).items()] for kind in _KINDS}
        return {"hash": self.hash, **tables}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Fingerprint:
        """Read `to_data`; raises KeyError, TypeError or ValueError on damage."""
        tables = [{str(name): str(text) for name, text in data[kind]} for kind in _KINDS]
        found = cls(*tables)
        if found.hash != data["hash"]:
            raise ValueError("the hash of the model's fingerprint does not fit its tables")
        return found

    def differences(self, other: Fingerprint) -> list[str]:
        """What `other` has instead, a line each, the first few of each kind; empty when equal."""
        lines = []
        for kind in _KINDS:
            mine, theirs = getattr(self, kind), getattr(other, kind)
            changed = [
                f"{kind[:-1]} {name or '(model)'!r}: {mine.get(name, 'absent')} -> "
                f"{theirs.get(name, 'absent')}"
                for name in {**mine, **theirs}
                if mine.get(name) != theirs.get(name)
            ]
            if not changed and list(mine) != list(theirs):
                changed = [f"the {kind} come in another order"]
            lines += changed[:_SHOWN]
            if len(changed) > _SHOWN:
                lines.append(f"and {len(changed) - _SHOWN} more {kind}")
        return lines


def fingerprint(model: nn.Module) -> Fingerprint:
    """Names and types of all modules, names, shapes and dtypes of all parameters; never a value.

    Equal before `apply`, after it and after `restore`, on the meta device, and on rank 0 and 7. A
    whole model inside DistributedDataParallel, DataParallel or torch.compile counts as the model
    inside. Buffers, hooks, devices and requires_grad are left out.
    """
    model = unwrapped(model)
    return Fingerprint(
        modules={name: _type(module) for name, module in model.named_modules()},
        parameters=dict(_parameters(model)),
    )


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel, DataParallel and torch.compile, or itself."""
    for kind, name in _WRAPPERS:
        if isinstance(model, kind):
            return unwrapped(getattr(model, name))
    # The class that torch.compile returns lies in a module that takes a second to import.
    inner = model._modules.get("_orig_mod")
    return model if inner is None else unwrapped(inner)


def _type(module: nn.Module) -> str:
    kind: type = type(module)
    if module.__dict__.get("lowprec_applied"):
        kind = _THEIRS.get(type(module), kind)
    package = kind.__module__.partition(".")[0]
    return f"{package}.{kind.__name__}" if package in ("torch", "lowprec") else kind.__name__


def _parameters(model: nn.Module) -> Iterator[tuple[str, str]]:
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            yield name, f"is {first[id(parameter)]}"
            continue
        first[id(parameter)] = name
        dtype = str(parameter.dtype).removeprefix("torch.")
        lazy = isinstance(parameter, UninitializedParameter)
        yield name, f"{dtype} of unknown shape" if lazy else f"{dtype} {_shape(parameter)}"


def _shape(parameter: torch.Tensor) -> list[int]:
    return [int(size) for size in parameter.shape]

"""apply and restore: layers change class in place, and nothing else changes."""

from __future__ import annotations

from typing import Any

import torch

from lowprec.coverage import left_alone_because
from lowprec.errors import PlanError
from lowprec.nn import REPLACEMENTS, Linear
from lowprec.planning import Plan


def apply(model: torch.nn.Module, plan: Plan) -> torch.nn.Module:
    """Turn every layer that `plan` covers into ours, in place, and return the same model.

    The module objects stay the same: Parameters, ties, hooks, references, train/eval mode and
    state_dict are untouched. Everything is checked before anything is changed. Raises PlanError
    when the model is not the one that the plan was made for, or is already converted.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    covered = []
    for layer in plan.layers:
        if not layer.converted:
            continue
        module = modules.get(layer.name)
        if module is None:
            raise PlanError(f"the plan names layer {layer.name!r}, which this model does not have")
        if isinstance(module, Linear):
            raise PlanError(f"layer {layer.name!r} is already converted; lowprec.restore(model)")
        if not isinstance(module, torch.nn.Linear):
            kind = type(module).__qualname__
            raise PlanError(f"layer {layer.name!r} is a {kind} now, not an nn.Linear")
        reason = left_alone_because(module, parent=_parent(modules, layer.name))
        if reason:
            raise PlanError(f"layer {layer.name!r} can no longer be converted: {reason}")
        shape = (module.out_features, module.in_features)
        if shape != layer.shape:
            raise PlanError(
                f"layer {layer.name!r} is {shape[0]} x {shape[1]} (N x K), "
                f"the plan was made for {layer.shape[0]} x {layer.shape[1]}"
            )
        covered.append((module, layer))
    for module, layer in covered:
        ours: Any = REPLACEMENTS[type(module)]
        module.__class__ = ours
        ours.install(module, layer.policy, layer.backends)
    return model


def _parent(modules: dict[str, torch.nn.Module], name: str) -> torch.nn.Module:
    return modules[name.rpartition(".")[0]] if name else modules[""]


def restore(model: torch.nn.Module) -> torch.nn.Module:
    """Turn every wrapped layer back into its torch class, in place, and return the same model."""
    originals: dict[Any, Any] = {ours: theirs for theirs, ours in REPLACEMENTS.items()}
    for module in model.modules():
        if isinstance(module, Linear):
            module.uninstall()
            module.__class__ = originals[Linear]
    return model

"""apply and restore: layers change class in place, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lowprec.acceptance import Acceptance, load_acceptance
from lowprec.attention_conversion import (
    checked_attentions,
    convert_attention,
    restore_attentions,
)
from lowprec.coverage import left_alone_because, linear_layers
from lowprec.errors import PlanError
from lowprec.layer_plan import LayerPlan
from lowprec.nn import REPLACEMENTS, Linear, Products
from lowprec.nn import main_grad as gradients
from lowprec.planning import Plan


def apply(
    model: torch.nn.Module,
    plan: Plan,
    *,
    require: str | Path | Acceptance | None = None,
    main_grad: bool | None = None,
) -> torch.nn.Module:
    """Turn every layer that `plan` covers into ours, in place, and return the same model.

    The module objects stay the same: Parameters, ties, hooks, references, train/eval mode and
    state_dict are untouched. Everything is checked before anything is changed. On a model that is
    converted already the plan takes the place of the old one (the same plan changes nothing): so a
    layer is demoted by `plan.with_layer` in the middle of training; counts and the position in
    training go on. Raises PlanError when the model is not the one that the plan was made for.

    require: the acceptance.json of a quality gate, or what `load_acceptance` read; None asks for no
    gate. Raises AcceptanceError, naming every difference, when it is damaged, edited or expired, or
    when the gate accepted another recipe, plan, model or version.

    main_grad: True lets wgrad of every covered layer sum unrounded into a float32
    `weight.main_grad` and leaves `.grad` of that weight None, False ends that and drops a
    `main_grad` that it made, None keeps what the model has. Any backward pass through a layer adds
    to it, `torch.autograd.grad` too. Raises PlanError for a weight whose own `main_grad` is of
    another dtype, shape or device.
    """
    if not isinstance(plan, Plan):
        raise PlanError(
            f"apply takes a plan, not a {type(plan).__name__}; make one with "
            "lowprec.plan(model, recipe)"
        )
    if main_grad not in (None, True, False):
        raise PlanError(f"apply takes main_grad=True, False or None, not {main_grad!r}")
    if require is not None:
        accepted = require if isinstance(require, Acceptance) else load_acceptance(require)
        accepted.check(model, plan)
    found = {name: (module, parent) for name, module, parent, _ in linear_layers(model)}
    planned = {layer.name for layer in plan.layers}
    for name in found:
        if name not in planned:
            raise PlanError(f"the model has a linear layer {name!r} that the plan does not know")
    covered = []
    for layer in plan.layers:
        if layer.name not in found:
            raise PlanError(
                f"the plan names layer {layer.name!r}, which this model does not have as a linear "
                "layer of its own"
            )
        module, parent = found[layer.name]
        if layer.converted:
            _check(layer, module, parent)
            if main_grad and (reason := gradients.refusal(module.weight)):
                raise PlanError(f"layer {layer.name!r}: {reason}")
            covered.append((module, layer))
        elif module.__dict__.get("lowprec_applied"):
            raise PlanError(
                f"the plan leaves layer {layer.name!r} as it is, which an earlier plan converted; "
                "call lowprec.restore(model) first"
            )
    attentions = checked_attentions(model, plan.attentions)
    for one, decision in attentions:
        convert_attention(one, decision)
    for module, layer in covered:
        if isinstance(module, Linear):
            module.lowprec_products.replan(layer.stages, seed=plan.seed)
            _set_main_grad(module, main_grad)
            continue
        ours: Any = REPLACEMENTS[type(module)]
        module.__class__ = ours
        products = Products(layer.stages, layer=layer.name, seed=plan.seed)
        module.__dict__["lowprec_products"] = products
        module.__dict__["lowprec_applied"] = True
        _set_main_grad(module, main_grad)
    return model


def _set_main_grad(module: Any, main_grad: bool | None) -> None:
    products: Products = module.lowprec_products
    if main_grad is None:
        return
    products.main_grad = main_grad
    if main_grad:
        products.made_main_grad |= gradients.claim(module.weight)
    elif products.made_main_grad:
        gradients.release(module.weight)
        products.made_main_grad = False


def _check(layer: LayerPlan, module: torch.nn.Linear, parent: torch.nn.Module) -> None:
    if type(module) is Linear and module.lowprec_applied:
        pass
    elif reason := left_alone_because(module, parent=parent):
        raise PlanError(f"layer {layer.name!r} can no longer be converted: {reason}")
    shape = (module.out_features, module.in_features)
    if shape != layer.shape:
        raise PlanError(
            f"layer {layer.name!r} is {shape[0]} x {shape[1]} (N x K), "
            f"the plan was made for {layer.shape[0]} x {layer.shape[1]}"
        )


def restore(model: torch.nn.Module) -> torch.nn.Module:
    """Turn every layer that `apply` wrapped back into its torch class, in place.

    Layers built as lowprec.Linear by hand stay. Raises PlanError, with nothing changed, for a
    wrapped layer whose class was changed afterwards (a parametrization, for example).
    """
    originals: dict[Any, Any] = {ours: theirs for theirs, ours in REPLACEMENTS.items()}
    wrapped = [(n, m) for n, m in model.named_modules() if "lowprec_applied" in m.__dict__]
    wrapped = [
        (name, module)
        for name, module in wrapped
        if module.lowprec_applied and "lowprec_attention" not in module.__dict__
    ]
    for name, module in wrapped:
        if type(module) not in originals:
            raise PlanError(
                f"layer {name!r} became a {type(module).__qualname__} after apply; undo that first"
            )
    restore_attentions(model)
    for _, module in wrapped:
        _set_main_grad(module, False)
        del module.lowprec_products, module.lowprec_applied
        module.__class__ = originals[type(module)]
    return model

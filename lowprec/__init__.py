"""lowprec: train PyTorch models in MXFP8 and its relatives, by a recipe that becomes a plan."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from lowprec.acceptance import Acceptance, load_acceptance
    from lowprec.attention_call import Mask
    from lowprec.attention_policy import AttentionPolicy
    from lowprec.calibration import Calibration, load_calibration
    from lowprec.conversion import apply, restore
    from lowprec.errors import (
        AcceptanceError,
        LowprecError,
        PlanError,
        RecipeError,
        UnsupportedError,
    )
    from lowprec.formats import FORMATS, Cast, Format
    from lowprec.identity import Fingerprint, fingerprint
    from lowprec.nn import Attention, GatedLinear, Linear, NormLinear, Rotary
    from lowprec.ops import dequantize, quantize
    from lowprec.planning import Plan, plan
    from lowprec.recipe import Recipe, load_recipe
    from lowprec.rng import RandomStream
    from lowprec.saved import saved_activations
    from lowprec.stepping import set_step
    from lowprec.telemetry import Observation, observe
    from lowprec.tensor import QuantizedTensor
    from lowprec.version import __version__
    from lowprec.watching import watch

__all__ = [
    "FORMATS",
    "Acceptance",
    "AcceptanceError",
    "Attention",
    "AttentionPolicy",
    "Calibration",
    "Cast",
    "Fingerprint",
    "Format",
    "GatedLinear",
    "Linear",
    "LowprecError",
    "Mask",
    "NormLinear",
    "Observation",
    "Plan",
    "PlanError",
    "QuantizedTensor",
    "RandomStream",
    "Recipe",
    "RecipeError",
    "Rotary",
    "UnsupportedError",
    "__version__",
    "apply",
    "dequantize",
    "fingerprint",
    "load_acceptance",
    "load_calibration",
    "load_recipe",
    "observe",
    "plan",
    "quantize",
    "restore",
    "saved_activations",
    "set_step",
    "watch",
]

# Each is loaded when first asked for, so that the import costs next to nothing.
_HOME: Final = {
    "FORMATS": "formats",
    "Acceptance": "acceptance",
    "AcceptanceError": "errors",
    "Attention": "nn",
    "AttentionPolicy": "attention_policy",
    "Calibration": "calibration",
    "Cast": "formats",
    "Fingerprint": "identity",
    "Format": "formats",
    "GatedLinear": "nn",
    "Linear": "nn",
    "LowprecError": "errors",
    "Mask": "attention_call",
    "NormLinear": "nn",
    "Observation": "telemetry",
    "Plan": "planning",
    "PlanError": "errors",
    "QuantizedTensor": "tensor",
    "RandomStream": "rng",
    "Recipe": "recipe",
    "RecipeError": "errors",
    "Rotary": "nn",
    "UnsupportedError": "errors",
    "__version__": "version",
    "apply": "conversion",
    "dequantize": "ops",
    "fingerprint": "identity",
    "load_acceptance": "acceptance",
    "load_calibration": "calibration",
    "load_recipe": "recipe",
    "observe": "telemetry",
    "plan": "planning",
    "quantize": "ops",
    "restore": "conversion",
    "saved_activations": "saved",
    "set_step": "stepping",
    "watch": "watching",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

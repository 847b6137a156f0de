"""lowprec: train PyTorch models in MXFP8 and its relatives, by a recipe that becomes a plan."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from lowprec.acceptance import Acceptance, load_acceptance
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
    from lowprec.nn import Linear, NormLinear
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
    "Cast",
    "Fingerprint",
    "Format",
    "Linear",
    "LowprecError",
    "NormLinear",
    "Observation",
    "Plan",
    "PlanError",
    "QuantizedTensor",
    "RandomStream",
    "Recipe",
    "RecipeError",
    "UnsupportedError",
    "__version__",
    "apply",
    "dequantize",
    "fingerprint",
    "load_acceptance",
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
    "Cast": "formats",
    "Fingerprint": "identity",
    "Format": "formats",
    "Linear": "nn",
    "LowprecError": "errors",
    "NormLinear": "nn",
    "Observation": "telemetry",
    "Plan": "planning",
    "PlanError": "errors",
    "QuantizedTensor": "tensor",
    "RandomStream": "rng",
    "Recipe": "recipe",
    "RecipeError": "errors",
    "UnsupportedError": "errors",
    "__version__": "version",
    "apply": "conversion",
    "dequantize": "ops",
    "fingerprint": "identity",
    "load_acceptance": "acceptance",
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

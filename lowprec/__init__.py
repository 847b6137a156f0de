"""lowprec: train PyTorch models in MXFP8 and its relatives, by a recipe that becomes a plan."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from lowprec.conversion import apply, restore
from lowprec.errors import LowprecError, PlanError, RecipeError, UnsupportedError
from lowprec.formats import FORMATS, Cast, Format
from lowprec.nn import Linear
from lowprec.ops import dequantize, quantize
from lowprec.planning import Plan, plan
from lowprec.recipe import Recipe, load_recipe
from lowprec.rng import RandomStream
from lowprec.stepping import set_step
from lowprec.tensor import QuantizedTensor

if TYPE_CHECKING:
    from lowprec.saved import saved_activations
    from lowprec.telemetry import Observation, observe
    from lowprec.watching import watch

__all__ = [
    "FORMATS",
    "Cast",
    "Format",
    "Linear",
    "LowprecError",
    "Observation",
    "Plan",
    "PlanError",
    "QuantizedTensor",
    "RandomStream",
    "Recipe",
    "RecipeError",
    "UnsupportedError",
    "apply",
    "dequantize",
    "load_recipe",
    "observe",
    "plan",
    "quantize",
    "restore",
    "saved_activations",
    "set_step",
    "watch",
]

# Loaded when first asked for: training needs none of it, and imports stay quick.
_LATER: Final = {
    "Observation": "lowprec.telemetry",
    "observe": "lowprec.telemetry",
    "saved_activations": "lowprec.saved",
    "watch": "lowprec.watching",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""lowprec: train PyTorch models in MXFP8 and its relatives, by a recipe that becomes a plan."""

from __future__ import annotations

from lowprec.conversion import apply, restore
from lowprec.errors import LowprecError, PlanError, RecipeError, UnsupportedError
from lowprec.formats import FORMATS, Cast, Format
from lowprec.nn import Linear
from lowprec.ops import dequantize, quantize
from lowprec.planning import Plan, plan
from lowprec.recipe import Recipe, load_recipe
from lowprec.rng import RandomStream
from lowprec.stepping import set_step
from lowprec.telemetry import Observation, observe
from lowprec.tensor import QuantizedTensor

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
    "set_step",
]

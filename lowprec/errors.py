"""The errors that lowprec raises for its users.

LowprecError
 ├── RecipeError        a recipe file says something that cannot be meant
 ├── PlanError          a recipe does not fit this model, or a plan does not fit it any more
 ├── AcceptanceError    an acceptance record does not cover what is about to be trained
 └── UnsupportedError   a format, shape, dtype or backend that cannot do what was asked
"""

from __future__ import annotations


class LowprecError(Exception):
    """Base of every error that lowprec raises for its users."""


class RecipeError(LowprecError):
    """A recipe file says something that cannot be meant (unknown key, format, rule, value)."""


class PlanError(LowprecError):
    """A recipe does not fit this model, or a plan no longer fits the model it was made for."""


class AcceptanceError(LowprecError):
    """An acceptance record is damaged or expired, or covers another recipe, plan or model."""


class UnsupportedError(LowprecError):
    """A format, shape, dtype or backend cannot do what was asked of it."""

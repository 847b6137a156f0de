"""Our modules, and which torch module becomes which."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import torch

from lowprec.nn.linear import Linear
from lowprec.nn.norm_linear import NormLinear
from lowprec.nn.products import Products

REPLACEMENTS: Final[MappingProxyType[type[torch.nn.Module], type[Linear]]] = MappingProxyType(
    {torch.nn.Linear: Linear}
)

__all__ = ["REPLACEMENTS", "Linear", "NormLinear", "Products"]

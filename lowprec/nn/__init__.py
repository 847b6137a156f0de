"""Our modules, and which torch module becomes which."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import torch

from lowprec.nn.attention import Attention, AttentionProducts
from lowprec.nn.gated_linear import GatedLinear
from lowprec.nn.linear import Linear
from lowprec.nn.norm_linear import NormLinear
from lowprec.nn.products import Products
from lowprec.rotary import Rotary

REPLACEMENTS: Final[MappingProxyType[type[torch.nn.Module], type[Linear]]] = MappingProxyType(
    {torch.nn.Linear: Linear}
)

__all__ = [
    "REPLACEMENTS",
    "Attention",
    "AttentionProducts",
    "GatedLinear",
    "Linear",
    "NormLinear",
    "Products",
    "Rotary",
]

"""Workloads from training code that exists already: a plain loop, Lightning, Hugging Face."""

from __future__ import annotations

from .huggingface import HuggingFaceWorkload
from .lightning import LightningWorkload
from .plain import PlainWorkload
from .scored import EvaluationSet

__all__ = ["EvaluationSet", "HuggingFaceWorkload", "LightningWorkload", "PlainWorkload"]

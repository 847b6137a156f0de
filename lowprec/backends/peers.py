"""What the adapters to other libraries share: is the library here, and what kind of layer it takes.

An adapter is a backend whose every op is refused or computed from our codes, so it changes no bit,
and beside that it builds the library's own layer, to be compared with ours.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lowprec.errors import UnsupportedError
from lowprec.hardware import NAMED, Hardware, current
from lowprec.policy import SKIP, Gemm, LinearPolicy

_DTYPES = (torch.bfloat16, torch.float32)


def _import(module: str) -> Any:
    """The module, without what it warns of while it loads: parts for frameworks that are not used.

    Where warnings are errors one of them would end the import half way.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(module)


@dataclass(frozen=True)
class Library:
    """A library by its own name, its package, the release series (major, minor) and our extra."""

    title: str
    package: str
    series: tuple[int, int]
    extra: str

    def missing(self) -> str | None:
        """None when the right version is installed, else a sentence; imports nothing."""
        install = f"pip install 'lowprec[{self.extra}]'"
        try:
            version = metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return f"{self.title} is not installed: {install}"
        numbers = re.match(r"(\d+)\.(\d+)", version)
        found = (int(numbers[1]), int(numbers[2])) if numbers else None
        if found == self.series:
            return None
        wanted = f"the adapter is for {self.series[0]}.{self.series[1]}.x: {install}"
        if found is None:
            return f"{self.title} has version {version!r}, which cannot be read; {wanted}"
        age = "too old" if found < self.series else "newer than what was checked"
        return f"{self.title} {version} is {age}; {wanted}"

    def load(self, module: str) -> Any:
        """Import `module` of the library; raises UnsupportedError when that does not work."""
        if reason := self.missing():
            raise UnsupportedError(f"{self.title} refused: {reason}")
        try:
            return _import(module)
        except Exception as error:  # a compiled part that does not fit raises almost anything
            raise UnsupportedError(
                f"{self.title} refused: {self._broken(module, error)}"
            ) from error

    def unusable(self, module: str) -> str | None:
        """None when `module` can be imported in the right version, else a sentence."""
        if reason := self.missing():
            return reason
        try:
            _import(module)
        except Exception as error:  # as in load
            return self._broken(module, error)
        return None

    def _broken(self, module: str, error: Exception) -> str:
        return (
            f"{self.title} {metadata.version(self.package)} is installed, but {module} cannot be "
            f"imported ({type(error).__name__}: {error}); install a build for torch "
            f"{torch.__version__}"
        )

    def check_layer(self, linear: nn.Module, multiple: int) -> None:
        """Raise UnsupportedError unless `linear` is bf16 or float32 with sides of `multiple`."""
        if not isinstance(linear, nn.Linear):
            raise UnsupportedError(
                f"{self.title} refused: a peer is made of a torch.nn.Linear, not of "
                f"{type(linear).__qualname__}"
            )
        shape = (linear.out_features, linear.in_features)
        if any(side == 0 or side % multiple for side in shape):
            raise UnsupportedError(
                f"{self.title} refused: layer of shape {shape[0]} x {shape[1]} (N x K); both must "
                f"be multiples of {multiple}"
            )
        bias_dtype = linear.weight.dtype if linear.bias is None else linear.bias.dtype
        if linear.weight.dtype not in _DTYPES or bias_dtype != linear.weight.dtype:
            raise UnsupportedError(
                f"{self.title} refused: weight {linear.weight.dtype}, bias {bias_dtype}; both must "
                "be bfloat16 or both float32"
            )


def hardware_of(tensor: torch.Tensor) -> Hardware:
    """Facts of the machine that holds `tensor`."""
    return current() if tensor.is_cuda else NAMED["cpu"]


def below(hardware: Hardware, need: tuple[int, int]) -> str | None:
    """None on a GPU of compute capability `need` or higher, else a sentence."""
    wanted = f"needs sm{need[0]}{need[1]}"
    if hardware.capability is None:
        return f"{wanted}, this is {hardware.name}"
    if hardware.capability < need:
        return f"{wanted}, this is sm{hardware.capability[0]}{hardware.capability[1]}"
    return None


def casts_of(policy: LinearPolicy) -> Iterator[tuple[str, Gemm]]:
    """(name, product) of the products that are quantized."""
    for name, product in policy.items():
        if isinstance(product, Gemm):
            yield name, product


def common_refusal(policy: LinearPolicy) -> str | None:
    """What no peer can say: nothing quantized, or a product that is not computed."""
    if policy.wgrad is SKIP:
        return (
            "wgrad is skip, which a peer cannot say; freeze the weight (requires_grad_(False)) and "
            "give wgrad a precision"
        )
    if not policy.quantizes:
        return "the policy quantizes nothing; compare with torch.nn.Linear itself"
    return None


def padded(codes: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Codes [R, C], contiguous, with zeros up to multiples of `rows` and `columns`: code 0 is 0."""
    below_them, beside = -codes.shape[0] % rows, -codes.shape[1] % columns
    if below_them or beside:
        return functional.pad(codes, (0, beside, 0, below_them))
    return codes.contiguous()

"""Start a kernel: Triton's own launcher the first time, the compiled kernel itself from then on.

Triton's launcher looks at every argument, and builds and compares a key of text, for hundreds of
microseconds a launch, which is longer than many of these kernels run. The key here is cheaper and
finer: what Triton derives from an argument is derived from less than that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton

_KNOWN: Final = ("3.6",)
"""Versions whose compiled kernels are started as here; others go through their launcher."""
_OPTIONS: Final = frozenset({"num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion"})
_direct: Final = ".".join(triton.__version__.split(".")[:2]) in _KNOWN
_ready: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


@dataclass(frozen=True)
class Tiled:
    """A tensor that the copy engine moves in tiles: what a tensor descriptor is made of."""

    base: torch.Tensor
    shape: list[int]
    strides: list[int]
    block_shape: list[int]
    layout: Any
    padding: str = "zero"

    def descriptor(self) -> Any:
        """Triton's own, with its checks."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor(self.base, self.shape, self.strides, self.block_shape, self.layout)


def start(kernel: Any, programs: int | tuple[int, int], *arguments: Any, **constants: Any) -> None:
    """Run `programs` programs (or a grid of two) of a kernel on the device of its first tensor.

    arguments are its tensors and numbers, in order; constants the rest, and options of the launch.
    """
    if not isinstance(kernel, triton.JITFunction) or not _direct:
        _through_triton(kernel, programs, arguments, constants)
        return
    device = next(_device(one) for one in arguments if _device(one) is not None)
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            start(kernel, programs, *arguments, **constants)
        return
    key = (kernel.fn, device, *map(_kind, arguments), *constants.values())
    found = _ready.get(key)
    if found is None or _hooked() or kernel.pre_run_hooks:
        compiled = _through_triton(kernel, programs, arguments, constants)
        names = kernel.arg_names[len(arguments) :]
        assert set(constants) - set(names) <= _OPTIONS
        _ready[key] = compiled, tuple(constants[name] for name in names)
        return
    compiled, tail = found
    grid = programs if isinstance(programs, tuple) else (programs, 1)
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled.run(
        *grid, 1, stream, compiled.function, compiled.packed_metadata,
        None, None, None, *arguments, *tail,
    )  # fmt: skip


def _hooked() -> bool:
    """Whether somebody, such as a profiler, wants to hear of launches."""
    knobs = triton.knobs.runtime
    hooks = (knobs.launch_enter_hook, knobs.launch_exit_hook)
    return any(one is not None and getattr(one, "calls", True) for one in hooks)


def _through_triton(
    kernel: Any,
    programs: int | tuple[int, int],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
) -> Any:
    whole = [one.descriptor() if isinstance(one, Tiled) else one for one in arguments]
    grid = programs if isinstance(programs, tuple) else (programs,)
    return kernel[grid](*whole, **constants)


def _device(argument: Any) -> int | None:
    tensor = argument.base if isinstance(argument, Tiled) else argument
    return tensor.get_device() if isinstance(tensor, torch.Tensor) else None


def _kind(argument: Any) -> Any:
    """What a compiled kernel depends on of an argument, and more."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, Tiled):
        return argument.base.dtype, *argument.block_shape
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    return type(argument)

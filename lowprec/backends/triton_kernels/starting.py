"""Start a kernel: Triton's own launcher the first time, the compiled kernel itself from then on.

Triton's launcher looks at every argument, and builds and compares a key of text, for hundreds of
microseconds a launch, which is longer than many of these kernels run. The key here is cheaper and
finer: what Triton derives from an argument is derived from less than that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import torch
import triton

_KNOWN: Final = ("3.6",)
"""Versions whose compiled kernels are started as here; others go through their launcher."""
_OPTIONS: Final = frozenset({"num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion"})
_direct: Final = ".".join(triton.__version__.split(".")[:2]) in _KNOWN
_ready: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


class Tiled(NamedTuple):
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


def start(
    kernel: Any, programs: int | tuple[int, int], *arguments: Any, **constants: Any
) -> tuple[Any, tuple[Any, ...]] | None:
    """Run `programs` programs (or a grid of two) of a kernel on the device of its first tensor.

    arguments are its tensors and numbers, in order; constants the rest, and options of the launch.
    Returns the compiled kernel and its constants in order, None where Triton's launcher is used.
    """
    if not isinstance(kernel, triton.JITFunction) or not _direct:
        _through_triton(kernel, programs, arguments, constants)
        return None
    device = _device(arguments)
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return start(kernel, programs, *arguments, **constants)
    key = (kernel.fn, device, *_kinds(arguments), *constants.values())
    found = _ready.get(key)
    if found is None or _hooked(kernel):
        compiled = _through_triton(kernel, programs, arguments, constants)
        names = kernel.arg_names[len(arguments) :]
        assert set(constants) - set(names) <= _OPTIONS
        found = _ready[key] = compiled, tuple(constants[name] for name in names)
        return found
    compiled, tail = found
    grid = programs if isinstance(programs, tuple) else (programs, 1)
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled.run(
        *grid, 1, stream, compiled.function, compiled.packed_metadata,
        None, None, None, *arguments, *tail,
    )  # fmt: skip
    return found


class Launch:
    """A launch whose kernel, programs, numbers and constants are decided: tensors are all it takes.

    They must be of the same dtypes, tiles and device each time and start at multiples of 16 bytes.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        numbers: tuple[int, ...],
        constants: Mapping[str, Any],
        device: int,
    ) -> None:
        self.kernel, self.programs, self.device = kernel, programs, device
        self.numbers, self.constants = numbers, dict(constants)
        self._run: Any = None
        self._before: tuple[Any, ...] = ()
        self._after: tuple[Any, ...] = ()

    def start(self, *tensors: Any) -> None:
        """As the function `start`; from the second time on nothing is looked up."""
        run = self._run
        if run is None or self.device != torch.cuda.current_device() or _hooked(self.kernel):
            found = start(self.kernel, self.programs, *tensors, *self.numbers, **self.constants)
            if found is not None:
                compiled, tail = found
                self._run, self._after = compiled.run, (*self.numbers, *tail)
                self._before = compiled.function, compiled.packed_metadata, None, None, None
            return
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        run(self.programs, 1, 1, stream, *self._before, *tensors, *self._after)


def _hooked(kernel: Any) -> bool:
    """Whether somebody, such as a profiler, wants to hear of launches."""
    knobs = triton.knobs.runtime
    hooks = (knobs.launch_enter_hook, knobs.launch_exit_hook)
    if any(one is not None and getattr(one, "calls", True) for one in hooks):
        return True
    return bool(kernel.pre_run_hooks)


def _through_triton(
    kernel: Any,
    programs: int | tuple[int, int],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
) -> Any:
    whole = [one.descriptor() if isinstance(one, Tiled) else one for one in arguments]
    grid = programs if isinstance(programs, tuple) else (programs,)
    return kernel[grid](*whole, **constants)


def _device(arguments: tuple[Any, ...]) -> int:
    """The device of the first tensor."""
    for one in arguments:
        if isinstance(one, torch.Tensor):
            return one.get_device()
        if isinstance(one, Tiled):
            return one.base.get_device()
    raise AssertionError("a kernel without tensors")


def _kinds(arguments: tuple[Any, ...]) -> list[Any]:
    """What a compiled kernel depends on of its arguments, and more."""
    found: list[Any] = []
    for one in arguments:
        if one is None:
            found.append(None)
        elif isinstance(one, torch.Tensor):
            found += (one.dtype, one.data_ptr() % 16 == 0)
        elif isinstance(one, int):
            wide = not -(2**31) <= one < 2**31
            found.append(-1 if one == 1 else 2 * wide + (one % 16 == 0))
        elif isinstance(one, Tiled):
            found += (one.base.dtype, *one.block_shape)
        else:
            found.append(type(one))
    return found

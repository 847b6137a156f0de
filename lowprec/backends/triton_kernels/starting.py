"""Start a kernel: Triton's own launcher the first time, the compiled kernel itself from then on.

Triton's launcher looks at every argument, and builds and compares a key of text, for hundreds of
microseconds a launch, which is longer than many of these kernels run. The key here is cheaper and
finer: what Triton derives from an argument is derived from less than that.

A `repeated` function goes further. It allocates tensors and starts kernels, nothing else; called on
tensors that are laid out as before, it does both again without deciding anything.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
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


def start(kernel: Any, programs: int | tuple[int, int], *arguments: Any, **constants: Any) -> None:
    """Run `programs` programs (or a grid of two) of a kernel on the device of its first tensor.

    arguments are its tensors and numbers, in order; constants the rest, and options of the launch.
    """
    if not isinstance(kernel, triton.JITFunction) or not _direct:
        _through_triton(kernel, programs, arguments, constants)
        if _heard.launches is not None:
            _heard.launches.append(None)
        return
    device = _device(arguments)
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            start(kernel, programs, *arguments, **constants)
        return
    key = (kernel.fn, device, *_kinds(arguments), *constants.values())
    grid = programs if isinstance(programs, tuple) else (programs, 1)
    found = _ready.get(key)
    if found is None or _hooked(kernel):
        compiled = _through_triton(kernel, programs, arguments, constants)
        names = kernel.arg_names[len(arguments) :]
        assert set(constants) - set(names) <= _OPTIONS
        found = _ready[key] = compiled, tuple(constants[name] for name in names)
    else:
        compiled, tail = found
        stream = torch._C._cuda_getCurrentRawStream(device)
        compiled.run(
            *grid, 1, stream, compiled.function, compiled.packed_metadata,
            None, None, None, *arguments, *tail,
        )  # fmt: skip
    if (launches := _heard.launches) is not None:
        compiled, tail = found
        launches.append(_Started(kernel, compiled, (*grid, 1), (*arguments, *tail)))


def _hooked(kernel: Any) -> bool:
    """Whether somebody, such as a profiler, wants to hear of launches."""
    knobs = triton.knobs.runtime
    enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
    if enter is not None and getattr(enter, "calls", True):
        return True
    if leave is not None and getattr(leave, "calls", True):
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
            found += (one.base.dtype, *one.block_shape, one.layout)
        else:
            found.append(type(one))
    return found


Body = Callable[..., list[torch.Tensor]]
_known: dict[tuple[Any, ...], _Call] = {}
_CALLS: Final = 1024
"""Calls that are remembered; full, the memory starts anew."""
_met: set[int] = set()
"""Hashes of calls that came once: what never comes again is not worth remembering."""
_MET: Final = 65536
_PLACES: Final = 16
"""Addresses of a tensor in tiles that are remembered."""


def repeated(body: Body) -> Body:
    """A function that repeats the launches of `body`, for arguments like those of an earlier call.

    `body` takes tensors, the first always and others or None, and then numbers and text that decide
    what is launched. It returns new tensors, of memory that is theirs alone, and fills them by
    `start` from its arguments and from nothing else: it computes nothing by torch, and what it
    decides follows from its numbers and from the layout of its tensors. Alike are tensors of the
    same shape, strides, dtype and device that start equally far from a multiple of 16 bytes. What
    comes a second time is remembered, so that lengths which change with every step cost nothing.
    """
    count = sum("torch.Tensor" in kind for kind in body.__annotations__.values()) - 1  # the result

    @functools.wraps(body)
    def call(*arguments: Any) -> list[torch.Tensor]:
        # Inside another it is a part of that.
        if _heard.launches is not None or not _repeats(arguments[0]):
            return body(*arguments)
        key, sources, places = [body, arguments[count:]], [], []
        for one in arguments[:count]:
            if one is None:
                key.append(None)
            else:
                place = one.data_ptr()
                key += (one.shape, one.stride(), one.dtype, one.get_device(), place % 16)
                sources.append(one)
                places.append(place)
        alike = tuple(key)
        found = _known.get(alike)
        if found is not None and not found.heard():
            return found.run(sources[0].device, places)
        if found is None and hash(alike) not in _met:
            if len(_met) >= _MET:
                _met.clear()
            _met.add(hash(alike))
            return body(*arguments)
        _heard.launches = []
        try:
            out = body(*arguments)
        finally:
            launches, _heard.launches = _heard.launches, None
        found = _Call.of(launches, sources, out)
        if found is not None:
            if len(_known) >= _CALLS:
                _known.clear()
            _known[alike] = found
        return out

    return call


def _repeats(x: torch.Tensor) -> bool:
    """Whether what is started for such a tensor can be started again without Triton's launcher."""
    return _direct and x.is_cuda


class _Started(NamedTuple):
    """A launch that happened: kernel, what it was compiled to, programs, and all arguments."""

    kernel: Any
    compiled: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]


class _Heard(threading.local):
    """What a repeated function starts on this thread, while it decides."""

    launches: list[_Started | None] | None = None
    """None among them for one that only Triton's launcher can start."""


_heard: Final = _Heard()


class _Place(int):
    """An address, as a launcher takes it of a tensor that is moved in tiles."""

    def data_ptr(self) -> int:
        """Itself."""
        return self


class _ByPlace(dict[int, Any]):
    """What a launcher takes for a tensor in tiles, by address: made once each."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, place: int) -> Any:
        if len(self) >= _PLACES:
            self.clear()
        found = self[place] = self._make(place)
        return found


class _Launch(NamedTuple):
    """A compiled kernel, and what it is started with but for addresses."""

    kernel: Any
    run: Callable[..., Any]
    grid: tuple[int, ...]
    before: tuple[Any, ...]
    """What stands between the stream and the arguments."""
    arguments: tuple[Any, ...]
    """Numbers and constants, and 0 where a tensor stands."""
    pointers: tuple[tuple[int, int, int], ...]
    """Where among them a tensor stands, which one it is, and bytes from its start."""
    tiles: tuple[tuple[int, int, int, _ByPlace], ...]
    """The same for those in tiles."""


class _Call(NamedTuple):
    """The launches of a call, the tensors that they fill, and the device."""

    device: int
    launches: tuple[_Launch, ...]
    rooms: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]

    @classmethod
    def of(
        cls,
        launches: Sequence[_Started | None],
        sources: list[torch.Tensor],
        out: list[torch.Tensor],
    ) -> _Call | None:
        """None where it is not certain what a kernel would take of the tensors of another call."""
        every = [*sources, *out]
        if not all(_fills_its_memory(one) for one in out):
            return None
        made = []
        for one in launches:
            found = None if one is None else _launch(one, every)
            if found is None:
                return None
            made.append(found)
        rooms = tuple((one.shape, one.stride(), one.dtype) for one in out)
        return cls(sources[0].get_device(), tuple(made), rooms)

    def heard(self) -> bool:
        """Whether somebody wants to hear of launches."""
        return any(_hooked(one.kernel) for one in self.launches)

    def run(self, device: torch.device, places: list[int]) -> list[torch.Tensor]:
        """The same launches for sources at these addresses, and what they fill."""
        if self.device != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self.run(device, places)
        out = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype in self.rooms
        ]
        places += [one.data_ptr() for one in out]
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        for _, run, grid, before, arguments, pointers, tiles in self.launches:
            values = list(arguments)
            for at, which, offset in pointers:
                values[at] = places[which] + offset
            for at, which, offset, by_place in tiles:
                values[at] = by_place[places[which] + offset]
            run(*grid, stream, *before, *values)
        return out


def _launch(started: _Started, every: list[torch.Tensor]) -> _Launch | None:
    """A launch of tensors that lie in `every`; None where one of them does not."""
    kernel, compiled, grid, arguments = started
    run, before, descriptions = _bare(compiled)
    values: list[Any] = []
    pointers, tiles = [], []
    for one in arguments:
        at, tiled = len(values), isinstance(one, Tiled)
        tensor = one.base if tiled else one
        if not isinstance(tensor, torch.Tensor):
            values.append(one)
            continue
        origin = _origin(tensor, every)
        if origin is None:
            return None
        values.append(0)
        if not tiled:
            pointers.append((at, *origin))
        elif descriptions is None:
            tiles.append((at, *origin, _ByPlace(functools.partial(_moved, one[1:]))))
        else:
            described = functools.partial(_described, one[1:], descriptions[len(tiles)])
            tiles.append((at, *origin, _ByPlace(described)))
            values += (*one.shape, *one.strides)
    return _Launch(kernel, run, grid, before, tuple(values), tuple(pointers), tuple(tiles))


def _bare(compiled: Any) -> tuple[Callable[..., Any], tuple[Any, ...], Any]:
    """What starts a compiled kernel: a function, what it takes between stream and arguments, and
    how the copy engine's descriptors are made.

    That is the C function inside of Triton's launcher where it has nothing to allocate, and the
    launcher itself (without a description) elsewhere.
    """
    from triton.backends.nvidia.driver import CudaLauncher

    run = compiled.run
    before = (compiled.function, compiled.packed_metadata, None, None, None)
    if not isinstance(run, CudaLauncher) or run.global_scratch_size or run.profile_scratch_size:
        return run, before, None
    launch: Any = run.launch
    descriptions: Any = []
    if inspect.isfunction(launch):
        around = inspect.getclosurevars(launch).nonlocals
        launch, descriptions = around.get("launcher"), around.get("tensordesc_meta") or [None]
        if launch is None or None in descriptions:
            return run, before, None
    options = (run.launch_cooperative_grid, run.launch_pdl, None, None)
    return launch, (before[0], *options, *before[1:]), descriptions


def _moved(rest: tuple[Any, ...], place: int) -> Tiled:
    return Tiled(_Place(place), *rest)  # type: ignore[arg-type]


def _described(rest: tuple[Any, ...], description: Any, place: int) -> Any:
    """The copy engine's descriptor of a tensor at an address, as Triton's launcher makes it."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg(_moved(rest, place), description)[0]


def _span(t: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    reach = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return (reach + 1) * t.element_size() if t.numel() else 0


def _fills_its_memory(t: torch.Tensor) -> bool:
    """Whether memory for the shape and strides of a tensor is what it has."""
    return t.untyped_storage().nbytes() == _span(t)


def _origin(t: torch.Tensor, every: list[torch.Tensor]) -> tuple[int, int] | None:
    """Which of `every` a kernel's tensor is or lies in, and how many bytes in; None if several."""
    found = [index for index, one in enumerate(every) if one is t]
    if not found:
        place = t.data_ptr()
        found = [n for n, one in enumerate(every) if 0 <= place - one.data_ptr() < _span(one)]
    if len(found) != 1:
        return None
    return found[0], t.data_ptr() - every[found[0]].data_ptr()

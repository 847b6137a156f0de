"""What a function repeats is what its body would start: kernels, tensors, places and numbers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.core.kernel_cases import INTERPRETED

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is missing"),
    pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing"),
]
BF16 = torch.bfloat16
Arguments = tuple[Any, ...]


class Gpu:
    """A GPU that runs nothing: what it is asked to compile, and to start without Triton."""

    def __init__(self) -> None:
        self.compiled: list[Any] = []
        self.started: list[tuple[Any, ...]] = []

    def through_triton(self, kernel: Any, *call: Any) -> Any:
        self.compiled.append((kernel, *call))
        name = f"{kernel.__name__} {len(self.compiled)}"
        run = lambda *arguments: self.started.append((kernel, *arguments))  # noqa: E731
        return SimpleNamespace(function=name, packed_metadata=(), run=run)


class Everything(set[int]):
    """Calls of which each has come before."""

    def __contains__(self, one: object) -> bool:
        return True


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    from lowprec.backends.triton_kernels import launch, norm_ops, pipelined, starting, streamed

    found = Gpu()
    monkeypatch.setattr(starting, "_direct", True)
    monkeypatch.setattr(starting, "_ready", {})
    monkeypatch.setattr(starting, "_repeats", lambda x: True)
    monkeypatch.setattr(starting, "_known", {})
    monkeypatch.setattr(starting, "_met", Everything())
    monkeypatch.setattr(starting, "_through_triton", found.through_triton)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(launch, "may_pipeline", lambda x: True)
    for module, name in ((pipelined, "processors"), (streamed, "_processors")):
        monkeypatch.setattr(module, name, lambda device: 132)
    monkeypatch.setattr(norm_ops, "_processors", lambda device: 132)
    for module in (pipelined, streamed):
        monkeypatch.setattr(module, "_major", lambda device: 9)
    pipelined.decided.cache_clear()
    yield found
    pipelined.decided.cache_clear()


def matrix(rows: int = 96, cols: int = 256, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(rows, cols, dtype=dtype)


def ops() -> dict[str, tuple[Callable[..., Any], Callable[[], Arguments]]]:
    """Every repeated function, and arguments of new tensors that are alike each time."""
    from lowprec.backends.triton_kernels import gate_ops, launch, matrices, norm_ops, norm_whole_ops

    def vector(dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.zeros(256, dtype=dtype)

    def rows() -> torch.Tensor:
        return torch.zeros(96)

    both, mx, tile = norm_ops.norm_both, "mxfp8", "fp8_128x128"
    backward, again = norm_ops._norm_backward_parts, norm_ops.norm_again
    wide = torch.float32
    amax = lambda: torch.zeros(1, dtype=torch.int32)  # noqa: E731
    return {
        "norm": (norm_ops.norm_cast, lambda: (matrix(), None, vector(), None, 1e-6, False, mx)),
        "norm, values": (
            norm_ops.norm_cast,
            lambda: (matrix(), matrix(), vector(), vector(), 1e-5, True, ""),
        ),
        "norm, float32": (
            norm_ops.norm_cast,
            lambda: (matrix(dtype=wide), None, vector(wide), None, 1e-6, False, mx),
        ),
        "norm, nothing": (
            norm_ops.norm_cast,
            lambda: (matrix(0), None, vector(), None, 1e-6, False, mx),
        ),
        "norm both": (both, lambda: (matrix(), None, vector(), None, 1e-6, False, mx, mx)),
        "norm whole": (
            norm_whole_ops._norm_twice,
            lambda: (matrix(), None, vector(), None, amax(), 1e-6, True, "fp8_tensorwise"),
        ),
        "norm both, bands": (
            both,
            lambda: (matrix(dtype=wide), None, vector(), None, 1e-6, True, mx, mx),
        ),
        "norm both, plain": (
            both,
            lambda: (matrix(), matrix(), vector(), None, 1e-6, False, mx, mx),
        ),
        "norm again": (again, lambda: (matrix(), vector(), None, None, rows(), "", tile)),
        "norm again, values": (again, lambda: (matrix(), vector(), None, rows(), rows(), "", "")),
        "norm backward": (
            backward,
            lambda: (matrix(), matrix(), vector(), rows(), rows(), matrix(), True),
        ),
        "norm backward, bare": (
            backward,
            lambda: (matrix(), matrix(), None, None, rows(), None, False),
        ),
        "gate": (gate_ops.gate_cast, lambda: (*matrix().chunk(2, 1), "silu", mx)),
        "gate alone": (gate_ops.gate_cast, lambda: (matrix(), None, "gelu", "")),
        "gate backward": (
            gate_ops.gate_backward,
            lambda: (matrix(), matrix(), matrix(), "silu"),
        ),
        "gate halves": (
            gate_ops._gate_backward_halves,
            lambda: (matrix(cols=128), matrix(), "silu"),
        ),
        "tiles": (launch._cast_tiles, lambda: (matrix()[None], mx, "")),
        "tiles, both": (launch._cast_tiles, lambda: (matrix()[None], mx, mx)),
        "cast": (matrices._cast, lambda: (matrix(), None, mx, tile)),
        "cast, ragged": (matrices._cast, lambda: (matrix(100, 264), None, mx, mx)),
        "cast, whole": (
            matrices._cast,
            lambda: (matrix(), amax(), "fp8_tensorwise", "fp8_tensorwise"),
        ),
        "cast, none": (matrices._cast, lambda: (matrix(cols=255), None, mx, mx)),
    }


def shown(value: Any, every: list[torch.Tensor]) -> Any:
    """A started argument; a tensor or an address as which of `every` it is, and bytes in."""
    from lowprec.backends.triton_kernels.starting import Tiled, _span

    if isinstance(value, Tiled):
        return shown(value.base.data_ptr(), every), *value[1:]
    place = value.data_ptr() if isinstance(value, torch.Tensor) else value
    if type(place) is not int and not isinstance(place, int):
        return value
    if place < 2**32:
        return place
    found = [(n, place - t.data_ptr()) for n, t in enumerate(every)]
    inside = [one for one in found if 0 <= one[1] < _span(every[one[0]])]
    return min(inside, key=lambda one: one[1])


def tensors(arguments: Arguments, out: list[torch.Tensor]) -> list[torch.Tensor]:
    return [one for one in (*arguments, *out) if isinstance(one, torch.Tensor)]


def of_call(gpu: Gpu, arguments: Arguments, out: list[torch.Tensor]) -> list[list[Any]]:
    every = tensors(arguments, out)
    found = [[shown(one, every) for one in call] for call in gpu.started]
    gpu.started.clear()
    return found


def test_what_is_repeated_is_what_the_body_starts(gpu: Gpu) -> None:
    """On other tensors than those that were there as it decided, the same launch as anew."""
    silent = []
    for name, (function, make) in ops().items():
        function(*make())
        gpu.started.clear()
        arguments = make()
        compiled = len(gpu.compiled)
        out = function(*arguments)
        repeated = of_call(gpu, arguments, out)
        want = function.__wrapped__(*arguments)
        assert repeated == of_call(gpu, arguments, want), name
        assert len(gpu.compiled) == compiled, name
        for ours, theirs in zip(out, want, strict=True):
            assert (ours.shape, ours.stride(), ours.dtype) == (
                theirs.shape,
                theirs.stride(),
                theirs.dtype,
            ), name
        assert all(one.data_ptr() % 16 == 0 for one in out), name
        silent += [] if repeated else [name]
    assert silent == ["norm, nothing", "cast, none"]


class Calls(TorchDispatchMode):
    """The ops of torch that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_bodies_compute_nothing_by_torch(gpu: Gpu) -> None:
    """A repeated call would leave it out."""
    allowed = {"empty", "unsqueeze", "select", "split", "view", "transpose", "detach", "slice"}
    allowed |= {"set_", "fill_"}  # what the tests poison new memory with
    for name, (function, make) in ops().items():
        arguments = make()
        with Calls() as calls:
            function.__wrapped__(*arguments)
        assert calls.names <= allowed, (name, calls.names - allowed)


def test_other_layouts_and_numbers_are_decided_anew(gpu: Gpu) -> None:
    from lowprec.backends.triton_kernels import norm_ops

    def norm(x: torch.Tensor, eps: float = 1e-6, cast: str = "mxfp8") -> list[Any]:
        weight = torch.zeros(x.shape[1], dtype=BF16)
        gpu.started.clear()
        out = norm_ops.norm_cast(x, None, weight, None, eps, False, cast)
        return of_call(gpu, (x, weight), out)

    wide = torch.zeros(96, 512, dtype=BF16)
    cases = [
        (matrix(), 1e-6, "mxfp8"),
        (matrix(95), 1e-6, "mxfp8"),
        (matrix(cols=512), 1e-6, "mxfp8"),
        (wide[:, :256], 1e-6, "mxfp8"),
        (wide[:, 8:264], 1e-6, "mxfp8"),  # as far from 16 bytes as the one before
        (wide[:, 2:258], 1e-6, "mxfp8"),  # starts 4 bytes after a multiple of 16
        (wide[:, 1:257], 1e-6, "mxfp8"),  # between pairs: another kernel
        (matrix(dtype=torch.float32), 1e-6, "mxfp8"),
        (matrix(), 1e-5, "mxfp8"),
        (matrix(), 1e-6, "mxfp8_1x128"),
    ]
    first = []
    for case in cases:
        norm(*case)
        first.append(len(gpu.compiled))
    kernels = [call[0].__name__ for call in gpu.compiled]
    # One compiled kernel takes any eps, any row stride in 16s, and any start at 16 bytes.
    assert first == [1, 2, 3, 3, 3, 4, 5, 6, 6, 7]
    assert kernels == ["norm_rows_streamed"] * 4 + ["norm_rows"] * 2 + ["norm_rows_streamed"]
    again = [norm(*case) for case in cases]
    assert len(gpu.compiled) == 7
    assert all(len(one) == 1 for one in again)
    assert len({str(one) for one in again}) == len(cases) - 1


def test_what_comes_once_is_not_remembered(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jagged batches have another number of rows at every step."""
    from lowprec.backends.triton_kernels import gate_ops, starting

    monkeypatch.setattr(starting, "_met", set())
    for rows in range(1, 40):
        gate_ops.gate_cast(matrix(rows), None, "silu", "mxfp8")
    assert not starting._known
    for known, started in ((1, 1), (1, 1)):  # decided once more, then repeated
        gpu.started.clear()
        gate_ops.gate_cast(matrix(7), None, "silu", "mxfp8")
        assert (len(starting._known), len(gpu.started)) == (known, started)
    monkeypatch.setattr(starting, "_MET", 50)
    for rows in range(40, 80):
        gate_ops.gate_cast(matrix(rows), None, "silu", "mxfp8")
    assert len(starting._met) <= 50


def test_tensors_in_one_another_are_never_repeated(gpu: Gpu) -> None:
    """Which of them a kernel takes is certain only of arguments that are the very tensors."""
    from lowprec.backends.triton_kernels import gate_ops, norm_ops

    both = torch.zeros(96, 512, dtype=BF16)
    gate_ops._gate_backward_halves(both[:, 256:], both, "silu")  # dy is up
    alone = torch.zeros(96, 256, dtype=BF16)
    both = torch.zeros(96, 512, dtype=BF16)
    gpu.started.clear()
    out = gate_ops._gate_backward_halves(alone.clone(), both, "silu")
    del out
    other = torch.zeros(96, 512, dtype=BF16)
    dy = other[:, 256:]
    gpu.started.clear()
    out = gate_ops._gate_backward_halves(dy, both, "silu")
    places = [t.data_ptr() for t in (dy, both, both[:, 256:], out[0], out[0][:, 256:])]
    started = [t.data_ptr() if isinstance(t, torch.Tensor) else t for t in gpu.started[0]]
    assert [started.index(place) for place in places] == sorted(map(started.index, places))
    x, w = matrix(), torch.zeros(256, dtype=BF16)
    norm_ops._norm_backward_parts(x, x, w, None, torch.zeros(96), None, False)
    dy, x = matrix(), matrix()
    gpu.started.clear()
    norm_ops._norm_backward_parts(dy, x, w, None, torch.zeros(96), None, False)
    started = [t.data_ptr() if isinstance(t, torch.Tensor) else t for t in gpu.started[0]]
    assert dy.data_ptr() in started
    assert x.data_ptr() in started


def test_memory_with_room_behind_a_result_is_kept(gpu: Gpu) -> None:
    """A kernel may write there: memory for the shape and strides alone would be too short."""
    from lowprec.backends.triton_kernels import starting

    @starting.repeated
    def part(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.empty(4, 16, device=x.device)[:, :8]]

    for _ in range(2):
        assert part(matrix())[0].untyped_storage().nbytes() == 4 * 16 * 4


def test_who_listens_hears_of_every_launch(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from lowprec.backends.triton_kernels import gate_ops, gates

    for _ in range(2):
        gate_ops.gate_cast(matrix(), None, "silu", "")
    assert len(gpu.compiled) == 1
    monkeypatch.setattr(gates.gate_tiles, "pre_run_hooks", [print])
    gate_ops.gate_cast(matrix(), None, "silu", "")
    assert len(gpu.compiled) == 2


def test_other_versions_of_triton_launch_by_themselves(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowprec.backends.triton_kernels import gate_ops, starting

    monkeypatch.setattr(starting, "_direct", False)
    for _ in range(3):
        gate_ops.gate_cast(matrix(), None, "silu", "")
    assert (len(gpu.compiled), gpu.started) == (3, [])


@pytest.mark.parametrize("tiles", [0, 2])
def test_the_launcher_is_given_what_tritons_own_wrapper_gives_it(
    tiles: int, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The C function gets the same from us and from Triton's CudaLauncher around it."""
    from triton.backends.nvidia import driver

    from lowprec.backends.triton_kernels import starting

    class Compiled:
        """As the function in C: no function of Python."""

        def __call__(self, *arguments: Any) -> None:
            got.append(arguments)

    got: list[tuple[Any, ...]] = []
    made: list[Any] = []

    def fill(*description: Any) -> Any:
        made.append(description)
        return description

    utils = SimpleNamespace(fill_tma_descriptor=fill)
    active = SimpleNamespace(active=SimpleNamespace(utils=utils))
    monkeypatch.setattr(driver.triton.runtime, "driver", active)
    description = {
        "swizzle": 3, "elem_size": 2, "elem_type": 8, "block_size": [32, 64], "fp4_padded": False
    }  # fmt: skip
    signature = dict.fromkeys("ab"[:tiles], "tensordesc<bf16[32, 64]>")
    signature |= {"p": "*bf16", "n": "i32", "c": "constexpr"}
    run = object.__new__(driver.CudaLauncher)
    run.__dict__.update(
        num_ctas=1, global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0,
        profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=True,
        launch=driver.wrap_handle_tensordesc(Compiled(), signature, [description] * tiles),
    )  # fmt: skip
    compiled = SimpleNamespace(run=run, function="function", packed_metadata="metadata")
    x, y = matrix(), matrix()
    rest = ([96, 256], [256, 1], [32, 64], None)
    arguments = (*[starting.Tiled(one, *rest) for one in (x, y)[:tiles]], y, 5, 6)
    want = ("function", "metadata", None, None, None)
    run(4, 1, 1, 7, *want, *arguments)
    started = starting._Started("kernel", compiled, (4, 1, 1), arguments)
    launch = starting._launch(started, [x, y])
    assert launch is not None
    call = starting._Call(-1, (launch,), ())
    for _ in range(2):
        call.run(x.device, [x.data_ptr(), y.data_ptr()])
    with_address = [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in got[0]]
    assert [list(one) for one in got[1:]] == [with_address] * 2
    assert len(made) == 2 * tiles  # by Triton, and once by us


def test_the_host_benchmark_runs_dry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every arm and op is started without a GPU, and all of it is put back."""
    from argparse import Namespace

    from benchmarks import host
    from lowprec.backends.triton_kernels import starting

    monkeypatch.setattr(host, "STEPS", 2)
    through_triton = starting._through_triton
    chosen = Namespace(dry=True, recipes=["mxfp8-portable"], blocks=5, profile=0)
    with host.dry():
        lines = list(host.lines_of(chosen))
    assert [line.get("module") for line in lines[:3]] == ["linear", "norm_linear", "mlp"]
    assert len(lines) == 3 + 7
    assert all((line["us"][1] if "module" in line else line["us"]) > 0 for line in lines)
    assert starting._through_triton is through_triton

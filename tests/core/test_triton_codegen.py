"""The kernels compile without a GPU: no spills, registers and instructions within a budget.

A kernel that reads and writes 3 to 4 bytes for an element has time for some 20 to 30 instructions
on it before it stops being bound by memory.
"""

from __future__ import annotations

import collections
import importlib
import importlib.util
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lowprec.formats import Cast

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton's compiler",
)

POINTERS = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int16: "i16",
    torch.float8_e4m3fn: "fp8e4nv",
}


class Recorder:
    """Stands in for a kernel and keeps what it was launched with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.arguments: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            self.arguments, self.options = arguments, options

        return launch

    def compile(self, capability: int) -> Any:
        """The kernel compiled for what it was launched with."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource

        names = self.kernel.arg_names
        bound = dict(zip(names, self.arguments, strict=False)) | self.options
        signature, constants, facts = {}, {}, {}
        for index, param in enumerate(self.kernel.params):
            value = bound[param.name]
            kind, constant, aligned = describe(value, constexpr=param.is_constexpr)
            if isinstance(value, int) and param.do_not_specialize and not param.is_constexpr:
                kind, constant, aligned = "i32", False, False
            signature[param.name] = kind
            if constant:
                constants[param.name] = value
            if aligned:
                facts[(index,)] = [["tt.divisibility", 16]]
        source = GluonASTSource if self.kernel.is_gluon() else ASTSource
        return triton.compile(
            source(fn=self.kernel, signature=signature, constexprs=constants, attrs=facts),
            target=GPUTarget("cuda", capability, 32),
            options={
                "num_warps": self.options.get("num_warps", 4),
                "enable_fp_fusion": self.options.get("enable_fp_fusion", True),
            },
        )


def describe(value: Any, *, constexpr: bool) -> tuple[str, bool, bool]:
    """Type of an argument, whether it is a constant, whether it is a multiple of 16."""
    if constexpr or value is None:
        return "constexpr", True, False
    if isinstance(value, torch.Tensor):
        return f"*{POINTERS[value.dtype]}", False, True
    if isinstance(value, int):
        return ("constexpr", True, False) if value == 1 else ("i32", False, value % 16 == 0)
    if isinstance(value, float):
        return "fp32", False, False
    kind = POINTERS[value.base.dtype]
    return f"tensordesc<{kind}{list(value.block_shape)},{value.layout!r}>", False, False


def stale(ptx: str) -> list[str]:
    """Words {w, f(w)} of a pair w of 8-bit codes that a conversion made, such as {w, w >> 8}.

    ptxas of CUDA 12.8 and 12.9 compiles them so that f reads w before the conversion writes it.
    """
    pairs = re.findall(r"cvt\.rn\.satfinite\.e\dm\dx2\.f32\s+(%rs\d+)", ptx)
    made = {one: {one} for one in pairs}
    for to, what in re.findall(r"\s[\w.]+16\s+(%rs\d+), ([^;]*);", ptx):
        if to not in made:
            made[to] = set().union(*(made.get(one, set()) for one in re.findall(r"%rs\d+", what)))
    words = re.finditer(r"mov\.b32\s+%r\d+, \{(%rs\d+), (%rs\d+)\}", ptx)
    return [one[0] for one in words if one[1] in pairs and one[1] in made.get(one[2], set())]


def disassembled(compiled: Any, folder: Path) -> tuple[collections.Counter[str], dict[str, int]]:
    """Instructions by name, and registers, stack and local bytes."""
    import triton.backends.nvidia as nvidia

    assert stale(compiled.asm["ptx"]) == []

    tools = Path(nvidia.__file__).parent / "bin"
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])

    def run(*command: str | Path) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    listing = run(tools / "nvdisasm", "-c", binary)
    usage = run(tools / "cuobjdump", "-res-usage", binary)
    found = re.findall(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", listing)
    counted = collections.Counter(name for name in found if name != "NOP")
    resources = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return counted, resources


def matrix(dtype: torch.dtype = torch.bfloat16, rows: int = 4096, cols: int = 2048) -> torch.Tensor:
    return torch.empty(1, rows, cols, dtype=dtype)


def cast(row: str, column: str, dtype: torch.dtype = torch.bfloat16) -> None:
    from lowprec.backends.triton_kernels import launch

    x = matrix(dtype)
    launch.cast_plain(x, row, column, launch.outputs(x, row, column), integer=False)


def pipelined(row: str, column: str, dtype: torch.dtype = torch.bfloat16, cols: int = 2048) -> None:
    from lowprec.backends.triton_kernels import launch, pipelined

    x = matrix(dtype, cols=cols)
    pipelined.cast(x, row, column, launch.outputs(x, row, column))


def whole_rows() -> None:
    from lowprec.backends.triton_kernels import span_ops

    rowwise = Cast.parse("fp8_rowwise")
    out = span_ops.outputs(matrix(), rowwise, by_column=False)
    span_ops.cast_whole_rows(matrix(), rowwise, out, integer=False)


def spanned(name: str, *, by_column: bool) -> None:
    from lowprec.backends.triton_kernels import span_ops

    span_ops.cast_spans(matrix(), Cast.parse(name), by_column=by_column, integer=False)


def decoded(name: str) -> None:
    from lowprec.backends.triton_kernels import value_ops

    codes = matrix(torch.uint8)
    scales = torch.empty(1, 4096, 64, dtype=torch.uint8)
    fmt = Cast.parse(name).format
    value_ops.decode(codes, scales, fmt, by_column=False, dtype=torch.bfloat16, integer=False)


def round_trip(name: str) -> None:
    from lowprec.backends.triton_kernels import value_ops

    value_ops.round_trip(matrix(), name, by_column=False, dtype=torch.bfloat16, integer=False)


def ragged(what: str, name: str) -> None:
    from lowprec.backends.triton_kernels import launch, value_ops

    x, fmt = matrix(cols=2039), Cast.parse(name).format
    if what in ("cast", "both"):
        column = name if what == "both" else ""
        launch.cast_plain(x, name, column, launch.outputs(x, name, column), integer=False)
    elif what == "decode":
        scales = torch.empty(1, 32, 16, dtype=torch.uint8)
        codes = matrix(torch.uint8, cols=2039)
        value_ops.decode(codes, scales, fmt, by_column=False, dtype=torch.bfloat16, integer=False)
    else:
        value_ops.round_trip(x, name, by_column=False, dtype=torch.bfloat16, integer=False)


def normed(cols: int, *, centered: bool, dtype: torch.dtype = torch.bfloat16) -> None:
    from lowprec.backends.triton_kernels import fused

    x, weight = matrix(dtype, cols=cols)[0], torch.empty(cols, dtype=torch.bfloat16)
    bias = weight if centered else None
    fused.normalize(x, Cast.parse("mxfp8"), weight=weight, bias=bias, centered=centered)


def streamed_norm(cols: int, *, centered: bool) -> None:
    from lowprec.backends.triton_kernels import norm_ops, streamed

    x, weight = matrix(cols=cols)[0], torch.empty(cols, dtype=torch.bfloat16)
    out = norm_ops.norm_outputs(x, None, centered, MX)
    _, codes, scales, spec = norm_ops.parts(MX, out[-2:])
    sources = [x, None, weight, weight if centered else None]
    targets = [None, None, codes, scales, out[1] if centered else None, out[0]]
    streamed.normalize(sources, targets, 1e-6, spec, shape=streamed.shape_for(cols))


def streamed_both(cols: int, *, centered: bool) -> None:
    from lowprec.backends.triton_kernels import launch, pipelined, streamed

    x, weight = matrix(cols=cols)[0], torch.empty(cols, dtype=torch.bfloat16)
    known = torch.empty(len(x))
    affine = pipelined.Affine(
        *((weight, weight, known, known) if centered else (weight, None, None, known))
    )
    out = [t[0] for t in launch.outputs(x[None], MX, MX)]
    streamed.normalize_both(x, (MX, MX), out, affine, 1e-6)


def normed_both(cols: int, *, centered: bool = False, row: bool = True) -> None:
    from lowprec.backends.triton_kernels import fused

    x, weight = matrix(cols=cols)[0], torch.empty(cols, dtype=torch.bfloat16)
    mx = Cast.parse("mxfp8")
    if row:
        bias = weight if centered else None
        fused.normalize_both(x, (mx, mx), weight=weight, bias=bias, centered=centered)
    else:
        done = fused.Normalized(x, x, None, torch.empty(4096))
        fused.normalize_again(done, mx, axis=-2, weight=weight)


def pipelined_norm(cols: int, *, centered: bool) -> None:
    from lowprec.backends.triton_kernels import launch, pipelined

    x, weight = matrix(cols=cols)[0], torch.empty(cols, dtype=torch.bfloat16)
    known = torch.empty(len(x))
    norm = pipelined.Affine(
        *((weight, weight, known, known) if centered else (weight, None, None, known))
    )
    out = [t[0] for t in launch.outputs(x[None], MX, MX)]
    pipelined.normalize(x, MX, MX, out, norm=norm, eps=1e-6)


def pipelined_again() -> None:
    from lowprec.backends.triton_kernels import launch, pipelined

    x, weight = matrix(), torch.empty(2048, dtype=torch.bfloat16)
    norm = pipelined.Affine(weight, None, None, torch.empty(4096))
    pipelined.cast(x, "", WIDE, launch.outputs(x, "", WIDE), norm=norm)


def streamed_amax() -> None:
    from lowprec.backends.triton_kernels import streamed

    x, weight = matrix()[0], torch.empty(2048, dtype=torch.bfloat16)
    targets = [None, None, None, None, None, torch.empty(len(x))]
    amax, shape = torch.zeros(1, dtype=torch.int32), streamed.shape_for(2048)
    sources = [x, None, weight, None]
    streamed.normalize(sources, targets, 1e-6, None, amax=amax, shape=shape)


def pipelined_tensor(*, norm: bool = False) -> None:
    from lowprec.backends.triton_kernels import pipelined, span_ops

    name = "fp8_tensorwise"
    codes, codes_t, scale = span_ops.both_outputs(matrix(), name)
    amax = torch.zeros(1, dtype=torch.int32)
    affine, weight = pipelined.PLAIN, torch.empty(2048, dtype=torch.bfloat16)
    if norm:
        affine = pipelined.Affine(weight, None, None, torch.empty(4096))
    out = [codes, scale, codes_t, scale]
    pipelined.cast(matrix(), name, name, out, norm=affine, amax=amax)


def rotated(size: int, name: str, axis: int = -1) -> None:
    from lowprec.backends.triton_kernels import rotated
    from lowprec.rng import RandomStream
    from lowprec.rotation import Rotation

    cast = Cast.parse(name)
    streams = (None, RandomStream(2**40) if cast.stochastic else None)
    rotated.rotate_quantize(
        matrix()[0], Rotation(size), cast, axis=axis, side="left", streams=streams
    )


def random_cast(row: str, column: str) -> None:
    from lowprec.backends.triton_kernels import launch
    from lowprec.backends.triton_kernels.views import NEAREST, Draws

    x, drawn = matrix(), Draws("across", 0, 2**30, 2**29)
    draws = {"by_row": drawn if row else NEAREST, "by_column": drawn if column else NEAREST}
    out = launch.outputs(x, row, column)
    launch.cast_plain(x, row, column, out, integer=False, **draws)


def words() -> None:
    from lowprec.backends.triton_kernels import launch

    launch.random_words(0, 4096, 2**30, 2**29, device=torch.device("cpu"))


def norm_backward(cols: int) -> None:
    from lowprec.backends.triton_kernels import fused

    x, weight = matrix(cols=cols)[0], torch.empty(cols, dtype=torch.bfloat16)
    done = fused.Normalized(x, x, torch.empty(4096), torch.empty(4096))
    fused.normalize_backward(x, done, weight=weight, has_bias=True)


def gated(kind: str) -> None:
    from lowprec.backends.triton_kernels import fused

    fused.activate(matrix()[0], matrix()[0], Cast.parse("mxfp8"), kind=kind)


def gate_backward() -> None:
    from lowprec.backends.triton_kernels import fused

    fused.activate_backward(matrix()[0], matrix()[0], matrix()[0])


def gate_halves_backward() -> None:
    from lowprec.backends.triton_kernels import fused

    fused.activate_halves_backward(matrix()[0], matrix(cols=4096)[0])


MX, TILE, WIDE, SQUARE = "mxfp8", "mxfp8_32x32", "mxfp8_1x128", "mxfp8_128x128"
# case: module and kernel, launch, registers a thread at most, instructions an element at most (of
# the whole kernel, so the pipelined ones count what they do once a program). Recorded on sm90 and
# sm100 with Triton 3.6, plus a tenth. Of random rounding to FP8 both ways count, of which a tile
# takes one.
BUDGET: dict[str, tuple[str, Callable[[], None], int, float]] = {
    "row 1x32": ("tiles.cast_tiles", lambda: cast(MX, ""), 40, 19),
    "row 1x32 float32": ("tiles.cast_tiles", lambda: cast(MX, "", torch.float32), 40, 17),
    "row 1x128": ("tiles.cast_tiles", lambda: cast(WIDE, ""), 40, 19),
    "row 32x32": ("tiles.cast_tiles", lambda: cast(TILE, ""), 64, 13),
    "row mxfp4": ("tiles.cast_tiles", lambda: cast("mxfp4", ""), 40, 32),
    "both 1x32, plain": ("tiles.cast_tiles", lambda: cast(MX, MX), 144, 32),
    "both 1x32": ("pipeline.cast_tiles_pipelined", lambda: pipelined(MX, MX), 184, 16),
    "both 32x32": ("pipeline.cast_tiles_pipelined", lambda: pipelined(TILE, TILE), 168, 11.5),
    "both 1x128": ("pipeline.cast_tiles_pipelined", lambda: pipelined(WIDE, WIDE), 255, 21),
    "both 128x128": ("pipeline.cast_tiles_pipelined", lambda: pipelined(SQUARE, SQUARE), 208, 11.7),
    "both 1x32, rows at 8 bytes": (
        "pipeline.cast_tiles_pipelined",
        lambda: pipelined(MX, MX, cols=100),
        255,
        19.5,
    ),
    "row 1x128, column 128x128": (
        "pipeline.cast_tiles_pipelined",
        lambda: pipelined(WIDE, SQUARE),
        255,
        19,
    ),
    "row 1x32, column 128x128": (
        "pipeline.cast_tiles_pipelined",
        lambda: pipelined(MX, SQUARE),
        255,
        24,
    ),
    "both float32": (
        "pipeline.cast_tiles_pipelined",
        lambda: pipelined(MX, MX, torch.float32),
        144,
        17,
    ),
    "column 1x32": ("pipeline.cast_tiles_pipelined", lambda: pipelined("", MX), 140, 9),
    "rowwise": ("spans.cast_whole_rows", whole_rows, 80, 19),
    "maxima": ("spans.partial_maxima", lambda: spanned("fp8_rowwise", by_column=True), 40, 11),
    "tensorwise": (
        "spans.encode_spans",
        lambda: spanned("fp8_tensorwise", by_column=False),
        88,
        19,
    ),
    "decode 1x32": ("values.decode_tiles", lambda: decoded(MX), 34, 23),
    "decode 32x32": ("values.decode_tiles", lambda: decoded(TILE), 48, 13),
    "round trip": ("values.round_trip_tiles", lambda: round_trip(MX), 40, 27),
    # Odd widths: no element but the first of a row is known to be aligned.
    "row 128x128, ragged": ("tiles.cast_tiles", lambda: ragged("cast", SQUARE), 255, 60),
    "both 1x128, ragged": ("tiles.cast_tiles", lambda: ragged("both", WIDE), 255, 90),
    "decode 128x128, ragged": ("values.decode_tiles", lambda: ragged("decode", SQUARE), 255, 60),
    "round trip 128x128, ragged": (
        "values.round_trip_tiles",
        lambda: ragged("round trip", SQUARE),
        255,
        60,
    ),
    "rmsnorm 1024": (
        "norm_pairs.norm_rows_of_pairs",
        lambda: normed(1024, centered=False),
        72,
        16.5,
    ),
    "layernorm 2048": (
        "norm_pairs.norm_rows_of_pairs",
        lambda: normed(2048, centered=True),
        80,
        22.5,
    ),
    "rmsnorm 2048 float32": (
        "norm.norm_rows",
        lambda: normed(2048, centered=False, dtype=torch.float32),
        64,
        21,
    ),
    "rmsnorm 1024, streamed": (
        "norm_stream.norm_rows_streamed",
        lambda: streamed_norm(1024, centered=False),
        88,
        17,
    ),
    "rmsnorm 2048, streamed": (
        "norm_stream.norm_rows_streamed",
        lambda: streamed_norm(2048, centered=False),
        156,
        15,
    ),
    "layernorm 2048, streamed": (
        "norm_stream.norm_rows_streamed",
        lambda: streamed_norm(2048, centered=True),
        176,
        20.5,
    ),
    "rmsnorm both 2048, streamed": (
        "norm_band_stream.norm_bands_streamed",
        lambda: streamed_both(2048, centered=False),
        144,
        31,
    ),
    "layernorm both 1024, streamed": (
        "norm_band_stream.norm_bands_streamed",
        lambda: streamed_both(1024, centered=True),
        208,
        47,
    ),
    "rmsnorm both 256": ("norm.norm_bands", lambda: normed_both(256), 255, 35),
    "rmsnorm both 2048": ("norm.norm_bands", lambda: normed_both(2048), 232, 39),
    "layernorm both 2048": ("norm.norm_bands", lambda: normed_both(2048, centered=True), 224, 51),
    "rmsnorm again, column": ("norm.norm_tiles", lambda: normed_both(2048, row=False), 80, 34),
    "rmsnorm both 2048, pipelined": (
        "norm_pipeline.norm_bands_pipelined",
        lambda: pipelined_norm(2048, centered=False),
        255,
        48,
    ),
    "layernorm both 1024, pipelined": (
        "norm_pipeline.norm_bands_pipelined",
        lambda: pipelined_norm(1024, centered=True),
        255,
        56,
    ),
    "rmsnorm again 1x128, pipelined": (
        "pipeline.cast_tiles_pipelined",
        pipelined_again,
        184,
        20,
    ),
    "rmsnorm 2048, amax": ("norm_stream.norm_rows_streamed", streamed_amax, 156, 11.5),
    "rmsnorm + both tensorwise": (
        "pipeline.cast_tiles_pipelined",
        lambda: pipelined_tensor(norm=True),
        128,
        27,
    ),
    "both tensorwise": ("pipeline.cast_tiles_pipelined", pipelined_tensor, 80, 21),
    "rht16": ("butterfly.rotate_tiles", lambda: rotated(16, MX), 90, 14),
    "rht32": ("butterfly.rotate_tiles", lambda: rotated(32, MX), 88, 16),
    "rht128": ("butterfly.rotate_tiles", lambda: rotated(128, MX), 80, 42.5),
    "rht32 sr": ("butterfly.rotate_tiles", lambda: rotated(32, "mxfp8:sr"), 100, 43.5),
    "rht32 mxfp4 sr": ("butterfly.rotate_tiles", lambda: rotated(32, "mxfp4:sr"), 72, 35),
    "rht32 column": ("butterfly.rotate_tiles", lambda: rotated(32, MX, -2), 80, 21.5),
    "rht32 column sr": ("butterfly.rotate_tiles", lambda: rotated(32, "mxfp8:sr", -2), 115, 57),
    "row 1x32 sr": ("tiles.cast_tiles", lambda: random_cast("mxfp8:sr", ""), 62, 47),
    "row 32x32 sr": ("tiles.cast_tiles", lambda: random_cast("mxfp8_32x32:sr", ""), 100, 41),
    "both 1x32 sr": ("tiles.cast_tiles", lambda: random_cast("mxfp8:sr", "mxfp8:sr"), 255, 126),
    "words": ("draws.fill_words", words, 40, 13),
    "norm backward": ("norm.norm_backward_rows", lambda: norm_backward(2048), 144, 35),
    "sums of programs": ("norm.sum_programs", lambda: norm_backward(2048), 56, 22),
    "silu gate": ("gates.gate_tiles", lambda: gated("silu"), 56, 35),
    "gelu gate": ("gates.gate_tiles", lambda: gated("gelu"), 104, 54),
    "gate backward": ("gates.gate_backward_tiles", gate_backward, 144, 34),
    "gate backward, halves": ("gates.gate_backward_tiles", gate_halves_backward, 144, 34),
}


def recorded(
    kernel: str, launch: Callable[[], None], capability: int, monkeypatch: pytest.MonkeyPatch
) -> Recorder:
    """What `launch` launches the kernel with on such a GPU; nothing runs."""
    from lowprec.backends.triton_kernels import norm, norm_ops, pipelined, spans, streamed

    monkeypatch.setattr(pipelined, "processors", lambda device: 132)
    monkeypatch.setattr(pipelined, "_major", lambda device: capability // 10)
    monkeypatch.setattr(norm_ops, "_processors", lambda device: 132)
    pipelined.decided.cache_clear()
    monkeypatch.setattr(streamed, "_processors", lambda device: 132)
    others = [(spans, "partial_maxima"), (spans, "encode_spans")]
    others += [(norm, "norm_backward_rows"), (norm, "sum_programs")]
    for module, name in others:
        monkeypatch.setattr(module, name, Recorder(getattr(module, name)))
    module_name, _, name = kernel.partition(".")
    module = importlib.import_module(f"lowprec.backends.triton_kernels.{module_name}")
    found = getattr(module, name)
    recorder = found if isinstance(found, Recorder) else Recorder(found)
    monkeypatch.setattr(module, name, recorder)
    launch()
    return recorder


def elements(recorder: Recorder) -> int:
    """Elements that a program of the launch casts (a loop's body counts once)."""
    options = recorder.options
    if "TILE_R" in options:
        return int(options["TILE_R"] * options.get("TILE_C", options.get("COLS")))
    if "TILE_P" in options:
        return int(options["TILE_P"] * options["TILE_C"])
    if "NB" in options:
        return int(options["TILE_M"] * options["NB"] * 32)
    if "CALLS" in options:
        return int(options["CALLS"] * 16)
    shape = recorder.arguments[2].block_shape  # of the transposed codes
    return int(shape[0] * shape[1])


# Close relatives of others, which compile for seconds.
ALSO = ("row 1x32 float32", "row 1x128", "both 128x128", "both float32", "rmsnorm 1024")
ALSO += ("layernorm both 2048", "rmsnorm both 256", "rht16", "rht128", "rht32 mxfp4 sr")
ALSO += ("rht32 column sr", "row 32x32 sr", "both 1x32 sr", "row 128x128, ragged")
ALSO += ("row 1x32, column 128x128",)
ALSO += ("both 1x128, ragged", "decode 128x128, ragged", "round trip 128x128, ragged")
CASES = [pytest.param(c, marks=[pytest.mark.slow] if c in ALSO else []) for c in BUDGET]


@pytest.mark.parametrize("capability", [90, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_kernels_stay_within_their_budget(
    case: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, launch, registers, instructions = BUDGET[case]
    recorder = recorded(kernel, launch, capability, monkeypatch)
    counted, resources = disassembled(recorder.compile(capability), tmp_path)
    each = sum(counted.values()) * 32 * recorder.options.get("num_warps", 4) / elements(recorder)
    assert resources["STACK"] == 0
    assert resources["LOCAL"] == 0
    assert resources["REG"] <= registers
    assert each <= instructions


@pytest.mark.parametrize(
    ("row", "column"),
    [(MX, MX), ("", MX), ("", WIDE), *[pytest.param(SQUARE, SQUARE, marks=pytest.mark.slow)]],
)
def test_as_many_programs_fit_a_multiprocessor_as_are_started(
    row: str, column: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A persistent program that waits for another to end leaves its tiles to the end."""
    from lowprec.backends.triton_kernels import pipelined as launches

    kernel = "pipeline.cast_tiles_pipelined"
    recorder = recorded(kernel, lambda: pipelined(row, column), 90, monkeypatch)
    compiled = recorder.compile(90)
    _, resources = disassembled(compiled, tmp_path)
    shape = launches.shape_for(launches._specs(row, column), 2, 9)
    registers = -(-resources["REG"] // 8) * 8 * 32 * shape.warps
    assert shape.per_processor * (compiled.metadata.shared + 1024) <= 228 * 1024
    assert shape.per_processor * registers <= 65536

"""Native products on a CPU: what is refused, and what would reach the vendor, decoded back."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import ScalingType, SwizzleType

import lowprec
from lowprec import ops
from lowprec.backends import Facts, choose_gemm, scale_storage, scaled_mm, triton_kernels
from lowprec.backends import reference as law
from lowprec.blocks import power_of_two
from lowprec.errors import UnsupportedError
from lowprec.formats import E2M1, FORMATS, Cast
from lowprec.hardware import NAMED
from lowprec.tensor import QuantizedTensor

HOPPER = [
    ("fp8_tensorwise", "fp8_tensorwise"),
    ("fp8_rowwise", "fp8_rowwise"),
    ("fp8_1x128", "fp8_128x128"),
    ("fp8_1x128", "fp8_1x128"),
    ("fp8_128x128", "fp8_1x128"),
    ("fp8_128x128", "fp8_128x128"),
    ("mxfp8_1x128", "mxfp8_128x128"),
    ("mxfp8_1x128", "mxfp8_1x128"),
    ("mxfp8_128x128", "mxfp8_1x128"),
    ("mxfp8_128x128", "mxfp8_128x128"),
    ("fp8_1x128", "mxfp8_128x128"),
]
BLACKWELL = [
    ("fp8_tensorwise", "fp8_tensorwise"),
    ("fp8_rowwise", "fp8_rowwise"),
    ("mxfp8", "mxfp8"),
    ("mxfp8", "mxfp8_32x32"),
    ("mxfp8_e5m2", "mxfp8_32x32"),
    ("mxfp8_1x128", "mxfp8_128x128"),
    ("fp8_1x128", "fp8_128x128"),
    ("mxfp8_1x128", "mxfp8"),
    ("nvfp4", "nvfp4"),
    ("nvfp4", "nvfp4_16x16"),
]
PAIRS = [("h200", *pair) for pair in HOPPER] + [("b200", *pair) for pair in BLACKWELL]
SHAPES = [
    (0, 8, 64),
    (5, 0, 64),
    (3, 7, 0),
    (1, 1, 1),
    (5, 24, 39),
    (130, 144, 256),
    (64, 48, 1000),
]


def data(*shape: int, seed: int) -> torch.Tensor:
    """Gaussian values with channels that differ by 12 octaves."""
    generator = torch.Generator().manual_seed(seed)
    octaves = torch.linspace(-6, 6, max(shape[-1], 1))[: shape[-1]]
    return torch.randn(*shape, generator=generator) * torch.exp2(octaves)


def casts(*names: str) -> list[Cast]:
    return [Cast.parse(name) for name in names]


# --- The vendor's product, with the checks that torch makes, in float64 -------------------------


def up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def unswizzled(flat: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Scales [rows, blocks] by the formula of SWIZZLE_32_4_4, one by one."""
    assert flat.is_contiguous()
    assert flat.numel() == up(rows, 128) * up(blocks, 4)
    r, c = torch.arange(rows)[:, None], torch.arange(blocks)[None, :]
    tile = r // 128 * -(-blocks // 4) + c // 4
    return flat.view(-1)[tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4]


def scale_matrix(
    scales: list[torch.Tensor], names: list[str], rows: int, depth: int, *, right: bool
) -> torch.Tensor:
    """Every element's scale, float64 [rows, depth]."""
    one = scales[0]
    every, blocks = torch.zeros(rows, depth, dtype=torch.float64), -(-depth // 128)
    if names == ["TensorWise"]:
        assert one.numel() == 1
        return every + one.double()
    if names == ["RowWise"]:
        assert one.shape == ((1, rows) if right else (rows, 1))
        assert not right or one.stride(1) == 1
        return every + one.reshape(rows, 1).double()
    if names == ["BlockWise1x128"]:
        assert (one.shape, one.stride()) == ((rows, blocks), (1, rows))
        assert rows % 4 == 0
        return one.double().repeat_interleave(128, 1)[:, :depth]
    if names == ["BlockWise128x128"]:
        assert one.shape == (up(blocks, 4), -(-rows // 128))
        assert one.stride() == (1, up(blocks, 4))
        assert not one[blocks:].any()
        tiles = one[:blocks].mT.double().repeat_interleave(128, 0)[:rows]
        return tiles.repeat_interleave(128, 1)[:, :depth]
    if names == ["BlockWise1x32"]:
        plain = unswizzled(one.view(torch.uint8), rows, -(-depth // 32)).int()
        return power_of_two(plain).double().repeat_interleave(32, 1)[:, :depth]
    assert names == ["BlockWise1x16", "TensorWise"]
    plain = unswizzled(one.view(torch.uint8), rows, depth // 16)
    values = plain.view(torch.float8_e4m3fn).double() * scales[1].double()
    return values.repeat_interleave(16, 1)


def values_of(codes: torch.Tensor) -> torch.Tensor:
    if codes.dtype != torch.float4_e2m1fn_x2:
        return codes.double()
    pairs = codes.view(torch.uint8).int()
    both = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
    return torch.tensor(E2M1.values, dtype=torch.float64)[both]


def vendor(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: list[torch.Tensor],
    recipe_a: list[ScalingType],
    scale_b: list[torch.Tensor],
    recipe_b: list[ScalingType],
    *,
    swizzle_a: list[SwizzleType] | None,
    swizzle_b: list[SwizzleType] | None,
    bias: torch.Tensor | None,
    output_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """What torch.nn.functional.scaled_mm documents, refusing what it refuses."""
    assert not use_fast_accum
    assert not a.dtype == b.dtype == torch.float8_e5m2
    names = [[one.name for one in recipe] for recipe in (recipe_a, recipe_b)]
    assert names != [["BlockWise128x128"]] * 2
    factors = []
    sides = ((a, scale_a, names[0], swizzle_a), (b.mT, scale_b, names[1], swizzle_b))
    for right, (codes, scales, named, swizzle) in enumerate(sides):
        assert codes.stride(1) == 1
        assert codes.stride(0) >= codes.shape[1]
        assert codes.stride(0) % 16 == codes.data_ptr() % 16 == codes.shape[1] % 16 == 0
        assert not right or codes.shape[0] % 16 == 0
        values = values_of(codes)
        expected = {"BlockWise1x32": ["SWIZZLE_32_4_4"], "BlockWise1x16": ["SWIZZLE_32_4_4"]}
        assert [one.name for one in swizzle or []][:1] == expected.get(named[0], [])
        factors.append(values * scale_matrix(scales, named, *values.shape, right=bool(right)))
    product = factors[0] @ factors[1].mT
    if bias is not None:
        assert (bias.dtype, output_dtype) == (torch.bfloat16, torch.bfloat16)
        assert bias.shape == (b.shape[1],)
        product += bias.double()
    return product.to(output_dtype)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let products run on the CPU as on the named GPU."""

    def run_as(name: str) -> None:
        def sides(device: torch.device, left: str, right: str) -> Any:
            del device
            kinds = scaled_mm._kinds(NAMED[name], FORMATS[left], FORMATS[right])
            assert not isinstance(kinds, str), kinds
            return scaled_mm._side(kinds[0], right=False), scaled_mm._side(kinds[1], right=True)

        monkeypatch.setattr(scaled_mm, "_sides", sides)
        monkeypatch.setattr(torch.nn.functional, "scaled_mm", vendor)

    return run_as


@pytest.mark.parametrize(("hardware", "left", "right"), PAIRS)
def test_products_through_the_layouts(
    hardware: str, left: str, right: str, on: Callable[[str], None]
) -> None:
    on(hardware)
    for m, n, k in SHAPES:
        a, b = ops.quantize(data(m, k, seed=1), left), ops.quantize(data(n, k, seed=2), right)
        wide, narrow = data(n, seed=3), torch.bfloat16
        cases: list[tuple[torch.Tensor | None, torch.dtype]] = [(wide.bfloat16(), narrow)]
        if k < 64:
            cases += [(None, narrow), (wide, narrow), (None, torch.float32), (wide, torch.float32)]
        for bias, dtype in cases:
            got, want = (
                ops.matmul(a, b, bias=bias, out_dtype=dtype, backend=which)
                for which in ("scaled_mm", "reference")
            )
            assert got.is_contiguous()
            assert (got.shape, got.dtype) == (want.shape, dtype)
            # The reference rounds code x scale to float32; then at most a tie falls elsewhere.
            unit = 2**-8 if dtype == narrow else 2**-20
            largest = want.abs().amax() if want.numel() else 0
            assert ((got - want).abs() <= unit * largest).all(), (m, n, k)


def test_views_that_do_not_lie_right_are_copied(on: Callable[[str], None]) -> None:
    on("h200")
    x, w = data(136, 256, seed=1), data(128, 256, seed=2)
    b = ops.quantize(w, "mxfp8_128x128")
    whole = ops.quantize(x, "mxfp8_1x128")
    by_column = ops.quantize(x.mT.contiguous(), "mxfp8_1x128", axis=0).mT
    shifted = torch.empty(136 * 256 + 8, dtype=torch.uint8)[8:].view(136, 256)
    shifted.copy_(whole.codes)
    lone = QuantizedTensor(shifted, whole.scales, whole.format, -1)
    want = ops.matmul(whole, b, backend="reference")
    for a in (whole, by_column, lone):
        assert torch.equal(ops.matmul(a, b, backend="scaled_mm"), want)
    expanded = ops.quantize(x[:1].expand(8, -1), "mxfp8_1x128")
    expanded = QuantizedTensor(
        expanded.codes[:1].expand(8, -1), expanded.scales, expanded.format, -1
    )
    assert torch.equal(ops.matmul(expanded, b, backend="scaled_mm"), want[:1].expand(8, -1))


def test_codes_and_scales_that_lie_right_are_not_copied() -> None:
    q = ops.quantize(data(64, 512, seed=1), "fp8_1x128")
    side = scaled_mm._side("blocks", right=True)
    assert scaled_mm._codes(q, side).data_ptr() == q.codes.data_ptr()
    turned = QuantizedTensor(q.codes, q.scales.mT.contiguous().mT, q.format, -1)
    assert side.lay_out(turned, 64)[0].data_ptr() == turned.scales.data_ptr()


def test_every_e8m0_scale_keeps_its_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(64, 4)
    want = power_of_two(codes.int())
    assert want.isnan().sum() == 1
    for got in (
        scale_storage.block_scales(codes, 64),
        scale_storage.tile_scales(codes).mT,
        scale_storage.tile_scales_by_row(codes, 64 * 128)[::128],
    ):
        assert torch.equal(got.nan_to_num(-1), want.nan_to_num(-1))
    assert torch.equal(scale_storage.e8m0_of(want), codes)
    padded = scale_storage.block_scales(codes[:6], 8)
    assert (padded.shape, padded.stride()) == ((8, 4), (1, 8))
    assert not padded[6:].any()


@pytest.mark.parametrize(("rows", "depth"), [(128, 512), (5, 39), (300, 1000), (1, 128)])
def test_the_sm100_layout_of_portable_equals_that_of_mxfp8(rows: int, depth: int) -> None:
    """The same codes as MXFP8 1x32, every scale written out four times (and for 128 rows)."""
    side = scaled_mm._side("mx", right=False)
    for name in ("mxfp8_1x128", "mxfp8_128x128", "fp8_1x128", "fp8_128x128"):
        portable = ops.quantize(data(rows, depth, seed=4), name)
        bytes_ = scale_storage.e8m0_of(portable.scales)
        across = portable.format.block[0]
        repeated = bytes_.repeat_interleave(across, 0)[:rows].repeat_interleave(4, 1)
        mx = QuantizedTensor(
            portable.codes, repeated[:, : math.ceil(depth / 32)], FORMATS["mxfp8"], -1
        )
        values = [law.dequantize(q, dtype=torch.float32) for q in (portable, mx)]
        assert torch.equal(*values)
        handed = [
            (scaled_mm._codes(q, side).view(torch.uint8), side.lay_out(q, rows)[0])
            for q in (portable, mx)
        ]
        assert torch.equal(handed[0][0], handed[1][0])
        assert torch.equal(*(scales.view(torch.uint8) for _, scales in handed))


def test_fp4_codes_are_paired_low_first() -> None:
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert scaled_mm.fp4_pairs(codes).view(torch.uint8).tolist() == [[0x21, 0x0F]]


@pytest.mark.parametrize(
    ("hardware", "left", "right", "says"),
    [
        ("cpu", "fp8_rowwise", "fp8_rowwise", "needs a CUDA device, this is cpu"),
        ("a100", "fp8_rowwise", "fp8_rowwise", "needs sm90 or sm100, this is a100 (sm80)"),
        ("h200", "mxfp8", "mxfp8", "mxfp8 is not native on h200 (sm90), which multiplies FP8"),
        ("h200", "mxfp8_1x128", "mxfp8_32x32", "mxfp8_32x32 is not native on h200 (sm90)"),
        ("h200", "mxfp4", "mxfp4", "mxfp4 is not native on h200 (sm90)"),
        ("h200", "nvfp4", "nvfp4", "nvfp4 is not native on h200 (sm90)"),
        ("h200", "mxfp8_e5m2", "mxfp8_e5m2", "E5M2 by E5M2 is native nowhere"),
        ("b200", "mxfp8_e5m2", "mxfp8_e5m2_32x32", "E5M2 by E5M2 is native nowhere"),
        ("h200", "fp8_tensorwise", "fp8_rowwise", "scales of two kinds"),
        ("h200", "fp8_1x128", "fp8_rowwise", "scales of two kinds"),
        ("b200", "mxfp8", "nvfp4", "scales of two kinds"),
        ("b200", "mxfp4", "mxfp4", "mxfp4 is not native on b200 (sm100)"),
        ("b200", "mxfp6_e2m3", "mxfp6_e2m3", "mxfp6_e2m3 is not native on b200 (sm100)"),
    ],
)
def test_what_is_refused(hardware: str, left: str, right: str, says: str) -> None:
    facts = Facts(NAMED[hardware], *casts(left, right))
    assert says in (scaled_mm.refuse("matmul", facts) or "")
    assert choose_gemm(facts.left, facts.right, NAMED[hardware]).product == "emulated"


def test_what_is_taken() -> None:
    for hardware, left, right in PAIRS:
        backends = choose_gemm(*casts(left, right), NAMED[hardware])
        assert backends.product == "scaled_mm", (hardware, left, right)
        assert backends.native
        assert backends.left in ("emulated", "triton")
    bf16 = Facts(NAMED["h200"], None, None)
    assert scaled_mm.refuse("matmul", bf16) == "an operand stays unquantized"
    assert choose_gemm(None, None, NAMED["h200"]).product == "emulated"
    half = Facts(NAMED["h200"], Cast.parse("fp8_rowwise"), None)
    assert scaled_mm.refuse("matmul", half) == "an operand stays unquantized"


def test_an_old_cuda_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    facts = Facts(NAMED["h200"], *casts("fp8_1x128", "fp8_128x128"))
    assert scaled_mm.refuse("matmul", facts) == "needs CUDA 12.9, this torch was built with 12.8"
    facts = Facts(NAMED["h200"], *casts("fp8_rowwise", "fp8_rowwise"))
    assert scaled_mm.refuse("matmul", facts) is None
    assert scaled_mm.refuse("matmul", Facts(NAMED["b200"], *casts("mxfp8", "mxfp8"))) is None


def test_a_plan_for_a_gpu_that_runs_on_a_cpu_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_kernels, "PROVEN", frozenset())  # whose casts refuse a CPU first
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16))
    plan = lowprec.plan(model, lowprec.load_recipe("mxfp8-portable"), hardware="h200")
    assert "native" in str(plan)
    lowprec.apply(model, plan)
    with pytest.raises(UnsupportedError, match=r"tensors are on cpu.*make the plan for the mach"):
        model(data(8, 32, seed=1))
    with pytest.raises(UnsupportedError, match="an operand is not quantized"):
        ops.matmul(torch.ones(2, 32), torch.ones(3, 32), backend="scaled_mm")


def test_shapes_without_data() -> None:
    q = ops.quantize(torch.ones(5, 64, device="meta"), "mxfp8_1x128", backend="emulated")
    out = ops.matmul(q, q, backend="scaled_mm")
    assert (out.shape, out.dtype, out.device.type) == ((5, 5), torch.bfloat16, "meta")

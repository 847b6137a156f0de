"""Native products on a GPU: every pair that its units multiply, against float64 (make test-gpu)."""

import pytest
import torch
from torch import nn

import lowprec
from lowprec import ops
from lowprec.backends import choose_gemm
from lowprec.formats import FORMATS, Cast
from lowprec.hardware import current
from lowprec.tensor import QuantizedTensor

pytestmark = pytest.mark.gpu
FP8 = [name for name, fmt in FORMATS.items() if fmt.element.bits in (4, 8)]
CLASSES = [(a, b) for a in FP8 for b in FP8]
SHAPES = [
    (128, 128, 256),
    (256, 384, 512),
    (1, 16, 128),
    (3, 5, 39),
    (130, 144, 1000),
    (1000, 8, 100),
    (63, 100, 384),
    (2048, 256, 1024),
]


def data(*shape: int, seed: int) -> torch.Tensor:
    """Gaussian values with channels that differ by 12 octaves."""
    generator = torch.Generator("cuda").manual_seed(seed)
    octaves = torch.linspace(-6, 6, max(shape[-1], 1), device="cuda")[: shape[-1]]
    return torch.randn(*shape, generator=generator, device="cuda") * torch.exp2(octaves)


def exact(a: QuantizedTensor, b: QuantizedTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product of the decoded operands, float64."""
    product = ops.dequantize(a, torch.float64) @ ops.dequantize(b, torch.float64).mT
    return product if bias is None else product + bias.double()


def native(left: str, right: str) -> bool:
    return choose_gemm(Cast.parse(left), Cast.parse(right), current()).native


def pairs() -> list[tuple[str, str]]:
    """The pairs that are native here; every pair where there is no GPU, to be skipped."""
    if not torch.cuda.is_available():
        return [("mxfp8_1x128", "mxfp8_128x128")]
    return [pair for pair in CLASSES if native(*pair)]


@pytest.mark.parametrize(("left", "right"), pairs())
def test_products_stay_within_twice_the_emulated_error(left: str, right: str) -> None:
    for m, n, k in SHAPES:
        a, b = ops.quantize(data(m, k, seed=1), left), ops.quantize(data(n, k, seed=2), right)
        wide = data(n, seed=3)
        for bias in (None, wide, wide.bfloat16()):
            want = exact(a, b, bias)
            for dtype in (torch.bfloat16, torch.float32):
                error = {
                    which: (
                        ops.matmul(a, b, bias=bias, out_dtype=dtype, backend=which).double() - want
                    ).norm()
                    for which in ("scaled_mm", "emulated")
                }
                # cuBLAS adds FP8 products with about 14 bits inside a block of 128.
                floor = 2**-12 * want.norm() if dtype == torch.float32 else 1e-30
                assert error["scaled_mm"] <= 2 * error["emulated"] + floor, (m, n, k, bias, dtype)


@pytest.mark.parametrize(("left", "right"), pairs())
def test_no_rows_no_columns_no_sums(left: str, right: str) -> None:
    bias = data(16, seed=1)
    for m, n, k in ((0, 16, 128), (5, 0, 128), (5, 16, 0)):
        a, b = ops.quantize(data(m, k, seed=1), left), ops.quantize(data(n, k, seed=2), right)
        got = ops.matmul(a, b, bias=bias[:n], backend="scaled_mm")
        assert torch.equal(got, bias[:n].bfloat16().expand(m, n))


@pytest.mark.parametrize(("left", "right"), pairs())
def test_a_poisoned_block_poisons_its_results_and_no_others(left: str, right: str) -> None:
    x, w = data(256, 512, seed=1), data(256, 512, seed=2)
    x[130, 200] = torch.nan
    a, b = ops.quantize(x, left), ops.quantize(w, right)
    got, want = (ops.matmul(a, b, backend=which) for which in ("scaled_mm", "emulated"))
    assert want.isnan().any()
    assert torch.equal(got.isnan(), want.isnan())


def blocks() -> list[tuple[str, str]]:
    names = [("mxfp8_1x128", "mxfp8_1x128"), ("fp8_1x128", "fp8_1x128")]
    names += [("mxfp8_1x128", "mxfp8_128x128"), ("fp8_128x128", "fp8_1x128")]
    return [*names, ("fp8_rowwise", "fp8_rowwise"), ("fp8_tensorwise", "fp8_tensorwise")]


@pytest.mark.parametrize("depth", [32768, 131072, 131072 + 128 + 32])
@pytest.mark.parametrize(("left", "right"), blocks())
def test_long_sums_of_positive_operands(left: str, right: str, depth: int) -> None:
    """A reduced accumulator would lose 2e-1 here."""
    if not native(left, right):
        pytest.skip(f"{left} by {right} is not native on {current()}")
    # What is lost of the largest terms depends on the terms, not on how many there are: on an H200
    # 4.99e-4 by blocks and 5.5e-4 by row and tensor where uniform, 5.9e-4 where raised by a half.
    whole = left in ("fp8_rowwise", "fp8_tensorwise")
    for uniform, limit in ((True, 6e-4 if whole else 5e-4), (False, 8e-4)):
        sources = [data(n, depth, seed=n).abs() + 0.5 for n in (256, 128)]
        sources = [torch.rand_like(one) for one in sources] if uniform else sources
        a, b = (ops.quantize(one, name) for one, name in zip(sources, (left, right), strict=True))
        want = exact(a, b)
        got = ops.matmul(a, b, out_dtype=torch.float32, backend="scaled_mm").double()
        error = float((got - want).norm() / want.norm())
        print(f"{left} by {right}, K={depth}, {'uniform' if uniform else 'raised'}: {error:.2e}")
        assert error <= limit


@pytest.mark.parametrize("k", [16, 128, 256, 384, 1024 * 128, 1025 * 128])
def test_every_block_gets_its_own_scale(k: int) -> None:
    """One block at a time, all others zero: a scale from elsewhere, or none, is off by a factor."""
    if not native("mxfp8_1x128", "mxfp8_128x128"):
        pytest.skip(f"not native on {current()}")
    blocks_ = -(-k // 128)
    factors = torch.exp2(torch.arange(blocks_, device="cuda").float() % 7).repeat_interleave(128)
    w = factors[:k].repeat(256, 1)
    w[128:] *= 4
    for block in {0, 1, 2, blocks_ // 2, blocks_ - 1} & set(range(blocks_)):
        x = torch.zeros(32, k, device="cuda")
        x[:, block * 128 : (block + 1) * 128] = 2.0 ** (block % 5)
        for left, right in (
            ("mxfp8_1x128", "mxfp8_128x128"),
            ("mxfp8_1x128", "mxfp8_1x128"),
            ("mxfp8_128x128", "mxfp8_1x128"),
            ("mxfp8_128x128", "mxfp8_128x128"),
        ):
            a, b = ops.quantize(x, left), ops.quantize(w, right)
            got = ops.matmul(a, b, out_dtype=torch.float32, backend="scaled_mm")
            assert torch.equal(got.double(), exact(a, b)), (block, left, right)


def test_operands_that_lie_transposed_or_padded() -> None:
    if not native("mxfp8_1x128", "mxfp8_1x128"):
        pytest.skip(f"not native on {current()}")
    dy, x = data(1000, 144, seed=1).bfloat16(), data(1000, 96, seed=2).bfloat16()
    a, b = (ops.quantize(t, "mxfp8_1x128", axis=-2).mT for t in (dy, x))
    want = exact(a, b)
    for which in ("scaled_mm", "emulated"):
        got = ops.matmul(a, b, backend=which).double()
        assert (got - want).norm() <= 3e-3 * want.norm()


@pytest.mark.parametrize("recipe", ["mxfp8-portable", "fp8-tensorwise", "fp8-rowwise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_in_one_graph_equals_eager(recipe: str, dtype: torch.dtype) -> None:
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layers = [nn.Linear(256, 384), nn.ReLU(), nn.Linear(384, 128), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Linear(128, 40)).to("cuda", dtype)
        plan = lowprec.plan(model, lowprec.load_recipe(recipe))
        if not all(b.native for layer in plan.layers for b in layer.backends.values()):
            pytest.skip(f"{recipe} is not native on {current()}")
        assert "native" in str(plan)
        lowprec.apply(model, plan)
        step = torch.compile(model, fullgraph=True) if compiled else model
        x = data(96, 256, seed=5).to(dtype)
        step(x).float().square().sum().backward()
        assert all(p.grad is not None and p.grad.norm() > 0 for p in model.parameters())
        results.append([p.grad for p in model.parameters()])
    for eager, traced in zip(*results, strict=True):
        assert torch.equal(eager, traced)


def test_a_plan_for_another_machine_is_an_error_that_says_so() -> None:
    if torch.cuda.get_device_capability()[0] == 10:
        pytest.skip("MXFP8 is native here")
    model = nn.Linear(256, 256).cuda().bfloat16()
    plan = lowprec.plan(model, lowprec.load_recipe("mxfp8"), hardware="b200")
    lowprec.apply(model, plan)
    with pytest.raises(lowprec.UnsupportedError, match=r"scaled_mm: .*; plan again on the mach"):
        model(data(32, 256, seed=1).bfloat16())

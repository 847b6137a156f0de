"""What benchmarks/modules.py times: three modules, as torch, ours and the peers build them.

Every arm holds the same weights in bfloat16 without biases and takes the same input. Arms of peers
that are not installed, or that cannot be built here, give the reason instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.nn import functional

import lowprec

EPS = 1e-6
# Relative errors of y, dx and dw that a correct arm stays under; three products in the MLP.
LIMITS = {"bf16": 0.02, "linear": 0.08, "emulated": 0.08, "norm_linear": 0.08, "mlp": 0.16}


@dataclass(frozen=True)
class Size:
    """A module at one size: kind, rows, features in and out (for an MLP: in and hidden).

    An "emulated" one is a linear layer by the recipe mxfp8, whose products sm90 does not have.
    """

    kind: str
    rows: int
    columns: int
    features: int

    def __str__(self) -> str:
        return f"{self.kind} {self.rows}x{self.columns}x{self.features}"

    @property
    def flops(self) -> int:
        """Of forward and backward."""
        return 6 * self.rows * self.columns * self.features * (3 if self.kind == "mlp" else 1)


class Mlp(nn.Module):
    """down(silu(gate) x up), gate and up from one linear layer behind a norm, in plain torch."""

    def __init__(self, columns: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(columns, eps=EPS)
        self.up = nn.Linear(columns, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, columns, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        y: torch.Tensor = self.down(functional.silu(gate) * up)
        return y


def torch_module(size: Size) -> nn.Module:
    """The module in plain torch, float32 on the CPU, with seeded weights."""
    torch.manual_seed(0)
    if size.kind == "mlp":
        return Mlp(size.columns, size.features)
    linear = nn.Linear(size.columns, size.features, bias=False)
    if size.kind in ("linear", "emulated"):
        return linear
    return nn.Sequential(nn.RMSNorm(size.columns, eps=EPS), linear)


def our_module(size: Size) -> nn.Module:
    """The same by the layers that `lowprec.apply` makes one step; parameters in the same order."""
    plain = torch_module(size)
    if isinstance(plain, Mlp):
        up = lowprec.NormLinear(plain.norm, plain.up)
        return nn.Sequential(up, lowprec.GatedLinear(plain.down))
    return lowprec.NormLinear(*plain) if isinstance(plain, nn.Sequential) else plain


class Arm:
    """A module under test: forward and backward of one step, every conversion inside."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        call: Callable[[torch.Tensor], torch.Tensor] | None = None,
        *,
        limit: float = LIMITS["bf16"],
    ) -> None:
        self.name = name
        self.module = module
        self.call = module if call is None else call
        self.parameters = list(module.parameters())
        self.limit = limit

    def step(self, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        """y, dx and the gradient of each parameter; weights count as changed since the last."""
        for parameter in self.parameters:
            increment_version(parameter)
        y = self.call(x)
        return [y.detach(), *torch.autograd.grad(y, [x, *self.parameters], dy)]

    def compiled(self) -> Arm:
        """The same module under torch.compile."""
        call = torch.compile(self.call, fullgraph=True, dynamic=False)
        return Arm(f"{self.name}, compiled", self.module, call, limit=self.limit)


def arms_of(
    size: Size, recipes: list[str], *, device: str, hardware: str | None, peers: bool, quick: bool
) -> Iterator[Arm | tuple[str, str]]:
    """Every arm at one size, or its name and why it is not there; compiled where it counts."""

    def fresh() -> nn.Module:
        return torch_module(size).to(device, torch.bfloat16)

    fuses = size.kind not in ("linear", "emulated")
    plain = Arm("bf16", fresh())
    yield plain
    if fuses or not quick:
        yield plain.compiled()
    for recipe in ["mxfp8"] if size.kind == "emulated" else recipes:
        module = our_module(size).to(device, torch.bfloat16)
        chosen = lowprec.load_recipe(recipe)
        # The first rule alone: later ones spare the ends of a whole model.
        chosen = dataclasses.replace(chosen, rules=chosen.rules[:1])
        plan = lowprec.plan(module, chosen, hardware=hardware)
        lowprec.apply(module, plan)
        ours = Arm(f"ours {recipe}", module, limit=LIMITS[size.kind])
        yield ours
        if not quick or (size.kind == "mlp" and recipe == recipes[0]):
            yield ours.compiled()
    if peers and size.kind != "emulated":
        for recipe in ("tensorwise", "rowwise"):
            yield _or_reason(f"torchao {recipe}", lambda r=recipe: _torchao(fresh(), r, size))
        for recipe in ("current", "block"):
            yield _or_reason(f"te {recipe}", lambda r=recipe: _te(fresh(), r, size))


def _or_reason(name: str, build: Callable[[], Arm]) -> Arm | tuple[str, str]:
    try:
        return build()
    except Exception as error:  # a peer that does not load raises almost anything
        return name, f"{type(error).__name__}: {error}".splitlines()[0][:200]


def _torchao(module: nn.Module, recipe: str, size: Size) -> Arm:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    holder = nn.Sequential(module)  # a module that is itself a linear layer is replaced too
    convert_to_float8_training(holder, config=config)
    arm = Arm(f"torchao {recipe}", holder, limit=LIMITS[size.kind]).compiled()
    arm.name = f"torchao {recipe}"
    return arm


def _te(module: nn.Module, recipe: str, size: Size) -> Arm:
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    chosen = {"current": recipes.Float8CurrentScaling, "block": recipes.Float8BlockScaling}[
        recipe
    ]()
    common: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16}
    columns, features = size.columns, size.features
    weights = [p.detach() for p in module.parameters()]
    theirs: Any
    if size.kind == "linear":
        theirs = te.Linear(columns, features, **common)
    elif size.kind == "norm_linear":
        theirs = te.LayerNormLinear(columns, features, eps=EPS, normalization="RMSNorm", **common)
    else:
        theirs = te.LayerNormMLP(
            columns, features, eps=EPS, normalization="RMSNorm", activation="swiglu", **common
        )
    with torch.no_grad():
        for parameter, weight in zip(theirs.parameters(), weights, strict=True):
            parameter.copy_(weight)

    def call(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=chosen):
            y: torch.Tensor = theirs(x)
        return y

    return Arm(f"te {recipe}", theirs, call, limit=LIMITS[size.kind])


@contextlib.contextmanager
def precise() -> Iterator[None]:
    """float32 products in float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def inputs_of(size: Size, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x, which wants a gradient, and dy."""
    torch.manual_seed(1)
    outputs = size.columns if size.kind == "mlp" else size.features
    x, dy = (torch.randn(size.rows, n, device=device) for n in (size.columns, outputs))
    return x.bfloat16().requires_grad_(), dy.bfloat16()


def exact_step(size: Size, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """y, dx and every dw by plain torch in float32, from the bfloat16 weights."""
    reference = torch_module(size).to(x.device, torch.bfloat16).float()
    with precise():
        return Arm("float32", reference).step(x.detach().float().requires_grad_(), dy.float())


def errors_of(arm: Arm, x: torch.Tensor, dy: torch.Tensor, want: list[torch.Tensor]) -> list[float]:
    """Relative errors of y, dx and every dw of a step."""
    return [
        ((one.float() - other).norm() / other.norm()).item()
        for one, other in zip(arm.step(x, dy), want, strict=True)
    ]

"""A stage: what a layer does from one step of training on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowprec.backends import Facts, GemmBackends, choose, choose_gemm, triton_kernels
from lowprec.formats import FORMATS, Cast
from lowprec.hardware import Hardware
from lowprec.policy import SKIP, Gemm, LinearPolicy, casts


@dataclass(frozen=True)
class Stage:
    """Policy and backends of a layer from `from_step` (0 for the first stage) on."""

    from_step: int
    policy: LinearPolicy
    backends: Mapping[str, GemmBackends]
    stored: LinearPolicy | None = None
    """The policy with the casts whose scales are stored as the products take them."""

    @classmethod
    def of(cls, policy: LinearPolicy, hardware: Hardware, *, from_step: int = 0) -> Stage:
        """The stage with the backends that `hardware` offers; skipped products have none."""
        backends = {
            name: choose_gemm(*casts(one), hardware)
            for name, one in policy.items()
            if one is not SKIP
        }
        return cls.with_backends(from_step, policy, backends, hardware)

    @classmethod
    def with_backends(
        cls,
        from_step: int,
        policy: LinearPolicy,
        backends: Mapping[str, GemmBackends],
        hardware: Hardware,
    ) -> Stage:
        """The stage with backends that are decided."""
        return cls(from_step, policy, backends, _as_stored(policy, backends, hardware))

    @property
    def runs(self) -> LinearPolicy:
        """The policy whose casts run: the same codes and scales, whatever they are stored as."""
        return self.policy if self.stored is None else self.stored

    @property
    def turns_x(self) -> bool:
        """True where x is kept for wgrad as the kernels write it: codes along the rows."""
        backends = self.backends.get("wgrad")
        return backends is not None and backends.right == "triton"


def same_weight_values(stage: Stage) -> bool:
    """Whether fprop and dgrad, emulated, take one tensor of bf16 values of w: those of the same
    square blocks, cast to nearest by our kernels."""
    found = []
    for name in ("fprop", "dgrad"):
        gemm, backends = getattr(stage.runs, name), stage.backends.get(name)
        if not isinstance(gemm, Gemm) or backends is None or gemm.rotation is not None:
            return False
        if backends.product != "emulated" or backends.right != "triton":
            return False
        found.append(gemm.right)
    one, other = found
    return one == other and one.format.transposable and triton_kernels.fits_round_trip(one)


def _as_stored(
    policy: LinearPolicy, backends: Mapping[str, GemmBackends], hardware: Hardware
) -> LinearPolicy | None:
    """`policy` with float32 scales in place of E8M0 where native products of sm90 take those."""
    if hardware.capability is None or hardware.capability[0] != 9:
        return None
    products = {}
    for name, product in policy.items():
        products[name] = product
        chosen = backends.get(name)
        if isinstance(product, Gemm) and chosen is not None and chosen.native:
            left = _wide(product.left, chosen.left, hardware)
            right = _wide(product.right, chosen.right, hardware)
            products[name] = Gemm(left, right, product.rotation)
    found = LinearPolicy(**products)
    return None if found == policy else found


def _wide(cast: Cast, backend: str, hardware: Hardware) -> Cast:
    """The cast with the same element, blocks and rule, and float32 scales, if it runs alike."""
    fmt = cast.format
    for twin in FORMATS.values():
        alike = (twin.element, twin.block, twin.power_of_two) == (fmt.element, fmt.block, True)
        if fmt.scale == "e8m0" and alike and twin.scale == "float32":
            wide = Cast(twin, cast.scale_rule, cast.rounding)
            if choose("quantize", Facts(hardware, wide, None)).backend == backend:
                return wide
    return cast


def stage_at(stages: tuple[Stage, ...], step: int) -> int:
    """Index of the stage in force at `step`; stages are in order and the first starts at 0."""
    return sum(stage.from_step <= step for stage in stages) - 1

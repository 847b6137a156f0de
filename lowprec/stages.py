"""A stage: what a layer does from one step of training on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowprec.backends import GemmBackends, choose_gemm
from lowprec.hardware import Hardware
from lowprec.policy import SKIP, LinearPolicy, casts


@dataclass(frozen=True)
class Stage:
    """Policy and backends of a layer from `from_step` (0 for the first stage) on."""

    from_step: int
    policy: LinearPolicy
    backends: Mapping[str, GemmBackends]

    @classmethod
    def of(cls, policy: LinearPolicy, hardware: Hardware, *, from_step: int = 0) -> Stage:
        """The stage with the backends that `hardware` offers; skipped products have none."""
        backends = {
            name: choose_gemm(*casts(one), hardware)
            for name, one in policy.items()
            if one is not SKIP
        }
        return cls(from_step, policy, backends)


def stage_at(stages: tuple[Stage, ...], step: int) -> int:
    """Index of the stage in force at `step`; stages are in order and the first starts at 0."""
    return sum(stage.from_step <= step for stage in stages) - 1

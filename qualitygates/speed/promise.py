"""What a gate promises about speed: the [speed] table of an experiment, fixed before any timing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from ..errors import ExperimentError

EPS_STEP: Final = 0.02
EPS_MODULE: Final = 0.05
# Of the interleaved test: fewer pairs have too little power, an odd number leaves drift unbalanced.
MIN_PAIRS: Final = 10
MAX_PAIRS: Final = 1000
_HUGE: Final = 1e15


@dataclass(frozen=True)
class SpeedPromise:
    """The smallest gain that counts, and the job that it must pay for.

    eps_step, eps_module: the candidate's time must be below (1 - eps) of BF16's, for a whole
    training step and for each quantized layer. planned_steps: of the job that is planned, None in
    a gate that promises nothing about speed. extra_steps: what the candidate needs more to reach
    the same quality. pairs: of blocks, BC CB BC CB. batch_size: of the timed step. compile: both
    arms run under torch.compile. peak_*: dense TFLOP/s of the hardware in bf16 and in the format,
    the denominators of MFU where the GPU is not in our table.
    """

    required: bool
    eps_step: float = EPS_STEP
    eps_module: float = EPS_MODULE
    planned_steps: int | None = None
    extra_steps: int = 0
    pairs: int = MIN_PAIRS
    batch_size: int | None = None
    compile: bool = False
    peak_bf16_tflops: float | None = None
    peak_format_tflops: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON in the shape of the TOML; a gate about quality alone promises no numbers."""
        if self.planned_steps is None:
            return {"required": self.required}
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {key: value for key, value in values.items() if value is not None}


KEYS: Final = tuple(one.name for one in fields(SpeedPromise))


def read_speed_promise(
    table: Mapping[str, Any], *, steps: int | None = None, batch_size: int | None = None
) -> SpeedPromise:
    """The promise in a [speed] table or in gate.json; raises ExperimentError with key and cure.

    steps, batch_size: of the training, the defaults of planned_steps and batch_size; without them
    (a gate.json from before these keys) a planned job that is not named stays None.
    """
    if "required" not in table:
        raise ExperimentError("[speed] required is missing; it has no default")
    required = _boolean(table, "required")
    if not required and len(table) == 1:
        return SpeedPromise(required=False)
    unknown = sorted(set(table) - set(KEYS))
    if unknown:
        raise ExperimentError(f"unknown key {unknown[0]!r} in [speed]; allowed: {', '.join(KEYS)}")
    return SpeedPromise(
        required=required,
        eps_step=_share(table, "eps_step", EPS_STEP),
        eps_module=_share(table, "eps_module", EPS_MODULE),
        planned_steps=_count(table, "planned_steps", steps, least=1),
        extra_steps=_count(table, "extra_steps", 0, least=0) or 0,
        pairs=_pairs(table),
        batch_size=_count(table, "batch_size", batch_size, least=1),
        compile=_boolean({"compile": False, **table}, "compile"),
        peak_bf16_tflops=_peak(table, "peak_bf16_tflops"),
        peak_format_tflops=_peak(table, "peak_format_tflops"),
    )


def _boolean(table: Mapping[str, Any], key: str) -> bool:
    value = table[key]
    if not isinstance(value, bool):
        raise ExperimentError(f"[speed] {key} = {value!r} must be true or false")
    return value


def _count(table: Mapping[str, Any], key: str, default: int | None, *, least: int) -> int | None:
    value = table.get(key, default)
    if value is not None and (type(value) is not int or value < least):
        raise ExperimentError(f"[speed] {key} = {value!r} must be a whole number, {least} or more")
    return value


def _pairs(table: Mapping[str, Any]) -> int:
    value = table.get("pairs", MIN_PAIRS)
    if type(value) is not int or not MIN_PAIRS <= value <= MAX_PAIRS or value % 2:
        raise ExperimentError(
            f"[speed] pairs = {value!r} must be an even number from {MIN_PAIRS} to {MAX_PAIRS}: "
            "blocks run in the order BC CB BC CB, and only an even number balances drift"
        )
    return value


def _number(table: Mapping[str, Any], key: str, default: float | None) -> float | None:
    value = table.get(key, default)
    if value is None:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # Compared, not converted: a float cannot hold every int that TOML can.
    if not number or not abs(value) < _HUGE:
        raise ExperimentError(f"[speed] {key} = {value!r} must be a finite number below {_HUGE:g}")
    return float(value)


def _share(table: Mapping[str, Any], key: str, default: float) -> float:
    value = _number(table, key, default)
    if value is None or not 0 <= value < 1:
        raise ExperimentError(
            f"[speed] {key} = {value!r} must be at least 0 and below 1: 0.02 asks for a time below "
            "0.98 of BF16's"
        )
    return value


def _peak(table: Mapping[str, Any], key: str) -> float | None:
    value = _number(table, key, None)
    if value is not None and value <= 0:
        raise ExperimentError(f"[speed] {key} = {value!r} must be above 0, in dense TFLOP/s")
    return value

"""Timings on record: what a speed record must hold, and timings that another machine wrote.

A timings file is JSON lines: a head {"schema": 1, "kind": "speed-timings", ...} with what the
record says once, then one measurement a line. Both are refused unless they followed the protocol.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ..errors import RecordError
from .promise import MAX_PAIRS, MIN_PAIRS

RUNGS: Final = ("kernel", "module", "step", "job")
ARMS: Final = ("baseline", "candidate")
STEPS_PER_BLOCK: Final = 10
CONDITIONS: Final = ("sm_clock_mhz", "memory_clock_mhz", "power_limit_w", "temperature_c")
COSTS: Final = ("calibration_s", "compile_s", "conversion_s", "warmup_s")
_HEAD: Final = ("machine", "inputs", "products", "quantized_layers")
_INPUTS: Final = ("workload", "options", "batch_size", "compile", "recipe_hashes")
_MAX_BYTES: Final = 64 << 20
_MOST: Final = 1e12

Record = dict[str, Any]


def block_order(pairs: int) -> list[str]:
    """BC CB BC CB ...: each arm leads every other pair, so that drift cancels."""
    return ["BC" if index % 2 == 0 else "CB" for index in range(pairs)]


def read_timings(path: Path) -> Record:
    """The content of a speed record from a file of JSON lines; raises RecordError with the line."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise RecordError(f"{path}: larger than {_MAX_BYTES >> 20} MiB; timings are small")
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise RecordError(f"{path}: not UTF-8 text") from error
    rows = [_json_line(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows or rows[0].get("kind") != "speed-timings" or rows[0].get("schema") != 1:
        raise RecordError(
            f'{path}: the first line must be the head, {{"schema": 1, "kind": "speed-timings", '
            '"machine": ..., "inputs": ..., "products": ..., "quantized_layers": ...}'
        )
    head = {key: value for key, value in rows[0].items() if key not in ("schema", "kind")}
    record = {**head, "source": "timings file", "measurements": rows[1:]}
    try:
        check_record(record)
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error
    return record


def _json_line(path: Path, number: int, line: str) -> Record:
    try:
        row = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path}: line {number} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise RecordError(f"{path}: line {number} holds no JSON object")
    return row


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def check_record(record: Mapping[str, Any]) -> None:
    """Raise RecordError unless the content of a speed record is complete and by the protocol."""
    missing = [key for key in (*_HEAD, "measurements") if key not in record]
    if missing:
        raise RecordError(f"speed timings: {', '.join(missing)} missing")
    machine, inputs, products = (_table(record, key) for key in ("machine", "inputs", "products"))
    missing = [f"machine.{key}" for key in ("device", "name") if not _text(machine.get(key))]
    missing += [f"inputs.{key}" for key in _INPUTS if key not in inputs]
    missing += [
        f"products.{key}" for key in ("native", "emulated") if not _count(products.get(key))
    ]
    if missing:
        raise RecordError(f"speed timings: {', '.join(missing)} missing or not as they must be")
    for key in ("quantized_layers", "measurements"):
        if not isinstance(record[key], list):
            raise RecordError(f"speed timings: {key} must be a list")
    if not all(_text(name) for name in record["quantized_layers"]):
        raise RecordError("speed timings: quantized_layers must be a list of layer names")
    if not record["quantized_layers"]:
        raise RecordError("speed timings: quantized_layers is empty; a candidate quantizes some")
    for measurement in record["measurements"]:
        _check_measurement(measurement)
    _check_costs(record.get("costs"))
    _check_flops(record)


def _check_measurement(one: Any) -> None:
    if not isinstance(one, Mapping) or one.get("rung") not in RUNGS or not _text(one.get("name")):
        raise RecordError(
            f"speed timings: a measurement has a rung ({', '.join(RUNGS)}) and a name, "
            f"not {str(one)[:80]!r}"
        )
    where = f"speed timings: {one['rung']} {one['name']!r}"
    for arm in ARMS:
        times = one.get(f"{arm}_ms")
        if not isinstance(times, list) or not all(_positive(value) for value in times):
            raise RecordError(f"{where}: {arm}_ms must be a list of block times in ms, above 0")
    pairs = len(one["baseline_ms"])
    if pairs != len(one["candidate_ms"]) or pairs % 2 or not MIN_PAIRS <= pairs <= MAX_PAIRS:
        raise RecordError(
            f"{where}: {pairs} blocks of the baseline and {len(one['candidate_ms'])} of the "
            f"candidate; the protocol has an even number of pairs, {MIN_PAIRS} or more"
        )
    if one.get("order") != block_order(pairs):
        raise RecordError(
            f"{where}: the blocks did not run in the order BC CB BC CB; arms timed one after the "
            "other take the drift of the machine for a gain"
        )
    _check_protocol(one, where)


def _check_protocol(one: Mapping[str, Any], where: str) -> None:
    if not _count(one.get("steps_per_block")) or one["steps_per_block"] < STEPS_PER_BLOCK:
        raise RecordError(f"{where}: steps_per_block must be at least {STEPS_PER_BLOCK}")
    if one["rung"] != "kernel" and one.get("includes_conversions") is not True:
        raise RecordError(
            f"{where}: includes_conversions must be true: casts, transposes and amax belong inside "
            "the timed region"
        )
    for arm in ARMS:
        if len(one[f"{arm}_ms"]) > 1 and len(set(one[f"{arm}_ms"])) == 1:
            raise RecordError(f"{where}: every {arm} block took the same time; no clock gives that")
    for key in ("conversion_ms", "gpus"):
        if one.get(key) is not None and not _positive(one[key]):
            raise RecordError(f"{where}: {key} = {one[key]!r} must be a number above 0")
    layers = one.get("layers", [])
    if not isinstance(layers, list) or not all(_text(name) for name in layers):
        raise RecordError(f"{where}: layers must be a list of names")
    _check_conditions(one.get("conditions"), where)


def _check_conditions(conditions: Any, where: str) -> None:
    if conditions is None:
        return
    for arm in ARMS:
        found = conditions.get(arm) if isinstance(conditions, Mapping) else None
        for key in CONDITIONS:
            values = found.get(key) if isinstance(found, Mapping) else None
            if not isinstance(values, list) or not values or not all(map(_positive, values)):
                raise RecordError(
                    f"{where}: conditions.{arm}.{key} must be a list of numbers above 0"
                )


def _check_costs(costs: Any) -> None:
    if costs is None:
        return
    good = isinstance(costs, Mapping) and set(costs) == set(COSTS)
    if not good or not all(value == 0 or _positive(value) for value in costs.values()):
        raise RecordError(
            f"speed timings: costs are seconds, 0 or more, of all: {', '.join(COSTS)}"
        )


def _check_flops(record: Mapping[str, Any]) -> None:
    for table, keys in (
        ("flops", ("model_flops_per_step",)),
        ("peaks", ("bf16_tflops", "format_tflops")),
    ):
        found = record.get(table)
        if found is None:
            continue
        if not isinstance(found, Mapping):
            raise RecordError(f"speed timings: {table} must be an object")
        for key in keys:
            if found.get(key) is not None and not _positive(found[key], most=1e30):
                raise RecordError(f"speed timings: {table}.{key} must be a number above 0")


def _table(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = record[key]
    if not isinstance(found, Mapping):
        raise RecordError(f"speed timings: {key} must be an object")
    return found


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _positive(value: Any, most: float = _MOST) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < most


def of_rung(record: Mapping[str, Any], rung: str) -> Sequence[Mapping[str, Any]]:
    """The measurements of one rung."""
    return [one for one in record["measurements"] if one["rung"] == rung]

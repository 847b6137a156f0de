"""Synthetic speed records for the gate tests: known ratios, real noise, no clock."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from qualitygates.speed.record import CONDITIONS, block_order

PROMISE = {"required": True, "eps_step": 0.02, "eps_module": 0.05, "planned_steps": 100_000}
LAYERS = ("mlp.0", "mlp.1")


def measurement(rung: str, name: str, ratio: float, **more: Any) -> dict[str, Any]:
    """Ten pairs of blocks around 10 ms, candidate / baseline = `ratio`, noise 1 %."""
    pairs = more.pop("pairs", 10)
    sd = more.pop("sd", 0.01)
    rng = np.random.default_rng([len(name), int(1000 * ratio)])
    logs = rng.normal(0, sd, (2, pairs))
    # Centred, so that the estimate is `ratio` itself.
    noise = np.exp(logs - logs.mean(axis=1, keepdims=True))
    quiet = {
        key: [value] * pairs for key, value in zip(CONDITIONS, (1980, 3201, 700, 55), strict=True)
    }
    return {
        "rung": rung,
        "name": name,
        "order": block_order(pairs),
        "steps_per_block": 10,
        "baseline_ms": (10 * noise[0]).tolist(),
        "candidate_ms": (10 * ratio * noise[1]).tolist(),
        "includes_conversions": True,
        "conditions": {"baseline": copy.deepcopy(quiet), "candidate": copy.deepcopy(quiet)},
        **more,
    }


def speed_record(
    *, step: float = 0.8, modules: tuple[float, ...] = (0.7, 0.75), native: int = 6, **more: Any
) -> dict[str, Any]:
    """The content of a speed record of an H200 with two quantized layers."""
    return {
        "source": "measured",
        "machine": {"device": "cuda", "name": "NVIDIA H200"},
        "inputs": {
            "workload": "flights",
            "options": {},
            "batch_size": 512,
            "compile": False,
            "recipe_hashes": {"baseline": "b", "candidate": "c"},
            "baseline_dtype": "bfloat16",
        },
        "products": {"native": native, "emulated": 6 - native},
        "quantized_layers": list(LAYERS),
        "later_stages": [],
        "costs": {"calibration_s": 0.0, "compile_s": 8.0, "conversion_s": 1.0, "warmup_s": 1.0},
        "flops": {"model_flops_per_step": 4_000_000_000_000, "source": "counted"},
        "peaks": {"bf16_tflops": 989.4, "format_tflops": 1978.9, "format": "mxfp8"},
        "measurements": [
            measurement("step", "training step", step, gpus=1),
            *(
                measurement("module", name, ratio, layers=[name], conversion_ms=1.0)
                for name, ratio in zip(LAYERS, modules, strict=False)
            ),
        ],
        **more,
    }


def changed(record: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy in which `path` ("measurements.0.order") is `value`; ... deletes it."""
    fresh = copy.deepcopy(record)
    *parents, last = [int(part) if part.isdecimal() else part for part in path.split(".")]
    target: Any = fresh
    for key in parents:
        target = target[key]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return fresh

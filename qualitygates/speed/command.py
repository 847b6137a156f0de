"""Timings of both arms on this machine: a training step, and every quantized layer of it.

Both arms are resident, warm, and take turns by blocks. The baseline is the model's own torch layers
in BF16, the candidate the same layers under its plan: what BF16 training costs is what has to be
beaten.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import lowprec

from ..errors import ExperimentError, GateError, RecordError
from ..experiment import Experiment
from ..locking import folder_lock
from ..records import RunStore, differences, read_record, read_speed, seal, write_json_atomic
from ..seeding import stream_seed
from ..workload import Workload, load_workload
from .arms import Arm, BuiltIn, OwnLoop, batches_of
from .blocks import block_timer, interleave, new_marks
from .machine import Sampler, peaks
from .modules import (
    Group,
    capture,
    conversion_ms,
    module_step,
    quantized,
    quantized_products,
)
from .record import ARMS, STEPS_PER_BLOCK, Record, check_record, read_timings
from .rules import check_belongs, judge_speed

Tell = Callable[[str], None]
# Warm-up and flop counting beside the timed blocks: a schedule must not end before them.
_SPARE_BLOCKS = 2


def speed(
    experiment: Experiment, *, out: Path, timings: Path | None = None, tell: Tell
) -> dict[str, Any]:
    """Measure, or take the timings of another machine, write speed.json in `out`, and judge.

    Returns what `judge_speed` says. Native timings that the folder holds are judged again, never
    taken again: measuring until it fits is no measurement. Raises GateError and LowprecError.
    """
    # Runs that train beside the timing would slow it.
    with folder_lock(out):
        return _speed(experiment, out, timings, tell)


def _speed(experiment: Experiment, out: Path, timings: Path | None, tell: Tell) -> dict[str, Any]:
    gate = _gate(experiment, out)
    kept = read_speed(out)
    if kept is not None and kept["products"]["native"]:
        if timings is not None:
            raise ExperimentError(
                f"{out / 'speed.json'} holds timings already; move it away to judge {timings}"
            )
        tell(f"{out / 'speed.json'} holds timings already; move it away to measure again")
        check_belongs(gate, kept)
        return judge_speed(gate["speed"], kept)
    content = measure(experiment, tell=tell) if timings is None else _recorded(timings)
    content.setdefault("promised", gate["speed"])
    check_belongs(gate, content)
    found = judge_speed(gate["speed"], content)
    write_json_atomic(out / "speed.json", seal({"schema": 1, "kind": "speed", **content}))
    return found


def _gate(experiment: Experiment, out: Path) -> Mapping[str, Any]:
    """The promise that the folder holds, or the one that `run` would write into it."""
    asked = experiment.promise(created="")
    store = RunStore(out)
    if not store.gate_path.exists():
        return {**asked, "recipe_hashes": _recipe_hashes(experiment)}
    kept = store.read_gate()
    changes = differences(kept["experiment"], asked["experiment"], field="experiment")
    if changes:
        raise ExperimentError(
            f"{store.gate_path} promises another gate: {'; '.join(changes)}; give this experiment "
            "its own folder with --out"
        )
    return kept


def _recipe_hashes(experiment: Experiment) -> dict[str, str]:
    return {
        arm: lowprec.load_recipe(experiment.recipe_source(name)).hash
        for arm, name in (("baseline", experiment.baseline), ("candidate", experiment.candidate))
    }


def _recorded(path: Path) -> Record:
    """Timings of another machine: its speed.json, or JSON lines."""
    if path.suffix == ".jsonl":
        return read_timings(path)
    if path.suffix != ".json":
        raise RecordError(f"{path}: timings are a speed.json or JSON lines (*.jsonl)")
    sealed = read_record(path, kind="speed")
    return {k: v for k, v in sealed.items() if k not in ("schema", "kind", "checksum")}


def measure(experiment: Experiment, *, tell: Tell) -> Record:
    """The content of a speed record, measured here; raises GateError when an arm cannot run."""
    try:
        record = _Bench(experiment, tell).record()
    except (GateError, lowprec.LowprecError, OSError):
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise GateError(
            "both arms do not fit in memory together; lower batch_size in [speed], it holds for "
            "both"
        ) from error
    except Exception as error:
        raise GateError(f"an arm failed while timed: {type(error).__name__}: {error}") from error
    check_record(record)
    return record


class _Bench:
    """Both arms on the device, warm and ready to take turns."""

    def __init__(self, experiment: Experiment, tell: Tell) -> None:
        self.experiment, self.promise, self.tell = experiment, experiment.speed, tell
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.block_ms = block_timer(self.device)
        self.sampler = _sampler(self.device)
        self.batch_size = self.promise.batch_size or experiment.batch_size
        workload = load_workload(experiment.workload, experiment.options, folder=experiment.folder)
        models = {arm: self._model(workload) for arm in ARMS}
        self._convert(models["candidate"])
        self.arms = self._arms(workload, models)
        # Before compilation, which would hide the layers from hooks and the operators from counts.
        self.groups = capture(models["baseline"], self.layers, self.arms["baseline"].one_step)
        self.flops = _count_flops(self.arms["baseline"])
        if self.promise.compile:
            for model in models.values():
                model.compile()
        self.setup_s = self._warm_up()

    def _model(self, workload: Workload) -> nn.Module:
        torch.manual_seed(stream_seed(self.experiment.first_seed, "init"))
        return workload.model().to(self.device).train()

    def _convert(self, model: nn.Module) -> None:
        started = time.perf_counter()
        experiment = self.experiment
        recipe = lowprec.load_recipe(experiment.recipe_source(experiment.candidate))
        self.plan = lowprec.plan(model, recipe, steps=experiment.steps)
        lowprec.apply(model, self.plan)
        self.conversion_s = time.perf_counter() - started
        self.layers = quantized(self.plan)
        if not self.layers:
            raise ExperimentError(
                f"candidate recipe {experiment.candidate!r} quantizes nothing at the start of "
                "training: there is no gain to time"
            )
        starts = {stage.from_step for layer in self.plan.layers for stage in layer.stages}
        self.later_stages = sorted(starts - {0})

    def _arms(self, workload: Workload, models: Mapping[str, nn.Module]) -> dict[str, Arm]:
        last = (self.later_stages or [self.experiment.steps])[0] - 1
        last_steps = {"baseline": None, "candidate": last}
        if hasattr(workload, "train"):
            return {
                arm: OwnLoop(
                    model,
                    workload,
                    last_step=last_steps[arm],
                    seed=stream_seed(self.experiment.first_seed, "loop") >> 32,
                    batch_size=self.batch_size,
                    marks=new_marks(self.device),
                )
                for arm, model in models.items()
            }
        batches = batches_of(
            workload,
            first_seed=self.experiment.first_seed,
            batch_size=self.batch_size,
            device=self.device,
        )
        return {
            arm: BuiltIn(
                model,
                workload,
                batches,
                last_step=last_steps[arm],
                steps=(self.promise.pairs + _SPARE_BLOCKS) * STEPS_PER_BLOCK,
                block_ms=self.block_ms,
            )
            for arm, model in models.items()
        }

    def _warm_up(self) -> dict[str, float]:
        """Seconds of the first block of each arm: kernels compile, caches fill."""
        # What the process pays once must not fall on the arm that happens to run first.
        ones = torch.ones(8, 8, device=self.device, dtype=torch.bfloat16)
        (ones @ ones).sum().item()
        seconds = {}
        for arm, one in self.arms.items():
            started = time.perf_counter()
            one.block_ms()
            seconds[arm] = time.perf_counter() - started
        return seconds

    def record(self) -> Record:
        """Every rung that one machine can run: the step, then each quantized layer."""
        native, emulated = (
            sum(_count_products(layer, native=native) for layer in self.layers)
            for native in (True, False)
        )
        if not native:
            self.tell("every quantized product is emulated here: timings are information only")
        step = self._step()
        return {
            "source": "measured",
            "machine": self._machine(),
            "inputs": {
                "workload": self.experiment.workload,
                "options": dict(self.experiment.options),
                "batch_size": self.batch_size,
                "compile": self.promise.compile,
                "recipe_hashes": _recipe_hashes(self.experiment),
                "plan_hash": self.plan.hash,
                "baseline_dtype": ", ".join(sorted({group.dtype for group in self.groups})),
            },
            "products": {"native": native, "emulated": emulated},
            "quantized_layers": [layer.name for layer in self.layers],
            "later_stages": self.later_stages,
            "costs": self._costs(step),
            "flops": self.flops,
            "peaks": self._peaks(),
            "measurements": [step, *map(self._module, self.groups)],
        }

    def _step(self) -> Record:
        self.tell(f"step: {self.promise.pairs} pairs of blocks")
        return {
            "rung": "step",
            "name": "training step",
            "includes_conversions": True,
            "gpus": 1,
            **self._interleave(*(self.arms[arm].block_ms for arm in ARMS)),
        }

    def _module(self, group: Group) -> Record:
        self.tell(f"module {group.layers[0]} ({group.label}, {len(group.layers)} alike)")
        layers = [self.arms[arm].model.get_submodule(group.layers[0]) for arm in ARMS]
        compiled = self.promise.compile
        blocks = [
            partial(self.block_ms, module_step(layer, group, compiled=compiled)) for layer in layers
        ]
        for block in blocks:
            block()
        return {
            "rung": "module",
            "name": group.layers[0],
            "layers": group.layers,
            "shape": group.label,
            "precisions": [str(product) for _, product in group.planned.policy.items()],
            "includes_conversions": True,
            "conversion_ms": conversion_ms(layers[1], group, block_ms=self.block_ms),
            **self._interleave(*blocks),
        }

    def _interleave(
        self, baseline: Callable[[], float], candidate: Callable[[], float]
    ) -> dict[str, Any]:
        return interleave(baseline, candidate, pairs=self.promise.pairs, sampler=self.sampler)

    def _costs(self, step: Record) -> dict[str, float]:
        """What the candidate pays once beyond the baseline, in seconds."""
        starts = [
            self.setup_s[arm] - STEPS_PER_BLOCK * sum(times) / len(times) / 1e3
            for arm, times in ((arm, step[f"{arm}_ms"]) for arm in ARMS)
        ]
        more = max(0.0, starts[1] - max(0.0, starts[0]))
        compiled = self.promise.compile
        return {
            "calibration_s": 0.0,
            "conversion_s": self.conversion_s,
            "compile_s": more if compiled else 0.0,
            "warmup_s": 0.0 if compiled else more,
        }

    def _machine(self) -> Record:
        facts: Record = {
            "device": self.device.type,
            "name": "cpu",
            "hardware": str(self.plan.hardware),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        if self.device.type == "cuda":
            facts |= {"name": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
        return facts

    def _peaks(self) -> Record | None:
        if self.device.type != "cuda":
            return None
        casts = [
            cast
            for layer in self.layers
            for name in quantized_products(layer)
            for cast in (getattr(layer.policy, name).left, getattr(layer.policy, name).right)
        ]
        # Of several formats the widest: a rate that all of the products can reach.
        widest = max(casts, key=lambda cast: cast.format.element.bits)
        known = peaks(torch.cuda.get_device_name(), bits=widest.format.element.bits)
        return None if known is None else {**known, "format": widest.format.name}


def _count_products(layer: Any, *, native: bool) -> int:
    return sum(layer.backends[name].native is native for name in quantized_products(layer))


def _sampler(device: torch.device) -> Sampler | None:
    if device.type != "cuda":
        return None
    return Sampler(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def _count_flops(arm: Arm) -> Record | None:
    """Forward and backward flops of one step of the baseline, as torch's counter knows them."""
    counter = FlopCounterMode(display=False)
    with counter:
        arm.one_step()
    total = counter.get_total_flops()
    if not total:
        return None
    source = "torch FlopCounterMode, baseline; operators that it does not know count 0"
    return {"model_flops_per_step": total, "source": source}

"""One arm, one seed: train, evaluate in every form, and return the run record.

Every random stream has its own seed, so arms that share a seed share initial weights, data order
and dropout whatever else differs between them (common random numbers).
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import lowprec

from .counting import Counters
from .errors import DataError, GateError
from .evaluating import Examples, OrderHash, evaluation_names, hash_tensors, mean_task_loss
from .experiment import Experiment
from .faults import known_bad_noise, perturb_one_ulp
from .own_loop import LoopReport, drive
from .pairing import promise_hash
from .records import content_hash
from .running.places import Place
from .seeding import stream_seed
from .workload import Workload

Record = dict[str, Any]
_ALONE: Final = Place()
# Sources beside the workloads and lowprec that a run record depends on.
_SOURCES: Final = (
    *("runs.py", "counting.py", "evaluating.py", "faults.py", "grouping.py"),
    *("metrics.py", "seeding.py"),
    *("noise.py", "workload.py", "running/places.py", "own_loop.py"),
)


@cache
def code_hash() -> str:
    """SHA-256 of the sources that a result depends on: a changed program makes other runs."""
    here = Path(__file__).parent
    spec = find_spec("lowprec")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    files = sorted(package.rglob("*.py")) + sorted((here / "workloads").glob("*.py"))
    files += sorted((here / "integrations").glob("*.py"))
    files += [here / name for name in _SOURCES]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def run_inputs(experiment: Experiment, arm: str, seed: int) -> Record:
    """Everything that determines the record of one run; its hash is the record's key."""
    recipe = _recipe(experiment, arm)
    file = experiment.workload.rpartition(":")[0]
    source = (experiment.folder / file).read_bytes() if file else b""
    faults: dict[str, Any] = {}
    if arm == "candidate":
        faults = dict(experiment.fault)
    elif arm == "null":
        faults = {"init_ulp": 1}
    elif arm == "known_bad":
        harm = experiment.known_bad_margins * experiment.margins["ne"]
        faults = {"logit_noise_for_relative_ne": harm}
    return {
        "workload": experiment.workload,
        "workload_source": hashlib.sha256(source).hexdigest() if file else "shipped",
        "options": dict(experiment.options),
        "steps": experiment.steps,
        "batch_size": experiment.batch_size,
        "processes": experiment.processes,
        "device": experiment.device,
        "negative_sampling_rate": experiment.negative_sampling_rate,
        "recipe": recipe.to_toml(),
        "recipe_hash": recipe.hash,
        "arm": arm,
        "seed": seed,
        "faults": faults,
        "code": code_hash(),
        "torch": torch.__version__,
    }


def _recipe(experiment: Experiment, arm: str) -> lowprec.Recipe:
    """The recipe of an arm: both controls run the baseline's."""
    name = experiment.candidate if arm == "candidate" else experiment.baseline
    return lowprec.load_recipe(experiment.recipe_source(name))


def execute(
    experiment: Experiment,
    arm: str,
    seed: int,
    *,
    workload: Workload,
    tick: Callable[[], None],
    place: Place = _ALONE,
) -> list[Record]:
    """Train one run and return its record; a baseline run also returns the known-bad control.

    Of the processes that share a run only rank 0 evaluates; another one returns nothing, or the
    record of its crash.

    The control is the baseline's own model served with noisy logits, so it costs no training.
    One workload may serve many runs. `tick` is called after each step. An error of the model or of
    the arithmetic becomes a record that says so (a crashed run is a failure, never missing data);
    errors about the user's input (GateError, LowprecError) are raised.
    """
    run = _Run(experiment, arm, seed, workload, place)
    try:
        with run.counters:
            run.train(run.counters.then(tick))
        if place.rank == 0:
            run.evaluate()
    except (GateError, lowprec.LowprecError, OSError, MemoryError):
        raise
    except Exception as error:
        run.crashed = f"{type(error).__name__}: {error}"
    if place.rank > 0 and run.crashed is None:
        return []
    records = [run.record()]
    if arm == "baseline" and experiment.known_bad_margins > 0:
        records.append(run.known_bad_record())
    return records


@dataclass
class _Run:
    experiment: Experiment
    arm: str
    seed: int
    workload: Workload
    place: Place
    crashed: str | None = None
    loss: list[float | None] = field(default_factory=list)
    grad_norm: list[float | None] = field(default_factory=list)
    nonfinite: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    evaluations: dict[str, Any] = field(default_factory=dict)
    gemms: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.place.check(self.experiment.processes, self.experiment.device)
        self.inputs = run_inputs(self.experiment, self.arm, self.seed)
        self.order = OrderHash()
        torch.manual_seed(stream_seed(self.seed, "init"))
        self.model = self.workload.model()
        self.init_hash = hash_tensors(self.model.state_dict().values())
        if self.inputs["faults"].get("init_ulp"):
            perturb_one_ulp(self.model, seed=stream_seed(self.seed, "perturb"))
        self.recipe = _recipe(self.experiment, self.arm)
        self.plan = lowprec.plan(self.model, self.recipe, steps=self.experiment.steps)
        self.fingerprint = lowprec.fingerprint(self.model)
        lowprec.apply(self.model.to(self.place.device), self.plan)
        self.counters = Counters(self.model, steps=self.experiment.steps, rank=self.place.rank)

    def train(self, tick: Callable[[], None]) -> None:
        """Run all steps; a non-finite value is recorded and training goes on to the last step."""
        started = time.perf_counter()
        steps = self.experiment.steps
        if callable(getattr(self.workload, "train", None)):
            self._own_loop(tick)
        else:
            self._built_in_loop(tick)
        if not all(bool(p.isfinite().all()) for p in self.model.parameters()):
            self.nonfinite.append({"step": steps - 1, "where": "weights"})
        self.gemms = lowprec.observe(self.model).gemms
        if self.place.processes > 1:
            ended = content_hash([self.gemms, hash_tensors(self.model.parameters())])
            self.place.check_same(ended, "weights and products after the last step")
        self.seconds["train_s"] = time.perf_counter() - started

    def _own_loop(self, tick: Callable[[], None]) -> None:
        """Training by the loop that the workload brings along, in one process."""
        if self.place.processes > 1:
            raise DataError(
                f"workload {self.experiment.workload}: its own training loop runs in one process; "
                f"[train] processes = {self.place.processes} needs the gate's loop"
            )

        def record(loss: float, norm: float) -> None:
            step = len(self.loss)
            self.loss.append(self._noted(loss, step, "loss"))
            self.grad_norm.append(self._noted(norm, step, "grad"))
            tick()

        report = LoopReport(
            self.model, steps=self.experiment.steps, order=self.order.note, record=record
        )
        train: Any = self.workload
        seed = stream_seed(self.seed, "loop") >> 32
        drive(train.train, self.model, report, seed=seed, batch_size=self.experiment.batch_size)

    def _built_in_loop(self, tick: Callable[[], None]) -> None:
        steps = self.experiment.steps
        torch.manual_seed(stream_seed(self.seed, self.place.stream("dropout")))
        optimizer, scheduler = self.workload.optimizer(self.model, steps=steps)
        batches = self.workload.training_batches(
            seed=stream_seed(self.seed, "data"), steps=steps, batch_size=self.experiment.batch_size
        )
        self.model.train()
        model = self.place.wrapped(self.model)
        for step, batch in enumerate(batches):
            self.order.add(batch)
            lowprec.set_step(self.model, step, data_rank=self.place.rank)
            optimizer.zero_grad(set_to_none=True)
            part = self.place.part(batch)
            logits = model(part.features)
            where = f"training step {step}"
            loss = mean_task_loss(logits, part, where=where, whole=batch.weights)
            self.place.objective(loss).backward()
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
            optimizer.step()
            scheduler.step()
            self.loss.append(self._noted(self.place.total(loss), step, "loss"))
            self.grad_norm.append(self._noted(norm.item(), step, "grad"))
            tick()
        if len(self.loss) != steps:
            raise DataError(
                f"workload {self.experiment.workload}: gave {len(self.loss)} training batches, "
                f"the experiment asks for {steps}"
            )

    def _noted(self, value: float, step: int, where: str) -> float | None:
        if math.isfinite(value):
            return value
        self.nonfinite.append({"step": step, "where": where})
        return None

    def evaluate(self) -> None:
        """Evaluate as trained, then the same weights served in BF16."""
        started = time.perf_counter()
        self.examples = {"trained": self._predict()}
        if self.recipe.quantizes:
            lowprec.restore(self.model)
            lowprec.apply(self.model, lowprec.plan(self.model, lowprec.load_recipe("bf16")))
            self.examples["bf16"] = self._predict()
        else:
            self.examples["bf16"] = self.examples["trained"]
        noise = self.inputs["faults"].get("logit_noise", 0.0)
        self.evaluations = self._evaluations(
            {task.name: noise for task in self.examples["trained"].tasks}
        )
        if not all(one["predictions_finite"] for one in self.evaluations.values()):
            self.nonfinite.append({"step": self.experiment.steps - 1, "where": "predictions"})
        self.seconds["evaluate_s"] = time.perf_counter() - started

    def _predict(self) -> Examples:
        rate = self.experiment.negative_sampling_rate
        return Examples.of(self.model, self.workload, sampling_rate=rate)

    def _evaluations(self, noise: Mapping[str, float]) -> dict[str, Any]:
        return {
            name: one
            for form, examples in self.examples.items()
            for name, one in examples.measure(form, noise, seed=self.seed).items()
        }

    def record(self) -> Record:
        """The run record, without checksum."""
        layers = [
            {
                "name": layer.name,
                **{name: str(product) for name, product in layer.policy.items()},
                "converted": layer.converted,
                "reason": layer.why,
            }
            for layer in self.plan.layers
        ]
        examples = getattr(self, "examples", {}).get("trained")
        return {
            "schema": 1,
            "kind": "run",
            "arm": self.arm,
            "seed": self.seed,
            "key": content_hash(self.inputs),
            "inputs": self.inputs,
            "promise_hash": promise_hash(self.experiment.promise(created="")),
            "pairing": {
                "init_hash": self.init_hash,
                **self.order.hashes(),
                "evaluation_hash": examples.hash if examples else "",
                "steps": self.experiment.steps,
                "evaluation_forms": evaluation_names(self.workload),
            },
            "plan_hash": self.plan.hash,
            "recipe_hash": self.recipe.hash,
            **self._accepted(),
            "plan_table": str(self.plan),
            "plan_layers": layers,
            "gemms": self.gemms,
            "gemms_match_plan": executed_as_planned(self.plan, self.gemms, self.experiment.steps),
            "training": {
                "loss": self.loss,
                "grad_norm": self.grad_norm,
                "nonfinite": self.nonfinite,
                "crashed": self.crashed,
                "counters": self.counters.values,
            },
            "evaluations": self.evaluations,
            "timing": self.seconds,
            "environment": environment(self.place),
        }

    def _accepted(self) -> Record:
        """What an acceptance of the candidate covers: the whole plan as text, and the model."""
        if self.arm != "candidate":
            return {}
        plan = json.dumps(json.loads(self.plan.to_json()), separators=(",", ":"))
        return {"plan": plan, "model": self.fingerprint.to_data()}

    def known_bad_record(self) -> Record:
        """This run served with logit noise worth the promised number of NE margins."""
        inputs = run_inputs(self.experiment, "known_bad", self.seed)
        record = self.record()
        training = dict(record["training"])
        if self.crashed is None:
            harm = inputs["faults"]["logit_noise_for_relative_ne"]
            noise = {
                task.name: known_bad_noise(task.logits, task.labels, task.weights, relative_ne=harm)
                for task in self.examples["trained"].tasks
            }
            training["logit_noise"] = noise.get("", noise)
            record["evaluations"] = self._evaluations(noise)
        key = content_hash(inputs)
        return {**record, "arm": "known_bad", "key": key, "inputs": inputs, "training": training}


def executed_as_planned(plan: lowprec.Plan, gemms: dict[str, Any], steps: int) -> bool:
    """True when every converted layer ran each product at the planned precisions and no other.

    Forward and wgrad ran at least once a step, each in the precision of that step's stage; dgrad
    may never run where nothing below trains, a skipped wgrad must not.
    """
    for layer in plan.layers:
        if not layer.converted:
            continue
        ran = gemms.get(layer.name, {})
        starts = [stage.from_step for stage in layer.stages] + [steps]
        for product in ("fprop", "dgrad", "wgrad"):
            counts, least = ran.get(product, {}), dict.fromkeys(layer.precisions(product), 0)
            for index, stage in enumerate(layer.stages):
                precision = str(getattr(stage.policy, product))
                if precision in least and product != "dgrad":
                    least[precision] += starts[index + 1] - starts[index]
            if set(counts) - set(least):
                return False
            if any(counts.get(precision, 0) < count for precision, count in least.items()):
                return False
    return True


def environment(place: Place) -> dict[str, Any]:
    """Versions and machine facts that a reader needs to repeat the run."""
    return {
        "lowprec": lowprec.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "device": place.hardware(),
        "threads": torch.get_num_threads(),
        "processes": place.processes,
    }

"""One arm, one seed: train, evaluate in every form, and return the run record.

Every random stream has its own seed, so arms that share a seed share initial weights, data order
and dropout whatever else differs between them (common random numbers).
"""

from __future__ import annotations

import hashlib
import math
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

import lowprec

from .errors import DataError, GateError
from .experiment import Experiment
from .faults import known_bad_noise, noisy, perturb_one_ulp
from .metrics import evaluate
from .records import content_hash
from .workload import Batch, Workload

EVALUATION_FORMS: Final = ("trained", "bf16")
EVALUATION_BATCH: Final = 8192
Record = dict[str, Any]


def stream_seed(seed: int, stream: str) -> int:
    """A 63-bit seed for one named random stream of one run."""
    digest = hashlib.sha256(f"{seed}:{stream}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@cache
def code_hash() -> str:
    """SHA-256 of the sources that a result depends on: a changed program makes other runs."""
    here = Path(__file__).parent
    spec = find_spec("lowprec")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    files = sorted(package.rglob("*.py")) + sorted((here / "workloads").glob("*.py"))
    files += [here / name for name in ("runs.py", "faults.py", "metrics.py", "workload.py")]
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
) -> list[Record]:
    """Train one run and return its record; a baseline run also returns the known-bad control.

    The control is the baseline's own model served with noisy logits, so it costs no training.
    One workload may serve many runs. `tick` is called after each step. An error of the model or of
    the arithmetic becomes a record that says so (a crashed run is a failure, never missing data);
    errors about the user's input (GateError, LowprecError) are raised.
    """
    run = _Run(experiment, arm, seed, workload)
    try:
        run.train(tick)
        run.evaluate()
    except (GateError, lowprec.LowprecError, OSError, MemoryError):
        raise
    except Exception as error:
        run.crashed = f"{type(error).__name__}: {error}"
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
    crashed: str | None = None
    loss: list[float | None] = field(default_factory=list)
    grad_norm: list[float | None] = field(default_factory=list)
    nonfinite: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    evaluations: dict[str, Any] = field(default_factory=dict)
    gemms: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inputs = run_inputs(self.experiment, self.arm, self.seed)
        self.order = _OrderHash()
        torch.manual_seed(stream_seed(self.seed, "init"))
        self.model = self.workload.model()
        self.init_hash = _hash_tensors(self.model.state_dict().values())
        if self.inputs["faults"].get("init_ulp"):
            perturb_one_ulp(self.model, seed=stream_seed(self.seed, "perturb"))
        self.recipe = _recipe(self.experiment, self.arm)
        self.plan = lowprec.plan(self.model, self.recipe, steps=self.experiment.steps)
        lowprec.apply(self.model, self.plan)

    def train(self, tick: Callable[[], None]) -> None:
        """Run all steps; a non-finite value is recorded and training goes on to the last step."""
        started = time.perf_counter()
        steps = self.experiment.steps
        torch.manual_seed(stream_seed(self.seed, "dropout"))
        optimizer, scheduler = self.workload.optimizer(self.model, steps=steps)
        batches = self.workload.training_batches(
            seed=stream_seed(self.seed, "data"), steps=steps, batch_size=self.experiment.batch_size
        )
        self.model.train()
        for step, batch in enumerate(batches):
            self.order.add(batch)
            lowprec.set_step(self.model, step)
            optimizer.zero_grad(set_to_none=True)
            loss = _loss(self.model, batch, where=f"training step {step}")
            loss.backward()
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
            optimizer.step()
            scheduler.step()
            self.loss.append(self._noted(loss.item(), step, "loss"))
            self.grad_norm.append(self._noted(norm.item(), step, "grad"))
            tick()
        if len(self.loss) != steps:
            raise DataError(
                f"workload {self.experiment.workload}: gave {len(self.loss)} training batches, "
                f"the experiment asks for {steps}"
            )
        if not all(bool(p.isfinite().all()) for p in self.model.parameters()):
            self.nonfinite.append({"step": steps - 1, "where": "weights"})
        self.gemms = lowprec.observe(self.model).gemms
        self.seconds["train_s"] = time.perf_counter() - started

    def _noted(self, value: float, step: int, where: str) -> float | None:
        if math.isfinite(value):
            return value
        self.nonfinite.append({"step": step, "where": where})
        return None

    def evaluate(self) -> None:
        """Evaluate as trained, then the same weights served in BF16."""
        started = time.perf_counter()
        self.examples = {"trained": _Examples.of(self.model, self.workload)}
        if self.recipe.quantizes:
            lowprec.restore(self.model)
            lowprec.apply(self.model, lowprec.plan(self.model, lowprec.load_recipe("bf16")))
            self.examples["bf16"] = _Examples.of(self.model, self.workload)
        else:
            self.examples["bf16"] = self.examples["trained"]
        self.evaluations = self._evaluations(self.inputs["faults"].get("logit_noise", 0.0))
        if not all(one["predictions_finite"] for one in self.evaluations.values()):
            self.nonfinite.append({"step": self.experiment.steps - 1, "where": "predictions"})
        self.seconds["evaluate_s"] = time.perf_counter() - started

    def _evaluations(self, noise: float) -> dict[str, Any]:
        seed = stream_seed(self.seed, "fault")
        return {
            form: examples.measure(noisy(examples.logits, noise, seed=seed))
            for form, examples in self.examples.items()
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
            "pairing": {
                "init_hash": self.init_hash,
                **self.order.hashes(),
                "evaluation_hash": examples.hash if examples else "",
                "steps": self.experiment.steps,
                "evaluation_forms": list(EVALUATION_FORMS),
            },
            "plan_hash": self.plan.hash,
            "recipe_hash": self.recipe.hash,
            "plan_table": str(self.plan),
            "plan_layers": layers,
            "gemms": self.gemms,
            "gemms_match_plan": executed_as_planned(self.plan, self.gemms, self.experiment.steps),
            "training": {
                "loss": self.loss,
                "grad_norm": self.grad_norm,
                "nonfinite": self.nonfinite,
                "crashed": self.crashed,
            },
            "evaluations": self.evaluations,
            "timing": self.seconds,
            "environment": environment(),
        }

    def known_bad_record(self) -> Record:
        """This run served with logit noise worth the promised number of NE margins."""
        inputs = run_inputs(self.experiment, "known_bad", self.seed)
        record = self.record()
        training = dict(record["training"])
        if self.crashed is None:
            examples = self.examples["trained"]
            harm = inputs["faults"]["logit_noise_for_relative_ne"]
            noise = known_bad_noise(
                examples.logits, examples.labels, examples.weights, relative_ne=harm
            )
            training["logit_noise"] = noise
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


def environment() -> dict[str, Any]:
    """Versions and machine facts that a reader needs to repeat the run."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
        "device": "cpu",
        "threads": torch.get_num_threads(),
    }


def _loss(model: nn.Module, batch: Batch, *, where: str) -> torch.Tensor:
    total = batch.weights.sum()
    if not bool(total > 0):
        raise DataError(f"{where}: all weights of the batch are zero; leave such rows out")
    logits = model(batch.features)
    losses = functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
    loss: torch.Tensor = (losses * batch.weights).sum() / total
    return loss


def _hash_tensors(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class _OrderHash:
    """Hashes of what was trained on: all batches in order, the first and the last."""

    def __init__(self) -> None:
        self.all = hashlib.sha256()
        self.first = self.last = ""

    def add(self, batch: Batch) -> None:
        one = _hash_tensors((batch.ids, batch.labels, batch.weights))
        self.all.update(one.encode())
        self.first, self.last = self.first or one, one

    def hashes(self) -> dict[str, str]:
        return {
            "batches_hash": self.all.hexdigest(),
            "first_batch_hash": self.first,
            "last_batch_hash": self.last,
        }


@dataclass
class _Examples:
    """The evaluation set as one model sees it: float32 logits beside labels, weights, clusters."""

    logits: NDArray[np.float32]
    labels: NDArray[np.float32]
    weights: NDArray[np.float32]
    clusters: dict[str, NDArray[np.int64]]
    groups: NDArray[np.int64] | None
    slices: dict[str, NDArray[np.bool_]]
    hash: str

    @classmethod
    def of(cls, model: nn.Module, workload: Workload) -> _Examples:
        model.eval()
        logits, batches = [], []
        digest = hashlib.sha256()
        with torch.no_grad():
            for batch in workload.evaluation_batches(batch_size=EVALUATION_BATCH):
                logits.append(model(batch.features).float().numpy())
                digest.update(_hash_tensors((batch.ids, batch.labels, batch.weights)).encode())
                kept = (batch.labels.numpy(), batch.weights.numpy(), batch.clusters, batch.groups)
                batches.append((*kept, batch.slices))
        if not batches:
            raise DataError("the evaluation set is empty")
        labels, weights, clusters, groups, slices = zip(*batches, strict=True)
        return cls(
            logits=np.concatenate(logits),
            labels=np.concatenate(labels),
            weights=np.concatenate(weights),
            clusters={name: _dense([c[name] for c in clusters]) for name in clusters[0]},
            groups=None if groups[0] is None else _dense(groups),
            slices={name: np.concatenate([s[name] for s in slices]) for name in slices[0]},
            hash=digest.hexdigest(),
        )

    def measure(self, logits: NDArray[np.floating[Any]]) -> dict[str, Any]:
        return evaluate(
            logits,
            self.labels,
            weights=self.weights,
            clusters=self.clusters,
            groups=self.groups,
            slices=self.slices,
        )


def _dense(parts: Any) -> NDArray[np.int64]:
    """Keys as ids 0 .. U-1 in sorted order, the same for every run on the same examples."""
    return np.unique(np.concatenate(parts), return_inverse=True)[1].astype(np.int64)

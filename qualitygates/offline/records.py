"""From rows sorted out by run to sealed run records: one evaluation of one run at a time."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..errors import RecordError
from ..metrics import evaluate, recalibrated
from ..noise import known_bad_noise, noisy
from ..records import RunStore, content_hash
from ..seeding import stream_seed
from .curves import NOTHING_RECORDED
from .examples import Shared, aligned_logits, shared_examples
from .predictions import RunKey
from .rows import ArmSeed, Rows
from .spec import OfflineSpec

Evaluations = dict[str, Any]
UNKNOWN: Final = "not recorded"
_SOURCES: Final = (
    *("columns.py", "curves.py", "event_files.py", "examples.py", "observations.py"),
    *("predictions.py", "records.py", "rows.py", "spill.py"),
    *("../metrics.py", "../noise.py", "../seeding.py"),
)


@cache
def code_hash() -> str:
    """SHA-256 of the sources that an offline record depends on."""
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update(name.encode() + (Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()


def settings(spec: OfflineSpec) -> dict[str, Any]:
    """What determines a record besides its files."""
    content = spec.to_dict()
    kept = ("forms", "tasks", "negative_sampling_rate", "arms", "columns", "clusters")
    return {
        **{key: content[key] for key in kept},
        "slices": [list(spec.flags), list(spec.categories)],
        "code": code_hash(),
        "numpy": np.__version__,
    }


class Records:
    """Writes the run records of an offline gate that are not there yet."""

    def __init__(self, spec: OfflineSpec, store: RunStore, rows: Rows, *, promise: str) -> None:
        self.spec, self.store, self.rows, self.promise = spec, store, rows, promise
        self.known_bad = spec.known_bad_margins > 0

    def write(self) -> None:
        """Evaluate and save every run without a record; those that are there stay.

        All runs of one evaluation come before the next, whose examples then take their place in
        memory; earlier evaluations of a run wait on disk for its last.
        """
        runs = self.rows.runs()
        todo = [run for run in runs if not self._is_made(run)]
        alive = [run for run in runs if run not in self.spec.crashed]
        digests: list[str] = []
        names = self.spec.evaluations if todo and alive else ()
        for number, name in enumerate(names):
            shared = self._shared((*alive[0], name))
            digests.append(shared.digest)
            for run in todo:
                if run in alive:
                    for arm, found in self._measure(shared, (*run, name)).items():
                        waiting = self.rows.spill.folder / f"{arm}-{run[1]}.json"
                        earlier = json.loads(waiting.read_text()) if number else {}
                        evaluations = {**earlier, name: found}
                        if number < len(names) - 1:
                            waiting.write_text(json.dumps(evaluations))
                        else:
                            self._save(arm, run[1], evaluations, digest=content_hash(digests))
            del shared
        for arm, seed in todo:
            if (arm, seed) in self.spec.crashed:
                for written in self._written(arm):
                    self._save(written, seed, {}, digest="")

    def _written(self, arm: str) -> list[str]:
        """The arms whose records come from a run of this arm."""
        return [arm, "known_bad"] if arm == "baseline" and self.known_bad else [arm]

    def _inputs(self, arm: str, seed: int) -> dict[str, Any]:
        """Everything that determines the record of one run; its hash is the record's key."""
        trained = "baseline" if arm == "known_bad" else arm
        harm = self.spec.known_bad_margins * self.spec.margins["ne"]
        return {
            "source": "offline",
            "arm": arm,
            "seed": seed,
            "sources": self.rows.sources.get((trained, seed), []),
            "crashed": self.spec.crashed.get((trained, seed)),
            "faults": {"logit_noise_for_relative_ne": harm} if arm == "known_bad" else {},
            "settings": settings(self.spec),
        }

    def _is_made(self, run: ArmSeed) -> bool:
        """Whether the run's records are there; those of other settings are moved aside."""
        arm, seed = run
        made = True
        for written in self._written(arm):
            inputs = self._inputs(written, seed)
            current = self.store.path(written, seed, content_hash(inputs))
            for path in self.store.runs.glob(f"{written}-{seed:03d}-*.json"):
                if path == current:
                    continue
                old = json.loads(path.read_bytes())["inputs"]
                if any(old.get(key) != inputs[key] for key in ("sources", "crashed")):
                    raise RecordError(
                        f"{written} seed {seed}: its files or their entries are not those it was "
                        "judged by; changed predictions are another gate: give it its own folder "
                        "with --out"
                    )
                path.replace(path.with_suffix(".superseded"))
            made = made and current.exists()
        return made

    def _shared(self, run: RunKey) -> Shared:
        return shared_examples(
            self.rows.spill,
            run,
            clusters=self.spec.clusters,
            buckets=self.spec.buckets,
            vocabularies=self.rows.reader.vocabularies,
            spell=self.rows.spell,
        )

    def _measure(self, shared: Shared, run: RunKey) -> Evaluations:
        """The Evaluation of a run by arm: a baseline's logits also make the known-bad control."""
        arm, seed, name = run
        raw = aligned_logits(self.rows.spill, shared, run, spell=self.rows.spell)
        logits = recalibrated(raw, self.spec.negative_sampling_rate)
        found = {arm: _reduced(shared, logits)}
        if "known_bad" in self._written(arm):
            harm = self.spec.known_bad_margins * self.spec.margins["ne"]
            sd = known_bad_noise(logits, shared.labels, shared.weights, relative_ne=harm)
            noise = noisy(logits, sd, seed=stream_seed(seed, f"fault:{name}"))
            found["known_bad"] = {**_reduced(shared, noise), "logit_noise": sd}
        return found

    def _save(self, arm: str, seed: int, evaluations: Evaluations, *, digest: str) -> None:
        inputs = self._inputs(arm, seed)
        trained = ("baseline" if arm == "known_bad" else arm, seed)
        seen = self.rows.observed.get(trained, {})
        self.store.save(
            {
                "arm": arm,
                "seed": seed,
                "key": content_hash(inputs),
                "inputs": inputs,
                "promise_hash": self.promise,
                "pairing": {
                    **{key: seen.get(key, UNKNOWN) for key in ("init_hash", "batches_hash")},
                    "evaluation_hash": digest,
                    "steps": self._steps(trained),
                    "evaluation_forms": list(self.spec.evaluations),
                },
                "plan_hash": seen.get("plan_hash", UNKNOWN),
                "recipe_hash": seen.get("recipe_hash", UNKNOWN),
                "plan_table": seen.get("plan_table", ""),
                "plan_layers": seen.get("plan_layers", []),
                "gemms": seen.get("gemms", {}),
                "gemms_match_plan": seen.get("gemms_match_plan"),
                "training": self._training(trained, evaluations),
                "evaluations": evaluations,
                "environment": seen.get("environment", _environment()),
                **{key: seen[key] for key in ("plan", "model") if key in seen},
            }
        )

    def _training(self, run: ArmSeed, evaluations: Evaluations) -> dict[str, Any]:
        curve = self.rows.curves.get(run)
        training = dict(NOTHING_RECORDED) if curve is None else curve.training()
        noise = {
            name: one.pop("logit_noise")
            for name, one in evaluations.items()
            if "logit_noise" in one
        }
        return {
            **training,
            **({"logit_noise": noise} if noise else {}),
            "crashed": self.spec.crashed.get(run),
        }

    def _steps(self, run: ArmSeed) -> int:
        """Recorded steps; a run that died is given those of its baseline, to which it belongs."""
        of = ("baseline", run[1]) if run in self.spec.crashed else run
        curve = self.rows.curves.get(of)
        return 0 if curve is None else len(curve.steps)


def _reduced(shared: Shared, logits: NDArray[Any]) -> Evaluations:
    return evaluate(
        logits,
        shared.labels,
        weights=shared.weights,
        clusters=shared.clusters,
        groups=shared.groups,
        slices=shared.slices,
    )


def _environment() -> Mapping[str, Any]:
    return {
        "judged with": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": platform.machine(),
        },
        "training": UNKNOWN,
    }

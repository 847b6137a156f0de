"""Results by arm and seed: read from the sweep's folder, or measured and written there."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ..errors import DataError
from ..evaluating import mean_task_loss
from ..workload import Batch
from .branches import (
    Arm,
    BranchJob,
    Checkpoint,
    Setting,
    branch_inputs,
    run_branches,
    sweep_part,
)
from .effects import Paired, pair
from .pool import Pool
from .screen import screen
from .spec import SweepSpec
from .store import SweepStore

# Arms that one process trains from a checkpoint before it hands its results over to be written.
_CHUNK: Final = 6


def settings_of(spec: SweepSpec) -> tuple[Setting, ...]:
    """One setting a starting step."""
    part = {"first": 0.0, "last": spec.evaluation_share, "clusters": spec.clusters}
    return tuple(
        Setting(spec.gate, part, spec.evaluation_rows, start, spec.window)
        for start in spec.start_steps
    )


@dataclass
class Measurer:
    """Runs what is missing and remembers the paired effects; every result is written at once."""

    spec: SweepSpec
    store: SweepStore
    pool: Pool
    progress: bool = False
    results: dict[tuple[int, int, str], Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.settings = settings_of(self.spec)

    def setting(self, seed: int, *, whole: bool = False) -> Setting:
        """Where the branches of a seed start: the starting steps take turns; `whole`: at step 0."""
        if whole:
            return replace(self.settings[0], start=0, window=self.spec.gate.steps)
        return self.settings[(seed - self.spec.branches.seeds[0]) % len(self.settings)]

    def measure(
        self, arms: Sequence[Arm], seeds: Sequence[int], *, whole: bool = False
    ) -> list[list[Paired]]:
        """The paired effects of every arm in every seed, in the order given.

        In branches, or with `whole` over whole trainings, both on the sweep's own rows.
        """
        chunk = 1 if whole else _CHUNK
        settings = {seed: self.setting(seed, whole=whole) for seed in seeds}
        jobs = []
        for seed, setting in settings.items():
            missing = [arm for arm in ({}, *arms) if not self._known(setting, seed, arm)]
            unique = list({_name(arm): arm for arm in missing}.values())
            jobs += [
                BranchJob(setting, seed, tuple(unique[at : at + chunk]))
                for at in range(0, len(unique), chunk)
            ]
        done, total = 0, sum(len(job.arms) for job in jobs)
        for job, results in self.pool.run(run_branches, jobs):
            for arm, result in zip(job.arms, results, strict=True):
                inputs = branch_inputs(job.setting, job.seed, arm)
                record = self.store.save("sweep-branch", inputs, result)
                self._take(job.setting, job.seed, arm, record["result"])
            done += len(job.arms)
            if self.progress:
                what = "whole trainings" if whole else "branches"
                print(f"{what}: {done}/{total}", file=sys.stderr, flush=True)
        return [[self._pair(settings[seed], seed, arm) for seed in seeds] for arm in arms]

    def _known(self, setting: Setting, seed: int, arm: Arm) -> bool:
        if (setting.start, seed, _name(arm)) in self.results:
            return True
        inputs = branch_inputs(setting, seed, arm)
        record = self.store.load("sweep-branch", inputs)
        if record is None:
            return False
        self._take(setting, seed, arm, record["result"])
        return True

    def _take(self, setting: Setting, seed: int, arm: Arm, result: Mapping[str, Any]) -> None:
        if not arm and (result["crashed"] or result["clusters"] is None or None in result["loss"]):
            what = "branch" if setting.start else "training"
            raise DataError(
                f"the BF16 {what} of seed {seed} did not end in finite numbers "
                f"({result['crashed'] or 'a loss is not finite'}): nothing can be compared with it"
            )
        self.results[setting.start, seed, _name(arm)] = result

    def _pair(self, setting: Setting, seed: int, arm: Arm) -> Paired:
        start, found = setting.start, self.results
        return pair(seed, found[start, seed, ""], found[start, seed, _name(arm)])

    def screen(
        self, layers: Sequence[str], options: Mapping[str, Sequence[str]]
    ) -> Mapping[str, Any]:
        """The screen of the first seed's checkpoint, read or measured."""
        seed = self.spec.branches.seeds[0]
        job = ScreenJob(
            self.setting(seed),
            seed,
            self.spec.screen_batches,
            tuple(layers),
            {product: tuple(texts) for product, texts in options.items()},
        )
        inputs = {
            **branch_inputs(job.setting, seed, {}),
            "batches": job.batches,
            "layers": list(layers),
            "options": {product: list(texts) for product, texts in options.items()},
        }
        record = self.store.load("sweep-screen", inputs)
        if record is None:
            ((_, found),) = self.pool.run(run_screen, [job])
            record = self.store.save("sweep-screen", inputs, found)
        result: Mapping[str, Any] = record["result"]
        return result


def _name(arm: Arm) -> str:
    return ", ".join(f"{layer}={policy}" for layer, policy in sorted(arm.items()))


@dataclass(frozen=True)
class ScreenJob:
    """The screen of one checkpoint."""

    setting: Setting
    seed: int
    batches: int
    layers: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]


def run_screen(job: ScreenJob) -> dict[str, Any]:
    """Screen the checkpoint on the batches that follow it (at most one window of them)."""
    checkpoint = Checkpoint(job.setting, job.seed, sweep_part(job.setting))

    def loss(model: Any, batch: Batch) -> Any:
        return mean_task_loss(model(batch.features), batch, where="screen")

    return screen(
        checkpoint.model,
        checkpoint.batches[: job.batches],
        loss=loss,
        options=job.options,
        layers=job.layers,
    )

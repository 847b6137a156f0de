"""bisect: the smallest set of layers of a rejected recipe whose return to BF16 makes it pass.

Branches rank the groups by the effect of their own policy alone; gates decide, on the sweep's own
rows: they choose, so they prove nothing about what they chose, and the gate that is written for it
has other seeds and other rows. The shortest prefix of that ranking that passes is found by binary
search, then every member that can go back to low precision without failing is put back: what
remains is minimal, not proven smallest, because layers can be to blame only together.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import lowprec

from ..errors import ExperimentError
from ..experiment import Experiment
from ..locking import folder_lock
from ..records import content_hash, seal, write_json_atomic, write_text_atomic
from .driver import Session, bf16_models
from .effects import Effect, summarize
from .groups import members_of
from .measuring import Measurer
from .options import ALL_BF16, products_of
from .pool import open_pool
from .spec import SweepSpec
from .store import SweepStore
from .writing import effect_text, gate_text, rule_lines

_SHARED_ARMS: Final = ("baseline", "null", "known_bad")

Passes = Callable[[frozenset[str]], bool | None]
"""Whether a gate accepts the recipe with these groups in BF16; None when no gate may be run."""


@dataclass(frozen=True)
class Minimal:
    """The groups to give back, and whether taking any one of them off was tried and failed."""

    given_back: tuple[str, ...]
    proven_minimal: bool


def smallest(order: Sequence[str], passes: Passes) -> Minimal | None:
    """The shortest passing prefix of `order`, then without every member that is not needed.

    Assumes that giving back more never makes a recipe fail. None when even all of them do not pass.
    """
    low, high = 0, len(order)
    if not passes(frozenset(order)):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        answer = passes(frozenset(order[:middle]))
        if answer is None:
            return Minimal(tuple(order[:high]), proven_minimal=False)
        low, high = (low, middle) if answer else (middle, high)
    kept = list(order[:high])
    # The last member of the shortest prefix is needed; of the others the least harmful first.
    for name in list(reversed(kept[:-1])):
        answer = passes(frozenset(kept) - {name})
        if answer is None:
            return Minimal(tuple(kept), proven_minimal=False)
        if answer:
            kept.remove(name)
    return Minimal(tuple(kept), proven_minimal=True)


def bisect(
    spec: SweepSpec,
    recipe: str,
    *,
    out: Path,
    workers: int,
    progress: bool,
    cluster: str = "",
) -> dict[str, Any]:
    """Find which groups of `recipe` to give back; writes recipe.toml, gate.toml, bisect.json.

    `recipe` is a shipped name or a path. At most [confirm] attempts gates are run, on the sweep's
    rows and the first seeds of confirmation; gate.toml has the next ones. Raises ExperimentError
    when the recipe passes as it is, when not even BF16 everywhere passes, and for a recipe whose
    precision follows a schedule.
    """
    search = _Bisection(spec, recipe, Session(out, workers, progress, cluster))
    with folder_lock(out):
        return search.run()


def run_gate(
    experiment: Experiment, folder: Path, *, earlier: Sequence[Path], session: Session
) -> dict[str, Any]:
    """The verdict of a gate in `folder`; runs of the BF16 arms are taken from `earlier` gates.

    They are records of the same inputs, named by the hash of them; a gate reads no others.
    """
    runs = folder / "runs"
    for other in earlier:
        for arm in _SHARED_ARMS:
            for path in sorted((other / "runs").glob(f"{arm}-*.json")):
                target = runs / path.name
                if not target.exists():
                    runs.mkdir(parents=True, exist_ok=True)
                    part = target.with_name(f".{target.name}.part")
                    shutil.copyfile(path, part)
                    part.replace(target)
    return session.gate(experiment, folder)


class _Bisection:
    def __init__(self, spec: SweepSpec, recipe: str, session: Session) -> None:
        self.spec, self.out, self.session = spec, session.out, session
        models = bf16_models(spec.gate)
        self.recipe = lowprec.load_recipe(recipe)
        self.plan = lowprec.plan(models.model, self.recipe, steps=spec.gate.steps)
        scheduled = [one.name for one in self.plan.layers if len(one.stages) > 1]
        if scheduled:
            raise ExperimentError(
                f"recipe {recipe}: {scheduled[0]!r} changes its precision on a schedule, which "
                "branches cannot follow; bisect the recipe without it"
            )
        self.policies = {one.name: str(one.policy) for one in self.plan.layers}
        self.low = [one.name for one in self.plan.layers if one.quantizes]
        every = [one.name for one in self.plan.layers]
        self.groups = {
            name: tuple(layers) for name, layers in members_of(self.low, every, spec).items()
        }
        self.gates: list[dict[str, Any]] = []

    def run(self) -> dict[str, Any]:
        effects = self._effects()
        order = sorted(effects, key=lambda name: -effects[name].estimate)
        if self._passes(frozenset()):
            raise ExperimentError(
                f"recipe {self.recipe.name} is accepted as it is by a gate on fresh seeds: there "
                "is nothing to give back"
            )
        found = smallest(order, self._passes)
        if found is None:
            raise ExperimentError(
                "not even with every group in BF16 does the gate pass: the recipe is not to blame; "
                f"see {self.out / 'gates'}"
            )
        self._write(self.out, frozenset(found.given_back), effects, swept=False)
        result = {
            "schema": 1,
            "kind": "sweep-bisect",
            "recipe": self.recipe.name,
            "recipe_hash": self.recipe.hash,
            "order": [{"group": name, **effects[name].to_dict()} for name in order],
            "given_back": list(found.given_back),
            "minimal": found.proven_minimal,
            "gates": self.gates,
        }
        sealed = seal(result)
        write_json_atomic(self.out / "bisect.json", sealed, indent=2)
        return sealed

    def _effects(self) -> dict[str, Effect]:
        """Effect of each group's own policy alone, in branches."""
        session, device = self.session, self.spec.gate.device
        with open_pool(session.workers, device=device, cluster=session.cluster) as pool:
            measurer = Measurer(self.spec, SweepStore(self.out), pool, session.progress)
            arms = [{name: self.policies[name] for name in group} for group in self.groups.values()]
            pairs = measurer.measure(arms, self.spec.branches.seeds)
        return summarize(dict(zip(self.groups, pairs, strict=True)))

    def _passes(self, given_back: frozenset[str]) -> bool | None:
        if given_back == frozenset(self.groups):
            return True  # BF16 itself: the gate would compare it with itself
        key = content_hash(sorted(given_back))[:12]
        known = next((one for one in self.gates if one["key"] == key), None)
        if known is None:
            if len(self.gates) >= self.spec.attempts:
                return None
            folder = self.out / "gates" / key
            self._write(folder, given_back, {}, swept=True)
            earlier = [self.out / "gates" / one["key"] / "gate" for one in self.gates]
            verdict = run_gate(
                Experiment.from_toml(folder / "gate.toml"),
                folder / "gate",
                earlier=earlier,
                session=self.session,
            )
            known = {
                "key": key,
                "given_back": sorted(given_back),
                "verdict": verdict["verdict"],
                "seeds": verdict["seeds"],
            }
            self.gates.append(known)
        return bool(known["verdict"] == "ACCEPT")

    def _write(
        self,
        folder: Path,
        given_back: frozenset[str],
        effects: Mapping[str, Effect],
        *,
        swept: bool,
    ) -> None:
        """recipe.toml and gate.toml of the recipe with some groups in BF16."""
        back = {layer: name for name in given_back for layer in self.groups[name]}
        why = f"{self.recipe.name} with {len(back)} layers given back to BF16 by bisection"
        lines = ["schema = 1", f'why = "{why}"']
        if self.recipe.seed:
            lines.append(f"seed = {self.recipe.seed}")
        for layer in self.plan.layers:
            policy = ALL_BF16 if layer.name in back else self.policies[layer.name]
            reason = layer.rule or "no rule of the bisected recipe matches it"
            if layer.name in back:
                group = back[layer.name]
                alone = f", alone {effect_text(effects[group])}" if group in effects else ""
                reason = f"given back to BF16: without it the gate does not pass{alone}"
            lines += rule_lines(layer.name, products_of(policy), reason)
        write_text_atomic(folder / "recipe.toml", "\n".join(lines) + "\n")
        name = f"{self.spec.name}-bisect"
        text = gate_text(
            self.spec,
            folder,
            recipe="./recipe.toml",
            name=name,
            attempt=0 if swept else 1,
            swept=swept,
        )
        write_text_atomic(folder / "gate.toml", text)

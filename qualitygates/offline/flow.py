"""The offline gate: predictions that the user's own training wrote -> run records -> verdict."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..judging import judge_records
from ..locking import folder_lock
from ..pairing import promise_hash
from ..records import RunStore, canonical_json, read_speed
from ..report import write_report
from .inputs import Input, check_inputs, find_inputs
from .records import Records, settings
from .rows import Rows
from .spec import OfflineSpec

_ROWS = ".rows-"


def judge_offline(spec: OfflineSpec, *, out: Path) -> dict[str, Any]:
    """Judge the predictions that `spec` names in the gate folder `out`; returns the verdict.

    The folder gets what `run` would write: gate.json before the first record, one sealed record a
    run, and the report. A record that is there is not made again, so the same call on the same
    files changes nothing; files of further seeds may be added. At most the columns of one run and
    evaluation are in memory. Raises GateError.
    """
    inputs = find_inputs(spec)
    with folder_lock(out):
        store = RunStore(out)
        if store.gate_path.exists():
            # An edited promise is refused before anything is read.
            kept = store.read_gate()
            check_inputs(kept.get("inputs", {}), inputs, gate=store.gate_path)
            _write_gate(spec, store, inputs, null_control=kept["controls"]["null"])
        if not (store.gate_path.exists() and _all_made(spec, store, inputs)):
            _make_records(spec, store, inputs)
        gate = store.read_gate()
        runs, _ = store.load_all()
        verdict = judge_records(gate, runs, speed=read_speed(out))
        write_report(out, gate, runs, verdict=verdict)
        return verdict


def _write_gate(
    spec: OfflineSpec, store: RunStore, inputs: Sequence[Input], *, null_control: bool
) -> dict[str, Any]:
    """gate.json; one that is there must promise the same, but for files that came later."""
    kept = store.read_gate() if store.gate_path.exists() else None
    files = {one.label: one.sha256 for one in inputs}
    facts = {
        "source": "predictions that another training wrote",
        "pairing": "both arms hold the same examples; that seeds share initial weights and data "
        "order is the word of those who trained",
    }
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return store.write_gate(
        {
            **spec.promise(null_control=null_control, created=created),
            "inputs": files if kept is None else kept.get("inputs"),
            "facts": facts,
        }
    )


def _make_records(spec: OfflineSpec, store: RunStore, inputs: Sequence[Input]) -> None:
    """Write the records that are missing, and gate.json before the first."""
    store.load_all()  # what is damaged is set aside, to be made again
    for leftover in store.folder.glob(f"{_ROWS}*"):
        # Of a call that was killed: the folder is locked, so nobody writes there.
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_ROWS, dir=store.folder) as folder:
        rows = Rows(spec, inputs, folder=Path(folder))
        rows.read()
        gate = _write_gate(spec, store, inputs, null_control=rows.has_null)
        Records(spec, store, rows, promise=promise_hash(gate)).write()


def _all_made(spec: OfflineSpec, store: RunStore, inputs: Sequence[Input]) -> bool:
    """Whether the records on disk were made from exactly these files by this program."""
    runs, damaged = store.load_all()
    now = {canonical_json(one.described()) for one in inputs}
    seen: set[str] = set()
    for run in runs:
        made = run["inputs"]
        crashed = spec.crashed.get((run["arm"].replace("known_bad", "baseline"), run["seed"]))
        if made.get("settings") != settings(spec) or made.get("crashed") != crashed:
            return False
        seen |= {canonical_json(source) for source in made["sources"]}
    arms = {(run["arm"], run["seed"]) for run in runs}
    controls = spec.known_bad_margins > 0
    lacking = controls and any(
        arm == "baseline" and ("known_bad", seed) not in arms for arm, seed in arms
    )
    return not damaged and not lacking and seen == now and set(spec.crashed) <= arms

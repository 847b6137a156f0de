"""The sections of a report that say what to do with it: the acceptance, and how to reproduce it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from .acceptance import acceptance
from .blocks import Block, Facts, Pre, Section, Text
from .errors import RecordError
from .wording import number, table_of

Record = Mapping[str, Any]


def accepted(gate: Record, runs: Sequence[Record], *, verdict: Record) -> Mapping[str, Any] | None:
    """What acceptance.json will hold; None where the verdict writes none."""
    if verdict["verdict"] != "ACCEPT" or table_of(gate["experiment"], "candidate").get("fault"):
        return None
    # Runs of several models: settle() refuses them in words of its own.
    with contextlib.suppress(RecordError):
        return acceptance(gate, runs, verdict=verdict)
    return None


def acceptance_in_short(record: Record | None) -> str:
    """One sentence for the head of the report."""
    if record is None:
        return "only an ACCEPT of a real candidate writes one"
    return f"what training may rely on; holds {_until(record)}"


def _until(record: Record) -> str:
    at = record["expiry"]["at"]
    return f"until {at}" if at else "without a last day"


def acceptance_section(record: Record | None) -> Section:
    """Whether acceptance.json was written, what it covers, and how training and CI use it."""
    title = "Acceptance"
    if record is None:
        text = (
            "This folder holds no acceptance.json: only an ACCEPT of a real candidate writes one, "
            "and every other verdict removes an earlier one. lowprec.apply(..., require=...) "
            "therefore has nothing that would let this recipe pass."
        )
        return Section(title, [Text(text)])
    unknown = [
        key.removesuffix("_hash")
        for key in ("recipe_hash", "plan_hash", "model_hash")
        if record[key] is None
    ]
    versions = ", ".join(f"{key} {value or 'unknown'}" for key, value in record["versions"].items())
    blocks: list[Block] = [
        Text(
            "acceptance.json was written beside this page. Training that names it starts only "
            "with the recipe, the plan and the model that were judged here:"
        ),
        Pre('lowprec.apply(model, plan, require="DIR/acceptance.json")'),
        Text("In CI, what has changed since (exit code 0: nothing, 1: something):"),
        Pre("python -m qualitygates diff ACCEPTED_DIR NEW_DIR"),
    ]
    if unknown:
        said = (
            f"Not known, so not covered: {', '.join(unknown)}. Give the hashes in [acceptance] "
            "when predictions do not say what made them."
        )
        blocks.append(Text(said, "warn"))
    hardware = "the kind that was gated" if record["hardware"] == "same" else "any"
    facts = [
        ("holds", _until(record)),
        ("versions", f"{versions} (rule: {record['expiry']['versions']})"),
        ("hardware", hardware),
        ("speed", str(record["speed"]).replace("_", " ")),
        *((key.replace("_", " "), str(record[key] or "unknown")) for key in _HASHES),
    ]
    return Section(title, [*blocks, Facts(facts)])


_HASHES = ("recipe_hash", "plan_hash", "model_hash", "gate_hash", "verdict_hash")


def reproduce(gate: Record, verdict: Record) -> list[Block]:
    """The commands that give the same again, for a gate that trained and for an offline one."""
    judge = ("judges these records again, without training", "python -m qualitygates judge DIR")
    if gate.get("inputs"):
        commands = [
            (
                "makes the same records of the same files",
                "python -m qualitygates judge OFFLINE.toml --out DIR",
            ),
            judge,
        ]
        count = len(gate["inputs"])
        said = (
            "An offline gate: gate.json holds the SHA-256 of every file that was judged "
            f"({count}). OFFLINE.toml is the file that named them; what it promised is below."
        )
    else:
        run = "python -m qualitygates run gate.toml --out DIR"
        commands = [
            ("trains every run and judges", run),
            ("the same runs, to the bit, as Ray tasks", f"{run} --cluster ray://HEAD:10001"),
            judge,
        ]
        said = (
            "Save the experiment below as gate.toml; same code, same kind of machine: the same "
            "bits. What was finished is never trained again."
        )
        processes = table_of(gate["experiment"], "train").get("processes", 1)
        if processes != 1:
            said += (
                f" Each run is {number(processes)} processes of one machine, which the command "
                "itself starts through torchrun."
            )
    if any(rung["entries"] for rung in verdict["speed"].get("rungs", ())):
        commands.append(("times both arms", "python -m qualitygates speed gate.toml --out DIR"))
    commands.append(("writes this page again", "python -m qualitygates report DIR"))
    width = max(len(command) for _, command in commands)
    lines = [f"{command:<{width}}  # {what}" for what, command in commands]
    return [Text(said), Pre("\n".join(lines))]

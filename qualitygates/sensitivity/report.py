"""The report of a sweep: report.md and one self-contained report.html, from its result alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import plots
from ..blocks import (
    Block,
    Bullets,
    Cell,
    Facts,
    Figures,
    Fold,
    Pre,
    Section,
    Table,
    Text,
    to_markdown,
)
from ..page import to_html
from ..records import write_text_atomic
from .options import PRODUCTS
from .pictures import figures
from .select import UNITS

NOT_GATED = "NOT GATED"
Result = Mapping[str, Any]


def write_report(folder: Path, result: Result) -> Path:
    """Write report.md and report.html, each whole or not at all; returns the page."""
    title = f"{result['name']}: sensitivity sweep"
    sections = [
        _head(folder, result),
        _ranking(result),
        _together(result),
        _selection(result),
        _confirmation(result),
        _screen(result),
        _how(result),
    ]
    write_text_atomic(folder / "report.md", to_markdown(title, sections))
    page = folder / "report.html"
    word = (result["confirmation"] or {}).get("verdict", NOT_GATED)
    write_text_atomic(page, to_html(title, word, sections, data="sweep.json"))
    return page


def percent(value: float | None, digits: int = 3) -> str:
    """`+0.120 %`, or a word for what has no number."""
    return "broke" if value is None else f"{100 * value:+.{digits}f} %"


def interval(one: Mapping[str, Any]) -> str:
    """`[-0.010 %, +0.030 %]`."""
    if one["estimate"] is None:
        return ""
    return f"[{percent(one['lower'])}, {percent(one['upper'])}]"


def summary(folder: Path, result: Result) -> list[str]:
    """The result in a few lines, for a terminal and for the head of the report."""
    top = [one for one in result["ranking"] if one["lower"] is None or one["lower"] > 0][:5]
    worst = "; ".join(
        f"{one['group']} {one['product']} in {one['text']} {percent(one['estimate'])}"
        for one in top
    )
    budget = result["selection"]["budget"]
    saved = result["selection"]["saved"][budget]
    lines = [
        f"most sensitive: {worst}" if worst else "no product shows harm beyond noise on its own",
        f"recipe.toml keeps {result['quantized_share']:.1%} of the known product flops in low "
        f"precision; predicted harm {percent(result['selection']['harm'])} relative NE, predicted "
        f"saving {saved:.1%} of the {UNITS[budget]} ({result['speed']['source']})",
        f"the gate that judges it: python -m qualitygates run {folder / 'gate.toml'}",
    ]
    if result["confirmation"] is None:
        lines.append("nothing is accepted: a sweep chooses, only that gate judges")
    else:
        done = result["confirmation"]
        names = ", ".join(done["given_back"])
        back = f", with {names} raised or given back" if names else ""
        lines.append(
            f"confirmation on fresh seeds and other rows: {done['verdict']} after "
            f"{len(done['attempts'])} gate(s){back}"
        )
    return lines


def _head(folder: Path, result: Result) -> Section:
    # The folder is left out: a page that is sent on shows no paths of this machine.
    return Section("Result", [Bullets(summary(Path(), result))])


def _ranking(result: Result) -> Section:
    rows = []
    for one in result["ranking"]:
        clear = one["lower"] is None or one["lower"] > 0
        rows.append(
            [
                one["group"],
                one["product"],
                one["text"],
                Cell(percent(one["estimate"]), "bad" if clear else ""),
                interval(one),
                str(one["seeds"]),
                one["decided"],
            ]
        )
    blocks: list[Any] = [
        Text(
            "Effect on the evaluation loss (relative NE, positive is worse) of lowering one "
            "product of one group in a short branch from a shared BF16 checkpoint, paired with "
            "the BF16 branch beside it. Intervals cover 90 %; few seeds borrow the variance of all."
        ),
        Table(
            ["group", "product", "as", "effect", "interval", "seeds", "training loss says"],
            rows,
            "lllrrrl",
        ),
        Figures(figures(result)) if plots.available() else Text(plots.MISSING, "warn"),
    ]
    if result["unmeasured"]:
        names = ", ".join(" ".join(item) for item in result["unmeasured"])
        blocks.append(Text(f"Not measured within the budget of branches: {names}", "warn"))
    fixes = [one for one in result["tried"] if not _is_base(result, one)]
    if fixes:
        blocks.append(
            Fold(
                "Cheaper fixes that were tried",
                [
                    Table(
                        ["group", "product", "as", "effect", "interval"],
                        [
                            [
                                o["group"],
                                o["product"],
                                o["text"],
                                percent(o["estimate"]),
                                interval(o),
                            ]
                            for o in fixes
                        ],
                        "lllrr",
                    )
                ],
            )
        )
    return Section("Ranking", blocks)


def _is_base(result: Result, one: Mapping[str, Any]) -> bool:
    return any(
        (r["group"], r["product"], r["text"]) == (one["group"], one["product"], one["text"])
        for r in result["ranking"]
    )


def _together(result: Result) -> Section:
    rows = [
        [name, percent(one["estimate"]), interval(one)] for name, one in result["whole"].items()
    ]
    index = result["interaction"]
    if index is None:
        said = "The interaction index is not defined: the effects one at a time add up to nothing."
    else:
        said = (
            f"Interaction index I = {index:.2f}: the effect of everything low over the sum of the "
            "effects one at a time. Far from 1, sums mislead: below, errors mask one another; "
            "above, they add up to more."
        )
    return Section("Together", [Table(["arm", "effect", "interval"], rows, "lrr"), Text(said)])


def _selection(result: Result) -> Section:
    chosen = result["selection"]
    rows = []
    for group in result["groups"]:
        policy = chosen["policies"].get(group["name"], {})
        rows.append([group["name"], *(policy.get(product, "bf16") for product in PRODUCTS)])
    rows += [[name, "bf16", "bf16", "bf16"] for name in result["excluded"]]
    measured = chosen["measured"].get("effect")
    facts = [
        ("harm budget", percent(result["harm_budget"])),
        ("predicted harm", percent(chosen["harm"])),
        (
            f"measured together, in {_where(chosen)}",
            f"{percent(measured['estimate'])} {interval(measured)}"
            if measured
            else "nothing is low",
        ),
        *_calibration(chosen["calibration"]),
        *((f"predicted saving, {name}", f"{share:.1%}") for name, share in chosen["saved"].items()),
    ]
    lists: list[Block] = []
    excluded = [f"{name}: {why}" for name, why in result["excluded"].items()]
    if excluded:
        lists += [Text("Stay BF16 without a branch:"), Bullets(excluded)]
    if result["notes"]:
        notes = [f"{name}: {why}" for name, why in result["notes"].items()]
        lists += [Text("Layer notes:"), Bullets(notes)]
    return Section(
        "Selection",
        [
            Facts(facts),
            Table(["group", *PRODUCTS], rows, "llll"),
            *lists,
            Fold("The plan", [Pre(result["plan_table"])]),
        ],
    )


def _where(chosen: Mapping[str, Any]) -> str:
    return "whole trainings" if chosen["measured"].get("trainings") else "branches"


def _calibration(one: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if one is None:
        return []
    whole = one["training"]
    return [
        ("everything low, whole trainings", f"{percent(whole['estimate'])} {interval(whole)}"),
        ("sum of what branches expect", percent(one["branches"])),
        ("charged per unit of a branch's harm", f"{one['factor']:.3g}"),
    ]


def _confirmation(result: Result) -> Section:
    done = result["confirmation"]
    if done is None:
        return Section(
            "Confirmation",
            [Text("Not run. Nothing on this page is evidence for acceptance.", "warn")],
        )
    rows = [
        [
            one["folder"],
            ", ".join(one["given_back"]) or "none",
            one["verdict"],
            f"{one['p']:.4f}",
            f"{one['level']:.4f}",
            ", ".join(map(str, one["seeds"])),
        ]
        for one in done["attempts"]
    ]
    return Section(
        "Confirmation",
        [
            Text(
                "Full gates with seeds and evaluation rows that took no part in the choice. Their "
                "recipes and levels were fixed before the first; the levels add up to 0.05. "
                "Nothing else on this page is evidence."
            ),
            Table(["gate", "changed groups", "verdict", "p", "level", "seeds"], rows, "lllrrl"),
            *([Text(done["reason"], "warn")] if done["reason"] else []),
        ],
    )


def _screen(result: Result) -> Section:
    rows = []
    for layer, one in result["screen"].items():
        calls = one["calls"] / one["batches"]
        for product in PRODUCTS:
            for text, proxies in one["products"][product].items():
                rows.append([layer, product, text, *_proxies(proxies), f"{calls:g}"])
    table = Table(
        [
            "layer",
            "product",
            "as",
            "relative error",
            "SQNR dB",
            "Fisher",
            "underflow",
            "clipped",
            "calls",
        ],
        rows,
        "lllrrrrrr",
    )
    shared = [n for n, one in result["screen"].items() if one["calls"] > one["batches"]]
    broken = sorted({row[0] for row in rows if row[3] == "not finite"})
    blocks: list[Any] = [
        Text(
            "Proxies from a few backward passes at the first checkpoint. They only ordered the "
            "branches; they accept and reject nothing."
        )
    ]
    if shared:
        blocks.append(Text(f"Called more than once a step, all calls counted: {', '.join(shared)}"))
    if broken:
        blocks.append(
            Text(
                f"Proxies that are not finite, their operands hold NaN or Inf: "
                f"{', '.join(broken)}; their branches ran first",
                "warn",
            )
        )
    return Section("Screen", [*blocks, Fold("All proxies", [table])])


def _proxies(one: Mapping[str, Any]) -> Sequence[str]:
    if one["broken"]:
        return ["not finite", "", "", "", ""]
    values = (
        one["relative_error"],
        one["sqnr_db"],
        one["fisher"],
        one["underflow"],
        one["saturation"],
    )
    return ["" if value is None else f"{value:.4g}" for value in values]


def _how(result: Result) -> Section:
    experiment = result["experiment"]
    facts = [
        ("gate", result["gate"]),
        ("workload", experiment["workload"]),
        (
            "branches start after",
            f"{', '.join(map(str, result['start_steps']))} of "
            f"{experiment['train']['steps']} steps, in BF16",
        ),
        ("branch length", f"{result['window']} steps"),
        ("seeds of the sweep", ", ".join(map(str, result["seeds"]))),
        (
            "speed",
            f"{result['speed']['source']}; {result['speed']['rows']} rows, layers "
            f"{result['speed']['width']:g} times as wide, casts: {result['speed']['casts']}",
        ),
        ("plan", result["plan_hash"]),
    ]
    return Section("How it was measured", [Facts(facts)])

"""The text of predicted times: one line for a layer, the totals below."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from lowprec.predicting import Prediction
from lowprec.table import WIDTH, render

Row = tuple[str, tuple[int, int], Prediction, bool]
"""Name, shape (N, K), prediction, and whether the layer is converted."""


def why_bf16(prediction: Prediction, shape: tuple[int, int], gpu: str) -> str:
    """The reason of a layer that stays BF16 because it would not gain."""
    n, k = shape
    size = f"{prediction.rows}x{n}x{k}"
    beyond = ", extrapolated" if prediction.extrapolated else ""
    return f"{prediction.speedup:.2f}x of BF16 at {size} on {gpu} (predicted{beyond})"


def lines(rows: Sequence[Row], source: str) -> list[str]:
    """A table of predicted time, memory and conversion tax by layer, with a total."""
    if not rows:
        return [f"No layer's time is known: {source}."]
    tokens = rows[0][2].rows
    head = ["layer", "N x K", "BF16 ms", "ms", "speed", "tax", "kept MiB", "note"]
    body = [
        [
            name or "(model)",
            f"{n}x{k}",
            f"{p.bf16_us / 1e3:.3f}",
            f"{p.us / 1e3:.3f}",
            f"{p.speedup:.2f}x",
            tax_text(p),
            f"{_mib(p.bf16_bytes)} -> {_mib(p.bytes)}",
            _note(p, converted=converted),
        ]
        for name, (n, k), p, converted in rows
    ]
    return [
        *textwrap.wrap(f"Forward and backward of {tokens} rows, {source}:", WIDTH),
        "",
        *render(head, body),
        "",
        *_total(rows),
    ]


def tax_text(p: Prediction) -> str:
    """Conversion time over GEMM time saved."""
    return "no gain" if p.tax is None else f"{p.tax:.2f}"


def _note(p: Prediction, *, converted: bool) -> str:
    notes = [] if converted else ["stays BF16"]
    if not p.native:
        notes.append("emulated: it costs time, converted because the rule says so")
    if p.norm:
        notes.append("with its norm")
    if p.extrapolated:
        notes.append("extrapolated: this shape lies outside of the calibration")
    return "; ".join(notes)


def _total(rows: Sequence[Row]) -> list[str]:
    converted = [p for _, _, p, one in rows if one]
    kept = [p for _, _, p, one in rows if not one]
    before = sum(p.bf16_us for p in [*converted, *kept])
    after = sum(p.us for p in converted) + sum(p.bf16_us for p in kept)
    bytes_before = sum(p.bf16_bytes for p in [*converted, *kept])
    bytes_after = sum(p.bytes for p in converted) + sum(p.bf16_bytes for p in kept)
    saved = sum(p.saved_us for p in converted)
    text = (
        f"These layers: {after / 1e3:.3f} ms instead of {before / 1e3:.3f} ms in BF16 "
        f"({before / after:.2f}x), {_mib(bytes_after)} MiB kept for backward instead of "
        f"{_mib(bytes_before)} MiB"
    )
    if saved > 0:
        text += f", conversion tax {sum(p.casts_us for p in converted) / saved:.2f}"
    said = [f"{text}."]
    if kept:
        said.append(f"{len(kept)} of {len(rows)} stay BF16 because they would not gain.")
    return said


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}"

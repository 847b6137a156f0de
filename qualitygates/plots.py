"""The plots of a report as inline SVG; matplotlib is an extra, imported when one is drawn."""

from __future__ import annotations

import importlib.util
import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .blocks import Figure, plain
from .page import embed

Run = Mapping[str, Any]
Floats = NDArray[np.float64]

MISSING: Final = "plots: pip install 'lowprec[plots]'"
# Drawn in stand-in colours, replaced by the page's own so that plots follow light and dark.
FG, MUTED, LINE, BASE, CAND, NULL, BAD = (f"#0{n}0{n}0{n}" for n in range(1, 8))
_THEME: Final = {
    FG: "--fg",
    MUTED: "--muted",
    LINE: "--line",
    BASE: "--base",
    CAND: "--cand",
    NULL: "--null",
    BAD: "--bad",
}
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lowprec",
    "font.size": 8.5,
    "text.color": FG,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
}
_BLOCKS: Final = 60
_LARGEST: Final = 1e30
# Of more tasks than this only the NE is drawn, of more than the second none: the table holds all.
_TASKS: Final = (2, 12)
_UNITS: Final = {"ne": (100.0, "%"), "calibration": (100.0, "%")}
_NAMES: Final = {
    "ne": "Relative NE",
    "auc": "AUC drop",
    "gauc": "GAUC drop",
    "calibration": "Calibration shift",
}


def available() -> bool:
    """True when matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def figure_axes(sink: list[Figure], title: str, note: str, *, height: float = 2.5) -> Iterator[Any]:
    """Axes to draw on; the figure is appended to `sink` as SVG when the block ends."""
    import matplotlib
    from matplotlib import figure

    with matplotlib.rc_context(_STYLE):
        canvas = figure.Figure(figsize=(4.4, height), layout="constrained")
        canvas.patch.set_alpha(0.0)
        yield canvas.add_subplot()
        stream = io.StringIO()
        with warnings.catch_warnings():
            # The page's own fonts draw the text: a glyph that matplotlib's lack is no loss.
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            canvas.savefig(stream, format="svg", metadata={"Date": None})
    # The same letters on every run: a report of the same records is the same file. The number
    # tells titles apart that differ in other signs alone.
    prefix = re.sub(r"[^a-z0-9]+", "-", title[:60].lower()) + f"-{len(sink)}-"
    sink.append(Figure(title, embed(stream.getvalue(), prefix=prefix, colours=_THEME), note))


def training(runs: Sequence[Run]) -> list[Figure]:
    """Loss and gradient norm of both arms and the paired relative gap of the loss, by step."""
    figures: list[Figure] = []
    arms = {arm: _by_seed(runs, arm) for arm in ("baseline", "candidate")}
    if not all(arms.values()):
        return figures
    note = "Bold: mean over the seeds; thin: each seed. Smoothed over blocks of steps."
    for key, title in (("loss", "Training loss"), ("grad_norm", "Gradient norm")):
        if not all(run["training"][key] for of_arm in arms.values() for run in of_arm.values()):
            continue
        with figure_axes(figures, title, note) as axes:
            for arm, colour in (("baseline", BASE), ("candidate", CAND)):
                curves = {seed: _smooth(run["training"][key]) for seed, run in arms[arm].items()}
                _curves(axes, list(curves.values()), colour=colour, label=arm)
            axes.set_xlabel("step")
            axes.legend(loc="upper right")
    note = (
        "Candidate over baseline of the same seed, less one. Above zero the candidate learns "
        "slower; shown, not gated."
    )
    with figure_axes(figures, "Loss gap, paired", note) as axes:
        gaps = [
            _gap(arms["baseline"][seed], run)
            for seed, run in arms["candidate"].items()
            if seed in arms["baseline"]
        ]
        _curves(axes, gaps, colour=CAND, label="candidate / baseline - 1")
        axes.axhline(0, color=MUTED, linewidth=1)
        axes.set_xlabel("step")
        axes.set_ylabel("%")
    return figures


def _by_seed(runs: Sequence[Run], arm: str) -> dict[int, Run]:
    return {run["seed"]: run for run in runs if run["arm"] == arm and run["training"]["loss"]}


def _smooth(values: Sequence[float | None]) -> tuple[Floats, Floats]:
    """Centres of at most 60 blocks of steps, and the means of their finite values (else NaN)."""
    raw = np.array([np.nan if value is None else value for value in values], np.float64)
    # Beyond this the axis, not the curve, would overflow.
    raw = np.clip(raw, -_LARGEST, _LARGEST)
    parts = np.array_split(np.arange(raw.size), min(_BLOCKS, raw.size))
    means = [_finite_mean(raw[part]) for part in parts]
    return np.array([part.mean() for part in parts]), np.array(means)


def _finite_mean(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else float("nan")


def _gap(baseline: Run, candidate: Run) -> tuple[Floats, Floats]:
    ours, theirs = candidate["training"]["loss"], baseline["training"]["loss"]
    steps = min(len(ours), len(theirs))
    at, mean = _smooth(ours[:steps])
    with np.errstate(divide="ignore", invalid="ignore"):
        gap = 100 * (mean / _smooth(theirs[:steps])[1] - 1)
    return at, np.clip(gap, -_LARGEST, _LARGEST)


def _curves(axes: Any, curves: Sequence[tuple[Floats, Floats]], *, colour: str, label: str) -> None:
    for at, values in curves:
        axes.plot(at, values, color=colour, alpha=0.3, linewidth=0.8)
    whole = max(at.size for at, _ in curves)
    # A run that ended early has other blocks: it is drawn, and left out of the mean.
    same = [(at, values) for at, values in curves if at.size == whole and at[-1] == _last(curves)]
    mean = [_finite_mean(column) for column in np.array([values for _, values in same]).T]
    axes.plot(same[0][0], mean, color=colour, label=label)


def _last(curves: Sequence[tuple[Floats, Floats]]) -> float:
    return float(max(at[-1] for at, _ in curves))


def per_seed(verdict: Mapping[str, Any]) -> list[Figure]:
    """One plot a metric and task: candidate and null control in every seed, against the margin.

    The first form alone is drawn: the others hold the same seeds.
    """
    figures: list[Figure] = []
    null = verdict["controls"]["null"].get("metrics") or {}
    names = list(dict.fromkeys(key.rpartition("/")[0] for key in verdict["metrics"]))
    first = names[0].partition(":")[0] if names else ""
    drawn = [name for name in names if name.partition(":")[0] == first][: _TASKS[1]]
    metrics = _NAMES if len(drawn) <= _TASKS[0] else {"ne": _NAMES["ne"]}
    for name in drawn:
        task = name.partition(":")[2]
        for metric, title in metrics.items():
            entry = verdict["metrics"].get(f"{name}/{metric}")
            if entry is None:
                continue
            scale, unit = _UNITS.get(metric, (1e4, "1e-4"))
            up = (
                "Up predicts more; both sides count." if metric == "calibration" else "Worse is up."
            )
            note = f"{up} Dots: one seed each; at the right the mean with its interval."
            title = f"{title} by seed{f', {task}' if task else ''}"
            with figure_axes(figures, title, note) as axes:
                _seed_dots(axes, entry, null.get(f"{name}/{metric}"), scale=scale)
                seeds = [_label(str(seed)) for seed in verdict["seeds"]]
                axes.set_xticks(range(len(seeds)), seeds)
                axes.set_xlabel("seed")
                axes.set_ylabel(unit)
                axes.legend(
                    loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=3, handlelength=1.2
                )
    return figures


def _label(text: str) -> str:
    """A name as a tick: short, and without the signs that matplotlib takes for a formula."""
    return plain(text, longest=28).replace("\\", "/").replace("$", r"\$")


def _seed_dots(
    axes: Any, entry: Mapping[str, Any], null: Mapping[str, Any] | None, *, scale: float
) -> None:
    values = scale * np.array(entry["per_seed"])
    at = np.arange(values.size)
    edges = [1, -1] if entry["two_sided"] else [1]
    for edge in edges:
        label = "margin" if edge == 1 else None
        axes.axhline(edge * scale * entry["margin"], color=BAD, linestyle="--", label=label)
    axes.axhline(0, color=MUTED, linewidth=1)
    if null is not None:
        axes.plot(
            at[: len(null["per_seed"])] + 0.12,
            scale * np.array(null["per_seed"]),
            **_dots(NULL),
            label="null control",
        )
    axes.plot(at - 0.12, values, **_dots(CAND), label="candidate")
    low, mid, high = (scale * entry[key] for key in ("lower", "estimate", "upper"))
    axes.errorbar([values.size], [mid], [[mid - low], [high - mid]], fmt="D", color=CAND, capsize=4)


def _dots(colour: str) -> dict[str, Any]:
    return {"marker": "o", "linestyle": "none", "color": colour, "markersize": 5.5}


def noise(verdict: Mapping[str, Any]) -> list[Figure]:
    """The noise floor: standard deviations in units of each margin, on a log axis."""
    figures: list[Figure] = []
    floor = {
        key: verdict["noise_floor"][key]
        for key in verdict["metrics"]
        if key in verdict["noise_floor"]
    }
    if not floor:
        return figures
    note = (
        "Standard deviations over seeds, in margins. Pairing removes what separates the first from "
        "the others; a candidate at the null control's level differs from BF16 by rounding alone."
    )
    with figure_axes(figures, "Noise floor", note, height=1.2 + 0.28 * len(floor)) as axes:
        rows = {key: len(floor) - index for index, key in enumerate(floor)}
        for kind, label, colour in (
            ("seed_sd", "BF16 seeds, unpaired", BASE),
            ("null_paired_sd", "null control, paired", NULL),
            ("candidate_paired_sd", "candidate, paired", CAND),
        ):
            shown = [key for key in floor if floor[key][kind]]
            at = [floor[key][kind] / verdict["metrics"][key]["margin"] for key in shown]
            axes.plot(at, [rows[key] for key in shown], **_dots(colour), label=label)
        axes.axvline(1, color=BAD, linestyle="--", label="margin")
        axes.set_xscale("log")
        axes.set_yticks(list(rows.values()), [_label(key) for key in rows])
        axes.set_ylim(0.4, len(floor) + 0.6)
        axes.set_xlabel("sd / margin")
        axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=2, handlelength=1.2)
    return figures

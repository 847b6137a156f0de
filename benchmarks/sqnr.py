"""What casts and rotations cost: SQNR by format, rule and block, and the error of wgrad.

Writes docs/records/sqnr.jsonl, docs/records/wgrad-rotation.jsonl and the tables of docs/sqnr.md.
Everything is seeded and runs on the CPU, so that every machine writes the same figures.
Run: `python benchmarks/sqnr.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, Final

import numpy as np
import torch

from lowprec import FORMATS, Cast, Linear, RandomStream, ops
from lowprec.blocks import Blocking
from lowprec.formats import Format, Rounding, ScaleRule
from lowprec.policy import LinearPolicy

ROOT: Final = Path(__file__).parent.parent
SQNR_RECORD: Final = ROOT / "docs" / "records" / "sqnr.jsonl"
WGRAD_RECORD: Final = ROOT / "docs" / "records" / "wgrad-rotation.jsonl"
DOC: Final = ROOT / "docs" / "sqnr.md"

Row = dict[str, Any]

SPREAD_SEEDS: Final = range(16)
"""Seeds of other samples of a data set."""

SHAPE: Final = (1024, 1024)
PRODUCT_SHAPE: Final = (512, 512)
PRODUCT_SEED: Final = 621
OUTLIER_EVERY, OUTLIER_GAIN = 32, 60.0


def gaussian(random: np.random.RandomState) -> np.ndarray:
    """Independent N(0, 1)."""
    return random.standard_normal(SHAPE)


def laplace(random: np.random.RandomState) -> np.ndarray:
    """Independent Laplace of location 0 and scale 1."""
    return random.laplace(size=SHAPE)


def outlier_columns(random: np.random.RandomState) -> np.ndarray:
    """N(0, 1) with columns 0, 32, 64, ... times 60: one outlier in each block of 32 of a row."""
    x = random.standard_normal(SHAPE)
    x[:, ::OUTLIER_EVERY] *= OUTLIER_GAIN
    return x


def log_normal(random: np.random.RandomState) -> np.ndarray:
    """exp(g) with a random sign, g of N(0, 1)."""
    magnitude = np.exp(random.standard_normal(SHAPE))
    return np.where(random.random_sample(SHAPE) < 0.5, -magnitude, magnitude)


def row_by_column(random: np.random.RandomState) -> np.ndarray:
    """N(0, 1) times exp(1.5 g) of its row times exp(1.5 h) of its column, g and h of N(0, 1)."""
    rows, columns = PRODUCT_SHAPE
    x = random.standard_normal(PRODUCT_SHAPE)
    x *= np.exp(1.5 * random.standard_normal((rows, 1)))
    x *= np.exp(1.5 * random.standard_normal((1, columns)))
    return x


DATA: Final[dict[str, tuple[Callable[[np.random.RandomState], np.ndarray], int]]] = {
    "gaussian": (gaussian, 0),
    "laplace": (laplace, 0),
    "outlier columns": (outlier_columns, 0),
    "log-normal": (log_normal, 0),
    "row x column": (row_by_column, PRODUCT_SEED),
}
"""Maker and seed of every data set."""


def sample(name: str, seed: int | None = None) -> torch.Tensor:
    """A data set as float32; `seed` draws another sample of it.

    RandomState is the generator whose stream numpy has promised never to change.
    """
    make, own = DATA[name]
    drawn = make(np.random.RandomState(own if seed is None else seed))
    return torch.from_numpy(drawn).to(torch.float32)


_shared = cache(sample)


def sqnr_db(x: torch.Tensor, values: torch.Tensor) -> float:
    """10 log10(sum x^2 / sum (x - q(x))^2) in float64."""
    exact = x.double()
    return float(10 * torch.log10(exact.square().sum() / (exact - values).square().sum()))


def casts_of(fmt: Format) -> Iterator[Cast]:
    """Every cast to a format: all its scale rules, nearest and, where allowed, stochastic."""
    for rounding in Rounding:
        for rule in fmt.scale_rules:
            if rounding is Rounding.NEAREST or not rule.clips:
                yield Cast(fmt, rule, rounding)


def measure(data: str, text: str, axis: int = -1, *, seed: int | None = None) -> Row:
    """One row: SQNR of a cast, and the share of blocks whose largest magnitude it clips."""
    cast = Cast.parse(text)
    x = _shared(data) if seed is None else sample(data, seed)
    stream = RandomStream(0, "sqnr", data) if cast.stochastic else None
    q = ops.quantize(x, cast, axis=axis, generator=stream)
    top = torch.full_like(q.codes, cast.format.element.max_code)
    limit = ops.dequantize(dataclasses.replace(q, codes=top))
    # A free float32 scale is rounded itself; an excess within its rounding clips nothing.
    over = (x.abs() > limit * (1 + 2.0**-20)).float()
    clipped = Blocking.of(x.shape, cast.format, axis).split(over).amax((-3, -1)).mean()
    db = sqnr_db(x, ops.dequantize(q, torch.float64))
    return {
        "data": data,
        "cast": text,
        "axis": axis,
        "sqnr_db": round(db, 2),
        "clipped_blocks": round(float(clipped), 4),
    }


def sqnr_keys() -> Iterator[tuple[str, str, int]]:
    """(data, cast, axis): every cast of every data set, blocks that are one row both ways."""
    for data in DATA:
        for fmt in FORMATS.values():
            for cast in casts_of(fmt):
                yield data, str(cast), -1
                if not fmt.transposable:
                    yield data, str(cast), -2


SPREAD_CASTS: Final = (
    ("mxfp8", -1),
    ("mxfp8", -2),
    ("mxfp8_32x32", -1),
    ("mxfp8_1x128", -1),
    ("mxfp4", -1),
    ("mxfp4_32x32", -1),
)


def spread_rows() -> Iterator[Row]:
    """The row x column data is heavy-tailed: what other samples of it give."""
    for text, axis in SPREAD_CASTS:
        rows = [measure("row x column", text, axis, seed=seed) for seed in SPREAD_SEEDS]
        yield {
            "data": f"row x column, seeds 0 to {SPREAD_SEEDS[-1]}",
            "cast": text,
            "axis": axis,
            "each_db": [row["sqnr_db"] for row in rows],
        }


TOKENS, WIDTH = 512, 64
OUTLIER_TOKENS, TOKEN_GAIN, TOKEN_SEED = 8, 8.0, 88
TOKEN_DATA: Final = ("x and dy", "x only", "none")
SIZES: Final = (16, 32, 64, 128)


def tokens(outliers: str, seed: int = TOKEN_SEED) -> tuple[torch.Tensor, torch.Tensor]:
    """x and dy [512, 64] of N(0, 1); 8 random tokens of each are times 8, never the same ones."""
    random = np.random.RandomState(seed)
    x, dy = (random.standard_normal((TOKENS, WIDTH)) for _ in range(2))
    order = random.permutation(TOKENS)
    if outliers != "none":
        x[order[:OUTLIER_TOKENS]] *= TOKEN_GAIN
    if outliers == "x and dy":
        dy[order[OUTLIER_TOKENS : 2 * OUTLIER_TOKENS]] *= TOKEN_GAIN
    return torch.from_numpy(x).float(), torch.from_numpy(dy).float()


def wgrad_error(product: str, outliers: str, seed: int = TOKEN_SEED) -> float:
    """|dw - exact| / |exact|, Frobenius, of a Linear whose wgrad is `product`."""
    x, dy = tokens(outliers, seed)
    policy = LinearPolicy.parse(f"bf16 / bf16 / {product}")
    layer = Linear(WIDTH, WIDTH, bias=False, policy=policy, name="fc", seed=0)
    layer(x).backward(dy)
    assert layer.weight.grad is not None
    exact = dy.double().T @ x.double()
    return float((layer.weight.grad.double() - exact).norm() / exact.norm())


def rotated(casts: str, size: int | None, signs: str = "fixed") -> str:
    """A product with or without rotation."""
    if size is None:
        return casts
    return f"{casts} + rht{size}" + ("" if signs == "fixed" else f":{signs}")


WGRAD_CASTS: Final = (
    "mxfp4",
    "mxfp4:sr x mxfp4",
    "nvfp4",
    "nvfp4:sr x nvfp4",
    "mxfp6_e2m3",
    "mxfp6_e3m2",
    "mxfp8",
    "mxfp8:sr x mxfp8",
    "mxfp8_e5m2",
)
SIGNED_CASTS: Final = ("mxfp4", "mxfp8")


def wgrad_products() -> Iterator[str]:
    """Every product that is measured."""
    for casts in WGRAD_CASTS:
        yield from (rotated(casts, size) for size in (None, *SIZES))
    for casts in SIGNED_CASTS:
        for signs in ("none", "seeded"):
            yield from (rotated(casts, size, signs) for size in SIZES)


def wgrad_row(outliers: str, product: str) -> Row:
    """One row: the error of one product on one data set."""
    return {
        "outlier_tokens": outliers,
        "wgrad": product,
        "relative_error": round(wgrad_error(product, outliers), 4),
    }


def wgrad_rows() -> Iterator[Row]:
    """Every product on every data set, then other samples of the data with outliers in both."""
    for outliers in TOKEN_DATA:
        yield from (wgrad_row(outliers, product) for product in wgrad_products())
    for casts in SIGNED_CASTS:
        for size in (None, *SIZES):
            product = rotated(casts, size)
            errors = [round(wgrad_error(product, "x and dy", seed), 4) for seed in SPREAD_SEEDS]
            yield {
                "outlier_tokens": f"x and dy, seeds 0 to {SPREAD_SEEDS[-1]}",
                "wgrad": product,
                "each_relative_error": errors,
            }


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


class Figures:
    """Rows of a record by what they are of; an absent one is shown as a dash."""

    def __init__(self, rows: Sequence[Row], *keys: str) -> None:
        self.rows = {tuple(row[key] for key in keys): row for row in rows}

    def text(self, field: str, spec: str, *key: Any, factor: float = 1) -> str:
        """One figure as text."""
        row = self.rows.get(key)
        return "-" if row is None else format(row[field] * factor, spec)


RULE_COLUMNS: Final = (None, ScaleRule.FLOOR, ScaleRule.CEIL, ScaleRule.EVEN)


def cast_text(fmt: Format, rule: ScaleRule | None, rounding: str = "") -> str:
    """Text of a cast; no rule is the default one."""
    return fmt.name + (f":{rule}" if rule else "") + rounding


def sqnr_table(rows: Sequence[Row], data: str) -> str:
    """One data set: a line a format, a column a rule."""
    figures = Figures([row for row in rows if "sqnr_db" in row], "data", "cast", "axis")
    head = ["format", "bits", "default", "`floor`", "`ceil`", "`even`"]
    head += ["default `:sr`", "`ceil:sr`", "default, other axis"]
    body = []
    for fmt in FORMATS.values():
        texts = [cast_text(fmt, rule) for rule in RULE_COLUMNS]
        texts += [cast_text(fmt, rule, ":sr") for rule in (None, ScaleRule.CEIL)]
        line = [figures.text("sqnr_db", ".2f", data, text, -1) for text in texts]
        other = figures.text("sqnr_db", ".2f", data, fmt.name, -2)
        body.append([f"`{fmt.name}`", f"{fmt.bits_per_value:.3g}", *line, other])
    return table(head, body)


def clip_table(rows: Sequence[Row]) -> str:
    """Share of Gaussian blocks that lose their largest value, in percent."""
    figures = Figures([row for row in rows if "sqnr_db" in row], "data", "cast", "axis")
    body = []
    for fmt in FORMATS.values():
        texts = [cast_text(fmt, rule) for rule in RULE_COLUMNS]
        line = [
            figures.text("clipped_blocks", ".1f", "gaussian", text, -1, factor=100)
            for text in texts
        ]
        body.append([f"`{fmt.name}`", *line])
    return table(["format", "default", "`floor`", "`ceil`", "`even`"], body)


def spread_table(rows: Sequence[Row]) -> str:
    """Samples of the row x column data: mean and range, and the distance to 1x32 of a sample."""
    found = {(row["cast"], row["axis"]): row["each_db"] for row in rows if "each_db" in row}
    body = []
    for (text, axis), each in found.items():
        base = found[text.partition("_")[0], -1]
        away = max((abs(a - b) for a, b in zip(each, base, strict=True)), default=0.0)
        line = [f"{mean(each):.2f}", f"{min(each):.2f}", f"{max(each):.2f}", f"{away:.2f}"]
        body.append([f"`{text}`", "rows" if axis == -1 else "columns", *line])
    head = ["format", "blocks along", "mean", "lowest", "highest", "largest distance to 1x32"]
    return table(head, body)


def wgrad_table(rows: Sequence[Row], outliers: str) -> str:
    """Errors by casts of dy x x (one stands for both) and rotation."""
    figures = Figures([r for r in rows if "relative_error" in r], "outlier_tokens", "wgrad")
    lines = [(casts, "fixed") for casts in WGRAD_CASTS]
    lines += [(casts, signs) for casts in SIGNED_CASTS for signs in ("none", "seeded")]
    body = []
    for casts, signs in lines:
        products = [rotated(casts, size, signs) for size in (None, *SIZES)]
        values = [figures.text("relative_error", ".4f", outliers, one) for one in products]
        body.append([f"`{casts}`", signs, *values])
    return table(["dy x x", "signs", "no rotation", *(f"`rht{size}`" for size in SIZES)], body)


def ratio_table(rows: Sequence[Row]) -> str:
    """Error with rotation over error without, over other samples."""
    found = {
        row["wgrad"]: row["each_relative_error"] for row in rows if "relative_error" not in row
    }
    body = []
    for casts in SIGNED_CASTS:
        line = []
        for size in SIZES:
            each = [a / b for a, b in zip(found[rotated(casts, size)], found[casts], strict=True)]
            line.append(f"{mean(each):.2f} ({min(each):.2f} to {max(each):.2f})")
        body.append([f"`{casts}`", *line])
    return table(["dy x x", *(f"`rht{size}`" for size in SIZES)], body)


def tables(sqnr: Sequence[Row], wgrad: Sequence[Row]) -> dict[str, str]:
    """Every table of the document by name."""
    found = {data: sqnr_table(sqnr, data) for data in DATA}
    found |= {"clipped blocks": clip_table(sqnr), "samples": spread_table(sqnr)}
    found |= {f"outliers in {where}": wgrad_table(wgrad, where) for where in TOKEN_DATA}
    return found | {"rotation over samples": ratio_table(wgrad)}


def filled(document: str, made: dict[str, str]) -> str:
    """The document with what stands between `<!-- table: NAME -->` and `<!-- end -->` replaced."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n\n{made[match[1]]}\n\n<!-- end -->"

    return re.sub(r"<!-- table: (.+?) -->.*?<!-- end -->", fill, document, flags=re.DOTALL)


def read(path: Path) -> list[Row]:
    """Rows of a record, without its first line, which says what was run."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:]]


def write(
    path: Path, what: str, rows: Sequence[Row], *, script: str = "benchmarks/sqnr.py"
) -> None:
    """Write a record: what was run, then the rows."""
    versions = {"torch": torch.__version__, "numpy": np.__version__, "device": "cpu"}
    head = {"what": what, "script": script, **versions}
    text = "".join(json.dumps(row) + "\n" for row in (head, *rows))
    path.write_text(text, encoding="utf-8")


def main() -> None:
    """Measure everything, write both records and the tables of the document."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    ).parse_args()
    sqnr, wgrad = [*(measure(*key) for key in sqnr_keys()), *spread_rows()], list(wgrad_rows())
    write(SQNR_RECORD, "SQNR of casts, dB", sqnr)
    write(WGRAD_RECORD, "relative error of dw = dy^T x, 512 tokens, 64 x 64", wgrad)
    document = filled(DOC.read_text(encoding="utf-8"), tables(sqnr, wgrad))
    DOC.write_text(document, encoding="utf-8")


if __name__ == "__main__":
    main()

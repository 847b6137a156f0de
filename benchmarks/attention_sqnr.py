"""What a policy of attention costs: SQNR of o, dq, dk, dv, and how much of P a cast flushes.

Writes docs/records/attention-sqnr.jsonl and the tables of docs/attention.md. Everything is seeded
and runs on the CPU in two to five minutes. Run: `python benchmarks/attention_sqnr.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Final, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.sqnr import Row, filled, read, sqnr_db, table, write
from lowprec import load_recipe, ops
from lowprec.attention_planning import bounded
from lowprec.attention_policy import AttentionPolicy, StaticCast
from lowprec.backends.attention_emulated import ARITHMETIC
from lowprec.formats import Cast

ROOT: Final = Path(__file__).parent.parent
RECORD: Final = ROOT / "docs" / "records" / "attention-sqnr.jsonl"
DOC: Final = ROOT / "docs" / "attention.md"

NAMES: Final = ("o", "dq", "dk", "dv")
HEADS: Final = (4, 2)
SELF: Final = (1, 3, 17, 64, 100, 200, 517)
SHAPES: Final = {
    "self": (SELF, SELF),
    "cross": ((512, 300), (64, 17)),
    "pooled": ((32, 32), (2048, 300)),
    "long": ((128,), (4096,)),
}
"""Lengths of queries and keys; self attention on a heavy-tailed set."""
DATA: Final = ("gaussian", "sink", "sharp", "outlier channels")
SINK_LOGIT: Final = 12.0


def recipe_policy(name: str) -> AttentionPolicy:
    """The attention policy of a shipped recipe."""
    return next(one.attention for one in load_recipe(name).rules if one.kind == "attention")


def policies() -> dict[str, AttentionPolicy]:
    """Every policy that is measured, by name."""
    found = {name: recipe_policy(name) for name in ("mxfp8-attention", "fp8-attention")}
    found |= {"attention-safe": recipe_policy("attention-safe")}
    text = str(found["mxfp8-attention"])
    static = text.replace("mxfp8 x mxfp8_32x32", "e4m3*256 x mxfp8_32x32", 1)
    mixed = text.split(" / ")
    mixed[2] = "bf16"
    qk, pv = str(found["fp8-attention"]).split(" / ")[:2]
    whole = [qk, pv, qk, pv, qk, qk]
    as_read = [qk, pv, f"bf16 x {qk}", "bf16", *[f"bf16 x {qk}"] * 2]
    unrounded = [qk, pv, *["bf16"] * 4]
    return {
        "bf16": AttentionPolicy.parse("bf16"),
        **found,
        "mxfp8-attention, P x 256 in pv": AttentionPolicy.parse(static),
        "mxfp8-attention, dP bf16": AttentionPolicy.parse(" / ".join(mixed)),
        "fp8 in all six products": AttentionPolicy.parse(" / ".join(whole)),
        "fp8-attention, backward rounded": AttentionPolicy.parse(" / ".join(as_read)),
        "fp8-attention, backward unrounded": AttentionPolicy.parse(" / ".join(unrounded)),
    }


class Given(NamedTuple):
    """q, k, v, the gradient of o, and offsets."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    cu_q: torch.Tensor
    cu_k: torch.Tensor


def sample(data: str, shape: str, head_dim: int, seed: int = 0) -> Given:
    """Operands in bfloat16; RandomState is the generator that numpy promised never to change."""
    random = np.random.RandomState(seed)
    lengths = SHAPES[shape]
    tq, tk = (sum(one) for one in lengths)
    cu_q, cu_k = (torch.tensor([0, *one]).cumsum(0).int() for one in lengths)

    def draw(rows: int, heads: int) -> torch.Tensor:
        return torch.from_numpy(random.standard_normal((rows, heads, head_dim)))

    q, k, v, do = draw(tq, HEADS[0]), draw(tk, HEADS[1]), draw(tk, HEADS[1]), draw(tq, HEADS[0])
    if data == "sink":
        # Channel 0 is the sink's own: every query has 1 there, of the keys only the first.
        q[..., 0], k[..., 0] = 1.0, 0.0
        k[cu_k[:-1].long(), :, 0] = SINK_LOGIT * head_dim**0.5
    if data == "sharp":
        q *= 4
    if data == "outlier channels":
        q[..., ::32] *= 8
        k[..., ::32] *= 8
    return Given(*(t.bfloat16() for t in (q, k, v, do)), cu_q, cu_k)


def results(
    given: Given, policy: AttentionPolicy, activation: Any, dtype: torch.dtype
) -> list[torch.Tensor]:
    """o, dq, dk, dv of operands read as `dtype`."""
    leaves = [t.to(dtype).requires_grad_() for t in (given.q, given.k, given.v)]
    o = ops.attention(*leaves, given.cu_q, given.cu_k, policy=policy, activation=activation)
    return [o.detach(), *torch.autograd.grad(o, leaves, given.do.to(dtype))]


def measure(data: str, shape: str, head_dim: int, activation: str, *, seed: int = 0) -> list[Row]:
    """One row a policy: SQNR of each result against float64."""
    given = sample(data, shape, head_dim, seed)
    exact = results(given, AttentionPolicy.parse("bf16"), activation, torch.float64)
    rows = []
    for name, wanted in policies().items():
        policy, _ = bounded(wanted, activation)
        found = results(given, policy, activation, torch.bfloat16)
        pairs = zip(NAMES, exact, found, strict=True)
        # A result that is exact to the last digit counts as 150 dB, a record has no infinity.
        figures = {key: round(min(sqnr_db(a, b.double()), 150.0), 2) for key, a, b in pairs}
        where = {"data": data, "shape": shape, "head_dim": head_dim, "activation": activation}
        rows.append({**where, "policy": name, **figures})
    return rows


FLUSHED_CASTS: Final = (
    "e4m3*1",
    "e4m3*16",
    "e4m3*256",
    "fp8_128x128",
    "mxfp8",
)


def cast_of(text: str) -> Cast | StaticCast:
    """A cast of P."""
    if "*" not in text:
        return Cast.parse(text)
    cast = AttentionPolicy.parse(f"bf16 / {text} x mxfp8 / bf16 / bf16 / bf16 / bf16").pv
    left: Cast | StaticCast = cast.left  # type: ignore[union-attr]
    return left


def flushed(text: str, data: str, head_dim: int, *, seed: int = 0) -> Row:
    """Share of P > 0 that a cast turns into 0, and its SQNR: 128 queries over 4096 keys."""
    given = sample(data, "long", head_dim, seed)
    q, k = given.q.double().transpose(0, 1), given.k.double().transpose(0, 1)
    s = q @ k.repeat_interleave(HEADS[0] // HEADS[1], 0).mT * head_dim**-0.5
    p = (s - s.amax(-1, keepdim=True)).exp().float()
    values = ARITHMETIC.cast(p, cast_of(text), -1)
    share = float(((values == 0) & (p > 0)).double().mean())
    where = {"data": data, "head_dim": head_dim, "cast_of_p": text}
    return {**where, "flushed": round(share, 5), "sqnr_db": round(sqnr_db(p, values.double()), 2)}


def cases() -> Iterator[tuple[str, str, int, str]]:
    """(data, shape, head dim, activation) of every measurement."""
    for head_dim in (64, 128):
        for data in DATA:
            yield data, "self", head_dim, "softmax"
        for shape in ("cross", "pooled", "long"):
            yield "gaussian", shape, head_dim, "softmax"
        for activation in ("gelu", "silu"):
            yield "gaussian", "self", head_dim, activation


def sqnr_table(rows: Sequence[Row], head_dim: int) -> str:
    """A line a case and policy, a column a result."""
    body = []
    for row in rows:
        if "policy" in row and row["head_dim"] == head_dim:
            case = f"{row['activation']}, {row['shape']}, {row['data']}"
            body.append([case, row["policy"], *(f"{row[name]:.1f}" for name in NAMES)])
    return table(["case", "policy", "O", "dQ", "dK", "dV"], body)


def flush_table(rows: Sequence[Row]) -> str:
    """Flushed share in percent and SQNR by cast of P."""
    body = []
    for text in FLUSHED_CASTS:
        line = [f"`{text}`"]
        for data in ("gaussian", "sink"):
            own = [row for row in rows if row.get("cast_of_p") == text and row["data"] == data]
            line.append(f"{100 * mean(row['flushed'] for row in own):.2f} %")
            line.append(f"{mean(row['sqnr_db'] for row in own):.1f}")
        body.append(line)
    head = ["cast of P", "flushed, gaussian", "SQNR", "flushed, sink", "SQNR"]
    return table(head, body)


def tables(rows: Sequence[Row]) -> dict[str, str]:
    """Every table of the document by name."""
    by_head_dim = {f"head dim {d}": sqnr_table(rows, d) for d in (64, 128)}
    return {**by_head_dim, "flushed": flush_table(rows)}


def main() -> None:
    """Measure everything, write the record and the tables of the document."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    ).parse_args()
    rows = [row for key in cases() for row in measure(*key)]
    for data in ("gaussian", "sink"):
        for head_dim in (64, 128):
            rows += [flushed(text, data, head_dim) for text in FLUSHED_CASTS]
    write(RECORD, "SQNR of attention, dB, by policy", rows, script="benchmarks/attention_sqnr.py")
    document = filled(DOC.read_text(encoding="utf-8"), tables(read(RECORD)))
    DOC.write_text(document, encoding="utf-8")


if __name__ == "__main__":
    main()

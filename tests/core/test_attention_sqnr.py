"""Accuracy of attention policies: the record is not stale, its conclusions hold."""

from __future__ import annotations

import pytest
import torch

import lowprec
from benchmarks import attention_sqnr, attention_training
from lowprec.attention_policy import AttentionPolicy
from lowprec.backends import attention_emulated, attention_reference
from lowprec.formats import FORMATS, Cast
from lowprec.nn import AttentionProducts
from tests.core.attention_cases import one_thread

__all__ = ["one_thread"]

ROWS = attention_sqnr.read(attention_sqnr.RECORD)
KEYS = ("data", "shape", "head_dim", "activation", "policy")
DB = {tuple(row[key] for key in KEYS): row for row in ROWS if "policy" in row}
FLUSHED = {
    (row["data"], row["head_dim"], row["cast_of_p"]): row for row in ROWS if "cast_of_p" in row
}
SLACK = 0.5  # dB, for another order of summation
SMALL = [("gaussian", "self", 64, "softmax"), ("sink", "self", 64, "softmax")]


def as_parameter(key: tuple[str, str, int, str]) -> object:
    marks = [] if key in SMALL else [pytest.mark.slow]
    return pytest.param(key, marks=marks, id="-".join(map(str, key)))


@pytest.mark.parametrize("key", [as_parameter(key) for key in attention_sqnr.cases()])
def test_no_result_is_below_its_recorded_floor(key: tuple[str, str, int, str]) -> None:
    for row in attention_sqnr.measure(*key):
        recorded = DB[(*key, row["policy"])]
        for name in attention_sqnr.NAMES:
            assert row[name] >= recorded[name] - SLACK, (row["policy"], name)
            assert row[name] <= recorded[name] + SLACK, "the record is stale"


@pytest.mark.parametrize("head_dim", [64, 128])
def test_blocks_flush_at_most_a_hundredth_of_p_beside_a_sink(head_dim: int) -> None:
    measured = attention_sqnr.flushed("mxfp8", "sink", head_dim)
    assert measured == FLUSHED["sink", head_dim, "mxfp8"]
    assert measured["flushed"] <= 0.01
    assert FLUSHED["sink", head_dim, "e4m3*256"]["flushed"] > 0.2
    assert FLUSHED["sink", head_dim, "e4m3*1"]["flushed"] > 0.99


@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_of_a_sink_need_errors_that_cancel(head_dim: int) -> None:
    def dq(policy: str) -> float:
        figure: float = DB["sink", "self", head_dim, "softmax", policy]["dq"]
        return figure

    # At 64 the sink's key is exact in E4M3. At 128 it is not, and its score is off by 0.7.
    floor = dq("bf16") - 1.5 if head_dim == 64 else 0.5
    for whole in ("mxfp8-attention", "fp8-attention", "attention-safe"):
        assert dq(whole) > floor
    for mixed in ("mxfp8-attention, dP bf16", "fp8-attention, backward unrounded"):
        assert dq(mixed) < 0


def test_the_page_shows_the_record() -> None:
    document = attention_sqnr.DOC.read_text(encoding="utf-8")
    assert attention_sqnr.filled(document, attention_sqnr.tables(ROWS)) == document


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("name", [one.name for one in FORMATS.values() if one.power_of_two])
def test_casts_are_the_references_bit_for_bit(name: str, axis: int) -> None:
    random = torch.Generator().manual_seed(3)
    t = torch.randn(3, 150, 80, generator=random) * torch.randn(3, 150, 1, generator=random).exp()
    t[0, :40, :40] *= 1e-38  # scales at the end of E8M0
    t[1, 5, 5], t[1, 100, 70], t[2, 0, 0] = torch.nan, torch.inf, 3e38
    t[2, 40:80] = 0
    for rule in FORMATS[name].scale_rules:
        cast = Cast(FORMATS[name], rule)
        pair = [m.ARITHMETIC.cast(t, cast, axis) for m in (attention_emulated, attention_reference)]
        torch.testing.assert_close(*pair, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("text", ["e4m3*256", "e4m3*1", "e5m2*1024", "e2m1*4"])
def test_fixed_factors_are_the_references_bit_for_bit(text: str) -> None:
    cast = attention_sqnr.cast_of(text)
    p = torch.rand(2, 40, 50, generator=torch.Generator().manual_seed(4)) ** 8
    p[0, 0, :3] = torch.tensor([0.0, 1.0, 1e-30])
    pair = [m.ARITHMETIC.cast(p, cast, -1) for m in (attention_emulated, attention_reference)]
    assert torch.equal(*pair)
    assert pair[0][0, 0, :3].tolist() == [0, 1, 0]


def test_policies_of_the_record_are_the_shipped_ones() -> None:
    for name in ("mxfp8-attention", "fp8-attention", "attention-safe"):
        assert attention_sqnr.policies()[name] == attention_sqnr.recipe_policy(name)
    assert attention_sqnr.policies()["bf16"] == AttentionPolicy.parse("bf16")


def test_training_is_summed_up_as_recorded() -> None:
    rows = attention_sqnr.read(attention_training.RECORD)
    runs = [row for row in rows if "seed" in row]
    assert {(row["arm"], row["seed"]) for row in runs} == {
        (arm, seed) for arm in attention_training.ARMS for seed in attention_training.SEEDS
    }
    assert list(attention_training.summaries(runs)) == [row for row in rows if "seed" not in row]
    # Attention is what the model learns by: the loss falls below that of the lengths alone, 0.497.
    assert all(row["held_out_loss"] < 0.42 for row in runs)


def test_arms_differ_in_their_attention_alone() -> None:
    for arm in attention_training.ARMS[1:]:
        model = attention_training.converted(attention_training.Ranker(), arm)
        policies = {str(one.stage.policy) for one in attentions(model)}
        assert any("32x32" in text or "128x128" in text for text in policies)
        assert not any(isinstance(one, lowprec.Linear) for one in model.modules())


def attentions(model: torch.nn.Module) -> list[AttentionProducts]:
    return [m.lowprec_attention for m in model.modules() if isinstance(m, lowprec.Attention)]

"""What the sections say: forecasts, tasks, slices by finding, counters, acceptance, commands."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from qualitygates import plots
from qualitygates.appendix import products
from qualitygates.blocks import Section, plain, to_markdown
from qualitygates.quality_sections import slice_groups, slices_section, tightest
from qualitygates.report import write_report
from qualitygates.training_sections import numerics, training
from qualitygates.usage_sections import acceptance_section, accepted, reproduce
from qualitygates.wording import evaluation_words, metric_words
from tests.gates import verdicts
from tests.gates.test_report import Page

ACCEPT, REJECT, OFFLINE = verdicts.accepted(), verdicts.rejected(), verdicts.undecided_offline()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "available", lambda: False)
        for name, (gate, runs, verdict) in {"a": ACCEPT, "r": REJECT, "o": OFFLINE}.items():
            page = write_report(tmp_path_factory.mktemp(name), gate, runs, verdict=verdict)
            assert (page.parent / "acceptance.json").exists() == (name == "a")
            found[name] = Page(page.read_text(encoding="utf-8")).text
    return found


def shown(section: Section) -> str:
    return to_markdown("t", [section]).replace("\\", "")


def test_the_head_says_what_each_part_found(pages: dict[str, str]) -> None:
    assert "before the first run. Why: all 8 co-primary metrics are within" in pages["a"]
    assert "Why: NE, relative, as trained: REJECT: [" in pages["r"]
    assert "the harmless arm accepted, the harmful one not" in pages["a"]
    assert "acceptance.json written what training may rely on; holds until 2026-04-01" in pages["a"]
    assert "acceptance.json none only an ACCEPT of a real candidate writes one" in pages["r"]
    assert "Slices harm 2 protected" in pages["r"]


def test_the_tightest_metric_is_the_one_with_the_largest_share_of_its_margin() -> None:
    entry = {"lower": -0.9, "estimate": 0.0, "upper": 0.1, "margin": 1.0, "two_sided": True}
    other = entry | {"two_sided": False, "upper": 0.8}
    found = tightest({"metrics": {"trained/ne": other, "bf16/calibration": entry}})
    assert found.startswith("closest to its margin: calibration shift, served in BF16, up to -90")
    assert "(90 % of it)" in found
    beyond = tightest({"metrics": {"trained/ne": other | {"upper": 2.0}}})
    assert beyond.startswith("farthest beyond its margin: NE, relative, as trained")


def test_every_task_has_a_table_and_a_forecast(pages: dict[str, str]) -> None:
    assert evaluation_words("bf16:click") == "served in BF16, task click"
    assert metric_words("trained:buy/auc") == "AUC drop, as trained, task buy"
    for task in ("click", "buy"):
        assert f"as trained, task {task} verdict" in pages["o"]
    assert "at 5 seeds seeds needed examples" in pages["o"]
    power = OFFLINE[2]["forecast"]["trained:buy/auc"]
    now, neutral = power["power"]["5"], power["power_if_neutral"]["5"]
    assert f"AUC drop, as trained, task buy {100 * now:.0f} % ({100 * neutral:.0f} %)" in pages["o"]


def entry(name: str, kind: str, verdict: str, **more: Any) -> dict[str, Any]:
    numbers = {"estimate": 0.001, "lower": 0.0, "upper": 0.002}
    tested = {} if verdict == "NOT_TESTABLE" else numbers
    blank = dict.fromkeys(numbers)
    one = {"name": name, "class": kind, "verdict": verdict, "form": "trained", "margin": 0.01}
    return one | {"positives": 10, "reason": "few", "explore": False} | blank | tested | more


def test_slices_stand_by_what_was_found() -> None:
    slices = [
        entry("p", "protected", "ACCEPT"),
        entry("h", "other", "REJECT"),
        entry("w", "other", "WARN", explore=True),
        entry("x", "other", "OK", explore=True),
        *(entry(f"q{number}", "other", "OK") for number in range(13)),
        *(entry(f"s{number}", "other", "NOT_TESTABLE") for number in range(2)),
        entry("rest", "rest", "OK", pooled=["s0", "s1"]),
    ]
    groups = {key: [one["name"] for one in of] for key, of in slice_groups(slices).items()}
    assert groups["protected"] == ["p"]
    assert groups["harm"] == ["h"]
    assert groups["warn"] == ["w"]
    assert groups["explore"] == ["x"]
    assert groups["quiet"] == [*(f"q{number}" for number in range(13)), "rest"]
    assert groups["untestable"] == ["s0", "s1"]
    text = shown(slices_section(slices))
    order = [
        "Protected: each",
        "Harm beyond",
        "Worse than",
        "Worth a look",
        "without a finding: 14",
    ]
    assert sorted(order, key=text.index) == order
    assert "No slice shows harm" not in text
    assert "rest, as trained, pools: s0, s1" in text
    assert "No slice shows harm" in shown(slices_section([entry("q", "other", "OK")]))
    assert "No slice shows harm" not in shown(slices_section([entry("q", "other", "NOT_TESTABLE")]))


def test_counters_are_told_with_their_levels() -> None:
    text = shown(numerics(ACCEPT[2]))
    row = next(line for line in text.splitlines() if line.startswith("| underflow | -"))
    assert " 2.0" in row
    assert "BF16 has no such counter" in row
    assert "share of quantized values beyond the largest" in text
    assert "not known" in shown(numerics(OFFLINE[2]))
    flagged = copy.deepcopy(ACCEPT[2])
    flagged["stability"]["soft"][-1] |= {"flagged": True, "baseline": 1, "candidate": 20}
    assert "more frequent than in the baseline: a REJECT" in shown(numerics(flagged))


def test_the_gap_on_the_way_is_told() -> None:
    _, runs, verdict = ACCEPT
    told = verdict | {
        "trajectory": {
            "per_seed": {"11": {"gap": 0.0123, "step": 77}, "12": None},
            "largest": {"gap": 0.0123, "step": 77},
        }
    }
    text = shown(training(runs, told, []))
    assert "after warm-up: +1.230 % at step 77" in text
    assert "| 12 | - | - |" in text
    none = {"per_seed": {}, "largest": None}
    assert "too few recorded steps" in shown(training(runs, verdict | {"trajectory": none}, []))


def test_an_acceptance_says_what_it_covers_and_what_not() -> None:
    gate, runs, verdict = ACCEPT
    record = accepted(gate, runs, verdict=verdict)
    text = shown(acceptance_section(record))
    assert 'lowprec.apply(model, plan, require="DIR/acceptance.json")' in text
    assert verdicts.HASH in text
    assert "Not known" not in text
    unbound = [run | {"plan_hash": "not recorded", "model": None} for run in runs]
    text = shown(acceptance_section(accepted(gate, unbound, verdict=verdict)))
    assert "Not known, so not covered: plan, model" in text
    planted = gate | {"experiment": {"candidate": {"fault": {"logit_noise": 1}}}}
    assert accepted(planted, runs, verdict=verdict) is None
    assert accepted(gate, runs, verdict=verdict | {"verdict": "REJECT"}) is None


def test_the_commands_fit_the_kind_of_gate() -> None:
    gate, _, verdict = ACCEPT
    text = shown(Section("s", reproduce(gate, verdict)))
    for needed in ("run gate.toml --out DIR", "--cluster ray://HEAD:10001", "speed gate.toml"):
        assert needed in text
    several = gate | {"experiment": {"train": {"processes": 4}}}
    assert "4 processes of one machine" in shown(Section("s", reproduce(several, verdict)))
    text = shown(Section("s", reproduce(OFFLINE[0], OFFLINE[2])))
    assert "judge OFFLINE.toml --out DIR" in text
    assert "(12)" in text
    assert "run gate.toml" not in text
    assert "speed gate.toml" not in text


def test_an_offline_gate_says_what_it_does_not_know(pages: dict[str, str]) -> None:
    assert "No plan was recorded" in pages["o"]
    assert "Nothing recorded which products ran" in pages["o"]
    assert "that another training wrote, 12 files" in pages["o"]
    assert "steps, batch size" not in pages["o"]


def test_a_long_plan_shows_what_differs_first() -> None:
    runs = copy.deepcopy(ACCEPT[1])
    for run in runs:
        layer = run["plan_layers"][0]
        run["plan_layers"] = [layer | {"name": f"layer.{number}"} for number in range(40)]
        ran = run["gemms"]["mlp.0"]
        run["gemms"] = {f"layer.{number}": copy.deepcopy(ran) for number in range(40)}
        if run["arm"] == "candidate":
            run["gemms"]["layer.7"]["wgrad"] = {"bf16": 1}
    text = shown(products(runs))
    assert "Planned: 40 layers, 120 products, 120 in mxfp8." in text
    opened, folded = text.split("### All 120 products")
    assert "| layer.7 | wgrad | mxfp8 |" in opened
    assert "layer.8" not in opened
    assert "| layer.8 | wgrad |" in folded


def test_invisible_characters_are_shown_and_long_texts_cut() -> None:
    assert plain("a\x00\u202e\ud800\nb") == "a\\x00\\u202e\\ud800\nb"
    assert plain("x" * 2001).endswith("x ... (1 more characters)")
    assert plain({"a": 1}) == "{'a': 1}"
    assert plain("größe 量 ok") == "größe 量 ok"


def test_what_cannot_be_shown_changes_nothing_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> str:
        raise RuntimeError("cannot be shown")

    gate, runs, verdict = ACCEPT
    monkeypatch.setattr(plots, "available", lambda: False)
    monkeypatch.setattr("qualitygates.report.to_markdown", broken)
    with pytest.raises(RuntimeError):
        write_report(tmp_path, gate, runs, verdict=verdict)
    assert list(tmp_path.iterdir()) == []

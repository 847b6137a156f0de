"""The full-size claims of docs/sweeps.md, by the programs that measured them."""

from __future__ import annotations

import json
import runpy
from importlib import import_module
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def program(name: str) -> dict:
    return runpy.run_path(str(BENCHMARKS / f"{name}.py"))


@pytest.mark.slow
def test_planted_layers_are_the_top_two_and_blamed_on_the_right_product() -> None:
    ranked = program("sweep_planted")["ranked"]
    found = [ranked(seed) for seed in range(20)]
    assert sum(one["both_in_top_2"] for one in found) >= 18
    assert all("below break-even" in one["tiny"] for one in found)


@pytest.mark.slow
def test_the_screen_of_100_layers_and_5_formats_costs_at_most_12_steps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["sweep_screen.py"])
    program("sweep_screen")["main"]()
    found = json.loads(capsys.readouterr().out)
    assert (found["layers"], len(found["formats"])) == (100, 5)
    assert found["ratio"] <= 12


@pytest.mark.slow
def test_a_recipe_for_a_model_that_fails_with_nvfp4_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["sweep_recipe.py", str(tmp_path), "2"])
    program("sweep_recipe")["main"]()
    before, after = map(json.loads, capsys.readouterr().out.splitlines())
    assert before["verdict"] == "REJECT"
    assert after["confirmation"]["verdict"] == "ACCEPT"
    assert after["quantized_share"] >= 0.6
    assert after["reloads_to_the_same_plan"]


@pytest.mark.slow
def test_early_branches_rank_as_whole_trainings_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["sweep_ranking.py", "2", "31"])
    # Its processes import it by name.
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import_module("sweep_ranking").main()
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (branches,) = [one for one in found if one.get("spearman") == "branches"]
    assert branches["layers"] >= 12
    assert branches["rho"] >= 0.7
    assert branches["p"] < 0.05


@pytest.mark.slow
def test_bisection_by_real_gates_gives_back_the_planted_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["sweep_bisect.py", str(tmp_path), "2"])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    program("sweep_bisect")["main"]()
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "REJECT"
    assert found["minimal"]
    assert "layers.4.linear" in found["given_back"]
    assert len(found["given_back"]) < 6


@pytest.mark.slow
def test_a_sweep_on_ray_equals_one_in_local_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="ray is not installed (lowprec[cluster])")
    monkeypatch.setattr("sys.argv", ["sweep_ray.py", str(tmp_path), "2"])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    program("sweep_ray")["main"]()
    found = json.loads(capsys.readouterr().out)
    assert found["records_equal"]
    assert found["results_equal"]

"""python -m qualitygates speed: both arms measured on a CPU, timings of elsewhere, and the CLI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowprec
from qualitygates.__main__ import main
from qualitygates.errors import ExperimentError, GateError, RecordError
from qualitygates.experiment import Experiment
from qualitygates.records import RunStore, content_hash, read_record, seal, write_json_atomic
from qualitygates.speed import command as speed_module
from qualitygates.speed.arms import TimedReport
from qualitygates.speed.blocks import CpuMarks, interleave
from qualitygates.speed.command import measure, speed
from qualitygates.speed.machine import Sampler
from qualitygates.speed.modules import capture, module_step, quantized
from tests.gates.synthetic import clicks, records
from tests.gates.test_speed_record import as_lines
from tests.gates.timings import changed, speed_record

TOY = Path(__file__).parent / "toy_workload.py"
TEXT = f"""
schema = 1
name = "toy"
workload = "{TOY.as_posix()}:build"
margins = "demo"
looks = [3]
[train]
steps = 20
batch_size = 64
[options]
rows = 300
[baseline]
recipe = "bf16"
[candidate]
recipe = "mxfp8"
[speed]
required = true
planned_steps = 100000
"""


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "toy.toml"
    path.write_text(TEXT, encoding="utf-8")
    return path


def silent(text: str) -> None:
    pass


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one measurement of the toy on this CPU records."""
    path = tmp_path_factory.mktemp("toy") / "toy.toml"
    path.write_text(TEXT, encoding="utf-8")
    return measure(Experiment.from_toml(path), tell=silent)


def test_a_cpu_measures_both_arms_and_never_passes(measured: dict[str, Any]) -> None:
    assert measured["products"] == {"native": 0, "emulated": 6}
    assert measured["inputs"]["baseline_dtype"] == "bfloat16"
    assert [one["rung"] for one in measured["measurements"]] == ["step", "module", "module"]
    assert sorted(measured["quantized_layers"]) == ["body.0", "top"]
    for one in measured["measurements"]:
        assert one["order"] == ["BC", "CB"] * 5
        assert len(one["baseline_ms"]) == len(one["candidate_ms"]) == 10
        assert one["conditions"] is None
    assert set(measured["costs"]) == {"calibration_s", "compile_s", "conversion_s", "warmup_s"}
    assert measured["costs"]["conversion_s"] > 0
    for one in measured["measurements"][1:]:
        assert one["conversion_ms"] > 0
    from qualitygates.speed.rules import judge_speed

    found = judge_speed({"required": True, "planned_steps": 10}, measured)
    assert found["status"] == "not_measurable"


def test_flops_are_those_of_the_step(measured: dict[str, Any]) -> None:
    # fprop, dgrad and wgrad of 64 rows; nothing below the first layer trains, so it has no dgrad.
    flops = 2 * 64 * (2 * 32 * 64 + 3 * 64 * 64 + 3 * 64)
    assert measured["flops"]["model_flops_per_step"] == flops


class Clock:
    """Arms whose block time follows the machine: it slows down by 1 % with every block."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def block(self, arm: str, ms: float) -> Any:
        def run() -> float:
            self.ran.append(arm)
            return ms * 1.01 ** len(self.ran)

        return run


def test_blocks_alternate_and_clocks_are_read_after_each() -> None:
    clock, lines = Clock(), iter(f"{1900 + index}, 3201, 700, 55" for index in range(40))
    found = interleave(
        clock.block("B", 10.0),
        clock.block("C", 9.0),
        pairs=10,
        sampler=Sampler("0", run=lambda _: next(lines)),
    )
    assert "".join(clock.ran) == "BCCB" * 5
    assert found["baseline_ms"][1] == pytest.approx(10 * 1.01**4)
    assert found["candidate_ms"][1] == pytest.approx(9 * 1.01**3)
    assert found["conditions"]["baseline"]["sm_clock_mhz"][:3] == [1900, 1903, 1904]
    lost = iter(["1, 1, 1, 1"] * 19 + ["[N/A]"])
    found = interleave(
        clock.block("B", 1),
        clock.block("C", 1),
        pairs=10,
        sampler=Sampler("0", run=lambda _: next(lost)),
    )
    assert found["conditions"] is None


def test_marks_are_milliseconds_apart() -> None:
    marks = CpuMarks()
    marks.at = [1.0, 1.002, 1.005]
    assert marks.between_ms() == pytest.approx([2.0, 3.0])


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 32))


def test_layers_that_do_the_same_work_are_timed_once_and_all_named() -> None:
    plain, model = small_model(), small_model()
    plan = lowprec.plan(model, lowprec.load_recipe("mxfp8"))
    lowprec.apply(model, plan)
    x = torch.randn(8, 32)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            plain(x).sum().backward()

    groups = capture(plain, quantized(plan), step)
    # The first has nothing below it that trains, so it has no dgrad to pay for.
    assert [group.layers for group in groups] == [["0"], ["2", "3"]]
    assert [group.needs_dx for group in groups] == [False, True]
    assert [group.dtype for group in groups] == ["bfloat16"] * 2
    assert not any(module._forward_pre_hooks for module in plain.modules())


def test_every_timed_step_casts_the_weight_anew_and_runs_all_products() -> None:
    model = small_model()
    plan = lowprec.plan(model, lowprec.load_recipe("mxfp8"))
    x = torch.randn(8, 32)
    (_, middle) = capture(model, quantized(plan), lambda: model(x).sum().backward())
    lowprec.apply(model, plan)
    layer = model.get_submodule("2")
    before = layer.weight.detach().clone()
    step = module_step(layer, middle, compiled=False)
    version = layer.weight._version
    start = lowprec.observe(model).gemms["2"]["wgrad"].get("mxfp8", 0)
    for _ in range(3):
        step()
    assert layer.weight._version == version + 3
    assert torch.equal(layer.weight, before)
    assert lowprec.observe(model).gemms["2"]["wgrad"]["mxfp8"] == start + 3


def test_a_timed_report_moves_the_step_and_reads_nothing() -> None:
    model = small_model()
    lowprec.apply(model, lowprec.plan(model, lowprec.load_recipe("mxfp8")))
    marks: list[int] = []
    report = TimedReport(model, steps=3, mark=lambda: marks.append(1), last_step=1)
    for _ in range(3):
        report.batch(object())
        report.gradients()
        report.step(torch.tensor(float("nan")))
    assert len(marks) == 3
    report.check_complete()


OWN_LOOP = """
import torch
from torch import nn

class Own:
    name, facts = "own", {}

    def model(self):
        return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def evaluation_batches(self, *, batch_size):
        raise NotImplementedError

    def train(self, model, *, seed, steps, batch_size, report):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(steps):
            x = torch.randn(batch_size, 32)
            report.batch(x)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=AUTOCAST):
                loss = model(x).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            report.step(loss)

def build():
    return Own()
"""


@pytest.mark.parametrize(("autocast", "dtype"), [("True", "bfloat16"), ("False", "float32")])
def test_a_loop_of_its_own_is_timed_as_it_is(tmp_path: Path, autocast: str, dtype: str) -> None:
    (tmp_path / "own.py").write_text(OWN_LOOP.replace("AUTOCAST", autocast), encoding="utf-8")
    text = TEXT.replace(f"{TOY.as_posix()}:build", "own.py:build").replace("rows = 300", "")
    (tmp_path / "own.toml").write_text(text, encoding="utf-8")
    found = measure(Experiment.from_toml(tmp_path / "own.toml"), tell=silent)
    assert found["inputs"]["baseline_dtype"] == dtype
    step = found["measurements"][0]
    assert step["rung"] == "step"
    assert all(value > 0 for value in step["baseline_ms"])
    assert found["quantized_layers"] == ["0"]


def test_a_model_that_falls_over_is_an_error_in_words(toml: Path) -> None:
    text = TEXT.replace("rows = 300", "rows = 300\ncrash = true")
    toml.write_text(text, encoding="utf-8")
    with pytest.raises(GateError, match="an arm failed while timed: RuntimeError: the kernel"):
        measure(Experiment.from_toml(toml), tell=silent)


@pytest.mark.slow
def test_compiled_arms_are_measured_and_pay_for_compilation(toml: Path) -> None:
    toml.write_text(TEXT + "compile = true\n", encoding="utf-8")
    found = measure(Experiment.from_toml(toml), tell=silent)
    assert found["inputs"]["compile"] is True
    assert sorted(found["quantized_layers"]) == ["body.0", "top"]
    assert found["flops"] is not None
    assert found["costs"]["warmup_s"] == 0


def test_out_of_memory_says_what_to_lower(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(speed_module, "interleave", full)
    with pytest.raises(GateError, match="lower batch_size"):
        measure(Experiment.from_toml(toml), tell=silent)


def test_a_recipe_that_quantizes_nothing_is_refused(toml: Path) -> None:
    toml.write_text(TEXT.replace('recipe = "mxfp8"', 'recipe = "bf16"'), encoding="utf-8")
    with pytest.raises(ExperimentError, match="there is no gain to time"):
        measure(Experiment.from_toml(toml), tell=silent)


# The timings of another machine.


def elsewhere(toml: Path, **more: Any) -> dict[str, Any]:
    """Timings that fit the experiment, as an H200 would have written them."""
    record = speed_record(**more)
    hashes = {name: lowprec.load_recipe(name).hash for name in ("bf16", "mxfp8")}
    record["inputs"] |= {
        "workload": f"{TOY.as_posix()}:build",
        "options": {"rows": 300},
        "batch_size": 64,
        "recipe_hashes": {"baseline": hashes["bf16"], "candidate": hashes["mxfp8"]},
    }
    return record


@pytest.mark.parametrize(
    ("step", "native", "code", "word"),
    [
        (0.8, 6, 0, "speed ACCEPT"),
        (1.1, 6, 1, "speed REJECT"),
        (0.972, 6, 2, "speed INCONCLUSIVE"),
        (0.8, 0, 2, "speed: not measurable here"),
    ],
)
def test_timings_of_another_machine_are_judged(
    toml: Path, step: float, native: int, code: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = as_lines(toml.parent / "t.jsonl", elsewhere(toml, step=step, native=native))
    out = toml.parent / "out"
    assert main(["speed", str(toml), "--out", str(out), "--timings", str(lines)]) == code
    assert capsys.readouterr().out.startswith(word)
    kept = read_record(out / "speed.json", kind="speed")
    assert kept["promised"] == Experiment.from_toml(toml).speed.to_dict()
    assert kept["source"] == "timings file"


def test_speed_json_travels(toml: Path) -> None:
    first, second = toml.parent / "first", toml.parent / "second"
    lines = as_lines(toml.parent / "t.jsonl", elsewhere(toml))
    experiment = Experiment.from_toml(toml)
    found = speed(experiment, out=first, timings=lines, tell=silent)
    again = speed(experiment, out=second, timings=first / "speed.json", tell=silent)
    assert found == again
    assert (first / "speed.json").read_bytes() == (second / "speed.json").read_bytes()


def test_native_timings_are_taken_once(toml: Path) -> None:
    lines = as_lines(toml.parent / "t.jsonl", elsewhere(toml, step=1.1))
    out, experiment = toml.parent / "out", Experiment.from_toml(toml)
    said: list[str] = []
    first = speed(experiment, out=out, timings=lines, tell=silent)
    before = (out / "speed.json").read_bytes()
    assert speed(experiment, out=out, tell=said.append) == first
    assert "move it away to measure again" in said[0]
    assert (out / "speed.json").read_bytes() == before
    with pytest.raises(ExperimentError, match="holds timings already"):
        speed(experiment, out=out, timings=lines, tell=silent)


def test_timings_that_do_not_fit_leave_nothing(toml: Path) -> None:
    record = changed(elsewhere(toml), "inputs.batch_size", 65)
    lines = as_lines(toml.parent / "t.jsonl", record)
    out = toml.parent / "out"
    with pytest.raises(RecordError, match="batch_size is 65, the gate promised 64"):
        speed(Experiment.from_toml(toml), out=out, timings=lines, tell=silent)
    assert not (out / "speed.json").exists()
    with pytest.raises(RecordError, match=r"a speed\.json or JSON lines"):
        speed(Experiment.from_toml(toml), out=out, timings=toml, tell=silent)


def test_a_folder_that_promised_another_gate_is_refused(toml: Path) -> None:
    out, experiment = toml.parent / "out", Experiment.from_toml(toml)
    RunStore(out).write_gate(experiment.promise(created="2026-01-01T00:00:00Z"))
    toml.write_text(TEXT.replace("planned_steps = 100000", "planned_steps = 9"), encoding="utf-8")
    with pytest.raises(ExperimentError, match="planned_steps is 100000 there and 9 here"):
        speed(Experiment.from_toml(toml), out=out, tell=silent)


def gate_folder(toml: Path, folder: Path) -> Path:
    """A finished gate whose runs all are as good as they get."""
    store = RunStore(folder)
    experiment = Experiment.from_toml(toml)
    hashes = {"baseline": "recipe-baseline", "candidate": "recipe-candidate"}
    store.write_gate(
        {**experiment.promise(created="2026-01-01T00:00:00Z"), "recipe_hashes": hashes}
    )
    for run in records(clicks(), seeds=(1, 2, 3)):
        run["inputs"] = {"arm": run["arm"], "seed": run["seed"]}
        if run["arm"] != "candidate":
            run["recipe_hash"] = "recipe-baseline"
        store.save(run | {"key": content_hash(run["inputs"])})
    return folder


def test_judge_and_report_take_speed_json_from_the_folder(
    toml: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = gate_folder(toml, toml.parent / "gate")
    assert main(["judge", str(folder)]) == 2
    assert "speed: not measurable here" in capsys.readouterr().out
    for step, code in ((0.8, 0), (1.1, 1), (0.972, 2)):
        record = elsewhere(toml, step=step)
        record["inputs"]["recipe_hashes"] = {
            "baseline": "recipe-baseline",
            "candidate": "recipe-candidate",
        }
        sealed = seal({"schema": 1, "kind": "speed", **record})
        write_json_atomic(folder / "speed.json", sealed)
        assert main(["judge", str(folder)]) == code
        one_run = sorted((folder / "runs").glob("*.json"))
        assert main(["judge", *map(str, one_run)]) == code
        assert main(["report", str(folder)]) == 0
        verdict = json.loads((folder / "verdict.json").read_text(encoding="utf-8"))
        assert verdict["quality"] == "ACCEPT"
        assert verdict["speed"]["status"] == ("ACCEPT", "REJECT", "INCONCLUSIVE")[code]
    sealed["measurements"] = []
    write_json_atomic(folder / "speed.json", sealed)
    assert main(["judge", str(folder)]) == 3
    assert "edited after it was written" in capsys.readouterr().err

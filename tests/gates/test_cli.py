"""python -m qualitygates: exit codes, one clear line per error, and judging without torch."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lowprec
import qualitygates
from qualitygates.__main__ import main
from qualitygates.errors import DataError
from qualitygates.experiment import Experiment
from qualitygates.records import RunStore, content_hash
from tests.gates.synthetic import EFFECTS, NULL, Effect, clicks, records

ROOT = Path(__file__).parents[2]
EXPERIMENT = """
schema = 1
name = "test"
workload = "flights"
margins = "demo"
looks = [3, 5]
[train]
steps = 200
batch_size = 8
[baseline]
recipe = "bf16"
[candidate]
recipe = "mxfp8"
[speed]
required = false
"""
CODES = {"ACCEPT": 0, "REJECT": 1, "INCONCLUSIVE": 2}


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "test.toml"
    path.write_text(EXPERIMENT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished gate folder for each verdict."""
    data = clicks()
    path = tmp_path_factory.mktemp("experiments") / "test.toml"
    path.write_text(EXPERIMENT, encoding="utf-8")
    experiment = Experiment.from_toml(path)
    found = {}
    for word, effects in {
        "ACCEPT": EFFECTS,
        "REJECT": EFFECTS | {"candidate": Effect(shared=0.8)},
        "INCONCLUSIVE": EFFECTS | {"known_bad": NULL},
    }.items():
        store = RunStore(tmp_path_factory.mktemp(word))
        store.write_gate(experiment.promise(created="2026-01-01T00:00:00+00:00"))
        for run in records(data, seeds=(1, 2, 3), effects=effects):
            run["inputs"] = {"arm": run["arm"], "seed": run["seed"]}
            store.save(run | {"key": content_hash(run["inputs"])})
        found[word] = store.folder
    return found


def one_line(text: str) -> str:
    assert text.count("\n") == 1, text
    assert "Traceback" not in text
    return text


@pytest.mark.parametrize("word", CODES)
def test_judge_prints_the_verdict_and_exits_with_its_code(
    folders: dict[str, Path], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(folders[word].rglob("*"))
    assert main(["judge", str(folders[word])]) == CODES[word]
    assert capsys.readouterr().out.startswith(f"{word}: ")
    files = sorted(map(str, (folders[word] / "runs").glob("*.json")))
    assert main(["judge", *files]) == CODES[word]
    assert qualitygates.judge([folders[word]])["verdict"] == word
    assert sorted(folders[word].rglob("*")) == before


def test_judge_and_report_run_without_torch(folders: dict[str, Path]) -> None:
    code = (
        "import sys; from qualitygates.__main__ import main;"
        "codes = [main([name, sys.argv[1]]) for name in ('judge', 'report')];"
        "print(codes, sorted({'torch', 'lowprec'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(folders["REJECT"])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[1, 0] []"


def test_the_module_runs(folders: dict[str, Path]) -> None:
    command = [sys.executable, "-m", "qualitygates", "judge", str(folders["INCONCLUSIVE"])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout.startswith("INCONCLUSIVE: ")


def test_report_writes_and_succeeds_whatever_the_verdict(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(folders["REJECT"])]) == 0
    page = folders["REJECT"] / "report.html"
    assert f"report: {page}" in capsys.readouterr().out
    assert "REJECT" in page.read_text(encoding="utf-8")
    assert main(["report", str(page)]) == 3


Fake = Callable[..., dict[str, Any]]


def with_gate(monkeypatch: pytest.MonkeyPatch, run: Fake) -> None:
    module = types.ModuleType("qualitygates.gate")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "qualitygates.gate", module)


@pytest.mark.parametrize("word", CODES)
def test_run_hands_over_the_experiment_and_returns_the_code(
    word: str,
    folders: dict[str, Path],
    toml: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: dict[str, Any] = {}

    def run(experiment: Experiment, **options: Any) -> dict[str, Any]:
        seen.update(options, experiment=experiment)
        return qualitygates.judge([folders[word]])

    with_gate(monkeypatch, run)
    out = toml.parent / "out"
    assert main(["run", str(toml), "--out", str(out), "--workers", "2"]) == CODES[word]
    assert seen["experiment"] == Experiment.from_toml(toml)
    assert (seen["out"], seen["workers"]) == (out, 2)
    assert f"report: {out / 'report.html'}" in capsys.readouterr().out
    main(["run", str(toml)])
    assert (seen["out"], seen["workers"]) == (Path("gates/test"), min(os.cpu_count() or 1, 4))


@pytest.mark.parametrize(
    "error",
    [
        DataError("labels:\n  all of one class"),
        lowprec.LowprecError("recipe: unknown format"),
        ImportError("No module named 'pyarrow'"),
    ],
)
def test_errors_of_users_are_one_line_and_code_3(
    error: Exception,
    toml: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(*_: Any, **__: Any) -> dict[str, Any]:
        raise error

    with_gate(monkeypatch, run)
    assert main(["run", str(toml)]) == 3
    assert " ".join(str(error).split()) in one_line(capsys.readouterr().err)


def test_an_interrupt_says_that_the_run_resumes(
    toml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: Any, **__: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    with_gate(monkeypatch, run)
    assert main(["run", str(toml)]) == 3
    assert "the same command resumes" in one_line(capsys.readouterr().err)


def test_a_fault_of_the_program_is_never_a_reject(
    toml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_: Any, **__: Any) -> dict[str, Any]:
        raise ZeroDivisionError("somewhere deep")

    with_gate(monkeypatch, run)
    assert main(["run", str(toml)]) == 3
    shown = capsys.readouterr().err
    assert "ZeroDivisionError: somewhere deep" in shown
    assert "no verdict" in shown.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: command"),
        (["train"], "invalid choice: 'train'"),
        (["run"], "required: GATE.toml"),
        (["run", "x.toml", "--margin", "1"], "unrecognized arguments"),
        (["run", "x.toml", "--workers", "0"], "at least 1"),
        (["run", "x.toml", "--workers", "two"], "at least 1"),
        (["judge"], "required: RUNS"),
    ],
)
def test_a_wrong_command_line_is_code_3(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 3
    assert message in capsys.readouterr().err


def test_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "2 INCONCLUSIVE" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "absent.toml"], "absent.toml: cannot be read"),
        (["judge", "absent"], "no margin was promised"),
        (["judge", "."], "gate.json does not exist"),
        (["report", "absent"], "absent is not a folder"),
    ],
)
def test_paths_that_lead_nowhere(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 3
    assert message in one_line(capsys.readouterr().err)


def test_a_damaged_record_gives_no_verdict(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, broken = RunStore(folders["ACCEPT"]), RunStore(tmp_path)
    broken.write_gate(store.read_gate())
    for run in store.load_all()[0]:
        path = broken.save(run)
    path.write_bytes(path.read_bytes()[:-100])
    assert main(["judge", str(tmp_path)]) == 3
    assert "not a whole JSON file" in one_line(capsys.readouterr().err)


def test_too_few_runs_give_no_verdict(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, short = RunStore(folders["ACCEPT"]), RunStore(tmp_path)
    short.write_gate(store.read_gate())
    for run in store.load_all()[0]:
        if run["seed"] < 3:
            short.save(run)
    assert main(["judge", str(tmp_path)]) == 3
    assert "candidate seed 3" in one_line(capsys.readouterr().err)

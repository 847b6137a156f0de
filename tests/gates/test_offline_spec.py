"""An offline gate is read strictly: every mistake is named with the cure."""

from __future__ import annotations

from pathlib import Path

import pytest

from qualitygates.__main__ import main
from qualitygates.errors import DataError, ExperimentError
from qualitygates.offline.inputs import find_inputs
from qualitygates.offline.observations import read_observation
from qualitygates.offline.spec import OfflineSpec
from qualitygates.pairing import read_promise
from tests.gates import offline_data as toy


def text(tmp_path: Path) -> str:
    return toy.write_toml(tmp_path, predictions="{arm}-{seed}.parquet").read_text()


def spec(tmp_path: Path, content: str) -> OfflineSpec:
    path = tmp_path / "gate.toml"
    path.write_text(content)
    return OfflineSpec.from_toml(path)


def test_the_promise_is_one_that_judging_reads(tmp_path: Path) -> None:
    found = spec(tmp_path, text(tmp_path))
    promise = found.promise(null_control=False, created="2026-01-01T00:00:00+00:00")
    read = read_promise(promise)
    assert read.evaluations == ("trained",)
    assert read.arms == ("baseline", "candidate", "known_bad")
    assert read.seeds == (1, 2, 3)
    assert "null" in read_promise(found.promise(null_control=True, created="")).arms


MISTAKES = {
    "unknown key": ('name = "toy"', 'nam = "toy"', "unknown key 'nam' at the top; nearest.*'name'"),
    "unknown role": ('label = "', 'labl = "', r"unknown key 'labl' in \[columns\]; .*'label'"),
    "no margins": ('margins = "demo"', "", "margins is missing"),
    "margins": ('"demo"', '"easy"', "'easy' is unknown"),
    "margins of a number": ('margins = "demo"', "margins = 3", "margins = 3 must be a name"),
    "two seeds": ("looks = [3]", "looks = [2]", "at least 3 seeds"),
    "looks": ("looks = [3]", "looks = [3, 4]", "no computed error level"),
    "seeds": ("looks = [3]", "looks = [3]\nseeds = [1, 1, 2]", "needs 3 different seeds"),
    "huge seed": ("looks = [3]", "looks = [3]\nseeds = [1, 2, 9e400]", "list of whole numbers"),
    "digits": ("looks = [3]", "looks = [" + "9" * 5000 + "]", "not valid TOML"),
    "no label": ('label = "clicked"\n', "", "label is missing"),
    "both": ('logit = "score"', 'logit = "score"\nprobability = "p"', "either logit or probab"),
    "form": ("looks = [3]", 'looks = [3]\nforms = ["../x"]', "a name has at most 64"),
    "task": ("looks = [3]", 'looks = [3]\ntasks = ["a:b"]', "a name has at most 64"),
    "tasks": ('label = "clicked"', 'label = "clicked"\ntask = "t"', "name the tasks"),
    "clusters": ('columns = ["user", "day"]', "columns = 3", "must be a list of texts"),
    "buckets": ('columns = ["user", "day"]', "buckets = 8", "must be a whole number, 64 or more"),
    "no files": ('[[predictions]]\npath = "{arm}-{seed}.parquet"', "", "predictions.* is missing"),
    "arm": ('path = "{arm}-{seed}.parquet"', 'path = "a"\narm = "x"', "must be one of baseline"),
    "workload": ('name = "toy"', 'name = "toy"\nworkload = "x"', "`python -m qualitygates run`"),
    "schema": ("schema = 1", "schema = 2", "this version reads schema = 1"),
    "same arms": ("[clusters]", '[arms]\nnull = "candidate"\n[clusters]', "two arms one name"),
    "known bad": ("[clusters]", "[controls]\nknown_bad_margins = 1.0\n[clusters]", "above 1, at"),
    "rate": ("looks = [3]", "looks = [3]\nnegative_sampling_rate = 0", "above 0, at most 1"),
    "override": (
        'path = "{arm}-{seed}.parquet"',
        'path = "a"\n[predictions.columns]\nprobability = "p"',
        r"\[columns\] does not name this role",
    ),
    "curve": ('loss = "loss"', "", r"\[curves\] loss is missing"),
    "crash": ("[clusters]", '[[crashed]]\narm = "null"\nreason = "x"\n[clusters]', "needs arm, s"),
    "speed": ("[clusters]", "[speed]\nrequired = 1\n[clusters]", "must be true or false"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_named(tmp_path: Path, case: str) -> None:
    old, new, message = MISTAKES[case]
    content = text(tmp_path)
    assert old in content
    with pytest.raises(ExperimentError, match=message) as caught:
        spec(tmp_path, content.replace(old, new, 1))
    assert str(caught.value).startswith(str(tmp_path / "gate.toml"))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 10_000, b"a = "])
def test_what_is_no_toml_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "gate.toml"
    path.write_bytes(content)
    with pytest.raises(ExperimentError, match="not valid TOML"):
        OfflineSpec.from_toml(path)
    assert main(["judge", str(path)]) == 3
    assert main(["judge", str(tmp_path / "none.toml")]) == 3
    assert main(["judge", str(path), str(path)]) == 3


def test_paths_expand_to_files_with_what_they_say(tmp_path: Path) -> None:
    content = text(tmp_path).split("[[predictions]]")[0]
    for name in ("p/baseline-1.csv", "p/candidate-2.csv", "p/other.csv", "q/x 1.csv", "q/x 2.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    content += '[[predictions]]\npath = "p/{arm}-{seed}.csv"\n'
    content += '[[predictions]]\npath = "q/x*.csv"\nseed = 3\n[predictions.columns]\nlogit = "z"\n'
    found = find_inputs(spec(tmp_path, content))
    assert [one.label for one in found] == [
        *("p/baseline-1.csv", "p/candidate-2.csv", "q/x 1.csv", "q/x 2.csv")
    ]
    assert [one.fixed for one in found[1:3]] == [{"arm": "candidate", "seed": 2}, {"seed": 3}]
    assert [one.columns["logit"] for one in found[1:3]] == ["score", "z"]
    assert len({one.sha256 for one in found}) == 4
    for path, message in (("p/none-{seed}.csv", "no such file"), ("p", r"is a folder.*'p/\*'")):
        more = f'[[predictions]]\npath = "{path}"\n'
        with pytest.raises(DataError, match=message):
            find_inputs(spec(tmp_path, content + more))


def test_a_file_that_is_still_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "baseline-1.parquet").write_text("x")
    content = text(tmp_path).split("[[curves]]")[0]
    (found,) = find_inputs(spec(tmp_path, content))
    found.check_unchanged()
    (tmp_path / "baseline-1.parquet").write_text("xy")
    with pytest.raises(DataError, match="was written to while it was read"):
        found.check_unchanged()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"plan": 3}', "plan does not have the form"),
        ('{"secret": 3}', "unknown key 'secret'"),
        ('{"gemms_match_plan": true}', "without plan_layers"),
        ('{"gemms": {"a": {"fprop": {"mxfp8": -1}}}}', "gemms does not have"),
        ('{"plan_layers": [{"name": "a"}]}', "plan_layers does not have"),
        ("[" * 100_000, "not JSON"),
        ("[]", "must be a JSON object"),
    ],
)
def test_an_observation_is_checked(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "seen.json"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        read_observation(path, label="seen.json")

"""Loading a workload: shipped ones by name, one's own by file and function, and the refusals."""

from pathlib import Path
from typing import Any

import pytest

from qualitygates.errors import DataError, ExperimentError
from qualitygates.workload import SHIPPED, Workload, load_workload

OWN = """
class Own:
    name = "own"
    facts = {"data": "none"}
    def __init__(self, rows): self.rows = rows
    def model(self): ...
    def training_batches(self, *, seed, steps, batch_size): ...
    def evaluation_batches(self, *, batch_size): ...
    def optimizer(self, model, *, steps): ...

def build(*, rows, data="x"):
    return Own(rows)

def anything(**options):
    return Own(sorted(options))

def positional(rows=3):
    return Own(rows)

def required(rows):
    return Own(rows)

def broken(*, rows=1):
    raise RuntimeError("the database is down")

class Half:
    name = "half"
    facts = {}

def half():
    return Half()

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def load(folder: Path, name: str, **options: Any) -> Any:
    return load_workload(name, options, folder=folder)


def test_a_workload_of_ones_own(folder: Path) -> None:
    workload = load(folder, "own.py:build", rows=7)
    assert isinstance(workload, Workload)
    assert workload.rows == 7
    assert load(folder, f"{folder}/own.py:build", rows=8).rows == 8
    assert load(folder, "own.py:anything", a=1, b=2).rows == ["a", "b"]
    assert load(folder, "own.py:positional").rows == 3


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("click", {}, ["unknown workload 'click'", "did you mean 'clicks'?"]),
        ("xyzzy", {}, ["known: flights, clicks, csv, criteo"]),
        ("clicks", {"user": 3}, ["workload clicks", "unknown option 'user'", "'users'"]),
        ("flights", {"folder_name": 3}, ["unknown option 'folder_name'"]),
        ("flights", {"xyzzy": 3}, ["known: keep_every_day"]),
        ("criteo", {"train": "a"}, ["option 'evaluate' is missing"]),
        ("csv", {"train": "a", "evaluate": "b"}, ["option 'label' is missing"]),
        ("absent.py:build", {}, ["absent.py does not exist"]),
        ("own.py:bild", {}, ["no function 'bild'", "did you mean 'build'?"]),
        ("own.py:number", {}, ["no function 'number'"]),
        ("own.py:", {}, ["no function ''"]),
        ("own.py:build", {}, ["option 'rows' is missing"]),
        ("own.py:build", {"rows": 1, "date": 2}, ["unknown option 'date'", "'data'"]),
        ("own.py:half", {}, ["lacks model, evaluation_batches, training_batches, optimizer"]),
    ],
)
def test_refusals(folder: Path, name: str, options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ExperimentError) as caught:
        load(folder, name, **options)
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_does_not_run(folder: Path) -> None:
    (folder / "bad.py").write_text("def build(:\n")
    with pytest.raises(ExperimentError, match=r"bad\.py cannot be run: SyntaxError"):
        load(folder, "bad.py:build")
    (folder / "bad.py").write_text("import module_that_is_not_there\n")
    with pytest.raises(ExperimentError, match="module_that_is_not_there"):
        load(folder, "bad.py:build")


def test_an_error_of_ones_own_workload_is_not_hidden(folder: Path) -> None:
    says = r"own\.py:broken cannot be built .* RuntimeError: the database is down"
    with pytest.raises(ExperimentError, match=says) as caught:
        load(folder, "own.py:broken")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_every_shipped_workload_can_be_built(folder: Path) -> None:
    assert set(SHIPPED) == {"flights", "clicks", "csv", "criteo", "part"}
    clicks = {"evaluation_rows": 1000, "users": 50, "items": 50}
    assert isinstance(load(folder, "clicks", **clicks), Workload)
    assert isinstance(
        load(folder, "part", of={"workload": "clicks", "options": clicks}, last=0.5), Workload
    )
    for name, options in (
        ("csv", {"label": "y", "clusters": ["user"], "dense": ["x"]}),
        ("criteo", {}),
    ):
        files = {"train": "a.csv", "evaluate": "b.csv"}
        with pytest.raises(DataError, match=r"b\.csv does not exist"):
            load(folder, name, **files, **options)


def test_a_required_option_may_be_positional(folder: Path) -> None:
    assert load(folder, "own.py:required", rows=4).rows == 4
    with pytest.raises(ExperimentError, match="'rows' is missing"):
        load(folder, "own.py:required")

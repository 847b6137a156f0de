"""watch: JSON lines and TensorBoard."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowprec
from lowprec.errors import UnsupportedError
from lowprec.watching import watch

ROOT = Path(__file__).parents[2]


def network(recipe: str = "mxfp8") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    return lowprec.apply(model, lowprec.plan(model, lowprec.load_recipe(recipe)))


def step(model: nn.Module) -> None:
    model(torch.randn(16, 64)).square().mean().backward()


def no_constant(name: str) -> None:
    raise ValueError(name)


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=no_constant) for line in text.splitlines()]


def test_one_line_a_sample_under_a_header(tmp_path: Path) -> None:
    path = tmp_path / "stats.jsonl"
    model = network()
    with watch(model, every=2, what_if=["nvfp4"], path=path) as running:
        header, *samples = lines(path)
        assert samples == []
        step(model)
        step(model)
        header, *samples = lines(path)  # whole before the watch is closed
        stats = running.stats
    assert header["kind"] == "header"
    assert (header["schema"], header["every"], header["what_if"]) == (1, 2, ["nvfp4"])
    assert header["torch"] == torch.__version__
    assert header["layers"]["2"] == {
        "shape": [32, 64],
        "stages": [[0, "mxfp8 x mxfp8_32x32 / mxfp8 x mxfp8_32x32 / mxfp8"]],
    }
    assert len(samples) == 4 + 6
    for line in samples:
        found = stats[line["layer"]][line["product"]][line["operand"]]
        assert line["kind"] == "sample"
        for name in ("step", "call", "cast", "elements", "amax", "mean_square", "rms", "sqnr_db"):
            assert line[name] == getattr(found, name), name
        for name in ("underflow", "saturation", "scale_min", "scale_max", "scales_distinct"):
            assert line[name] == getattr(found, name), name
        assert line["what_if"]["nvfp4"]["sqnr_db"] == found.what_if["nvfp4"].sqnr_db


def test_the_header_tells_the_plan_in_force(tmp_path: Path) -> None:
    path = tmp_path / "stats.jsonl"
    model = nn.Sequential(nn.Linear(64, 64))
    plans = [lowprec.plan(model, lowprec.load_recipe(recipe)) for recipe in ("mxfp8", "bf16")]
    for plan in plans:
        lowprec.apply(model, plan)
    with watch(model, path=path):
        pass
    assert lines(path)[0]["layers"]["0"]["stages"] == [[0, "bf16 / bf16 / bf16"]]


def test_what_json_cannot_say_is_null(tmp_path: Path) -> None:
    path = tmp_path / "stats.jsonl"
    model = network("bf16")
    with torch.no_grad():
        model[0].weight.fill_(0.5)  # exact in every cast
        model[2].weight[0, 0] = float("nan")
    with watch(model, path=path) as running:
        step(model)
    found = {(one["layer"], one["product"], one["operand"]): one for one in lines(path)[1:]}
    assert running.stats["0"]["fprop"]["w"].sqnr_db == float("inf")
    assert found["0", "fprop", "w"]["sqnr_db"] is None
    assert found["0", "fprop", "w"]["what_if"]["mxfp4"]["sqnr_db"] is None
    assert found["2", "fprop", "w"]["amax"] is None
    assert found["2", "fprop", "w"]["nonfinite"] == 1 / (64 * 32)


def test_a_second_watch_appends(tmp_path: Path) -> None:
    path = tmp_path / "stats.jsonl"
    for _ in range(2):
        with watch(network(), path=path):
            pass
    assert [one["kind"] for one in lines(path)] == ["header", "header"]
    with path.open("a") as file:
        file.write('{"kind": "sample", "st')
    model = network()
    with watch(model, path=path):
        step(model)
    kinds = [one["kind"] for one in lines(path)]
    assert kinds == ["header"] * 3 + ["sample"] * 10


@pytest.mark.parametrize("content", ["a table of mine", '{"kind": "header"}\n', "[1]\n", "\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(content)
    with pytest.raises(UnsupportedError, match="does not start with a header"):
        watch(network(), path=path)
    assert path.read_text() == content


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"No such file.*a folder that exists"):
        watch(network(), path=tmp_path / "none" / "stats.jsonl")


KILLED = """
import os, signal, sys, torch, lowprec
from lowprec.watching import watch
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 32))
lowprec.apply(model, lowprec.plan(model, lowprec.load_recipe("mxfp8")))
watch(model, every=1, path=sys.argv[1])
for index in range(3):
    y = model(torch.randn(16, 64))
    if index == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    y.sum().backward()
"""


def test_a_killed_run_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "stats.jsonl"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", KILLED, path], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    # Two whole steps, and the third up to what forward saw.
    assert [one["kind"] for one in lines(path)] == ["header"] + ["sample"] * (10 + 10 + 6)


class Broken:
    def write(self, *_: object) -> None:
        raise OSError("No space left on device")

    def close(self) -> None:
        pass


def test_a_full_disk_stops_the_writing_and_not_the_training() -> None:
    model = network()
    with watch(model, every=1) as running:
        running._outputs.open.append(Broken())
        with pytest.warns(RuntimeWarning, match=r"stops writing to Broken: No space left") as seen:
            step(model)
        assert len(seen) == 1
        step(model)
        assert running.stats["2"]["wgrad"]["x"].call == 1


@pytest.mark.parametrize(
    ("name", "rank", "files"),
    [
        ("stats.jsonl", 0, ["stats.jsonl"]),
        ("stats.jsonl", 1, []),
        ("stats-{rank}.jsonl", 0, ["stats-0.jsonl"]),
        ("stats-{rank}.jsonl", 1, ["stats-1.jsonl"]),
    ],
)
def test_ranks_never_share_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, rank: int, files: list[str]
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model = network()
    with watch(model, path=tmp_path / name) as running:
        step(model)
        assert len(running.stats) == 2  # every rank can be asked
    assert sorted(one.name for one in tmp_path.iterdir()) == files
    for one in files:
        header = lines(tmp_path / one)[0]
        assert (header["rank"], header["world"]) == (rank, 2)


class Writer:
    """What a writer of TensorBoard must offer."""

    def __init__(self) -> None:
        self.scalars: dict[str, dict[int, float]] = {}
        self.flushed = 0

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.setdefault(tag, {})[step] = value

    def flush(self) -> None:
        self.flushed += 1


def test_tensorboard_tags_through_a_writer_of_the_user() -> None:
    model, writer = network(), Writer()
    with watch(model, every=2, tensorboard=writer) as running:
        for index in range(4):
            lowprec.set_step(model, 10 + index)
            step(model)
        found = running.stats["0"]["wgrad"]["dy"]
    assert writer.flushed == 1
    assert list(writer.scalars["0/wgrad/dy/sqnr_db"]) == [10, 12]
    assert writer.scalars["0/wgrad/dy/rms"][12] == found.rms
    assert writer.scalars["2/fprop/w/scales_distinct"][10] >= 1
    assert writer.scalars["0/wgrad/dy/nvfp4/underflow"][12] == found.what_if["nvfp4"].underflow


def test_tensorboard_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the extra lowprec[tensorboard]")
    model = network()
    with watch(model, tensorboard=tmp_path / "board"):
        step(model)
    (file,) = (tmp_path / "board").iterdir()
    content = file.read_bytes()
    assert b"0/fprop/x/sqnr_db" in content
    assert b"2/dgrad/dy/mxfp4/saturation" in content


def test_tensorboard_missing_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    model, path = network(), tmp_path / "stats.jsonl"
    with pytest.raises(UnsupportedError, match=r"pip install 'lowprec\[tensorboard\]'"):
        watch(model, path=path, tensorboard=tmp_path / "board")
    watch(model, path=path).close()

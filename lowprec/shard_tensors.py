"""The two faces of an FSDP weight that travels as codes: its shard, and the gathered whole.

Between steps a rank holds its rows of the weight in high precision (ShardedWeight, which says how
to cast them). Between all-gather and reshard the module holds codes and scales (GatheredWeight).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from lowprec import ops
from lowprec.errors import UnsupportedError
from lowprec.formats import ALL, Cast
from lowprec.nn import Linear
from lowprec.nn.operands import CastAlready, Which
from lowprec.nn.products import live, traced
from lowprec.policy import PRODUCTS, Gemm
from lowprec.tensor import QuantizedTensor

Metadata = tuple[Cast, torch.Tensor | None]
aten = torch.ops.aten


def weight_cast(layer: Linear) -> Cast | str:
    """The one cast that serves the weight in fprop and dgrad at all times, or why there is none."""
    products = layer.lowprec_products
    stages = products.stages[products.first :]
    gemms = [getattr(one.policy, name) for one in stages for name in PRODUCTS[:2]]
    wanted = {gemm.right if isinstance(gemm, Gemm) else None for gemm in gemms}
    if len(wanted) > 1:
        texts = ", ".join(sorted("bf16" if cast is None else str(cast) for cast in wanted))
        return f"fprop, dgrad or a later stage cast it differently ({texts})"
    (cast,) = wanted
    if cast is None:
        return "its products run in bf16"
    if any(gemm.rotation is not None for gemm in gemms):
        return "each product rotates it along another dimension"
    if cast.stochastic:
        return "stochastic rounding draws other bits in fprop than in dgrad"
    if not cast.format.transposable:
        return (
            f"{cast.format.name} codes along K do not serve dgrad, and sending both orientations "
            "saves nothing; square tiles (mxfp8_32x32, mxfp8_128x128) serve both"
        )
    if cast.format.outer or ALL in cast.format.block:
        return f"the scale of {cast.format.name} needs the whole weight"
    return cast


class ShardedWeight(torch.Tensor):
    """The rows of a weight that one rank holds, in high precision; FSDP2 gathers them as codes.

    Reads and writes are those of the tensor it wraps. Views, copies and moves keep the class, all
    other results are plain tensors, and it is saved as a plain tensor.
    """

    _rows: torch.Tensor

    @staticmethod
    def __new__(cls, rows: torch.Tensor) -> ShardedWeight:
        """Wrap a plain tensor; both share the memory."""
        shard: ShardedWeight = torch.Tensor._make_wrapper_subclass(
            cls,
            rows.shape,
            strides=rows.stride(),
            storage_offset=rows.storage_offset(),
            dtype=rows.dtype,
            device=rows.device,
        )
        shard._rows = rows
        return shard

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """The wrapped tensor."""
        return f"ShardedWeight({self._rows})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As the plain tensor: a checkpoint names no class of ours."""
        return self._rows.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run on the wrapped tensors; what FSDP makes its shards with keeps the class."""
        plain = tree_map_only(ShardedWeight, lambda shard: shard._rows, (args, dict(kwargs or {})))
        result = func(*plain[0], **plain[1])
        if isinstance(args[0], ShardedWeight) and result is args[0]._rows:
            return args[0]  # an operation in place
        # What DTensor.to_local does: it leaves FSDP's hands.
        leaves = func is aten.view.default and list(args[1]) == list(args[0].shape)
        if func not in _KEEPING or leaves:
            return result
        return tree_map_only(torch.Tensor, cls, result)

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Metadata]:
        """Codes [rows, K] and scales of this rank's rows, both uint8."""
        cast = weight_cast(module)
        if isinstance(cast, str):
            raise UnsupportedError(
                f"layer {module.lowprec_products.layer!r} was sharded to travel as codes, but "
                f"under the plan in force {cast}; apply that plan before shard_quantized"
            )
        products = module.lowprec_products
        backend = products.stage.backends[PRODUCTS[0]].right
        q = ops.quantize(self._rows, cast, axis=-1, backend=backend)
        if mesh.size() == 1:  # FSDP then copies the first tensor only
            return (q.codes,), (cast, q.scales)
        return (q.codes, q.scales), (cast, None)

    def fsdp_post_all_gather(
        self,
        outs: tuple[torch.Tensor, ...],
        metadata: Metadata,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The whole weight over what was gathered, or the same one filled again."""
        cast, own_scales = metadata
        if out is None:
            # A copy: FSDP frees and fills again what the whole weight is made of.
            scales = outs[1] if own_scales is None else own_scales.clone()
            q = QuantizedTensor(outs[0], scales, cast.format, -1)
            return GatheredWeight(CastAlready(q, cast), param_dtype), (outs[0], scales)
        if own_scales is not None:
            out.lowprec_quantized.q.scales.copy_(own_scales)  # type: ignore[attr-defined]
        return None


class GatheredWeight(torch.Tensor):
    """A whole weight [N, K] as codes and scales, in the place and dtype of the parameter.

    lowprec.Linear reads its codes. Any other use of the values is refused, because they are not
    those of the parameter.
    """

    lowprec_quantized: CastAlready

    @staticmethod
    def __new__(cls, quantized: CastAlready, dtype: torch.dtype) -> GatheredWeight:
        """Wrap codes; the tensor reports `dtype`, and so does its gradient."""
        codes = quantized.q.codes
        whole: GatheredWeight = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=dtype, device=codes.device
        )
        whole.lowprec_quantized = quantized
        return whole

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape, dtype and how it was cast; the values are not the parameter's."""
        cast = self.lowprec_quantized.cast
        return f"GatheredWeight({tuple(self.shape)}, {self.dtype}, as {cast})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """What FSDP and autograd do to a parameter itself; nothing that reads its values."""
        if func.namespace == "lowprec":  # in a compiled model
            return _ran(func.name().partition("::")[2], *args)
        (whole, *_) = (one for one in tree_leaves((args, kwargs)) if isinstance(one, cls))
        if func in _SAME and (func is not aten.as_strided.default or tuple(args[1]) == whole.shape):
            return GatheredWeight(whole.lowprec_quantized, whole.dtype)
        if func in _NEW:
            like = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
            options = {"device": whole.device, **(kwargs or {})}
            return func(like, *args[1:], **options)
        raise UnsupportedError(
            f"{func} asked for the values of a weight that was gathered as "
            f"{whole.lowprec_quantized.cast} codes; only lowprec.Linear reads those. Leave its "
            "layer out of the recipe, or shard it with torch's own fully_shard"
        )


_SAME: Final = {
    aten.detach.default,
    aten.alias.default,
    aten.as_strided.default,
}
_NEW: Final = {aten.zeros_like.default, aten.empty_like.default, aten.new_zeros.default}
_KEEPING: Final = {
    aten.detach.default,
    aten.alias.default,
    aten.view.default,
    aten.as_strided.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.clone.default,
    aten._to_copy.default,
    aten._pin_memory.default,
    aten.new_zeros.default,
}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _ran(op: str, *args: Any) -> Any:
    """What the opaque op of that name does, outside of tracing; see lowprec.nn.opaque."""
    if op == "product":
        left, right, bias, at, key, where = args
        return live(key).run_now(Which.read(where), left, right, bias=bias, at=at)
    if op == "project":
        (x, weight), bias, at, key, where, _ = args
        y, kept = live(key).project_now(Which.read(where), x, weight, bias=bias, at=at)
        return [y, *traced().as_promised(kept, turned=bool(where[5]))]
    if op == "gradients":
        dy, weight, kept, at, key, where = args
        return live(key).gradients_now(Which.read(where), dy, weight, kept, at=at)
    raise UnsupportedError(
        f"a compiled {op} cannot read a weight that was gathered as codes; compile the model "
        "without this layer, or shard it with torch's own fully_shard"
    )

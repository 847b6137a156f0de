"""Embeddings that cross the network as codes: a recipe's choice for TorchRec's all-to-all.

FBGEMM's own codecs come through TorchRec's QCommsConfig. `mxfp8` and `mxfp4` are casts of this
library in the place of such a codec: 8.25 and 4.25 bits a value on any device, and a NaN arrives as
NaN, where the MX4 of FBGEMM 1.8 delivers a block of zeros.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

import torch

from lowprec import ops
from lowprec.errors import RecipeError, UnsupportedError
from lowprec.formats import Cast
from lowprec.recipe import Recipe
from lowprec.tensor import QuantizedTensor
from lowprec.transport import packed_rows, unpacked_rows

BLOCK: Final = 32
FP8_ROW: Final = 128
"""Values that share FBGEMM's FP8 scale and padding, 8 bytes: 8.5 bits a value."""

_OURS: Final = ("mxfp8", "mxfp4")
_TORCHREC: Final = "torchrec.distributed"


def qcomms_config(recipe: Recipe) -> Any:
    """TorchRec's QCommsConfig for a recipe whose embeddings travel as bf16, fp8 or mx4.

    Both directions get the same precision; FBGEMM's FP8 is E4M3 forward and E5M2 backward. Raises
    RecipeError for a recipe that says nothing of embeddings or chose a cast of this library (see
    `embedding_codecs`), UnsupportedError when TorchRec is missing.
    """
    chosen = recipe.transport.embeddings
    if chosen is None or chosen in _OURS:
        raise RecipeError(
            f"recipe {recipe.name}: embeddings = {chosen!r} is no precision of TorchRec's "
            "QCommsConfig; bf16, fp8 and mx4 are, and embedding_codecs takes them all"
        )
    return _qcomms(chosen)


def embedding_codecs(recipe: Recipe, device: torch.device | str) -> dict[str, Any] | None:
    """The `qcomm_codecs_registry` of TorchRec's sharders, or None: embeddings as they are.

    The recipe's `embeddings` holds for the all-to-all of pooled and of sequence embeddings; the
    reduce-scatter of row-wise sharding sums, so it runs in bfloat16. On a CPU, bf16 means float16:
    TorchRec has no other 16 bits there. Embedding dimensions that a rank sends have to be
    multiples of 32, for `fp8` of 128. Raises UnsupportedError when TorchRec is missing, and for
    `fp8` on a CPU.
    """
    chosen, device = recipe.transport.embeddings, torch.device(device)
    if chosen is None:
        return None
    if chosen == "fp8" and device.type == "cpu":
        raise UnsupportedError(
            f"recipe {recipe.name}: embeddings = 'fp8' is FBGEMM's FP8, which has no kernels for a "
            "CPU; 'mxfp8' takes as many bytes and runs everywhere"
        )
    types = _module("types")
    exchanges = [
        types.CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL,
        types.CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL,
    ]
    sums = [types.CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER]
    registry = _module("fbgemm_qcomm_codec").get_qcomm_codecs_registry
    half = "fp16" if device.type == "cpu" else "bf16"
    codecs: dict[str, Any] = registry(_qcomms(half), sums, device)
    if chosen not in _OURS:
        chosen = half if chosen == "bf16" else chosen
        return {**codecs, **registry(_qcomms(chosen), exchanges, device)}
    ours = types.QuantizedCommCodecs(BlockCodec(chosen), BlockCodec(chosen))
    return {**codecs, **{one.name: ours for one in exchanges}}


def _qcomms(chosen: str) -> Any:
    codec = _module("fbgemm_qcomm_codec")
    precision = codec.CommType(chosen)
    sizes = {"fp8": ("fp8_quantize_dim", FP8_ROW), "mx4": ("mx4_quantize_dim", BLOCK)}
    more = {}
    if chosen in sizes:
        name, size = sizes[chosen]
        more = {name: size, f"{name}_bwd": size}
    return codec.QCommsConfig(forward_precision=precision, backward_precision=precision, **more)


def _module(name: str) -> Any:
    try:
        return import_module(f"{_TORCHREC}.{name}")
    except ImportError as error:
        raise UnsupportedError(
            f"low-precision embeddings need TorchRec and FBGEMM ({error}): "
            "pip install 'lowprec[recsys]'"
        ) from error


class BlockCodec:
    """A cast in blocks of 32 values as a codec of TorchRec: each block is its codes and its scale.

    cast: `mxfp8` or `mxfp4`, with nearest rounding. Values are cast in the order in which they are
    sent, so that a rank's part may end after any block. Messages are uint8, what arrives is
    float32. A block with NaN or Inf arrives as NaN. Raises UnsupportedError where blocks and the
    parts of ranks do not fit, on every rank before anything is sent.
    """

    quantized_dtype = torch.uint8

    def __init__(self, cast: Cast | str) -> None:
        self.cast = Cast.parse(cast) if isinstance(cast, str) else cast
        fmt = self.cast.format
        if fmt.block != (1, BLOCK) or fmt.outer or fmt.scale != "e8m0" or self.cast.stochastic:
            raise UnsupportedError(f"{self.cast} is no cast of 32 values with nearest rounding")

    def encode(self, input_tensor: torch.Tensor, ctx: None = None) -> torch.Tensor:
        """Messages of all ranks, one after the other: [bytes], uint8."""
        self.calc_quantized_size(input_tensor.numel())
        q = ops.quantize(input_tensor.reshape(-1, BLOCK), self.cast)
        codes = packed_rows(q.codes, q.format.element.bits)
        return torch.cat((codes, q.scales), dim=1).reshape(-1)

    def decode(self, input_tensor: torch.Tensor, ctx: None = None) -> torch.Tensor:
        """The values of what arrived: [values], float32."""
        fmt = self.cast.format
        message = input_tensor.view(-1, self._bytes)
        codes = unpacked_rows(message[:, :-1], fmt.element.bits, BLOCK)
        q = QuantizedTensor(codes, message[:, -1:].contiguous(), fmt, -1)
        return ops.dequantize(q).reshape(-1)

    @property
    def _bytes(self) -> int:
        return BLOCK * self.cast.format.element.bits // 8 + 1

    def calc_quantized_size(self, input_len: int, ctx: None = None) -> int:
        """Bytes of `input_len` values."""
        if input_len % BLOCK:
            raise UnsupportedError(
                f"{self.cast} embeddings travel in blocks of {BLOCK} values, and {input_len} are "
                "none: make every embedding dimension a multiple of it"
            )
        return input_len // BLOCK * self._bytes

    def create_context(self) -> None:
        """Nothing has to be remembered from one call to the next."""

    def padded_size(
        self, input_tensor: torch.Tensor, dim_per_rank: list[int], my_rank: int, qcomm_ctx: None
    ) -> tuple[int, int]:
        """Width of pooled embeddings [B, D] and their padding, none; a vector is sent as it is."""
        if input_tensor.ndim == 1:
            return input_tensor.shape[0], 0
        # Known to all ranks, so that all of them raise.
        for dimension in dim_per_rank:
            self.calc_quantized_size(dimension)
        return input_tensor.shape[1], 0

"""set_step: tell a converted model where in training it is."""

from __future__ import annotations

import torch

from lowprec.errors import UnsupportedError
from lowprec.nn import AttentionProducts, Linear
from lowprec.nn.position import At


def set_step(
    model: torch.nn.Module, step: int, *, micro_batch: int = 0, data_rank: int = 0
) -> None:
    """Set the position in training that random bits and scheduled precisions follow.

    step: of the optimizer, from 0. micro_batch: the number of the backward pass within the step.
    data_rank: this process's place among those that share the batch by rows; with equal shares the
    random bits are those of one process with the whole batch. Call it before each forward pass;
    resuming, recomputing and accumulating then give the same bits. Without it a count of the
    forward calls of each layer is used. Raises UnsupportedError for anything but whole numbers
    from 0 to 2^32 - 1.
    """
    at = At(step, micro_batch, data_rank)
    for name, value in at._asdict().items():
        if type(value) is not int or not 0 <= value < 1 << 32:
            raise UnsupportedError(
                f"set_step: {name} must be a whole number from 0 to 2^32 - 1, not {value!r}"
            )
    for module in model.modules():
        if isinstance(module, Linear):
            module.lowprec_products.tell(at)
        elif "lowprec_attention" in module.__dict__:
            attention: AttentionProducts = module.__dict__["lowprec_attention"]
            attention.tell(at)

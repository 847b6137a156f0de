"""The float32 main gradient of a weight: wgrad adds to it, unrounded, in place of `.grad`.

As Megatron-LM and Transformer Engine name it, `weight.main_grad`. It is None until the first wgrad
stores there, as `.grad` is; setting it to None or to zeros starts a new sum. A tensor that is there
already (a buffer of Megatron's) is added to in place.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from lowprec.errors import UnsupportedError

_NAME: Final = "main_grad"
_ADDED: Final = "grad_added_to_main_grad"


def refusal(weight: torch.Tensor) -> str | None:
    """Why wgrad cannot be added to the main gradient that a weight has, or None."""
    main: Any = getattr(weight, _NAME, None)
    if main is None:
        return None
    if not isinstance(main, torch.Tensor):
        return f"its main_grad is a {type(main).__name__}, not a tensor or None"
    if (main.dtype, main.shape, main.device) == (torch.float32, weight.shape, weight.device):
        return None
    return (
        f"its main_grad is {main.dtype} {tuple(main.shape)} on {main.device}, which must be "
        f"float32 {tuple(weight.shape)} on {weight.device} as the weight; set it to None"
    )


def claim(weight: torch.Tensor) -> bool:
    """Give a weight a main gradient, None at first; False where it has one."""
    if hasattr(weight, _NAME):
        return False
    setattr(weight, _NAME, None)
    return True


def release(weight: torch.Tensor) -> None:
    """Take from a weight what `claim` gave it."""
    if hasattr(weight, _NAME):
        delattr(weight, _NAME)


def check(weight: torch.Tensor, layer: str) -> None:
    """Raise UnsupportedError where a main gradient would be lost, before anything is computed."""
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            f"layer {layer!r}: main_grad changes a tensor that torch.compile does not see; the "
            "layer runs uncompiled (a graph break), or apply without main_grad under fullgraph"
        )
    if not hasattr(weight, _NAME):
        raise UnsupportedError(
            f"layer {layer!r}: its weight is not the Parameter that got a main_grad: it was copied "
            "or replaced (then call lowprec.apply(model, plan, main_grad=True) again), or FSDP "
            "gathered it (then apply with main_grad=False: FSDP2 reduces gradients itself, in "
            "float32 under MixedPrecisionPolicy(reduce_dtype=torch.float32))"
        )
    if reason := refusal(weight):
        raise UnsupportedError(f"layer {layer!r}: {reason}")
    distributed: Any = torch.nn.parallel.DistributedDataParallel
    if getattr(distributed, "_active_ddp_module", None) is not None:
        raise UnsupportedError(
            f"layer {layer!r}: DistributedDataParallel averages .grad, which main_grad leaves "
            "empty, so ranks would drift apart; apply with main_grad=False, or all-reduce every "
            "main_grad yourself and call the model without DistributedDataParallel"
        )


def accumulate(weight: torch.Tensor, dw_NK: torch.Tensor) -> torch.Tensor | None:
    """Add dw, which nobody else holds, to the weight's main gradient; what autograd is handed.

    That is None, so `.grad` stays as it is. Where Megatron marks weights with
    `grad_added_to_main_grad` it is set, and autograd gets zeros, so that hooks run.
    """
    main: torch.Tensor | None = getattr(weight, _NAME)
    if main is None:
        setattr(weight, _NAME, dw_NK.float())
    else:
        main.add_(dw_NK)
    if not hasattr(weight, _ADDED):
        return None
    setattr(weight, _ADDED, True)
    return weight.new_zeros(()).expand(weight.shape)

"""Whether somebody watches a module, which must then run as the module it is."""

from __future__ import annotations

import torch
from torch.nn.modules import module as _module


def hooked(module: torch.nn.Module) -> bool:
    """Whether calling `module` runs a hook of its own, or one that is registered for every module.

    torch.nn.Module.__call__ asks for the same before it goes straight to forward.
    """
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or _module._global_forward_hooks
        or _module._global_forward_pre_hooks
        or _module._global_backward_hooks
        or _module._global_backward_pre_hooks
    )

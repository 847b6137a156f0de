"""What every process that trains does first: end with its parent, compute the same bits."""

from __future__ import annotations

import os
import threading
import time

import torch


def die_with(parent: int) -> None:
    """End this process soon after its parent: nobody is left to take what it makes."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def prepare(device: str) -> None:
    """One thread a run, so that the bits of a sum do not depend on the number of cores; on a GPU
    the deterministic kernels where torch has them.
    """
    torch.set_num_threads(1)
    if device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)

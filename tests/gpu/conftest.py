"""What tests on a GPU run under: contexts that exist on every thread."""

from __future__ import annotations

import warnings

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _backward_thread() -> None:
    """Run a product on the thread of the backward pass, which torch warns of the first time."""
    if torch.cuda.is_available():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x = torch.ones(16, 16, device="cuda", requires_grad=True)
            (x @ x).sum().backward()

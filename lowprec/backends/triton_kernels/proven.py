"""The casts whose kernels are proven, bitwise, on a GPU: a plan takes no others.

A cast enters this list when every test of it in tests/gpu/test_kernels_on_gpu.py and
test_fused_on_gpu.py passes on a machine with a GPU; `benchmarks/gpu_session.sh` runs them and
prints the list.
"""

from __future__ import annotations

from typing import Final

PROVEN: Final[frozenset[str]] = frozenset()
"""Casts by their text: "mxfp8", "mxfp8:floor", "mxfp4:sr"; fused with what comes before them as
"norm + mxfp8" and "rotation + mxfp4:sr"."""

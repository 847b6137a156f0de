"""The casts whose kernels are proven, bitwise, on a GPU: a plan takes no others.

A cast enters this list when every test of it in tests/gpu/test_kernels_on_gpu.py and
test_fused_on_gpu.py passes on a machine with a GPU; `benchmarks/gpu_session.sh` runs them and
prints the list.
"""

from __future__ import annotations

from typing import Final

PROVEN: Final[frozenset[str]] = frozenset(
    {
        "fp8_128x128",
        "fp8_1x128",
        "fp8_rowwise",
        "fp8_tensorwise",
        "gate + fp8_1x128",
        "gate + mxfp8",
        "gate + mxfp8_1x128",
        "mxfp4",
        "mxfp4:sr",
        "mxfp8",
        "mxfp8:sr",
        "mxfp8_128x128",
        "mxfp8_1x128",
        "mxfp8_32x32",
        "norm + fp8_128x128",
        "norm + fp8_1x128",
        "norm + mxfp8",
        "norm + mxfp8_128x128",
        "norm + mxfp8_32x32",
        "rotation + mxfp8",
    }
)
"""Casts by their text: "mxfp8", "mxfp8:floor", "mxfp4:sr"; fused with what comes before them as
"norm + mxfp8", "gate + mxfp8" and "rotation + mxfp8"."""

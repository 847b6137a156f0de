"""The casts whose kernels are proven, bitwise, on a GPU: a plan takes no others.

A cast enters this list when every test of it in tests/gpu/test_kernels_on_gpu.py and
test_fused_on_gpu.py passes on a machine with a GPU; `benchmarks/gpu_session.sh` runs them and
prints the list. Attention enters by its policy, after tests/gpu/test_attention_on_gpu.py and
test_attention_calls_on_gpu.py.
"""

from __future__ import annotations

from typing import Final

PROVEN: Final[frozenset[str]] = frozenset(
    {
        "attention bf16",
        "attention fp8_128x128 / e4m3*256 x fp8_128x128"
        " / bf16 x fp8_128x128 / bf16 / bf16 x fp8_128x128 / bf16 x fp8_128x128",
        "fp8_128x128",
        "fp8_128x128:sr",
        "fp8_1x128",
        "fp8_rowwise",
        "fp8_tensorwise",
        "gate + fp8_1x128",
        "gate + mxfp4",
        "gate + mxfp6_e2m3",
        "gate + mxfp6_e3m2",
        "gate + mxfp8",
        "gate + mxfp8_1x128",
        "gate + mxfp8_e5m2",
        "mxfp4",
        "mxfp4:sr",
        "mxfp4_32x32:sr",
        "mxfp6_e2m3:sr",
        "mxfp6_e2m3_32x32:sr",
        "mxfp6_e3m2:sr",
        "mxfp6_e3m2_32x32:sr",
        "mxfp8",
        "mxfp8:sr",
        "mxfp8_128x128",
        "mxfp8_128x128:sr",
        "mxfp8_1x128",
        "mxfp8_1x128:sr",
        "mxfp8_32x32",
        "mxfp8_32x32:sr",
        "mxfp8_e5m2:sr",
        "mxfp8_e5m2_32x32:sr",
        "norm + fp8_128x128",
        "norm + fp8_1x128",
        "norm + mxfp4",
        "norm + mxfp6_e2m3",
        "norm + mxfp6_e3m2",
        "norm + mxfp8",
        "norm + mxfp8_128x128",
        "norm + mxfp8_1x128",
        "norm + mxfp8_32x32",
        "norm + mxfp8_e5m2",
        "rotation + mxfp6_e2m3",
        "rotation + mxfp8",
        "rotation + mxfp8:sr",
        "values + fp8_128x128",
        "values + fp8_1x128",
        "values + fp8_tensorwise",
        "values + mxfp4",
        "values + mxfp4_32x32",
        "values + mxfp6_e2m3",
        "values + mxfp6_e2m3_32x32",
        "values + mxfp6_e3m2",
        "values + mxfp6_e3m2_32x32",
        "values + mxfp8",
        "values + mxfp8_128x128",
        "values + mxfp8_1x128",
        "values + mxfp8_32x32",
        "values + mxfp8_e5m2",
        "values + mxfp8_e5m2_32x32",
    }
)
"""Casts by their text: "mxfp8", "mxfp8:floor", "mxfp4:sr"; fused with what comes before them as
"norm + mxfp8", "gate + mxfp8" and "rotation + mxfp8"; "values + mxfp8" is the way back from codes
to values, and through the format in one pass."""

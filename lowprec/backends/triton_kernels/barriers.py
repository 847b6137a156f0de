# mypy: ignore-errors
"""The barrier of all threads of a partition, by the name that this Triton has for it."""

from triton.experimental.gluon import language as gl

# `barrier` since Triton 3.7.
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier

"""The errors that qualitygates raises for its users; each one ends a command with exit code 3.

GateError
 ├── ExperimentError   the experiment file or the folder it writes to is not usable
 ├── DataError         the workload's data cannot carry a gate
 └── RecordError       a run record is damaged, or two records do not form a pair
"""

from __future__ import annotations


class GateError(Exception):
    """Base of every error that qualitygates raises for its users."""


class ExperimentError(GateError):
    """The experiment file, or the folder that the gate writes to, is not usable."""


class DataError(GateError):
    """The data of a workload cannot carry a gate (labels, weights, columns, files)."""


class RecordError(GateError):
    """A run record is damaged, or records that should be compared do not belong together."""

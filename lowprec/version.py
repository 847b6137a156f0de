"""The version of lowprec, the same whether it is installed or used from its source folder."""

from __future__ import annotations

from typing import Final

__version__: Final = "0.1.0"

"""A plain text table: aligned columns, the last one wrapped."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 150


def render(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with a header; the last column wraps so that lines stay readable."""
    cells = [list(head), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head) - 1)]
    room = max(WIDTH - sum(widths) - 2 * len(widths), 30)
    lines = []
    for number, row in enumerate(cells):
        lead = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        parts = textwrap.wrap(row[-1], room) or [""]
        lines.append(f"{lead}  {parts[0]}".rstrip())
        lines += [" " * (len(lead) + 2) + part for part in parts[1:]]
        if number == 0:
            lines.append("-" * (sum(widths) + 2 * len(widths) + min(room, 40)))
    return lines

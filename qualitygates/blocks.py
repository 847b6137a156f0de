"""What a report is made of: sections of plain blocks; Markdown is made here, HTML in page.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

# A name of 10^5 letters must not make a page that nobody can open.
LONGEST: Final = 2000
_LONGEST_PRE: Final = 200_000
_SPACES: Final = "\n\t\xa0\u202f"


@dataclass(frozen=True)
class Text:
    """A paragraph; `tone` is "", "good", "bad" or "warn"."""

    text: str
    tone: str = ""


@dataclass(frozen=True)
class Bullets:
    """A list of sentences."""

    items: Sequence[str]


@dataclass(frozen=True)
class Cell:
    """A table cell; `drawing` is SVG of our own making, shown in HTML in place of the text."""

    text: str
    tone: str = ""
    drawing: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under a head; `align` has one letter a column: l, r or c.

    One that `stacks` shows its cells below each other on a narrow screen: nothing scrolls away.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    align: str
    stacks: bool = False


@dataclass(frozen=True)
class Facts:
    """Names with values, shown as a two-column list."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Pre:
    """Text whose columns matter."""

    text: str


@dataclass(frozen=True)
class Figure:
    """One plot as SVG, with its title and the sentence that says how to read it."""

    title: str
    svg: str
    note: str


@dataclass(frozen=True)
class Figures:
    """Plots side by side; Markdown points to the HTML page instead."""

    items: Sequence[Figure]


@dataclass(frozen=True)
class Fold:
    """Blocks that HTML shows on demand."""

    title: str
    blocks: Sequence[Block]


Block = Text | Bullets | Table | Facts | Pre | Figures | Fold


@dataclass(frozen=True)
class Section:
    """A titled run of blocks."""

    title: str
    blocks: Sequence[Block]


def to_markdown(title: str, sections: Sequence[Section]) -> str:
    """The report as GitHub-flavoured Markdown; everything that came from data is escaped."""
    parts = [f"# {escape(title)}"]
    for section in sections:
        parts.append(f"## {escape(section.title)}")
        parts += [_markdown(block) for block in section.blocks]
    return "\n\n".join(part for part in parts if part) + "\n"


def plain(text: object, *, longest: int = LONGEST) -> str:
    """Text in which every character can be seen and written as UTF-8.

    Control, bidirectional and other invisible characters and lone surrogates become their Python
    escapes; what is beyond `longest` characters is left out, and the text says so. What a damaged
    record holds in place of a text is shown as Python writes it.
    """
    if not isinstance(text, str):
        text = str(text)
    shown = text[:longest]
    if not shown.isprintable():
        shown = "".join(
            char
            if char.isprintable() or char in _SPACES
            else char.encode("unicode_escape").decode()
            for char in shown
        )
    return shown if len(text) <= longest else f"{shown} ... ({len(text) - longest} more characters)"


def plain_lines(text: str) -> str:
    """The same for text whose columns matter."""
    return plain(text, longest=_LONGEST_PRE)


def escape(text: str) -> str:
    """Text without a meaning of its own in Markdown (tables and inline HTML included)."""
    flat = " ".join(plain(text).split())
    return "".join(f"\\{char}" if char in "\\`*_<>|[]#&$~" else char for char in flat)


def _markdown(block: Block) -> str:
    match block:
        case Text(text):
            return escape(text)
        case Bullets(items):
            return "\n".join(f"- {escape(item)}" for item in items)
        case Table():
            return _markdown_table(block)
        case Facts(pairs):
            rows = [[name, value] for name, value in pairs]
            return _markdown_table(Table(["", ""], rows, "ll"))
        case Pre(text):
            return "\n".join(f"    {line}" for line in plain_lines(text).split("\n"))
        case Figures(items):
            titles = ", ".join(escape(item.title) for item in items)
            return f"Plots, in report.html: {titles}." if titles else ""
        case Fold(title, blocks):
            return "\n\n".join([f"### {escape(title)}", *map(_markdown, blocks)])


def _markdown_table(table: Table) -> str:
    rules = {"l": ":--", "r": "--:", "c": ":-:"}
    lines = [[escape(name) for name in table.head], [rules[letter] for letter in table.align]]
    for row in table.rows:
        lines.append([escape(one.text if isinstance(one, Cell) else one) for one in row])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

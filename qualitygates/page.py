"""The report as one HTML file: no script, no font, no image from anywhere else."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from .blocks import (
    Block,
    Bullets,
    Cell,
    Facts,
    Figures,
    Fold,
    Pre,
    Section,
    Table,
    Text,
    plain,
    plain_lines,
)

TONES: Final = {
    "ACCEPT": "good",
    "REJECT": "bad",
    "INCONCLUSIVE": "warn",
    "WARN": "warn",
    "OK": "good",
    "NOT_TESTABLE": "",
}

# A longer cell may break anywhere, so that one name does not set the width of the table.
_LONG: Final = 40
# No script runs and nothing is fetched, even if something had escaped the escaping.
_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)

_CSS: Final = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--fg:#1b2330;--muted:#5b6778;--line:#dfe3e9;
--good:#157347;--bad:#b42318;--warn:#9a5b00;--good-bg:#e3f4ea;--bad-bg:#fdeae8;--warn-bg:#fdf1dc;
--base:#2f6fb5;--cand:#d9660a;--null:#7b8797;--zone:#157347}
@media screen and (prefers-color-scheme:dark){:root{
--bg:#10151c;--card:#182029;--fg:#e4e9f0;--muted:#9aa7b8;
--line:#2d3846;--good:#5fd08f;--bad:#ff8a7a;--warn:#f2b950;--good-bg:#143322;--bad-bg:#411d1a;
--warn-bg:#3a2c10;--base:#79b3ee;--cand:#ffa04d;--null:#93a0b1;--zone:#5fd08f}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1080px;margin:0 auto;padding:20px 16px 64px}
header,section{background:var(--card);border:1px solid var(--line);border-radius:12px;
padding:20px 22px;margin:0 0 18px}
header{border-left:8px solid var(--tone)}
h1{font-size:1.05rem;margin:0 0 12px;color:var(--muted);font-weight:600;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:0 0 10px}
h3{font-size:.95rem;margin:0 0 4px}
p{margin:0 0 10px;overflow-wrap:anywhere}
a{color:inherit}
nav{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:.84rem;margin:0 0 18px;padding:0 4px;
color:var(--muted)}
ul{margin:0 0 10px;padding-left:1.2em}
li{margin:0 0 4px;overflow-wrap:anywhere}
.verdict{display:inline-block;font-size:1.7rem;font-weight:750;letter-spacing:.02em;line-height:1.2;
color:var(--tone);background:var(--tone-bg);border-radius:8px;padding:6px 16px;margin:0 0 10px}
.lead{font-size:1.08rem}
.good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}
p.good,p.bad,p.warn{border-radius:8px;padding:8px 12px}
p.good{background:var(--good-bg)}p.bad{background:var(--bad-bg)}p.warn{background:var(--warn-bg)}
td.good,td.bad,td.warn{font-weight:650;white-space:nowrap}
.scroll{overflow-x:auto;margin:0 0 12px;-webkit-overflow-scrolling:touch}
table{border-collapse:collapse;width:100%;font-size:.89rem;font-variant-numeric:tabular-nums}
th,td{padding:6px 10px;border-bottom:1px solid var(--line);vertical-align:middle}
th{color:var(--muted);font-weight:600;white-space:nowrap;vertical-align:bottom}
tbody tr:last-child td{border-bottom:0}
.scroll td.long{overflow-wrap:anywhere;white-space:normal;min-width:16em}
.l{text-align:left}.r{text-align:right;white-space:nowrap}.c{text-align:center}
dl{display:grid;grid-template-columns:fit-content(18em) minmax(0,1fr);gap:4px 18px;margin:0 0 12px;
font-size:.93rem}
dt,h2,h3,th,summary,figcaption{overflow-wrap:anywhere}
dt{color:var(--muted);min-width:9em}dd{margin:0;overflow-wrap:anywhere}
pre{overflow-x:auto;background:var(--bg);border:1px solid var(--line);border-radius:8px;
padding:12px 14px;margin:0 0 12px;
font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.figures{display:grid;gap:18px;margin:0 0 12px;
grid-template-columns:repeat(auto-fit,minmax(min(var(--least),100%),1fr))}
figure{margin:0;max-width:560px}
.strip{width:min(260px,30vw);height:auto;display:block}
figure svg{width:100%;height:auto;display:block}
figcaption{color:var(--muted);font-size:.84rem;line-height:1.4}
details{border-top:1px solid var(--line);padding:10px 0 0;margin:6px 0 4px}
summary{cursor:pointer;font-weight:600;margin:0 0 8px}
footer{color:var(--muted);font-size:.84rem;padding:0 4px}
@media (max-width:560px){main{padding:10px 8px 40px}header,section{padding:15px 14px}
th,td{padding:6px 7px}th{white-space:normal;overflow-wrap:break-word}td:first-child{min-width:7.5em}
.stacks thead{display:none}.stacks tr{display:block;border-bottom:1px solid var(--line);
padding:6px 0}.stacks tr:last-child{border-bottom:0}.stacks td{display:inline-block;border:0;
padding:1px 7px}.stacks td:first-child{color:var(--muted)}.stacks td:last-child{display:block;
min-width:0}
dl{grid-template-columns:minmax(0,1fr);gap:0}dd{margin:0 0 8px}}
@media (min-width:700px){td:first-child{min-width:10em}}
@media print{:root{color-scheme:light}body{background:#fff;font-size:11pt}main{max-width:none;
padding:0}nav{display:none}header,figure,tr,dl{break-inside:avoid}h2,h3,summary{break-after:avoid}
section,header{padding:12px 14px}.scroll,pre{overflow:visible}pre{white-space:pre-wrap;
overflow-wrap:anywhere}*{print-color-adjust:exact;-webkit-print-color-adjust:exact}
details::details-content{content-visibility:visible;block-size:auto}}
"""


def to_html(
    title: str, verdict: str, sections: Sequence[Section], *, data: str = "verdict.json"
) -> str:
    """The whole page; the first section becomes the header that carries the verdict, or another
    word in the tone of a warning. `data` is the file with the same content.
    """
    tone = TONES.get(verdict, "warn")
    top, *rest = sections
    body = "".join(
        f'<section id="part-{number}"><h2>{_safe(one.title)}</h2>{_blocks(one.blocks)}</section>'
        for number, one in enumerate(rest, start=1)
    )
    links = "".join(
        f'<a href="#part-{number}">{_safe(one.title)}</a>'
        for number, one in enumerate(rest, start=1)
    )
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{_safe(verdict)}: {_safe(title)}</title><style>{_CSS}</style></head><body><main>"
        f'<header style="--tone:var(--{tone});--tone-bg:var(--{tone}-bg)"><h1>{_safe(title)}</h1>'
        f'<div class="verdict">{_safe(verdict)}</div>{_blocks(top.blocks)}</header>'
        f'<nav aria-label="Sections">{links}</nav>{body}'
        f"<footer>The same content as text: report.md; as data: {_safe(data)}.</footer>"
        "</main></body></html>\n"
    )


def _safe(text: str) -> str:
    # A number stays on the line of its unit.
    return escape(plain(text)).replace(" %", "\xa0%")


def _blocks(blocks: Sequence[Block]) -> str:
    return "".join(map(_block, blocks))


def _block(block: Block) -> str:
    match block:
        case Text(text, tone):
            return f'<p class="{tone}">{_safe(text)}</p>'
        case Bullets(items):
            return "<ul>" + "".join(f"<li>{_safe(item)}</li>" for item in items) + "</ul>"
        case Table():
            return _table(block)
        case Facts(pairs):
            inside = "".join(f"<dt>{_safe(k)}</dt><dd>{_safe(v)}</dd>" for k, v in pairs)
            return f"<dl>{inside}</dl>"
        case Pre(text):
            return f'<pre tabindex="0">{escape(plain_lines(text))}</pre>'
        case Figures(items):
            inside = "".join(
                f"<figure><h3>{_safe(one.title)}</h3>{one.svg}"
                f"<figcaption>{_safe(one.note)}</figcaption></figure>"
                for one in items
            )
            # Four plots stand two by two, three in a row.
            least = 300 if len(items) == 3 else 400
            return f'<div class="figures" style="--least:{least}px">{inside}</div>'
        case Fold(title, blocks):
            return f"<details><summary>{_safe(title)}</summary>{_blocks(blocks)}</details>"


def _table(table: Table) -> str:
    head = "".join(
        f'<th class="{side}">{_safe(name)}</th>'
        for name, side in zip(table.head, table.align, strict=True)
    )
    rows = "".join(
        "<tr>"
        + "".join(_cell(one, side) for one, side in zip(row, table.align, strict=True))
        + "</tr>"
        for row in table.rows
    )
    stacks = ' class="stacks"' if table.stacks else ""
    return (
        f'<div class="scroll" tabindex="0"><table{stacks}><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _cell(cell: str | Cell, side: str) -> str:
    if isinstance(cell, str):
        cell = Cell(cell)
    long = "long" if len(cell.text) > _LONG else ""
    names = " ".join(filter(None, (side, cell.tone, long)))
    return f'<td class="{names}">{cell.drawing or _safe(cell.text)}</td>'


def strip(entry: Mapping[str, Any], *, label: str) -> str:
    """An interval against its margin as a small SVG: the shaded zone is where it may lie.

    `entry` has estimate, lower, upper, margin, verdict, and two_sided for a margin on either side.
    """
    width, height, middle = 260, 30, 15
    low, mid, high = (entry[key] / entry["margin"] for key in ("lower", "estimate", "upper"))
    reach = min(max(1.5, abs(low) * 1.1, abs(high) * 1.1), 6.0)

    def at(value: float) -> str:
        return f"{width / 2 + max(-reach, min(reach, value)) / reach * (width / 2 - 6):.1f}"

    left = at(-1) if entry.get("two_sided") else at(-reach)
    colour = f"var(--{TONES.get(entry['verdict'], '') or 'muted'})"
    edges = [1, -1] if entry.get("two_sided") else [1]
    # An arrow instead of a point for an estimate that is off the scale.
    point = f'<circle cx="{at(mid)}" cy="{middle}" r="5" style="fill:{colour}"/>'
    if abs(mid) > reach:
        tip, foot = (width, width - 13) if mid > 0 else (0, 13)
        point = f'<path d="M{foot} 7L{tip} {middle}L{foot} 23Z" style="fill:{colour}"/>'
    lines = "".join(_line(at(edge), 3, height - 3, "--fg", dash="") for edge in edges)
    zone = f"{float(at(1)) - float(left):.1f}"
    return (
        f'<svg class="strip" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{_safe(label)}"><rect x="{left}" y="3" width="{zone}" height="{height - 6}" '
        f'style="fill:var(--zone);opacity:.13"/>'
        f"{_line(at(0), 3, height - 3, '--muted', dash='2 3')}{lines}"
        f'<line x1="{at(low)}" x2="{at(high)}" y1="{middle}" y2="{middle}" '
        f'style="stroke:{colour};stroke-width:3.5;stroke-linecap:round"/>{point}</svg>'
    )


def _line(x: str, top: int, bottom: int, colour: str, *, dash: str) -> str:
    return (
        f'<line x1="{x}" x2="{x}" y1="{top}" y2="{bottom}" '
        f'style="stroke:var({colour});stroke-width:1.3;stroke-dasharray:{dash or "none"}"/>'
    )


def embed(svg: str, *, prefix: str, colours: Mapping[str, str]) -> str:
    """A stand-alone SVG made fit for the page: theme colours, ids of its own, nothing around it."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(r' xmlns(:\w+)?="[^"]*"', "", body)
    body = re.sub(r' id="([^"]*)"', rf' id="{prefix}\1"', body)
    body = body.replace("url(#", f"url(#{prefix}").replace('href="#', f'href="#{prefix}')
    for colour, variable in colours.items():
        body = body.replace(colour, f"var({variable})")
    return body.strip()

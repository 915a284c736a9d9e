"""Write a document as HTML: text that can be read without JavaScript, the data as JSON, and the code of the charts.

No text of a trace or a finding becomes markup: the body is escaped, the JSON has no character that could end its
element, and the content security policy allows only the two scripts of the page.
Leaves out: the content (`replay.py`, `page_choice.py`) and the look of the charts (`assets/`).
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from ..document import VERDICTS, Document, Listing

ASSETS = files(__package__) / "assets"
# JSON has these characters only in strings, where an escape means the same.
ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&"}
# Section of the page -> the field of the data that it draws, and its script.
SECTIONS = {"charts": ("runs", "events.js"), "plots": ("plots", "plots.js")}


def write_page(page: Document) -> bytes:
    """The whole file. A lone surrogate has no UTF-8 and is written as its number."""
    library = (ASSETS / "echarts.js.gz").read_bytes()
    drawn = {section: name for section, (what, name) in SECTIONS.items() if page.charts.get(what)}
    style, script = _asset("page.css"), "".join(_asset(name) for name in ("shared.js", *drawn.values()))
    allowed = " ".join(_hashed(code) for code in (script.encode(), gzip.decompress(library)))
    word = page.word or VERDICTS[page.exit][0]
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
    text = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(f"{word}: {page.name}")}</title>
<style>{style}</style>
</head>
<body>
<header class="{page.exit.name.lower()}">
<h1><span class="verdict">{escape(word)}</span> {escape(page.name)}</h1>
{"".join(f"<p>{escape(run)}</p>" for run in page.summary)}
<p class="claim">{escape(page.claim)}</p>
</header>
<main>
{"".join(f'<pre class="message">{escape(message)}</pre>' for message in page.messages)}
{_made(page.made)}
{"".join(map(_section, page.tables))}
{"".join(f'<section id="{section}" hidden></section>' for section in drawn)}
<noscript><p class="quiet">The charts need JavaScript; all the rest of this page is text.</p></noscript>
{"".join(map(_section, page.more))}
{"".join(f'<p class="quiet">{escape(note)}</p>' for note in page.notes)}
{_folded(page.terminal)}
</main>
<footer>Charts: Apache ECharts, zrender, d3, tslib. Their licences are in this file, before their code.</footer>
<script type="application/json" id="data">{_json(page.charts)}</script>
<script type="application/gzip" id="library">{base64.b64encode(library).decode()}</script>
<script>{script}</script>
</body>
</html>
"""
    return text.encode("utf-8", "backslashreplace")


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _made(made: Mapping[str, Any]) -> str:
    """The command that makes the result again, and the machine that made it."""
    if not made:
        return ""
    machine = ", ".join(f"{name} {value}" for name, value in (made.get("machine") or {}).items() if value)
    when = " ".join(filter(None, (made.get("date"), f"commit {made['commit']}" if made.get("commit") else "")))
    return (f'<section class="made"><pre>{escape(str(made.get("command", "")))}</pre>'
            f'<p class="quiet">{escape(when)}; {escape(machine)}</p></section>')  # fmt: skip


def _folded(terminal: str) -> str:
    said = f"<details><summary>Output on the terminal</summary><pre>{escape(terminal)}</pre></details>"
    return said if terminal else ""


def _section(table: Listing) -> str:
    if not table.rows:
        return ""
    heads = "".join(f"<th>{escape(head)}</th>" for head in table.heads)
    rows = "\n".join(
        f'<tr{" class=over" * (number in table.bad)}{_group(table, number)}>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for number, row in enumerate(table.rows))
    return (f'<section><h2>{escape(table.title)}</h2>\n<div class="wide"><table><thead><tr>{heads}</tr></thead>\n'
            f"<tbody>{rows}</tbody></table></div>\n</section>\n")  # fmt: skip


def _group(table: Listing, row: int) -> str:
    return f' data-group="{escape(table.groups[row])}"' if table.groups else ""


def _json(data: Any) -> str:
    return json.dumps(data, separators=(",", ":")).translate(ESCAPES)


def _hashed(code: bytes) -> str:
    """The source expression of a script in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(code).digest()).decode()}'"

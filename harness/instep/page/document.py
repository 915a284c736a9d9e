"""A page as HTML: everything that must be read without JavaScript as text, the data as JSON, the charts' code.

No text of a trace or a finding becomes markup: what stands in the body is escaped, in the JSON no character is left
that could end its element, and a policy in the head lets the browser run the page's own two scripts and nothing else.
Leaves out: what stands on the page (`replay.py`), and how the charts look (`assets/page.js`).
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec

from ..report.terminal import VERDICTS
from ..verdict import Exit

ASSETS = files(__package__) / "assets"
# In JSON these stand only within strings, where an escape means the same.
ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


class Listing(NamedTuple):
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Page:
    """What a page says.

    claim     the sentence that the trace proves; summary: what every run came to, in a sentence
    messages  the message of every run that diverged, which ends in its command
    tiers     how much was compared; terminal: all that the command prints
    charts    the data of the charts: the timeline, and the runs with their findings
    """

    name: str
    claim: str
    exit: Exit
    summary: Sequence[str]
    messages: Sequence[str]
    tiers: Listing
    terminal: str
    charts: Mapping[str, Any]


def document(page: Page) -> str:
    """The whole file."""
    library = (ASSETS / "echarts.js.gz").read_bytes()
    style, script = ((ASSETS / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    allowed = " ".join(_hashed(code) for code in (script.encode(), gzip.decompress(library)))
    word, _ = VERDICTS[page.exit]
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
    return f"""<!DOCTYPE html>
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
<section id="charts" hidden></section>
<noscript><p class="quiet">The charts need JavaScript; everything else stands on this page as text.</p></noscript>
{_findings(page.charts)}
<section><h2>How much was compared</h2>
{_table(page.tiers)}
</section>
<details><summary>All that the terminal says</summary><pre>{escape(page.terminal)}</pre></details>
</main>
<footer>Charts: Apache ECharts, zrender, d3, tslib. Their licences stand in this file, before their code.</footer>
<script type="application/json" id="data">{_json(page.charts)}</script>
<script type="application/gzip" id="library">{base64.b64encode(library).decode()}</script>
<script>{script}</script>
</body>
</html>
"""


def _findings(charts: Mapping[str, Any]) -> str:
    """Every finding that is listed, with its command."""
    rows = [
        (run["name"], found["where"], found["says"], found["measured"], found["command"])
        for run in charts["runs"] for found in run["findings"]
    ]
    heads = ("run", "where", "what it is", "measured", "seen again with")
    return f"<section><h2>Findings</h2>\n{_table(Listing(heads, rows))}\n</section>" if rows else ""


def _table(table: Listing) -> str:
    heads = "".join(f"<th>{escape(head)}</th>" for head in table.heads)
    rows = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead>\n<tbody>{rows}</tbody></table></div>'


def _json(data: Any) -> str:
    return msgspec.json.encode(data).decode().translate(ESCAPES)


def _hashed(code: bytes) -> str:
    """A script as a policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(code).digest()).decode()}'"

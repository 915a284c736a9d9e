"""Write a document as HTML: text that can be read without JavaScript, the data as JSON, and the code of the charts.

No text of a trace or a finding becomes markup: jinja2 escapes the body (`assets/page.html`), the JSON has no character
that could end its element, and the content security policy allows only the two scripts of the page.
Leaves out: the content (`document.py`, `replay.py`) and the look of the charts (`assets/`).
"""

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment

from instep_reference.contract.errors import BadInput

from .. import result
from ..document import VERDICTS, Document, document_of

ASSETS = files(__package__) / "assets"
# JSON has these characters only in strings, where an escape means the same.
ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&"}
# Section of the page -> the field of the data that it draws, and its script.
SECTIONS = {"charts": ("runs", "events.js"), "plots": ("plots", "plots.js")}


def page_of(
    found: Mapping[str, Any], charts: Mapping[str, Any] | None = None, document: Document | None = None
) -> bytes:
    """The page of a result's data.  charts: charts of events;  document: that of the result, if it has one by now"""
    made = document or document_of(found)
    return write_page(replace(made, charts={**made.charts, **(charts or {})}, made=found))


def page_of_file(path: Path) -> bytes:
    """The page of a result file: that of its command, without charts of events."""
    found = result.read(path)
    try:
        return page_of(found)
    except (ArithmeticError, AttributeError, ImportError, LookupError, RecursionError, TypeError, ValueError) as error:
        said = f"{type(error).__name__}: {error}"
        raise BadInput(str(path), found=f"a damaged result ({said})",
                       expected="a file as --json writes it, unchanged") from error


def write_page(page: Document) -> bytes:
    """The whole file. A lone surrogate has no UTF-8 and is written as its number."""
    library = (ASSETS / "echarts.js.gz").read_bytes()
    drawn = {section: name for section, (what, name) in SECTIONS.items() if page.charts.get(what)}
    style, script = _asset("page.css"), "".join(_asset(name) for name in ("shared.js", *drawn.values()))
    allowed = " ".join(_hashed(code) for code in (script.encode(), gzip.decompress(library)))
    word = page.word or VERDICTS[page.exit][0]
    frame = Environment(autoescape=True, trim_blocks=True).from_string(_asset("page.html"))
    text = frame.render(
        page=page, word=word, allowed=allowed, style=style, script=script, drawn=drawn, data=_json(page.charts),
        library=base64.b64encode(library).decode(),
    )
    return text.encode("utf-8", "backslashreplace")


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _json(data: Any) -> str:
    return json.dumps(data, separators=(",", ":")).translate(ESCAPES)


def _hashed(code: bytes) -> str:
    """The source expression of a script in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(code).digest()).decode()}'"

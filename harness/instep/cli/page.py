"""`instep page`: a result file as a page to look at.

Leaves out: what stands on it (`instep.page.family`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .finish import must_be_free


def page(
    result: Annotated[Path, typer.Argument(help="A result, as --json writes it.")],
    html: Annotated[Path, typer.Option(help="Where the page is written.")],
) -> None:
    """Make a page of a result file; exit 0: it is written, whatever the result says."""
    from ..atomic_write import write_atomically
    from ..page.family import page_of_file

    must_be_free((html,), result)
    write_atomically({html: page_of_file(result)})

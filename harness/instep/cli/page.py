"""`instep page`: make an HTML page of a result file.

Leaves out: its contents (`instep.report.document`).
"""

from pathlib import Path
from typing import Annotated

import typer

from ..atomic_write import write_atomically
from .finish_with_result import Files


def page(
    result: Annotated[Path, typer.Argument(help="A result, as --json writes it.")],
    html: Annotated[Path, typer.Option(help="The page to write.")],
) -> None:
    """Make a page of a result file; exit 0: it is written, whatever the result is."""
    from ..report.html.write_page import page_of_file

    Files(html=html).must_be_free(result)
    write_atomically({html: page_of_file(result)})

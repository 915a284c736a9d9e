"""`instep fixtures`: write a trained model, traces and an example suite to a folder.

Leaves out: their source (`instep.bundled`).
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer


def fixtures(
    folder: Annotated[Path, typer.Argument(help="A new folder, or an empty one.", metavar="DIR")],
) -> None:
    """Write a small trained model, traces and an example suite, to start from."""
    from rich.console import Console

    from instep_reference.contract.errors import BadInput

    from ..atomic_write import write_atomically
    from ..bundled import CARRIED
    from ..bundled import fixtures as carried
    from ..report.tables import say

    try:
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise BadInput("DIR", found=f"{folder}: {error.strerror}", expected="a folder that can be read") from None
    if taken:
        raise BadInput("DIR", found=f"{folder}, where something is", expected="a new folder, or an empty one")
    source, files = carried(), dict[Path, bytes]()
    for name in CARRIED:
        inside = sorted((source / name).rglob("*")) if (source / name).is_dir() else [source / name]
        for file in inside:
            if file.is_file() and "__pycache__" not in file.parts:
                place = file.relative_to(source)
                if place.parts[0] == "example":  # the suite is at the top, where pytest runs
                    place = place.relative_to("example")
                files[folder / place] = file.read_bytes()
    for parent in sorted({file.parent for file in files}):
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput("DIR", found=f"{parent}: {error.strerror}", expected="a folder that can be made") from None
    write_atomically(files)
    console, typed = Console(), shlex.quote(str(folder))
    say(console, f"{len(files)} files in {folder}. Then:")
    say(console, f"  cd {typed} && pytest                        # the example suite: mine.py in two traces")
    say(console, f"  instep replay {typed}/traces/adaptive.jsonl --ops plain")

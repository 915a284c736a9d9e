"""Files that are written whole or not at all, however the writing ends.

Leaves out: what stands in them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from instep_reference.contract.errors import BadInput


def write_whole(files: Mapping[Path, bytes]) -> None:
    """Write every file aside first, beside the first one; then put all in their places, in the order given."""
    for path in files:
        writable(path)
    folder = next(iter(files)).parent
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".whole-") as aside:
            written = [(Path(aside, str(number)), path) for number, path in enumerate(files)]
            for temporary, path in written:
                temporary.write_bytes(files[path])
            for temporary, path in written:
                os.replace(temporary, path)
    except OSError as error:
        raise BadInput(str(folder), found=error.strerror, expected="a folder that can be written") from None


def writable(path: Path, *others: Path | None) -> None:
    """Refuse a place where no file can be put: asked before work is done, and again before it is written.

    others: what the same command reads, or writes elsewhere; of a trace, the file of its tensors is meant, too.
    """
    for other in filter(None, others):
        for taken in (other, other.parent / f"{other.name.removesuffix('.jsonl')}.safetensors"):
            if path.resolve() == taken.resolve() or (path.exists() and taken.exists() and path.samefile(taken)):
                raise BadInput(str(path), found="a file that this command uses otherwise", expected="a file of its own")
    if path.is_dir():
        raise BadInput(str(path), found="a folder", expected="the name of a file")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        found = "a folder that cannot be written" if path.parent.is_dir() else "no such folder"
        raise BadInput(str(path.parent), found=found, expected="a folder that can be written")

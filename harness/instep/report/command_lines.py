"""Command lines: the command that the user typed, and the command that reproduces a finding.

Leaves out: which finding, and which part of the trace it needs (`divergence_message.py`,
`campaign/relations/result.py`).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..setting import Setting

# Options that name an output file or folder.
PLACES = (
    "--baselines", "--farm", "--html", "--json", "--out", "--picture", "--plots", "--sarif", "--save-tensors",
    "--trace", "--trail",
)  # fmt: skip


def typed(argv: Sequence[str]) -> str:
    """The command as the user typed it, without the options that name output files."""
    script, places = Path("instep" if argv[0] == "-c" else argv[0]), iter(argv[1:])  # -c: planted
    own = script.name != "__main__.py" or script.parent.name == "instep"
    words = [script.name.replace("__main__.py", "instep")] if own else ["python", "-m", script.parent.name]
    for word in places:
        if word in PLACES:
            next(places, None)
        elif not word.startswith(tuple(f"{place}=" for place in PLACES)):
            words.append(word)
    return shlex.join(words)


def command(
    words: Iterable[object], setting: Setting, *, always: Collection[str] = (), more: Iterable[object] = ()
) -> str:
    """A command line, quoted for a shell: `words`, the options of `setting` that are not defaults, then `more`.

    words: include the op set. always: fields of the setting that are written even with their default.
    """
    _, _, *options = setting.words(*always)
    return shlex.join(map(str, (*words, *options, *more)))


def near(path: Path) -> str:
    """The path relative to the working directory if it is inside that directory, or else unchanged."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative

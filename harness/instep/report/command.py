"""Command lines: the one that was typed, and the one that shows a finding again.

Leaves out: the choice of the finding, and of the part of the trace that it needs (`words.py`, `relations/render.py`).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..replay.setting import Setting

# Options that say where something is written.
PLACES = (
    "--baselines", "--html", "--json", "--out", "--picture", "--plots", "--sarif", "--save-tensors", "--trace",
    "--trail",
)  # fmt: skip


def typed(argv: Sequence[str]) -> str:
    """The command as it was typed, without the options for the places of its results."""
    script, places = Path("instep" if argv[0] == "-c" else argv[0]), iter(argv[1:])  # -c: a run of `faults/plant.py`
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
    """`words`, the options of `setting` that are not the defaults, and more words; quoted for a shell.

    words   the op set is among them;  always: fields of the setting that are written even if they are the defaults
    """
    _, _, *options = setting.words(*always)
    return shlex.join(map(str, (*words, *options, *more)))


def near(path: Path) -> str:
    """The path relative to the working directory if it is below it, otherwise as it is."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative

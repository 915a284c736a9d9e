"""A command as one types it: the one that was typed, and the one that shows a finding again.

Leaves out: which finding, and what of the trace is needed for it (`words.py`, `relations/render.py`).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..replay.setting import Setting

PLACES = ("--json", "--out", "--picture", "--trail", "--trace")  # options that say where something is written


def typed(argv: Sequence[str]) -> str:
    """The command as it was typed, but for where its results go."""
    words, places = [Path(argv[0]).name.replace("__main__.py", "instep")], iter(argv[1:])
    for word in places:
        if word in PLACES:
            next(places, None)
        elif not word.startswith(tuple(f"{place}=" for place in PLACES)):
            words.append(word)
    return shlex.join(words)


def command(
    words: Iterable[object], setting: Setting, *, always: Collection[str] = (), more: Iterable[object] = ()
) -> str:
    """These words, the options in which the setting is not the usual one, and more words, quoted for a shell.

    words   with the op set among them;  always: fields of the setting that are written although they are the usual ones
    """
    _, _, *options = setting.words(*always)
    return shlex.join(map(str, (*words, *options, *more)))


def near(path: Path) -> str:
    """The path as one would type it here, when it is below the working directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative

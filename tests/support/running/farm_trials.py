"""Trials of a farm that run nothing, so that tests of claims and results are quick.

Leaves out: the process of a real trial (`instep.campaign.farm.run_trial`).
"""

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from instep.campaign.farm import Ended

SOURCE = "0123456789abcdef"


def ended(number: int = 0, code: int = 0, **more: object) -> Ended:
    """The end of a trial that found this number."""
    return Ended(code, json.dumps({"exit": code, "found": number, **more}).encode(), "", SOURCE)


def run(words: Sequence[str], more: Sequence[str] = ()) -> Ended:
    """`toy NUMBER`: a result with this number and the process that made it."""
    return ended(int(words[1]), machine=os.getpid())


def killed_once(words: Sequence[str], more: Sequence[str] = ()) -> Ended:
    """`toy NUMBER FOLDER`: the first process of number 1 dies, as by the system's out-of-memory killer."""
    died = Path(words[2], "died")
    if words[1] == "1" and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return run(words)

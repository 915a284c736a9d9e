"""Artifacts of a test run: properties for JUnit, and a folder with page, result, trace and tensors.

Leaves out: when they are written (`instep.plugin`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...atomic_write import folder_for, write_atomically
from ...trace.file import Trace, beside
from .. import outcome_data
from ..document import VERDICTS, used
from ..finding_tensors import files, for_a_file

if TYPE_CHECKING:
    from ...run.replay import Outcome

DIGEST = 8  # digits of the digest in the name of a test's folder
VERDICT, USED, ELEMENTS = "instep_verdict", "instep_used", "instep_elements"


def properties(outcome: Outcome) -> list[tuple[str, str]]:
    """The verdict, the compared numbers and the largest used part of an allowance, in all and per tier."""
    name, totals = outcome.plan.setting.name, outcome_data.tiers(outcome)
    said = [(f"{VERDICT}[{name}]", VERDICTS[outcome.verdict.exit][0])]
    said += [(f"{ELEMENTS}[{name}]", str(outcome.verdict.elements))]
    most = outcome_data.most_used([one for one in outcome.verdict.compared if one.tier not in outcome_data.EXACT])
    said += [(f"{USED}[{name}]", used(most))] if most is not None else []
    return said + [
        (f"instep_{total.tier.value}[{name}]", f"{total.elements} numbers, {used(total.used)} used")
        for total in totals
    ]


def write(outcomes: Sequence[Outcome], trace: Trace, message: str, folder: Path) -> None:
    """Write page, result, message, trace and tensors into the folder."""
    from .replay import page_of

    for place in (folder, folder / "tensors"):
        folder_for(place, "--instep-out")
    outcome_data.of(outcomes).write(folder / "result.json")
    there = {folder / file.name: file.read_bytes() for file in (trace.path, beside(trace.path)) if file.is_file()}
    write_atomically({
        **there, folder / "message.txt": f"{message}\n".encode(),
        folder / "page.html": page_of(outcomes, trace), **files(outcomes, folder / "tensors"),
    })  # fmt: skip


def folder_of(node: str, out: Path, number: int = 0) -> Path:
    """The folder of a test, with a unique name that every file system accepts.

    The digest distinguishes tests whose names differ only in a replaced character, in case or after the cut.
    number: how many folders the test has already.
    """
    parts = [for_a_file(node), hashlib.sha256(node.encode()).hexdigest()[:DIGEST], *[str(number + 1)] * bool(number)]
    return out / "-".join(filter(None, parts))

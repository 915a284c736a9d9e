"""Proposers of external drafts (`--drafter`): the built-in n-gram look-up, or any callable.

A proposer runs on the host between rounds, on all tokens of the request, so the driver waits for the tokens of the
round before. With overlapped rounds the driver does not wait, and the proposer is one round late: it continues the text
as if all drafts in flight were accepted. Leaves out: how an engine uses the drafts.
"""

from collections.abc import Sequence

from instep_reference.contract.drafters import EXTERNAL, MODES
from instep_reference.contract.errors import BadInput

from ..adapters import named
from ..trace.event_scheduler import Propose
from ..trace.ngram_tree import followers

GROUP = "instep.proposers"  # entry point group of proposers in other packages
LONGEST = 3  # tokens that are looked up; if they did not occur before, two are


def ngram(text: Sequence[int], count: int) -> list[int]:
    """Draft the tokens that followed the last ones earlier in the text; without an earlier occurrence, draft none."""
    drafts = list[int]()
    for _ in range(count):
        so_far = (*text, *drafts)
        found = next((token for size in (LONGEST, LONGEST - 1) for token in followers(so_far, size)), None)
        if found is None:
            return []
        drafts.append(found)
    return drafts


OURS: dict[str, Propose] = {"ngram": ngram}
NAMES = (*MODES, *OURS)  # the names that `--drafter` accepts


def proposer(name: str) -> Propose | None:
    """The proposer with this name; None if the engine drafts itself or drafts are supplied."""
    if name in MODES:
        return None
    found = OURS[name] if name in OURS else named(name, field="--drafter", group=GROUP, known=NAMES)
    if not callable(found):
        expected = "a callable: (tokens, how many) -> drafts"
        raise BadInput("--drafter", found=f"{name}, a {type(found).__name__}", expected=expected)

    def asked(text: Sequence[int], count: int) -> tuple[int, ...]:
        """Call the proposer and require `count` drafts or none."""
        try:
            drafts = tuple(int(token) for token in found(text, count))
        except Exception as error:  # foreign code may raise anything
            raise BadInput("--drafter", found=f"{name} raised {type(error).__name__}: {error}",
                           expected=f"{count} drafts, or none") from None  # fmt: skip
        if len(drafts) not in (0, count):
            raise BadInput("--drafter", found=f"{len(drafts)} drafts by {name}", expected=f"{count}, or none")
        return drafts

    return asked


def mode_of(name: str) -> str:
    """The engine's draft mode: its own, or external for a proposer."""
    return name if name in MODES else EXTERNAL

"""Who proposes drafts where an engine is handed them (`--drafter`): an n-gram look-up that ships, or any callable.

A proposer runs on the host, between the rounds, on all tokens that the request has so far: it is not a round late, and
whoever leads the engine waits for the tokens of the round before. Where rounds overlap nobody waits, and it is one
round late: it is asked for what follows if all drafts in flight are accepted. Leaves out: what an engine does with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from instep_reference.contract.drafters import EXTERNAL, MODES
from instep_reference.contract.errors import BadInput

from .adapters import named
from .trace.tree_picks import followers

# (all tokens of a request, its root last; how many drafts) -> so many drafts, or none: then it decodes without drafts
Propose = Callable[[Sequence[int], int], Sequence[int]]

GROUP = "instep.proposers"  # the entry point group under which a package offers one
LONGEST = 3  # tokens that are looked up; where they did not occur before, one less, but never less than two


def ngram(text: Sequence[int], count: int) -> list[int]:
    """What followed the last tokens earlier in the text, which grows by each draft; nothing where they are new."""
    drafts = list[int]()
    for _ in range(count):
        so_far = (*text, *drafts)
        found = next((token for size in (LONGEST, LONGEST - 1) for token in followers(so_far, size)), None)
        if found is None:
            return []
        drafts.append(found)
    return drafts


OURS: dict[str, Propose] = {"ngram": ngram}
NAMES = (*MODES, *OURS)  # that `--drafter` knows


def proposer(name: str) -> Propose | None:
    """Who is asked for drafts under this name; None: the engine's own head, or nobody."""
    if name in MODES:
        return None
    found = OURS[name] if name in OURS else named(name, field="--drafter", group=GROUP, known=NAMES)
    if not callable(found):
        expected = "a callable: (tokens, how many) -> drafts"
        raise BadInput("--drafter", found=f"{name}, a {type(found).__name__}", expected=expected)

    def asked(text: Sequence[int], count: int) -> tuple[int, ...]:
        """As many as were asked for, or none."""
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
    """How the engine drafts: by a mode of its own, or handed what somebody proposes."""
    return name if name in MODES else EXTERNAL

"""The history of a replayed trace: accepted lengths, step counts over time, and the texts.

All of it comes from the trace, so it is the same for every side. Leaves out: how it is printed (`instep.report`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from instep_reference.contract.engine import AnyEvent, Commit, SetNumSteps
from instep_reference.contract.event_facts import committed_paths

from ..trace.header import Header
from ..trace.request_table import RequestTable

BYTES = 256  # a vocabulary of this size is bytes


def printable(text: str) -> str:
    """The text in one line for a terminal, with escaped characters that cannot be printed."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


@dataclass(frozen=True)
class Text:
    """The prompt and the generated tokens of one request, as text as far as possible."""

    request: str
    prompt: tuple[int, ...]
    said: tuple[int, ...]
    vocab: int

    def spelled(self, tokens: tuple[int, ...]) -> str:
        """Bytes as text with escaped control characters; the tokens themselves for any other vocabulary."""
        if self.vocab != BYTES:
            return " ".join(map(str, tokens))
        return printable(bytes(tokens).decode("utf-8", errors="replace"))


@dataclass(frozen=True)
class History:
    """The accepted counts, step counts and texts of a run.

    accepted  (event, request -> accept_lens) of every commit
    steps     (event, num_steps) of every change; the first count is at event -1
    """

    accepted: tuple[tuple[int, dict[str, int]], ...]
    steps: tuple[tuple[int, int], ...]
    texts: tuple[Text, ...]

    @classmethod
    def of(cls, header: Header, events: Sequence[AnyEvent], table: RequestTable, *others: RequestTable) -> "History":
        """The history of the events that ran. table: the requests after them; others: of the other engine.

        A request that moved has its text from the engine where it has the most tokens.
        """
        accepted = tuple(
            (index, dict(zip(event.requests, (len(path.nodes) + 1 for path in committed_paths(event)), strict=True)))
            for index, event in enumerate(events)
            if isinstance(event, Commit) and event.accepted is not None
        )
        steps = [(-1, header.num_steps)]
        steps += [(index, event.num_steps) for index, event in enumerate(events) if isinstance(event, SetNumSteps)]
        steps = [one for one, before in zip(steps, [(-1, -1), *steps], strict=False) if one[1] != before[1]]
        standings = [*table.ended, *table.live.values()]
        for other in others:
            moved = {one.request: one for one in (*other.ended, *other.live.values())}
            standings = [one for one in standings if len(moved.get(one.request, one).said) <= len(one.said)]
            standings += [one for name, one in moved.items() if name not in {each.request for each in standings}]
        texts = tuple(Text(s.request, s.prompt, s.said, header.checkpoint.vocab) for s in standings)
        return cls(accepted, tuple(steps), texts)

    @property
    def mean_accepted_drafts(self) -> float:
        """The mean over all verified windows; 0 if there are none."""
        drafts = [length - 1 for _, lengths in self.accepted for length in lengths.values()]
        return sum(drafts) / len(drafts) if drafts else 0.0

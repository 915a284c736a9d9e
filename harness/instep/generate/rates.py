"""Tokens per second, accepted lengths and step counts of a decoding.

Leaves out: correctness. `text_check.py` decides that, and without its verdict no figure of this file is shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from instep_reference.contract import engine as e

from .decode import Decoded


@dataclass(frozen=True)
class Round:
    """One step of the batch: draft, forward, commit; or a forward of plain decoding.

    tokens    what the requests got from it, within their limits, and accepted: drafts per verified window
    prompts   whether rows of a prompt ran in it
    """

    num_steps: int
    seconds: float
    tokens: int
    accepted: tuple[int, ...]
    prompts: bool
    requests: int


@dataclass(frozen=True)
class Speed:
    """decoding   tokens per second of the rounds without a prompt in them; None where there is no such round
    overall    all tokens by all seconds
    accepted   mean of accepted drafts a window, 0 without any; steps: num_steps -> rounds
    latency_ms mean seconds of a round without a prompt, in milliseconds
    """

    decoding: float | None
    overall: float
    tokens: int
    seconds: float
    accepted: float
    steps: Mapping[int, int]
    latency_ms: float | None

    @classmethod
    def of(cls, decoded: Decoded) -> Speed:
        played = list(rounds(decoded))
        plain = [one for one in played if not one.prompts]
        seconds, quiet = sum(decoded.seconds), sum(one.seconds for one in plain)
        tokens = sum(one.tokens for one in played)
        drafts = [count for one in played for count in one.accepted]
        return cls(
            decoding=sum(one.tokens for one in plain) / quiet if plain else None, overall=tokens / seconds,
            tokens=tokens, seconds=seconds, accepted=sum(drafts) / len(drafts) if drafts else 0.0,
            steps=dict(sorted(Counter(one.num_steps for one in played if one.accepted or not one.prompts).items())),
            latency_ms=quiet / len(plain) * 1e3 if plain else None,
        )


def rounds(decoded: Decoded) -> Iterator[Round]:
    """The rounds in order. A forward ends one, unless it verified: then its commit does."""
    limit, num_steps, seconds, said = decoded.ask.tokens, decoded.ask.num_steps, 0.0, Counter[str]()
    forward = e.Forward(())
    for event, spent in zip(decoded.events, decoded.seconds, strict=True):
        seconds += spent
        if isinstance(event, e.SetNumSteps):
            num_steps = event.num_steps
        ended = isinstance(event, e.Commit)
        if isinstance(event, e.Forward):
            forward, ended = event, all(row.kind != "verify" for row in event.rows)
        if not ended:
            continue
        new = {row.request: 1 for row in forward.rows if row.root is not None}
        paths = zip(event.requests, event.accepted or (), strict=True) if isinstance(event, e.Commit) else ()
        accepted = {name: len(path.nodes) for name, path in paths}
        new |= {name: count + 1 for name, count in accepted.items()}
        given = {name: min(count, limit - said[name]) for name, count in new.items()}
        said.update(given)
        yield Round(
            num_steps, seconds, sum(given.values()), tuple(accepted.values()),
            any(row.kind == "prefill" for row in forward.rows), len(forward.rows),
        )
        seconds = 0.0

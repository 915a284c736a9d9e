"""The default policy of `instep record`: each prompt is a request, and everything happens in which engines go wrong.

Two or three requests share the slots, the others wait. Slots and pages are used again in a shuffled order. Prompts come
in chunks, step counts rise, fall and vanish, accepted counts are ragged because they are forced, and one request is
saved and preempted. Leaves out: reading a policy (`policy.py`), and the events that follow from it
(`event_scheduler.py`).
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from .header import Room
from .policy import Arrival, Policy, ScheduledAction, Steps

SLOTS = (3, 1, 2)  # at most; slot 0 is reserved, and a row number is no slot
PAGE, CHUNKS, NEW, WIDEST = 16, (64, 3), 24, 3  # positions of a page, tokens of chunks, tokens to say, most drafts
ROUNDS = Steps(4, 3), Steps(8, 0), Steps(10, 3)  # the later changes of the step count
ACCEPT = (1, 0, 3, 2)
EXAMPLE = {"a": (0,) * 100, "b": (0,)}  # prompts by length, for a policy to look at


def usual(prompts: Mapping[str, tuple[int, ...]], drafts: bool = True, rounds: int | None = None) -> Policy:
    """The policy for these prompts.

    drafts: whether there is a drafter; without one, every round decodes
    rounds: the maximum; None: until all requests are complete. With a maximum no request is preempted, because it
            might not resume in time
    """
    names = [*prompts]
    slots = SLOTS[-min(len(names), len(SLOTS)):]
    longest = sorted((len(tokens) for tokens in prompts.values()), reverse=True)[: len(slots)]
    pages = sum(-(-(tokens + NEW + WIDEST + 1) // PAGE) for tokens in longest) + 2 * len(slots)
    deeds = [] if rounds is not None and rounds < 8 else [
        ScheduledAction(2, "save", names[0], name="start"), ScheduledAction(7, "idle")]
    if len(names) > 1 and rounds is None:
        deeds += [ScheduledAction(5, "preempt", names[1]), ScheduledAction(9, "resume", names[1])]
    steps: dict[str, Any] = {"num_steps": 0}
    if drafts:
        steps = {"num_steps": 1, "adaptive": {"candidate_steps": [1, 3]}, "steps": ROUNDS, "accept": ACCEPT}
    if rounds is not None:
        steps["rounds"] = rounds
    return Policy(
        name="usual",
        claim="Requests that arrive, wait and end, in chunks and windows of changing width, get the model's tokens.",
        capacity=Room(slots, (*range(2, pages + 1, 2), *range(1, pages + 1, 2)), PAGE, 2 * CHUNKS[0]),
        arrivals=tuple(Arrival(name, name, arrive=at, chunks=CHUNKS, max_new=NEW) for at, name in enumerate(names)),
        deeds=tuple(deeds), **steps,
    )  # fmt: skip


def example() -> str:
    """The usual policy of two prompts, `a` and `b`, as the text of a file. Missing fields have their defaults."""
    lines = []
    for name, value in msgspec.json.decode(msgspec.json.encode(usual(EXAMPLE))).items():
        several = isinstance(value, list) and isinstance(next(iter(value), None), dict)
        told = ",\n  ".join(map(_said, value)) if several else _said(value)
        if value not in (None, [], "", 0):
            lines.append(f' "{name}": ' + (f"[\n  {told}\n ]" if several else told))
    return "{\n" + ",\n".join(lines) + "\n}"


def _said(value: Any) -> str:
    if isinstance(value, dict):
        value = {name: inner for name, inner in value.items()
                 if inner not in (None, [], "") and inner is not False and name != "when"}
    return json.dumps(value)

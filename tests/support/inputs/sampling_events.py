"""Events in which some requests sample: given events, with `sampling` at admit and uniforms on rows that choose.

Leaves out: the results.
"""

from collections.abc import Iterable, Iterator
from random import Random

from msgspec.structs import replace

from instep_reference.contract.engine import Admit, AnyEvent, Draft, Event, Forward, Load, Row, Save, SetNumSteps
from instep_reference.contract.sampling import UNIFORM, Sampling

CHOICES = (Sampling(0.9), None, Sampling(1.3, top_k=12), Sampling(0.7, top_p=0.8), Sampling(2.0, 40, 0.95))


def sampled(events: Iterable[Event], num_steps: int, *, seed: int = 3) -> Iterator[AnyEvent]:
    """One in five requests stays greedy; the others sample, each in another way."""
    dice, admitted, kept = Random(seed), 0, dict[str, int]()
    how, unread, windows = dict[str, Sampling | None](), dict[str, int](), dict[str, int]()

    def units(row: Row) -> Row:
        if row.kind == "prefill":
            unread[row.request] -= row.tokens
        if how[row.request] is None or (row.kind == "prefill" and unread[row.request]):
            return row
        count = windows[row.request] + 1 if row.kind == "verify" else 1
        return replace(row, uniforms=tuple(dice.randrange(round(1 / UNIFORM)) * UNIFORM for _ in range(count)))

    for event in events:
        match event:
            case Admit(request=name, prompt=prompt):
                how[name], unread[name] = CHOICES[admitted % len(CHOICES)], len(prompt)
                admitted += 1
                event = replace(event, sampling=how[name])
            case Draft(requests=names):
                windows |= dict.fromkeys(names, num_steps + 1)
            case SetNumSteps(num_steps=said):
                num_steps = said
            case Save(request=name, name=under):
                kept[under] = unread[name]
            case Load(request=name, name=under):
                unread[name] = kept[under]
            case Forward(rows=rows):
                event = replace(event, rows=tuple(map(units, rows)))
        yield event  # type: ignore[misc]

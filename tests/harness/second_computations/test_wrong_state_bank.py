"""All wrong states of the bank for a few tokens, computed a second time from the recurrence.

Leaves out: the comparison with them (`test_wrong_states.py`, `test_directed.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from instep.checks import wrong_state_bank
from instep.checks.check_interface import COUNT
from instep.checks.wrong_state_bank import BANK, CHAIN, NODE
from instep.checks.wrong_state_inputs import Scene, Wrong
from instep.oracle import miscounted_states
from support.inputs.plain_recurrence import Tensor, Tokens, check, counted, drawn, scene, tokens_of

SENTENCES = {one.name: one.sentence for one in BANK} | {COUNT.name: "holds the state {}"}
Found = Iterator[tuple[str, Tensor]]


def at_end(count: int) -> str:
    return "last token" if count == 1 else f"last {count} tokens"


def other_layouts(state: Tensor) -> list[Tensor]:
    """Memory of another order of rows and columns, read as this one, and the other way round; equal for squares."""
    _, rows, columns = state.shape
    there = torch.stack([torch.stack([one[i, j] for j in range(columns) for i in range(rows)]).reshape(rows, columns)
                         for one in state])  # fmt: skip
    back = torch.stack([torch.stack([one.flatten()[i::rows] for i in range(rows)]) for one in state])
    return [there] if rows == columns else [there, back]


def bank(of: Scene) -> Found:
    """Name, detail and state of every row of the bank, in its order; see `BANK`."""
    x, count, width, base = tokens_of(of), of.count, len(of.k), of.base
    kept = of.verb == "accepted" and width <= 16
    after, t = [x.run(base, 0, end) for end in range(width + 1)], count - 1
    own, right = torch.stack([x.update(after[at], at) for at in range(width)]), after[count]
    channels = of.log_decay.dim() == 3

    def both(state: Tensor, tokens: Tokens = x) -> list[Tensor]:
        """Computed; in a window also replayed with the updates that these tokens had in the right window."""
        if not kept:
            return [tokens.run(state, 0, count)]
        updates = [tokens.update(tokens.run(base, 0, at), at) for at in range(width)]
        return [tokens.run(state, 0, count), tokens.run(state, 0, count, updates)]

    def named(name: str, states: Sequence[Tensor], *details: str) -> Found:
        yield from ((SENTENCES[name].format(*details), state) for state in states)

    for end in range(width + 1) if width <= 16 else sorted({0, 1, t, count + 1, width} & {*range(width + 1)}):
        if end != count:
            was = "was" if count == 1 else "were"
            since = f"after {counted(end)}" if end else "from before the step"
            yield f"holds the state {since}; {counted(count)} {was} {of.verb}", after[end]
    if count == width:
        yield from named("last-token-twice", [x.run(right, t, count), *[x.run(right, t, count, own)] * kept])
    yield from (
        (one.known.says, one.state) for name in (NODE, CHAIN) for one in of.branches if one.known.name == name.name
    )
    for whose, state in of.others:
        yield from named("state-of-another-request", [state], whose)
    if of.previous is not None:
        yield from named("previous-step", [of.previous])
        yield from named(miscounted_states.LOST.name, both(of.previous))
    for mistake in (miscounted_states.TWICE, miscounted_states.IN_PART):
        yield from (
            (known.says, state) for known, left in of.handed if known.name == mistake.name for state in both(left)
        )
    yield from named("all-zero", [base * 0])
    yield from named(miscounted_states.FROM_ZERO.name, both(base * 0))
    yield from named("transposed", other_layouts(right))
    yield from named("from-transposed", [state for other in other_layouts(base) for state in both(other)])
    still = x.but(log=of.log_decay * 0)
    yield from named("last-decays-dropped", [still.run(after[t], t, count)], at_end(1))
    for begin in sorted({t, t - t % 16, t - t % 64}, reverse=True):
        total = Tokens(of.k, of.v, of.log_decay[begin:count].sum(0, keepdim=True), of.beta, True)
        yield from named(
            "last-decays-dropped", [right + after[begin] - total.faded(after[begin], 0)], at_end(count - begin)
        )
    twice = x.but(log=2 * of.log_decay)
    yield from named(
        "last-decay-doubled", [twice.run(after[t], t, count), *[twice.run(after[t], t, count, own)] * kept]
    )
    if t > 0:
        stale = x.but(log=of.log_decay.roll(1, 0), b=of.beta.roll(1, 0))
        yield from named("last-token-stale-gates", [stale.run(after[t], t, count)])
        stale = x.but(k=of.k.roll(1, 0))
        yield from named(
            "last-token-stale-key", [stale.run(after[t], t, count), *[stale.run(after[t], t, count, own)] * kept]
        )
    heads, log = of.k.shape[1], of.log_decay
    if channels:
        before, behind, size = [heads - 1, *range(heads - 1)], [*range(1, heads), 0], of.k.shape[2]
        ways = [
            ("decays-of-the-next-channel", "before", log[..., [size - 1, *range(size - 1)]]),
            ("decays-of-the-next-channel", "after", log[..., [*range(1, size), 0]]),
            ("decays-of-channels-reversed", "", log[..., [*range(size)][::-1]]),
            *[("decays-of-heads-reversed", "", log[:, [*range(heads)][::-1]])] * (heads > 2),
            ("one-decay-of-all-channels", "as its first one", log[..., [0] * size]),
            ("one-decay-of-all-channels", "alike, by their mean", (log.sum(-1) / size)[..., None].expand(log.shape)),
            (
                "one-decay-of-all-channels",
                "alike, by the mean of their factors",
                (log.exp().sum(-1) / size).log()[..., None].expand(log.shape),
            ),
            *[
                ("channel-decays-of-another-head", "before", log[:, before]),
                ("channel-decays-of-another-head", "after", log[:, behind]),
            ]
            * (heads > 1),
        ]
        for name, detail, decays in ways:
            changed = x.but(log=decays)
            yield from named(name, [*both(base, changed), *[changed.run(base, 0, count, own)] * kept], detail)
    if of.safe is not None:
        bound, rate = of.safe[0], of.safe[1][:, None] if channels else of.safe[1]
        part = (log / bound).clip(2.0**-40, 1 - 2.0**-40)
        opened = (part / (1 - part)).log()
        for detail, decays in (("was made without the bound of the safe gate, with a softplus",
                                -rate * torch.log1p((opened / rate).exp())),
                               ("lacks the bound of the safe gate as a factor", -part * 0 - log / bound)):  # fmt: skip
            yield from named("bound-left-out", both(base, x.but(log=decays)), detail)
    if channels and of.k.shape[2] == of.v.shape[2]:
        state = base
        for at in range(count):
            faded = x.faded(state.mT, at).mT
            known = torch.einsum("hkv,hk->hv", faded, of.k[at])
            state = faded + torch.einsum("hk,h,hv->hkv", of.k[at], of.beta[at], of.v[at] - known * of.recalls)
        yield from named("decays-of-values", [state])
    whole = torch.einsum("th,thv->thv", of.beta, of.v)
    if channels:
        yield from named("nothing-recalled", [x.run(base, 0, count, whole)])
    if not of.recalls:
        yield from named("recalled", [replace(x, recalls=True).run(base, 0, count)])
    if of.skip is not None:
        yield from named("skip-in-a-state", both(base, x.but(b=of.beta + of.skip)))
    for name, field, by in (("keys-of-another-group", "k", of.shared), ("decays-of-another-head", "log", 1)):
        for detail, turns in (("before", by), ("after", -by)) if heads > by and not of.recalls else ():
            order = [(head - turns) % heads for head in range(heads)]
            yield from named(name, both(base, x.but(**{field: getattr(x, field)[:, order]})), detail)
    if kept:
        yield from ((SENTENCES[name].format(detail), state) for name, detail, state in replays(of, x, after, own))


def replays(of: Scene, x: Tokens, after: Sequence[Tensor], own: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    """Wrong replays of kept updates; see `RUN_AGAIN`."""
    count, width, base, t = of.count, len(of.k), of.base, of.count - 1

    def last(update: Tensor) -> Tensor:
        return x.run(after[t], t, count, [update] * count)

    def all_of(updates: Any) -> Tensor:
        return x.run(base, 0, count, [*[*updates][:count], *own[len(updates) :]])

    if count < width:
        yield "update-of-the-token-after", "", last(own[count])
    if count > 1:
        yield "update-of-the-token-before", "", last(own[t - 1])
    if of.older is not None:
        yield "updates-of-the-previous-step", "", all_of(of.older)
        if 1 < count <= len(of.older):
            yield "update-of-the-previous-step", "", last(of.older[t])
    for whose, theirs in of.theirs:
        yield "update-of-another-request", whose, all_of(theirs)
    if count > 1:
        yield "update-before-the-token-before", "", last(x.update(after[t - 1], t))
        yield "updates-before-the-step", "", all_of([x.update(base, at) for at in range(width)])
    if not (of.beta == 0).any():
        yield "updates-without-beta", "", all_of(own / of.beta[:, :, None])
    still = x.but(log=x.log * 0)
    yield "update-before-the-decay", "", last(still.update(after[t], t))
    after_, before = [*range(1, width), 0], [width - 1, *range(width - 1)]
    if count > 1:
        yield "run-again-without-decay", "", still.run(base, 0, count, own)
        yield "run-again-decayed-twice", "", x.but(log=2 * x.log).run(base, 0, count, own)
    for detail, order in (("after", after_), ("before", before)):
        yield "run-again-with-other-decays", detail, x.but(log=x.log[order]).run(base, 0, count, own)
    for detail, order in (("after", after_), ("before", before)) if count > 1 else ():
        yield "run-again-along-other-keys", detail, x.but(k=x.k[order]).run(base, 0, count, own)
    for whose, decays in of.their_decays:
        if len(decays) >= count and decays.shape[1:] == x.log.shape[1:]:
            yield "run-again-with-decays-of-another-request", whose, x.but(log=decays).run(base, 0, count, own)
    if count > 2:
        yield "run-again-in-reverse-decays", "", x.but(log=x.log[[*range(width)][::-1]]).run(base, 0, count, own)
    for detail, order in (("after", after_), ("before", before)) if count > 1 else ():
        yield "run-again-with-other-updates", detail, x.run(base, 0, count, own[order])
    state = base
    for at in range(count):
        state = x.faded(state + torch.einsum("hk,hv->hkv", x.k[at], own[at]), at)
    yield "run-again-written-first", "", state
    if count < width:
        yield "run-again-from-the-second", "", x.run(base, 1, count + 1, own)


HANDED = [
    (miscounted_states.TWICE.known(), drawn(6, 4, 3, 2)),
    (miscounted_states.IN_PART.known(1, "", 2, "given"), drawn(7, 4, 3, 2)),
    (miscounted_states.TWICE.known(), drawn(8, 4, 3, 2)),
]
OFF = [Wrong(CHAIN.known(1, "x"), drawn(9, 4, 3, 2)), Wrong(NODE.known("state", 1, "y", 2), drawn(10, 4, 3, 2))]
FOR_4 = {
    "previous": drawn(11, 4, 3, 2),
    "others": [("of b", drawn(12, 4, 3, 2)), ("of c", drawn(13, 4, 3, 2))],
    "handed": HANDED,
    "branches": OFF,
    "older": drawn(14, 2, 4, 2),
    "shared": 2,
    "theirs": [("of b", drawn(15, 1, 4, 2)), ("of c", drawn(16, 5, 4, 2))],
    "their_decays": [("of b", -drawn(17, 3, 4)), ("of c", -drawn(18, 1, 4)), ("of d", -drawn(19, 4, 5))],
}
EDGES = torch.tensor([[0.0, -4.0, -1.0, -2.0]] * 3, dtype=torch.float64)  # of a safe gate with the bound -4
SCENES = {
    "two of three accepted": scene(3, 2, 4, 3, 2, **FOR_4),
    "all accepted": scene(3, 3, 4, 3, 2, **FOR_4 | {"safe": (-4.0, drawn(20, 4))}, log_decay=EDGES),
    "one accepted": scene(
        1,
        1,
        2,
        2,
        3,
        beta=torch.tensor([[0.5, 0.0]], dtype=torch.float64),
        skip=drawn(21, 2),
        safe=(-4.0, drawn(24, 2)),
        log_decay=torch.tensor([[-1.0, -4.0]], dtype=torch.float64),
    ),
    "outer products": scene(3, 2, 4, 3, 2, recalls=False, shared=2, skip=drawn(22, 4)),
    "outer products of a group": scene(3, 1, 2, 2, 3, recalls=False, shared=2),
    "channels": scene(3, 2, 3, 3, 3, channels=True, safe=(-2.0, drawn(23, 3))),
    "channels of one head": scene(4, 3, 1, 3, 2, channels=True),
    "channels as many as heads": scene(3, 3, 3, 3, 2, channels=True),
    "values as many as heads": scene(2, 1, 2, 3, 2, channels=True),
    "channels of two heads, by outer products": scene(2, 2, 2, 2, 2, channels=True, recalls=False),
    "a window of 16": scene(16, 5, 1, 2, 1),
    "17 accepted": scene(17, 16, 1, 2, 1),
    "a prompt": scene(43, 40, 1, 2, 1, verb="given"),
    "16 given": scene(16, 16, 1, 2, 1, verb="given"),
    "17 given": scene(18, 17, 1, 2, 1, verb="given"),
}


@pytest.mark.parametrize("name", SCENES)
def test_every_wrong_state_of_the_bank(name: str) -> None:
    found = [(one.sentence, one.state) for one in wrong_state_bank.wrong_states(SCENES[name])]
    check(found, [*bank(SCENES[name])])


def test_every_row_of_the_bank_is_met() -> None:
    met = {one.known.name for of in SCENES.values() for one in wrong_state_bank.wrong_states(of)}
    assert {one.name for one in BANK} <= met

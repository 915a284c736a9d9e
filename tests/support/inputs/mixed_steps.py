"""Steps that mix rows of several kinds: events for a small cast of requests, with every choice given.

Leaves out: engines, and what is claimed about them. A token depends on its request and on how many that request was
given before, never on the batch: arms that serve the same rows in another order or company serve the same tokens.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import torch
from hypothesis import strategies as st
from msgspec.structs import replace

from instep_reference.contract import engine as e
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from instep_reference.contract.sampling import Sampling

VOCAB = 64
CONV_WIDTH = 4
CANDIDATES = (1, 3, 7)
# Slots sparse and out of order; pages from the top down, some requests longer than one.
ROOM = e.Capacity(slots=(4, 1, 6, 9, 3, 8, 5), pages=tuple(range(72, 0, -1)), page_size=4, max_tokens=128)
WHERE = ("whole", "tail", "inside")  # what a chunk may be of its prompt
CHUNK_EDGES = (1, 2, CONV_WIDTH - 1, CONV_WIDTH, 63, 64, 65)  # 64: tokens that the prefill kernels take at a time
LONG = 67  # a prompt that is longer than the last of these edges
LONG_ROOM = e.Capacity(slots=(4, 1, 6, 9, 3, 8, 5, 2), pages=tuple(range(88, 0, -1)), page_size=8, max_tokens=600)


@dataclass
class Cast:
    """The requests in the run, and how far each has read its prompt."""

    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)
    given: Counter[str] = field(default_factory=Counter)

    def tokens(self, name: str, count: int) -> tuple[int, ...]:
        first = self.given[name]
        self.given[name] += count
        return tuple(crc32(f"{name} {number}".encode()) % VOCAB for number in range(first, first + count))

    def unread(self, name: str) -> int:
        return len(self.prompts[name]) - self.read[name]

    def admit(self, name: str, count: int = 0, prompt: tuple[int, ...] = ()) -> e.Admit:
        """`count` tokens of the request's own, or a prompt that others have too."""
        self.prompts[name], self.read[name] = prompt or self.tokens(name, count), 0
        return e.Admit(name, self.prompts[name])

    def chunk(self, name: str, tokens: int | None = None) -> e.Row:
        """The next tokens of the prompt; None means all that are left. The last ones have a root."""
        tokens = self.unread(name) if tokens is None else tokens
        self.read[name] += tokens
        return e.Row(name, "prefill", tokens, None if self.unread(name) else self.tokens(name, 1)[0])

    def decode(self, name: str) -> e.Row:
        return e.Row(name, "decode", 1, self.tokens(name, 1)[0])

    def draft(self, names: Sequence[str], num_steps: int) -> e.Draft:
        return e.Draft(tuple(names), tuple(self.tokens(name, num_steps) for name in names))

    def commit(self, accepted: Mapping[str, int]) -> e.Commit:
        """request -> how many drafts, in the order of the commit."""
        paths = tuple(e.Path(tuple(range(1, count + 1)), self.tokens(name, 1)[0]) for name, count in accepted.items())
        return e.Commit(tuple(accepted), paths)


def verify(name: str) -> e.Row:
    return e.Row(name, "verify")


def turned(accepted: Mapping[str, int]) -> dict[str, int]:
    """The same in the opposite order: the commit's batch is not the forward's."""
    return dict(reversed(accepted.items()))


# Six requests whose rows meet in one step, by what they are about to do; `CROWD` is their first order.
CROWD = ("inside", "tail", "whole", "all accepted", "none accepted", "plain")


def crowd(num_steps: int, order: Sequence[int] = range(len(CROWD))) -> Iterator[e.Event]:
    """All kinds of rows in one step, in an order of `CROWD`, then a second such step, in the opposite one.

    Three of the rows are chunks that are as wide as a window: inside a prompt, at its end, and all of it.
    """
    cast, wide = Cast(), num_steps + 1
    yield e.SetNumSteps(num_steps)
    for name, count in zip(CROWD, (5 + wide, 5 + wide, wide, 3, 6, 2), strict=True):
        yield cast.admit(name, count)
    yield e.Forward((
        cast.chunk("all accepted"), cast.chunk("inside", 3), cast.chunk("none accepted"), cast.chunk("tail", 5),
        cast.chunk("plain"),
    ))  # fmt: skip
    yield cast.draft(("all accepted", "plain"), num_steps)
    yield e.Forward((verify("plain"), verify("all accepted")))
    yield cast.commit({"all accepted": num_steps, "plain": num_steps - 1})
    yield cast.draft(("none accepted", "all accepted"), num_steps)
    yield e.Forward(_arranged(order, {
        "inside": cast.chunk("inside", wide), "tail": cast.chunk("tail"), "whole": cast.chunk("whole"),
        "all accepted": verify("all accepted"), "none accepted": verify("none accepted"), "plain": cast.decode("plain"),
    }))  # fmt: skip
    yield cast.commit({"all accepted": num_steps, "none accepted": 0})
    yield cast.draft(("tail", "plain"), num_steps)
    yield e.Forward(_arranged(order[::-1], {
        "inside": cast.chunk("inside"), "tail": verify("tail"), "whole": cast.decode("whole"),
        "all accepted": cast.decode("all accepted"), "none accepted": cast.decode("none accepted"),
        "plain": verify("plain"),
    }))  # fmt: skip
    yield cast.commit({"plain": 0, "tail": num_steps})
    yield e.Forward(tuple(cast.decode(name) for name in CROWD))


def _arranged(order: Sequence[int], rows: Mapping[str, e.Row]) -> tuple[e.Row, ...]:
    return tuple(rows[CROWD[number]] for number in order)


def trio(num_steps: int, order: Sequence[int]) -> Iterator[e.Event]:
    """The least of it: a chunk at the end of its prompt, a window as wide, and a decode row; then each is another."""
    cast, wide = Cast(), num_steps + 1
    yield e.SetNumSteps(num_steps)
    for name, count in (("tail", 1 + wide), ("window", 2), ("plain", 1)):
        yield cast.admit(name, count)
    yield e.Forward((cast.chunk("plain"), cast.chunk("window"), cast.chunk("tail", 1)))
    yield cast.draft(("window",), num_steps)
    rows = (cast.chunk("tail"), verify("window"), cast.decode("plain"))
    yield e.Forward(tuple(rows[number] for number in order))
    yield cast.commit({"window": num_steps})
    yield cast.draft(("plain", "tail"), num_steps)
    yield e.Forward((verify("tail"), cast.decode("window"), verify("plain")))
    yield cast.commit({"plain": 0, "tail": num_steps})


TURNS = (("a",), ("c", "b"), ("d", "a", "c"), ("d",))  # who has a window in each round


def in_turns(
    num_steps: int, order: str = "abcd", sampling: Sampling | None = None, tree: tuple[int, ...] = ()
) -> Iterator[e.Event]:
    """Windows together with decodes in every round, without prompts: each of four requests has both in turn.

    Chains become shorter on the way, and the last round has one request less: then some memory of a wider or fuller
    launch is unused.

    sampling: of all requests;  tree: number of drafts -> the parent of each node, replaces the chains
    """
    cast, steps = Cast(), num_steps

    def drawn(row: e.Row) -> e.Row:
        numbers = (len(tree) or steps) + 2 if row.kind == "verify" else 1
        first = 100 + 211 * order.index(row.request)
        return replace(row, uniforms=tuple((first + 37 * n) % 1024 / 1024 for n in range(numbers))) if sampling else row

    yield e.SetNumSteps(num_steps)
    for name, count in zip("abcd", (5, 2, 7, 3), strict=True):
        yield replace(cast.admit(name, count), sampling=sampling)
    yield e.Forward(tuple(drawn(cast.chunk(name)) for name in order))
    for number, windows in enumerate(TURNS):
        if number == 2 and steps > 1 and not tree:
            steps = 1
            yield e.SetNumSteps(steps)
        there = order if number < len(TURNS) - 1 else order.replace("c", "")
        drafts = cast.draft(windows, len(tree) or steps)
        yield replace(drafts, parents=len(windows) * (tree,)) if tree else drafts
        yield e.Forward(tuple(drawn(verify(name) if name in windows else cast.decode(name)) for name in there))
        accepted = {name: (number + at) % (steps + 1) for at, name in enumerate(windows)}
        yield cast.commit({name: min(count, 1) for name, count in accepted.items()} if tree else accepted)
    yield e.Forward(tuple(drawn(cast.decode(name)) for name in order))


def split_everywhere(rounds: bool = True) -> Iterator[e.Event]:
    """One prompt in eight requests: whole, and split at every edge; all first parts in one step, all others in one."""
    cast = Cast()
    prompt = cast.tokens("prompt", LONG)
    for edge in (LONG, *CHUNK_EDGES):
        yield cast.admit(f"split at {edge}", prompt=prompt)
    names = tuple(cast.prompts)
    yield e.Forward(tuple(cast.chunk(name, edge) for name, edge in zip(names, (LONG, *CHUNK_EDGES), strict=True)))
    yield e.Forward(tuple(cast.chunk(name) for name in names[:0:-1]))
    if rounds:
        yield cast.draft(names, 3)
        yield e.Forward(tuple(map(verify, names)))
        yield cast.commit({name: number % 4 for number, name in enumerate(names)})


def beside_windows(num_steps: int, where: str, small: bool) -> Iterator[e.Event]:
    """A chunk, first in its step, then as many rows of windows; widths and counts of windows trade places."""
    cast, tokens = Cast(), 4 if small else 8
    ahead, behind = 3 if where == "tail" else 0, 2 if where == "inside" else 0
    others = tuple(f"other {number}" for number in range(2 if small else 4))
    yield e.SetNumSteps(num_steps)
    for name in others:
        yield cast.admit(name, 1 if small else 3)
    yield cast.admit("chunk", ahead + tokens + behind)
    yield e.Forward(tuple(cast.chunk(name) for name in others))
    if ahead:
        yield e.Forward((cast.chunk("chunk", ahead),))
    some = others[: tokens // (num_steps + 1)]
    yield cast.draft(some, num_steps)
    yield e.Forward((cast.chunk("chunk", tokens), *map(verify, some)))
    yield cast.commit(dict.fromkeys(some, num_steps))


def prompts_in_chunks(small: bool) -> Iterator[e.Event]:
    """Chunks of a window's width and of others, with a request that decodes: nothing that speculation touches."""
    cast = Cast()
    yield cast.admit("a", 6 if small else 11)
    yield cast.admit("b", 4)
    yield e.Forward((cast.chunk("a", 4), cast.chunk("b")))
    if not small:
        yield cast.admit("c", 2)
        yield e.Forward((cast.chunk("c"), cast.decode("b"), cast.chunk("a", 5)))
    yield e.Forward((cast.decode("b"), cast.chunk("a"), *(() if small else (cast.decode("c"),))))


def comings(counts: Sequence[int] = (0, 3, 1, 0, 7, 3)) -> Iterator[e.Event]:
    """One decodes while others verify at 3 and 1, and all decode at 0; requests enter within the rounds of others."""
    cast = Cast()
    stayed: list[str] = []
    for name, count in (("decodes", 3), ("x", 5), ("y", CONV_WIDTH)):
        yield cast.admit(name, count)
    yield e.Forward((cast.chunk("x"), cast.chunk("decodes"), cast.chunk("y", 1)))
    for number, steps in enumerate(counts):
        yield e.SetNumSteps(steps)
        plain = [cast.decode(name) for name in ("decodes", *stayed)]
        if not steps:
            yield e.Forward((cast.decode("x"), cast.chunk("y") if cast.unread("y") else cast.decode("y"), *plain))
            continue
        yield cast.draft(("x",), steps)
        yield e.Forward(tuple(plain))  # while a draft waits
        yield cast.draft(("y",), steps)
        yield cast.admit("late", 3)  # after the drafts and before the windows; its first chunk runs with them
        yield e.Forward((verify("y"), cast.chunk("late", 2), cast.decode("decodes"), verify("x")))
        if number < 3:
            stayed.append(f"stays {number}")
            yield cast.admit(stayed[-1], steps + 1)  # between the windows and their commit
        yield cast.commit(turned({"x": steps, "y": number % 2}))
        yield e.Idle()
        yield e.Forward((cast.chunk("late"), cast.decode("decodes"), *map(cast.chunk, filter(cast.unread, stayed))))
        yield e.Finish("late")


def drawn(draw: Callable[[Any], Any], rounds: int, most: int) -> Iterator[e.Event]:
    """Steps of whatever rows at whatever step counts; requests come and go, and some windows wait a step."""
    cast, number = Cast(), 0
    sizes = {1, 2, CONV_WIDTH - 1, CONV_WIDTH, *(n + 1 for n in CANDIDATES)}
    for _ in range(rounds):
        steps = draw(st.sampled_from((0, *CANDIDATES)))
        yield e.SetNumSteps(steps)
        while len(cast.prompts) < 2 or (len(cast.prompts) < most and draw(st.booleans())):
            number += 1
            yield cast.admit(f"r{number}", draw(st.sampled_from(sorted(sizes | {9}))))
        ready = [name for name in cast.prompts if not cast.unread(name)]
        windows = [name for name in ready if steps and draw(st.booleans())]
        if windows:
            yield cast.draft(draw(st.permutations(windows)), steps)
        while True:
            now = [name for name in windows if draw(st.booleans())] or windows[:1]
            windows = [name for name in windows if name not in now]
            rows = list(map(verify, now))
            for name in cast.prompts:
                if draw(st.booleans()) and cast.unread(name):
                    rows.append(cast.chunk(name, min(draw(st.sampled_from(sorted(sizes))), cast.unread(name))))
                elif name in ready and name not in (*now, *windows) and draw(st.booleans()):
                    rows.append(cast.decode(name))
            if rows:
                yield e.Forward(tuple(draw(st.permutations(rows))))
            if now:
                yield cast.commit({name: draw(st.integers(0, steps)) for name in draw(st.permutations(now))})
            if not windows:
                break
        yield e.Idle()
        if ready and draw(st.booleans()):
            yield e.Finish(ready[0])
            del cast.prompts[ready[0]]


def by_request(
    rows: Sequence[e.Row], windows: Mapping[str, int], unfinished: Sequence[str], places: Mapping[Place, torch.Tensor]
) -> dict[str, dict[Place, torch.Tensor]]:
    """A forward's places, cut into each request's own rows. windows: their widths; unfinished: chose no root here."""
    cut: dict[str, dict[Place, torch.Tensor]] = {row.request: {} for row in rows}
    for place, packed in places.items():
        mine = [row for row in rows if place.stage == "trunk" or row.kind != "verify"]
        if place.layer == AFTER_LAYERS and place.component in ("logits", "pick"):
            counts = [windows.get(row.request, int(row.request not in unfinished)) for row in mine]
        else:
            counts = [windows.get(row.request, row.tokens) for row in mine]
        for row, own in zip(mine, packed.split(counts), strict=True):
            cut[row.request][place] = own
    return cut


def told(state: e.RequestState) -> dict[str, object]:
    """A logical state as bytes, by name."""
    memory = {
        f"{part} of layer {layer}": bits(tensor)
        for part in ("conv", "state", "keys", "values", "draft_keys", "draft_values")
        for layer, tensor in getattr(state, part).items()
    }
    hidden = None if state.proposal_hidden is None else bits(state.proposal_hidden)
    return {"length": state.length, "root": state.root, "proposal": state.proposal, "hidden": hidden, **memory}


def bits(tensor: torch.Tensor) -> bytes:
    """-0 and the payload of a NaN count."""
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()

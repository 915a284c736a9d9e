"""Rings, trees, conv windows and miscounted steps with known mistakes, computed a second time.

Leaves out: the bank of wrong states (`test_wrong_state_bank.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.checks import wrong_conv_windows, wrong_ring_states, wrong_state_bank
from instep.checks.wrong_state_inputs import Scene
from instep.finding_problem import NamedMistake
from instep.oracle import miscounted_states
from instep.oracle.states_with_folded_tokens import PreviousStep, Run
from instep.watch.event_context import RowSpan
from instep_reference.contract.engine import Commit, Idle
from instep_reference.contract.place_names import Place
from support.inputs.plain_recurrence import Tensor, Tokens, check, counted, drawn, scene, tokens_of

# -- rings -----------------------------------------------------------------------------------------------


def half(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def in_parts(x: Tensor, shown: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """High and low part of each number in bfloat16. A shown sum has the high part that leaves the smaller low part."""
    high = half(x)
    whole = high + half(x - high) if shown is None else shown
    near = half(whole)
    high = torch.where((whole - near).abs() < (whole - high).abs(), near, high)
    return high, whole - high


def cut(x: Tensor) -> Tensor:
    """The first 8 binary digits of each number."""
    parts = [torch.frexp(one) for one in x.flatten()]
    return torch.stack([torch.ldexp(torch.trunc(m * 256), e) / 256 for m, e in parts]).reshape(x.shape)


def of_parts(high: Tensor, low: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield from (("{} without low parts", high), ("{} with low parts subtracted", high - low),
                ("{} with low parts added twice", high + low + low), ("{} without high parts", low),
                ("{} with high parts in place of low parts", high + high))  # fmt: skip
    tokens, heads = ([*range(low.shape[axis])] for axis in (0, 1))
    if len(tokens) > 1:
        for which, order in (("before", tokens[-1:] + tokens[:-1]), ("after", tokens[1:] + tokens[:1])):
            yield f"{{}} with the low parts of the token {which}", high + low[order]
    for order in (heads[-1:] + heads[:-1], heads[1:] + heads[:1]):
        yield "{} with the low parts of another head", high + low[:, order]
    yield "{} with high parts that are cut off towards zero", cut(high + low) + low


@pytest.mark.parametrize(("width", "count"), [(3, 2), (1, 1)])
def test_every_mistake_in_one_part_of_a_ring(width: int, count: int) -> None:
    of = scene(width, count, 3, 2, 2, theirs=[("of b", drawn(30, width, 3, 2)), ("of c", drawn(31, width + 1, 3, 2))])
    x, own = tokens_of(of), of.updates
    shown = in_parts(own)[0] + in_parts(own)[1] * 1.5
    shown[0, 0, 0], own[0, 0, 0] = 1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-20  # 1 is as near as the right high part 1 + 2^-7
    for said in (None, shown, shown[:, 1:]):
        keys, mine = in_parts(of.k), in_parts(own, said if said is shown else None)
        due = []
        for (says, k), (_, update) in zip(of_parts(*keys), of_parts(*mine), strict=True):
            for which, along, added in (
                ("keys", k, sum(mine)),
                ("updates", sum(keys), update),
                ("keys and updates", k, update),
            ):
                due.append((says.format(f"was run again from {which}"), x.but(k=along).run(of.base, 0, count, added)))
        again = x.but(k=sum(keys), log=half(of.log_decay.exp()).log())
        due.append(("was run again with decays in bfloat16", again.run(of.base, 0, count, sum(mine))))
        found = [(known.says, state) for known, state in wrong_ring_states.wrong_parts(of, torch.bfloat16, said)]
        check(found, due)
        due = [(says.format("is kept"), update) for says, update in of_parts(*mine)]
        due.append(("is kept with the low parts of b", mine[0] + in_parts(of.theirs[0][1])[1]))
        check([(known.says, update) for known, update in wrong_ring_states.wrong_parts(
            of, torch.bfloat16, said, updates=True)], due)  # fmt: skip
    assert not [*wrong_ring_states.wrong_parts(replace(of, verb="given"), torch.bfloat16)]


def test_every_wrong_update_of_a_window() -> None:
    for width, older, theirs in ((3, 2, 3), (2, 2, 1), (1, 1, 1), (4, None, 5)):
        of = scene(width, 1, 3, 2, 2, older=None if older is None else drawn(32, older, 3, 2),
                   theirs=[("of b", drawn(33, theirs, 3, 2))])  # fmt: skip
        x = tokens_of(of)
        after, still = [x.run(of.base, 0, t) for t in range(width)], x.but(log=of.log_decay * 0)
        own = torch.stack([x.update(after[t], t) for t in range(width)])
        due = [
            ("is the value, not the update", of.v),
            ("is that of the token after", own[[*range(1, width), 0]]),
            *[("is that of the token before", own[[width - 1, *range(width - 1)]])] * (width > 1),
            *[("is that of the previous step", of.older)] * (older == width),
            *[("is that of b", of.theirs[0][1])] * (theirs == width),
            *[
                (
                    "was made from the state before the token before",
                    torch.stack([x.update(after[max(t - 1, 0)], t) for t in range(width)]),
                ),
                (
                    "was made from the state before the window",
                    torch.stack([x.update(of.base, t) for t in range(width)]),
                ),
            ]
            * (width > 1),
            ("lacks its beta", own / of.beta[:, :, None]),
            ("was made before the state decayed", torch.stack([still.update(after[t], t) for t in range(width)])),
        ]
        check([(known.says, updates) for known, updates in wrong_ring_states.wrong_updates(of)], due)


def run_of(x: Tokens, of: Scene, begin: int, end: int, pairs: int = 1) -> Run:
    """Tokens as the oracle keeps them: a key for several heads, and a write gate that is beta in the delta rule."""
    own = torch.stack([x.update(x.run(of.base, 0, t), t) for t in range(len(x.k))])
    rows = {"q": x.k[:, ::pairs], "k": x.k[:, ::pairs], "v": x.v, "log_decay": x.log, "update": own,
            "beta" if x.recalls else "write": x.b}  # fmt: skip
    return Run({Place("trunk", 0, name): tensor[begin:end] for name, tensor in rows.items()})


def joined(*several: Tokens) -> Tokens:
    k, v, log, b = (torch.cat([getattr(one, name) for one in several]) for name in ("k", "v", "log", "b"))
    return Tokens(k, v, log, b, several[0].recalls)


def oldest(many: int) -> str:
    return "oldest token" if many == 1 else f"{many} oldest tokens"


RINGS = [
    (3, 2, 2, True, False),
    (2, 3, 3, True, False),
    (2, 1, 1, False, False),
    (12, 2, 1, True, True),
    (1, 1, 1, True, False),
    (4, 4, 2, False, True),
]


@pytest.mark.parametrize(("before", "width", "count", "recalls", "channels"), RINGS)
def test_states_of_a_ring_without_room(before: int, width: int, count: int, recalls: bool, channels: bool) -> None:
    """Tokens of earlier steps, then those of the window. A state without the oldest continues from before them."""
    heads, keys, values = 4, 3, 2
    all_of = scene(before + width, 1, heads, keys, values, channels=channels, recalls=recalls)
    x = tokens_of(all_of)
    x.k[:, 1::2] = x.k[:, ::2]
    states = [x.run(all_of.base, 0, t) for t in range(before + width + 1)]
    own = torch.stack([x.update(states[t], t) for t in range(before + width)])
    recent = (run_of(x, all_of, 0, 1, 2), *[run_of(x, all_of, 1, before, 2)] * (before > 1))
    k, v, log, b = (each[before:] for each in (x.k, x.v, x.log, x.b))
    extra = [
        (NamedMistake("n", name).known(), drawn(seed, heads, keys, values)) for name, seed in (("l", 40), ("s", 41))
    ]
    of = Scene(states[before], k, v, log, b, count, "accepted", None, [], recent=recent, recalls=recalls,
               later=lambda: extra[:1], stale=lambda: extra[1:])  # fmt: skip
    mine, lacking = tokens_of(of), list(miscounted_states.lacking_oldest(states[before], recent))
    due = [
        (f"lacks the {'oldest' if lost == 1 else f'{lost} oldest'} of the {before - t} tokens that a ring held", state)
        for t in range(before - 1, -1, -1)
        for lost in range(1, min(before - t - 1, 8) + 1)
        for state in (x.run(states[t], t + lost, before), x.run(states[t], t + lost, before, own))
    ]
    check([(known.says, state) for known, state in lacking], due)

    def both(state: Tensor) -> list[Tensor]:
        return [mine.run(state, 0, count), mine.run(state, 0, count, own[before:])]

    last = [("l", extra[0][1]), *(("s", state) for state in both(extra[1][1]))]
    due, end = [(says, carried) for says, state in due for carried in both(state)], before + count
    for_ring = []
    for size in range(max(2, width), end):
        for many in range(1, min(count, end - size) + 1):
            last_ones = "one" if many == 1 else many
            says = f"has the {oldest(many)} of a ring of {size} entries in place of the window's last {last_ones}"
            for_ring += [(says, state) for updates in (None, own) for state in (
                x.run(states[end - many], end - size - many, end - size, updates),)]  # fmt: skip
    check([(one.sentence, one.state) for one in wrong_ring_states.overfull(of)], [*for_ring, *due, *last])
    for other in (replace(of, recent=()), replace(of, verb="given")):
        check([(one.sentence, one.state) for one in wrong_ring_states.overfull(other)],
              last if other.verb != "given" else [last[0], last[1]])  # fmt: skip
    window = []
    for size in range(max(2, width), before + width):
        for many in range(1, min(width, before + width - size) + 1):
            rows = [t - size if t >= before + width - many else t for t in range(before, before + width)]
            window.append(
                (f"has the {oldest(many)} of a ring of {size} entries in place of the window's last", own[rows])
            )
    check([(known.says, updates) for known, updates in wrong_ring_states.unstored_updates(of)], window)
    assert not [*wrong_ring_states.unstored_updates(replace(of, recent=()))]


# -- steps that were miscounted, trees, windows ------------------------------------------------------------


@pytest.mark.parametrize(("recalls", "channels", "verb"), [(True, False, "accepted"), (False, True, "given")])
def test_every_miscount_of_the_step_before(recalls: bool, channels: bool, verb: str) -> None:
    """Three tokens, of which none, one or two are counted, or all of them twice."""
    of = scene(3, 1, 4, 3, 2, channels=channels, recalls=recalls)
    x = tokens_of(of)
    x.k[:, 1::2] = x.k[:, ::2]
    tokens, own = run_of(x, of, 0, 3, 2), torch.stack([x.update(x.run(of.base, 0, t), t) for t in range(3)])
    left = x.run(of.base, 0, 3)
    twice = "counts the tokens of the previous step twice"
    due = [(twice, x.run(left, 0, 3)), *[(twice, x.run(left, 0, 3, own))] * (verb == "accepted"),
           *((f"was continued from the state after {counted(some)} of the previous step; 3 tokens were {verb}",
              x.run(of.base, 0, some)) for some in (1, 2))]  # fmt: skip
    handed = [*miscounted_states.handed_over(left, PreviousStep(of.base, tokens, verb))]
    check([(known.says, state()) for known, state in handed], due)
    assert not [*miscounted_states.handed_over(left, PreviousStep(of.base, None, verb))]
    due = [
        (f"was continued from the state of {counted(lost)} before", x.run(of.base, 0, 3 - lost)) for lost in (1, 2, 3)
    ]
    check([(known.says, state) for known, state in miscounted_states.stale(left, tokens)], due)
    x.log[1, 0] = -2000.0  # its decay is 0, so that nothing is known before it
    tokens, left = run_of(x, of, 0, 3, 2), x.run(of.base, 0, 3)
    check([(known.says, state) for known, state in miscounted_states.stale(left, tokens)], [
        (due[0][0], x.run(of.base, 0, 2))])  # fmt: skip
    assert len([*miscounted_states.lacking_oldest(left, [tokens])]) == 0


NODES, PATH = (-1, 0, 1, 0, 3, 3, 4, 1, 1), (0, 3, 4)
OFF_PATH = {1: ([0, 1], "a node off the path"), 2: ([0, 1, 2], "whose number is the depth of the path"),
            5: ([0, 3, 5], "a sibling of node 4"), 6: ([0, 3, 4, 6], "a child of node 4"),
            7: ([0, 1, 7], "a node off the path"), 8: ([0, 1, 8], "the last node of the window")}  # fmt: skip
CHAINS = [(9, "all of them"), (5, "up to the last accepted node"), (3, "as many as are accepted")]
Rows = list[tuple[str, list[int]]]


def beside(what: str) -> Rows:
    return [(f"holds the {what} after node {node}, {kin}; node 4 is the last accepted one", line)
            for node, (line, kin) in OFF_PATH.items()] + chains(CHAINS)  # fmt: skip


def chains(several: Sequence[tuple[int, str]]) -> Rows:
    return [(f"takes the tree for a chain: holds rows 0 to {rows - 1} in their order, {said}", [*range(rows)])
            for rows, said in several]  # fmt: skip


def test_paths_beside_the_accepted_one() -> None:
    found = [(known.says, [*nodes]) for known, nodes in wrong_state_bank.beside("window", NODES, PATH)]
    assert found == beside("window")
    for path, width, due in (
        ((0, 1), 4, CHAINS[:1]),
        ((0, 2), 3, [(3, CHAINS[1][1]), (2, CHAINS[2][1])]),
        ((0, 1, 2), 3, []),
    ):
        its = [(4, said) for _, said in due] if width == 4 else due
        assert [(known.says, [*nodes]) for known, nodes in wrong_state_bank._as_chains(path, width)] == chains(its)


def test_states_of_the_branches_of_a_tree() -> None:
    """Nodes off the path, rows in their order, and these rows replayed with the updates after their parents."""
    of = scene(9, 1, 4, 3, 2)
    x, states, own = tokens_of(of), {-1: of.base}, list[Tensor]()
    x.k[:, 1::2] = x.k[:, ::2]
    for node, parent in enumerate(NODES):
        own.append(x.update(states[parent], node))
        states[node] = x.run(states[parent], node, node + 1)
    rows = {"q": x.k[:, ::2], "k": x.k[:, ::2], "v": x.v, "log_decay": x.log, "beta": x.b, "update": torch.stack(own)}
    tokens = Run({Place("trunk", 0, name): tensor for name, tensor in rows.items()})
    folding: Any = SimpleNamespace(parents=NODES, tokens=tokens, base=of.base)
    due = [(says, states[nodes[-1]] if "chain" not in says else x.run(of.base, 0, len(nodes)))
           for says, nodes in beside("state")]  # fmt: skip
    due += [(says, x.run(of.base, 0, len(nodes), own)) for says, nodes in chains(CHAINS)]
    check([(one.sentence, one.state) for one in wrong_state_bank.branches(folding, PATH)], due)


def after_rows(window: Tensor, rows: Tensor) -> Tensor:
    """The last columns after further ones; rows are inputs."""
    pairs = zip(window.tolist(), rows.T.tolist(), strict=True)
    return torch.tensor([[*had, *new][len(new) :] for had, new in pairs], dtype=torch.float64)


def windows(
    before: Tensor, fed: Tensor, nodes: Sequence[int], verb: str, others: Any, tree: bool
) -> list[tuple[str, Tensor]]:
    line = fed[list(nodes)] if tree else fed
    right, none = len(nodes), before * 0
    was = "was" if right == 1 else "were"
    since = [f"after {counted(count)}" if count else "from before the step" for count in range(10)]
    found = [(f"holds the window {since[count]}; {counted(right)} {was} {verb}", after_rows(before, line[:count]))
             for count in range(len(line) + 1)]  # fmt: skip
    found += [(says, after_rows(before, fed[rows])) for says, rows in beside("window")] if tree else []
    found += [(miscounted_states.FROM_ZERO.sentence, after_rows(none, fed[list(nodes)])), ("is all zero", none)]
    return found + [(f'holds the window of request "{name}" {since[count]}', after_rows(window, theirs[:count]))
                    for name, window, theirs in others for count in range(len(theirs) + 1)]  # fmt: skip


def test_every_wrong_conv_window() -> None:
    before, fed = drawn(50, 2, 3), drawn(51, 9, 2)
    others = [("b", drawn(52, 2, 3), drawn(53, 2, 2)), ("c", drawn(54, 2, 3), drawn(55, 1, 2))]
    for nodes, tree in ((PATH, True), ((0, 1), False), ((0,), False)):
        found = [*wrong_conv_windows.wrong_windows(before, fed, nodes, "accepted", others, NODES if tree else None)]
        check([(known.says, window) for known, window in found], windows(before, fed, nodes, "accepted", others, tree))
    layers = {"conv": {0: before}, "ple_conv": {1: fed}, "ngram": {2: fed[:, 0]}}
    held = [*wrong_conv_windows.remembered(SimpleNamespace(**layers))]  # type: ignore[arg-type]
    assert [place for place, _ in held] == [Place("trunk", layer, name) for layer, name in enumerate(layers)]
    assert [tensor.tolist() for _, tensor in held] == [before.tolist(), fed.tolist(), [fed[:, 0].tolist()]]
    span = RowSpan("a", "verify", 1, 2, 0, 1, 2)
    places = {Place("trunk", 1, "qkv"): fed, Place("trunk", 1, "ple_normed"): fed + 1}
    forward: Any = SimpleNamespace(tokens={"a": (4, 9)}, subject=SimpleNamespace(places=places), spans={"a": span})
    for name, due in (("conv", fed[1:3]), ("ple_conv", fed[1:3] + 1), ("ngram", torch.tensor([[5], [10]]))):
        found_rows = wrong_conv_windows.inputs_of(forward, Place("trunk", 1, name), "a")
        assert found_rows is not None and torch.equal(found_rows, due)


def test_conv_windows_are_named_if_they_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """The truth's window differs from that of its rows a little, as it was rounded."""
    before, fed, other = (drawn(seed, *shape) for seed, shape in ((60, (2, 3)), (61, (11, 2)), (62, (2, 3))))
    spans = {"a": RowSpan("a", "verify", 2, 9, 0, 2, 9), "b": RowSpan("b", "verify", 0, 2, 0, 0, 2),
             "gone": RowSpan("gone", "verify", 0, 1, 0, 0, 1)}  # fmt: skip
    truth = SimpleNamespace(
        places={Place("trunk", 1, "qkv"): fed},
        before={
            name: SimpleNamespace(conv={1: window}) for name, window in (("a", before), ("b", other), ("gone", other))
        },
    )
    parents: dict[str, tuple[int, ...]] = {"a": NODES}
    forward: Any = SimpleNamespace(spans=dict(list(spans.items())[:2]), truth=truth, parents=parents)
    committed = RowSpan("a", "commit", 0, 3, 0, 0, 0, PATH)
    monkeypatch.setattr(wrong_conv_windows, "last_forward", lambda context: forward)
    monkeypatch.setattr(wrong_conv_windows, "row_spans", lambda context, stage: [spans["b"], *(
        [committed] if stage == "extend" else [spans["a"]])])  # fmt: skip
    for event, nodes, verb, tree in ((Commit(("a",)), PATH, "accepted", True), (Idle(), range(9), "given", False)):
        mine = fed[2:]
        right = after_rows(before, mine[list(nodes)])
        all_of = windows(before, mine, nodes, verb, [("b", other, fed[:2])], tree)
        all_of += [
            ("has the newest input first", right[:, [2, 1, 0]]),
            ("is shifted by one to newer inputs", right[:, [2, 0, 1]]),
            ("is shifted by one to older inputs", right[:, [1, 2, 0]]),
        ]
        given: Any = SimpleNamespace(event=event)
        near = right + 1e-3
        for says, wrong in all_of:
            equal = [name for name, other in all_of if torch.equal(other, wrong)]
            for share, due in ((0.0, equal), (0.2, equal), (0.3, [])):
                found = wrong + share * (wrong - near).norm() * torch.tensor([[1.0, 0, 0], [0, 0, 0]])
                due = [] if torch.equal(wrong, right) else due
                rivals = [(found - each).norm() / (each - near).norm() for name, each in all_of
                          if name not in equal and not torch.equal(each, right)]  # fmt: skip
                if min(rivals) > 0.25 or share == 0:
                    named = wrong_conv_windows.named_windows(given, 1, "a", found, near)
                    assert torch.equal(wrong, right) or [known.says for known in named] == due, (says, share)
        assert not wrong_conv_windows.named_windows(given, 1, "c", right, near), "it ran no rows"
        assert not wrong_conv_windows.named_windows(given, 1, "a", torch.tensor([[torch.nan, 1.0, 1], [1, 1, 1]]), near)
    forward.truth.places = {}
    assert not wrong_conv_windows.named_windows(given, 1, "a", right, near), "the truth shows no rows"
    forward = None
    assert not wrong_conv_windows.named_windows(given, 1, "a", right, near)

"""Contents that known mistakes leave in states and rings, each computed again by hand for a few tokens.

Leaves out: the comparison with them (`test_directed.py`), and whole runs (`test_mistakes.py`).
"""

from collections.abc import Iterable
from dataclasses import make_dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.checks import known_wrong_states, recomputed_values, wrong_state_bank
from instep.checks.known_wrong_states import Directed, Looked, look, scene_of
from instep.checks.wrong_ring_states import _with_their_decays, _without_beta, unstored_updates, wrong_parts
from instep.checks.wrong_state_inputs import EVERY_COUNT_UP_TO, Scene, Wrong, add, step
from instep.diagnose.mistakes import wrong_states
from instep.finding_problem import Explained, NamedMistake
from instep.oracle.miscounted_states import lacking_oldest
from instep.oracle.states_with_folded_tokens import Run
from instep.verdict import UNDECIDABLE, Comparison
from instep_reference.contract.place_names import Place

HV, K, V = 4, 3, 2


def drawn(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def scene(count: int, window: int = 4, **changed: Any) -> Scene:
    """A window of accepted tokens, the first `count` of which were accepted."""
    of = Scene(drawn(HV, K, V), drawn(window, HV, K) / 2, drawn(window, HV, V), -drawn(window, HV),
               drawn(window, HV) / 2 + 0.1, count, "accepted", drawn(HV, K, V) + 1, [])  # fmt: skip
    return replace(of, **changed)


def value(**given: Any) -> Any:
    """A frozen value of these fields, for code that replaces some of them."""
    return make_dataclass("Value", given)(**given)


def run_of(of: Scene, begin: int, end: int) -> Run:
    """Tokens of a scene, as the oracle keeps them."""
    rows = {"k": of.k, "v": of.v, "log_decay": of.log_decay, "beta": of.beta, "update": of.updates}
    return Run({Place("trunk", 0, name): x[begin:end] for name, x in rows.items()})


def same(found: Iterable[torch.Tensor], right: Iterable[torch.Tensor]) -> bool:
    return all(torch.allclose(*pair, rtol=1e-9) for pair in zip(found, right, strict=True))


# -- the bank --------------------------------------------------------------------------------------------


def test_updates_of_accepted_tokens_alone_are_kept_up_to_a_number_of_tokens() -> None:
    for window, verb, kept in ((1, "accepted", True), (EVERY_COUNT_UP_TO, "accepted", True), (1, "given", False),
                               (EVERY_COUNT_UP_TO + 1, "accepted", False)):  # fmt: skip
        of = scene(1, window, verb=verb)
        assert of.kept is kept and len(of.carried(of.base)) == 1 + kept
        assert len([*of.counts()]) == (window if window <= EVERY_COUNT_UP_TO else 3)


def test_the_last_token_has_the_gates_of_the_token_before_it() -> None:
    for count in (2, 3):
        of, t = scene(count), count - 1
        last = step(of.after(t), of.k[t], of.v[t], of.log_decay[t - 1], of.beta[t - 1])
        assert same(wrong_state_bank._stale_gate(of), [last])
    assert not [*wrong_state_bank._stale_gate(scene(1))]


def test_the_last_token_has_the_key_of_the_token_before_it() -> None:
    """The update is computed with that key, or kept from the right one, and added along that key."""
    of = scene(3)
    kept = add(of.after(2), of.k[1], of.log_decay[2], of.updates[2])
    assert same(wrong_state_bank._stale_k(of), [step(of.after(2), of.k[1], of.v[2], of.log_decay[2], of.beta[2]), kept])
    assert not [*wrong_state_bank._stale_k(scene(1))]


def test_decays_of_channels_are_those_of_values_where_there_are_as_many() -> None:
    channels = -drawn(4, HV, K)
    for of, tried in ((scene(3), 0), (scene(3, log_decay=channels), 0), (scene(3, v=drawn(4, HV, K)), 0),
                      (scene(3, log_decay=channels, v=drawn(4, HV, K), base=drawn(HV, K, K)), 1)):  # fmt: skip
        assert len([*wrong_state_bank._decays_values(of)]) == tried


def test_outer_products_take_keys_of_the_next_group_and_decays_of_the_next_head() -> None:
    """Two value heads read a key head."""
    of, keys, decays = scene(3, recalls=False, shared=2), [2, 3, 0, 1], [3, 0, 1, 2]
    found = [state for _, state in wrong_state_bank._of_other_heads("k")(of)]
    assert same(found[:1], [replace(of, k=of.k[:, keys]).right]) and same(found[2:], found[:2])
    found = [state for _, state in wrong_state_bank._of_other_heads("log_decay")(of)]
    assert same(found[:1], [replace(of, log_decay=of.log_decay[:, decays]).right])


def test_a_scene_has_the_states_of_other_requests_in_its_layer() -> None:
    of = scene(2, 2)
    tokens = SimpleNamespace(of=lambda name: of.updates, recalls=True, skip=None,
                             folded=lambda: (of.k, of.v, of.log_decay, of.beta))  # fmt: skip
    folding = SimpleNamespace(others=(), previous=None, parents=None, tokens=tokens, base=drawn(HV, K, V), count=2,
                              safe=None)  # fmt: skip
    piece, *others = (
        SimpleNamespace(request=name, layer=layer, folding=folding, prefix="", later_windows=tuple,
                        truth=SimpleNamespace(state=drawn(HV, K, V)), span=SimpleNamespace(kind="verify"))
        for name, layer in (("a", 1), ("a", 0), ("b", 0), ("b", 1)))  # fmt: skip
    of = scene_of(piece, [piece, *others])  # type: ignore[arg-type, list-item]
    assert [[whose for whose, _ in some] for some in (of.others, of.theirs, of.their_decays)] == [
        ['of request "b"']
    ] * 3


def test_the_last_of_several_undecided_states_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of 4 x 12 in two layers, of 5 draws; the second tile has 4 of 8 columns. Most pairs are undecided."""
    seen = list[torch.Tensor]()

    def looked(found: torch.Tensor, of: Scene, draws: torch.Tensor, *more: Any, leaning: Any, **named: Any) -> Looked:
        seen.append(leaning)
        return Looked(worst=0.1, head=0, group=1, blocks=len(seen), pairs=10, undecided=9, problem=None)

    draws = torch.arange(5.0)[:, None, None, None].expand(5, 1, 4, 12)
    pieces = [value(
        layer=layer, request="a", prefix="", narrow=False, leans=True, dithered=None, truth=SimpleNamespace(
            state=draws[0]), yardsticks=SimpleNamespace(state=draws), place=Place("trunk", layer, "state")._replace,
        left=lambda side, layer=layer: SimpleNamespace(state={layer: draws[0]})) for layer in (0, 1)]  # fmt: skip
    for piece in pieces:
        piece.place = lambda component, layer=piece.layer: Place("trunk", layer, component)
    monkeypatch.setattr(known_wrong_states, "look", looked)
    monkeypatch.setattr(known_wrong_states, "scene_of", lambda *given: None)
    monkeypatch.setattr(Directed, "_pieces", lambda self, context: pieces)
    given: Any = SimpleNamespace(index=4, kind="commit", subject=None,
                                 expected=SimpleNamespace(slots_after={}, slots_before={}))  # fmt: skip
    one, other, undecided = Directed(SimpleNamespace())(given)  # type: ignore[arg-type]
    assert isinstance(one, Comparison) and (one.elements, one.columns) == (32, (8, 11))
    assert isinstance(other, Comparison) and other.elements == 48 and isinstance(undecided, Comparison)
    assert (undecided.check, undecided.place) == (UNDECIDABLE, other.place) and other.place.layer == 1
    assert [leaning[:, 0, 0, 0].tolist() for leaning in seen] == [[1, 3]] * 2


def test_a_state_half_way_to_a_wrong_one_is_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only zero is tried as a wrong state. A head's state has one number, so all results are exact."""
    of = scene(0, base=torch.eye(K, V, dtype=torch.float64).expand(HV, K, V) * torch.tensor([1.0, 0.0]))
    zero = Wrong(wrong_state_bank.ZERO.known(), torch.zeros_like(of.base))
    monkeypatch.setattr(known_wrong_states, "wrong_states", lambda scene: [zero])
    draws = torch.stack([of.right] * 3)
    for share, worst, agrees in ((0.5, 0.5, True), (0.5 - 2.0**-20, 0.5 + 2.0**-20, False), (1.0, 0.0, True)):
        found = look(of.right * share, of, draws)
        assert (found.problem is None) is agrees
        assert found.worst == worst or not agrees


def test_the_nearest_wrong_state_is_named_if_it_is_near_and_all_numbers_are_finite() -> None:
    """Two blocks of two numbers. The wrong states have the lengths 5 and 50, and two of them have equal bits.

    Two others have poison, NaN or infinity, and are near to nothing.
    """
    poison = torch.tensor([torch.nan, torch.inf])[:, None, None].expand(2, 2, 2)
    towards = torch.tensor([[[3.0, 0.0], [0.0, 4.0]]] * 2 + [[[30.0, 0.0], [0.0, 40.0]]], dtype=torch.float64)
    towards = torch.cat((poison, towards))
    wrong: Any = [value(known=NamedMistake(name, name).known()) for name in ("nan", "inf", "one", "same", "far")]
    assert known_wrong_states._nearest(towards[2], poison, wrong[:2], "")[0].code == known_wrong_states.UNIDENTIFIED
    far, reach, equal = known_wrong_states.UNIDENTIFIED, known_wrong_states.NEAR, ("one", "same")
    for factor, more, names in ((1.0, 0.0, equal), (1 + reach * 0.99, 0.0, equal), (9.0, 0.0, ("far",)),
                                (1 + reach * 1.01, 0.0, None), (1.0, torch.nan, ())):  # fmt: skip
        error = towards[2] * factor
        error[1, 0] += more
        problem, projection, distance = known_wrong_states._nearest(error, towards, wrong, "")
        if not names:
            assert problem.code == (far if names is None else "not_finite") and (projection, distance) == (None, 1.0)
            continue
        assert isinstance(problem.mistake, Explained) and problem.mistake.names == names
        length = 5 if "one" in names else 50
        assert projection == pytest.approx(factor * 5 / length)
        assert distance == pytest.approx(abs(factor * 5 - length) / length)


def test_random_bits_of_other_tokens_and_layers_are_tried() -> None:
    """A state after 3 tokens, of which its event computed 2, in the second of 3 layers."""
    piece: Any = SimpleNamespace(layer=1, span=SimpleNamespace(start=1, count=2))
    fell = [*recomputed_values.fell(piece, range(3), 9, 5)]
    tried = [state for _, state in fell if state is not None]
    assert [state.tokens for known, state in fell if state and "the number of its slot" in known.says] == [5]
    assert [one.tokens for one in tried if one.tokens != 3] == [0, 1, 2, *range(4, 13)]
    assert [one.layer for one in tried if one.layer != 1] == [0, 2]


def test_updates_lack_their_gate_unless_it_is_zero_for_some_token() -> None:
    of = scene(3)
    ((_, count, wrong),) = _without_beta(of)
    assert count == 4 and same([wrong(t) for t in range(4)], [of.updates[t] / of.beta[t][:, None] for t in range(4)])
    of.beta[1, 2] = 0
    assert not _without_beta(replace(of, beta=of.beta))


# -- rings -----------------------------------------------------------------------------------------------


def test_decays_of_another_request_are_tried_if_they_are_enough() -> None:
    """Two of four tokens were accepted. Another request has decays of one, two or three tokens, or of other heads."""
    decays = {f"{count} tokens": -drawn(count, HV) for count in (1, 2, 3)} | {"other heads": -drawn(2, HV + 1)}
    of = scene(2, their_decays=[*decays.items()])
    for verb, tried in (("accepted", ["2 tokens", "3 tokens"]), ("read", [])):
        found = dict(_with_their_decays(replace(of, verb=verb)))
        assert [*found] == tried
        assert same(found.values(), (of.again(of.base, log_decay=decays[whose]) for whose in tried))


def test_a_mistake_in_one_part_of_a_ring_changes_keys_or_updates() -> None:
    """Keys and updates in two bfloat16 parts each. Shown updates count if they have the shape of the window's."""
    of = scene(3)
    high = {name: getattr(of, name).bfloat16().double() for name in ("k", "updates")}
    found = {known.says: state for known, state in wrong_parts(of, torch.bfloat16)}
    for which, changed in (("keys", {"k": high["k"]}), ("updates", {"updates": high["updates"]}),
                           ("keys and updates", high)):  # fmt: skip
        state = found[f"was run again from {which} without low parts"]
        assert torch.allclose(state, of.again(of.base, **changed), rtol=1e-4)
        assert not torch.allclose(state, of.again(of.base, **{name: high[name] for name in high if name not in changed})
                                  if len(changed) < 2 else of.right, rtol=1e-4)  # fmt: skip
    other = {known.says: state for known, state in wrong_parts(of, torch.bfloat16, drawn(2, HV, V))}
    assert found.keys() == other.keys() and same(found.values(), other.values())
    shown = {known.says: state for known, state in wrong_parts(of, torch.bfloat16, of.updates + 1)}
    says = "was run again from keys without low parts"
    assert torch.allclose(shown[says], of.again(of.base, k=high["k"], updates=of.updates + 1), rtol=1e-4)


@pytest.mark.parametrize(("window", "held"), [(1, 3), (2, 3), (3, 1)])
def test_a_full_ring_holds_tokens_that_are_one_ring_older(window: int, held: int) -> None:
    """Token t is in the entry of token t - size, which it did not overwrite."""
    before, of = scene(held, held), scene(1, window)
    both, due = [*before.updates, *of.updates], list[torch.Tensor]()
    for size in range(max(window, 2), held + window):
        for many in range(1, min(window, held + window - size) + 1):
            due.append(torch.stack([both[t - size * (t >= held + window - many)] for t in range(held, held + window)]))
    of = replace(of, recent=[run_of(before, 0, 1), run_of(before, 1, held)][:held])
    assert same((updates for _, updates in unstored_updates(of)), due) and due


def test_a_state_without_the_oldest_tokens_continues_from_before_them() -> None:
    """A ring held one token, two or all three. The only token of a ring is that of a step, which is another mistake."""
    of = scene(3, 3)
    assert not [*lacking_oldest(of.after(1), [run_of(of, 0, 1)])]
    found = [state for _, state in lacking_oldest(of.right, [run_of(of, 0, 2), run_of(of, 2, 3)])]
    due = []
    for before, begin in ((1, 2), (0, 1), (0, 2)):
        due += [of.fold(of.after(before), begin), of.again(of.after(before), begin=begin)]
    assert same(found, due)


def test_a_short_ring_replays_the_last_token_of_each_entry() -> None:
    of = scene(3, 4)
    found = {one.sentence: one.wrong for one in wrong_states._in_a_short_ring(of)}
    for room, entry in ((1, "1 entry"), (2, "2 entries"), (3, "3 entries")):
        state = of.base
        for t in range(of.count):
            last = max(other for other in range(4) if other % room == t % room)
            state = add(state, of.k[last], of.log_decay[last], of.updates[last])
        (wrong,) = (wrong for says, wrong in found.items() if f"a ring of {entry}," in says)
        assert same([wrong], [state])
    assert len(found) == 3 and not [*wrong_states._in_a_short_ring(scene(1, 1))]


def test_entries_that_this_step_overwrote_are_those_of_its_last_tokens() -> None:
    for before, of in ((scene(3, 3), scene(4, 4)), (scene(4, 4), scene(3, 3))):
        pending = before.k, before.log_decay, before.updates
        found = [one.wrong for one in wrong_states._before_an_overwrite(replace(of, pending=pending))]
        for many in (1, 2, 3):
            state = of.previous
            assert state is not None
            for t in range(len(before.k)):
                own, at = (of, len(of.k) - many + t) if t < many else (before, t)
                state = add(state, own.k[at], own.log_decay[at], own.updates[at])
            assert same(found[2 * many - 2 : 2 * many], of.carried(state))
        assert len(found) == 6
        for lacks in ({"pending": None}, {"pending": pending, "previous": None}):
            assert not [*wrong_states._before_an_overwrite(replace(of, **lacks))]


def test_known_states_are_those_of_a_state_or_of_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring of parts in 16 bits has wrong parts, too. Updates of a tree are shown by node."""
    of, asked = scene(2), list[Any]()
    update, other = (NamedMistake(name, name).known() for name in ("update", "other"))
    monkeypatch.setattr(wrong_states, "own_scene", lambda case: case.scene)
    monkeypatch.setattr(wrong_states, "wrong_parts", lambda given, ring, shown, updates: (
        asked.append((given, ring, shown, updates)) or [(other, of.base)]))  # fmt: skip
    for name, known in (("wrong_updates", update), ("unstored_updates", other), ("wrong_states", other),
                        ("overfull", update)):
        monkeypatch.setattr(wrong_states, name, lambda given, known=known: [(known, given.base)])
    shown = torch.arange(4.0)
    for component, parents, rounds, stored in (
        ("state", None, torch.bfloat16, shown), ("state", (-1, 0), torch.bfloat16, shown),
        ("update", None, torch.float16, shown), ("state", None, torch.bfloat16, None), ("state", None, None, shown),
        ("state", None, object(), shown),
    ):  # fmt: skip
        piece = SimpleNamespace(own={"update": stored}, place=lambda name: name, span=SimpleNamespace(nodes=(3, 1)),
                                folding=SimpleNamespace(parents=parents))  # fmt: skip
        case: Any = SimpleNamespace(component=component, piece=piece, scene=of,
                                    oracle=SimpleNamespace(rounds={wrong_states.RING: rounds}))  # fmt: skip
        asked.clear()
        found = [one.sentence for one in wrong_states.known_states(case)]
        narrow = isinstance(rounds, torch.dtype)
        names = ["update", "other"] if component == "update" else ["other", "update"]
        assert found == ["other"] * narrow + names and len(asked) == narrow
        if narrow:
            given, ring, theirs, updates = asked[0]
            assert (given, ring, updates) == (of, rounds, component == "update")
            due = None if stored is None or component == "update" else [3, 1] if parents else [0, 1, 2, 3]
            assert (theirs if theirs is None else theirs.tolist()) == due
            assert theirs is None or theirs.dtype == of.k.dtype
    case.oracle = None
    assert [one.sentence for one in wrong_states.known_states(case)] == ["other", "update"]
    case.scene = None
    assert not [*wrong_states.known_states(case)]


def test_states_of_short_rings_and_other_requests_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state has a scene if its piece folds. Those of other requests are of the same layer."""
    monkeypatch.setattr(wrong_states, "scene_of", lambda piece, others: (piece, others))
    monkeypatch.setattr(wrong_states, "_own", lambda piece, case: f"own {piece.name}")
    pieces = [SimpleNamespace(name=name, folding=folding, layer=layer, request=name[0]) for name, folding, layer in (
        ("a", 1, 0), ("b", 1, 0), ("c", None, 0), ("d", 1, 1), ("a2", 1, 0))]  # fmt: skip
    for component, piece, made in (("state", pieces[0], True), ("update", pieces[0], True), ("core", pieces[0], False),
                                   ("state", pieces[2], False), ("state", None, False)):  # fmt: skip
        case: Any = SimpleNamespace(component=component, piece=piece, pieces=pieces)
        scene_there: Any = wrong_states.own_scene(case)
        assert scene_there == (("own a", ["own a", "own b", "own d", "own a2"]) if made else None)
    of = scene(2)
    monkeypatch.setattr(wrong_states, "scene_of", lambda piece, others: of)
    case = SimpleNamespace(component="state", piece=pieces[0], pieces=pieces)
    says = 'holds the state of request "b" {}'.format
    due = {says(f"{when} of its step" if at else when): of.after(at) for at, when in (
        (0, "from before its step"), (1, "after 1 token"), (3, "after 3 tokens"), (4, "after 4 tokens"))}  # fmt: skip
    found = {one.sentence: one.wrong for one in wrong_states._of_others(case)}
    assert [*found] == [*due] and same(found.values(), due.values())
    monkeypatch.setattr(wrong_states, "_in_a_short_ring", lambda scene: ["short"])
    monkeypatch.setattr(wrong_states, "_before_an_overwrite", lambda scene: ["overwritten"])
    monkeypatch.setattr(wrong_states, "_of_others", lambda case: ["others"])
    for component, there, tried in (("state", of, ["short", "overwritten", "others"]), ("update", of, []),
                                    ("state", None, []), ("state", replace(of, verb="given"), ["others"])):  # fmt: skip
        monkeypatch.setattr(wrong_states, "own_scene", lambda case, there=there: there)
        case.component = component
        every: list[Any] = [*wrong_states.states(case)]
        assert every == tried
    case.piece = None
    monkeypatch.undo()
    assert not [*wrong_states._of_others(case)]


def test_own_rows_replace_those_of_the_truth_except_the_wrong_ones() -> None:
    places = {name: Place("trunk", 0, name) for name in ("k", "update", "core")}
    tokens = Run({places["k"]: torch.zeros(1), places["update"]: torch.zeros(1)})
    piece = value(folding=value(tokens=tokens), own={place: torch.ones(1) for place in places.values()})
    for component, own in (("state", {"k": 1, "update": 1}), ("update", {"k": 1, "update": 0})):
        made = wrong_states._own(piece, SimpleNamespace(component=component))  # type: ignore[arg-type]
        assert {place.component: int(rows) for place, rows in made.folding.tokens.places.items()} == own  # type: ignore[union-attr]

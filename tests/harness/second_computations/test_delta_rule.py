"""Every mistake of the catalogue of the delta rule, computed again by hand, one head and one row at a time.

Leaves out: whether results fit (`test_explanation_fit.py`), and kernels with these mistakes (`test_mistakes.py`).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import make_dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.diagnose.mistakes import delta_rule, delta_rule_variants
from instep.diagnose.mistakes.delta_rule import MISTAKES, NAMED, Candidate, candidates, explanation, listed, part
from instep.diagnose.mistakes.delta_rule_variants import Variant
from instep.diagnose.mistakes.delta_rule_with_hooks import ROWS, Call, Rows, Walked, walk
from instep.diagnose.mistakes.finding_case import Explanation
from instep.oracle.single_layer_run import LayerWork
from instep_reference.contract.declared_rounding import Blocked
from instep_reference.lightning import LightningMemory
from instep_reference.weights import GdnWeights

Tensor = torch.Tensor
NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
GENERATOR = torch.Generator().manual_seed(1)


def drawn(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=GENERATOR, dtype=torch.float64) + 0.1


def close(found: Tensor, right: Tensor, by: float = 1e-9) -> bool:
    return found.shape == right.shape and torch.allclose(found, right, rtol=by, atol=by, equal_nan=True)


def rows_of(n: int, heads: int, values: int, width: int, wide: int, channels: bool = False) -> dict[str, Tensor]:
    return {"q": drawn(n, heads, width), "k": drawn(n, heads, width) / 2, "v": drawn(n, values, wide),
            "log_decay": -drawn(n, values, *[width] * channels), "beta": drawn(n, values)}  # fmt: skip


def call(*sizes: int, channels: bool = False, **more: Any) -> Call:
    """n, H, HV, K, V."""
    own = rows_of(*sizes, channels=channels)
    return Call(**own, **{"state": drawn(*sizes[2:])} | more)


def near(count: int, *sizes: int) -> list[Rows]:
    """A row of each of several sequences."""
    return [{name: x[0] for name, x in rows_of(1, *sizes).items()} for _ in range(count)]


# Rows that fill no block, one, or several, and the row after the last block; more heads than are tried, and fewer.
CALLS = {
    "many rows": call(18, 1, 2, 2, 3, before=near(1, 1, 2, 2, 3)),
    "many heads": call(5, 2, 6, 3, 2, raw={"q": drawn(5, 2, 3), "k": drawn(5, 2, 3)}, after=near(2, 2, 6, 3, 2),
                       others=[('of request "b"', rows_of(2, 2, 6, 3, 2)), ('of "c"', rows_of(7, 2, 6, 3, 2))],
                       stored=object()),
    "channels": call(9, 3, 3, 4, 4, channels=True, skip=drawn(3)),
    "channels of other widths": call(4, 3, 3, 3, 2, channels=True, recalls=False),
    "strong gates": replace(one := call(16, 1, 1, 2, 2), log_decay=20 * one.log_decay, beta=one.beta.clamp(max=1)),
    "tree": call(6, 2, 2, 2, 2, parents=(-1, 0, 0, 1, -1, 3), state=torch.zeros(2, 2, 2, dtype=torch.float64)),
    "launched": call(3, 2, 4, 2, 2, launched_before=[rows_of(3, 2, 4, 2, 2)], launched_after=[rows_of(3, 2, 4, 2, 2)],
                     before=near(1, 2, 4, 2, 2), recalls=False),
    "one row": call(1, 1, 5, 2, 2, before=near(2, 1, 5, 2, 2), after=near(1, 1, 5, 2, 2)),
}  # fmt: skip
CALLS["many rows"].log_decay[3, 0] = 0.0
CALLS["channels"].state[0, 0, 0] = 0.0


# -- inputs ----------------------------------------------------------------------------------------------


def shifted(of: Call, names: tuple[str, ...], by: int) -> Iterator[Rows]:
    """Row t - by for row t. Outside: a row of another launch, or the end, zeros, a wrap, or rows of others."""
    n, own = len(of.v), {name: getattr(of, name) for name in names}
    others, launched = (of.before, of.launched_before) if by > 0 else (of.after, of.launched_after)
    outside: list[Callable[[str, int], Tensor]] = []
    if abs(by) < n:
        outside += [lambda name, at: own[name][min(max(at, 0), n - 1)], lambda name, at: 0 * own[name][0]]
        outside += [lambda name, at: own[name][at + n]] if by > 0 else []
    if abs(by) == 1:
        yield from ({name: each[name] for name in names} for each in launched)
        yield from [{name: 0 * x for name, x in own.items()}] if launched and by > 0 else []
        outside += [lambda name, at, each=each: each[name] for each in others]
    for fill in outside:
        yield {name: torch.stack([x[t - by] if 0 <= t - by < n else fill(name, t - by) for t in range(n)])
               for name, x in own.items()}  # fmt: skip


def with_changed_inputs(of: Call) -> Iterator[tuple[str, str, Rows]]:
    """Name of a mistake, detail of its sentence, inputs that differ."""
    n, keys, heads, width = len(of.v), of.k.shape[1], of.v.shape[1], of.k.shape[2]
    words = {word: (name,) for name, word in NAMED.items()}
    for word, names in (words | {"gates": ("log_decay", "beta")}).items():
        for way, by in (("before", 1), ("after", -1)):
            yield from ((f"{word}-of-row-{way}", "", rows) for rows in shifted(of, names, by))
    for word, (name,) in words.items():
        x: Tensor = getattr(of, name)
        for by in (by for by in (2, 3, 4) if 2 * by <= n):
            for sign in (1, -1):
                detail = f"{'-' if sign > 0 else '+'} {by}"
                yield from ((f"{word}-of-another-row", detail, rows) for rows in shifted(of, (name,), sign * by))
        for whose, theirs in of.others:
            rows = torch.stack([theirs[name][min(t, len(theirs[name]) - 1)] for t in range(n)])
            yield f"{word}-of-another-request", whose, {name: rows}
        for by in range(1, 5):
            if by < (own := x.shape[1]):
                yield f"{word}-of-another-head", f"(h - {by}) % {own}", {
                    name: x[:, [(head - by) % own for head in range(own)]]}  # fmt: skip
        for says, dtype in NARROW.items():
            if not torch.equal(x.to(dtype).double(), x):
                yield f"{word}-rounded", says, {name: x.to(dtype).double()}
        if name in ("k", "v", "beta"):
            for says, times in (("zero", 0.0), ("double", 2.0), ("half", 0.5), ("negative", -1.0)):
                yield f"{word}-{says}", "", {name: times * x}
    if keys < heads:
        groups, modulo = ([h // (heads // keys) for h in range(heads)], [h % keys for h in range(heads)])
        for word, name in (("gate", "log_decay"), ("beta", "beta")):
            yield f"{word}-by-key-head", "", {name: getattr(of, name)[:, groups]}
            yield f"{word}-by-key-head-modulo", "", {name: getattr(of, name)[:, modulo]}
        for word, names in (("keys", ("q", "k")), ("key-alone", ("k",)), ("query-alone", ("q",))):
            detail = f"{keys}, not h // {heads // keys}"
            yield f"{word}-modulo", detail, {name: getattr(of, name)[:, modulo] for name in names}
    decay = of.log_decay.exp()
    for word, gates in (("by-exp2", torch.exp2(of.log_decay).log()), ("twice", (decay * decay).log()),
                        ("by-exp-of-log2", of.log_decay * math.log2(math.e)), ("half", decay.sqrt().log()),
                        ("as-gate", decay)):  # fmt: skip
        yield f"decay-{word}", "", {"log_decay": gates}
    yield "no-decay", "", {"log_decay": 0 * decay}
    yield "no-beta", "", {"beta": of.beta / of.beta}
    yield "beta-squared", "", {"beta": of.beta * of.beta}
    if of.skip is not None:
        yield "skip-in-the-state", "", {"beta": torch.stack([row + of.skip for row in of.beta])}
    if of.raw:
        raw = {"q": of.raw["q"] / math.sqrt(width), "k": of.raw["k"]}
        yield "query-not-normalised", "", {"q": raw["q"]}
        yield "key-not-normalised", "", {"k": raw["k"]}
        yield "neither-normalised", "", raw
    yield "scale-missing", "", {"q": of.q * math.sqrt(width)}
    yield "scale-twice", "", {"q": of.q / math.sqrt(width)}
    yield from ((name, detail, {"state": state}) for name, detail, state in other_states(of.state))
    for last in dict.fromkeys(n % size for size in (4, 8, 16, 32, 64)):
        if last not in (0, n):
            gates = torch.stack([of.log_decay[t] if t < n - last else 0 * of.log_decay[t] for t in range(n)])
            yield "last-decays-dropped", f"last {f'{last} tokens' if last > 1 else 'token'}", {"log_decay": gates}
    for size in (*(size for size in (16, 32, 64, 128, 256) if size < n), n):
        total, gates = torch.zeros(1), of.log_decay.clone()
        for t in range(n):
            past = 0 * total if t % size == 0 else total
            total = past + of.log_decay[t].float()
            gates[t] = (total.exp() * (-past).exp()).double().log()
        yield "decay-of-running-sums", f" of {size} tokens each" if size < n else "", {"log_decay": gates}


def other_states(state: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    if not bool((state != 0).any()):
        return
    heads, keys, values = state.shape
    yield from (("first-state-rounded", says, state.to(dtype).double()) for says, dtype in NARROW.items())
    yield "state-cleared", "", 0 * state
    stored = torch.stack([one.T.reshape(keys, values) for one in state])
    yield "state-transposed", "", stored
    if keys != values:
        yield "state-transposed", "", torch.stack([one.reshape(values, keys).T for one in state])
    for by in range(1, min(heads - 1, 4) + 1):
        yield "state-of-another-head", f"(h - {by}) % {heads}", state[[(head - by) % heads for head in range(heads)]]


@pytest.mark.parametrize("of", CALLS.values(), ids=CALLS)
def test_mistakes_in_the_inputs_of_a_call_change_these_alone(of: Call) -> None:
    due = dict[str, list[tuple[str, Rows]]]()
    for name, detail, rows in with_changed_inputs(of):
        due.setdefault(name, []).append((detail, rows))
    found = dict[str, list[Variant]]()
    for mistake, variant in listed(of):
        if variant.walk is walk:
            found.setdefault(mistake.name, []).append(variant)
    assert found.keys() == due.keys()
    for name, variants in found.items():
        assert [one.detail for one in variants] == [detail for detail, _ in due[name]], name
        for one, (_, rows) in zip(variants, due[name], strict=True):
            for each in (*ROWS, "state"):
                right = rows.get(each, getattr(of, each))
                assert close(getattr(one.call, each), right, 1e-5 if name == "decay-of-running-sums" else 1e-12), name


# -- recurrences -----------------------------------------------------------------------------------------

Step = Callable[..., tuple[Tensor, Tensor, Tensor]]


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).double()


def by_hand(of: Call, step: Step, count: int | None = None) -> Walked:
    """A recurrence, one head of one row at a time. step: state [K, V], its decay, q, k, v, beta -> read-out, update,
    state"""
    n, heads = len(of.v) if count is None else count, of.v.shape[1]
    states, core, updates = [of.state], list[Tensor](), list[Tensor]()
    for t in range(n):
        before, done = states[of.parents[t] + 1 if of.parents else t], list[tuple[Tensor, Tensor, Tensor]]()
        for h in range(heads):
            group = h // (heads // of.k.shape[1])
            decay = torch.diag(of.log_decay[t, h].exp().expand(of.k.shape[2]))
            done.append(step(before[h], decay, of.q[t, group], of.k[t, group], of.v[t, h], of.beta[t, h]))
        for into, parts in zip((core, updates, states), zip(*done, strict=True), strict=True):
            into.append(torch.stack(parts))
    none = of.v[:0]
    return Walked(torch.stack(core) if n else none, torch.stack(updates) if n else none, torch.stack(states))


def row(recalls: bool, *, recalled: str = "faded", read: str = "after", kept: str = "after", decay_last: bool = False,
        update: Callable[..., Tensor] | None = None, by_value: bool = False, **rounds: Any) -> Step:  # fmt: skip
    """The step of a recurrence. recalled, read, kept: the states from which a row recalls, reads, and that it leaves"""
    def step(old: Tensor, decay: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        made = {"old": old, "faded": old @ decay if by_value else decay @ old, "nothing": 0 * old}
        recall = k @ made["old" if decay_last else recalled] * recalls
        u = update(v, recall, beta) if update is not None else beta * (v - recall)
        made["written"] = old + torch.outer(k, u)
        made["after"] = decay @ made["written"] if decay_last else made["faded"] + torch.outer(k, u)
        made |= {name: change(made["after"]) for name, change in rounds.items()}
        return q @ made[read], u, made[kept]

    return step


def results(of: Call) -> Iterator[tuple[str, str, Walked]]:
    """Name of a mistake, detail of its sentence, results."""
    rule, n = of.recalls, len(of.v)
    right = by_hand(of, row(rule))
    for name, changes in ((("decay-after-update", {"decay_last": True, "read": "written"})),
                          ("decay-after-update", {"decay_last": True}), ("recall-undecayed", {"recalled": "old"}),
                          ("recall-missing", {"recalled": "nothing"}), ("read-before-update", {"read": "old"})):
        yield name, "", by_hand(of, row(rule, **changes))
    if not rule:
        yield "recall-added", "", by_hand(of, row(True))
    if rule and float(of.beta.max()) > 1:
        yield "erases-at-most-once", "", by_hand(of, row(rule, update=lambda v, recall, beta: (
            beta * v - min(beta, torch.ones(())) * recall)))  # fmt: skip
        yield "writes-at-most-once", "", by_hand(of, row(rule, update=lambda v, recall, beta: (
            min(beta, torch.ones(())) * v - beta * recall)))  # fmt: skip
    if of.log_decay.ndim == 3 and of.k.shape[2] == of.v.shape[2]:
        yield "decay-of-values", "", by_hand(of, row(rule, by_value=True))
    for says, dtype in NARROW.items():
        stored = right._replace(states=torch.stack([right.states[0], *(narrow(x, dtype) for x in right.states[1:])]))
        yield f"state-stored-in-{says}", "", stored
        rounds = {"narrow": lambda x, dtype=dtype: narrow(x, dtype)}
        for read in ("after", "narrow"):
            yield f"state-in-{says}", "", by_hand(of, row(rule, read=read, kept="narrow", **rounds))
        if not of.parents:
            updates = iter(right.update.flatten(0, 1))
            yield f"state-in-{says}", "", by_hand(of, row(
                rule, update=lambda *given, updates=updates: next(updates), read="narrow", kept="narrow", **rounds))
        yield f"update-in-{says}", "", by_hand(of, row(rule, update=lambda v, recall, beta, dtype=dtype: (
            narrow(beta * (v - recall), dtype))))  # fmt: skip
        yield f"read-in-{says}", "", by_hand(of, row(rule, read="narrow", **rounds))
    for read in ("after", "tiles") if of.stored is not None else ():
        yield "stored-per-token", "", by_hand(of, row(rule, read=read, kept="tiles", tiles=tiles))
    idle = Walked(0 * of.v, 0 * of.v, torch.stack([of.state] * (n + 1)))
    for there in (0.0, math.nan) if not of.parents else ():
        done, last = by_hand(of, row(rule), n - 1), torch.full_like(of.v[0], there)
        yield "last-row-skipped", "", Walked(*(torch.stack([*some, end]) for some, end in zip(
            done, (last, last, done.states[-1]), strict=True)))  # fmt: skip
    yield from [("last-row-skipped", "", idle)] if of.launched_before else []
    yield "nothing-done", "", idle
    for size in (4, 8, 16, 32, 64):
        if size < n and not of.parents:
            yield from ((name, str(size), each) for name, each in in_blocks(of, size))


def in_blocks(of: Call, size: int) -> Iterator[tuple[str, Walked]]:
    """The same with another state after each full block."""
    for name in ("cleared-by-block", "forgotten-by-block", "undecayed-by-block"):
        start, at, since = of.state, of.state, torch.zeros_like(of.state[..., :1])
        parts = [Walked(of.v[:0], of.v[:0], at[None])]
        for t in range(len(of.v)):
            one = replace(of, state=at, **{each: getattr(of, each)[t : t + 1] for each in ROWS})
            done = by_hand(one, row(of.recalls))
            at, since = done.states[1], since + of.log_decay[t].reshape(len(at), -1, 1)
            if (t + 1) % size == 0:
                faded = since.exp() * start
                at = {"cl": 0 * at, "fo": at - faded, "un": at - faded + start}[name[:2]]
                start, since = at, 0 * since
            parts.append(done._replace(states=at[None]))
        yield name, Walked(*(torch.cat(some) for some in zip(*parts, strict=True)))


def tiles(x: Tensor, *stored: object) -> Tensor:
    return (8 * x).round() / 8


@pytest.mark.parametrize("of", CALLS.values(), ids=CALLS)
def test_mistakes_in_the_recurrence_give_the_results_by_hand(of: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rule_variants, "as_stored", tiles)
    due = dict[str, list[tuple[str, Walked]]]()
    for name, detail, walked in results(of):
        due.setdefault(name, []).append((detail, walked))
    found = dict[str, list[tuple[str, Walked]]]()
    for one in candidates(of, [(mistake, variant) for mistake, variant in listed(of) if variant.walk is not walk]):
        assert one.sentence == one.mistake.sentence.format(one.variant.detail)
        found.setdefault(one.mistake.name, []).append((one.variant.detail, one.walked))
    assert found.keys() == due.keys()
    for name, forms in found.items():
        for (detail, walked), (right_detail, right) in zip(forms, due[name], strict=True):
            assert detail == right_detail, name
            assert all(map(close, walked, right)), name


@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_changed_inputs_are_carried_through_the_rows_at_once(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there is memory for, at least one. As many rows, heads and channels do not make decays of channels."""
    for of in (replace(CALLS["tree"], state=drawn(2, 2, 2)), CALLS["channels of other widths"], call(2, 1, 2, 2, 3)):
        room = of.state.numel() * (len(of.v) + 1)
        batches, together = list[int](), delta_rule._together
        monkeypatch.setattr(delta_rule, "TOGETHER", at_once * room + (room - 1 if at_once > 1 else -1))
        monkeypatch.setattr(delta_rule, "_together", lambda call, calls, together=together, batches=batches: (
            batches.append(len(calls)) or together(call, calls)))  # fmt: skip
        names = {"no-beta", "read-before-update", "keys-modulo", "no-decay", "beta-half", "key-zero", "scale-twice"}
        forms = listed(of, names)
        assert {mistake.name for mistake, _ in forms} == names - {*(["keys-modulo"] if of.k.shape[1] > 1 else [])}
        for (mistake, variant), one in zip(forms, candidates(of, forms), strict=True):
            assert (one.mistake, one.variant) == (mistake, variant)
            step = row(of.recalls, read="old" if mistake.name == "read-before-update" else "after")
            assert all(map(close, one.walked, by_hand(variant.call, step)))
        many = len(forms) - 1
        assert batches == [min(at_once, many - done) for done in range(0, many, at_once)]
        monkeypatch.undo()


def test_draws_of_a_mistake_move_each_input_by_a_part_of_itself() -> None:
    of, seen = CALLS["one row"], list[Call]()

    def moved(given: Call) -> Walked:
        seen.append(given)
        return Walked(given.q, given.k, torch.stack([given.state, 2 * given.state]))

    variant = Variant("7", of, moved)
    (mistake,) = (one for one in MISTAKES if one.name == "keys-modulo")
    one = explanation(Candidate(mistake, variant, moved(of)), lambda walked: part("state", 1, walked))
    assert torch.equal(one.wrong, 2 * of.state)
    assert (one.sentence, one.name) == ("value head h reads key head h % 7", "keys-modulo")
    assert one.draws is not None
    draws, generator = one.draws(), torch.Generator().manual_seed(0)
    assert len(draws) == delta_rule.DRAWS == len(seen) - 1
    for given, draw in zip(seen[1:], draws, strict=True):
        assert torch.equal(draw, 2 * given.state)
        for name in (*ROWS, "state"):
            x = getattr(of, name)
            by = torch.rand(x.shape, generator=generator, dtype=x.dtype) * 2 - 1
            assert close(getattr(given, name), x + by * delta_rule.NUDGE * x, 1e-14)
    walked = Walked(*(torch.full((3,), float(at)) for at in range(3)))
    assert [float(part(name, 2, walked).max()) for name in ("core", "update", "state")] == [0, 1, 2]


# -- findings --------------------------------------------------------------------------------------------


def test_a_mistake_in_half_of_a_recurrence_is_named_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three mistakes: one accounts for the read-outs alone, one for the state, too, and one for nothing.

    A commit, and rows without a granted error, have one tensor alone, which every mistake accounts for.
    """
    own, names, fits = delta_rule, ["alone", "both", "neither"], dict[str, set[str]]()
    monkeypatch.setattr(own, "_of_layer", lambda case: case.found)
    monkeypatch.setattr(own, "_of_commit", lambda case: ("a commit", 2))
    monkeypatch.setattr(own, "listed", lambda call: call)
    monkeypatch.setattr(own, "candidates", lambda call, listed: names * (call == listed))
    monkeypatch.setattr(own, "explanation", lambda name, take: Explanation(name, torch.zeros(1)))
    monkeypatch.setattr(own, "agrees", lambda case, one: one.sentence in fits[case.component])
    for component, other, said in (("core", "state", "the read-outs"), ("state", "core", "the state")):
        fits = {component: {"alone", "both"}, other: {"both"}}
        monkeypatch.setattr(own, "_other", lambda case, other=other: SimpleNamespace(component=other))
        case: Any = SimpleNamespace(component=component, granted=torch.ones(1), piece=None, found=("a layer", 2))
        assert [one.sentence for one in own.recurrence(case)] == ["both", "neither"]
        assert [one.sentence for one in own.half_of_recurrence(case)] == [f"alone, in {said} alone"]
        for kind, granted in (("commit", case.granted), ("verify", None)):
            one = SimpleNamespace(**vars(case) | {"granted": granted, "piece": piece_of(kind)})
            assert [each.sentence for each in own.recurrence(one)] == names
            assert not [*own.half_of_recurrence(one)]
        case.found = None
        assert not [*own.recurrence(case)]


def same(found: Any, due: Any) -> bool:
    """Whether two fields of a call have the same numbers."""
    if isinstance(due, Tensor):
        return torch.equal(found, due)
    if isinstance(due, dict):
        return found.keys() == due.keys() and all(same(found[name], due[name]) for name in due)
    if isinstance(due, list | tuple):
        return len(found) == len(due) and all(map(same, found, due))
    return bool(found == due)


def piece_of(kind: str, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(span=SimpleNamespace(kind=kind), **more)


def test_a_commit_is_computed_from_the_rows_of_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of 3 tokens, 2 of which were accepted; a larger one is not run again."""
    rows = rows_of(3, 2, 2, 4, 5)
    scene = SimpleNamespace(**rows, base=drawn(2, 4, 5), recalls=False, count=2)
    for found, most, tried in ((scene, 120, True), (scene, 119, False), (None, 120, False)):
        monkeypatch.setattr(delta_rule, "own_scene", lambda case, found=found: found)
        monkeypatch.setattr(delta_rule, "LARGEST", most)
        given = delta_rule._of_commit(SimpleNamespace())
        assert (given is not None) is tried
        if given is not None:
            assert given == (Call(**rows | {"q": rows["k"]}, state=scene.base, recalls=False), 2)


def test_a_layer_is_computed_from_its_own_rows_and_those_next_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six requests with rows; one lacks some. The other rows of the delta rule have another name without recall."""
    sizes = (3, 2, 4, 5, 6)
    own, mixed = rows_of(*sizes), drawn(3, 2 * 2 * 5 + 4 * 6)
    others = {f"of {name}": rows_of(2, *sizes[1:]) for name in "bcdefg"}
    del others["of c"]["q"]
    skip, tiles = drawn(4), Blocked(torch.float8_e4m3fn, (2, 2))
    layer = SimpleNamespace(mixer=object.__new__(GdnWeights))
    object.__setattr__(layer.mixer, "skip", skip)
    monkeypatch.setattr(delta_rule, "layer_of", lambda case: case.layer)
    memory = LightningMemory(drawn(4, 5, 6).float())
    work = LayerWork("trunk", 0, torch.zeros(1, 1), 0, memory, (-1, 0, 0))

    def case(**changed: Any) -> Any:
        given = {"component": "core", "piece": SimpleNamespace(work=work), "layer": layer, "write": "beta",
                 "oracle": SimpleNamespace(rounds={"state": tiles}), "inside": ("q",), "lost": ()}
        given |= changed
        shown = {name if name != "beta" else given["write"]: x for name, x in own.items()} | {"mixed": mixed}
        theirs = {name if name != "beta" else given["write"]: name for name in own}
        return SimpleNamespace(
            **given, context=SimpleNamespace(shown=SimpleNamespace(inside=given["inside"])),
            own=lambda name: None if name in given["lost"] else shown.get(name),
            others=lambda name: [(whose, rows[theirs[name]]) for whose, rows in others.items() if theirs[name] in rows])

    whole = {whose: rows for whose, rows in others.items() if whose != "of c"}
    raw = {"q": mixed[:, :10].reshape(3, 2, 5), "k": mixed[:, 10:20].reshape(3, 2, 5)}
    right = Call(
        **own, state=memory.state.double(), parents=(-1, 0, 0), raw=raw, others=[*whole.items()], skip=skip,
        stored=tiles,
        before=[{name: x[1] for name, x in rows.items()} for rows in [*whole.values()][:4]],
        after=[{name: x[0] for name, x in rows.items()} for rows in [*whole.values()][:4]])  # fmt: skip
    zero, seeded = torch.zeros(4, 5, 6, dtype=torch.float64), replace(tiles, seed=3)
    chain = replace(work, memory=None, parents=None)
    for given, changed in (
        ({}, {}), ({"component": "state"}, {}), ({"component": "update"}, {}), ({"write": "write"}, {"recalls": False}),
        ({"piece": SimpleNamespace(work=chain)}, {"state": zero, "parents": ()}),
        ({"inside": ()}, {"raw": {}}), ({"lost": ("mixed",)}, {"raw": {}}),
        ({"layer": None}, {"skip": None}), ({"layer": SimpleNamespace(mixer=layer)}, {"skip": None}),
        *(({"oracle": one and SimpleNamespace(rounds={"state": one})}, {"stored": None})
          for one in (None, torch.bfloat16, seeded)),
    ):  # fmt: skip
        made = delta_rule._of_layer(case(**given))
        assert made is not None and made[1] == 3
        for name, due in vars(replace(right, **changed)).items():
            assert same(getattr(made[0], name), due), name
    for given in ({"component": "mixed"}, {"piece": None}, {"piece": SimpleNamespace(work=None)}, {"lost": ("v",)}):
        assert delta_rule._of_layer(case(**given)) is None
    for most, tried in ((3 * 4 * 5 * 6, True), (3 * 4 * 5 * 6 - 1, False)):
        monkeypatch.setattr(delta_rule, "LARGEST", most)
        assert (delta_rule._of_layer(case()) is not None) is tried


def test_the_other_result_of_a_call_is_judged_if_errors_of_it_are_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, found = list[str](), [SimpleNamespace(granted=1), SimpleNamespace(granted=None), None]
    piece: Any = SimpleNamespace(writes_state=True, place=lambda component: asked.append(component) or component)
    case: Any = SimpleNamespace(component="state", piece=piece, finding=make_dataclass("Finding", ["place"])("state"),
                                context=None, oracle=None, history=None)  # fmt: skip
    for other in found:
        monkeypatch.setattr(delta_rule, "case_of", lambda *given, other=other: other)
        assert delta_rule._other(case) is (other if other is found[0] else None)
    case.component = "core"
    delta_rule._other(case)
    assert asked == ["core"] * 3 + ["state"]
    piece.writes_state = False
    assert delta_rule._other(case) is None
    case.piece = None
    assert delta_rule._other(case) is None

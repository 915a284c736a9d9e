"""Explanations: one place or one piece of memory is wrong, and the finding names the mistake or is "unexplained".

Leaves out: faults of the engine itself (`test_diagnose_planted.py`), and wrong states, which T2d names
(`test_directed.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from instep.checks import for_labels
from instep.checks.known_wrong_states import scene_of
from instep.checks.poison import Poison
from instep.checks.recomputed_values import Derived
from instep.checks.unchanged_bytes import Bytes
from instep.checks.wrong_state_inputs import Scene, add, step
from instep.diagnose import RunHistory, explained, explanation_bank
from instep.diagnose.mistakes.explanation_fit import best
from instep.diagnose.mistakes.finding_case import Case, Explanation
from instep.diagnose.mistakes.wrong_rows import elsewhere
from instep.finding_problem import UNEXPLAINED, Explained, Problem
from instep.oracle.oracle import Oracle
from instep.oracle.recomputation import Recomputation
from instep.verdict import Comparison, Tier
from instep.watch.event_context import EventContext, RowSpan
from instep.watch.rows_by_request import row_spans, rows
from instep_reference import gdn
from instep_reference.attention import attend, rotate
from instep_reference.contract.engine import Commit, Forward
from instep_reference.contract.place_names import STAGE_LEVEL, Place
from instep_reference.mlp import dense
from instep_reference.norms import gated_norm, rms_norm
from instep_reference.weights import Weights
from support.inputs import check_contexts as m
from support.running.covering import WHOLE, few

Rows = Mapping[str, torch.Tensor]


class Scenario:
    """A run of the reference in fp32 as the subject, up to the event that is spoiled."""

    def __init__(self, directory: Any) -> None:
        self.opened = m.checkpoint(directory)
        self.contexts = m.run(self.opened, m.events_of(self.opened)[:24])
        self._oracles: dict[int, tuple[Oracle, torch.Tensor]] = {}  # by the event that follows
        self.weights, self.config = Weights.of(self.opened), self.opened.config

    def oracle(self) -> Oracle:
        return Oracle(self.opened, m.declared(torch.float32, torch.float32), torch.float32)

    def said(self, spoiled: EventContext, *, bits: bool = False) -> Sequence[Comparison]:
        """The event's findings, explained as at the end of a replay."""
        oracle, history = self._oracle_before(spoiled.index), RunHistory()
        check = Bytes() if bits else Derived(oracle)
        for context in self.contexts[: spoiled.index]:
            history(context)
        findings = [found for found in check(spoiled) if isinstance(found, Comparison) and not found.agrees]
        history(spoiled)
        return sorted(explained(findings, spoiled, oracle, history), key=Comparison.order)

    def _oracle_before(self, index: int) -> Oracle:
        """The oracle before an event, with its draws. Its memory of the right events is computed once."""
        if index not in self._oracles:
            made = self.oracle()
            for context in self.contexts[:index]:
                made.at(context)
            self._oracles[index] = made, made.runner.generator.get_state()
        kept, draws = self._oracles[index]
        mine = copy(kept)
        mine.flights, mine.previous = dict(kept.flights), dict(kept.previous)
        mine.runner.generator.set_state(draws)
        return mine

    def own(self, context: EventContext, layer: int, span: RowSpan) -> Rows:
        """The subject's rows of a layer, in fp64, and the layer's hidden rows."""
        found = {place.component: rows(context.subject, place, span).double()
                 for place in context.subject.places if (place.stage, place.layer) == ("trunk", layer)}  # fmt: skip
        before = Place("trunk", layer - 1, "hidden") if layer else Place("trunk", STAGE_LEVEL, "embedding")
        return {**found, "before": rows(context.subject, before, span).double()}

    def at_place(self, place: Place, change: "Callable[[Scenario, Rows, RowSpan], torch.Tensor]") -> Comparison:
        """The first finding, once the longest request's rows of a place are what `change` makes of them."""
        context = self.packed(second=place.component in ("attended", "core", "query", "mixed"))
        span = max(row_spans(context, "trunk"), key=lambda each: each.count)
        wrong = change(self, self.own(context, max(place.layer, 0), span), span)

        def put(tensor: torch.Tensor) -> torch.Tensor:
            tensor[span.begin : span.begin + span.count] = wrong.to(tensor)
            return tensor

        found = self.said(m.with_rows(context, place, put))
        assert found, "nothing was found"
        assert found[0].place == place
        return found[0]

    def packed(self, *, second: bool) -> EventContext:
        """A forward with rows of two requests, several of one of them. second: whether it follows other forwards"""
        return next(
            context for context in self.contexts if isinstance(context.event, Forward)
            and len(spans := row_spans(context, "trunk")) > 1
            and (most := max(spans, key=lambda span: span.count)).count > 3 and bool(most.start) == second
        )


def with_row(x: torch.Tensor, row: Any, other: Any) -> torch.Tensor:
    changed = x.clone()
    changed[row] = other
    return changed


pytestmark = pytest.mark.slow  # a whole run, spoiled place by place

GDN, ATTENTION = 0, 3


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scenario:
    return Scenario(tmp_path_factory.mktemp("explain"))


def mixer(s: Scenario, layer: int = GDN) -> Any:
    return s.weights.layers[layer].mixer


def gated(s: Scenario, r: Rows, **other: Any) -> torch.Tensor:
    given = {"core": r["core"], "z": r["z"], "weight": mixer(s).norm, "eps": s.config.eps, "gate": s.config.output_gate}
    return gated_norm(**{**given, **other})


def core(s: Scenario, r: Rows, span: RowSpan, *, spread: Any = None, state: Any = None, **other: Any) -> torch.Tensor:
    """The delta rule over the subject's rows; spread: how heads of q and k become those of v."""
    given = {**{name: r[name] for name in ("q", "k", "v", "log_decay", "beta")}, **other}
    repeat = spread or (lambda x: x.repeat_interleave(2, 1))
    before = s.packed(second=True).subject.before[span.request].state[GDN].double()[None]
    q, k, v = (x[None] for x in (repeat(given["q"]), repeat(given["k"]), given["v"]))
    decay, beta = given["log_decay"][None, ..., None], given["beta"][None, ..., None]
    return gdn.recur(q, k, v, decay, beta, beta, before if state is None else state(before)).out[0]


def attended(s: Scenario, r: Rows, span: RowSpan, *, query: Any = None, cut: int = 0) -> torch.Tensor:
    before = s.packed(second=True).subject.before[span.request]
    keys, values = (x[ATTENTION].double() for x in (before.keys, before.values))
    memory = [torch.cat((x[: len(x) - cut], new)) for x, new in ((keys, r["key"]), (values, r["value"]))]
    return attend(r["query"] if query is None else query(r["query"]), *memory)


def by_turns(query: torch.Tensor) -> torch.Tensor:
    return query[:, [0, 2, 1, 3]]


def unit(x: torch.Tensor, eps: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return x / eps(x.square().sum(-1, keepdim=True))


def heads_of_q(s: Scenario, r: Rows) -> torch.Tensor:
    return r["mixed"][:, : 2 * s.config.key_dim].reshape(-1, 2, s.config.key_dim)


def size_of(x: torch.Tensor) -> torch.Tensor:
    return (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def tail(span: RowSpan) -> int:
    """Rows of a last block of 4 that is not full; of a whole number of them, those of a block of 8, or all."""
    return span.count % 4 or span.count % 8 or span.count


def read_out(
    s: Scenario, r: Rows, span: RowSpan, read: Any = lambda before, after: after, forgets_every: int = 0
) -> torch.Tensor:
    """The delta rule token by token: what a row is read from; after how many tokens the state before them is lost."""
    state = first = s.packed(second=True).subject.before[span.request].state[GDN].double()
    q, k = (r[name].repeat_interleave(2, 1) for name in ("q", "k"))
    decays, made = r["log_decay"], []
    for t in range(span.count):
        before, state = state, step(state, k[t], r["v"][t], decays[t], r["beta"][t])
        made.append(torch.einsum("hk,hkv->hv", q[t], read(before, state)))
        if forgets_every and (t + 1) % forgets_every == 0:
            state = state - decays[t + 1 - forgets_every : t + 1].sum(0).exp()[:, None, None] * first
            first = state
    return torch.stack(made)


WRONG: list[tuple[str, int, Callable[[Scenario, Rows, RowSpan], torch.Tensor], str]] = [
    ("z", GDN, lambda s, r, _: torch.zeros_like(r["z"]), "is all zero"),
    ("z", GDN, lambda s, r, _: 2 * r["z"], "is twice the right value"),
    ("z", GDN, lambda s, r, _: r["z"] / 2, "is half of the right value"),
    ("z", GDN, lambda s, r, _: -r["z"], "is the opposite of the right value"),
    ("z", GDN, lambda s, r, _: r["z"].mT.reshape(r["z"].shape), "is transposed"),
    ("z", GDN, lambda s, r, _: r["z"].roll(1, 0), "each row is that of the row before it"),
    ("z", GDN, lambda s, r, _: r["z"].roll(-1, 0), "each row is that of the row after it"),
    ("z", GDN, lambda s, r, _: r["z"].roll(1, 1), "each head is that of the head before it"),
    ("z", GDN, lambda s, r, _: with_row(r["z"], 2, r["z"][0]), "row 2 is that of row 0"),
    ("z", GDN, lambda s, r, _: r["z"] * torch.where(torch.arange(16) < 8, 1.001, 1.0),
     "times the right value, in columns"),
    ("b", GDN, lambda s, r, _: r["b"].roll(1, 1), "each head is that of the head before it"),
    ("gated", GDN, lambda s, r, _: gated(s, r, z=r["z"].roll(1, 0)), "is computed with the z of the row before"),
    ("gated", GDN, lambda s, r, _: gated(s, r, z=r["z"].roll(1, 1)), "is computed with the z of another head"),
    ("gated", GDN, lambda s, r, _: gated(s, r, eps=10 * s.config.eps), "is normed with 10 times the eps"),
    ("gated", GDN, lambda s, r, _: gated(s, r, eps=3e-4), "is normed with an eps of 0.0003; it is 1e-06"),
    ("gated", GDN, lambda s, r, _: gated(s, r, weight=1 + mixer(s).norm), "is scaled with 1 + w, not with w"),
    ("gated", GDN, lambda s, r, _: gated(s, r, gate="sigmoid"), "is gated by a sigmoid of z, not by silu"),
    ("gated", GDN, lambda s, r, _: gated(s, r) / F.silu(r["z"]), "is not gated by z"),
    ("gated", GDN, lambda s, r, _: gated(s, r, core=r["core"].bfloat16().double()), "with core rounded to bfloat16"),
    ("normed", GDN, lambda s, r, _: rms_norm(r["before"], s.weights.layers[0].input_norm - 1, s.config.eps),
     "is scaled with w, not with 1 + w"),
    ("q", GDN, lambda s, r, _: r["q"] * s.config.key_dim**0.5, "lacks the scale K^-1/2"),
    ("q", GDN, lambda s, r, _: unit(heads_of_q(s, r), lambda x: (x + 8e-6).sqrt()) * s.config.key_dim**-0.5,
     "is normed with eps on the mean of the squares"),
    ("log_decay", GDN, lambda s, r, _: r["log_decay"].bfloat16().double(), "as if stored in bfloat16"),
    ("log_decay", GDN, lambda s, r, _: -mixer(s).A_log.exp() * torch.sigmoid(r["a"] + mixer(s).dt_bias),
     "is made with a sigmoid, not with a softplus"),
    ("log_decay", GDN, lambda s, r, _: -mixer(s).A_log.exp() * F.softplus(r["a"]), "is made without dt_bias"),
    ("beta", GDN, lambda s, r, _: F.softplus(r["b"]), "is made with a softplus, not with a sigmoid"),
    ("beta", GDN, lambda s, r, _: r["beta"].square(), "is the square of the right value"),
    ("mixed", GDN, lambda s, r, _: r["mixed"].roll(1, 0), "each row is that of the row before it"),
    ("core", GDN, lambda s, r, span: core(s, r, span, beta=torch.ones_like(r["beta"])),
     "beta is missing: every token is written in full, in the read-outs alone"),
    ("core", GDN, lambda s, r, span: core(s, r, span, log_decay=0 * r["log_decay"]),
     "the decay is missing: nothing is forgotten"),
    ("core", GDN, lambda s, r, span: core(s, r, span, log_decay=2 * r["log_decay"]), "every decay is applied twice"),
    ("core", GDN, lambda s, r, span: core(s, r, span, k=r["k"].roll(1, 0)), "the key of row t - 1 is used for row t"),
    ("core", GDN, lambda s, r, span: core(s, r, span, q=r["q"].roll(1, 1)),
     "the query of head (h - 1) % 2 is used for head h"),
    ("core", GDN, lambda s, r, span: core(s, r, span, spread=lambda x: x.repeat(1, 2, 1)),
     "value head h reads key head h % 2, not h // 2"),
    ("core", GDN, lambda s, r, span: core(s, r, span, beta=r["beta"].bfloat16().double()),
     "beta is rounded to bfloat16"),
    ("core", GDN, lambda s, r, span: core(s, r, span, state=torch.zeros_like), "was started from zero"),
    ("core", GDN, lambda s, r, span: core(s, r, span, state=lambda x: x.bfloat16().double()),
     "the state before the first row is rounded to bfloat16"),
    ("query", ATTENTION, lambda s, r, span: rotate(r["query"], torch.ones(span.count), s.config),
     "is placed 1 position too late"),
    ("attended", ATTENTION, lambda s, r, span: attended(s, r, span, cut=1), "does not see the last position before"),
    ("attended", ATTENTION, lambda s, r, span: attended(s, r, span, query=lambda q: q * 1.44 / 1.4426950408889634),
     "its scores are 0.99813 times the right ones, as with 1.44 for log2(e)"),
    ("attended", ATTENTION, lambda s, r, span: attended(s, r, span, query=by_turns)[:, [0, 2, 1, 3]],
     "query head h reads KV head h % 2, not h // 2"),
    ("core", GDN, lambda s, r, span: core(s, r, span, log_decay=with_row(r["log_decay"], slice(-tail(span), None), 0)),
     "lacks the decay of the last"),
    ("core", GDN, lambda s, r, span: read_out(s, r, span, lambda before, after: before),
     "each row is read before its own token is added"),
    ("core", GDN, lambda s, r, span: read_out(s, r, span, lambda before, after: after.bfloat16().double()),
     "each row is read from the state rounded to bfloat16"),
    ("core", GDN, lambda s, r, span: read_out(s, r, span, forgets_every=4),
     "drops the state from before the block at the end of every block of 4 tokens"),
    ("gated", GDN, lambda s, r, _: gated(s, r) * size_of(r["core"]) / size_of(r["core"].roll(-1, 1)),
     "is normed with the root mean square of the head after it"),
    ("key", ATTENTION, lambda s, r, span: rotate(
        rms_norm(r["key_raw"], mixer(s, ATTENTION).key_norm - 1, s.config.eps),
        span.start + torch.arange(span.count), s.config), "is scaled with w, not with 1 + w"),
    ("residual", GDN, lambda s, r, _: r["mixer"], "lacks the residual"),
    ("embedding", STAGE_LEVEL, lambda s, r, _: with_row(r["before"], 3, s.weights.embedding[11]),
     "row 3 is the embedding of token 11; the trace has"),
    ("normed", GDN, lambda s, r, _: rms_norm(r["before"], s.weights.layers[1].input_norm, s.config.eps),
     "is made with the weights of layer 1"),
    ("query", ATTENTION, lambda s, r, span: rotate(
        rms_norm(r["projected"][:, :, 0], mixer(s, ATTENTION).key_norm, s.config.eps),
        span.start + torch.arange(span.count), s.config),
     "is made with `mixer.key_norm` in the place of `mixer.query_norm`"),
    ("mlp", GDN, lambda s, r, _: dense(
        replace(mlp := s.weights.layers[GDN].mlp, gate=mlp.up, up=mlp.gate), r["post_normed"]),
     "is made with `mlp.gate` and `mlp.up` exchanged"),
    ("post_normed", GDN, lambda s, r, _: rms_norm(r["before"], s.weights.layers[GDN].post_norm, s.config.eps),
     "is computed with the rows that the layer reads in the place of `residual`"),
    ("hidden", GDN, lambda s, r, _: r["residual"] + r["mixer"],
     "is computed with `mixer` in the place of `mlp`"),
]  # fmt: skip


@few(6)
@pytest.mark.parametrize(("component", "layer", "change", "sentence"), WRONG, ids=[f"{w[0]}: {w[3]}" for w in WRONG])
def test_a_result_with_one_known_mistake_is_explained(
    scene: Scenario, component: str, layer: int, change: Callable[..., Any], sentence: str
) -> None:
    said = scene.at_place(Place("trunk", layer, component), change).diagnosis
    assert sentence in said and UNEXPLAINED not in said, said


def noise(_: Scenario, r: Rows, __: RowSpan, name: str = "z") -> torch.Tensor:
    return r[name] + 0.01 * torch.randn(r[name].shape, generator=torch.Generator().manual_seed(0)).double()


def smooth(_: Scenario, r: Rows, __: RowSpan) -> torch.Tensor:
    return r["gated"] * (1 + 0.02 * torch.sin(torch.arange(r["gated"].shape[-1]).double()))


def near_but_not(s: Scenario, r: Rows, _: RowSpan) -> torch.Tensor:
    """Most of the way to the gate of the row before: nearer is no explanation."""
    return 0.1 * gated(s, r) + 0.9 * gated(s, r, z=r["z"].roll(1, 0))


def nearly_of_layer_1(s: Scenario, r: Rows, _: RowSpan) -> torch.Tensor:
    mine, other = (s.weights.layers[layer].input_norm for layer in (0, 1))
    return rms_norm(r["before"], 0.1 * mine + 0.9 * other, s.config.eps)


@pytest.mark.parametrize(("component", "change"), [
    ("z", noise), ("gated", smooth), ("gated", near_but_not), ("normed", nearly_of_layer_1),
    pytest.param("mlp", lambda s, r, span: noise(s, r, span, "mlp"), marks=WHOLE),
    ("beta", lambda s, r, span: noise(s, r, span, "beta")), ("core", lambda s, r, span: noise(s, r, span, "core")),
])
def test_a_finding_without_explanation_is_unexplained(scene: Scenario, component: str, change: Any) -> None:
    said = scene.at_place(Place("trunk", GDN, component), change).diagnosis
    assert said.startswith("relative error") and said.endswith(f"; {UNEXPLAINED}")


def test_a_bank_that_raises_loses_no_finding(scene: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(case: Case) -> None:
        raise ValueError("no such row")

    monkeypatch.setattr("instep.diagnose.explanation_bank.explanation_of", raises)
    said = scene.at_place(Place("trunk", GDN, "z"), noise).diagnosis
    raised = "; unexplained: the search for an explanation raised ValueError: no such row"
    assert said.startswith("relative error") and said.endswith(raised)


def test_another_requests_row_is_named_by_what_is_right_there(scene: Scenario) -> None:
    context = scene.packed(second=False)
    mine = max(row_spans(context, "trunk"), key=lambda span: span.count)
    other = next(span for span in row_spans(context, "trunk") if span.request != mine.request)
    place = Place("trunk", 2, "normed")
    theirs = rows(context.subject, place, other)[0].clone()
    wrong = m.with_rows(context, place, lambda x: with_row(x, mine.begin + 2, theirs))
    assert scene.said(wrong)[0].diagnosis.startswith(f'row 2 is that of row 0 of request "{other.request}"; relative')


# The judge


def case(found: torch.Tensor, right: torch.Tensor, granted: float = 1e-6) -> Case:
    finding = Comparison("derived", Tier.DERIVED, 0, "forward", Place("trunk", 0, "normed"), 1, 1.0, 0.0, request="a")
    context: Any = None
    return Case(finding, found, right, torch.full((2, 1), granted).double(), context, RunHistory())


def test_two_explanations_give_the_strictly_better_one_or_neither() -> None:
    right, wrong = torch.randn(2, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    nearly, close = wrong * (1 + 9e-7), wrong * (1 + 1e-7)
    assert best(case(wrong, right), [Explanation("a", wrong), Explanation("b", nearly)]) == ("a", 1)
    assert best(case(wrong, right), [Explanation("a", wrong), Explanation("b", close)]) == (None, 2)
    assert best(case(wrong, right), [Explanation("a", wrong), Explanation("b", wrong)]) == ("a [equal bits: b]", 1)
    assert best(case(wrong, right), [Explanation("a", nearly * 2), Explanation("b", right)]) == (None, 0)


def test_a_number_that_matches_at_random_explains_nothing() -> None:
    """One number within a hundredth of the way, out of a thousand that were tried."""
    right = torch.ones(1, 1, dtype=torch.float64)
    found, wrong = 2 * right, 2.009 * right
    assert best(case(found, right, 0.01), [Explanation("a", wrong)] * 1000) == (None, 0)
    many = torch.linspace(1, 2, 64, dtype=torch.float64)[None]
    assert best(case(2 * many, many, 0.01), [Explanation("a", 2.009 * many)] * 1000) == ("a", 1)


def test_an_explanation_of_some_cells_names_them() -> None:
    right = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = right.clone()
    found[1, 8:] = 0
    said = best(case(found, right), [Explanation("is all zero", torch.zeros_like(right))])
    assert said == ("is all zero, in row 1, in columns 8 to 15", 1)


# Further parts of a finding


def test_labels_in_other_rows_are_named(tmp_path: Path) -> None:
    opened = m.checkpoint(tmp_path)
    labels = m.run_labels(opened, m.events_of(opened)[:6])
    place = Place("trunk", 0, "z")
    context = next(each for each in labels if isinstance(each.event, Forward) and len(each.subject.places[place]) > 3)
    span = row_spans(context, "trunk")[0]

    def shifted(x: torch.Tensor) -> torch.Tensor:
        x[: span.count] = x[: span.count].roll(1, 0)
        return x

    check = next(check for check in for_labels() if check.name == "labels")
    findings = [found for found in check(m.with_rows(context, place, shifted)) if not found.agrees]
    said = explained(findings, m.with_rows(context, place, shifted), None, RunHistory())
    assert said[0].diagnosis.startswith("each row is that of the row before it; row 0 is wrong")


def test_a_contract_that_is_broken_there_is_quoted(scene: Scenario) -> None:
    place = Place("trunk", GDN, "gated")
    context = scene.packed(second=False)
    found = scene.said(m.with_rows(context, place, lambda x: 2 * x))[0]
    broken = Comparison("contracts", Tier.IDENTITY, context.index, context.kind, place, 1, 1.0, 0.0,
                        problem=Problem("broken_contract", "op gated_norm: z is torch.bfloat16"))  # fmt: skip
    other = replace(broken, place=place._replace(layer=GDN + 1))
    found = replace(found, problem=Problem("differs", "far off"))
    several = explained([broken, other, found], context, None, RunHistory())
    assert several[:2] == [broken, other]
    assert several[2].diagnosis.endswith(f"far off; a contract is broken at the same place: {broken.diagnosis}")


def test_a_consequence_of_a_wrong_input_is_reported_as_one(scene: Scenario) -> None:
    """Both are wrong by the layer's boundary; the second is right for what it was computed from."""
    context = scene.packed(second=False)
    span = max(row_spans(context, "trunk"), key=lambda each: each.count)
    own = dict(scene.own(context, GDN, span))
    own["z"] = own["z"].roll(1, 0)
    changed = context
    for name, wrong in (("z", own["z"]), ("gated", gated(scene, own))):
        def put(x: torch.Tensor, wrong: torch.Tensor = wrong) -> torch.Tensor:
            x[span.begin : span.begin + span.count] = wrong.to(x)
            return x
        changed = m.with_rows(changed, Place("trunk", GDN, name), put)
    first, *others = scene.said(changed)
    assert first.diagnosis.startswith("each row is that of the row before it")
    follows = next(found for found in others if found.place.component == "gated")
    assert follows.diagnosis.startswith("follows from an earlier error")


def test_a_run_that_agrees_is_not_explained(scene: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep.diagnose.explanation_bank.case_of", None)
    assert explained([], scene.contexts[3], None, RunHistory()) == []
    assert not scene.said(scene.contexts[3])


def test_findings_beyond_the_first_places_are_left_as_they_are(scene: Scenario) -> None:
    context = scene.packed(second=False)
    wrong = context
    for name in ("qkv", "z", "b", "a", "mixed", "q"):
        wrong = m.with_rows(wrong, Place("trunk", GDN, name), lambda x: 2 * x)
    said = {found.place.component: found.diagnosis for found in scene.said(wrong)}
    assert said["qkv"].startswith("is twice the right value") and said["a"].startswith("is twice the right value")
    assert said["q"].startswith("relative error") and UNEXPLAINED not in said["q"]


def test_poison_gets_the_explanation_of_another_request(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Comparison(Poison.name, Tier.BITWISE, 0, "commit", Place("trunk", 0, "state"), 4, 4.0, 0.0, request="a",
                     problem=Problem("poison", "is poison"))  # fmt: skip
    known = {"a": Explained("bank", "is all zero"), "b": None}
    monkeypatch.setattr(explanation_bank, "_said", lambda finding, *_: known[finding.request])
    first, second = explanation_bank.explained([one, replace(one, request="b")], SimpleNamespace(index=0), None, None)
    assert first.explained == known["a"] and second.explained is None
    assert 'is all zero (seen in request "a"); is poison' in second.diagnosis


@pytest.mark.parametrize(("owner", "says"), [("b", "to page 3, position 0"), (None, None)])
def test_an_entry_that_is_rightly_there_is_no_stray_write(owner: str | None, says: str | None) -> None:
    """Two requests begin alike, so page 2 holds what page 1 lacks; page 3 does, too."""
    units, right = torch.zeros(4, 2, 1, 4), torch.ones(1, 1, 4)
    units[2, 0], units[3, 0] = 1, 1
    place = Place("trunk", 3, "keys")
    region = SimpleNamespace(name="keys", by="page", units=units, layer=3,
                             means=SimpleNamespace(component="keys", draft=False))  # fmt: skip
    others = [SimpleNamespace(**{**vars(region), "units": units * 0, **other})
              for other in ({"by": "slot"}, {"layer": 2}, {"means": None})]  # fmt: skip
    context = SimpleNamespace(regions=[*others, region], expected=SimpleNamespace(
        pages_after={"a": (1,), **({owner: (2,)} if owner else {})}))  # fmt: skip
    case = SimpleNamespace(finding=SimpleNamespace(place=place, request="a"), granted=None, right=right,
                           found=torch.zeros_like(right), context=context)  # fmt: skip
    came = [one.sentence for one in elsewhere(case)]
    assert came == [f"was written 4 positions too late, {says} of keys, not to page 1, position 0"] * (says is not None)


def of_memory(scene: Scenario, field: str, layer: int, change: Callable[[EventContext, str, Any], torch.Tensor]) -> str:
    """T1's findings for the first request of a late commit of several requests."""
    context = [each for each in scene.contexts if isinstance(each.event, Commit) and len(each.event.requests) > 1][-1]
    name = context.event.requests[0]
    wrong = m.with_state(context, name, lambda state: replace(state, **{
        field: {**getattr(state, field), layer: change(context, name, getattr(state, field)[layer])}
    }))
    return scene.said(wrong, bits=True)[0].diagnosis


def commit_before(scene: Scenario, context: EventContext, name: str) -> EventContext:
    return [each for each in scene.contexts[: context.index] if isinstance(each.event, Commit)
            and name in each.event.requests][-2]  # fmt: skip


MEMORY: list[tuple[str, int, Callable[[Scenario, EventContext, str, Any], torch.Tensor], str]] = [
    ("conv", GDN, lambda s, c, name, x: c.subject.before[name].conv[GDN], "holds the window from before the step;"),
    ("conv", GDN, lambda s, c, name, x: torch.zeros_like(x), "is all zero"),
    ("conv", GDN, lambda s, c, name, x: x.flip(1), "has the newest input first"),
    ("conv", GDN, lambda s, c, name, x: x.roll(1, 0), "each channel is that of the channel before it"),
    ("conv", GDN, lambda s, c, name, x: commit_before(s, c, name).subject.after[name].conv[GDN],
     "holds what it held after event"),
    ("keys", ATTENTION, lambda s, c, name, x: x.roll(1, 0), "each position is that of the position before it"),
    ("keys", ATTENTION, lambda s, c, name, x: c.subject.after[name].values[ATTENTION], "holds the values"),
    ("keys", ATTENTION, lambda s, c, name, x: x.flip(1), "head 0 is that of head 1, head 1 is that of head 0"),
    ("keys", ATTENTION, lambda s, c, name, x: with_row(x, 2, torch.zeros_like(x[2])), "is all zero, in row 2"),
]  # fmt: skip


@pytest.mark.parametrize(("field", "layer", "change", "sentence"), MEMORY, ids=[f"{w[0]}: {w[3]}" for w in MEMORY])
def test_bits_that_were_moved_wrongly_are_explained(
    scene: Scenario, field: str, layer: int, change: Callable[..., Any], sentence: str
) -> None:
    assert of_memory(scene, field, layer, lambda *given: change(scene, *given)).startswith(sentence)


def test_bits_that_nothing_explains_are_counted_as_before(scene: Scenario) -> None:
    noise = torch.Generator().manual_seed(0)
    said = of_memory(scene, "conv", GDN, lambda c, name, x: torch.randn(x.shape, generator=noise).to(x))
    assert "bytes differ, the first at" in said.partition(";")[0] and UNEXPLAINED not in said


@cache
def commit_of_several(scene: Scenario) -> tuple[EventContext, list[Recomputation]]:
    """The last one, and its pieces: of every request a step of several tokens."""
    oracle = scene.oracle()
    for context in scene.contexts:
        pieces = [p for p in oracle.at(context) if isinstance(p, Recomputation) and p.layer == GDN and p.folding]
        if isinstance(context.event, Commit) and len(pieces) > 1 and pieces[0].folding.count > 1:
            last = context, pieces
    return last


def of_state(scene: Scenario, change: Callable[[Scene, Scene, torch.Tensor], torch.Tensor]) -> EventContext:
    """The last commit of several, with the first request's state changed; it and another's step are known."""
    context, pieces = commit_of_several(scene)
    mine, other = (scene_of(piece, []) for piece in pieces[:2])
    return m.with_state(context, pieces[0].request, lambda state: replace(state, state={
        **state.state, GDN: change(mine, other, state.state[GDN].double()).float()
    }))  # fmt: skip


def run_again(mine: Scene, room: int) -> torch.Tensor:
    """The state after a replay in which, of tokens in one ring entry, the last one is used."""
    state, tokens = mine.base, len(mine.k)
    for t in range(mine.count):
        last = max(other for other in range(tokens) if other % room == t % room)
        state = add(state, mine.k[last], mine.log_decay[last], mine.updates[last])
    return state


def overwritten(mine: Scene, _: Scene, __: torch.Tensor) -> torch.Tensor:
    """The first token of the step before, run again with the key, decay and update of this step's last one."""
    state = mine.previous
    for t, was in enumerate(zip(*mine.pending, strict=True)):
        state = add(state, *(was if t else (mine.k[-1], mine.log_decay[-1], mine.updates[-1])))
    return mine.fold(state)


STATES = [
    (lambda mine, other, state: run_again(mine, len(mine.k) - 1), "in which later tokens of the window overwrote"),
    (overwritten, "ran the first token of the previous step again from entries that this step had overwritten"),
    (lambda mine, other, state: other.after(1), "after 1 token of its step"),
    (lambda mine, other, state: state[:1].expand(state.shape), "are all that of head 0"),
]


def rounded_after_every_token(mine: Scene, _: Scene, __: torch.Tensor) -> torch.Tensor:
    state = mine.base
    for t in range(mine.count):
        decayed = mine.log_decay[t].exp()[:, None, None] * state
        added = mine.beta[t][:, None] * (mine.v[t] - torch.einsum("hk,hkv->hv", mine.k[t], decayed))
        state = (decayed + mine.k[t][:, :, None] * added[:, None]).bfloat16().double()
    return state


@pytest.mark.parametrize(("change", "sentence"), STATES, ids=[sentence for _, sentence in STATES])
def test_a_state_that_was_made_of_something_else_is_explained(scene: Scenario, change: Any, sentence: str) -> None:
    said = scene.said(of_state(scene, change))[0]
    assert sentence in said.diagnosis and said.explained.by == "bank", said


def test_a_mistake_of_the_rule_is_named_in_the_state_of_a_commit(scene: Scenario) -> None:
    said = scene.said(of_state(scene, rounded_after_every_token))[0]
    due = Explained("hypothesis", "the state is rounded to bfloat16 after every token", names=("state-in-bfloat16",))
    assert said.explained == due, said


@few(2)
@pytest.mark.parametrize(("change", "ends"), [
    (STATES[3][0], "; the nearest known wrong state: holds the state from before the step"),
    (lambda mine, other, state: mine.base, "holds the state from before the step"),
    (lambda mine, other, state: state + 0.1 * torch.sin(torch.arange(state.numel())).reshape(state.shape),
     "holds the state from before the step"),
])  # fmt: skip
def test_the_bank_overrides_a_wrong_state_that_is_only_the_nearest(scene: Scenario, change: Any, ends: str) -> None:
    """Not one that is right to within the allowance, and not where the bank has nothing that is."""
    context = of_state(scene, change)
    size = scene.said(context)[0]
    named = Explained("hypothesis", "holds the state from before the step")
    leans = replace(size, check="directed", tier=Tier.DIRECTED, problem=Problem("identified", mistake=named))
    oracle, history = scene.oracle(), RunHistory()
    for earlier in scene.contexts[: context.index]:
        oracle.at(earlier), history(earlier)
    (said,) = explained([leans], context, oracle, history)
    assert said.diagnosis.endswith(ends) and ("nearest" in ends) == (said.explained.by == "bank")

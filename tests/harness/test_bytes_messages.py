"""Name altered saved states, wrong starts of a round, and conv windows of another request.

Leaves out: that correct engines have no finding here (`test_checks.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from instep.checks.poison import poisoned
from instep.checks.unchanged_bytes import Bytes
from instep.checks.wrong_conv_windows import shifted
from instep.oracle.oracle import Oracle
from instep.trace.policy import ScheduledAction
from instep.verdict import Comparison
from instep.watch.event_context import EventContext, RowSpan
from instep.watch.rows_by_request import row_spans
from instep_reference.contract.engine import Commit, Forward, Load, RequestState, Resume
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from support.inputs import check_contexts as m

pytestmark = pytest.mark.slow  # whole runs

PICK, FINAL, CONV = Place("extend", AFTER_LAYERS, "pick"), Place("extend", AFTER_LAYERS, "final"), Place(
    "trunk", 0, "conv")  # fmt: skip


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    opened = m.checkpoint(tmp_path_factory.mktemp("bytes"))
    kept = ScheduledAction(2, "save", "c", "kept"), ScheduledAction(3, "load", "d", "kept")
    policy = msgspec.structs.replace(m.POLICY, deeds=(*m.POLICY.deeds, *kept))
    return m.run(opened, m.events_of(opened, policy))


def found(contexts: list[Any], at: int, name: str, change: Any) -> Comparison:
    """The first finding of `bytes` alone, with another state of a request after event `at`, and none before."""
    verdict = m.judge(m.spoiled(contexts, at, lambda context: m.with_state(context, name, change)), [Bytes()])
    assert verdict.findings, "nothing was found"
    assert {finding.event for finding in verdict.findings} == {at}
    return next(compared for compared in verdict.compared if not compared.agrees)


def returned(contexts: list[Any], kind: type[Load | Resume]) -> tuple[int, str]:
    context = next(context for context in contexts if isinstance(context.event, kind))
    return context.index, context.event.request


def committed(contexts: list[Any]) -> tuple[int, RowSpan]:
    """A commit of several requests, and one that kept fewer tokens than its window had."""
    for context in contexts:
        if isinstance(context.event, Commit) and len(context.event.requests) > 1:
            for span in row_spans(context, "extend"):
                if 1 < span.count < 4 == len(context.expected.windows.get(span.request, (0,) * 4)):
                    return context.index, span
    raise AssertionError("the run has no such commit")


@pytest.mark.parametrize("kind", [Load, Resume])
@pytest.mark.parametrize(("change", "place", "says"), [
    (lambda s: replace(s, proposal=s.proposal + 1), PICK, "draft 1 is"),
    (lambda s: replace(s, root=s.root + 1), Place("trunk", AFTER_LAYERS, "root"), "root is"),
    (lambda s: replace(s, proposal_hidden=-s.proposal_hidden), FINAL, "bytes differ"),
    (lambda s: replace(s, conv={**s.conv, 0: -s.conv[0]}), CONV, "bytes differ"),
], ids=["proposal", "root", "proposed", "conv"])  # fmt: skip
def test_altered_saved_state_is_named(
    contexts: list[EventContext], change: Callable[..., Any], place: Place, says: str, kind: type
) -> None:
    finding = found(contexts, *returned(contexts, kind), change)
    assert finding.place == place
    assert "comes back different from what was saved: " in finding.diagnosis and says in finding.diagnosis


def test_memory_narrower_than_the_rows_that_it_takes_in_is_a_finding(contexts: list[EventContext]) -> None:
    """Rows are cast before they are compared: the cast is granted where it is declared."""
    at, span = committed(contexts)

    def narrow(s: RequestState) -> RequestState:
        return replace(s, **{
            field: {layer: x.bfloat16() for layer, x in getattr(s, field).items()} for field in ("keys", "conv")})

    context = m.with_state(m.spoiled(contexts, at, lambda c: c)[at], span.request, narrow)
    context = replace(context, subject=replace(
        context.subject, before={**context.subject.before, span.request: narrow(context.subject.before[span.request])}))
    earlier = context.earlier.forward
    context = replace(context, earlier=replace(context.earlier, forward=replace(earlier, subject=replace(
        earlier.subject, before={**earlier.subject.before, span.request: narrow(
            earlier.subject.before[span.request])}))))
    for rounds, places in (({}, ["conv"] * 3 + ["keys"]), ({"keys": torch.bfloat16}, ["conv"] * 3)):
        check = Bytes(cast(Oracle, SimpleNamespace(rounds=rounds)))
        findings = [found for found in check(context) if isinstance(found, Comparison) and not found.agrees]
        assert sorted(found.place.component for found in findings) == places
        assert all(found.diagnosis == "is torch.bfloat16, torch.float32 is declared" for found in findings)


@pytest.mark.parametrize(("change", "place"), [
    (lambda s: replace(s, proposal=s.proposal + 1), PICK),
    (lambda s: replace(s, proposal_hidden=s.proposal_hidden.roll(1)), FINAL),
], ids=["proposal", "proposed"])
def test_round_starts_from_the_output_of_the_draft_extend(
    contexts: list[EventContext], change: Callable[..., Any], place: Place
) -> None:
    at, span = committed(contexts)
    assert found(contexts, at, span.request, change).place == place


def windows(contexts: list[Any], at: int, span: RowSpan) -> dict[str, torch.Tensor]:
    """Wrong conv windows of layer 0 by the sentence that they must get."""
    verify = next(context for context in reversed(contexts[:at]) if isinstance(context.event, Forward))
    qkv = verify.subject.places[Place("trunk", 0, "qkv")]
    rows = {s.request: qkv[s.begin : s.begin + s.count] for s in row_spans(verify, "trunk")}
    before = {name: state.conv[0] for name, state in verify.subject.before.items()}
    other = next(name for name in rows if name != span.request)
    mine = before[span.request]
    return {
        "was started from zero: everything before these tokens is lost":
            shifted(torch.zeros_like(mine), rows[span.request][list(span.nodes)]),
        "is all zero": torch.zeros_like(mine),
        "holds the window from before the step": mine,
        f'holds the window of request "{other}" after 1 token': shifted(before[other], rows[other][:1]),
        f'holds the window of request "{other}" from before the step': before[other],
    }


def test_a_conv_window_that_is_not_the_requests_is_named(contexts: list[EventContext]) -> None:
    at, span = committed(contexts)
    for sentence, window in windows(contexts, at, span).items():

        def wrong(state: RequestState, window: torch.Tensor = window) -> RequestState:
            return replace(state, conv={**state.conv, 0: window})

        finding = found(contexts, at, span.request, wrong)
        assert finding.place == CONV and finding.diagnosis.startswith(sentence)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_nan_is_poison_by_its_bits_alone(dtype: torch.dtype) -> None:
    nan = float("nan")
    memory = torch.tensor([nan, 1.0, nan], dtype=dtype)
    memory.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])[2] |= 1  # another NaN
    assert memory.isnan().tolist() == [True, False, True]
    assert poisoned(memory, nan).tolist() == [True, False, False]

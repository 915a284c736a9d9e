"""Mistakes inside one op: each is planted in a kernel's text and named by `instep op`, by the kit and by a replay.

Also formulas of explanations that need no run. Leaves out: explanations of other ops and memory (`test_diagnose.py`).
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep import kit
from instep.checks.grown_trees import MISTAKES as TREES
from instep.checks.wrong_state_bank import BANK
from instep.diagnose.mistakes import CATALOGUE as EVERY
from instep.diagnose.mistakes import (
    explanation_fit,
    wrong_rows,
)
from instep.diagnose.mistakes.delta_rule import MISTAKES as CATALOGUE
from instep.diagnose.mistakes.delta_rule import candidates, listed
from instep.diagnose.mistakes.delta_rule_with_hooks import Call, walk
from instep.diagnose.mistakes.finding_case import Compared
from instep.diagnose.mistakes.step_controller import RULES
from instep.diagnose.mistakes.transformed_tensors import appearance
from instep.finding_problem import Explained, Unexplained
from instep_reference.contract.declared_rounding import SCALED_STATE
from instep_reference.contract.place_names import Place
from support.running.command import Runner
from support.running.covering import WHOLE, few
from support.wrong.delta_rules import MISTAKES, RAW_MISTAKES, UNKNOWN, dense_ops, raw_ops

pytestmark = pytest.mark.slow

LAUNCHES = ("snapshots-r2-VK-float32", "prefill-r2-VK-float32")  # 4 value heads for 2 key heads
REPLAYED = ("gate before, or its own", "decay last", "state in bf16", "q not normalised", "two at once")


def launches(*names: str) -> list[kit.Case]:
    return [kit.op_cases("gdn", case=name)[0] for name in names or LAUNCHES]


def mistakes(findings: Any) -> set[Explained | Unexplained | None]:
    """What accounts for the findings of the rule itself, and not for what follows from them."""
    rule = [found.problem for found in findings if found.place.component in ("core", "state")]
    return {problem.mistake or problem.unexplained for problem in rule}


@few(6)
@pytest.mark.parametrize(("edits", "says"), MISTAKES.values(), ids=MISTAKES)
def test_the_kit_names_a_mistake_of_the_rule(edits: list[tuple[str, str]], says: str) -> None:
    found = kit.served(launches(), dense_ops(edits))
    named = mistakes(found.verdict.findings)
    assert named and all(isinstance(one, Explained) and says in one.says for one in named), named
    assert says in found.message and "unexplained" not in found.message


def replays(names: Iterable[str]) -> Any:
    return pytest.mark.parametrize("name", [
        name if name in REPLAYED else pytest.param(name, marks=WHOLE) for name in names])


@replays(MISTAKES)
def test_a_replay_names_a_mistake_of_the_rule(name: str) -> None:
    edits, says = MISTAKES[name]
    run = kit.replayed(kit.small(), dense_ops(edits), strategy="lazy_rerun", until=2)
    first = run.findings[0]
    assert first.explained is not None and first.explained.by == "hypothesis", run.message
    assert says in first.explained.says


@few(2)
@pytest.mark.parametrize(("edits", "says"), RAW_MISTAKES.values(), ids=RAW_MISTAKES)
def test_a_missing_norm_or_scale_of_a_raw_kernel_is_named(edits: list[tuple[str, str]], says: str) -> None:
    assert kit.served(launches(), raw_ops()).exit is kit.Exit.AGREED
    found = kit.served(launches(), raw_ops(edits))
    assert {one.says for one in mistakes(found.verdict.findings)} == {says}, found.message


@replays(RAW_MISTAKES)
def test_a_replay_names_a_missing_norm_or_scale_of_a_raw_kernel(name: str) -> None:
    edits, says = RAW_MISTAKES[name]
    run = kit.replayed(kit.small(), raw_ops(edits), strategy="snapshot", until=2)
    assert run.findings[0].explained.says == says, run.message


@few(3)
@pytest.mark.parametrize("edits", UNKNOWN.values(), ids=UNKNOWN)
def test_a_mistake_without_an_entry_is_not_named(edits: list[tuple[str, str]]) -> None:
    found = kit.served(launches(), dense_ops(edits))
    assert mistakes(found.verdict.findings) == {Unexplained()}, found.message


@replays([name for name in UNKNOWN if name != "recall added"])  # which is one slip in the reference's own formula
def test_a_replay_does_not_name_a_mistake_without_an_entry(name: str) -> None:
    run = kit.replayed(kit.small(), dense_ops(UNKNOWN[name]), strategy="lazy_rerun", until=2)
    first = run.findings[0].problem
    assert first.mistake is None and first.unexplained == Unexplained(), run.message


@pytest.mark.whole
def test_a_replay_names_one_slip_in_the_formula_of_the_rule() -> None:
    run = kit.replayed(kit.small(), dense_ops(UNKNOWN["recall added"]), strategy="lazy_rerun", until=2)
    assert "is made with `writing * value + recalled`" in run.findings[0].explained.says, run.message


def test_a_mistake_in_the_window_kernel_alone_is_named() -> None:
    edits, says = MISTAKES["beta h % H"]
    run = kit.replayed(kit.small(), dense_ops(edits, chunk=()), strategy="lazy_rerun", layers=[0])
    assert run.findings[0].event > 2 and says in run.findings[0].explained.says


def test_a_right_kernel_and_another_order_of_sums_agree() -> None:
    other = [('torch.einsum("hk,hkv->hv", k[row], S)', "(k[row][:, :, None] * S).flip(1).sum(1)")]
    for edits in ([], other):
        assert kit.served(launches(), dense_ops(edits)).exit is kit.Exit.AGREED


def test_mistakes_that_fit_equally_are_listed() -> None:
    """Launches of one row per sequence cannot tell a gate that is masked away from a gate that is left out."""
    found = kit.served(launches("decode-r1-KV-float32"), dense_ops(MISTAKES["gate before, or none"][0]))
    (one,) = mistakes(found.verdict.findings)
    assert isinstance(one, Unexplained) and one.fitting == len(one.names) == 2
    assert all(says in found.message for says in (
        "2 explanations fit equally well", "the gate of row t - 1 is used for row t", "the decay is missing"))


def test_a_mistake_must_account_for_launches_that_agree_too() -> None:
    """In these launches one request of several decays twice."""
    edits = UNKNOWN["some decays twice"]
    found = kit.served(launches("decode-r1-KV-float32"), dense_ops(edits))
    assert found.verdict.findings and mistakes(found.verdict.findings) == {Unexplained()}


def test_the_command_prints_the_sentence(instep: Runner) -> None:
    done = instep("op", "support.wrong.delta_rules:STALE_GATE", "gdn", "--case", "chunk-r2-KV-float32")
    assert done.code == 1 and "the gate of row t - 1 is used for row t; relative error" in " ".join(done.out.split())
    assert instep("op", "support.wrong.delta_rules:RIGHT", "gdn", "--case", "chunk-r2-KV-float32").code == 0


# -- the catalogue -------------------------------------------------------------------------------------


def sample(seed: int = 0) -> Call:
    draw = torch.Generator().manual_seed(seed)
    n, H, HV, K, V = 5, 2, 4, 4, 6

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(normal(n, H, K), dim=-1) for _ in range(2))
    rows = {"q": q * K**-0.5, "k": k, "v": normal(n, HV, V), "log_decay": -normal(n, HV).exp(),
            "beta": normal(n, HV).sigmoid()}  # fmt: skip
    near = {name: x[0] for name, x in rows.items()}
    return Call(**rows, state=normal(HV, K, V), raw={"q": 3 * q, "k": 2 * k}, before=[near], after=[near],
                others=[('of request "b"', {name: x.flip(0) for name, x in rows.items()})],
                launched_before=[{name: x.flip(0) for name, x in rows.items()}])  # fmt: skip


def test_a_name_in_the_catalogue_of_all_families_has_one_sentence() -> None:
    assert len(EVERY) > 150 and {one.name for one in (*CATALOGUE, *BANK, *RULES, *TREES)} <= EVERY.keys()
    assert all(EVERY[one.name].sentence == one.sentence for one in (*CATALOGUE, *BANK, *RULES, *TREES))
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in EVERY)


def test_every_mistake_has_its_own_name_and_sentence_and_changes_something() -> None:
    assert len({one.name for one in CATALOGUE}) == len({one.sentence for one in CATALOGUE}) == len(CATALOGUE)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", one.name) for one in CATALOGUE)
    changed = set[str]()
    of_channels = sample()
    of_channels = Call(**{name: getattr(of_channels, name) for name in ("q", "k", "beta")}, v=of_channels.v[..., :4],
                       log_decay=of_channels.v[..., :4].sigmoid().log(), state=of_channels.state[..., :4])
    without = replace(sample(), recalls=False, skip=torch.ones(4, dtype=torch.float64))
    for call in (sample(), without, of_channels, replace(sample(), beta=2 * sample().beta, stored=SCALED_STATE)):
        right = walk(call)
        for one in candidates(call, listed(call)):
            differ = [not torch.equal(x, y) for x, y in zip(one.walked, right, strict=True)]
            if any(differ):
                changed.add(one.mistake.name)
            assert "{" not in one.sentence
    assert {one.name for one in CATALOGUE} == changed


def test_the_right_recurrence_of_the_catalogue_is_that_of_the_reference() -> None:
    from instep_reference import gdn

    call = sample()
    q, k = (x.repeat_interleave(2, dim=1)[None] for x in (call.q, call.k))
    decay, beta = call.log_decay[None, ..., None], call.beta[None, ..., None]
    for recalls in (True, False):
        due = gdn.recur(q, k, call.v[None], decay, beta * recalls, beta, call.state[None])
        done = walk(replace(call, recalls=recalls))
        for found, right in ((done.core, due.out[0]), (done.update, due.update[0]), (done.states[-1], due.state[0])):
            torch.testing.assert_close(found, right)


# -- explanations of other results, each alone ---------------------------------------------------------


def test_labels_that_several_ranks_add_are_multiples() -> None:
    """Zeros of any sign are zeros, too."""
    right = torch.tensor([[7, 1 << 62], [-3, 5]])
    case: Any = SimpleNamespace(component="embedding", found=3 * right, right=right, granted=None,
                                context=SimpleNamespace(log=SimpleNamespace(poison=None)))  # fmt: skip
    assert [one.sentence for one in appearance(case) if explanation_fit.fit(case, one)] == [
        "is 3 times the right value, as if 3 ranks had added theirs"]
    case.found, case.right = torch.tensor([0.0, -0.0]), torch.tensor([1.0, 2.0])
    assert [one.sentence for one in appearance(case) if explanation_fit.fit(case, one)] == ["is all zero"]


def test_a_slip_of_one_channel_in_bf16_is_no_other_column() -> None:
    """Each of 256 columns has one number in bf16, and many are near to another column's. Then two are exchanged."""
    right = torch.randn(1, 256, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    found, other = right.bfloat16(), right[:, [*range(40), 41, 40, *range(42, 256)]].bfloat16()
    found[:, 3] *= 1 + 2**-7
    place: Any = SimpleNamespace(place=Place("trunk", 0, "normed"))
    slip, moved = (Compared(place, one, right, torch.full((2, 1), 1e-6), once=True) for one in (found, other))
    assert explanation_fit.best(slip, wrong_rows.permuted(slip, 1, "column", [])) == (None, 0)  # type: ignore[arg-type]
    (says, _) = explanation_fit.best(moved, wrong_rows.permuted(moved, 1, "column", []))  # type: ignore[arg-type]
    assert says == "column 40 is that of column 41, column 41 is that of column 40"
    nearest = (found.double().T - right).abs().argmin(1)
    guess = explanation_fit.Explanation("is that of the nearest columns", right[:, nearest], 256.0**9)
    assert explanation_fit.fit(slip, guess) is None
    little = explanation_fit.Explanation("is scaled", right * (1 + 2**-11))  # one tensor, not the nearest of many
    assert explanation_fit.fit(replace(slip, found=little.wrong.bfloat16()), little) is not None

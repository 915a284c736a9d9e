"""Name a wrong rule of the step controller if it gives this wish and all earlier correct ones.

Leaves out: the correct rules (`tests/reference`), and an engine's controller (`test_diagnose_planted.py`).
"""

import ast
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.diagnose import diagnose
from instep.diagnose.mistakes import step_controller
from instep.diagnose.mistakes.source_slips import of_function, others, slipped
from instep.diagnose.mistakes.step_controller import (
    MOST,
    RIGHT,
    RULES,
    Rule,
    Steps,
    Told,
    count,
    from_requests,
    same,
    told,
    wishes,
    wrong_rule,
)
from instep.finding_problem import WrongContent
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import read
from instep_proof.faults.catalogue.fault import Edit
from instep_reference.contract import engine
from instep_reference.contract.adaptive_controller_file import AdaptiveFile
from instep_reference.contract.controllers import Controlled
from instep_reference.contract.engine import Commit, Committed, Forward, Row, SetNumSteps
from instep_reference.controllers.sglang_0_5_12 import Brackets
from instep_reference.controllers.vllm_counts_by_batch import ByTable
from support.running.covering import few

NUMBERS: dict[str, Any] = {"ema_alpha": 0.3, "update_interval": 3, "warmup_batches": 2, "down_hysteresis": -0.5,
                           "up_hysteresis": 0.25}  # fmt: skip
FLAT = Steps(3, AdaptiveFile.of({"candidate_steps": [0, 1, 3, 7]} | NUMBERS))
FILE = {"1": {"candidate_steps": [1, 3, 7], "ceiling_coeff": 1.2} | NUMBERS,
        "4": {"candidate_steps": [0, 1, 3]} | NUMBERS}  # fmt: skip
SLOTS = Steps(3, controlled=Controlled("sglang-0.5.14", captured=(1, 2, 4, 8), file=FILE), lag=1)
TABLE = Steps(7, controlled=Controlled("vllm-table", table=((1, 1, 7), (2, 3, 3), (4, 8, 1)), num_speculative_tokens=7))
DIALECTS = {"flat": FLAT, "slots": SLOTS, "table": TABLE}
OF_BRACKETS = {"an idle step counts as a batch", "the last batch is not counted yet"}
OF_TABLES = {"requests without a known root do not count", "an entry of the table begins one request too late",
             "an entry of the table begins one request too early"}  # fmt: skip
ROUTED = "the batch of the round before decides, not the requests of the next round"
OF_SLOTS = {"there is no ceiling", "a batch is not padded to a captured size before its slot is chosen", ROUTED,
            "the slot of the smallest batches decides for every batch",
            "the results of a round are counted a round too late",
            "the results of a round are counted before they are known"}  # fmt: skip


def expected(dialect: str, rule: Rule) -> bool:
    """Whether the rule is a mistake in this dialect."""
    if dialect == "table":
        return rule.sentence in OF_TABLES | {ROUTED}
    return rule.sentence not in OF_TABLES | (OF_SLOTS if dialect == "flat" else OF_BRACKETS)


def history(steps: Steps, seed: int) -> list[Told]:
    """Rounds of one to six requests with caps, with the right wishes. Each wish is put in force."""
    random, right, past, batch, likely = Random(seed), steps.controller(), list[Told](), 2, (0, 1, 3, 7)
    for _ in range(24):
        batch = random.randint(1, 6) if random.random() < 0.3 else batch
        likely = random.choice(((0,), (0, 1), (0, 1, 3, 7), (3, 7), (7,))) if random.random() < 0.3 else likely
        coming = batch, batch + (random.random() < 0.3)
        window = right.in_force > 0
        told = [Told(0 if window else batch, None, None, False, coming, 0)]
        if window:
            counts = tuple(min(random.choice(likely), right.in_force) for _ in range(batch))
            whole = tuple(min(count + 1 + row % 2, right.in_force) for row, count in enumerate(counts))
            told.append(Told(None, counts, None, False, coming, 0, whole))
        told += [Told(None, None, None, True, coming, 0)] * (random.random() < 0.2)
        for one in told:
            count(right, one, same)
            past.append(one._replace(wish=right.next_num_steps(*coming)))
        if past[-1].wish != right.in_force:
            right.set_num_steps(past[-1].wish)
            past.append(Told(None, None, right.in_force, False, coming, right.next_num_steps(*coming)))
    return past


CASES = [(dialect, rule) for dialect in DIALECTS for rule in RULES if expected(dialect, rule)]


@few(18)
@pytest.mark.parametrize(("dialect", "rule"), CASES, ids=[f"{dialect}-{rule.name}" for dialect, rule in CASES])
def test_wrong_rule_explains_the_first_wrong_wish(dialect: str, rule: Rule) -> None:
    steps = DIALECTS[dialect]
    for seed in range(40):
        past = history(steps, seed)
        for end in range(1, len(past) + 1):
            for wish in {0, 1, 3, 7} - {past[end - 1].wish}:
                if not wishes(steps, rule, past[:end], wish):
                    continue
                alike = [other.name for other in RULES if wishes(steps, other, past[:end], wish)]
                found = wrong_rule(steps, past[:end], wish)
                assert found is None if len(alike) > MOST else found is not None and found.names == tuple(alike)
                if found is not None:
                    slips = step_controller._one_slip(steps, past[:end], wish)
                    assert ("a slip in the rule" in found.says) is (len(slips) > 1), "slips fit as well"
                    return
    pytest.fail("no history shows it")


@pytest.mark.parametrize("name", ["late", "idle"])
def test_batches_may_be_counted_late_or_too_often(name: str) -> None:
    """A controller that counts each batch one round late, or also the rounds without a batch."""
    rule, shown = next(rule for rule in RULES if getattr(rule, name)), 0
    for seed in range(12):
        steps = FLAT._replace(num_steps=3 * (seed % 2))  # every other history begins without drafts
        wrong, waiting, past = steps.controller(), list[tuple[int, tuple[int, ...]]](), history(steps, seed)
        for end, event in enumerate(past, 1):
            if event.in_force is not None:
                wrong.set_num_steps(event.in_force)
            if event.counts is not None:
                waiting.append((len(event.counts), event.counts))
            elif event.decode_rows is not None and not wrong.in_force:
                waiting.append((event.decode_rows, ()))
            elif event.idle and name == "idle":
                waiting.append((1, ()))
            while len(waiting) > (name == "late"):
                wrong.update(*waiting.pop(0))  # type: ignore[attr-defined]
            wish = wrong.next_num_steps(*event.coming)
            assert wishes(steps, rule, past[:end], wish)
            if wish != event.wish:
                shown += 1
                break
    assert shown > 3, "histories show the mistake"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_mistake_of_another_dialect_is_never_named(dialect: str) -> None:
    past = history(DIALECTS[dialect], 0)
    others = [rule for rule in RULES if not expected(dialect, rule)]
    assert others and not any(
        wishes(DIALECTS[dialect], rule, past[:end], wish)
        for rule in others for end in range(1, len(past) + 1) for wish in {0, 1, 3, 7} - {past[end - 1].wish}
    )  # fmt: skip


@pytest.mark.parametrize("dialect", DIALECTS)
def test_rule_that_contradicts_an_earlier_wish_explains_nothing(dialect: str) -> None:
    past = history(DIALECTS[dialect], 0)
    wrong = next(iter({1, 3} - {past[0].wish}))
    assert wrong_rule(DIALECTS[dialect], [past[0]._replace(wish=wrong), *past[1:]], 0) is None


def test_slip_without_a_rule_names_the_expression() -> None:
    """The average over batches is a difference: no rule of the list does that. This seed's history shows it."""
    function, past = Brackets.update, history(FLAT, 0)[:11]
    (slip,) = (one for one in of_function(function)
               if one.wrong == "(1 - rule.ema_alpha) * opinion.ema - rule.ema_alpha * mean")  # fmt: skip
    with slipped(function, slip):
        assert wishes(FLAT, RIGHT, past, 0)
    found = wrong_rule(FLAT, past, 0)
    assert found is not None
    assert found.says == f"has a slip in `{slip.right}`, as `Brackets.update` of the reference has it"
    assert wishes(FLAT, RIGHT, past, past[-1].wish), "the reference runs its own code again"


def test_the_last_batch_that_is_not_counted_yet_is_counted_a_round_late() -> None:
    """The fifth batch decides, at 3 steps for 3. A driver sets 1 step, and the late controller decides from there."""
    (late,) = (rule for rule in RULES if rule.late)
    past = [Told(None, (2, 2), None, False, (2, 2), 3)] * 5
    past = [*past, Told(None, None, 1, False, (2, 2), 1), Told(None, (1, 1), None, False, (2, 2), 1)]
    assert wishes(FLAT, RIGHT, past, 1) and wishes(FLAT, late, past, 3) and not wishes(FLAT, late, past, 1)


def test_an_idle_step_that_counts_has_one_request() -> None:
    """Without drafts, the fifth batch of a size decides for its fewest steps: 1 for one request, 3 for more."""
    (idle,) = (rule for rule in RULES if rule.idle)
    file = {size: {"candidate_steps": [0, steps, 7]} | NUMBERS for size, steps in (("1", 1), ("2", 3))}
    past = [Told(None, None, None, True, (1, 1), 0) for _ in range(5)]
    assert wishes(Steps(0, AdaptiveFile.of(file)), idle, past, 1)


def test_before_the_first_batch_the_requests_of_the_next_round_decide() -> None:
    (routed,) = (rule for rule in RULES if rule.sentence == ROUTED)
    for requests, right in ((1, 7), (2, 3), (4, 1)):
        past = [Told(None, None, None, True, (0, requests), right)]
        assert [wish for wish in (1, 3, 7) if wishes(TABLE, routed, past, wish)] == [right]


def test_a_few_rules_and_slips_that_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to three rules, next to any number of slips. Without a rule, one or two slips."""
    for rules in range(5):
        for slips in range(4):
            fits, alike = RULES[:rules], [WrongContent(f"slip {n}") for n in range(slips)]
            monkeypatch.setattr(step_controller, "wishes", lambda steps, rule, past, found, fits=fits: rule in fits)
            monkeypatch.setattr(step_controller, "_one_slip", lambda *given, alike=alike: alike)
            found = wrong_rule(FLAT, [], 0)
            if rules > 3 or (not rules and slips not in (1, 2)):
                assert found is None
                continue
            says = [one.sentence for one in fits] or [one.says for one in alike]
            if rules and slips:
                says.append("slip 0" if slips == 1 else f"a slip in the rule, at any of {slips} places")
            assert found is not None and found.names == tuple(one.name for one in fits)
            assert found.says == says[0] + (f" [equal: {'; '.join(says[1:])}]" if says[1:] else "")


def test_the_inputs_of_a_controller_are_batches_counts_and_steps() -> None:
    """A verify of a forward is no decode. The counts without caps are known for given paths with caps."""
    rows = tuple(Row(name, kind) for name, kind in (("a", "decode"), ("b", "verify"), ("c", "decode"), ("d", "decode")))
    done = Committed(**{one.name: torch.tensor([1, 0] if one.name == "num_correct_drafts" else [9, 9])
                        for one in fields(Committed)})  # fmt: skip
    paths = (engine.Path((1, 2), 5), engine.Path((), 6))
    none = {"decode_rows": None, "counts": None, "in_force": None, "whole": None}
    for event, answer, due in (
        (Forward(rows), None, {"decode_rows": 3}), (Forward(()), None, {}), (SetNumSteps(7), None, {"in_force": 7}),
        (Commit(("a", "b")), done, {"counts": (1, 0)}), (Commit(("a", "b")), None, {}), (Forward(rows[:1]), done,
                                                                                       {"decode_rows": 1}),
        (Commit(("a", "b"), accepted=paths, caps=(1, 1)), done, {"counts": (1, 0), "whole": (2, 0)}),
        (Commit(("a", "b"), accepted=paths), done, {"counts": (1, 0)}),
        (Commit(("a", "b"), caps=(1, 1)), done, {"counts": (1, 0)}),
    ):  # fmt: skip
        for kind in ("idle", "commit"):
            context = SimpleNamespace(event=event, kind=kind, expected=SimpleNamespace(coming=(2, 3)),
                                      truth=SimpleNamespace(answer=answer, wanted_num_steps=4))  # fmt: skip
            assert told(context) == Told(**none | due, idle=kind == "idle", coming=(2, 3), wish=4)


def test_a_table_of_step_counts_may_begin_at_other_batches() -> None:
    for more, starts in ((-2, {1: 3, 2: 1}), (1, {1: 3, 5: 1}), (-9, {1: 1})):
        assert from_requests(more)(ByTable(((1, 3, 3), (4, 9, 1)), 4, 3)).starts == starts


def clipped(x: int, by: int = 4 - 1 * 2) -> int:
    while x > 100:
        x -= 1 + by
    if x - by * 2:
        return 5
    return not x


class Longer(list):
    def size(self) -> int:
        return super().__len__() + 1


def test_slips_of_a_function_are_its_programs_with_one_change() -> None:
    """None is in a `while`. A changed symbol in the text may bind in another order."""
    due = {"5": ["6", "4"], "not x": ["x"], "x - by * 2": [
        "x + by * 2", "x", "by * 2", "x - (by + 2)", "x - by / 2", "x - by", "x - 2", "x - by * 3", "x - by * 1",
        "x - by + 2"], "4 - 1 * 2": [
        "4 + 1 * 2", "4", "1 * 2", "4 - (1 + 2)", "4 - 1 / 2", "4 - 1", "4 - 2", "4 - 1 * 3", "4 - 1 * 1", "4 - 1 + 2",
        "5 - 1 * 2", "3 - 1 * 2", "4 - 2 * 2", "4 - 0 * 2"]}  # fmt: skip
    slips = of_function(clipped)
    assert sorted((one.right, one.wrong) for one in slips) == sorted((top, each) for top in due for each in due[top])
    (half,) = (one.code for one in slips if one.wrong == "x - by / 2")
    with slipped(clipped, next(one for one in slips if one.code is half)):
        assert clipped(1) == 0 and clipped(3) == 5
    assert clipped(4) == 0 and clipped(1) == 5
    size = "super().__len__()"
    assert {one.wrong for one in of_function(Longer.size)} == {f"{size} - 1", size, f"{size} + 2", f"{size} + 0"}
    for bit in (True, False):
        assert [one.value for one in others(ast.Constant(bit))] == [not bit]


@pytest.mark.slow
def test_planted_mistake_of_a_controller_with_slots_is_named(plant: Callable[..., None]) -> None:
    routing = "padded = next((size for size in self._captured if size >= batch), batch)"
    plant(Edit("instep_optimized/controllers/sglang_slots.py", routing, "padded = batch"))
    found = diagnose(Replay(read(Path("fixtures/traces/slots.jsonl")), Setting("ledger"))).verdict.findings[0]
    assert found.place.component == "length" and "a batch is not padded to a captured size" in found.diagnosis

"""Relations of an engine that is led by verbs: what has a meaning for it holds, and finds what two runs show.

Leaves out: relations of our own engine (`test_relations.py`).
"""

import json
from pathlib import Path

import pytest

from instep.campaign.relations import held, relations
from instep.campaign.relations.case import Case
from instep.run.replay import Replay
from instep.setting import Setting
from instep.verdict import Exit
from support.inputs.few_channels import few_channels
from support.running.command import Runner, complaint
from support.running.covering import few

pytestmark = pytest.mark.slow  # whole replays or commands

RESUMED = 16  # an event after a save, a load and a preemption; later events add nothing new


def case(name: str, layers: int = 2, until: int | None = RESUMED) -> Case:
    trace = few_channels("kept", layers)
    return Case.of(trace, Replay(trace, Setting(engine=f"support.wrong.{name}")).plan, until=until)


@few(1)
@pytest.mark.parametrize("name", ["engines:right", "engines:keeping", "engines:watching"])
def test_correct_engine_agrees_in_every_relation_that_applies(name: str) -> None:
    found = {one.relation.name: one for one in held(case(name), relations())}
    meant = {relation: one.verdict for relation, one in found.items() if one.lacks is None}
    assert set(meant) == {
        "unseen", "read_late", "later_rows", "speculation_off", "alone", "schedule", "rejected_is_plain", "split"
    }
    assert {"draft_layout", "slots"} <= {relation for relation, one in found.items() if one.lacks}
    for relation, verdict in meant.items():
        assert verdict.exit is Exit.AGREED, (relation, verdict.findings[:1])
        assert {"conv", "state"} <= {one.place.component for one in verdict.compared}, relation
        assert not {"length", "root"} & {one.place.component for one in verdict.compared}, "the harness's own words"


@pytest.mark.parametrize(("relation", "name", "component"), [
    ("unseen", "engines:disturbed", "conv"), ("slots", "engines:by_slots", "final"),
    ("later_rows", "engines:looks_ahead", "final"),
    ("speculation_off", "engines:by_speculation", "final"),
    ("alone", "engines:in_a_batch", "final"), ("schedule", "engines:one_more", "conv"),
    ("rejected_is_plain", "engines:no_rollback", "conv"), ("split", "engines:chunks_alone", "conv"),
    ("read_late", "engines:kept_when_read", "state"),
])  # fmt: skip
def test_relation_detects_its_wrong_engine(relation: str, name: str, component: str) -> None:
    layers = 4 if name.endswith("chunks_alone") else 2  # its windows are wrong only after a wrong layer
    until = None if relation == "read_late" else RESUMED  # it needs a round after the one that was not read
    found, = held(case(name, layers, until), relations([relation]))
    assert found.verdict.exit is Exit.DIVERGED
    assert component in {one.place.component for one in found.verdict.findings}, found.verdict.findings[:2]


def test_engine_that_shows_nothing_is_inconclusive(instep: Runner) -> None:
    ran = instep("relations", few_channels("kept", 2).path, "later-rows", "unseen",
                 "--engine", "support.wrong.engines:mute")
    assert ran.code == 3 and "shows none of its components" in ran.out


def test_table_lists_compared_components_and_replaced_events(instep: Runner, tmp_path: Path) -> None:
    file, trace = tmp_path / "r.json", few_channels("kept", 2).path
    ran = instep("relations", trace, "slots", "later-rows", "--engine", "support.wrong.engines:no_rollback",
                 "--json", file)
    out = " ".join(ran.out.split())
    assert ran.code == 1 and "kept.jsonl [support.wrong.engines:no_rollback, float32]" in out
    assert "slots does not apply: this engine chooses slots and pages itself" in out
    assert "2 times without save and load: drop, then a step over the tokens again" in out
    assert "components compared: conv, final, logits, pick, state; this engine shows no others" in out
    assert "DIVERGED kept, engine[support.wrong.engines:no_rollback]: row i of a verify does not depend on" in out
    runs = json.loads(file.read_text())["runs"]
    assert [run["engine"] for run in runs] == ["support.wrong.engines:no_rollback"] * 2
    assert [run["components"] for run in runs] == [[], ["conv", "final", "logits", "pick", "state"]]
    again = instep(*ran.out.splitlines()[-1].split()[1:])
    assert again.code == 1 and "DIVERGED" in again.out


@pytest.mark.parametrize(("name", "code", "says"), [
    ("raising", 1, "the engine, while it was built, raised LookupError (nobody is at home)"),
    ("raises_step", 1, "the trace: step raised LookupError (nobody is at home); the event is legal"),
    ("raises_state", 1, "`state` of the engine raised LookupError"),
])  # fmt: skip
def test_exception_in_a_callback_is_the_engines_finding(name: str, code: int, says: str, instep: Runner) -> None:
    ran = instep("relations", few_channels("kept", 2).path, "later-rows", "--engine", f"support.wrong.engines:{name}")
    assert ran.code == code and says in " ".join(ran.out.split()), ran


@pytest.mark.parametrize(("words", "says"), [
    (("--engine", "support.wrong.engines:no_keep"), "which has no keep"),
    (("--engine", "support.wrong.engines:right", "--ops", "plain"), "--engine: found --ops as well"),
    (("--engine", "support.wrong.engines:right", "--graphs"), "--graphs: found"),
    (("--engine", "support.wrong.engines:right", "--strategy", "mine:it"), "--strategy: found"),
])
def test_bad_engine_is_refused_in_one_line(words: tuple[str, ...], says: str, instep: Runner) -> None:
    assert says in complaint(instep("relations", few_channels("kept", 2).path, "alone", *words))

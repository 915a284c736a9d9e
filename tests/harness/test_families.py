"""Each model family agrees on both sides under every strategy that it can have; so do its states alone.

Leaves out: what only one family has (`test_kimi_linear.py`, `test_lfm2.py`, `test_minimax.py`, `test_nemotron.py`,
`test_olmo_hybrid.py`, `test_qwen4.py`), and Qwen's, which the other traces have.
"""

from functools import cache

import pytest
import torch

from instep.campaign.relations.step_changes import States
from instep.oracle.state_oracle import StateOracle
from instep.run.build_compared_engines import Plan
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace, read
from instep.verdict import Exit, Verdict
from instep_optimized.commit import CONV_FORMS, STRATEGIES
from instep_optimized.ops.plain import PLAIN
from instep_proof.faults.catalogue import TRACES
from support.running.covering import WHOLE, each_pair, few
from support.running.verdicts import agreed

pytestmark = pytest.mark.slow  # whole replays

FAMILIES = ("qwen4", "kimi", "ling", "olmo", "nemotron", "lfm2", "minimax")
WITHOUT_CONV = ("minimax",)


@cache
def trace_of(name: str) -> Trace:
    return read(TRACES / f"{name}.jsonl")


@few(8)
@pytest.mark.parametrize(("name", "ops", "strategy", "conv"), each_pair(
    FAMILIES, ("ledger", "plain"), STRATEGIES, CONV_FORMS,
    refused=lambda name, ops, strategy, conv: name in WITHOUT_CONV and conv != "windows",
))  # fmt: skip
def test_family_agrees_under_every_strategy(name: str, ops: str, strategy: str, conv: str) -> None:
    """Chunks, ragged windows, a plain step, a copy that another request loads, and a request that was preempted."""
    trace = trace_of(name)
    verdict = agreed(Replay(trace, Setting(ops, strategy=strategy, conv=conv)).run())
    assert verdict.elements > 10**6 and verdict.events == len(trace.events)
    drafts = {"extend", "chain.1"} if trace.header.checkpoint.mtp_layers else set()
    assert {one.place.stage for one in verdict.compared} >= {"trunk", *drafts}


@pytest.mark.parametrize("name", [
    name if name in ("kimi", "nemotron") else pytest.param(name, marks=WHOLE) for name in FAMILIES if name != "lfm2"
])  # fmt: skip
def test_states_alone_are_judged_in_every_recurrent_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As relations and engines that show no layers need it. A state that a commit leaves undecayed is found."""
    replay = Replay(trace_of(name), Setting("plain"))
    recurrent = {*replay.plan.checkpoint.config.recurrent}

    def judged() -> Verdict:
        def checks(plan: Plan) -> tuple[States]:
            rounds = PLAIN.rounds(torch.float32, torch.float32)
            return (States(StateOracle(plan.checkpoint, rounds, torch.float32, torch.device("cpu"))),)

        return Replay(trace_of(name), Setting("plain"), checks=checks).run().verdict

    verdict = agreed(judged())
    assert {one.place.layer for one in verdict.compared if one.place.component == "state"} == recurrent
    monkeypatch.setattr("instep_optimized.ops.plain.gdn._forget", lambda S, decay: None)
    assert judged().exit is Exit.DIVERGED

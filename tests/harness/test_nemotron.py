"""Nemotron-H on both sides: its trace agrees under every strategy, and what is not served is refused by name.

Leaves out: the layers against `transformers` (`tests/reference/test_oracle.py`), and its planted faults (`nemotron` of
the catalogue).
"""

from dataclasses import replace
from itertools import product

import pytest
import torch

from instep.campaign.relations.step_changes import States
from instep.diagnose import diagnose
from instep.oracle.state_oracle import StateOracle
from instep.run.build_compared_engines import Plan
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.verdict import Exit, Verdict
from instep_optimized.commit import CONV_FORMS, STRATEGIES
from instep_optimized.ops import load
from instep_optimized.ops.plain import PLAIN
from instep_optimized.options import Options, check
from instep_proof.faults.catalogue.fault import Edit
from instep_proof.faults.catalogue.nemotron import GDN, MLP, WEIGHTS
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.errors import BadInput, Unsupported
from instep_reference.contract.shards import config_of as of_rank
from support.inputs.checkpoints import config_of
from support.inputs.traces import committed
from support.running.command import Runner, complaint
from support.running.covering import few
from support.running.planting import planted_here
from support.running.verdicts import agreed, first_finding

trace = committed("faults/nemotron")


@few(2)
@pytest.mark.parametrize(("strategy", "conv", "ops"), [*product(STRATEGIES, CONV_FORMS, ("ledger", "plain"))])
def test_nemotron_h_agrees_under_every_strategy(trace: Trace, strategy: str, conv: str, ops: str) -> None:
    """Chunks, ragged windows, a plain step, a copy that another request loads, and a request that was preempted."""
    verdict = agreed(Replay(trace, Setting(ops, strategy=strategy, conv=conv)).run())
    assert verdict.elements > 10**6


@pytest.mark.whole
@pytest.mark.parametrize("more", [
    {"dtype": "bfloat16"}, {"kv_dtype": "float8_e4m3fn"}, {"graphs": True, "overlap": True},
    {"strategy": "columns", "graphs": True, "prompt_graphs": "16,64"}, {"stages": 2},
    {"strategy": "snapshot", "state_dtype": "bfloat16"},
], ids=str)  # fmt: skip
def test_nemotron_h_agrees_with_narrow_rows_in_graphs_and_in_stages(trace: Trace, more: dict[str, object]) -> None:
    agreed(Replay(trace, Setting("plain", **more)).run())  # type: ignore[arg-type]


def test_op_sets_without_the_ops_of_nemotron_h_are_refused_by_name(instep: Runner, trace: Trace) -> None:
    model = ModelConfig.from_dict(config_of("nemotron"))
    check(Options(drafter="external"), model, 1, PLAIN)
    for lacking, says in {
        "mamba2": "no recurrence mamba2", "selective_inputs": "Ops.biased_conv", "gated_group_norm": "Ops.biased_conv",
        "squared_mlp": "no MLP without a gate",
    }.items():
        with pytest.raises(Unsupported, match=says):
            check(Options(drafter="external"), model, 1, replace(PLAIN, **{lacking: None}))
    with pytest.raises(Unsupported, match="the ops of triton have no recurrence mamba2"):
        check(Options(drafter="external"), model, 1, load("triton"))
    with pytest.raises(BadInput, match="the parts of nemotron_h"):
        of_rank(model, 2)
    assert "codes of tokens add up" in complaint(instep("streams", trace.path))


@pytest.mark.whole
@pytest.mark.parametrize(("component", "edit"), [
    ("log_decay", Edit(WEIGHTS, 'A_log=stored.wide(f"{at}.A_log"), dt_bias=stored.wide(f"{at}.dt_bias"), '
                                'norm=stored.wide(f"{at}.norm.weight")',
                       'A_log=stored.take(f"{at}.A_log", torch.bfloat16), dt_bias=stored.wide(f"{at}.dt_bias"), '
                       'norm=stored.wide(f"{at}.norm.weight")')),
    ("gated", Edit(GDN, "normed.reshape(core.shape).to(core.dtype)",
                   "(normed / weight * weight[: y.shape[-1]].repeat(groups)).reshape(core.shape).to(core.dtype)")),
    ("mlp", Edit.of(MLP, "return (out + _shared(rows, weights){ => * weights.scale}).to(x.dtype)")),
], ids=lambda one: one if isinstance(one, str) else "")  # fmt: skip
def test_mistakes_that_no_list_has_are_found_at_their_place(trace: Trace, component: str, edit: Edit) -> None:
    """Rates in 16 bits, the norm weight of the first group for all, a shared expert with the scale of the others."""
    with planted_here(edit):
        found = first_finding(diagnose(Replay(trace, Setting("plain")), until=2))
    assert (found.event, found.place.component) == (2, component)


def test_states_alone_are_judged_in_every_recurrent_layer(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """As relations and engines that show no layers need it. A state that a commit leaves undecayed is found."""
    def judged() -> Verdict:
        def checks(plan: Plan) -> tuple[States]:
            rounds = PLAIN.rounds(torch.float32, torch.float32)
            return (States(StateOracle(plan.checkpoint, rounds, torch.float32, torch.device("cpu"))),)

        return Replay(trace, Setting("plain"), checks=checks).run().verdict

    verdict = agreed(judged())
    assert {one.place.layer for one in verdict.compared if one.place.component == "state"} == {0, 3}
    monkeypatch.setattr("instep_optimized.ops.plain.gdn._forget", lambda S, decay: None)
    assert judged().exit is Exit.DIVERGED

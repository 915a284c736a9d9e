"""Each model family agrees under every strategy and in other settings; what it lacks is refused by name.

Leaves out: what only one family has (`test_kimi_linear.py`, `test_lfm2.py`, `test_minimax.py`, `test_nemotron.py`,
`test_olmo_hybrid.py`, `test_qwen4.py`), and Qwen's, which the other traces have.
"""

from dataclasses import replace
from functools import cache
from typing import Any

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
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.triton import TRITON
from instep_optimized.options import Options, check
from instep_proof.faults.catalogue import TRACES
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.errors import BadInput, Unsupported
from instep_reference.contract.shards import config_of as of_rank
from support.inputs.checkpoints import config_of
from support.running.covering import WHOLE, each_pair, few
from support.running.verdicts import agreed

FAMILIES = ("qwen4", "kimi", "ling", "olmo", "nemotron", "lfm2", "minimax")
WITHOUT_CONV = ("minimax",)


@cache
def trace_of(name: str) -> Trace:
    return read(TRACES / f"{name}.jsonl")


@pytest.mark.slow
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


@pytest.mark.slow
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


GRAPHS, NARROW, KV8 = {"graphs": True}, {"dtype": "bfloat16"}, {"kv_dtype": "float8_e4m3fn"}
OVERLAPPED = GRAPHS | {"overlap": True}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "kimi": [NARROW, KV8, GRAPHS, {"ranks": 2}, {"ops": "ledger", "ranks": 4}, {"ranks": 4, "experts": "whole"},
             {"ops": "triton", "ranks": 2} | NARROW, {"ops": "invariant", "strategy": "snapshot"} | KV8],
    "ling": [NARROW, KV8, {"drafter": "external"}, {"strategy": "lazy_rerun"} | OVERLAPPED],
    "lfm2": [NARROW, OVERLAPPED, {"prompt_graphs": "8,16"} | GRAPHS],
    "minimax": [NARROW, OVERLAPPED],
    "nemotron": [NARROW, KV8, OVERLAPPED, {"strategy": "columns", "prompt_graphs": "16,64"} | GRAPHS, {"stages": 2},
                 {"strategy": "snapshot", "state_dtype": "bfloat16"}],
    "olmo": [NARROW, {"ops": "triton"}, {"ops": "triton"} | NARROW, KV8, GRAPHS, {"ops": "ledger"} | OVERLAPPED,
             {"strategy": "rerun", "ring_dtype": "bfloat16"}],
    "qwen4": [{"prompt_graphs": "16"} | NARROW | OVERLAPPED],
}


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize(("name", "setting"), [(name, one) for name in SETTINGS for one in SETTINGS[name]], ids=str)
def test_family_agrees_in_other_settings(name: str, setting: dict[str, Any]) -> None:
    agreed(Replay(trace_of(name), Setting(**{"ops": "plain"} | setting)).run())


@pytest.mark.parametrize(("kind", "ops", "lacks", "says"), [
    ("kimi", PLAIN, "attend_latents", "`Ops.attend_latents`.* kimi_linear needs"),
    ("kimi", PLAIN, "sigmoid", "`Ops.sigmoid`.* kimi_linear needs"),
    ("ling", PLAIN, "latent_inputs", "`Ops.latent_inputs`.* bailing_hybrid needs"),
    ("ling", PLAIN, "bounds_decay", "`Ops.bounds_decay`.* bailing_hybrid needs"),
    ("lfm2", TRITON, "", "no op short_conv.*lfm2"), ("lfm2", PLAIN, "multiply", "`Ops.multiply`.*lfm2"),
    ("minimax", TRITON, "", "no recurrence lightning.*minimax"),
    ("minimax", PLAIN, "scaled_add", "`Ops.scaled_add`.*minimax"),
    ("minimax", PLAIN, "lightning_inputs", "`Ops.lightning_inputs`.*minimax"),
    ("nemotron", PLAIN, "mamba2", "no recurrence mamba2"),
    ("nemotron", PLAIN, "selective_inputs", "Ops.biased_conv"),
    ("nemotron", PLAIN, "gated_group_norm", "Ops.biased_conv"),
    ("nemotron", PLAIN, "squared_mlp", "no MLP without a gate"),
    ("qwen4", TRITON, "", "`Ops.embed_streams`.*qwen4_exp"),
    ("qwen4", PLAIN, "add_streams", "`read_streams`.*qwen4_exp"),
    ("qwen4", PLAIN, "ngrams", "`Ops.ngrams`.*qwen4_exp"),
])  # fmt: skip
def test_an_op_set_without_an_op_of_a_family_is_refused_by_name(kind: Any, ops: Ops, lacks: str, says: str) -> None:
    """An op set that lacks a part of `plain` is one of its own; `bounds_beta` and its kind are switches."""
    lacking = {lacks: False if isinstance(getattr(ops, lacks), bool) else None} if lacks else {}
    config, drafted = ModelConfig.from_dict(config_of(kind)), {"ling": 3}.get(kind, 1)
    options = Options(drafter="external") if kind in ("nemotron", "qwen4") else Options()
    check(options, config, drafted, PLAIN)
    with pytest.raises(Unsupported, match=f"the ops of {ops.name} .*{says}"):
        check(options, config, drafted, replace(ops, **lacking))  # type: ignore[arg-type]


def test_fused_ops_are_refused_for_a_model_whose_beta_is_bounded() -> None:
    wide, narrow = (ModelConfig.from_dict(config_of("olmo", linear_allow_neg_eigval=wide)) for wide in (True, False))
    for lacking in ({"bounds_beta": False}, {"fused_gdn": lambda **_: None}):
        ops = replace(PLAIN, name="own", **lacking)  # type: ignore[arg-type]
        with pytest.raises(Unsupported, match=r"the ops of own .*`Ops\.bounds_beta`.* olmo_hybrid needs"):
            check(Options(), wide, 1, ops)
        check(Options(), narrow, 1, ops)


def test_op_sets_that_clamp_no_swiglu_are_refused_for_a_model_with_limits() -> None:
    clamped = ModelConfig.from_dict(config_of("ling", expert_swiglu_limit_list=[0, 0, 0, 4]))
    check(Options(), clamped, 3, TRITON)
    with pytest.raises(Unsupported, match=r"the ops of own clamp no SwiGLU \(`Ops\.clamps`\), which bailing_hybrid"):
        check(Options(), clamped, 3, replace(TRITON, name="own", clamps=False))


@pytest.mark.parametrize(("kind", "ranks", "says"), [
    ("lfm2", 2, "parts of lfm2's tensors are not declared"),
    ("minimax", 2, "parts of minimax's tensors are not declared"),
    ("nemotron", 2, "the parts of nemotron_h"), ("olmo", 2, "parts of olmo_hybrid's tensors are not declared"),
    ("qwen4", 2, "parts of qwen4_exp's tensors are not declared"), ("kimi", 3, "a divisor of the model's 4 key heads"),
])  # fmt: skip
def test_ranks_of_undeclared_parts_are_refused_by_name(kind: Any, ranks: int, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        of_rank(ModelConfig.from_dict(config_of(kind)), ranks)

"""Nemotron-H: an MTP layer of two blocks, and mistakes that no list has.

Leaves out: settings and refusals (`test_families.py`), the layers against `transformers`
(`tests/reference/test_oracle.py`), and planted faults (`nemotron` of the catalogue).
"""

import pytest

from instep.diagnose import diagnose
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep_proof.faults.catalogue.fault import Edit
from instep_proof.faults.catalogue.nemotron import GDN, MLP, WEIGHTS
from support.inputs.traces import committed
from support.running.command import Runner, complaint
from support.running.planting import planted_here
from support.running.verdicts import agreed, first_finding

trace, mtp = committed("faults/nemotron"), committed("faults/nemotron-mtp")


@pytest.mark.whole
@pytest.mark.parametrize(("ops", "more"), [
    ("ledger", {"strategy": "snapshot", "conv": "widened"}),
    ("plain", {"strategy": "lazy_rerun", "conv": "widened", "dtype": "bfloat16"}),
    ("plain", {"strategy": "columns", "graphs": True, "overlap": True}),
    ("triton", {"strategy": "columns", "conv": "widened"}),
    ("triton", {"strategy": "rerun", "dtype": "bfloat16"}), ("invariant", {"strategy": "snapshot"}),
    ("precise", {"strategy": "lazy_rerun", "dtype": "bfloat16", "conv": "widened"}),
], ids=str)
def test_an_mtp_layer_of_two_blocks_drafts_under_every_strategy(
    mtp: Trace, ops: str, more: dict[str, object]
) -> None:
    until = {"ledger": None, "plain": 11}.get(ops, 6)  # a plain step after two rounds, or a round: for time
    verdict = agreed(Replay(mtp, Setting(ops, **more)).run(until=until))  # type: ignore[arg-type]
    assert {"trunk", "extend", "chain.1", "chain.2"} <= {one.place.stage for one in verdict.compared}


def test_streams_of_a_model_whose_tokens_add_up_are_refused(instep: Runner, trace: Trace) -> None:
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

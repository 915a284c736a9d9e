"""Small errors in a 16-bit run are hidden at a layer's boundary, and found from an op's own inputs.

Leaves out: how a piece is run again from the subject's own rows (`test_own_inputs.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from instep.cli.record import make
from instep.oracle.storage_rounding import before_rounding
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace, read
from instep.trace.policy import Arrival, Policy
from instep.verdict import Comparison, Exit, Tier
from instep_proof.faults.catalogue import TRACES
from instep_proof.faults.catalogue.fault import Edit
from support.inputs.few_channels import few_channels
from support.inputs.traces import ROOM, recorded
from support.running.covering import few
from support.running.planting import planted_here

pytestmark = pytest.mark.slow  # replays of whole traces

GDN = "instep_optimized/ops/plain/gdn.py"
WINDOW, DECODE = ("part.form == 'window' and part.store is None", "part.form == 'window' and part.store is not None")
WRITES = "    writes = _writes(rows, work, heads)\n"
AGAIN = "    k, decay, update = (x.to(S.dtype) for x in kept)\n"
ADDED = "    S += write.key * update[..., None, :]\n"
UNIT = "    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + L2_EPS)\n"


def written(path: str, name: str, as_: str = ".bfloat16().to(work)") -> Edit:
    """On one path, part of what a token writes goes through bf16, or is something else."""
    return Edit(GDN, WRITES, f"{WRITES}    if {path}:\n        writes = writes._replace({name}=writes.{name}{as_})\n")


def again(change: str) -> Edit:
    return Edit(GDN, AGAIN, f"{AGAIN}    {change}\n")


def read_out(of: str) -> Edit:
    return Edit(GDN, "_sum_by_halves(S * q[:alive, row])", f"_sum_by_halves({of})")


# Planted error, strategy, trace, kind of the first event with a finding, components found there.
SLIPS = {
    "beta of a verify": (written(WINDOW, "beta"), "rerun", "short", "forward", {"core", "update"}),
    "beta of a verify that stores states": (written(WINDOW, "beta"), "snapshot", "short", "forward", {"core"}),
    "key of a verify": (written(WINDOW, "key"), "rerun", "short", "forward", {"core", "update"}),
    "key of a decode": (written(DECODE, "key"), "rerun", "decodes", "forward", {"core", "state"}),
    "beta of a decode": (written(DECODE, "beta"), "columns", "decodes", "forward", {"core", "state"}),
    "update run again": (again("update = update.bfloat16().to(S.dtype)"), "rerun", "short", "commit", {"state"}),
    "key run again": (again("k = k.bfloat16().to(S.dtype)"), "lazy_rerun", "short", "commit", {"state"}),
    "state that is read": (read_out("S.bfloat16().to(S) * q[:alive, row]"), "rerun", "short", "forward", {"core"}),
    "query that reads": (read_out("S * q[:alive, row].bfloat16().to(S)"), "snapshot", "short", "forward", {"core"}),
    # not of the family that the check was made for
    "decay by a short log2(e)": (written(WINDOW, "decay", ".log2().mul(1.00002).exp2()"), "rerun", "accepted",
                                 "forward", {"core", "update"}),
    "running state in 11 bits": (Edit(GDN, ADDED, f"{ADDED}    S.copy_(S.half().to(S))\n"), "rerun", "short",
                                 "forward", {"core", "state"}),
    "epsilon ten times": (Edit(GDN, UNIT, UNIT.replace("L2_EPS", "10 * L2_EPS")), "rerun", "short", "forward",
                          {"q", "k"}),
}  # fmt: skip


# A state of a random model has more in it for each key: in 16 bits these are below what a rounding may be.
TRAINED = {"key of a decode", "beta of a decode", "update run again", "decay by a short log2(e)"}


TWO = Policy(
    name="decodes", claim="Two requests decode.", capacity=ROOM, num_steps=0,
    arrivals=(Arrival("a", "one", max_new=2), Arrival("b", "few", max_new=2)),
)


@pytest.fixture(scope="module")
def decodes(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Two prompts of the trained model, followed by plain steps."""
    prompts = {"one": tuple(b"R"), "few": tuple(b"In")}
    return make(TRACES.parents[1] / "tiny", prompts, TWO, tmp_path_factory.mktemp("decodes") / "decodes.jsonl")


def judged(ops: str, trace: Trace, strategy: str = "rerun") -> list[Comparison]:
    """Replay with external drafts: the errors are in the delta rule, which the draft head does not have."""
    setting = Setting(ops, dtype="bfloat16", strategy=strategy, drafter="external")
    return Replay(trace, setting).run().verdict.findings


def must_be(findings: Sequence[Comparison], kind: str, components: Collection[str]) -> None:
    """The finding is in the first layer, from no other check, and about the op alone."""
    assert {found.check for found in findings} == {"own_inputs"}, "nobody else sees it"
    first = [found for found in findings if found.place.layer == 0 and found.event == findings[0].event]
    assert (first[0].kind, first[0].tier) == (kind, Tier.DERIVED)
    assert {found.place.component for found in first} == components
    assert "from the op's own inputs: relative error" in findings[0].diagnosis


@few(3)
@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_on_one_path_of_a_16_bit_run_is_found_where_it_is_made(slip: str, decodes: Trace) -> None:
    edit, strategy, trace, kind, components = SLIPS[slip]
    with planted_here(edit):
        told = decodes
        if trace != "decodes":
            told = read(TRACES / f"{trace}.jsonl") if slip in TRAINED else few_channels(trace, 2)
        must_be(judged("plain", told, strategy), kind, components)


def test_a_slip_of_an_interpreted_kernel_is_found_where_it_is_made(tmp_path: Path) -> None:
    policy = msgspec.structs.replace(TWO, name="windows", claim="Two requests verify.", num_steps=1)
    sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 32, "dtype": torch.bfloat16}
    found = judged("support.wrong.ops:NARROW_BETA_OF_WINDOWS", recorded(tmp_path, policy, **sizes))
    must_be(found, "forward", {"core", "update"})


@pytest.mark.parametrize(("trace", "strategy", "until"), [
    ("short", "rerun", None), ("short", "lazy_rerun", None), ("short", "snapshot", None),
    ("rounds", "columns", 6),  # a prompt in two chunks, and the first round
])  # fmt: skip
def test_without_a_slip_nothing_is_found_and_every_op_was_looked_at(
    trace: str, strategy: str, until: int | None
) -> None:
    how = Setting(dtype="bfloat16", strategy=strategy)
    verdict = Replay(few_channels(trace, 2), how).run(until=until).verdict
    assert verdict.exit is Exit.AGREED, verdict.findings[:2]
    near = {c.place.component: c for c in verdict.compared if c.check == "own_inputs"}
    alone = {"embedding", "normed", "final", "logits"}  # ops whose inputs are a boundary: judged from there
    from_there = {c.place.component for c in verdict.compared if c.check == "derived"}
    assert from_there - near.keys() <= alone and near["state"].elements


def test_a_rounding_is_half_a_unit_and_no_more() -> None:
    torch.manual_seed(0)  # torch casts fp64 to 16 bits by way of fp32: one number in 25 000 is rounded twice
    truth = torch.cat((torch.randn(500, dtype=torch.float64), torch.tensor([0.0, 1.0, -1.0, 3e-39, 1e-41])))
    for narrow in (torch.bfloat16, torch.float16):
        assert torch.equal(before_rounding(truth.to(narrow), truth), truth)
    near, found = truth.new_tensor([0.9999, 1.0001]), truth[:500].bfloat16()  # on both sides of a power of two
    assert torch.equal(before_rounding(torch.ones(2).bfloat16(), near), near)
    off = (before_rounding(found * (1 + 2 * 2**-7), truth[:500]) / truth[:500] - 1).abs()
    assert off.min() > 2**-9 and off.max() < 2**-5
    assert before_rounding(torch.tensor([torch.inf]).half(), truth[:1]).isinf().all()
    assert before_rounding(torch.tensor([torch.nan]).half(), truth[:1]).isnan().all()

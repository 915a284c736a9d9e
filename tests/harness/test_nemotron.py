"""Nemotron-H: an MTP layer of two blocks, mistakes that no list has, and those of its norm and experts on made values.

Leaves out: settings and refusals (`test_families.py`), the layers against `transformers`
(`tests/reference/test_oracle.py`), and planted faults (`nemotron` of the catalogue).
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from instep.diagnose import diagnose
from instep.diagnose.mistakes import experts, explanation_fit, selective_states
from instep.diagnose.mistakes.experts import Mixture
from instep.diagnose.mistakes.finding_case import Compared, Explanation
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep_proof.faults.catalogue.fault import Edit
from instep_proof.faults.catalogue.nemotron import GDN, MLP, WEIGHTS
from instep_reference.contract.place_names import Place
from instep_reference.weights import MlpWeights, MoeWeights
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


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def named(right: torch.Tensor, found: torch.Tensor, tensors: Sequence[Explanation]) -> str:
    """The sentence that explains the found tensor, whose rows may err by 1e-6; empty: none does."""
    at: Any = SimpleNamespace(place=Place("trunk", 0, "mlp"))
    case = Compared(at, found, right, torch.full((2, 1), 1e-6, dtype=torch.float64))
    return explanation_fit.best(case, tensors)[0] or ""


def test_gated_rows_are_normed_by_group_by_head_or_together() -> None:
    """2 rows of 4 heads with one number, in two groups."""
    x, z, norm = drawn(2, 4, 1), drawn(2, 4, 1) + 1, drawn(4)
    config = SimpleNamespace(core_eps=1e-5, key_heads=2, value_heads=4)
    case: Any = SimpleNamespace(own={"skip": x, "z": z}.get, weights=SimpleNamespace(config=config))
    every = [*selective_states._gated(case, SimpleNamespace(norm=norm))]  # type: ignore[arg-type]
    found = {one.sentence: one.wrong for one in every}
    gated = (x * z / (1 + (-z).exp()))[..., 0]
    alike = {says: one for says, one in found.items() if says.startswith("is normed by the sum of a group's squares")}
    (wrong,), squares = alike.values(), gated.square().view(2, 2, 2).sum(-1).repeat_interleave(2, 1)
    assert torch.allclose(wrong[..., 0], gated / (squares + 1e-5).sqrt() * norm)
    for says, count in ((*alike, 1), ("", 3), ("", 4)):  # channels of one head; of one more than a group has; of a row
        given = (gated / (squares / count + 1e-5).sqrt() * norm)[..., None]
        right = (gated / (squares / 2 + 1e-5).sqrt() * norm)[..., None]
        assert named(right, given, every) == says
    for says, size in (("over all groups together", 4), ("head by head, not group by group", 1)):
        mean = gated.square().view(2, -1, size).mean(-1, keepdim=True).expand(-1, -1, size).reshape(2, 4)
        assert torch.allclose(found[f"is normed {says}"][..., 0], gated / (mean + 1e-5).sqrt() * norm)


def test_a_relu_may_not_be_squared_in_one_kind_of_experts() -> None:
    """2 rows of 3 channels, 2 experts without gates. A leaky ReLU is not named so."""
    x, scores = drawn(2, 3), torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    routed, shared = [MlpWeights(None, drawn(4, 3 + n)[:, :3], drawn(3, 4 + n)[:, :4]) for n in (0, 1)], MlpWeights(
        None, drawn(5, 3), drawn(3, 5))
    config: Any = SimpleNamespace(experts_per_token=1, norm_topk=True, routed_scale=1.0)
    mlp = MoeWeights(drawn(2, 3), tuple(routed), shared, None)
    of = Mixture(config, mlp, x, scores, scores.argsort(descending=True))
    right, made = of.weighed(of.shares(1, True)), of.made(tuple(routed))
    found = [*experts._not_squared(of, right, made, of.shared())]

    def result(in_routed: Any, in_shared: Any) -> torch.Tensor:
        each = [in_routed(row @ routed[n].up.T) @ routed[n].down.T for n, row in enumerate(x)]
        return torch.stack(each) + in_shared(x @ shared.up.T) @ shared.down.T

    def squared(y: torch.Tensor) -> torch.Tensor:
        return torch.relu(y).square()

    says = "has a ReLU that is not squared"
    for expected, wrong in (
        (says, (torch.relu, torch.relu)), (f"{says}, in routed experts alone", (torch.relu, squared)),
        (f"{says}, in the shared expert alone", (squared, torch.relu)), ("", (F.leaky_relu, squared)),
    ):  # fmt: skip
        assert named(result(squared, squared), result(*wrong), found) == expected

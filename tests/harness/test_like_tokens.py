"""Prompts whose tokens are alike: right chunk kernels agree there, and wrong ones are found.

A text repeats itself: padding, rulers, tables. Then the rows of a block are alike, and so are their roundings, which
add up instead of averaging out. Leaves out: prompts of all kinds (`test_declared_rounding.py`).
"""

import msgspec
import pytest
import torch

from instep.campaign.relations import held, relations
from instep.campaign.relations.case import Case
from instep.cli.record import make
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.trace.policy import Arrival
from instep.verdict import Exit, Tier
from support.inputs.checkpoints import write
from support.inputs.few_channels import few_channels
from support.inputs.traces import ROOM, VOCAB, policy
from support.running.covering import WHOLE, few
from support.running.verdicts import agreed

pytestmark = pytest.mark.slow

NARROW = "support.wrong.narrow_products"
TOKENS = (23, 5, 41, 12, 60)
GIVEN = {"drafter": "external"}  # nobody drafts: the draft head, which has no chunk kernel, does not read the prompt
COUNT = 130  # three blocks, the last one a part


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Trace]:
    """Prompts by their period: the number of tokens that they repeat."""
    folder = tmp_path_factory.mktemp("alike")
    model = write(folder / "model", vocab_size=VOCAB, num_hidden_layers=2, full_attention_interval=2,
                  linear_key_head_dim=16, linear_value_head_dim=32, dtype=torch.bfloat16)  # fmt: skip
    room = msgspec.structs.replace(ROOM, pages=tuple(range(1, 41)), max_tokens=COUNT)
    told = policy(capacity=room, adaptive=None, num_steps=1, arrivals=(Arrival("a", "long", max_new=1),), steps=(),
                  deeds=(), accept=())  # fmt: skip
    return {period: make(model, {"long": tuple(TOKENS[at % period] for at in range(COUNT))}, told,
                         folder / f"{period}.jsonl") for period in (1, 3, 5)}  # fmt: skip


@few(2)
@pytest.mark.parametrize(("period", "ops"), [
    (1, "MERGED"), (1, "BF16"), (3, "NEAREST"), (5, "CUT"),
    *(pytest.param(period, "CUT", marks=WHOLE) for period in (1, 3)), pytest.param(1, "NEAREST", marks=WHOLE),
    *(pytest.param(period, "BF16", marks=WHOLE) for period in (3, 5)), pytest.param(1, "THREE", marks=WHOLE),
])  # fmt: skip
def test_right_kernels_agree(prompts: dict[int, Trace], period: int, ops: str) -> None:
    verdict = agreed(Replay(prompts[period], Setting(f"{NARROW}:{ops}", **GIVEN)).run())
    assert max(one.used for one in verdict.compared if one.tier is Tier.DERIVED) < 0.9


@pytest.mark.interpreted
@pytest.mark.parametrize("period", [1, pytest.param(3, marks=WHOLE)])
def test_our_kernels_agree(prompts: dict[int, Trace], period: int) -> None:
    agreed(Replay(prompts[period], Setting("triton", dtype="bfloat16", **GIVEN)).run())


@pytest.mark.parametrize(("ops", "component"), [("SLIPPED", "core"), ("LOST", "state"), ("UNDERSTATED", "core")])
def test_wrong_kernels_are_found(prompts: dict[int, Trace], ops: str, component: str) -> None:
    """A read-out 2% too large, a token that is not written, products narrower than declared."""
    verdict = Replay(prompts[1], Setting(f"{NARROW}:{ops}", **GIVEN)).run(tiers={Tier.DERIVED}).verdict
    assert component in {found.place.component for found in verdict.findings}, verdict.findings[:1]
    assert verdict.findings[0].place.component in ("core", "state")


@pytest.mark.parametrize("ops", [pytest.param("CUT", marks=WHOLE), "MERGED"])
def test_a_right_kernel_does_not_drift(ops: str) -> None:
    """The prompts of this trace are so short that a long request repeats them in its first block.

    That `CUT` does not drift on longer prompts: `test_declared_rounding.py`.
    """
    trace = few_channels("short", 2)
    case = Case.of(trace, Replay(trace, Setting(f"{NARROW}:{ops}")).plan, bitwise=False, tokens=128)
    (found,) = held(case, relations(["drift"]))
    assert found.verdict.exit is Exit.AGREED, found.verdict.findings[:1]

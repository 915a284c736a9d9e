"""instep allows the rounding that a subject declares, form by form, and no other.

Leaves out: the formats themselves and the block form (`test_declared_products.py`).
"""

import json
from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch

from instep.campaign.relations import held, relations
from instep.campaign.relations.case import Case
from instep.campaign.shapes.random_weights import random_checkpoint
from instep.campaign.shapes.run_real_shape import course
from instep.cli.record import make
from instep.run.large_model import outcome
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.trace.policy import Arrival
from instep.verdict import Exit, Tier, Verdict
from instep_proof.faults.catalogue import TRACES
from instep_reference.contract.engine import Forward
from support.inputs.checkpoints import write
from support.inputs.few_channels import few_channels
from support.inputs.narrow_models import narrow
from support.inputs.traces import ROOM, VOCAB, policy
from support.running.command import Runner, complaint
from support.running.covering import WHOLE, few
from support.running.verdicts import agreed

pytestmark = pytest.mark.slow

SHORT = TRACES / "short.jsonl"
NARROW = "support.wrong.narrow_products"
GIVEN = ("--drafter", "external")  # with the drafts of the trace


@cache
def judged(name: str, until: int | None = None) -> Verdict:
    """A replay of one op set, which several tests look at; with the drafts of the trace handed in."""
    setting = Setting(f"{NARROW}:{name}", drafter="external")
    return Replay(few_channels("short", 2), setting).run(until=until).verdict


def test_a_right_kernel_that_declares_its_products_agrees() -> None:
    """Chunks are followed by windows and commits. The next test has chunks with several blocks."""
    agreed(judged("CUT"))


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Like the trace `long`, for a small model: a chunk of three blocks, the last one partial, and a partial block."""
    folder = tmp_path_factory.mktemp("blocks")
    prompts = {"long": tuple(t % 61 for t in range(132)), "part": tuple(range(6))}
    told = policy(
        capacity=msgspec.structs.replace(ROOM, pages=tuple(range(1, 31)), max_tokens=160), adaptive=None, num_steps=1,
        arrivals=(Arrival("a", "long", max_new=1), Arrival("b", "part", max_new=1)), steps=(), deeds=(), accept=(),
    )
    model = write(folder / "model", num_hidden_layers=2, full_attention_interval=2)
    return make(model, prompts, told, folder / "blocks.jsonl")


@few(1)
@pytest.mark.parametrize("name", [
    "CUT", *(pytest.param(name, marks=WHOLE) for name in ("NEAREST", "BF16")), "THREE",
])  # fmt: skip
def test_blocks_of_every_format_agree(name: str, blocks: Trace) -> None:
    """The formats between have blocks of tokens that are alike, below."""
    agreed(Replay(blocks, Setting(f"{NARROW}:{name}", drafter="external")).run())
    assert any(isinstance(event, Forward) and sum(row.tokens for row in event.rows) == 138 for event in blocks.events)


def test_the_same_kernel_diverges_where_it_declares_nothing() -> None:
    found = judged("UNDECLARED").findings[0]
    assert found.place.component == "core" and found.tier is Tier.DERIVED, found


@pytest.mark.parametrize(("name", "component"), [("UNDERSTATED", "core"), ("SLIPPED", "core"), ("LOST", "state")])
def test_error_beyond_the_declaration_is_found(name: str, component: str) -> None:
    """bf16 where tf32 is declared; 2 percent too much of what was remembered; the last token of a block not written."""
    found = judged(name).findings
    assert found and component in {one.place.component for one in found}, found[:1]


def test_a_lost_token_is_named_under_a_declared_chunk() -> None:
    found = [one for one in judged("LOST").findings if one.tier is Tier.DIRECTED]
    assert found and "holds the state" in found[0].diagnosis, found[:1]


def test_verify_stays_as_sharp_as_it_was() -> None:
    """The window kernel multiplies in tf32, and only the chunk's products are declared."""
    found = judged("WINDOW_CUT").findings[0]
    assert (found.kind, found.place.component) == ("forward", "core") and found.event > 3, found
    assert found.allowed < 1e-5
    assert judged("WINDOW_DECLARED").exit is Exit.AGREED


def test_chunk_declaration_changes_no_other_allowance() -> None:
    """After the prompts, the largest allowance of every component differs by draw, never by format."""

    def allowed(name: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for one in judged(name).compared:
            if one.tier is Tier.DERIVED and one.event > 3:
                found[one.place.component] = max(found.get(one.place.component, 0.0), one.allowed)
        return found

    before, after = allowed("SAME"), allowed("CUT")
    assert set(before) == set(after) and "core" in after and "state" in after
    assert {name: (before[name], after[name]) for name in after if not after[name] <= 4 * before[name]} == {}


@few(2)
@pytest.mark.parametrize("form", ["LINEAR", "MLP", "LM_HEAD", "CONV"])
def test_every_form_is_declared_by_itself(form: str) -> None:
    undeclared, declared = (judged(name, until=5) for name in (form, f"{form}_DECLARED"))  # to the first commit
    assert undeclared.exit is Exit.DIVERGED
    assert declared.exit is Exit.AGREED, declared.findings[:1]


def test_external_engine_that_declares_its_storage_agrees(instep: Runner, tmp_path: Path) -> None:
    trace, file = few_channels("short", 2).path, tmp_path / "a.json"
    words = ("replay", trace, "--dtype", "bfloat16", "--until", 5, "--no-ladder", "--json", file, *GIVEN)
    ran = instep(*words, "--ops", "support.wrong.subjects:declared")
    assert ran.code == 0, ran.out
    but = "q, k, v, log_decay, beta, write, update, state, logits"
    assert f"declared rounding: stores all but {but} in bfloat16" in ran.out
    (run,) = json.loads(file.read_text())["runs"]
    assert run["declared"]["stored"]["hidden"] == "bfloat16" and "state" not in run["declared"]["stored"]
    ran = instep(*words, "--ops", "support.wrong.subjects:right")
    assert ran.code == 1 and "hint: this op set declares no rounding" in ran.out
    assert "declared rounding: no rounding" in ran.out


def test_declared_products_are_printed(instep: Runner, tmp_path: Path) -> None:
    words = ("replay", few_channels("short", 2).path, "--until", 2, "--json", tmp_path / "a.json")
    ran = instep(*words, "--ops", f"{NARROW}:CUT")
    assert ran.code == 0 and f"{NARROW}:CUT: declared rounding: multiplies gdn.chunk as tf32 in blocks of 64" in ran.out
    (run,) = json.loads((tmp_path / "a.json").read_text())["runs"]
    assert run["declared"] == {"stored": {}, "products": {"gdn.chunk": {"format": "tf32", "block": 64}}}


def test_default_op_set_prints_no_declaration(instep: Runner) -> None:
    assert "declared rounding" not in instep("replay", SHORT, "--ops", "plain", "--until", 1).out


@pytest.mark.parametrize(("relation", "trace"), [("split", "short"), ("drift", "rounds")])
def test_relations_within_tolerance_grant_what_is_declared(relation: str, trace: str, instep: Runner) -> None:
    words = ("relations", few_channels(trace, 2).path, relation, "--tokens", 128, *GIVEN)
    assert instep(*words, "--ops", f"{NARROW}:CUT").code == 0
    assert instep(*words, "--ops", f"{NARROW}:UNDECLARED").code == 1


@few(2)
@pytest.mark.parametrize(
    ("name", "exit_"), [("CUT", Exit.AGREED), ("NEAREST", Exit.AGREED), ("UNDECLARED", Exit.DIVERGED)]
)
def test_large_model_states_are_granted_the_declaration(name: str, exit_: Exit) -> None:
    checkpoint = random_checkpoint(narrow("qwen3.5-9b", layers=2))
    trace = course(checkpoint, "declared", requests=1, rounds=1)
    found = outcome(trace, checkpoint, Setting(f"{NARROW}:{name}"))
    assert found.verdict.exit is exit_, found.verdict.findings[:1]
    judged = [one for one in found.verdict.compared if one.check == "directed"]
    assert {one.kind for one in judged} >= {"forward"} and bool(found.declared.products) is (exit_ is Exit.AGREED)


@pytest.mark.parametrize(("ops", "says"), [
    (f"{NARROW}:NO_FORM", "products: found 'gdn', expected forms of ops: linear, conv, gdn.window, gdn.chunk"),
    ("support.wrong.subjects:misdeclared", "rounds: found 'everything', expected components: embedding"),
])  # fmt: skip
def test_unknown_declaration_is_refused(ops: str, says: str, instep: Runner) -> None:
    assert says in complaint(instep("replay", SHORT, "--ops", ops))


# -- prompts whose tokens are alike: so are roundings of the rows of a block, which add up and do not average out


TOKENS = (23, 5, 41, 12, 60)
BY_TRACE = {"drafter": "external"}  # nobody drafts: the draft head, which has no chunk kernel, does not read the prompt
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
    verdict = agreed(Replay(prompts[period], Setting(f"{NARROW}:{ops}", **BY_TRACE)).run())
    assert max(one.used for one in verdict.compared if one.tier is Tier.DERIVED) < 0.9


@pytest.mark.interpreted
@pytest.mark.parametrize("period", [1, pytest.param(3, marks=WHOLE)])
def test_our_kernels_agree(prompts: dict[int, Trace], period: int) -> None:
    agreed(Replay(prompts[period], Setting("triton", dtype="bfloat16", **BY_TRACE)).run())


@pytest.mark.parametrize(("ops", "component"), [("SLIPPED", "core"), ("LOST", "state"), ("UNDERSTATED", "core")])
def test_wrong_kernels_are_found(prompts: dict[int, Trace], ops: str, component: str) -> None:
    """A read-out 2% too large, a token that is not written, products narrower than declared."""
    verdict = Replay(prompts[1], Setting(f"{NARROW}:{ops}", **BY_TRACE)).run(tiers={Tier.DERIVED}).verdict
    assert component in {found.place.component for found in verdict.findings}, verdict.findings[:1]
    assert verdict.findings[0].place.component in ("core", "state")


@pytest.mark.parametrize("ops", [pytest.param("CUT", marks=WHOLE), "MERGED"])
def test_a_right_kernel_does_not_drift(ops: str) -> None:
    """The prompts of this trace are so short that a long request repeats them in its first block.

    Above, tokens with a period test `CUT` on longer prompts.
    """
    trace = few_channels("short", 2)
    case = Case.of(trace, Replay(trace, Setting(f"{NARROW}:{ops}")).plan, bitwise=False, tokens=128)
    (found,) = held(case, relations(["drift"]))
    assert found.verdict.exit is Exit.AGREED, found.verdict.findings[:1]

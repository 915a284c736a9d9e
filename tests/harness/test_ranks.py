"""Engines of several ranks: traces agree on the merged state, and a wrong rank is found, located and named.

Leaves out: the lock step itself (`tests/optimized/test_ranks.py`), and the catalogue's faults (`catalogue/ranks.py`).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from instep.bundled import fixtures
from instep.campaign.relations import held, relations
from instep.campaign.relations.case import Case
from instep.checks.ranks import Agreement, Collectives, Replicas
from instep.cli.record import make
from instep.diagnose import diagnose
from instep.kit.model_and_trace import PROMPTS
from instep.run.replay import Outcome, Replay
from instep.setting import Setting
from instep.subject.engines.ranked import Merging
from instep.trace.file import Trace
from instep.trace.file import read as read_trace
from instep.verdict import Comparison, Exit
from instep.watch.rank_facts import Decision
from instep_optimized.ops.ledger_label_ops import expand, read
from instep_proof.faults.catalogue.fault import Edit, Wrap
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.declared_rounding import Product
from instep_reference.contract.engine import Draft
from instep_reference.contract.place_names import Place
from support.inputs.checkpoints import TWO_LAYERS, config_of, write
from support.inputs.traces import committed, first, recording
from support.running.command import Runner
from support.running.covering import WHOLE, begun, few
from support.running.planting import planted_here

pytestmark = pytest.mark.slow  # whole replays

OVER, LOCKSTEP, ENGINE = (
    f"instep_optimized/{name}.py" for name in ("ranks/ops_over_ranks", "ranks/lockstep", "engine"))
SHARDS = "instep_reference/contract/shards.py"
MANY: dict[str, Any] = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_hidden_layers": 2}

four_heads, one_head = committed("faults/four-heads"), committed("faults/one-head")
experts = recording(first(3), kind="moe")
experts_bf16 = recording(first(3), kind="moe", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """A trace of a model in which token t + 32 has the logit of token t, so that every choice is a tie."""
    folder = tmp_path_factory.mktemp("tied")
    model = write(folder / "model", **TWO_LAYERS)
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"][32:] = tensors["lm_head.weight"][:32]
    save_file(tensors, file, {"format": "pt"})
    return make(model, PROMPTS, first(3), folder / "tied.jsonl")


def replayed(trace: Trace, *edits: Edit | Wrap, until: int | None = None, **how: Any) -> Outcome:
    with planted_here(*edits):
        return diagnose(Replay(trace, Setting(**{"ranks": 2, **how})), until=until)


@pytest.mark.parametrize("how", [
    {"ops": "plain"}, pytest.param({"ops": "ledger"}, marks=WHOLE),
    pytest.param({"ops": "ledger", "graphs": True, "strategy": "snapshot"}, marks=WHOLE),
    pytest.param({"ops": "plain", "overlap": True, "strategy": "columns", "conv": "widened"}, marks=WHOLE),
], ids=lambda how: "-".join(map(str, how.values())))
def test_two_ranks_agree_with_the_reference(four_rounds: Trace, how: dict[str, Any]) -> None:
    verdict = replayed(four_rounds, **how).verdict
    assert verdict.exit == Exit.AGREED and verdict.events == len(four_rounds.events)
    judged = {one.check: 0 for one in verdict.compared} | {
        name: sum(one.elements for one in verdict.compared if one.check == name)
        for name in (Agreement.name, Replicas.name, Collectives.name)}
    assert judged[Agreement.name] > 300 and judged[Replicas.name] > 10_000 and judged[Collectives.name] > 100
    assert {"contracts", "capacity", "aliasing", "poison", "leaks", "copies", "hostreads", "bytes"} <= judged.keys()


@WHOLE
@pytest.mark.parametrize(("name", "how"), [("block", {"ops": "ledger"}), ("unread", {"ops": "plain", "graphs": True})])
def test_a_block_drafter_is_on_two_ranks(name: str, how: dict[str, Any]) -> None:
    trace = begun(name)
    verdict = replayed(trace, drafter="block", **how).verdict
    assert verdict.exit == Exit.AGREED and verdict.events == len(trace.events)


@pytest.mark.parametrize(("ops", "graphs", "device"), [
    pytest.param("triton", True, "cpu", marks=WHOLE), pytest.param("invariant", False, "cpu", marks=WHOLE),
    *(pytest.param(ops, graphs, "cuda", marks=pytest.mark.gpu)
      for ops in ("triton", "invariant") for graphs in (False, True)),
])  # fmt: skip
def test_kernels_run_on_two_ranks(four_rounds_bf16: Trace, ops: str, graphs: bool, device: str) -> None:
    """On a GPU the graphs are CUDA graphs, with the work and the sums of both ranks in one graph."""
    verdict = replayed(four_rounds_bf16, ops=ops, dtype="bfloat16", graphs=graphs, device=device).verdict
    assert verdict.exit == Exit.AGREED and verdict.events == len(four_rounds_bf16.events)
    assert any(one.check == Collectives.name and one.elements > 5 for one in verdict.compared)


@WHOLE
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("ops", ["plain", "triton"])
def test_states_of_ranks_are_rounded_with_the_numbers_of_the_whole(
    four_rounds_bf16: Trace, ops: str, dtype: str
) -> None:
    rounded = {"dtype": "bfloat16", "state_dtype": dtype, "state_rounding": "stochastic:5"}
    assert replayed(four_rounds_bf16, ops=ops, **rounded).verdict.exit == Exit.AGREED
    counted = Edit.of(OVER, "first_head={comm.rank * config.value_heads => 0}")
    findings = replayed(four_rounds_bf16, counted, ops=ops, **rounded).verdict.findings
    assert findings and {one.rank for one in findings if one.place.component == "state"} == {1}


@WHOLE
def test_sums_of_parts_in_16_bits_are_declared(four_rounds_bf16: Trace) -> None:
    outcome = replayed(four_rounds_bf16, ops="plain", dtype="bfloat16")
    assert outcome.verdict.exit == Exit.AGREED
    assert outcome.declared.products == dict.fromkeys(("linear", "mlp", "moe"), Product("ieee", parts=2, stored="bf16"))
    assert not replayed(four_rounds_bf16, ops="ledger", dtype="bfloat16").declared.products


@pytest.mark.parametrize("ops", ["ledger", pytest.param("plain", marks=WHOLE)])
def test_four_ranks_share_two_kv_heads(four_heads: Trace, ops: str) -> None:
    verdict = replayed(four_heads, ops=ops, ranks=4).verdict
    assert verdict.exit == Exit.AGREED
    assert {one.place.component for one in verdict.compared if one.place.component in ("keys", "value")}


@pytest.mark.parametrize("ops", ["ledger", pytest.param("plain", marks=WHOLE)])
def test_ranks_share_one_kv_head(one_head: Trace, ops: str) -> None:
    assert replayed(one_head, ops=ops).verdict.exit == Exit.AGREED


@pytest.mark.parametrize("how", [
    pytest.param({"ops": "ledger"}, marks=WHOLE), pytest.param({"ops": "plain"}, marks=WHOLE),
    pytest.param({"ops": "ledger", "experts": "whole"}, marks=WHOLE),
    pytest.param({"ops": "plain", "experts": "whole"}, marks=WHOLE),
    pytest.param({"ops": "plain", "comm": "gloo", "experts": "whole"}, marks=WHOLE),
], ids=lambda how: "-".join(map(str, how.values())))
def test_experts_are_on_two_ranks(experts: Trace, how: dict[str, Any]) -> None:
    assert replayed(experts, **how).verdict.exit == Exit.AGREED


OTHERS = "others = {(numbers < held.start) | (numbers >= held.stop) => %s}"


@pytest.mark.parametrize(("edit", "part", "says"), [
    pytest.param(Edit.of(OVER, OTHERS % "numbers < held.start"), "whole", "has the experts of rank 1 twice",
                 id="experts-on-two-ranks"),
    pytest.param(Edit.of(OVER, OTHERS % "(numbers % 2 == self._comm.rank) ^ ('down' in name)"), "whole",
                 "lacks expert",
                 id="other-experts-in-the-last-product", marks=WHOLE),
    pytest.param(Edit.of(OVER, OTHERS % "(numbers < held.start) | (numbers >= held.stop - 1)"), "whole",
                 "lacks the experts of rank 0",
                 id="experts-on-no-rank", marks=WHOLE),
    pytest.param(Edit.of(SHARDS, "Shard(1, {(experts, experts) => (Segment(2 * config.expert_intermediate),)})"),
                 "columns", "the ranks have gate and up of the experts as one block",
                 id="gate-and-up-as-one-segment", marks=WHOLE),
    pytest.param(Edit.of(OVER, "return {part_of(self._whole[name], shards.weight(self._config, name), self._comm) => "
                               "self._whole[name] if 'shared_expert.' in name else "
                               "part_of(self._whole[name], shards.weight(self._config, name), self._comm)}"), "whole",
                 "has the shared expert 2 times: it is whole on every rank",
                 id="shared-expert-on-every-rank", marks=WHOLE),
])  # fmt: skip
def test_wrong_part_of_experts_is_found_and_named(experts: Trace, edit: Edit, part: str, says: str) -> None:
    (found, *_) = replayed(experts, edit, experts=part).verdict.findings
    assert (found.event, found.check, found.place) == (2, "derived", Place("trunk", 0, "mlp"))
    assert found.diagnosis.startswith(says)


@WHOLE
@pytest.mark.parametrize("part", ["columns", "whole"])
@pytest.mark.parametrize("ops", ["plain", "triton"])
def test_sums_of_experts_in_16_bits_are_declared(experts_bf16: Trace, ops: str, part: str) -> None:
    outcome = replayed(experts_bf16, ops=ops, dtype="bfloat16", experts=part)
    assert outcome.verdict.exit == Exit.AGREED
    declared = outcome.declared.products["moe"]
    assert (declared.parts, declared.stored, declared.whole) == (2, "bf16", part == "whole")


def test_command_takes_ranks(four_rounds: Trace, instep: Runner) -> None:
    ran = instep("replay", four_rounds.path, "--ops", "ledger", "--ranks", 2, "--until", 2)
    assert ran.code == Exit.AGREED and "ledger agrees" in ran.out


@pytest.mark.parametrize(("words", "says"), [
    (("--ops", "plain", "--ranks", "3"), "--ranks: found 3, expected a divisor of the model's 2 key heads"),
    (("--ops", "plain", "--ranks", "0"), "--ranks: found 0, expected at least 1"),
    (("--ops", "plain", "--ranks", "9" * 30), "expected at least 1, and at most 1024"),  # it took all memory
    (("--ops", "plain", "--experts", "whole"), "--experts: found whole with one rank, expected --ranks 2 or more"),
    (("--ranks", "2", "--experts", "whole"), "--experts: found whole, and the model has no experts, expected columns"),
])  # fmt: skip
def test_ranks_that_are_not_there_are_refused(
    four_rounds: Trace, instep: Runner, words: tuple[str, ...], says: str
) -> None:
    ran = instep("replay", four_rounds.path, *words)
    assert ran.code == Exit.BAD_INPUT and says in ran.err + ran.out


def test_one_rank_is_the_engine_of_before(four_rounds: Trace) -> None:
    assert "ranks" not in Setting().data() and Setting(ranks=2).data()["ranks"] == 2
    assert "--ranks" not in Setting().words() and Setting(ranks=2).words()[-2:] == ("--ranks", "2")


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_merging_is_the_inverse_of_cutting(size: int, labels: bool) -> None:
    config = ModelConfig.from_dict(config_of(**MANY))
    merging = Merging(config, size, labels)
    shapes = {"qkv": (3, 192), "core": (3, 8, 16), "key": (3, 2, 16)}
    for name, shape in shapes.items():
        whole = expand(torch.arange(5, 8), *shape[1:]) if labels else torch.randn(shape)
        shard = merging.row(Place("trunk", 0, name))
        assert shard is not None
        parts = [merging.cut(whole, shard, rank) for rank in range(size)]
        assert merging.merge(parts, shard).equal(whole)
        if labels:  # each part is an intact block of the same label
            assert all(read(part).tolist() == [5, 6, 7] for part in parts)
    conv = expand(torch.arange(5, 8), 192).T if labels else torch.randn(192, 3)
    parts = [merging.cut(conv, merging.memory["conv"], rank) for rank in range(size)]
    assert merging.merge(parts, merging.memory["conv"]).equal(conv)


# ---- wrong ranks: the edit; where it is found; the words that name it

ADDED = "    total = first.to(wide)\n    for part in {parts[1:] => %s}:\n        total = total + part.to(wide)"
REDUCED = "return {added(rows, to) => %s} if to.component == BY_ROW else rows"
MLP = "return {added(ops.mlp(to=to, **given), to) => %s}"
PICK = "    def pick(*, logits: torch.Tensor, to: Place) -> torch.Tensor:\n        return {%s => %s}"
EMBED = "comm.all_reduce(rows.masked_fill({~mine[:, None] => %s}, 0), to)"
PICKED = "comm.broadcast(ops.pick(logits=logits, to=to), to)"


@pytest.mark.parametrize(("edits", "check", "component", "rank", "says"), [
    pytest.param((Edit.of(LOCKSTEP, ADDED % "[*parts[1:], parts[1]]"),), "derived", "mixer", None,
                 "has the partial sum of rank 1 twice", id="partial-sum-twice"),
    pytest.param((Edit.of(OVER, REDUCED % "added(added(rows, to), to)"),), "derived", "mixer", None,
                 "has every partial sum twice", id="all-reduce-twice"),
    pytest.param((Edit.of(OVER, REDUCED % "rows"),), "collectives", "mixer", None,
                 "is made without all_reduce: every rank has its own", id="no-all-reduce"),
    pytest.param((Edit.of(OVER, REDUCED % "(added(rows, to), rows)[comm.rank]"),), "replicas", "mixer", 1,
                 "rank 1 holds other bits than rank 0", id="own-part-of-the-sum"),
    pytest.param((Edit.of(OVER, EMBED % "~mine[:, None] | (comm.rank == 1)"),), "derived", "embedding", None,
                 "lacks the embedding of rank 1's tokens; ", id="no-embedding-of-a-rank"),
    pytest.param((Edit.of(OVER, PICK % (PICKED, "ops.pick(logits=logits, to=to) ^ comm.rank")),), "replicas", "pick", 1,
                 "rank 1 holds other bits than rank 0", id="own-pick"),
    pytest.param((Edit.of(OVER, REDUCED % "rows if comm.rank else added(rows, to)"),), "serves", "gated", None,
                 "rank 0 waits in all_reduce for trunk layer 0 mixer of (4, 32) float32; rank 1 waits at trunk",
                 id="rank-without-all-reduce"),
])  # fmt: skip
@few(2)
def test_wrong_rank_is_found_and_located(
    four_rounds: Trace, edits: tuple[Edit, ...], check: str, component: str, rank: int | None, says: str
) -> None:
    findings = replayed(four_rounds, *edits).verdict.findings
    found = [one for one in findings if one.check == check and one.place.component == component]
    assert found and found[0].event == findings[0].event == 2 and found[0].rank == rank
    assert says in found[0].diagnosis


EXCHANGED = ("return part_of(self._whole[name], shards.weight(self._config, name), {self._comm => self._comm if not "
             "name.endswith('%s.weight') else type('Other', (), dict(rank=1 - self._comm.rank, size=2))})")  # fmt: skip


@WHOLE
@pytest.mark.parametrize(("weight", "component", "says"), [
    ("conv1d", "mixed", "ranks 0 and 1 have conv1d of each other"),
    ("in_proj_z", "z", "ranks 0 and 1 have in_proj_z of each other"),
    ("out_proj", "mixer", "ranks 0 and 1 have the columns of each other"),
    ("self_attn.o_proj", "mixer", "ranks 0 and 1 have the columns of each other"),
    ("mlp.down_proj", "mlp", "ranks 0 and 1 have the columns of each other"),
])  # fmt: skip
def test_parts_that_two_ranks_have_of_each_other_are_named(
    four_rounds: Trace, weight: str, component: str, says: str
) -> None:
    (found, *_) = replayed(four_rounds, Edit.of(OVER, EXCHANGED % weight), ops="plain", until=3).verdict.findings
    assert found.place.component == component and says in found.diagnosis, (str(found.place), found.diagnosis)


OWN_ARGMAX = "ops.pick(logits=logits[:, vocab.start : vocab.stop], to=to) + vocab.start"


def test_tie_over_ranks_goes_to_the_lowest_token(tied: Trace) -> None:
    """With an argmax of its own part, rank 1 picks the equal token of its half: only the ranks' comparison sees it."""
    drafts = [event.picks for event in tied.events if isinstance(event, Draft)]
    assert drafts and all(token < 32 for picks in drafts for one in picks or () for token in one)
    findings = replayed(tied, Edit.of(OVER, PICK % (PICKED, OWN_ARGMAX))).verdict.findings
    wrong = [one for one in findings if one.check == Replicas.name]
    assert wrong[0].rank == 1 and wrong[0].event == findings[0].event == 2 and wrong[0].place.component == "pick"
    assert not {one.check for one in findings} & {"decisions", "derived", "identity"}


@WHOLE
def test_right_ranks_agree_on_ties(tied: Trace) -> None:
    assert replayed(tied).verdict.exit == Exit.AGREED


def test_kv_head_of_the_next_rank_is_named(four_heads: Trace) -> None:
    """Each of two KV heads is on two ranks."""
    shifted = Edit.of(OVER, "    spans = shard.spans({comm.rank => "
                            "(comm.rank + shard.segments[0].copied) % comm.size}, comm.size)")  # fmt: skip
    findings = replayed(four_heads, shifted, ranks=4).verdict.findings
    wrong = [one for one in findings if one.place == Place("trunk", 1, "key_raw") and one.check == Replicas.name]
    assert [(one.rank, one.diagnosis) for one in wrong] == [
        (rank, f"rank {rank} holds the KV head of rank {head}, not a copy of the one of rank {rank - 1}: 128 of 128 "
               "numbers differ") for rank, head in ((1, 2), (3, 0))]  # fmt: skip
    assert findings[0].event == wrong[0].event == 2


def test_exception_of_one_rank_names_the_rank_and_its_line(four_rounds: Trace) -> None:
    raises = Edit.of(OVER, MLP % "added(ops.mlp(to=to, **given) if comm.rank == 0 else torch.empty(2).view(3), to)")
    (found, *_) = replayed(four_rounds, raises).verdict.findings
    assert (found.event, found.check, found.rank) == (2, "serves", 1)
    assert "rank 1 raised RuntimeError (shape '[3]' is invalid for input of size 2); rank 0 did not" in found.diagnosis
    assert found.raised is not None and found.raised.function.endswith("over_ranks.<locals>.mlp")
    assert Path(found.raised.file).name == "ops_over_ranks.py"


@WHOLE
def test_cause_of_a_wrong_rank_is_confirmed(four_rounds: Trace) -> None:
    """The reference's mixer is cut into the parts of the ranks when it replaces theirs."""
    with planted_here(Edit.of(OVER, REDUCED % "2 * added(rows, to)")):
        outcome = diagnose(Replay(four_rounds, Setting(ranks=2)), ladder=True)
    assert outcome.located is not None and outcome.located.cause == "place"
    assert outcome.located.options[:1] == ("--graft trunk.0.mixer@2",)
    with planted_here(Edit.of(OVER, PICK % (PICKED, "ops.pick(logits=logits, to=to)"))):
        outcome = diagnose(Replay(four_rounds, Setting(ranks=2)), ladder=True)
    assert outcome.located is not None and outcome.located.says.startswith("cause: the ranks differ")


@WHOLE
def test_part_of_one_rank_can_be_replaced(four_rounds: Trace) -> None:
    """A wrong value row of rank 1 is replaced by the reference's: rows of a place, and memory after an event."""
    wrong = Edit.of(
        OVER, "return added(rows, to) if to.component == BY_ROW else {rows => "
              'rows * (1 + comm.rank * (to.component == "value"))}')  # fmt: skip
    with planted_here(wrong):
        outcome = diagnose(Replay(four_rounds, Setting(ranks=2)), ladder=True)
    found, located = outcome.verdict.findings[0], outcome.located
    assert found.place.component == "value" and found.rank == 1
    assert located is not None and located.cause == "place" and "value" in located.options[0]


class Judge:
    """The comparisons of one check over facts that a test changed."""

    def __init__(self, outcome: Outcome) -> None:
        assert outcome.last is not None and outcome.last.ranks is not None
        self.context, self.facts = outcome.last, outcome.last.ranks

    def __call__(self, check: Any, **changes: Any) -> list[Comparison]:
        context = replace(self.context, ranks=replace(self.facts, **changes))
        return [one for one in check()(context) if not one.agrees]


@pytest.fixture(scope="module")
def judge(four_rounds: Trace) -> Judge:
    return Judge(Replay(four_rounds, Setting(ops="ledger", ranks=2)).run(until=6))


def test_checks_pass_the_facts_of_right_ranks(judge: Judge) -> None:
    assert not judge(Agreement) and not judge(Replicas) and not judge(Collectives)
    assert len(judge.facts.calls[0]) >= 5 and len(judge.facts.replicas) > 20 and len(judge.facts.decisions) > 10


def test_agreement_names_the_rank_that_differs_from_the_trace(judge: Judge) -> None:
    facts = {(one.what, one.request): one for one in judge.facts.decisions}
    length = facts["the length", "a"]
    right = length.values[0]
    for values, rank in (((right, 9), 1), ((9, right), 0)):
        (found,) = judge(Agreement, decisions=(replace(length, values=values),))
        assert found.rank == rank and f"the length of rank {rank} is 9; the trace has {right}" in found.diagnosis
    (found,) = judge(Agreement, decisions=(Decision("the next step count", (1, 3)),))
    assert found.rank == 1 and "rank 0 has 1" in found.diagnosis


@WHOLE
def test_topk_tokens_without_broadcast_are_found() -> None:
    """Every rank has the same logits, so nothing else differs."""
    grown = read_trace(fixtures() / "traces" / "faults" / "grown.jsonl")
    each = "return TopkTokens(*map({comm.broadcast => %s}, ops.topk_tokens(logits=logits, topk=topk)))"
    assert replayed(grown, ops="ledger", until=4).verdict.exit == Exit.AGREED
    for wrong in ("lambda x: x", "lambda x: x if x.is_floating_point() else comm.broadcast(x)"):
        (found, *_) = replayed(grown, Edit.of(OVER, each % wrong), until=4).verdict.findings
        assert (found.event, found.check, str(found.place)) == (4, Collectives.name, "chain.0 logits")
        assert "top-k tokens without broadcast" in found.diagnosis


def test_collectives_name_the_first_call_that_differs(judge: Judge) -> None:
    first, second = judge.facts.calls
    for calls, says in (
        (second[:-1], f"at call {len(first) - 1} rank 1 is done; rank 0 is in"),
        ((second[0], second[0], *second[1:]), "at call 1 rank 1 is in"),
        ((second[0]._replace(shape=(7, 7)), *second[1:]), "of (7, 7) int64; rank 0 is in"),
    ):
        (found,) = judge(Collectives, calls=(first, calls))
        assert found.rank == 1 and says in found.diagnosis


@WHOLE
@pytest.mark.parametrize(("ops", "names"), [
    ("ledger", ["graph_is_eager", "decode_is_verify_1", "slots", "unseen"]), ("triton", ["unseen"]),
])  # fmt: skip
def test_relations_hold_on_two_ranks(four_rounds: Trace, ops: str, names: list[str]) -> None:
    plan = Replay(four_rounds, Setting(ops, ranks=2)).plan
    for one in held(Case.of(four_rounds, plan), relations(names)):
        assert one.verdict.exit == Exit.AGREED and one.verdict.elements > 1000, one.relation.name

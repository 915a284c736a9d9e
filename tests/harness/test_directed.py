"""Every wrong state of the bank is found in its block and called by its name, in every width; right ones lean nowhere.

Altered saved states, wrong starts of a round and conv windows of another request are named, too. Leaves out: whole runs
(`test_checks.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from instep.checks.known_wrong_states import Directed, Looked, grouped, look
from instep.checks.poison import poisoned
from instep.checks.unchanged_bytes import Bytes
from instep.checks.wrong_conv_windows import shifted
from instep.checks.wrong_ring_states import RUN_AGAIN, overfull
from instep.checks.wrong_state_bank import BANK, CHAIN, NODE, wrong_states
from instep.checks.wrong_state_inputs import Scene, Wrong, step, wrong_of
from instep.oracle.miscounted_states import IN_PART, TWICE, joined, lacking_oldest
from instep.oracle.oracle import Oracle
from instep.oracle.reordered_arithmetic import up_or_down
from instep.oracle.states_with_folded_tokens import Run
from instep.run.replay import Replay
from instep.setting import Setting
from instep.tier_allowances import PROJECTION_LIMIT
from instep.trace.policy import ScheduledAction
from instep.verdict import Comparison, Tier, Verdict
from instep.watch.event_context import EventContext, RowSpan
from instep.watch.rows_by_request import row_spans
from instep_proof.faults.catalogue.fault import Edit
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Commit, Forward, Load, RequestState, Resume
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from support.inputs import check_contexts as m
from support.inputs.few_channels import few_channels
from support.running.covering import few

LINE = "line = torch.cat([before(part, who, x.dtype), x[who.rows].transpose(1, 2)], dim=2)"
HV, K, V = 4, 8, 20  # V is no multiple of the 8 columns of a block
WIDTHS = pytest.mark.parametrize(
    ("width", "noise"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-3)], ids=["fp32", "bf16"])


def scene(
    count: int = 3, window: int = 5, seed: int = 0, verb: str = "accepted", key_dim: int = K, channels: bool = False,
) -> Scene:
    """Heads that forget at once and heads that remember, with a state of some age before the window."""
    g = torch.Generator().manual_seed(seed)

    def drawn(*shape: Any) -> torch.Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    k = torch.nn.functional.normalize(drawn(window, HV, key_dim), dim=-1)
    log_decay = -torch.tensor([1.2, 0.3, 0.05, 0.02], dtype=torch.float64) * (0.5 + drawn(window, HV).sigmoid())
    if channels:
        log_decay = log_decay[..., None] * (0.2 + drawn(window, HV, key_dim).sigmoid())
    return Scene(
        drawn(HV, key_dim, V), k, drawn(window, HV, V), log_decay, drawn(window, HV).sigmoid(), count, verb,
        drawn(HV, key_dim, V), [('of request "x"', drawn(HV, key_dim, V))],
        [(TWICE.known(), drawn(HV, key_dim, V)), (IN_PART.known(1, "", 3, "accepted"), drawn(HV, key_dim, V))],
        [('of request "x"', drawn(window, HV, V))], drawn(window - 1, HV, V),
        branches=[Wrong(NODE.known("state", 4, "a child of node 3", 3), drawn(HV, key_dim, V)),
                  Wrong(CHAIN.known(2, "all of them"), drawn(HV, key_dim, V))],
        their_decays=[('of request "x"', log_decay * (0.3 + drawn(*log_decay.shape).sigmoid()))],
    )  # fmt: skip


def tokens_before(count: int) -> list[Run]:
    """The tokens of earlier steps, as the oracle keeps them: runs of one token."""
    of = scene(count=1, window=count, seed=4)
    names = {"k": of.k, "v": of.v, "log_decay": of.log_decay, "beta": of.beta, "update": of.updates}
    return [Run({Place("trunk", 0, name): rows[t : t + 1] for name, rows in names.items()}) for t in range(count)]


def stored(state: torch.Tensor, width: torch.dtype, noise: float, seed: int = 1) -> torch.Tensor:
    """As a correct engine of this width would hold it."""
    g = torch.Generator().manual_seed(seed)
    return (state * (1 + noise * torch.randn(state.shape, generator=g, dtype=torch.float64))).to(width)


def looked(found: torch.Tensor, of: Scene, width: torch.dtype, noise: float) -> Looked:
    return look(found, of, torch.stack([stored(of.right, width, noise, seed) for seed in (5, 6, 7)]))


@WIDTHS
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_correct_state_leans_nowhere(width: torch.dtype, noise: float, count: int) -> None:
    for seed in range(5):
        of = scene(count, seed=seed)
        result = looked(stored(of.right, width, noise), of, width, noise)
        assert result.worst < PROJECTION_LIMIT / 2
        assert result.diagnosis == ""
        assert result.undecided < 0.2 * result.pairs


@WIDTHS
@pytest.mark.parametrize("mistake", BANK, ids=lambda mistake: mistake.name)
def test_every_wrong_state_is_called_by_its_name(width: torch.dtype, noise: float, mistake: Any) -> None:
    of = scene(count=5 if mistake.name == "last-token-twice" else 3)
    if mistake.name in OF_CHANNELS:
        assert not list(wrong_of(of, [mistake])), "there is one decay per head"
        of = replace(scene(key_dim=V, channels=True), safe=(-5.0, torch.tensor([0.5, 1.0, 2.0, 3.0])))
    elif mistake.name in OF_OUTER_PRODUCTS:
        assert not list(wrong_of(of, [mistake])), "it obeys the delta rule"
        of = replace(of, recalls=False, skip=torch.linspace(0.5, 1.5, HV, dtype=torch.float64))
    wrongs = list(wrong_of(of, [mistake]))
    assert wrongs, "the scene shows every member of the bank"
    for wrong in wrongs:
        assert wrong.known.name == mistake.name
        result = looked(stored(wrong.state, width, noise), of, width, noise)
        assert result.worst > 0.9
        assert result.diagnosis.startswith(wrong.sentence)


OF_CHANNELS = ("decays-of-the-next-channel", "decays-of-channels-reversed", "decays-of-heads-reversed",
               "one-decay-of-all-channels", "channel-decays-of-another-head",
               "bound-left-out", "decays-of-values", "nothing-recalled")
OF_OUTER_PRODUCTS = ("recalled", "skip-in-a-state", "keys-of-another-group", "decays-of-another-head")
LISTED = [
    "another-count", "last-token-twice", "another-node", "tree-as-chain", "state-of-another-request",
    "previous-step", "previous-step-lost", "previous-step-twice", "previous-step-in-part", "all-zero", "from-zero",
    "transposed", "from-transposed", "last-decays-dropped", "last-decay-doubled", "last-token-stale-gates",
    "last-token-stale-key", *OF_CHANNELS, *OF_OUTER_PRODUCTS, "update-of-the-token-after", "update-of-the-token-before",
    "updates-of-the-previous-step", "update-of-the-previous-step", "update-of-another-request",
    "update-before-the-token-before", "updates-before-the-step", "updates-without-beta", "update-before-the-decay",
    "run-again-without-decay", "run-again-decayed-twice", "run-again-with-other-decays", "run-again-along-other-keys",
    "run-again-with-decays-of-another-request", "run-again-in-reverse-decays", "run-again-with-other-updates",
    "run-again-written-first", "run-again-from-the-second",
]  # fmt: skip


def test_the_bank_has_all_listed_wrong_states() -> None:
    assert [mistake.name for mistake in BANK] == LISTED


def test_the_last_token_counted_twice_is_computed_and_run_again() -> None:
    (mistake,) = (one for one in BANK if one.name == "last-token-twice")
    computed, run_again = wrong_of(scene(count=5), [mistake])
    assert not torch.allclose(computed.state, run_again.state) and not list(wrong_of(scene(count=3), [mistake]))


def test_tokens_that_a_full_ring_replaces_or_loses_are_named() -> None:
    of = replace(scene(count=3, window=4), recent=tokens_before(9))
    rare = {wrong.sentence: wrong.state for wrong in overfull(of)}
    assert len(rare) > 40
    for says in (
        "has the 2 oldest tokens of a ring of 8 entries in place of the window's last 2",
        "has the oldest token of a ring of 11 entries in place of the window's last one",
        "lacks the oldest of the 9 tokens that a ring held", "lacks the 3 oldest of the 7 tokens that a ring held",
    ):  # fmt: skip
        result = looked(stored(rare[says], torch.float32, 1e-6), of, torch.float32, 1e-6)
        assert result.diagnosis.startswith(says) and result.worst > 0.9


def test_undone_step_gives_the_state_before_it() -> None:
    """The lacking state is that of the tokens alone, which a plain run over the remaining tokens gives."""
    recent = tokens_before(6)
    k, v, log_decay, beta, _ = joined(recent)
    begun = torch.randn(HV, K, V, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    after = lacking = begun
    for t in range(6):
        after = step(after, k[t], v[t], log_decay[t], beta[t])
        lacking = lacking if t < 2 else step(lacking, k[t], v[t], log_decay[t], beta[t])
    lacks = {known.says: state for known, state in reversed(list(lacking_oldest(after, recent)))}
    found = lacks["lacks the 2 oldest of the 6 tokens that a ring held"]
    assert torch.allclose(found, lacking, rtol=1e-9, atol=1e-9)


def test_unknown_wrong_state_counts_the_rare_ones_too() -> None:
    of = replace(scene(), recent=tokens_before(4))
    odd = of.right + torch.randn(HV, K, V, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    count = len(wrong_states(of)) + len(list(overfull(of)))
    assert looked(odd.float(), of, torch.float32, 1e-6).diagnosis.startswith(f"unknown: close to none of {count} wrong")


def test_chunk_after_a_conv_window_of_later_tokens_is_named(plant: Callable[..., None]) -> None:
    plant(Edit("instep_optimized/ops/plain/causal_conv.py", LINE, LINE + """
if part.form != "window":
    later = torch.cat([line[:, :, 2 : 2 + history], line[:, :, history:]], dim=2)
    line = torch.where(part.fresh[who.which][:, None, None], line, later)
"""))
    trace = few_channels("arriving", 2)
    verdict = Replay(trace, Setting(), checks=lambda plan: [
        Directed(Oracle(plan.in_use, {}, plan.setting.width))]).run().verdict
    assert verdict.findings[0].diagnosis.startswith("was continued with the conv window of 2 tokens later"), verdict


def test_kept_updates_are_only_of_windows() -> None:
    """A prompt's tokens are not kept: no wrong state of theirs is made of updates."""
    given = scene(count=5, window=5, verb="given")
    assert not given.kept and not list(wrong_of(given, RUN_AGAIN))
    assert len(wrong_states(scene(count=5))) > len(wrong_states(given)) + len(RUN_AGAIN) // 2


def test_updates_make_the_right_state_when_they_are_run_again() -> None:
    of = scene()
    assert torch.allclose(of.again(of.base), of.right, rtol=1e-12)


@WIDTHS
@pytest.mark.parametrize("mistake", BANK, ids=lambda mistake: mistake.name)
def test_every_wrong_state_of_a_prompts_chunk_is_called_by_its_name(
    width: torch.dtype, noise: float, mistake: Any
) -> None:
    """A chunk is longer than a window, all of it is taken, and it may be a request's second."""
    of = scene(count=20, window=20, verb="given")
    for wrong in wrong_of(of, [mistake]):
        result = looked(stored(wrong.state, width, noise), of, width, noise)
        assert result.worst > 0.9
        assert wrong.sentence in result.diagnosis


@WIDTHS
@pytest.mark.parametrize("group", [0, 1, 2])
def test_one_stale_tile_of_one_head_is_found_in_its_columns(width: torch.dtype, noise: float, group: int) -> None:
    """A relative norm over the head would have to see one tile in three; over all slots, nothing at all."""
    of, head = scene(), 2
    state = of.right.clone()
    state[head, :, 8 * group : 8 * group + 8] = of.after(2)[head, :, 8 * group : 8 * group + 8]
    result = looked(stored(state, width, noise), of, width, noise)
    assert (result.head, result.group) == (head, group)
    assert result.diagnosis.startswith("holds the state after 2 tokens; 3 tokens were accepted; 1 of 12 blocks differs")


def test_wrong_states_with_equal_bits_are_listed_together() -> None:
    of = replace(scene(), base=torch.zeros(HV, K, V, dtype=torch.float64))
    result = looked(torch.zeros(HV, K, V), of, torch.float32, 1e-6)
    assert result.diagnosis.startswith("holds the state from before the step")
    assert "equal bits: is all zero" in result.diagnosis


def test_a_wrong_state_outside_of_the_bank_is_unknown() -> None:
    of = scene()
    result = looked((of.right + 2 * (of.after(2) - of.right).abs()).float(), of, torch.float32, 1e-6)
    assert "unknown" in result.diagnosis
    assert result.worst > PROJECTION_LIMIT


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_never_passes(value: float) -> None:
    of = scene()
    state = of.right.float()
    state[1, 3, 9] = value
    result = looked(state, of, torch.float32, 1e-6)
    assert not result.worst <= PROJECTION_LIMIT
    assert (result.head, result.group) == (1, 1)
    assert result.diagnosis.startswith("holds a number that is not finite")

    def never(draws: Any) -> None:
        raise AssertionError("more draws show nothing")

    assert look(state, of, torch.stack([stored(of.right, torch.float32, 1e-6)]), never).diagnosis == result.diagnosis


def test_states_that_bf16_cannot_distinguish_are_undecided() -> None:
    of = scene()
    of = replace(of, log_decay=torch.full_like(of.log_decay, -1e-5))
    result = looked(stored(of.right, torch.bfloat16, 2e-3), of, torch.bfloat16, 2e-3)
    assert result.undecided >= 2 * HV, "decay dropped and doubled"
    assert result.worst < PROJECTION_LIMIT


def flipped_tie() -> tuple[Any, ...]:
    """One head remembers one key, whose last two values lie between two numbers of bf16, the last one on the tie.

    Returns the scene; yardsticks, which all round the two in the same way, up and down, so that hardly any error is
    left; draws that do not; and a correct state in which the tie fell the other way.
    """
    of, g = scene(seed=3, key_dim=64), torch.Generator().manual_seed(0)
    k, v, base, beta = of.k.clone(), of.v.to(torch.bfloat16).double(), of.base.clone(), of.beta.clone()
    k[1, 3], beta[1, 3], beta[2, 3], base[3] = k[2, 3], 1.0, 0.5, 0.01 * base[3]
    v[1:3, 3, 8:16] = 0.0
    v[1, 3, 9], v[2, 3, 9] = 1.5 + 1.02 * 2**-8, 1.5 + 2**-8
    of = replace(of, k=k, v=v, base=base, beta=beta, log_decay=torch.full_like(of.log_decay, -6e-3))

    def after(stored_v: torch.Tensor) -> torch.Tensor:
        state = replace(of, v=stored_v).right
        return state * (1 + 1e-7 * torch.randn(state.shape, generator=g, dtype=torch.float64))

    down, up = v.to(torch.bfloat16).double(), v.to(torch.bfloat16).double()
    down[2, 3, 9], up[2, 3, 9] = 1.5, 1.5 + 2**-7
    return (
        of, torch.stack([after(down) for _ in range(9)]),
        lambda draws: torch.stack([after(up_or_down(v, torch.bfloat16, g)) for _ in range(draws)]), after(up).float(),
    )  # fmt: skip


def test_a_rounding_that_fell_otherwise_is_no_wrong_state() -> None:
    """One unit in the last place of one value, along the key that the head remembers: correct, in few dimensions."""
    of, yardsticks, again, found = flipped_tie()
    alone = look(found, of, yardsticks)
    assert alone.worst > PROJECTION_LIMIT, "its yardsticks share the rounding, and cannot see how far it may fall"
    for looked in (look(found, of, yardsticks, again, narrow=True), look(found, of, yardsticks, again)):
        assert looked.worst < PROJECTION_LIMIT and looked.diagnosis == ""
        assert alone.undecided < looked.undecided < 0.2 * looked.pairs


def test_a_wrong_state_is_named_despite_stochastic_rounding() -> None:
    of, yardsticks, again, _ = flipped_tie()
    looked = look(of.after(2).float(), of, yardsticks, again, narrow=True)
    assert looked.diagnosis.startswith("holds the state after 2 tokens; 3 tokens were accepted")


def test_nothing_more_is_drawn_where_nothing_is_stored_narrow_and_nothing_leans() -> None:
    of = scene()
    yardsticks = torch.stack([stored(of.right, torch.float32, 1e-6, seed) for seed in (5, 6, 7)])

    def never(draws: Any) -> None:
        raise AssertionError("nobody asked")

    assert look(stored(of.right, torch.float32, 1e-6), of, yardsticks, never).diagnosis == ""


def test_a_projection_near_its_limit_accuses_no_correct_engine() -> None:
    """One draw decides a pair by chance, so the largest projection of many is near the limit; more draws drop it."""
    of, g = scene(), torch.Generator().manual_seed(0)
    way = next(wrong.state for wrong in wrong_states(of) if "decay of the last token" in wrong.sentence) - of.right

    def correct(engines: int) -> torch.Tensor:
        return of.right + way * torch.randn(engines, HV, 1, 1, generator=g, dtype=torch.float64) / 5

    used, accused = [], 0
    for found in correct(200):
        one = correct(1)
        result = look(found, of, one, correct)
        assert result.problem is None, result.diagnosis
        used.append(result.worst / PROJECTION_LIMIT)
        accused += look(found, of, one).problem is not None
    assert 0.9 < max(used) <= 1 and accused > 3, "without further draws some are accused"


def test_a_right_state_is_no_wrong_one_whatever_the_count() -> None:
    """All drafts accepted, or only the root: then some members of the bank are right, and are not used."""
    everything, root = scene(count=5), scene(count=1)
    assert not any(torch.equal(wrong.state, everything.right) for wrong in wrong_states(everything))
    assert not any(torch.equal(wrong.state, root.right) for wrong in wrong_states(root))


def test_a_prompt_is_tried_after_few_counts_and_a_window_after_each() -> None:
    window, prompt = scene(), scene(count=40, window=40, verb="given")
    assert set(window.counts()) == {0, 1, 2, 4, 5}
    assert set(prompt.counts()) == {0, 1, 39}
    assert torch.equal(prompt.fold(prompt.base), prompt.right)


def test_blocks_are_columns_and_the_last_one_may_be_narrow() -> None:
    state = torch.arange(HV * K * V, dtype=torch.float64).reshape(HV, K, V)
    blocks = grouped(state)
    assert blocks.shape == (HV, 3, K * 8)
    assert torch.equal(blocks[1, 1].reshape(K, 8), state[1, :, 8:16])
    last = blocks[1, 2].reshape(K, 8)
    assert torch.equal(last[:, :4], state[1, :, 16:])
    assert not last[:, 4:].any()


def test_the_step_forgets_then_writes_what_is_not_recalled() -> None:
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    state = step(3 * one, one[0], 5 * one[0], -one[0, 0] * 0.0, one[0, 0] * 0.5)
    assert state.item() == 4.0
    decayed = step(one, one[0], one[0], -one[0, 0], 0 * one[0, 0])
    assert decayed.item() == pytest.approx(0.36788, abs=1e-5)


# -- in a run ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, list[EventContext]]:
    opened = m.checkpoint(tmp_path_factory.mktemp("directed"), num_hidden_layers=3, layer_types=m.TWO_AND_ONE)
    return opened, m.run(opened, m.events_of(opened)[:26])  # to a commit of 0, 3 and 1 drafts


def spoil(run: tuple[Checkpoint, list[EventContext]], accepted: int, state_of: Callable[..., Any]) -> Comparison:
    """The commit of a request with that many accepted drafts, with another state in layer 1."""
    opened, contexts = run
    at, name = m.commit_of(contexts, accepted)
    context = m.with_state(
        contexts[at], name, lambda s: replace(s, state={**s.state, 1: state_of(contexts[at], name, s.state[1])}))
    check, verdict = Directed(Oracle(opened, m.declared(torch.float32, torch.float32), torch.float32)), Verdict()
    for before in contexts[:at]:
        assert not verdict.add(check(before))
    (finding,) = verdict.add(check(context))
    assert (finding.event, finding.kind, finding.tier) == (at, "commit", Tier.DIRECTED)
    assert (finding.place, finding.request) == (Place("trunk", 1, "state"), name)
    assert finding.slot == contexts[at].expected.slots_after[name]
    return finding


@pytest.mark.slow
def test_a_commit_that_did_nothing_is_named(run: tuple[Checkpoint, list[EventContext]]) -> None:
    finding = spoil(run, 2, lambda commit, name, right: commit.subject.before[name].state[1])
    assert "holds the state from before the step; 3 tokens were accepted" in finding.diagnosis
    assert finding.worst == pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
def test_a_stale_tile_after_a_commit_is_named_with_head_and_columns(run: tuple[Checkpoint, list[EventContext]]) -> None:
    def tile(commit: Any, name: str, right: torch.Tensor) -> torch.Tensor:
        right = right.clone()
        right[3, :, 8:16] = commit.subject.before[name].state[1][3, :, 8:16]
        return right

    finding = spoil(run, 1, tile)
    assert (finding.head, finding.columns) == (3, (8, 15))
    assert "holds the state from before the step; 2 tokens were accepted; 1 of 8 blocks differs" in finding.diagnosis


def test_another_slots_state_and_a_transposed_one_are_named(run: tuple[Checkpoint, list[EventContext]]) -> None:
    def other(commit: Any, name: str, right: torch.Tensor) -> torch.Tensor:
        return next(s.state[1] for n, s in commit.subject.before.items() if n != name and s.length)

    assert 'holds the state of request "' in spoil(run, 2, other).diagnosis
    assert "is transposed" in spoil(run, 2, lambda commit, name, right: right.mT.reshape(right.shape)).diagnosis


PICK, FINAL, CONV = Place("extend", AFTER_LAYERS, "pick"), Place("extend", AFTER_LAYERS, "final"), Place(
    "trunk", 0, "conv")  # fmt: skip


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    opened = m.checkpoint(tmp_path_factory.mktemp("bytes"))
    kept = ScheduledAction(2, "save", "c", "kept"), ScheduledAction(3, "load", "d", "kept")
    policy = msgspec.structs.replace(m.POLICY, deeds=(*m.POLICY.deeds, *kept))
    return m.run(opened, m.events_of(opened, policy))


def found(contexts: list[Any], at: int, name: str, change: Any) -> Comparison:
    """The first finding of `bytes` alone, with another state of a request after event `at`, and none before."""
    verdict = m.judge(m.spoiled(contexts, at, lambda context: m.with_state(context, name, change)), [Bytes()])
    assert verdict.findings, "nothing was found"
    assert {finding.event for finding in verdict.findings} == {at}
    return next(compared for compared in verdict.compared if not compared.agrees)


def returned(contexts: list[Any], kind: type[Load | Resume]) -> tuple[int, str]:
    context = next(context for context in contexts if isinstance(context.event, kind))
    return context.index, context.event.request


def committed(contexts: list[Any]) -> tuple[int, RowSpan]:
    """A commit of several requests, and one that kept fewer tokens than its window had."""
    for context in contexts:
        if isinstance(context.event, Commit) and len(context.event.requests) > 1:
            for span in row_spans(context, "extend"):
                if 1 < span.count < 4 == len(context.expected.windows.get(span.request, (0,) * 4)):
                    return context.index, span
    raise AssertionError("the run has no such commit")


@pytest.mark.slow
@few(4)
@pytest.mark.parametrize("kind", [Load, Resume])
@pytest.mark.parametrize(("change", "place", "says"), [
    (lambda s: replace(s, proposal=s.proposal + 1), PICK, "draft 1 is"),
    (lambda s: replace(s, root=s.root + 1), Place("trunk", AFTER_LAYERS, "root"), "root is"),
    (lambda s: replace(s, proposal_hidden=-s.proposal_hidden), FINAL, "bytes differ"),
    (lambda s: replace(s, conv={**s.conv, 0: -s.conv[0]}), CONV, "bytes differ"),
], ids=["proposal", "root", "proposed", "conv"])  # fmt: skip
def test_altered_saved_state_is_named(
    contexts: list[EventContext], change: Callable[..., Any], place: Place, says: str, kind: type
) -> None:
    finding = found(contexts, *returned(contexts, kind), change)
    assert finding.place == place
    assert "comes back different from what was saved: " in finding.diagnosis and says in finding.diagnosis


@pytest.mark.slow
def test_memory_narrower_than_the_rows_that_it_takes_in_is_a_finding(contexts: list[EventContext]) -> None:
    """Rows are cast before they are compared: the cast is granted where it is declared."""
    at, span = committed(contexts)

    def narrow(s: RequestState) -> RequestState:
        return replace(s, **{
            field: {layer: x.bfloat16() for layer, x in getattr(s, field).items()} for field in ("keys", "conv")})

    context = m.with_state(m.spoiled(contexts, at, lambda c: c)[at], span.request, narrow)
    context = replace(context, subject=replace(
        context.subject, before={**context.subject.before, span.request: narrow(context.subject.before[span.request])}))
    earlier = context.earlier.forward
    context = replace(context, earlier=replace(context.earlier, forward=replace(earlier, subject=replace(
        earlier.subject, before={**earlier.subject.before, span.request: narrow(
            earlier.subject.before[span.request])}))))
    for rounds, places in (({}, ["conv"] * 3 + ["keys"]), ({"keys": torch.bfloat16}, ["conv"] * 3)):
        check = Bytes(cast(Oracle, SimpleNamespace(rounds=rounds)))
        findings = [found for found in check(context) if isinstance(found, Comparison) and not found.agrees]
        assert sorted(found.place.component for found in findings) == places
        assert all(found.diagnosis == "is torch.bfloat16, torch.float32 is declared" for found in findings)


@pytest.mark.slow
@pytest.mark.parametrize(("change", "place"), [
    (lambda s: replace(s, proposal=s.proposal + 1), PICK),
    (lambda s: replace(s, proposal_hidden=s.proposal_hidden.roll(1)), FINAL),
], ids=["proposal", "proposed"])
def test_round_starts_from_the_output_of_the_draft_extend(
    contexts: list[EventContext], change: Callable[..., Any], place: Place
) -> None:
    at, span = committed(contexts)
    assert found(contexts, at, span.request, change).place == place


def windows(contexts: list[Any], at: int, span: RowSpan) -> dict[str, torch.Tensor]:
    """Wrong conv windows of layer 0 by the sentence that they must get."""
    verify = next(context for context in reversed(contexts[:at]) if isinstance(context.event, Forward))
    qkv = verify.subject.places[Place("trunk", 0, "qkv")]
    rows = {s.request: qkv[s.begin : s.begin + s.count] for s in row_spans(verify, "trunk")}
    before = {name: state.conv[0] for name, state in verify.subject.before.items()}
    other = next(name for name in rows if name != span.request)
    mine = before[span.request]
    return {
        "was started from zero: everything before these tokens is lost":
            shifted(torch.zeros_like(mine), rows[span.request][list(span.nodes)]),
        "is all zero": torch.zeros_like(mine),
        "holds the window from before the step": mine,
        f'holds the window of request "{other}" after 1 token': shifted(before[other], rows[other][:1]),
        f'holds the window of request "{other}" from before the step': before[other],
    }


@pytest.mark.slow
def test_a_conv_window_that_is_not_the_requests_is_named(contexts: list[EventContext]) -> None:
    at, span = committed(contexts)
    for sentence, window in windows(contexts, at, span).items():

        def wrong(state: RequestState, window: torch.Tensor = window) -> RequestState:
            return replace(state, conv={**state.conv, 0: window})

        finding = found(contexts, at, span.request, wrong)
        assert finding.place == CONV and finding.diagnosis.startswith(sentence)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_nan_is_poison_by_its_bits_alone(dtype: torch.dtype) -> None:
    nan = float("nan")
    memory = torch.tensor([nan, 1.0, nan], dtype=dtype)
    memory.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])[2] |= 1  # another NaN
    assert memory.isnan().tolist() == [True, False, True]
    assert poisoned(memory, nan).tolist() == [True, False, False]

"""The drafters: the inputs of their layers, the lengths of their caches, and their use of given drafts.

Leaves out: the comparison of the head with `transformers` (`test_oracle.py`).
"""

from collections.abc import Sequence

import pytest
import torch

from instep_reference.acceptance import block_greedy
from instep_reference.attention import rotate
from instep_reference.contract.drafters import DRAFTERS, HEADLESS
from instep_reference.contract.drafters import MODES as FACTS
from instep_reference.contract.engine import Path, Row
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place, unseen
from instep_reference.draft import MODES, Eagle, External, Vanilla, drafter
from instep_reference.engine import ReferenceEngine, TensorModel
from instep_reference.label_ledger import LedgerEngine
from instep_reference.norms import rms_norm
from instep_reference.weights import AttentionWeights, Weights
from support.inputs.checkpoints import MODEL_TYPES
from support.inputs.rounds import CLOSE, begin, config, decode, disagreement, play, weights

PROMPT = (5, 9, 33, 2, 40)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return weights(tmp_path_factory.mktemp("one") / "model")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return weights(tmp_path_factory.mktemp("three") / "model", mtp_num_hidden_layers=3)


class Embedded:
    """Counts rows per stage, and keeps the inputs of each MTP layer."""

    def __init__(self) -> None:
        self.embedding: list[torch.Tensor] = []
        self.fed: list[torch.Tensor] = []

    def __call__(self, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        extends = place.stage.partition(".")[0] == "extend" and place.layer == STAGE_LEVEL
        if extends and place.component == "embedding":
            self.embedding.append(tensor)
        if extends and place.component == "post_normed":
            self.fed.append(tensor)
        return tensor


# -- eagle ---------------------------------------------------------------------------------------


def test_eagle_passes_its_own_hidden_row_to_the_next_step(one: Weights) -> None:
    """Drafts 2 and 3, recomputed: token = the draft before, hidden = the y before, position L - 1 + i.

    The rows are compared, not the tokens alone: a row at another position seldom moves an argmax.
    """
    engine, model = ReferenceEngine(one, num_steps=3), TensorModel(one)
    begin(engine, PROMPT)
    kept: dict[Place, torch.Tensor] = {}
    engine.watch(lambda place, tensor: kept.setdefault(place, tensor))
    proposed = engine.requests["a"].standing.proposed
    y, cache, token = proposed.hidden, proposed.caches[0], proposed.proposals[0]
    expected, ys = [token], []
    for position in (5, 6):
        y, cache = model.head(0, (token,), y, cache, position, "chain.1", unseen)
        token = model.pick(y, "chain.1", unseen)[0]
        expected.append(token)
        ys.append(y)
    assert engine.draft(("a",)).drafts.tolist() == [expected]
    assert torch.equal(torch.cat([kept[Place(f"chain.{i}", AFTER_LAYERS, "final")] for i in (1, 2)]), torch.cat(ys))
    assert engine.requests["a"].standing.proposed is proposed, "the chain's rows are scratch"


def test_the_prompt_is_shifted_by_one_and_ends_in_the_root(one: Weights) -> None:
    engine, tape = ReferenceEngine(one, num_steps=1), Embedded()
    engine.watch(tape)
    engine.admit("a", PROMPT)
    engine.forward((Row("a", "prefill", 3),))
    engine.forward((Row("a", "prefill", 2, 17),))
    expected = one.embedding[torch.tensor([9, 33, 2, 40, 17])]
    assert torch.equal(torch.cat(tape.embedding), expected)


def test_draft_row_has_the_position_of_its_hidden_row(one: Weights) -> None:
    """Row p at position p, through chunks, decoding and a round. Only the keys show it: rotary is relative."""
    assert one.draft is not None and isinstance(one.draft.layers[0].mixer, AttentionWeights)
    raw: list[torch.Tensor] = []

    def see(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        if place == Place("extend", 0, "key_raw"):
            raw.append(tensor)
        return tensor

    engine = ReferenceEngine(one, num_steps=2, see=see)
    engine.admit("a", PROMPT)
    engine.forward((Row("a", "prefill", 2),))
    engine.forward((Row("a", "prefill", 3),))
    decode(engine, (8,))
    play(engine, (1, 2), Path((1,), 6))
    keys = rms_norm(torch.cat(raw), one.draft.layers[0].mixer.key_norm, one.config.eps)
    expected = rotate(keys, torch.arange(8), one.config)
    found = engine.state("a").draft_keys[0]
    assert found.shape == expected.shape and (found - expected).abs().max() <= CLOSE * expected.abs().max()


def test_eagle_runs_every_node_of_a_tree_that_has_a_child(one: Weights) -> None:
    """The head's result at a node equals its result at the end of the node's chain."""
    engine = ReferenceEngine(one, num_steps=5)
    begin(engine, PROMPT)
    finals: list[torch.Tensor] = []

    def see(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        if place.component == "final":
            finals.append(tensor)
        return tensor

    engine.watch(see)
    own = engine.draft(("a",), ((7, 8, 9, 10, 11),), ((0, 0, 2, 3, 1),)).own[0].tolist()
    tree, finals = finals, []
    first = engine.state("a").proposal
    one_branch = engine.draft(("a",), ((8, 9, 10, 0, 0),)).own[0].tolist()
    rows, finals = finals[:2], []
    other = engine.draft(("a",), ((7, 11, 0, 0, 0),)).own[0].tolist()
    assert own == [first, first, one_branch[1], one_branch[2], other[1]]
    assert len(tree) == 3 and torch.equal(torch.cat(tree), torch.cat([*rows, finals[0]]))


# -- vanilla -------------------------------------------------------------------------------------


def test_layer_i_reads_accepted_tokens_shifted_by_i_then_the_picks(three: Weights) -> None:
    engine, tape = ReferenceEngine(three, num_steps=3, mode="vanilla"), Embedded()
    engine.watch(tape)
    begin(engine, PROMPT, root=17)
    drafts = engine.draft(("a",)).drafts[0].tolist()
    tokens = [*PROMPT, 17, *drafts]
    assert len(tape.embedding) == 3
    for layer, seen in enumerate(tape.embedding):
        assert torch.equal(seen, three.embedding[torch.tensor(tokens[1 + layer : 6 + layer])])


@pytest.mark.parametrize(
    ("chained", "num_steps", "follows"),
    [(True, 3, [True, True]), (True, 2, [True, False]), (True, 0, [False, False]), (False, 3, [False, False])],
)
def test_layer_i_reads_the_previous_layer_when_chained_within_steps(
    three: Weights, chained: bool, num_steps: int, follows: list[bool]
) -> None:
    finals: list[torch.Tensor] = []
    tape = Embedded()

    def see(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        if place.component == "final" and place.stage == ("extend", "extend.1", "extend.2")[len(finals) % 3]:
            finals.append(tensor)
        return tape(place, tensor)

    engine = ReferenceEngine(three, num_steps=num_steps, draft_with=Vanilla(chained), see=see)
    begin(engine, PROMPT)
    assert len(finals) == len(tape.fed) == 3
    assert [not torch.equal(fed, tape.fed[0]) for fed in tape.fed[1:]] == follows


def test_every_vanilla_cache_is_as_long_as_the_target_whatever_the_steps(three: Weights) -> None:
    for num_steps in (0, 1, 3):
        engine = ReferenceEngine(three, num_steps=num_steps, mode="vanilla")
        begin(engine, PROMPT)
        if num_steps:
            play(engine, (1, 2, 3)[:num_steps], Path((1,), 6))
        decode(engine, (8,))
        state = engine.state("a")
        assert [keys.shape[0] for keys in state.draft_keys.values()] == [state.length] * 3


def test_vanilla_with_one_layer_and_one_step_is_eagle(one: Weights) -> None:
    engines = ReferenceEngine(one, num_steps=1, mode="vanilla"), ReferenceEngine(one, num_steps=1)
    for engine in engines:
        begin(engine, PROMPT)
        play(engine, None, Path((1,), 6))
    assert disagreement(engines[0].state("a"), engines[1].state("a")) == 0


def test_a_vanilla_round_moves_the_target_as_decoding_does(three: Weights) -> None:
    subject, plain = (ReferenceEngine(three, num_steps=2, mode="vanilla") for _ in range(2))
    begin(subject, PROMPT, root=1)
    begin(plain, PROMPT, root=1)
    play(subject, (2, 3), Path((1, 2), 4))
    decode(plain, (2, 3, 4))
    mine, theirs = subject.state("a"), plain.state("a")
    for layer, kept in theirs.state.items():
        assert (mine.state[layer] - kept).abs().max() <= CLOSE * kept.abs().max()


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_layer_i_guesses_only_after_the_end_of_the_prompt(three: Weights, cut: int) -> None:
    """Layer i reads up to i tokens after a chunk. Not chained, so that a guess stays in its own row."""
    whole, split = (ReferenceEngine(three, num_steps=3, draft_with=Vanilla(chained=False)) for _ in range(2))
    begin(whole, PROMPT, root=17)
    split.admit("a", PROMPT)
    split.forward((Row("a", "prefill", cut),))
    split.forward((Row("a", "prefill", len(PROMPT) - cut, 17),))
    mine, theirs = split.state("a").draft_values, whole.state("a").draft_values
    for layer, kept in theirs.items():
        guessed = max(0, cut + layer - len(PROMPT) + 1)  # number of the first chunk's last rows that are guessed
        wrong = [row for row in range(len(PROMPT))
                 if (mine[layer][row] - kept[row]).abs().max() > CLOSE * kept.abs().max()]
        assert wrong == list(range(cut - guessed, cut)), f"layer {layer}"


def test_vanilla_refuses_more_steps_than_layers_and_trees(three: Weights) -> None:
    engine = ReferenceEngine(three, num_steps=4, mode="vanilla")
    begin(engine, PROMPT)
    with pytest.raises(Unsupported, match="4 steps with 3"):
        engine.draft(("a",))
    with pytest.raises(Unsupported, match="chains only"):
        engine.draft(("a",), ((1, 2),), ((0, 0),))


# -- external, and none --------------------------------------------------------------------------


def test_block_drafter_sees_all_tokens_and_matches_the_block_form(one: Weights) -> None:
    asked: list[tuple[int, ...]] = []

    def block(tokens: Sequence[int], num_steps: int) -> list[int]:
        asked.append(tuple(tokens))
        return [3] * num_steps

    engine = ReferenceEngine(one, num_steps=3, draft_with=External(block))
    begin(engine, PROMPT, root=17)
    drafts = engine.draft(("a",)).drafts
    picks = engine.forward((Row("a", "verify"),)).own["a"]
    said = engine.commit(("a",))
    correct_len, bonus = block_greedy(torch.cat([torch.tensor([[17]]), drafts], 1), picks[None])
    assert asked == [(*PROMPT, 17)]
    assert (said.num_correct_drafts.tolist(), said.bonus.tolist()) == (correct_len.tolist(), bonus.tolist())
    assert engine.state("a").proposal is None and engine.state("a").draft_keys == {}


def test_without_a_head_drafts_must_be_given() -> None:
    engine = LedgerEngine(config(mtp_num_hidden_layers=0), num_steps=2)
    begin(engine, PROMPT)
    assert engine.state("a").proposal is None
    with pytest.raises(Unsupported, match="picks"):
        engine.draft(("a",))
    said = engine.draft(("a",), ((1, 2),))
    assert (said.drafts.tolist(), said.own.tolist()) == ([[1, 2]], [[-1, -1]])


# -- the table -----------------------------------------------------------------------------------


def test_every_model_type_has_every_mode() -> None:
    types = {name.removesuffix("_text") for name in MODEL_TYPES.values()}
    modes = {kind: ("external", "block") if kind in HEADLESS else ("eagle", "vanilla", "external", "block")
             for kind in types}  # fmt: skip
    assert DRAFTERS.keys() == {(kind, mode) for kind in types for mode in modes[kind]}
    assert MODES.keys() == FACTS.keys(), "the table of the contract and the reference's"


def test_drafter_function_makes_the_class_of_the_mode(one: Weights, three: Weights) -> None:
    assert isinstance(drafter(one.config, "eagle"), Eagle)
    assert isinstance(drafter(three.config, "vanilla"), Vanilla)
    assert isinstance(drafter(three.config, "external"), External), "whatever the model has"
    with pytest.raises(Unsupported, match="eagle re-runs one"):
        drafter(three.config, "eagle")
    with pytest.raises(Unsupported, match="no drafter"):
        drafter(one.config, "medusa")

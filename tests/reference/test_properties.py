"""Properties of a round of speculation, over every model kind in fp64 and over labels exactly.

Any round equals decoding its accepted tokens; the split of a prompt does not matter; a tree's branch equals a
chain; a kept state is restored completely. Leaves out: single layers (`test_gdn.py`, `test_trunk.py`).
"""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from instep_reference.contract.capacity import Capacity
from instep_reference.contract.engine import Engine, Path, Row
from instep_reference.engine import ReferenceEngine
from instep_reference.label_ledger import LedgerEngine
from support.inputs.rounds import CLOSE, begin, config, decode, disagreement, play, weights
from support.running.covering import few

Make = Callable[[int], Engine]
KINDS = ("dense", "next", "moe", "gdn only", "attention only", "labels")
PROMPT = (5, 9, 33, 2, 2, 40, 17, 61, 8)
ROOT = 12
EVERY = 4  # the interval of tracked prefixes
TRACKED = Capacity((1,), (1,), 1, 1, track_interval=EVERY)
SOME = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module", params=KINDS)
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function: num_steps -> a fresh engine of this kind."""
    if request.param == "labels":
        return lambda num_steps: LedgerEngine(config("dense"), num_steps=num_steps, room=TRACKED)
    kinds = {"gdn only": ["linear_attention"] * 2, "attention only": ["full_attention"] * 2}
    extra = {"layer_types": kinds[request.param], "num_hidden_layers": 2} if request.param in kinds else {}
    kind = request.param if request.param in ("next", "moe") else "dense"
    held = weights(tmp_path_factory.mktemp("checkpoint") / "model", kind, **extra)
    return lambda num_steps: ReferenceEngine(held, num_steps=num_steps, room=TRACKED)


tokens = st.integers(0, 63)


@few(3)
@pytest.mark.slow
@SOME
@given(picks=st.lists(tokens, min_size=1, max_size=5), bonus=tokens, data=st.data())
def test_any_round_equals_decoding_its_accepted_tokens(
    make: Make, picks: list[int], bonus: int, data: st.DataObject
) -> None:
    accepted = data.draw(st.integers(0, len(picks)))
    subject, plain = make(len(picks)), make(0)
    begin(subject, PROMPT, root=ROOT)
    begin(plain, PROMPT, root=ROOT)
    for _ in range(2):
        play(subject, tuple(picks), Path(tuple(range(1, accepted + 1)), bonus))
        decode(plain, (*picks[:accepted], bonus))
    assert disagreement(subject.state("a"), plain.state("a")) <= CLOSE


def test_all_rejected_equals_one_decode_step(make: Make) -> None:
    subject, plain = make(3), make(3)
    begin(subject, PROMPT)
    begin(plain, PROMPT)
    play(subject, (1, 1, 1), Path((), 30))
    decode(plain, (30,))
    assert disagreement(subject.state("a"), plain.state("a")) <= CLOSE


def test_free_round_gives_the_tokens_of_free_decoding(make: Make) -> None:
    """Greedy acceptance loses nothing: the tokens are those of plain decoding, whatever was drafted."""
    subject, plain = make(3), make(0)
    begin(subject, PROMPT)
    begin(plain, PROMPT)
    for _ in range(3):
        play(subject, None, None)
    said = subject.state("a")
    while plain.state("a").length < said.length:
        plain.forward((Row("a", "decode"),))
    assert disagreement(said, plain.state("a")) <= CLOSE


@pytest.mark.slow
@SOME
@given(cuts=st.sets(st.integers(1, len(PROMPT) - 1)))
def test_any_split_of_the_prompt_gives_the_same_state(make: Make, cuts: set[int]) -> None:
    whole, split = make(2), make(2)
    begin(whole, PROMPT)
    split.admit("a", PROMPT)
    edges = [0, *sorted(cuts), len(PROMPT)]
    for start, end in pairwise(edges):
        assert split.state("a").root is None
        split.forward((Row("a", "prefill", end - start),))
    assert disagreement(whole.state("a"), split.state("a")) <= CLOSE


def test_a_tree_with_one_path_is_a_chain(make: Make) -> None:
    chain, tree = make(3), make(3)
    begin(chain, PROMPT)
    begin(tree, PROMPT)
    play(chain, (7, 8, 9), Path((1, 2), 4))
    play(tree, (7, 8, 9), Path((1, 2), 4), parents=(0, 1, 2))
    assert disagreement(chain.state("a"), tree.state("a")) <= CLOSE


@pytest.mark.slow
@SOME
@given(data=st.data())
def test_a_branch_of_a_tree_is_its_chain(make: Make, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 6))
    parents = tuple(data.draw(st.integers(0, node)) for node in range(size))
    picks = tuple(data.draw(tokens) for _ in range(size))
    node, way = data.draw(st.integers(1, size)), []
    while node:
        way.insert(0, node)
        node = parents[node - 1]
    branch = tuple(picks[node - 1] for node in way)
    tree, chain = make(size), make(len(branch))
    begin(tree, PROMPT)
    begin(chain, PROMPT)
    play(tree, picks, Path(tuple(way), 11), parents=parents)
    play(chain, branch, Path(tuple(range(1, len(branch) + 1)), 11))
    assert disagreement(tree.state("a"), chain.state("a")) <= CLOSE


@pytest.mark.parametrize("kept", ["save", "preempt"])
def test_kept_state_is_restored_completely(make: Make, kept: str) -> None:
    """In the middle of the prompt, and between rounds, with another request running in between."""
    subject, plain = make(2), make(2)
    for engine in (subject, plain):
        engine.admit("a", PROMPT)
        engine.forward((Row("a", "prefill", 4),))
    _leave_and_return(subject, kept, "first")
    for engine in (subject, plain):
        engine.forward((Row("a", "prefill", 5),))
        play(engine, (3, 4), Path((1,), 6))
    _leave_and_return(subject, kept, "second")
    assert disagreement(subject.state("a"), plain.state("a")) == 0
    for engine in (subject, plain):
        play(engine, None, None)
    assert disagreement(subject.state("a"), plain.state("a")) == 0


@few(7)
@pytest.mark.parametrize(("parents", "path"), [(None, ()), (None, (1, 2, 3)), ((0, 0, 2, 2, 3), (2, 3, 5))])
def test_request_continues_from_a_tracked_prefix_like_its_own(
    make: Make, parents: tuple[int, ...] | None, path: tuple[int, ...]
) -> None:
    """Tracked at the end of a chunk, and inside the accepted path of a chain and of a tree; the donor continues."""
    subject, plain = make(5), make(5)
    picks, count = (21, 22, 23, 24, 25), 8 if path else 4
    subject.admit("a", PROMPT)
    said = subject.forward((Row("a", "prefill", 4, track="" if path else "kept"),)).tracked
    subject.forward((Row("a", "prefill", 1),))
    text = PROMPT
    if path:
        subject.abort("a")
        begin(subject, PROMPT[:6], root=ROOT)
        subject.draft(("a",), (picks,), None if parents is None else (parents,))
        subject.forward((Row("a", "verify"),))
        said = subject.commit(("a",), (Path(path, 9),), ("kept",)).tracked
        text = (*PROMPT[:6], ROOT, *(picks[node - 1] for node in path))
        assert subject.state("a").length == 10
    assert said == {"a": count}
    prompt = (*text[:count], 63, 2, 50)
    subject.admit("b", prompt)
    subject.load("b", "kept")
    plain.admit("b", prompt)
    plain.forward((Row("b", "prefill", count),))
    assert disagreement(subject.state("b"), plain.state("b")) <= CLOSE
    for engine in (subject, plain):
        engine.forward((Row("b", "prefill", 3),))
        play(engine, None, None, name="b")
    assert disagreement(subject.state("b"), plain.state("b")) <= CLOSE
    kept = subject.prefix("kept")  # type: ignore[attr-defined]
    assert (kept.length, kept.root, kept.proposal, kept.final.shape[0] > 0) == (count, None, None, True)
    assert all(len(rows) == count - 1 for rows in kept.draft_keys.values())


def test_nothing_is_tracked_when_no_multiple_is_reached(make: Make) -> None:
    engine = make(2)
    begin(engine, PROMPT[:5], root=ROOT)
    engine.draft(("a",), ((3, 4),))
    engine.forward((Row("a", "verify"),))
    assert engine.commit(("a",), (Path((1,), 6),), ("kept",)).tracked == {}
    begin(engine, PROMPT[:4], name="b")
    engine.save("b", "kept")  # the name is free


def _leave_and_return(engine: Engine, kept: str, name: str) -> None:
    if kept == "save":
        engine.save("a", name)
        engine.abort("a")
    else:
        before = engine.state("a")
        engine.preempt("a")
        assert disagreement(engine.state("a"), before) == 0, "it is still told"
    begin(engine, (1, 2, 3), name=name)
    if kept == "save":
        engine.admit("a", PROMPT)
        engine.load("a", name)
    else:
        engine.resume("a")
    engine.finish(name)


def test_a_request_is_the_same_alone_and_in_a_batch(make: Make) -> None:
    alone, batch = make(2), make(2)
    begin(alone, PROMPT)
    play(alone, (3, 4), Path((1,), 6))
    batch.admit("a", PROMPT)
    batch.admit("b", (1, 2, 3))
    batch.forward((Row("b", "prefill", 3), Row("a", "prefill", len(PROMPT))))
    batch.admit("c", (7,))
    batch.draft(("b", "a"), ((9, 9), (3, 4)))
    batch.forward((Row("b", "verify"), Row("c", "prefill", 1), Row("a", "verify")))
    batch.commit(("a", "b"), (Path((1,), 6), Path((1, 2), 5)))
    batch.forward((Row("c", "decode"),))
    assert disagreement(alone.state("a"), batch.state("a")) == 0


def test_queries_and_idle_change_nothing(make: Make) -> None:
    engine = make(2)
    begin(engine, PROMPT)
    before = engine.state("a")
    engine.idle()
    engine.draft(("a",))
    engine.forward((Row("a", "verify"),))
    told = engine.state("a")
    for kept in (told.conv, told.state, told.keys, told.values, told.draft_keys, told.draft_values):
        for tensor in kept.values():
            tensor.zero_()
    assert disagreement(engine.state("a"), before) == 0, "drafts and a verify commit nothing; states are copies"


@pytest.mark.parametrize("taken", [0, 2])
def test_a_commit_that_is_off_by_one_disagrees(make: Make, taken: int) -> None:
    """The measure of these tests is sensitive: one accepted draft more or less is far outside it."""
    right, wrong = make(3), make(3)
    for engine, count in ((right, 1), (wrong, taken)):
        begin(engine, PROMPT, root=ROOT)
        play(engine, (7, 8, 9), Path(tuple(range(1, count + 1)), 4))
    assert disagreement(wrong.state("a"), right.state("a")) > 1e-6

"""Acceptance against brute force: every walk is tried, and sampling is counted exactly on a grid.

Leaves out: rounds, in which an engine accepts (`test_engine.py`).
"""

from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instep_reference.acceptance import answer, block_greedy, block_sampled, chain, draws, greedy, sampled
from instep_reference.contract.engine import Path

VOCAB = 4


@st.composite
def windows(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Any tree of up to 8 nodes: tokens, parents, the target's picks."""
    width = draw(st.integers(1, 8))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, width)]
    tokens, picks = (draw(st.lists(st.integers(0, VOCAB - 1), min_size=width, max_size=width)) for _ in range(2))
    return tokens, parents, picks


def right_ways(tokens: list[int], parents: list[int], picks: list[int]) -> list[list[int]]:
    """List every path from the root on which each token is its parent's pick, including the empty one."""
    ways = [[0]]
    for way in ways:
        ways += [[*way, child] for child in range(1, len(tokens))
                 if parents[child] == way[-1] and tokens[child] == picks[way[-1]]]
    return ways


@given(windows())
def test_greedy_takes_a_maximal_path_of_right_tokens(window: tuple[list[int], list[int], list[int]]) -> None:
    tokens, parents, picks = window
    path = greedy(tokens, parents, picks)
    ways = right_ways(*window)
    taken = [0, *path.nodes]
    assert taken in ways
    assert not any(way[:-1] == taken for way in ways)
    assert path.bonus == picks[taken[-1]]


def test_greedy_path_of_a_tree_has_node_numbers_not_depths() -> None:
    path = greedy([9, 1, 2, 5, 3], [-1, 0, 0, 1, 2], [2, 0, 3, 0, 7])
    assert path == Path((2, 4), 7)


@given(st.lists(st.integers(0, 2), min_size=2, max_size=6), st.data())
def test_greedy_block_equals_a_chain(block: list[int], data: st.DataObject) -> None:
    width = len(block)
    picks = data.draw(st.lists(st.integers(0, 2), min_size=width, max_size=width))
    cap = data.draw(st.none() | st.integers(0, width - 1))
    path = greedy(block, chain(width), picks, cap)
    cut = greedy(block, chain(width), picks).nodes[:cap]
    assert path == Path(cut, picks[len(cut)])
    caps = None if cap is None else torch.tensor([cap])
    correct_len, bonus = block_greedy(torch.tensor([block]), torch.tensor([picks]), caps)
    assert (int(correct_len), int(bonus)) == (len(path.nodes), path.bonus)


@given(st.integers(0, 10_000), st.integers(2, 6))
def test_sampled_block_equals_a_sampled_chain(seed: int, width: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    probs = torch.rand(3, width, VOCAB, generator=dice, dtype=torch.float64).pow(4)
    probs = probs / probs.sum(-1, keepdim=True)
    block = torch.randint(VOCAB, (3, width), generator=dice)
    uniforms, final = torch.rand(3, width, generator=dice), torch.rand(3, generator=dice)
    caps = torch.randint(width, (3,), generator=dice) if seed % 2 else None
    correct_len, bonus = block_sampled(block, probs, uniforms.double(), final.double(), caps)
    for row in range(3):
        cap = None if caps is None else int(caps[row])
        window = block[row].tolist(), chain(width), probs[row], uniforms[row].double(), final[row].double()
        path = sampled(*window, cap)
        assert (int(correct_len[row]), int(bonus[row])) == (len(path.nodes), path.bonus)
        assert path == greedy(*window[:2], draws(*window), cap)


TREE_TOKENS, TREE_PARENTS = [0, 1, 3, 2], [-1, 0, 0, 1]
TREE_PROBS = torch.tensor([[1, 2, 3, 2], [3, 1, 4, 0], [2, 2, 2, 2], [5, 0, 1, 2]], dtype=torch.float64) / 8


def grid(steps: int) -> list[torch.Tensor]:
    """Middles of equal cells: a uniform over them gives every multiple of 1/steps its exact probability."""
    return [torch.tensor((cell + 0.5) / steps, dtype=torch.float64) for cell in range(steps)]


@pytest.mark.parametrize("cap", [None, 0])
def test_first_sampled_token_has_exactly_the_target_distribution(cap: int | None) -> None:
    """Two children with 4/8 of the probability; the rest is (1, 0, 3, 0)/8, so 4 final cells are exact."""
    counts: Counter[int] = Counter()
    for first, final in product(grid(8), grid(8)):
        uniforms = torch.stack([first, *[torch.tensor(0.999, dtype=torch.float64)] * 3])
        path = sampled(TREE_TOKENS, TREE_PARENTS, TREE_PROBS, uniforms, final, cap)
        assert cap is None or not path.nodes
        counts[TREE_TOKENS[path.nodes[0]] if path.nodes else path.bonus] += 1
    assert [counts[token] / 64 for token in range(VOCAB)] == TREE_PROBS[0].tolist()


def test_second_sampled_token_has_the_distribution_of_its_parent() -> None:
    counts: Counter[int] = Counter()
    for second, final in product(grid(8), grid(8)):
        uniforms = torch.stack([torch.tensor(0.1, dtype=torch.float64), second, second, second])
        path = sampled(TREE_TOKENS, TREE_PARENTS, TREE_PROBS, uniforms, final)
        assert path.nodes[0] == 1
        counts[TREE_TOKENS[path.nodes[1]] if len(path.nodes) > 1 else path.bonus] += 1
    assert [counts[token] / 64 for token in range(VOCAB)] == TREE_PROBS[1].tolist()


def test_siblings_share_the_uniform_of_their_parent() -> None:
    uniforms = torch.tensor([0.3, 0.0, 0.0, 0.0], dtype=torch.float64)
    path = sampled(TREE_TOKENS, TREE_PARENTS, TREE_PROBS, uniforms, torch.tensor(0.5, dtype=torch.float64))
    assert path.nodes == (2,), "0.3 lies past the first child's 0.25, within the 0.5 of both"


def test_uniform_belongs_to_the_node_and_not_to_its_depth() -> None:
    """The path contains node 2, at depth 1: its next step depends only on uniform 2, apart from the root's uniform."""
    tokens, parents = [0, 1, 3, 2], [-1, 0, 0, 2]
    probs = torch.tensor([[0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 1, 0], [0, 1, 0, 0]], dtype=torch.float64)
    final = torch.tensor(0.5, dtype=torch.float64)
    for others in (0.0, 0.999):
        for own, nodes in ((0.49, (2, 3)), (0.51, (2,))):
            uniforms = torch.tensor([0.3, others, own, others], dtype=torch.float64)
            assert sampled(tokens, parents, probs, uniforms, final).nodes == nodes


def test_an_impossible_token_is_never_taken() -> None:
    probs = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    path = sampled([0, 0], [-1, 0], probs, torch.zeros(2), torch.tensor(0.0))
    assert path == Path((), 1)


def test_children_with_all_the_probability_leave_no_gap() -> None:
    """fp32 rows sum to one only nearly; the largest uniform must still find a child, because there is no rest."""
    probs = torch.tensor([[0.1, 0.7, 0.2]]).expand(4, 3)
    uniforms = torch.full((4,), 1 - 2.0**-24)
    path = sampled([0, 0, 1, 2], [-1, 0, 0, 0], probs, uniforms, torch.tensor(0.0))
    assert path.nodes == (3,)


def test_a_token_at_two_children_counts_once() -> None:
    uniforms = torch.tensor([0.3, 0.0, 0.0], dtype=torch.float64)
    path = sampled([0, 1, 1], [-1, 0, 0], TREE_PROBS[:3], uniforms, torch.tensor(0.0, dtype=torch.float64))
    assert path == Path((), 0)


def test_fields_of_a_commit_agree_with_each_other() -> None:
    said = answer([Path((2, 4), 7), Path((), 3)], [Path((), 1), Path((1,), 2)], [5, 2], torch.device("cpu"))
    assert said.num_correct_drafts.tolist() == [2, 0]
    assert said.accept_lens.tolist() == [3, 1]
    assert said.accept_index.tolist() == [[0, 2, 4, -1, -1], [0, -1, -1, -1, -1]]
    assert said.last_correct_step_indices.tolist() == [4, 0]
    assert said.bonus.tolist() == [7, 3]
    assert (said.own_num_correct_drafts.tolist(), said.own_bonus.tolist()) == ([0, 1], [1, 2])


def test_an_empty_batch_has_empty_answers() -> None:
    said = answer([], [], [], torch.device("cpu"))
    assert said.accept_index.shape == (0, 0) and said.bonus.shape == (0,)

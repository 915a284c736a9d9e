"""Trees that the drafter grows itself: against an enumeration of all paths, and in both reference engines.

Leaves out: the optimized engine (`tests/optimized/test_engine_windows.py`).
"""

from itertools import product
from pathlib import Path
from random import Random

import pytest
import torch

from instep_reference.contract.capacity import Capacity
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Admit, Draft, Forward, Row
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.place_names import Place, See
from instep_reference.draft.grow_draft_tree import Growing
from instep_reference.engine import ReferenceEngine
from instep_reference.label_ledger import LedgerEngine
from instep_reference.sampling import most_probable
from instep_reference.weights import Weights
from support.inputs.checkpoints import write
from support.inputs.rounds import config

Branch = tuple[int, ...]
VOCAB = 4


def chances(draw: Random, steps: int, ties: bool) -> dict[Branch, list[float]]:
    """Draw log-probabilities of every token after every path; with ties there are few different ones."""
    return {
        path: [-float(draw.randrange(3)) if ties else -draw.random() for _ in range(VOCAB)]
        for length in range(steps) for path in product(range(VOCAB), repeat=length)
    }  # fmt: skip


def enumerated(table: dict[Branch, list[float]], topk: int, steps: int, drafts: int) -> list[Branch]:
    """Enumerate all paths: those that are candidates, then the best of them, in the order of the definition."""
    def children(path: Branch) -> list[Branch]:
        return [(*path, token) for token in sorted(range(VOCAB), key=lambda t: (-table[path][t], t))[:topk]]

    def score(path: Branch) -> float:
        return sum(table[path[:at]][token] for at, token in enumerate(path))

    beams, order = [()], list[Branch]()
    for _ in range(steps):
        new = [path for beam in beams for path in children(beam)]
        order += new
        beams = sorted(new, key=lambda path: (-score(path), new.index(path)))[:topk]
    every = [path for length in range(1, steps + 1) for path in product(range(VOCAB), repeat=length)]
    known = sorted((path for path in every if path in order), key=lambda path: (-score(path), order.index(path)))
    return sorted(known[:drafts], key=order.index)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("topk", "steps"), [(1, 3), (2, 1), (2, 3), (3, 4), (4, 2)])
def test_grown_tree_has_the_best_candidates(topk: int, steps: int, ties: bool) -> None:
    for seed in range(20):
        table = chances(Random(seed), steps, ties)
        growing = Growing(topk)
        for _ in range(steps):
            paths = [growing.path(beam) for beam in growing.beams[-1]]
            best = most_probable(torch.tensor([table[path] for path in paths], dtype=torch.float64), topk)
            said = [[(token, table[path][token]) for token, _ in row] for path, row in zip(paths, best, strict=True)]
            growing.step(said)
        most = topk + (steps - 1) * topk**2
        for drafts in (1, most // 2 or 1, most, most + 3):
            due = enumerated(table, topk, steps, drafts)
            tokens, parents = growing.tree(drafts)
            lines: list[Branch] = [()]
            for token, parent in zip(tokens, parents, strict=True):
                lines.append((*lines[parent], token))
            assert lines[1:] == due
            if topk == VOCAB and steps == 2:  # no beam was ever cut: the best of all paths that there are
                every = sorted((sum(table[path[:at]][token] for at, token in enumerate(path))
                                for length in (1, 2) for path in product(range(VOCAB), repeat=length)), reverse=True)
                found = sorted((growing.candidates[number].score for number in growing.chosen(drafts)), reverse=True)
                assert found == pytest.approx(every[:drafts])


def room(topk: int, nodes: int) -> Capacity:
    return Capacity((1, 2), tuple(range(1, 20)), 4, 64, num_draft_tokens=nodes, topk=topk)


def engines(path: Path, topk: int, nodes: int, steps: int) -> tuple[ReferenceEngine, LedgerEngine, Weights]:
    opened = Checkpoint.open(write(path / f"{topk}", num_hidden_layers=2, full_attention_interval=2))
    weights = Weights.of(opened, torch.float64)
    given = {"num_steps": steps, "room": room(topk, nodes)}
    return ReferenceEngine(weights, **given), LedgerEngine(opened.config, **given), weights


def noting(seen: list[tuple[Place, int]]) -> See:
    def see(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        seen.append((place, len(tensor)))
        return tensor

    return see


def test_head_runs_on_its_own_beams_with_any_given_window(tmp_path: Path) -> None:
    for engine in engines(tmp_path, 3, 8, 3)[:2]:
        seen: list[tuple[Place, int]] = []
        Admit("a", (5, 9, 2)).on(engine)
        Forward((Row("a", "prefill", 3, 7),)).on(engine)
        engine.watch(noting(seen))
        own = Draft(("a",)).on(engine)
        forced = Draft(("a",), ((1, 2),), ((0, 0),)).on(engine)
        assert own.drafts.tolist() == own.own.tolist() == forced.own.tolist() and own.drafts.shape == (1, 7)
        assert own.own_parents.tolist() == forced.own_parents.tolist()
        assert forced.drafts.tolist() == [[1, 2]]
        rows = {place.stage: count for place, count in seen if place.component == "logits"}
        assert rows == {"chain.0": 1, "chain.1": 3, "chain.2": 3}


def test_one_child_per_node_is_the_chain(tmp_path: Path) -> None:
    grown, _, weights = engines(tmp_path, 1, 4, 3)
    answers = []
    for engine in (grown, ReferenceEngine(weights, num_steps=3)):
        Admit("a", (5, 9, 2)).on(engine)
        Forward((Row("a", "prefill", 3, 7),)).on(engine)
        answers.append(Draft(("a",)).on(engine))
    assert answers[0].own.tolist() == answers[1].own.tolist() and answers[0].own_parents.tolist() == [[0, 1, 2]]


def test_a_drafter_that_grows_no_trees_is_refused() -> None:
    with pytest.raises(Unsupported, match="proposes no trees"):
        LedgerEngine(config(), num_steps=1, mode="vanilla", room=room(2, 4))

"""Drafts that are handed in: the engine runs no MTP layer, whatever the model has, and is right all the same.

Leaves out: who proposes (`instep.subject.proposers`), and replays (`tests/harness/test_engines.py`).
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from instep_reference.acceptance import block_greedy
from instep_reference.contract.adaptive_controller_file import AdaptiveFile, Bracket
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Admit, Commit, Draft, Forward, Row
from instep_reference.contract.errors import Unsupported
from support.inputs.checkpoints import TWO_LAYERS, write
from support.inputs.sampling_events import sampled
from support.running.covering import few
from support.worlds import engine_and_reference as sides
from support.worlds.engine_and_reference import TwoSides, scenario

STEPS = (3, 1, 7, 0, 3)
FILE = AdaptiveFile(flat=Bracket(candidate_steps=(0, 1, 7), warmup_batches=1, update_interval=2))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """With three MTP layers, so that one that runs by mistake is seen."""
    return Checkpoint.open(write(tmp_path_factory.mktemp("external"), **TWO_LAYERS, mtp_num_hidden_layers=3))


engine = partial(sides.engine, adaptive=FILE, drafter="external", **sides.WIDE)
truth = partial(sides.truth, adaptive=FILE, mode="external")


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize(("ops", "options", "draws"), [
    ("ledger", {}, False), ("plain", {"strategy": "snapshot"}, True),
    ("plain", {"graphs": True, "overlap": True}, False),
])  # fmt: skip
def test_engine_with_given_drafts_agrees_with_the_reference(
    model: Checkpoint, ops: str, options: dict[str, Any], draws: bool
) -> None:
    both = TwoSides(engine(model, ops, **options), truth(model, ops), watched="graphs" not in options)
    events = scenario(64, STEPS, forced=True)
    assert both.serve(sampled(events, STEPS[0]) if draws else events).compared > 10_000


def test_engine_without_a_head_has_no_draft_memory(model: Checkpoint) -> None:
    subject, headless = engine(model), replace(model, config=replace(model.config, mtp_layers=0))
    bare = engine(headless)
    regions = [(one.name, one.layer, one.units.shape) for one in subject.regions()]
    assert regions == [(one.name, one.layer, one.units.shape) for one in bare.regions()]
    assert not [name for name, *_ in regions if name.startswith("draft")]
    Admit("a", (1, 2)).on(subject)
    Forward((Row("a", "prefill", 2),)).on(subject)
    state = subject.state("a")
    assert (state.proposal, state.proposal_hidden, state.draft_keys) == (None, None, {})
    with pytest.raises(Unsupported, match="a draft event must bring its picks"):
        Draft(("a",)).on(subject)
    assert Draft(("a",), ((4, 5, 6),)).on(subject).own.tolist() == [[-1, -1, -1]]


def test_block_acceptance_matches_block_drafters(tmp_path: Path) -> None:
    """`correct_len` and `bonus` of DFlash, for blocks that are right in none, some and all of their places."""
    checkpoint = Checkpoint.open(write(tmp_path, **TWO_LAYERS, mtp_num_hidden_layers=0))
    names, right = ("a", "b", "c"), engine(checkpoint)
    for name in names:
        Admit(name, (1, 2, ord(name) % 64)).on(right)
    roots = Forward(tuple(Row(name, "prefill", 3) for name in names)).on(right).roots
    said = [Forward(tuple(Row(name, "decode") for name in names)).on(right).roots for _ in range(3)]
    picks = tuple(
        tuple(step[name] if number < wanted else (step[name] + 1) % 64 for number, step in enumerate(said))
        for name, wanted in zip(names, (0, 2, 3), strict=True)
    )
    subject = engine(checkpoint)
    for name in names:
        Admit(name, (1, 2, ord(name) % 64)).on(subject)
    Forward(tuple(Row(name, "prefill", 3) for name in names)).on(subject)
    Draft(names, picks).on(subject)
    own = Forward(tuple(Row(name, "verify") for name in names)).on(subject).own
    block = torch.tensor([[roots[name], *mine] for name, mine in zip(names, picks, strict=True)])
    correct_len, bonus = block_greedy(block, torch.stack([own[name] for name in names]))
    answer = Commit(names).on(subject)
    assert answer.num_correct_drafts.tolist() == correct_len.tolist() == [0, 2, 3]
    assert answer.bonus.tolist() == bonus.tolist()

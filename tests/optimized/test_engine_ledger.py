"""The engine moving labels, against the labels that a right engine must hold: orchestration, exactly.

Leaves out: arithmetic (`test_engine_plain.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from instep_optimized import OptimizedEngine, Options, load
from instep_optimized.memory_addresses import StateLayout
from instep_reference.contract.adaptive_controller_file import AdaptiveFile, Bracket
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.label_ledger import LedgerEngine
from support.checkpoints import TWO_LAYERS, Kind, write
from support.covering import each_value, few
from support.two_sides import CAPACITY, TwoSides, scenario

STEPS = (3, 1, 7, 0, 3)
FILE = AdaptiveFile(flat=Bracket(candidate_steps=(0, 1, 7), warmup_batches=1, update_interval=2))
MODELS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "next": ("next", TWO_LAYERS),
    "moe": ("moe", TWO_LAYERS),
    "only gdn": ("dense", {"layer_types": ["linear_attention"] * 2, "num_hidden_layers": 2}),
    "only attention": ("dense", {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}),
    "attention first": ("dense", {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2}),
    "no draft head": ("dense", {"mtp_num_hidden_layers": 0, **TWO_LAYERS}),
}


def sides(path: Path, kind: Kind, overrides: dict[str, Any], **options: Any) -> TwoSides:
    checkpoint = Checkpoint.open(write(path, kind, **overrides))
    subject = OptimizedEngine(
        checkpoint, load("ledger"), Options(**options), CAPACITY, num_steps=STEPS[0], adaptive=FILE
    )
    return TwoSides(subject, LedgerEngine(checkpoint.config, num_steps=STEPS[0], adaptive=FILE))


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_label_matches_the_reference_ledger(model: str, tmp_path: Path) -> None:
    """Through all changes of the step count with one model, through its most and none with the others."""
    both = sides(tmp_path, *MODELS[model])
    for event in scenario(64, STEPS if model == "dense" else (3, 7, 0), forced=True):
        both(event)
    assert both.compared > 10_000
    assert both.subject.slots() == {} == both.subject.pages()


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "guarded"), each_value(("VK", "KV"), (True, False)))
def test_labels_do_not_depend_on_layout_guards_or_poison(
    layout: StateLayout, guarded: bool, tmp_path: Path
) -> None:
    both = sides(tmp_path, "dense", TWO_LAYERS, layout=layout, guarded=guarded, poison=7.5)
    for event in scenario(64, STEPS, forced=True):
        both(event)
    assert both.compared > 10_000


@pytest.mark.slow
def test_labels_agree_with_free_choices(tmp_path: Path) -> None:
    both = sides(tmp_path, "dense", TWO_LAYERS)
    for event in scenario(64, STEPS, forced=False):
        both(event)
    assert both.compared > 10_000

"""The engine with plain ops in fp64, against the reference: the whole model through pools, pages and commits.

Leaves out: narrower widths, whose rounding errors the harness judges by tiers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from instep_optimized import OptimizedEngine, Options, load
from instep_optimized.memory_addresses import StateLayout
from instep_reference.contract.adaptive_controller_file import AdaptiveFile, Bracket
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Admit, Commit, Draft, Forward, Row
from instep_reference.engine import ReferenceEngine, Weights
from support.checkpoints import TWO_LAYERS, Kind, write
from support.covering import WHOLE, few
from support.two_sides import CAPACITY, TwoSides, scenario

WIDTH = torch.float64
STEPS = (3, 1, 7, 0)  # and back to the first
FEW_STEPS = (3, 0, 1)  # of the other models: how the count changes is nothing to a layer
FILE = AdaptiveFile(flat=Bracket(candidate_steps=(0, 1, 7), warmup_batches=1, update_interval=2))
MODELS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "tied": ("dense", {**TWO_LAYERS, "tie_word_embeddings": True}),
    "three value heads per key head": ("dense", {**TWO_LAYERS, "linear_num_value_heads": 6}),
    "next": ("next", TWO_LAYERS),
    "moe, fused experts": ("moe", TWO_LAYERS),
    "only gdn": ("dense", {"layer_types": ["linear_attention"] * 2, "num_hidden_layers": 2}),
    "only attention": ("dense", {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}),
    "no draft head": ("dense", {**TWO_LAYERS, "mtp_num_hidden_layers": 0}),
}


def engine(checkpoint: Checkpoint, num_steps: int = STEPS[0], **options: Any) -> OptimizedEngine:
    chosen = Options(activation=WIDTH, state=WIDTH, **options)
    return OptimizedEngine(checkpoint, load("plain"), chosen, CAPACITY, num_steps=num_steps, adaptive=FILE)


def sides(path: Path, model: str, **options: Any) -> TwoSides:
    kind, overrides = MODELS[model]
    checkpoint = Checkpoint.open(write(path, kind, fused="fused" in model or None, **overrides))
    weights = Weights.of(checkpoint, WIDTH, torch.device("cpu"))
    return TwoSides(engine(checkpoint, **options), ReferenceEngine(weights, num_steps=STEPS[0], adaptive=FILE))


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_engine_agrees_with_the_reference(model: str, tmp_path: Path) -> None:
    both = sides(tmp_path, model)
    for event in scenario(64, STEPS if model == "dense" else FEW_STEPS, forced=True):
        both(event)
    assert both.compared > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param("VK", marks=WHOLE), "KV"])  # all above is VK
def test_free_choices_agree_in_either_layout(layout: StateLayout, tmp_path: Path) -> None:
    both = sides(tmp_path, "tied", layout=layout)
    for event in scenario(64, STEPS, forced=False):
        both(event)
    assert both.compared > 10_000


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["dense", "moe, fused experts"])
def test_gpu_gives_the_tokens_of_the_reference(model: str, tmp_path: Path) -> None:
    both = sides(tmp_path, model, device="cuda")
    for event in scenario(64, STEPS, forced=True):
        both(event)
    assert both.compared > 10_000


@pytest.mark.slow
def test_speculation_gives_the_tokens_of_plain_decoding(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, "dense", **TWO_LAYERS))
    prompt, wanted = (5, 9, 2, 33), 24
    decoding = engine(checkpoint, num_steps=0)
    Admit("x", prompt).on(decoding)
    said = [Forward((Row("x", "prefill", len(prompt)),)).on(decoding).roots["x"]]
    while len(said) < wanted:
        said.append(Forward((Row("x", "decode"),)).on(decoding).roots["x"])

    speculating = engine(checkpoint)
    Admit("x", prompt).on(speculating)
    told = [Forward((Row("x", "prefill", len(prompt)),)).on(speculating).roots["x"]]
    while len(told) < wanted:
        speculating.set_num_steps((1, 7, 3)[len(told) % 3])
        drafts = Draft(("x",)).on(speculating).drafts[0].tolist()
        Forward((Row("x", "verify"),)).on(speculating)
        answer = Commit(("x",)).on(speculating)
        told += [*drafts[: int(answer.num_correct_drafts[0])], int(answer.bonus[0])]
    assert told[:wanted] == said

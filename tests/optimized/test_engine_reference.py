"""The engine against the reference: labels, which are exact, and numbers in fp64, through pools, pages and commits.

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
from instep_reference.label_ledger import LedgerEngine
from support.checkpoints import TWO_LAYERS, Kind, write
from support.covering import WHOLE, each_value, few
from support.two_sides import CAPACITY, TwoSides, scenario

WIDTH = torch.float64
STEPS = (3, 1, 7, 0)  # and back to the first
FILE = AdaptiveFile(flat=Bracket(candidate_steps=(0, 1, 7), warmup_batches=1, update_interval=2))
MODELS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "two layers": ("dense", TWO_LAYERS),
    "tied": ("dense", {**TWO_LAYERS, "tie_word_embeddings": True}),
    "three value heads per key head": ("dense", {**TWO_LAYERS, "linear_num_value_heads": 6}),
    "next": ("next", TWO_LAYERS),
    "moe": ("moe", TWO_LAYERS),
    "moe, fused experts": ("moe", TWO_LAYERS),
    "only gdn": ("dense", {"layer_types": ["linear_attention"] * 2, "num_hidden_layers": 2}),
    "only attention": ("dense", {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}),
    "attention first": ("dense", {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2}),
    "no draft head": ("dense", {**TWO_LAYERS, "mtp_num_hidden_layers": 0}),
}
LABELLED = ["dense", "next", "moe", "only gdn", "only attention", "attention first", "no draft head"]
COMPUTED = [model for model in MODELS if model not in ("two layers", "moe", "attention first")]


def checkpoint_of(path: Path, model: str) -> Checkpoint:
    kind, overrides = MODELS[model]
    return Checkpoint.open(write(path, kind, fused="fused" in model or None, **overrides))


def engine(checkpoint: Checkpoint, num_steps: int = STEPS[0], **options: Any) -> OptimizedEngine:
    chosen = Options(activation=WIDTH, state=WIDTH, **options)
    return OptimizedEngine(checkpoint, load("plain"), chosen, CAPACITY, num_steps=num_steps, adaptive=FILE)


def numbers(path: Path, model: str, **options: Any) -> TwoSides:
    checkpoint = checkpoint_of(path, model)
    weights = Weights.of(checkpoint, WIDTH, torch.device("cpu"))
    return TwoSides(engine(checkpoint, **options), ReferenceEngine(weights, num_steps=STEPS[0], adaptive=FILE))


def labels(path: Path, model: str, **options: Any) -> TwoSides:
    checkpoint, counts = checkpoint_of(path, model), {"num_steps": STEPS[0], "adaptive": FILE}
    subject = OptimizedEngine(checkpoint, load("ledger"), Options(**options), CAPACITY, **counts)
    return TwoSides(subject, LedgerEngine(checkpoint.config, **counts))


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize("model", LABELLED)
def test_every_label_matches_the_reference_ledger(model: str, tmp_path: Path) -> None:
    """Through all changes of the step count with one model, through its most and none with the others."""
    both = labels(tmp_path, model)
    assert both.serve(scenario(64, (*STEPS, 3) if model == "dense" else (3, 7, 0), forced=True)).compared > 10_000
    assert both.subject.slots() == {} == both.subject.pages()


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "guarded"), each_value(("VK", "KV"), (True, False)))
def test_labels_do_not_depend_on_layout_guards_or_poison(
    layout: StateLayout, guarded: bool, tmp_path: Path
) -> None:
    both = labels(tmp_path, "two layers", layout=layout, guarded=guarded, poison=7.5)
    assert both.serve(scenario(64, (*STEPS, 3), forced=True)).compared > 10_000


@pytest.mark.slow
def test_labels_agree_with_free_choices(tmp_path: Path) -> None:
    assert labels(tmp_path, "two layers").serve(scenario(64, (*STEPS, 3), forced=False)).compared > 10_000


@few(2)
@pytest.mark.slow
@pytest.mark.parametrize("model", COMPUTED)
def test_engine_agrees_with_the_reference(model: str, tmp_path: Path) -> None:
    both = numbers(tmp_path, model)
    assert both.serve(scenario(64, STEPS if model == "dense" else (3, 0, 1), forced=True)).compared > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param("VK", marks=WHOLE), "KV"])  # all above is VK
def test_free_choices_agree_in_either_layout(layout: StateLayout, tmp_path: Path) -> None:
    assert numbers(tmp_path, "tied", layout=layout).serve(scenario(64, STEPS, forced=False)).compared > 10_000


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["dense", "moe, fused experts"])
def test_gpu_gives_the_tokens_of_the_reference(model: str, tmp_path: Path) -> None:
    assert numbers(tmp_path, model, device="cuda").serve(scenario(64, STEPS, forced=True)).compared > 10_000


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

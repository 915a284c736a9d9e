"""The engine against the reference: labels, which are exact, and numbers in fp64, through pools, pages and commits.

Requests sample next to greedy ones. Leaves out: narrower widths, whose rounding errors the harness judges by tiers, and
the op that draws (`test_draw.py`).
"""

from pathlib import Path
from typing import Any

import pytest

from instep_optimized import load
from instep_optimized.memory_addresses import StateLayout
from instep_optimized.ops.watch_op_calls import around
from instep_reference.contract import engine as e
from instep_reference.contract.adaptive_controller_file import AdaptiveFile, Bracket
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.place_names import unseen
from instep_reference.contract.sampling import Sampling
from support.inputs.checkpoints import TWO_LAYERS, Kind, write
from support.inputs.sampling_events import sampled
from support.running.covering import WHOLE, each_value, few
from support.worlds.engine_and_reference import WIDE, TwoSides, both_sides, engine, scenario

pytestmark = pytest.mark.slow  # whole replays or commands

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


def numbers(path: Path, model: str, **how: Any) -> TwoSides:
    return both_sides(checkpoint_of(path, model), "plain", adaptive=FILE, **how)


def labels(path: Path, model: str, **how: Any) -> TwoSides:
    return both_sides(checkpoint_of(path, model), "ledger", adaptive=FILE, **how)


@few(1)
@pytest.mark.parametrize("model", LABELLED)
def test_every_label_matches_the_reference_ledger(model: str, tmp_path: Path) -> None:
    """Through all changes of the step count with one model, through its most and none with the others."""
    both = labels(tmp_path, model)
    assert both.serve(scenario(64, (*STEPS, 3) if model == "dense" else (3, 7, 0), forced=True)).compared > 10_000
    assert both.subject.slots() == {} == both.subject.pages()


@few(1)
@pytest.mark.parametrize(("layout", "guarded"), each_value(("VK", "KV"), (True, False)))
def test_labels_do_not_depend_on_layout_guards_or_poison(layout: StateLayout, guarded: bool, tmp_path: Path) -> None:
    both = labels(tmp_path, "two layers", layout=layout, guarded=guarded, poison=7.5)
    assert both.serve(scenario(64, (*STEPS, 3), forced=True)).compared > 10_000


def test_labels_agree_with_free_choices(tmp_path: Path) -> None:
    assert labels(tmp_path, "two layers").serve(scenario(64, (*STEPS, 3), forced=False)).compared > 10_000


@few(1)
@pytest.mark.parametrize("model", COMPUTED)
def test_engine_agrees_with_the_reference(model: str, tmp_path: Path) -> None:
    both = numbers(tmp_path, model)
    assert both.serve(scenario(64, STEPS if model == "dense" else (3, 0, 1), forced=True)).compared > 10_000


@pytest.mark.parametrize("layout", [pytest.param("VK", marks=WHOLE), "KV"])  # all above is VK
def test_free_choices_agree_in_either_layout(layout: StateLayout, tmp_path: Path) -> None:
    assert numbers(tmp_path, "tied", layout=layout).serve(scenario(64, STEPS, forced=False)).compared > 10_000


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["dense", "moe, fused experts"])
def test_gpu_gives_the_tokens_of_the_reference(model: str, tmp_path: Path) -> None:
    assert numbers(tmp_path, model, device="cuda").serve(scenario(64, STEPS, forced=True)).compared > 10_000


def test_speculation_gives_the_tokens_of_plain_decoding(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, "dense", **TWO_LAYERS))
    prompt, wanted = (5, 9, 2, 33), 24
    decoding = engine(checkpoint, num_steps=0, adaptive=FILE, **WIDE)
    e.Admit("x", prompt).on(decoding)
    said = [e.Forward((e.Row("x", "prefill", len(prompt)),)).on(decoding).roots["x"]]
    while len(said) < wanted:
        said.append(e.Forward((e.Row("x", "decode"),)).on(decoding).roots["x"])

    speculating = engine(checkpoint, adaptive=FILE, **WIDE)
    e.Admit("x", prompt).on(speculating)
    told = [e.Forward((e.Row("x", "prefill", len(prompt)),)).on(speculating).roots["x"]]
    while len(told) < wanted:
        speculating.set_num_steps((1, 7, 3)[len(told) % 3])
        drafts = e.Draft(("x",)).on(speculating).drafts[0].tolist()
        e.Forward((e.Row("x", "verify"),)).on(speculating)
        answer = e.Commit(("x",)).on(speculating)
        told += [*drafts[: int(answer.num_correct_drafts[0])], int(answer.bonus[0])]
    assert told[:wanted] == said


# ---- requests that sample


@few(2)
@pytest.mark.parametrize(("ops", "forced", "options"), [
    ("ledger", True, {}), ("plain", False, {}), ("ledger", False, {"graphs": True}),
    pytest.param("plain", True, {"graphs": True, "strategy": "snapshot"}, marks=WHOLE),
    ("ledger", True, {"overlap": True, "strategy": "columns", "conv": "widened"}),
    pytest.param("ledger", False, {"strategy": "lazy_rerun"}, marks=WHOLE),
])  # fmt: skip
def test_engine_draws_the_tokens_of_the_reference(
    ops: str, forced: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    """Mixed batches, windows and single rows in one forward, slots used again, preempt, resume and load."""
    sides = labels if ops == "ledger" else numbers
    both, verified = sides(tmp_path, "two layers", watched=not options.get("graphs"), **options), 0
    for event in sampled(scenario(64, STEPS, forced=forced), STEPS[0]):
        both(event)
        verified += isinstance(event, e.Forward) and any(len(row.uniforms) > 1 for row in event.rows)
    assert both.compared > 10_000 and verified > 5
    graphs = both.subject.graphs
    if graphs is not None:
        kinds = {key[0] for key, _, _ in graphs._captured}  # type: ignore[index]
        assert {"verify", "decode", "sampled verify"} <= kinds


def test_batch_without_sampling_runs_no_further_op(tmp_path: Path) -> None:
    """Not one op more, and no graph more before somebody samples."""
    calls: list[str] = []

    def counted(name: str, op: Any) -> Any:
        return lambda **given: (calls.append(name), op(**given))[1]

    checkpoint, plain = Checkpoint.open(write(tmp_path, "dense")), load("plain")
    subject = engine(checkpoint, around(plain, unseen, counted), num_steps=1)
    for name, sampling in (("a", None), ("b", Sampling(0.0)), ("c", Sampling(1.0))):
        e.Admit(name, (1, 2), sampling).on(subject)
        e.Forward((e.Row(name, "prefill", 2, uniforms=(0.5,) if name == "c" else ()),)).on(subject)
    told = {}
    for names in ("ab", "ac"):
        e.Draft(tuple(names)).on(subject)
        calls.clear()
        subject.forward(tuple(e.Row(name, "verify", uniforms=(0.5,) * 3 if name == "c" else ()) for name in names))
        told[names] = list(calls)
        subject.commit(tuple(names))
    at = told["ab"].index("pick")
    assert told["ac"] == [*told["ab"][: at - 1], "select", "lm_head", "draw", *told["ab"][at + 1 :]]
    graphed = engine(checkpoint, plain, num_steps=1, graphs=True).graphs
    assert graphed is not None and not any("sampled" in str(key) for key, _, _ in graphed._captured)


def test_sampling_stays_with_the_request_and_not_the_state(tmp_path: Path) -> None:
    """The slot's row is written at admit and at resume; a loaded state does not change the sampling of its request."""
    both = labels(tmp_path, "two layers")
    both(e.Admit("a", (1, 2), Sampling(0.5, top_k=3, top_p=0.75)))
    assert both.subject._memory.slot_table.sampling[4].tolist() == [0.5, 3, 0.75]
    both(e.Forward((e.Row("a", "prefill", 2, root=5, uniforms=(0.25,)),)))
    both(e.Save("a", "kept"))
    both(e.Preempt("a"))
    both(e.Admit("b", (1, 2), Sampling(2.0)))  # takes the slot
    both(e.Load("b", "kept"))
    both(e.Resume("a"))
    both(e.Forward((e.Row("b", "decode", root=1, uniforms=(0.5,)), e.Row("a", "decode", root=2, uniforms=(0.75,)))))
    both(e.Preempt("b"))
    both(e.Finish("a"))
    both(e.Resume("b"))
    both(e.Forward((e.Row("b", "decode", root=1, uniforms=(0.5,)),)))
    assert both.subject._memory.slot_table.sampling[4].tolist() == [2.0, 0, 1]

"""The block drafter of the engine: next to the reference, in graphs, at prefixes, and what is refused.

Leaves out: the definition (`reference/test_block_drafter.py`), and planted faults (the harness's catalogue).
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from instep_optimized import Options, load
from instep_optimized.ops.plain import PLAIN
from instep_reference.contract import engine as e
from instep_reference.contract.adaptive_controller_file import AdaptiveFile, Bracket
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.declared_rounding import SCALED_KV
from instep_reference.contract.errors import BadInput, Unsupported
from support.inputs.checkpoints import TWO_LAYERS, write, write_block
from support.inputs.sampling_events import sampled
from support.running.covering import WHOLE
from support.worlds import engine_and_reference as sides
from support.worlds.engine_and_reference import CAPACITY, FP64, both_sides, engine, scenario, snapshot

STEPS = (3, 1, 7, 0, 3)
FILE = AdaptiveFile(flat=Bracket(candidate_steps=(0, 1, 7), warmup_batches=1, update_interval=2))
BLOCKS = {"drafter": "block"}
TRACKED = replace(CAPACITY, track_interval=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """With an MTP layer, which must not run, and a drafter of three layers."""
    return Checkpoint.open(write_block(write(tmp_path_factory.mktemp("block"), **TWO_LAYERS)), "block")


def rounds(*widths: tuple[int, ...]) -> Iterator[e.Event]:
    """Two requests with windows of these widths, a third one in its prompt, saves, prefixes and a preemption."""
    yield e.Admit("a", (3, 4, 5, 6, 7, 8, 9))
    yield e.Admit("b", (5, 9))
    yield e.Forward((e.Row("a", "prefill", 4, track="x"), e.Row("b", "prefill", 2)))
    yield e.Forward((e.Row("a", "prefill", 3),))
    for number, width in enumerate(widths):
        yield e.Draft(("b", "a"), None, tuple(tuple(range(count)) for count in width))
        yield e.Forward((e.Row("a", "verify"), e.Row("b", "verify")))
        yield e.Commit(("a", "b"), tuple(
            e.Path(tuple(range(1, 1 + max(0, count - number % 2))), 7 + number) for count in reversed(width)),
            track=(f"a{number}", f"b{number}"))  # fmt: skip
        if number == 1:
            yield from (e.Save("b", "kept"), e.Preempt("a"), e.Admit("c", (3, 4, 5, 6, 1)), e.Load("c", "x"),
                        e.Offload("x"), e.Forward((e.Row("c", "prefill", 1), e.Row("b", "decode"))), e.Resume("a"))
    yield from (e.Fetch("x"), e.Finish("c"), e.Admit("d", (3, 4, 5, 6, 2)), e.Load("d", "x"))


@pytest.mark.parametrize(("ops", "options"), [
    ("ledger", {}), pytest.param("plain", {}, marks=WHOLE), pytest.param("ledger", {"graphs": True}, marks=WHOLE),
    pytest.param("plain", {"graphs": True, "overlap": True}, marks=WHOLE),
    pytest.param("triton", {}, marks=[WHOLE, pytest.mark.interpreted]),
    pytest.param("triton", {"graphs": True, "strategy": "columns"}, marks=[WHOLE, pytest.mark.interpreted]),
    pytest.param("invariant", {"strategy": "snapshot"}, marks=[WHOLE, pytest.mark.interpreted]),
    pytest.param("plain", {"strategy": "lazy_rerun", "conv": "widened"}, marks=WHOLE),
])  # fmt: skip
def test_engine_with_a_block_drafter_agrees_with_the_reference(
    model: Checkpoint, ops: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if ops in ("triton", "invariant"):  # kernels compute in fp32
        monkeypatch.setattr(sides, "WIDE", {"activation": torch.float32})
        monkeypatch.setattr(sides, "FP64_NOISE", 1e-4)
    both = both_sides(model, ops, TRACKED, watched="graphs" not in options, **BLOCKS, **options)
    both.serve(rounds((3, 3), (0, 2), (1, 0), (2, 3), (3, 1)))
    assert both.compared > 10_000
    assert {state for _, state in both.tracked} >= {4, 8}, "prefixes of chunks and of paths"


@pytest.mark.parametrize(("ops", "drafter", "graphs"), [
    ("plain", "block", True), ("plain", "external", False), pytest.param("ledger", "block", True, marks=WHOLE),
    pytest.param("triton", "block", True, marks=[WHOLE, pytest.mark.interpreted]),
])  # fmt: skip
def test_widths_that_only_the_device_knows_agree(
    model: Checkpoint, ops: str, drafter: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows next to a decode, whose slot still has the width of an older window; pages of the longest window."""
    if ops == "triton":
        monkeypatch.setattr(sides, "WIDE", {"activation": torch.float32})
        monkeypatch.setattr(sides, "FP64_NOISE", 1e-4)
    room = replace(CAPACITY, device_widths=True, page_size=2, trim=True, pages=tuple(range(1, 41)))
    used = model if drafter == "block" else replace(model, config=replace(model.config, block=None))
    both = both_sides(used, ops, room, watched=not graphs, graphs=graphs, overlap=graphs, drafter=drafter)
    names = ("a", "b", "c")
    both.serve([*(e.Admit(name, (1, 2, ord(name) % 64)) for name in names),
                e.Forward(tuple(e.Row(name, "prefill", 3) for name in names))])  # fmt: skip
    for drafted, widths in ((names, (3, 0, 1)), (("c", "a"), (3, 2)), (("b", "c", "a"), (1, 3, 0))):
        picks = tuple((9,) * width for width in widths) if drafter == "external" else None
        both(e.Draft(drafted, picks, tuple(tuple(range(width)) for width in widths)))
        both(e.Forward(tuple(e.Row(name, "verify" if name in drafted else "decode") for name in names)))
        for event, ahead in ((None, 4), (e.Commit(drafted), 0)):
            if event is not None:
                both(event)
            owned, length = both.subject.pages(), {name: both.truth.state(name).length for name in drafted}
            assert graphs or all(len(owned[name]) == -(-(length[name] + ahead) // 2) for name in drafted)
    assert both.compared > 10_000
    if graphs:
        runner = both.subject.graphs
        assert runner is not None and {key for key, *_ in runner._captured if "draft" in key[0]} == {("draft", 3)}


@pytest.mark.parametrize(("room", "drafter"), [({}, "eagle"), ({"track_interval": 4}, "block")])
def test_widths_that_only_the_device_knows_are_refused(model: Checkpoint, room: dict[str, Any], drafter: str) -> None:
    with pytest.raises(Unsupported, match="only the device knows"):
        engine(model, "plain", replace(CAPACITY, device_widths=True, **room), drafter=drafter)
    subject = engine(model, "plain", replace(CAPACITY, device_widths=True), **BLOCKS)
    for event in (e.Admit("a", (3, 9)), e.Forward((e.Row("a", "prefill", 2),)), e.Draft(("a",)), e.Admit("b", (3, 9))):
        event.on(subject)
    with pytest.raises(BadInput, match="a prompt next to windows"):
        subject.forward((e.Row("a", "verify"), e.Row("b", "prefill", 2)))


@WHOLE
@pytest.mark.parametrize("ops", ["ledger", "plain"])
def test_step_counts_and_samples_agree_with_the_reference(model: Checkpoint, ops: str) -> None:
    both = both_sides(model, ops, adaptive=FILE, **BLOCKS)
    both.serve(sampled(scenario(64, STEPS, forced=False), STEPS[0]))
    assert both.compared > 10_000


@WHOLE
def test_a_graph_leaves_the_bits_of_an_eager_run(model: Checkpoint) -> None:
    """Three requests run in a graph for four: its padded row leaves no bit anywhere."""
    left, room = [], replace(CAPACITY, slots=(4, 1, 6, 2))
    for graphs in (False, True):
        subject = engine(model, "plain", room, activation=FP64, state=FP64, graphs=graphs, batches=(1, 4), **BLOCKS)
        names = ("a", "b", "c")
        for name in names:
            e.Admit(name, (1, 2, ord(name) % 64)).on(subject)
        e.Forward(tuple(e.Row(name, "prefill", 3) for name in names)).on(subject)
        for shapes in (((0, 1, 2), (0,), ()), None):
            e.Draft(names, None, shapes).on(subject)
            e.Forward(tuple(e.Row(name, "verify") for name in names)).on(subject)
            e.Commit(names).on(subject)
        left.append(snapshot(subject))
    assert len(left[0]) == len(left[1]) > 20
    for (eager, _), (graph, _) in zip(*left, strict=True):
        assert torch.equal(eager, graph)


def test_own_drafts_handed_in_give_the_same_commits(model: Checkpoint) -> None:
    """An engine whose drafts are handed in commits what the block drafter's engine commits."""
    ours, theirs = engine(model, **sides.WIDE, **BLOCKS), engine(model, **sides.WIDE, drafter="external")
    for event in (e.Admit("a", (3, 9, 27)), e.Forward((e.Row("a", "prefill", 3),))):
        event.on(ours), event.on(theirs)
    for _ in range(3):
        drafts = tuple(e.Draft(("a",)).on(ours).drafts[0].tolist())
        e.Draft(("a",), (drafts,)).on(theirs)
        for side in (ours, theirs):
            e.Forward((e.Row("a", "verify"),)).on(side)
        mine, right = (e.Commit(("a",)).on(side) for side in (ours, theirs))
        assert (mine.accept_lens.tolist(), mine.bonus.tolist()) == (right.accept_lens.tolist(), right.bonus.tolist())
    kept, bare = ours.state("a"), theirs.state("a")
    assert kept.length == bare.length > 5 and torch.equal(kept.keys[1], bare.keys[1]) and not bare.block_keys


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"graphs": True}, {"kv": SCALED_KV}], ids=["eager", "graphs", "scaled"])
def test_a_block_drafter_on_a_gpu_drafts_as_the_reference(model: Checkpoint, options: dict[str, Any]) -> None:
    """The same drafts from the same events, and a context within the noise of fp32 (of 8 bits, if it is stored so)."""
    subject, right = engine(model, "triton", device="cuda", **BLOCKS, **options), sides.truth(model, mode="block")
    noise = 0.1 if "kv" in options else 1e-3
    names = ("a", "b", "c")
    for side in (subject, right):
        for name in names:
            e.Admit(name, (1, 2, ord(name) % 64)).on(side)
        e.Forward(tuple(e.Row(name, "prefill", 3, 7) for name in names)).on(side)
    for shapes in (((0, 1, 2), (0,), ()), ((0, 1), (0, 1, 2), (0, 1, 2))):
        for side in (subject, right):
            e.Draft(names, tuple(tuple(range(len(one))) for one in shapes), shapes).on(side)
            e.Forward(tuple(e.Row(name, "verify") for name in names)).on(side)
            e.Commit(names, tuple(e.Path(tuple(range(1, len(one))), 9) for one in shapes)).on(side)
    for name in names:
        ours, theirs = subject.state(name), right.state(name)
        assert ours.length == theirs.length and ours.block_keys.keys() == {0, 1, 2}
        for layer, rows in ours.block_keys.items():
            assert float((rows.cpu().double() - theirs.block_keys[layer]).abs().max()) <= noise


def test_budget_counts_the_pools_of_the_drafter(model: Checkpoint) -> None:
    subject, bare = engine(model, **BLOCKS), engine(model)
    regions = {region.name: region for region in subject.regions()}
    assert {"block_keys", "block_values", "features"} <= regions.keys()
    assert not {"draft_keys", "block_keys"} <= {region.name for region in bare.regions()}
    assert regions["features"].units.shape[-1] == 2 * model.config.hidden
    for name, layers in (("block_keys", 3), ("features", 1)):
        assert subject.budget()[name] == layers * regions[name].units.numel() * 4


@pytest.mark.parametrize(("change", "says"), [
    ({"room": replace(CAPACITY, num_draft_tokens=6)}, "no branches"),
    ({"ops": replace(PLAIN, trees=False)}, "a row sees later rows"),
    ({"num_steps": 63}, "bits of an int64"),
])  # fmt: skip
def test_what_a_block_drafter_does_not_support(model: Checkpoint, change: dict[str, Any], says: str) -> None:
    with pytest.raises(Unsupported, match=says):
        engine(model, **{"room": replace(CAPACITY, max_tokens=200), **change}, **BLOCKS)


def test_a_model_without_a_drafter_is_refused(model: Checkpoint) -> None:
    bare = replace(model, config=replace(model.config, block=None))
    with pytest.raises(Unsupported, match="opened without one"):
        engine(bare, **BLOCKS)


def test_a_draft_needs_room_for_its_root(model: Checkpoint) -> None:
    """A block writes a row for its root: a draft at the end of the last page wants one more page."""
    room = e.Capacity((1,), (1, 2), page_size=4, max_tokens=8)
    for mode, pages in (("eagle", 1), ("block", 2)):
        subject = engine(model, "plain", room, num_steps=1, drafter=mode)
        for event in (e.Admit("a", (1, 2, 3)), e.Forward((e.Row("a", "prefill", 3),)), e.Draft(("a",))):
            event.on(subject)
        assert len(subject.pages()["a"]) == pages, mode
    illegal = e.Draft(("a",), ((1, 2),), ((0, 0),))
    with pytest.raises((Unsupported, BadInput)):
        illegal.on(subject)


def test_options_name_the_drafter() -> None:
    assert Options(drafter="block").drafter == "block" and load("plain").trees

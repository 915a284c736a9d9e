"""Forwards with prompts whose target runs in segments: what they do eagerly, in any bucket, byte by byte.

Leaves out: graphs of rounds (`test_engine_graphs.py`). The emulator overwrites the private pool of all graphs between
two replays, and memory that was freed; on a GPU the same tests capture for real.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from instep_optimized import OptimizedEngine
from instep_optimized.commit import CONV_FORMS, STRATEGIES
from instep_optimized.graphs import Emulator, Recorder, Runner
from instep_optimized.graphs.capture_all_at_start import recorder_for
from instep_optimized.graphs.capture_and_replay import Break, Rooms, Segments
from instep_optimized.graphs.prompt_segments import PromptGraphs
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.plain import PLAIN
from instep_reference.contract import engine as e
from instep_reference.contract.adaptive_controller_file import AdaptiveFile, Bracket
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.place_names import Place
from support.inputs.tree_rounds import ROOM, Story
from support.running.covering import WHOLE, few
from support.worlds import engine_and_reference as sides
from support.worlds.engine_and_reference import both_sides, scenario
from support.worlds.engine_in_graphs import Twins, eagerly

CANDIDATES = AdaptiveFile(flat=Bracket(candidate_steps=(0, 1, 3)))
FOUR = e.Capacity(slots=(4, 1, 6, 3), pages=tuple(range(60, 0, -1)), page_size=4, max_tokens=64)
OPS = [
    pytest.param("ledger", "cpu", id="ledger"),
    pytest.param("plain", "cpu", id="plain", marks=WHOLE),
    pytest.param("triton", "cuda", id="cuda", marks=pytest.mark.gpu),
]


def engine(
    checkpoint: Checkpoint, ops: str, device: str = "cpu", recorder: Recorder | None = None, *,
    buckets: tuple[int, ...] = (8, 16), room: e.Capacity = FOUR, adaptive: AdaptiveFile | None = CANDIDATES,
    **options: Any,
) -> OptimizedEngine:
    """An engine whose rounds run eagerly and whose prompts run in these buckets, captured by `recorder`."""
    subject = sides.engine(checkpoint, ops, room, adaptive=adaptive, device=device, **options)
    recorder = recorder or recorder_for(subject._base, subject._device)
    subject._prompt_graphs = PromptGraphs(recorder, buckets, subject._base, subject._model, subject._device)
    return subject


def replays(subject: OptimizedEngine) -> Runner:
    assert subject.prompt_graphs is not None
    return subject.prompt_graphs


@few(1)
@pytest.mark.slow
@pytest.mark.parametrize(("ops", "device"), OPS)
def test_segments_do_what_the_eager_run_of_the_bucket_does(checkpoint: Checkpoint, ops: str, device: str) -> None:
    graphs, again = engine(checkpoint, ops, device), engine(checkpoint, ops, device, eagerly)
    both, served = Twins(graphs, again), []
    for event in scenario(64, (3, 1, 0, 3), forced=True):
        both(event)
        served += [one for one in replays(graphs).latest if not any(one is other for other in served)]
    assert both.compared > 100_000
    assert {one.bucket for one in served} == {8, 16} and len(served) == 8
    assert {one.ran for one in served} == {tuple(parts(checkpoint))} and not any(one.freed for one in served)


def parts(checkpoint: Checkpoint) -> Iterator[tuple[str, int]]:
    """A segment before and after each GDN layer, whose mixer is an eager call."""
    for number in range(len(checkpoint.config.recurrent)):
        yield from (("segment", number), ("eager", number))
    yield "segment", len(checkpoint.config.recurrent)


@few(1)
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "conv"), list(zip(STRATEGIES, [*CONV_FORMS] * 2, strict=True)))
def test_buckets_of_8_and_64_leave_the_same_bytes(checkpoint: Checkpoint, strategy: str, conv: str) -> None:
    chosen = {"strategy": strategy, "conv": conv}
    both = Twins(*(engine(checkpoint, "ledger", buckets=sizes, **chosen) for sizes in ((8, 16), (64,))))
    assert both.serve(scenario(64, (3, 1, 0), forced=True)).compared > 100_000
    assert {one.bucket for one in replays(both.engines[1]).latest} == {64}


@WHOLE
@pytest.mark.slow
@pytest.mark.parametrize("ops", ["ledger", "plain"])
def test_prompts_next_to_trees_match_the_reference(checkpoint: Checkpoint, ops: str) -> None:
    both = both_sides(checkpoint, ops, ROOM)
    graphs = both.subject
    graphs._prompt_graphs = PromptGraphs(
        Emulator(poison=True), (8, 32, 64), graphs._base, graphs._model, graphs._device)
    found = set[Any]()
    for event in Story(1):
        both(event)
        found |= {one.key for one in replays(graphs).latest}
    assert both.compared > 10_000 and found == {("prompt", 0), ("prompt and trees", 0)}


@pytest.mark.slow
def test_more_rows_than_the_widest_graph_run_eagerly(checkpoint: Checkpoint) -> None:
    both = Twins(engine(checkpoint, "ledger", buckets=(4,)), sides.engine(checkpoint, "ledger", FOUR))
    for event in (e.Admit("a", tuple(range(1, 9))), e.Forward((e.Row("a", "prefill", 5),)),
                  e.Forward((e.Row("a", "prefill", 3),))):  # fmt: skip
        both(event)
    assert [one.rows for one in replays(both.engines[0]).latest] == [3]


def test_options_of_prompt_graphs_are_checked(checkpoint: Checkpoint) -> None:
    subject = sides.engine(checkpoint, "ledger", FOUR, graphs=True, batches=(4,), prompt_graphs=(16, 4, 16))
    assert replays(subject).buckets == (4, 16)
    for chosen, said in (({"prompt_graphs": (4,)}, "need graphs of rounds"),
                         ({"graphs": True, "prompt_graphs": (0,)}, "for 1 packed row or more"),
                         ({"graphs": True, "prompt_graphs": ()}, "for 1 packed row or more")):  # fmt: skip
        with pytest.raises(Unsupported, match=said):
            sides.engine(checkpoint, "ledger", FOUR, **chosen)


def test_capture_of_prompts_changes_no_byte(checkpoint: Checkpoint) -> None:
    one, other = engine(checkpoint, "plain"), sides.engine(checkpoint, "plain", FOUR, adaptive=CANDIDATES)
    for region, untouched in zip(one.regions(), other.regions(), strict=True):
        assert torch.equal(*(bits(x.units) for x in (region, untouched))), region.name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


@pytest.mark.gpu
def test_native_buckets_of_8_and_64_leave_the_same_bytes(checkpoint: Checkpoint) -> None:
    """With kernels whose rows depend on no other row."""
    both = Twins(*(engine(checkpoint, "invariant", "cuda", buckets=sizes) for sizes in ((8, 16), (64,))))
    assert both.serve(scenario(64, (3, 1, 0), forced=True)).compared > 100_000


# ---- the emulator's model of the memory of graphs

X = Place("trunk", 0, "hidden")


def doubled(ops: Ops, x: torch.Tensor) -> torch.Tensor:
    return ops.add(x=x, y=x, to=X)


@pytest.fixture
def given() -> list[torch.Tensor]:
    return [torch.arange(6.0).view(2, 3)]


def test_freed_input_is_garbage_in_a_replay(given: list[torch.Tensor]) -> None:
    """The graph has the address alone. A view that others hold keeps the memory."""
    record = Emulator(poison=True)
    recording, made = record(PLAIN, lambda ops, between: doubled(ops, given[0][:1]))
    view = given[0][1:]
    given.clear()
    recording.replay()
    assert recording.freed == 0 and made.tolist() == [[0, 2, 4]]  # type: ignore[attr-defined]
    assert view.tolist() == [[3, 4, 5]]
    del view
    recording.replay()
    assert recording.freed == 1 and made.isnan().all()  # type: ignore[attr-defined]


def test_results_of_other_segments_are_no_freed_inputs(given: list[torch.Tensor]) -> None:
    def body(ops: Ops, between: Break) -> torch.Tensor:
        first = doubled(ops, given[0])
        room = between(lambda room: room.copy_(first), first)
        return ops.add(x=first, y=room, to=X)

    recording, made = Emulator(poison=True)(PLAIN, body)
    assert isinstance(recording, Segments)
    for _ in range(2):
        recording.replay()
        assert recording.freed == 0 and torch.equal(made, 4 * given[0])
    assert recording.ran == [("segment", 0), ("eager", 0), ("segment", 1)]


@pytest.mark.parametrize("keep", [lambda made, _: made[:1], lambda made, record: record.rooms.of(made).copy_(made)],
                         ids=["a view of an output", "a copy in the room of eager calls"])  # fmt: skip
def test_what_is_kept_in_the_private_pool_is_overwritten_by_the_next_replay(
    given: list[torch.Tensor], keep: Callable[[torch.Tensor, Emulator], torch.Tensor]
) -> None:
    record = Emulator(poison=True)
    recording, made = record(PLAIN, lambda ops, between: doubled(ops, given[0]))
    other, _ = record(PLAIN, lambda ops, between: doubled(ops, given[0]))
    recording.replay()
    kept, copy = keep(made, record), made.clone()
    assert torch.equal(kept, copy[: len(kept)])
    other.replay()
    assert kept.isnan().all() and torch.equal(copy, 2 * given[0])


def test_segments_show_the_order_in_which_they_ran() -> None:
    ran = list[str]()

    class Part:
        def __init__(self, name: str) -> None:
            self.replay = lambda: ran.append(name)

    both = Segments([Part("a"), Part("b")], [lambda: ran.append("between")])
    both.replay()
    assert ran == ["a", "between", "b"] and both.ran == [("segment", 0), ("eager", 0), ("segment", 1)]
    with pytest.raises(AssertionError, match="between two segments"):
        Segments([Part("a")], [lambda: None])


def test_rooms_share_memory_and_keep_what_was_captured() -> None:
    rooms, like = Rooms(), torch.zeros(4, 3)
    wide = rooms.of(like)
    assert rooms.of(like[:2]).data_ptr() == wide.data_ptr() and rooms.of(like[:2]).shape == (2, 3)
    wider = rooms.of(torch.zeros(5, 3))
    assert wider.data_ptr() != wide.data_ptr() and len(list(rooms)) == 2
    assert rooms.of(torch.zeros(4, 3, dtype=torch.int64)).dtype == torch.int64

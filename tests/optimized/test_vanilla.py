"""The `vanilla` drafter, several MTP layers run in draft extend: against the reference, eagerly and held in graphs.

Leaves out: `eagle` (the other engine tests). Labels say who read what; numbers in fp64 say that it was computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from instep_optimized import OptimizedEngine
from instep_optimized.draft.drafter_protocol import PickRows
from instep_optimized.draft.mtp import MtpLayer
from instep_optimized.draft.vanilla import Vanilla
from instep_optimized.graphs import Emulator, Recorder
from instep_optimized.graphs.capture_all_at_start import prepared
from instep_optimized.graphs.capture_and_replay import Break, Recording
from instep_optimized.memory import Memory
from instep_optimized.ops.check_op_calls import contracts
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.watch_op_calls import around
from instep_optimized.packed_batch import Batch
from instep_reference import draft as reference_draft
from instep_reference.contract.adaptive_controller_file import AdaptiveFile, Bracket
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Admit, Commit, Draft, Drafted, Event, Forward, Row, SetNumSteps
from instep_reference.contract.errors import Unsupported
from instep_reference.contract.place_names import unseen
from support.inputs.checkpoints import TWO_LAYERS, write
from support.running.covering import each_value, few
from support.worlds import engine_and_reference as sides
from support.worlds.engine_and_reference import TwoSides, scenario
from support.worlds.engine_in_graphs import Twins, eagerly, emulated

pytestmark = pytest.mark.slow  # whole replays or commands

T = TypeVar("T")
WIDTH = torch.float64
FP32_NOISE = 1e-5  # absolute; values are of order 1
STEPS = {2: (2, 1, 0), 3: (3, 2, 1, 0)}  # by the number of MTP layers; the scenario goes back to the first
Checkpoints = dict[int, Checkpoint]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """With two MTP layers, and with three."""
    return {
        layers: Checkpoint.open(write(tmp_path_factory.mktemp("model"), **TWO_LAYERS, mtp_num_hidden_layers=layers))
        for layers in STEPS
    }


def adaptive(layers: int) -> AdaptiveFile:
    candidates = tuple(range(layers + 1))
    return AdaptiveFile(flat=Bracket(candidate_steps=candidates, warmup_batches=1, update_interval=2))


def engine(checkpoint: Checkpoint, ops: str, recorder: Recorder | None = None, **options: Any) -> OptimizedEngine:
    """In fp64 by default; with a recorder, in graphs."""
    layers, chosen = checkpoint.config.mtp_layers, {**sides.WIDE, **options, "drafter": "vanilla"}
    subject = sides.engine(checkpoint, ops, num_steps=layers, adaptive=adaptive(layers), **chosen)
    held(subject, recorder)
    return subject


def held(subject: OptimizedEngine, recorder: Recorder | None) -> None:
    if recorder is not None:
        subject._graphs = prepared(subject._base, subject._rounds.values(), subject._device, recorder)


def truth(checkpoint: Checkpoint, ops: str, chained: bool = True) -> Any:
    layers = checkpoint.config.mtp_layers
    drafts: Any = {"mode": "vanilla"} if ops == "ledger" else {"draft_with": reference_draft.Vanilla(chained)}
    return sides.truth(checkpoint, ops, num_steps=layers, adaptive=adaptive(layers), **drafts)


def drafting(subject: OptimizedEngine, change: Callable[[Vanilla], Vanilla]) -> OptimizedEngine:
    """Replace the engine's drafter by a changed one."""
    subject._model = replace(subject._model, drafter=change(subject._model.drafter))
    subject._rounds = {steps: replace(at, model=subject._model) for steps, at in subject._rounds.items()}
    subject._round = subject._rounds[subject._round.num_steps]
    return subject


# ---- as the reference has it --------------------------------------------------------------------------------------


@few(1)
@pytest.mark.parametrize(("layers", "forced"), each_value(STEPS, (True, False)))
def test_every_label_matches_the_reference(checkpoints: Checkpoints, layers: int, forced: bool) -> None:
    both = TwoSides(engine(checkpoints[layers], "ledger"), truth(checkpoints[layers], "ledger"))
    assert both.serve(scenario(64, STEPS[layers], forced=forced)).compared > 10_000


@pytest.mark.parametrize("forced", [True, False], ids=["forced", "free"])
def test_numbers_match_the_reference(checkpoints: Checkpoints, forced: bool) -> None:
    both = TwoSides(engine(checkpoints[2], "plain"), truth(checkpoints[2], "plain"))
    assert both.serve(scenario(64, STEPS[2], forced=forced)).compared > 10_000


def test_unchained_layers_read_the_targets_rows(checkpoints: Checkpoints) -> None:
    subject = drafting(engine(checkpoints[2], "plain"), lambda drafter: replace(drafter, chained=False))
    both = TwoSides(subject, truth(checkpoints[2], "plain", chained=False))
    both.serve(course())


def test_interpreted_kernels_agree_and_keep_every_contract(checkpoints: Checkpoints) -> None:
    """In fp32: what three layers remember differs from fp64 by the errors of a few sums in a row."""
    broken: list[str] = []
    subject = engine(checkpoints[3], "triton", activation=torch.float32, state=torch.float32)
    subject._ops = around(subject._base, unseen, contracts(broken.append))
    right = truth(checkpoints[3], "plain")
    for event in course()[:11]:
        said, due = event.on(subject), event.on(right)
        if isinstance(said, Drafted):
            assert isinstance(due, Drafted) and said.own.tolist() == due.own.tolist()
    ours, theirs = (side.state("a").draft_values for side in (subject, right))
    assert ours.keys() == theirs.keys() == set(range(3))
    for layer, rows in theirs.items():
        assert float((ours[layer] - rows).abs().max()) <= FP32_NOISE
    assert broken == []


@pytest.mark.parametrize("cut", range(1, 7))
def test_layer_reads_the_prompt_and_guesses_after_its_end(checkpoints: Checkpoints, cut: int) -> None:
    """Three layers read up to two tokens after a chunk; next to it are a decode and chunks that end elsewhere."""
    both = TwoSides(engine(checkpoints[3], "ledger"), truth(checkpoints[3], "ledger"))
    both(Admit("a", (7, 3)))
    both(Forward((Row("a", "prefill", 2),)))
    both(Admit("b", tuple(range(20, 27))))
    both(Admit("c", tuple(range(30, 38))))
    both(Forward((Row("b", "prefill", cut), Row("a", "decode"), Row("c", "prefill", 7 - cut))))
    both(Forward((Row("c", "prefill", 1 + cut), Row("b", "prefill", 7 - cut))))
    both(Draft(("b", "a", "c")))


def course() -> list[Event]:
    """Rounds and decode steps in every direction of the step count: enough for a fault of seed 4 to show."""
    events: list[Event] = [Admit("a", (5, 9, 2)), *(Forward((Row("a", "prefill", n),)) for n in (1, 2))]
    for steps in (2, 1, 2, 0, 1, 2):
        events.append(SetNumSteps(steps))
        if steps:
            events += [Draft(("a",)), Forward((Row("a", "verify"),)), Commit(("a",))]
        else:
            events.append(Forward((Row("a", "decode"),)))
    return events


# ---- held in graphs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ops", "device"), [
    ("plain", "cpu"), pytest.param("triton", "cuda", id="cuda", marks=pytest.mark.gpu),
])  # fmt: skip
def test_a_replay_is_the_eager_run_on_the_same_bucket(checkpoints: Checkpoints, ops: str, device: str) -> None:
    width = {"activation": torch.float32, "state": torch.float32, "device": device, "graphs": device == "cuda"}
    both = Twins(*(engine(checkpoints[2], ops, recorder, **width) for recorder in (emulated(device), eagerly)))
    assert both.serve(scenario(64, (2, 1, 0), forced=False)).compared > 100_000


@few(1)
@pytest.mark.parametrize("ops", ["ledger", "plain"])
def test_graphs_give_the_results_of_the_reference(checkpoints: Checkpoints, ops: str) -> None:
    both = TwoSides(engine(checkpoints[2], ops, Emulator(poison=True)), truth(checkpoints[2], ops), watched=False)
    assert both.serve(scenario(64, (2, 0, 1), forced=True)).compared > 10_000


# ---- seed 4: a stale buffer of hidden states ------------------------------------------------------------------------


@dataclass
class Capturing:
    """An emulator during whose captures one can tell that it captures."""

    now: bool = False
    emulator: Emulator = field(default_factory=lambda: Emulator(poison=True))

    def __call__(self, ops: Ops, body: Callable[[Ops, Break], T]) -> tuple[Recording, T]:
        self.now = True
        try:
            return self.emulator(ops, body)
        finally:
            self.now = False


@dataclass(frozen=True)
class Deaf(MtpLayer):
    """Reads a buffer, whatever it is fed."""

    buffer: torch.Tensor

    def rows(self, ops: Ops, hidden: torch.Tensor, batch: Batch, stage: str) -> torch.Tensor:
        return super().rows(ops, self.buffer[: len(hidden)], batch, stage)


@dataclass(frozen=True)
class Stale(Vanilla):
    """Held in a graph, layer 1 reads a buffer of the graph's own, which no replay refreshes."""

    capturing: Capturing = field(default_factory=Capturing)
    buffer: torch.Tensor = field(default_factory=lambda: torch.full((64, 32), 0.5, dtype=WIDTH))

    def extend(
        self, ops: Ops, memory: Memory, batch: Batch, hidden: torch.Tensor, asked: Sequence[PickRows], num_steps: int
    ) -> None:
        layers = self.mtp
        if self.capturing.now and num_steps == self.layers:
            layers = (layers[0], Deaf(**vars(layers[1]), buffer=self.buffer))
        Vanilla(layers).extend(ops, memory, batch, hidden, asked, num_steps)


def planted(checkpoint: Checkpoint, in_graphs: bool) -> TwoSides:
    """The faulty drafter and the reference. Without graphs every place is compared, with them states and answers."""
    capturing = Capturing()
    subject = drafting(engine(checkpoint, "plain"), lambda drafter: Stale(drafter.mtp, capturing=capturing))
    held(subject, capturing if in_graphs else None)
    return TwoSides(subject, truth(checkpoint, "plain"), watched=not in_graphs)


def test_a_buffer_that_no_replay_refreshes_is_found(checkpoints: Checkpoints) -> None:
    """It is no fault outside of graphs: eager runs alone would not find it."""
    planted(checkpoints[2], in_graphs=False).serve(course())
    both = planted(checkpoints[2], in_graphs=True)
    with pytest.raises(AssertionError, match=r"^a draft_keys of layer 1"):
        both.serve(course())


# ---- what is refused ----------------------------------------------------------------------------------------------


def test_more_steps_than_layers_are_refused(checkpoints: Checkpoints) -> None:
    for num_steps, file in ((3, None), (1, AdaptiveFile(flat=Bracket(candidate_steps=(1, 3))))):
        with pytest.raises(Unsupported, match=r"no more drafts than layers.*2 MTP layers, up to 3 drafts"):
            sides.engine(checkpoints[2], num_steps=num_steps, adaptive=file, drafter="vanilla")


def test_several_layers_require_the_vanilla_drafter(checkpoints: Checkpoints) -> None:
    with pytest.raises(Unsupported, match="this model has several"):
        sides.engine(checkpoints[2], num_steps=1)


def test_vanilla_with_one_layer_and_one_step_is_eagle(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, **TWO_LAYERS))
    both = Twins(*(sides.engine(checkpoint, num_steps=1, drafter=mode) for mode in ("eagle", "vanilla")))
    assert both.serve(scenario(64, (1, 1, 0), forced=False)).compared > 10_000

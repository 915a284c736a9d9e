"""Windows next to decodes in graphs: one replay serves both, and every check knows the kind of each row.

Leaves out: the same without graphs and next to prompts (`test_mixed_steps.py`), and its speed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.campaign.relations import held, relations
from instep.campaign.relations.case import Case
from instep.diagnose import diagnose
from instep.diagnose.confirm_cause import locate
from instep.run.replay import Outcome, Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.trace.header import SCHEMA, Header, Model, Part, Room
from instep.verdict import Exit
from instep_optimized import round_for_step_count, window_and_decode_forwards
from instep_optimized.commit import STRATEGIES
from instep_optimized.graphs import Runner
from instep_optimized.packed_batch import Batch, Group
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.sampling import Sampling
from support.inputs.checkpoints import TWO_LAYERS, write
from support.inputs.mixed_steps import CANDIDATES, ROOM, in_turns
from support.running.covering import WHOLE, few
from support.running.verdicts import agreed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"), dtype=torch.bfloat16, **TWO_LAYERS)


def replay(
    model: Path, num_steps: int = 3, order: str = "abcd", sampling: Sampling | None = None, tree: tuple[int, ...] = (),
    candidates: tuple[int, ...] = CANDIDATES, tracked: bool = False, **setting: Any,
) -> Replay:
    """In graphs, under every check. A window has room for a node more than a tree has.

    tracked: prefixes might be kept, so the last rows of every request are
    """
    steps = (3,) if tree else candidates
    more = {"num_draft_tokens": 2 + len(tree)} if tree else {"track_interval": 4, "tracked": 1} if tracked else {}
    room = Room(ROOM.slots, ROOM.pages, ROOM.page_size, ROOM.max_tokens, **more)
    header = Header(
        schema=SCHEMA, name="turns", claim="Windows stand beside decodes.",
        checkpoint=Model.of(Checkpoint.open(model), model, "."), capacity=room, num_steps=3, candidates=steps,
        adaptive=None if tree else {"candidate_steps": list(steps)}, lag=0, seed=0, stop=None, replay=(Part("ledger"),),
        created={},
    )  # fmt: skip
    told = Trace(model / "turns.jsonl", header, tuple(in_turns(num_steps, order, sampling, tree)), {}, "")
    return Replay(told, Setting(**{"ops": "plain", "graphs": True} | setting), checkpoint=model)


def replayed(model: Path, **more: Any) -> Outcome:
    return diagnose(replay(model, **more))


@few(2)
@pytest.mark.parametrize("more", [
    {"strategy": "columns", "conv": "widened"}, {"strategy": "lazy_rerun", "sampling": Sampling(0.8, top_k=9)},
    {"ops": "ledger", "num_steps": 7}, {"drafter": "external", "overlap": True, "strategy": "snapshot"},
    {"tree": (0, 0), "sampling": Sampling(0.8, top_k=9)},
    *(pytest.param(more, marks=WHOLE) for more in (  # interpreted kernels serve such a forward in `test_mixed_steps.py`
        {"ops": "triton", "num_steps": 1, "order": "dcba"}, {"strategy": "snapshot", "order": "dbca"},
        {"dtype": "bfloat16"}, {"tree": (0, 0, 1, 2)},
    )),
], ids=str)  # fmt: skip
def test_every_check_agrees(model: Path, more: dict[str, Any]) -> None:
    """That one graph was replayed, for all requests and each as its own kind, is among them."""
    outcome = replayed(model, **more)
    assert outcome.verdict.exit is Exit.AGREED, outcome.verdict.findings[:1]
    assert outcome.verdict.events == outcome.of


@WHOLE
def test_every_check_agrees_with_several_mtp_layers(tmp_path: Path) -> None:
    """Decodes keep their last rows, too, for a prefix that might be kept."""
    three = write(tmp_path, dtype=torch.bfloat16, mtp_num_hidden_layers=3, **TWO_LAYERS)
    agreed(replayed(three, drafter="vanilla", candidates=(1, 3), tracked=True))


@WHOLE
def test_answers_are_the_same_without_observers(model: Path) -> None:
    """Without observers: an observed replay captures other graphs."""
    told = replay(model, order="dbca")
    (unseen,) = held(Case.of(told.trace, told.plan), relations(["unseen"]))
    assert unseen.verdict.exit is Exit.AGREED, unseen.verdict.findings[:1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_replays_on_a_card_agree(model: Path, strategy: str, dtype: str) -> None:
    """There graphs share memory."""
    outcome = replayed(model, order="dbca", ops="triton", device="cuda", strategy=strategy, dtype=dtype, overlap=True)
    assert outcome.verdict.exit is Exit.AGREED, outcome.verdict.findings[:1]
    assert outcome.verdict.events == outcome.of


def first(model: Path, **setting: Any) -> str:
    return replayed(model, **setting).verdict.findings[0].diagnosis


def test_forward_outside_graphs_is_reported(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep_optimized.engine.BOTH", None)
    assert "0 graphs were replayed; the event is one replay of ('verify and decode', 3)" in first(model)


def test_extra_replay_is_reported(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Runner.run

    def twice(self: Runner, key: Any, *given: Any) -> Any:
        if key == ("verify and decode", 3):
            *rest, _, join = given
            run(self, key, *rest, lambda place, rows: rows, join)
        return run(self, key, *given)

    monkeypatch.setattr(Runner, "run", twice)
    found = replayed(model, drafter="external").verdict.findings
    assert any(one.check == "graphs" and "2 graphs were replayed" in one.diagnosis for one in found), found


@WHOLE
def test_op_wrong_in_mixed_launches_is_not_blamed_on_the_graph(model: Path) -> None:
    """Without graphs the launch is the same."""
    wrong = replay(model, ops="support.wrong.ops:LOUDER_BESIDE")
    found = locate(wrong, wrong.run())
    assert (found.cause, found.op) == ("op", "gdn"), found.says


def told(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[round_for_step_count.Inputs], round_for_step_count.Inputs]
) -> None:
    """The host describes windows next to decodes wrongly."""
    inputs_of = round_for_step_count.inputs_of

    def other(*given: Any) -> round_for_step_count.Inputs:
        inputs = inputs_of(*given)
        return change(inputs) if inputs.kinds.numel() else inputs

    monkeypatch.setattr("instep_optimized.engine.inputs_of", other)


def test_swapped_row_kinds_are_reported(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, lambda inputs: inputs._replace(kinds=inputs.kinds.flip(1)))
    assert first(model) == "op conv (trunk.0.mixed): most is 1, the largest count is 4"


def test_decode_served_as_a_window_too_is_reported(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, lambda inputs: inputs._replace(kinds=torch.stack((inputs.slots, inputs.kinds[:, 1]), 1)))
    found = replayed(model, strategy="snapshot").verdict.findings
    said = [one.diagnosis for one in found if one.check == "graphs"]
    assert 'for a verify of request "b"; the trace has -1' in said[0], found


def test_tokens_after_a_root_are_not_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The columns of a window are unwritten until its request gets its first drafts."""
    told(monkeypatch, lambda inputs: inputs._replace(used=torch.arange(inputs.used.numel()).view_as(inputs.used)))
    assert first(model).startswith("op embed (trunk.embedding): tokens run from")


def test_decodes_with_uniforms_of_windows_are_reported(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, lambda inputs: inputs._replace(uniforms=inputs.uniforms.roll(1, 0)))
    found = replayed(model, sampling=Sampling(0.8, top_k=9)).verdict.findings
    assert any("with the uniforms of request" in one.diagnosis for one in found), found[:1]


@few(1)
@pytest.mark.parametrize("strategy", ["snapshot", "columns"])
def test_window_in_the_row_of_another_request_is_reported(
    model: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows are counted separately, and a request keeps the row that it had in the batch."""
    told(monkeypatch, lambda inputs: inputs._replace(rows=(inputs.kinds[:, 0] >= 0).cumsum(0) - 1))
    assert "bytes changed in snapshot_conv row 0, which this event may not write" in first(
        model, strategy=strategy, order="dcba"
    )


def of_groups(monkeypatch: pytest.MonkeyPatch, change: Callable[[Group, Group], tuple[Group, ...]]) -> None:
    beside = round_for_step_count.windows_beside_decodes

    def other(*given: Any) -> Batch:
        batch = beside(*given)
        return replace(batch, groups=change(*batch.groups))

    monkeypatch.setattr(round_for_step_count, "windows_beside_decodes", other)


@few(2)
@pytest.mark.parametrize(("change", "said"), [
    (lambda windows, decodes: (windows,), ("no call serves the 1 row of request",)),
    (lambda windows, decodes: (decodes, windows), ()),
    (lambda windows, decodes: (windows, replace(decodes, begin=decodes.rows)), ("is all zero",)),
], ids=["without decodes", "in the other order", "as if each had one row"])  # fmt: skip
def test_wrong_groups_are_reported(
    model: Path, change: Callable[[Group, Group], tuple[Group, ...]], said: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In which order they are served is free: they share no request."""
    of_groups(monkeypatch, change)
    verdict = replayed(model).verdict
    assert verdict.exit is (Exit.DIVERGED if said else Exit.AGREED)
    assert all(any(words in one.diagnosis for one in verdict.findings) for words in said), verdict.findings


def test_windows_in_the_decodes_draft_extend_are_reported(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        round_for_step_count, "replace", lambda who, **given: who if "slots" in given else replace(who, **given)
    )
    assert "changed in proposals slot 4, which this event may not write" in first(model)


def test_rows_cut_as_windows_are_reported(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_and_decode_forwards.Forwards, "_spots", lambda self, plan, device: torch.arange(
        sum(p.span.count for p in plan)))  # fmt: skip
    assert first(model).startswith("own choices are")

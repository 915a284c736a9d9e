"""Windows beside decodes in graphs: each kind is a replay of its own, and every check sees one forward all the same.

Leaves out: the same eagerly, and beside prompts (`test_mixed_steps.py`), and how long it takes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from instep.replay.replay import Outcome, Replay
from instep.replay.setting import Setting
from instep.trace.file import Trace
from instep.trace.header import SCHEMA, Header, Model, Part, Room
from instep.verdict import Exit
from instep_optimized import forwards
from instep_optimized.commit import STRATEGIES
from instep_optimized.graphs import Runner
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.place import Place, See, unseen
from instep_reference.contract.sampling import Sampling
from support.checkpoints import write
from support.mixed import CANDIDATES, ROOM, TWO_LAYERS, in_turns

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"), dtype=torch.bfloat16, **TWO_LAYERS)


def replayed(
    model: Path, num_steps: int = 3, order: str = "abcd", sampling: Sampling | None = None, tree: tuple[int, ...] = (),
    **setting: Any,
) -> Outcome:
    """In graphs, under every check. A window has room for a node more than a tree has."""
    adaptive = None if tree else {"candidate_steps": list(CANDIDATES)}
    room = Room(ROOM.slots, ROOM.pages, ROOM.page_size, ROOM.max_tokens,
                num_draft_tokens=2 + len(tree) if tree else None)  # fmt: skip
    header = Header(
        schema=SCHEMA, name="turns", claim="Windows stand beside decodes.",
        checkpoint=Model.of(Checkpoint.open(model), model, "."), capacity=room, num_steps=3,
        candidates=(3,) if tree else CANDIDATES, adaptive=adaptive, lag=0, seed=0, stop=None, replay=(Part("ledger"),),
        created={},
    )  # fmt: skip
    told = Trace(model / "turns.jsonl", header, tuple(in_turns(num_steps, order, sampling, tree)), {}, "")
    return Replay(told, Setting(**{"ops": "plain", "graphs": True} | setting), checkpoint=model).run()


@pytest.mark.parametrize("more", [
    {"strategy": "snapshot", "order": "dbca"}, {"strategy": "columns", "conv": "widened"}, {"dtype": "bfloat16"},
    {"strategy": "lazy_rerun", "sampling": Sampling(0.8, top_k=9)}, {"ops": "ledger", "num_steps": 7},
    {"drafter": "external", "overlap": True}, {"tree": (0, 0, 1, 2)},
    {"ops": "triton", "num_steps": 1, "order": "dcba"},
], ids=str)  # fmt: skip
def test_every_check_agrees(model: Path, more: dict[str, Any]) -> None:
    """That a graph was replayed for each kind, on its own requests, is among them."""
    outcome = replayed(model, **more)
    assert outcome.verdict.exit is Exit.AGREED, outcome.verdict.findings[:1]
    assert outcome.verdict.events == outcome.of


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_replays_on_a_card_agree(model: Path, strategy: str, dtype: str) -> None:
    """There graphs share memory."""
    outcome = replayed(model, order="dbca", ops="triton", device="cuda", strategy=strategy, dtype=dtype, overlap=True)
    assert outcome.verdict.exit is Exit.AGREED, outcome.verdict.findings[:1]
    assert outcome.verdict.events == outcome.of


def first(model: Path, **setting: Any) -> str:
    return replayed(model, **setting).verdict.findings[0].diagnosis


def test_a_forward_that_runs_eagerly_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instep_optimized.engine.BOTH", None)
    said = first(model)
    assert "0 graphs were replayed; the event is one replay of ('verify', 3) and one replay of ('decode', 3)" in said


def test_a_replay_too_many_is_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Runner.run

    def twice(self: Runner, key: Any, *given: Any) -> Any:
        if key == ("verify", 3):
            *rest, _, join = given
            run(self, key, *rest, lambda place, rows: rows, join)
        return run(self, key, *given)

    monkeypatch.setattr(Runner, "run", twice)
    found = replayed(model, drafter="external").verdict.findings
    assert any(one.check == "graphs" and "3 graphs were replayed" in one.diagnosis for one in found), found


def test_kinds_that_change_places_are_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(self: forwards.Forwards, plan: Any, see: See) -> tuple[torch.Tensor, torch.Tensor]:
        own, roots = self.decodes([p for p in plan if p.span.kind == "decode"], unseen)
        said = self.windows([p for p in plan if p.span.kind == "verify"], unseen)
        return torch.cat((said, own))[forwards._order(plan)], roots

    monkeypatch.setattr(forwards.Forwards, "both", other)
    assert "the graph ('decode', 3) was replayed; the event is one of ('verify', 3)" in first(model)


def test_rows_that_stay_in_the_order_of_kinds_are_told(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards, "_order", lambda plan: list(range(sum(p.span.count for p in plan))))
    assert first(model).startswith('row 0 is that of row 0 of request "b"')


@pytest.mark.parametrize("strategy", ["snapshot", "columns"])
def test_a_window_in_the_row_of_somebody_else_is_told(
    model: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind counts the rows of the batch anew, and a request remembers the one that it had in the batch."""
    run = forwards.Forwards._run

    def anew(self: forwards.Forwards, *given: Any) -> Any:
        def counted(*more: Any, rows: list[int], **rest: Any) -> Any:
            return self.run(*more, rows=list(range(len(rows))), **rest)

        return run(forwards.Forwards(counted, self.width, self.trees), *given)

    monkeypatch.setattr(forwards.Forwards, "_run", anew)
    assert "bytes changed in snapshot_conv row 0, which this event may not write" in first(model, strategy=strategy)


def test_what_the_first_replay_shows_is_copied() -> None:
    """On a card graphs share memory: the second replay writes over what the first one has shown."""
    shown: forwards.Shown = []
    rows, place = torch.zeros(2), Place("trunk", 0, "core")
    assert forwards._copying(shown)(place, rows) is rows
    rows.fill_(1.0)
    assert shown[0][0] == place and not shown[0][1].any()

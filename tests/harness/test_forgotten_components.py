"""Movers that really forget a component of memory: each is found, at its place, and named by a check.

The cell of the table is emptied, and the refusal of an empty cell is switched off. Leaves out: the refusal
(`optimized/test_component_table.py`).
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import instep_optimized.options
from instep.bundled import fixtures
from instep.diagnose import explain_outcome
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.trace.policy import Policy
from instep.verdict import Comparison
from instep_optimized.commit.base import BoundStrategy
from instep_optimized.commit.conv_form_windows import Windows
from instep_optimized.commit.snapshot import Snapshot
from instep_optimized.component_table import TABLE
from instep_optimized.memory.component_cells import Mover
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.packed_batch import Batch
from support.inputs.few_channels import few_channels
from support.inputs.traces import recorded
from support.running.covering import WHOLE


@pytest.fixture
def _served(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serve a model with an empty cell."""
    monkeypatch.setattr(instep_optimized.options, "refuse_empty", lambda table, config: None)
    yield


def first(trace: Trace, setting: Setting, until: int | None = None) -> tuple[Comparison, str]:
    """The first finding of a replay, and its sentences."""
    found = explain_outcome(Replay(trace, setting).run(until=until)).verdict.findings[0]
    assert found.problem is not None
    known = found.problem.mistake
    return found, "; ".join(filter(None, (found.problem.prefix, known and known.says, found.problem.clause)))


FORGOTTEN: list[tuple[Mover, str, str, int, str, str, str]] = [
    ("copy", "conv", "kept", 0, "trunk layer 0 conv", "labels", "has nothing; expected (96, 3)"),
    ("copy", "draft_keys", "kept", 2, "extend layer 0 keys", "labels", "has nothing; expected (6, 2, 16)"),
    ("clear", "state", "kept", 10, "trunk layer 0 state", "leaks", 'data of request "b" is still in state slot 1'),
    ("fork", "conv", "prefix", 2, "trunk layer 0 conv", "labels", "a, 0; has nothing; expected (96, 3)"),
    ("commit", "conv", "kept", 6, "trunk layer 0 conv", "labels", "holds what it held before the event; "),
    ("budget", "state", "kept", 0, "trunk layer 0 state", "capacity", "the memory budget has 0 bytes for the pool"),
]


@pytest.mark.parametrize(("mover", "component", "trace", "event", "place", "check", "says"), FORGOTTEN,
                         ids=[f"{one[0]} {one[1]}" for one in FORGOTTEN])
def test_a_mover_that_forgets_a_component_is_found_located_and_named(
    _served: None, mover: Mover, component: str, trace: str, event: int, place: str, check: str, says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(TABLE[mover], component)  # type: ignore[arg-type]
    found, said = first(few_channels(trace, 2), Setting("ledger"), event)
    assert (found.event, str(found.place), found.check) == (event, place, check) and says in said, said


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Requests and prefixes that move to another engine and back."""
    text = (fixtures() / "traces" / "faults" / "transfer.policy.json").read_text()
    for prompt, own in (("again", "more"), ("twice", "few"), ("new", "one")):
        text = text.replace(f'"prompt": "{prompt}"', f'"prompt": "{own}"')
    return recorded(Path(tmp_path_factory.mktemp("moving")), msgspec.json.decode(text, type=Policy))


@WHOLE
@pytest.mark.parametrize(("mover", "component", "event", "check", "says"), [
    ("offload", "values", 4, "copies", 'the copy "moved" changed when it moved: values (layer 1) is missing'),
    ("transfer", "conv", 8, "serves", "the copy that is restored has no 'conv': a mover forgot it"),
    ("transfer", "keys", 8, "labels", "holds labels that do not belong here"),
])
def test_a_move_that_forgets_a_component_is_found_and_names_it(
    _served: None, mover: Mover, component: str, event: int, check: str, says: str, moving: Trace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(TABLE[mover], component)  # type: ignore[arg-type]
    found, said = first(moving, Setting("ledger"), event)
    assert (found.event, found.check) == (event, check) and says in said, said
    assert component in said or str(found.place) == f"trunk layer 1 {component}"


@WHOLE
def test_padding_that_forgets_a_component_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle rows of a graph address the conv window of slot 0, and the states of none."""
    bind = Snapshot.bind

    def padded(self: Windows, ops: Ops, batch: Batch) -> BoundStrategy:
        groups = (replace(one, slots=ops.choose(own=one.begin, forced=one.slots)) for one in batch.groups)
        return bind(self, ops, replace(batch, groups=tuple(groups)))

    monkeypatch.setattr(Windows, "bind", padded)
    found, said = first(few_channels("graphs", 2), Setting("ledger", graphs=True))
    assert (str(found.place), found.check) == ("trunk layer 0 mixed", "contracts"), said
    assert "op conv (trunk.0.mixed): store is unit 0, which is reserved" in said

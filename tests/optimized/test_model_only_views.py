"""Between two ops the model takes views only: no arithmetic, no copy, no allocation, no read of a value.

A graph captures exactly this code, so another call would be recorded or missed. Leaves out: the preparation of a launch
(`mixed_steps.py`, `inputs_of`), which makes a graph's inputs.
"""

import ast
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import instep_optimized
from instep_optimized import commit as strategies
from instep_optimized import load
from instep_optimized.commit import CONV_FORMS, STRATEGIES
from instep_optimized.commit.base import AcceptedWindows
from instep_optimized.commit.strategy_pair import CommitPair
from instep_optimized.draft import MODES
from instep_optimized.draft.drafter_protocol import Drafter, PickRows
from instep_optimized.memory import Memory
from instep_optimized.memory.budget import Sizes, demands
from instep_optimized.model.trunk import STAGE, Trunk
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.watch_op_calls import Op, around
from instep_optimized.packed_batch import Batch
from instep_optimized.weights import Stored
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.engine import Capacity
from instep_reference.contract.place_names import unseen
from support.inputs.checkpoints import Kind, config_of, draw
from support.inputs.packed_launches import Rows, packed

CAPACITY = Capacity(slots=(5, 2, 4), pages=tuple(range(1, 20)), page_size=4, max_tokens=64)
WIDEST = 4
SLOTS = torch.tensor(CAPACITY.slots)
ROOT = Path(instep_optimized.__file__).parent
ONLY_OPS = sorted(path for part in ("commit", "draft", "model") for path in (ROOT / part).glob("*.py"))


class Loose(TorchDispatchMode):
    """Collects every call that is not a view and not made by an op; `ops` is the set to run with."""

    def __init__(self, ops: Ops) -> None:
        super().__init__()
        self.found: list[str] = []
        self.served = 0
        self._inside = 0
        self.ops = around(ops, unseen, self._entered)

    def _entered(self, name: str, op: Op) -> Op:
        def call(**given: Any) -> Any:
            self._inside, self.served = self._inside + 1, self.served + 1
            try:
                return op(**given)
            finally:
                self._inside -= 1

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._inside and not func.is_view:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Launch:
    """A model over its memory, and a batch of all kinds for it."""

    trunk: Trunk
    drafter: Drafter
    memory: Memory
    commit: CommitPair
    batch: Batch
    extended: Batch

    def __call__(self, ops: Ops) -> None:
        bound = self.commit.bind(ops, self.batch)
        rows = self.trunk(ops, self.batch, bound)
        bound.ran(ops)
        self.trunk.head.pick(ops, rows.final, STAGE)
        asked = (PickRows(self.extended.last, SLOTS),) * self.drafter.layers
        self.drafter.extend(ops, self.memory, self.extended, rows.fed, asked, num_steps=2)


def launch(
    kind: Kind, ops: Ops, strategy: str = "rerun", conv: str = "windows", mode: str = "eagle", layers: int = 1
) -> Launch:
    """A verify of "a", a first chunk of "b" and a decode of "c"; extend over the same rows."""
    config = ModelConfig.from_dict(
        config_of(kind, num_hidden_layers=2, full_attention_interval=2, mtp_num_hidden_layers=layers)
    )
    sizes = Sizes(ops.types(torch.float32, torch.float32), "VK", CAPACITY, WIDEST)
    wanted = demands(config, sizes) + strategies.demands(config, sizes, strategy, conv)
    memory = Memory(wanted, CAPACITY, guarded=True, poison=math.nan, device=torch.device("cpu"))
    stored = Stored(draw(config, 0), torch.float32, torch.device("cpu"))
    trunk = Trunk.of(stored, config, memory)
    for name, positions in (("a", 12), ("b", 5), ("c", 7)):
        memory.claim(name, positions)
    rows = [
        Rows("a", "verify", 3, before=9, row=0), Rows("b", "prefill", 5, before=0), Rows("c", "decode", 1, before=6),
    ]
    batch, extended = (
        packed(memory, kinds, torch.arange(9)) for kinds in (rows, [replace(each, kind="draft") for each in rows])
    )
    drafter = MODES[mode](stored, config, trunk.head, memory)
    commit = strategies.make(config, sizes, memory, WIDEST, strategy, conv)
    for slot in memory.slots.owned().values():
        commit.claim(slot)
    return Launch(trunk, drafter, memory, commit, batch, extended)


@pytest.mark.parametrize("ops", ["plain", "ledger"])
@pytest.mark.parametrize("kind", ["dense", "next", "moe"])
def test_a_forward_and_a_draft_are_ops_and_views(kind: Kind, ops: str) -> None:
    nothing_is_loose(launch(kind, load(ops)), load(ops))


@pytest.mark.parametrize("ops", ["plain", "ledger"])
def test_several_mtp_layers_are_ops_and_views(ops: str) -> None:
    nothing_is_loose(launch("dense", load(ops), mode="vanilla", layers=3), load(ops))


@pytest.mark.parametrize("pair", [("snapshot", "widened"), ("columns", "widened"), ("lazy_rerun", "windows")])
def test_every_strategy_is_ops_and_views(pair: tuple[str, str]) -> None:
    nothing_is_loose(launch("dense", load("plain"), *pair), load("plain"))


def nothing_is_loose(subject: Launch, ops: Ops) -> None:
    loose = Loose(ops)
    with loose:
        subject(loose.ops)
    assert loose.found == []
    assert loose.served > 40


@pytest.mark.parametrize("conv", CONV_FORMS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_commit_is_ops_and_views(strategy: str, conv: str) -> None:
    subject, loose = launch("dense", load("plain"), strategy, conv), Loose(load("plain"))
    rows, slots, nodes, lens, before = (torch.tensor([number]) for number in (0, 5, 2, 3, 9))
    with loose:
        subject.commit.commit(loose.ops, AcceptedWindows(rows, slots, nodes, lens, before))
    assert loose.found == []
    # One GDN layer: a window or a mark for the conv; a state, a mark or nothing at all for the state.
    assert loose.served == 1 + (0 if strategy.endswith("rerun") else 1)


@pytest.mark.parametrize(("wrong", "named"), [
    (lambda hidden: hidden + 0, "aten.add.Tensor"),
    (lambda hidden: hidden.clone(), "aten.clone.default"),
    (lambda hidden: (hidden,)[int(hidden[0, 0].item() * 0)], "aten._local_scalar_dense.default"),
    (lambda hidden: hidden.mul_(1), "aten.mul_.Tensor"),
    (lambda hidden: hidden.t().contiguous().t(), "aten.clone.default"),
])  # fmt: skip
def test_a_loose_call_is_caught_and_named(wrong: Callable[[torch.Tensor], torch.Tensor], named: str) -> None:
    subject, loose = launch("dense", load("plain")), Loose(load("plain"))
    first, *others = subject.trunk.layers
    layers = (lambda ops, hidden, batch, bound: first(ops, hidden._replace(x=wrong(hidden.x)), batch, bound), *others)
    with loose:
        replace(subject, trunk=replace(subject.trunk, layers=layers))(loose.ops)
    assert named in loose.found


def test_views_are_allowed() -> None:
    loose = Loose(load("plain"))
    with loose:
        x = torch.zeros(2, 6)
        x.view(3, 4)[1:].transpose(0, 1).unsqueeze(0).expand(2, 4, 2)
    assert loose.found == ["aten.zeros.default"]


@pytest.mark.parametrize("path", ONLY_OPS, ids=lambda path: str(path.relative_to(ROOT)))
def test_op_only_files_name_no_torch_function(path: Path) -> None:
    """Branches that no batch above takes are read: a type may be named, a function may not."""
    assert set(torch_names(ast.parse(path.read_text()))) <= {"Tensor", "dtype", "device"}


def torch_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            yield node.module or ""

"""A fault that is only another argument, or another result, of a function: wrapped in a copy, or in this process.

Leaves out: edits inside of functions (`test_planting.py`).
"""

import ast
from pathlib import Path

import pytest
import torch

from instep_optimized.memory import Memory
from instep_optimized.memory_addresses import Address
from instep_optimized.ops.plain import PLAIN
from instep_proof.faults import plant
from instep_proof.faults.catalogue.fault import Edit, Wrap
from instep_proof.faults.syntax_edit import wrapped
from instep_reference.contract.errors import BadInput
from support.running.planting import planted_here

MOVE = "instep_optimized/ops/plain/copy_units.py"
TEXT = '''
import functools

class Pool:
    size = 3

    @functools.cache
    def take(self, unit, /, *more, copy=False, **named):
        """One of them."""
        return [unit, *more, copy, named]  # a list

    @classmethod
    def of(cls, right): return right

    def kept(self): return super().__repr__()


def take(): return 'as\\n it is'
'''


def made(wrap: Wrap) -> dict[str, object]:
    names: dict[str, object] = {}
    exec(compile(wrapped(TEXT, wrap), "pool.py", "exec"), names)
    return names


def test_wrapping_changes_arguments_and_result_alone() -> None:
    wrap = Wrap("pool.py", "Pool.take", "unit += 1\nnamed['b'] = 2", "result = [*result, right(self, 0)]")
    pool = made(wrap)["Pool"]()  # type: ignore[operator]
    assert pool.take(1, 5, copy=True, a=1) == [2, 5, True, {"a": 1, "b": 2}, [0, False, {}]]
    assert pool.take.cache_info().misses == 1, "the decorator stays outside"
    after = wrapped(TEXT, wrap)
    kept, now = ([ast.dump(node) for node in ast.parse(text).body[::2]] for text in (TEXT, after))
    assert kept == now and len(kept) == 2, "an import and a function next to the class"


def test_a_function_on_one_line_and_one_that_asks_its_parent_can_be_wrapped() -> None:
    assert made(Wrap("pool.py", "take", result="result += '!'"))["take"]() == "as\n it is!"  # type: ignore[operator]
    said = made(Wrap("pool.py", "Pool.kept", result="result = result[:1]"))["Pool"]().kept()  # type: ignore[operator]
    assert said == "<", "super() knows its class"


@pytest.mark.parametrize(("wrap", "says"), [
    (Wrap("pool.py", "kept"), "found 0 functions kept, expected exactly one"),
    (Wrap("pool.py", "Pool.size"), "found 0 functions Pool.size"),
    (Wrap("pool.py", "Pool.of"), "Pool.of has a parameter right"),
    (Wrap("pool.py", "take", "if x:"), "'if x:' is not whole, expected whole statements"),
])  # fmt: skip
def test_unwrappable_function_is_refused(wrap: Wrap, says: str) -> None:
    with pytest.raises(BadInput, match=rf"planting in pool\.py: .*{says}"):
        wrapped(TEXT, wrap)


STORED = """
import torch
from instep_optimized.ops.plain import PLAIN
pool = torch.zeros(2, 2, 1)
PLAIN.store_rows(rows=torch.ones(1, 1), pool=pool, locations=torch.tensor([1]))
print(pool.flatten().tolist())
"""


def stored(location: int = 1) -> list[float]:
    pool = torch.zeros(2, 2, 1)
    PLAIN.store_rows(rows=torch.ones(1, 1), pool=pool, locations=torch.tensor([location]))
    return pool.flatten().tolist()


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("edit", [
    Wrap(MOVE, "store_rows", arguments="locations = locations + 2"),
    Edit(MOVE, "spots = locations[wanted]", "spots = locations[wanted] + 2"),
])  # fmt: skip
def test_planted_function_replaces_every_reference_in_the_block(edit: Edit | Wrap, tmp_path: Path) -> None:
    """And a copy of the source does the same."""
    assert stored() == [0, 1, 0, 0]
    with pytest.raises(KeyError, match="whatever"), planted_here(edit):
        assert stored() == [0, 0, 0, 1]
        raise KeyError("whatever")
    assert stored() == [0, 1, 0, 0]
    ran = plant.run_python(plant.planted(tmp_path / "copy", edit), "-c", STORED)
    assert ran.stdout.strip() == "[0.0, 0.0, 0.0, 1.0]", ran.stderr


def test_methods_are_planted_too_and_several_edits_add_up() -> None:
    before = Memory.grow.__code__
    twice = Wrap("instep_optimized/memory/__init__.py", "Memory.grow", arguments="wants = (*wants, *wants)")
    other = Wrap(MOVE, "move", arguments="target = source")
    units = torch.tensor([0])
    source, target = (Address(torch.full((1, 1), value), units) for value in (1.0, 2.0))
    with planted_here(twice, other, Edit(MOVE, "locations >= 0", "locations > 0")):
        PLAIN.move(source=source, target=target)
        assert Memory.grow.__code__ is not before and target.pool.item() == 2 and stored(0) == [0, 0, 0, 0]
    PLAIN.move(source=source, target=target)
    assert Memory.grow.__code__ is before and target.pool.item() == 1 and stored(0) == [1, 0, 0, 0]


@pytest.mark.parametrize(("edit", "says"), [
    (Edit(MOVE, "import torch", "import math\nimport torch"), "changes more than the code of functions"),
    (Edit("instep_optimized/draft_answers.py", "NO_OPINION = -1", "NO_OPINION = 0"), "changes more than the code"),
    (Edit("instep_optimized/kernels/gdn_windows/token_by_token.py", "every_k < K", "every_k < 1"),
     "no plain function"),
])  # fmt: skip
def test_edit_that_needs_a_copy_is_refused(edit: Edit, says: str) -> None:
    with pytest.raises(BadInput, match=rf"{says}.*`plant\.planted`"), planted_here(edit):
        raise AssertionError("it was planted")

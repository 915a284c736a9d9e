"""Integer ops against Python loops: positions of rows, forced choices, growing trees; and their contracts.

Leaves out: plain against Triton (`test_kernels.py` runs the shared cases of `instep.kit.cases.integer_ops`).
"""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from instep.kit.cases import INDEX, serve
from instep_optimized.ops.check_op_calls import contracts
from instep_optimized.ops.ledger_label_ops import LEDGER
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.triton import TRITON
from instep_optimized.ops.watch_op_calls import around
from instep_reference.acceptance import greedy
from instep_reference.contract.place_names import unseen
from support.inputs.tree_windows import chain, drawn, path

SETS = pytest.mark.parametrize("ops", [PLAIN, TRITON, LEDGER], ids=lambda ops: ops.name)
HERE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if HERE == "cuda" else []


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=HERE)


def lists(result: Any) -> list[Any]:
    return [tensor.tolist() for tensor in result]


@SETS
def test_rows_have_the_positions_of_a_loop(ops: Ops) -> None:
    draw = Random(7)
    for _ in range(12):
        size, width, requests = draw.choice((1, 3, 4)), draw.randint(1, 4), draw.randint(0, 5)
        length = [draw.randint(0, 9) for _ in range(8)]
        table = [[draw.choice((-1, 1, 5, 9)) for _ in range(width)] for _ in range(8)]
        slots = [draw.choice((-1, slot)) for slot in draw.sample(range(1, 8), requests)]
        count, shift = [draw.randint(0, 4) for _ in slots], draw.choice((-1, 0, 3))
        begin = [sum(count[:b]) + b for b in range(requests)]  # an unowned row after each request
        rows = sum(count) + requests + 2
        positions, locations = [0] * rows, [-1] * rows
        for slot, first, many in zip(slots, begin, count, strict=True):
            for t in range(many if slot >= 0 else 0):
                at = positions[first + t] = length[slot] + shift + t
                page = table[slot][at // size] if 0 <= at < width * size else -1
                locations[first + t] = page * size + at % size if page >= 0 else -1
        wanted = [positions, locations, [length[slot] + shift if slot >= 0 else 0 for slot in slots],
                  [many if slot >= 0 else 0 for slot, many in zip(slots, count, strict=True)],
                  [first + many - 1 if slot >= 0 and many else -1
                   for slot, first, many in zip(slots, begin, count, strict=True)]]
        found = ops.place_rows(
            slots=ints(*slots), begin=ints(*begin), count=ints(*count), rows=rows, length=ints(*length),
            table=torch.tensor(table, device=HERE), page_size=size, shift=shift,
        )
        assert lists(found) == wanted
        assert all(field.dtype == torch.int64 for field in found)


@SETS
def test_unowned_row_has_no_position(ops: Ops) -> None:
    none, table = ints(), ints(1, 2, 3, 4).view(2, 2)
    found = ops.place_rows(slots=none, begin=none, count=none, rows=3, length=ints(1, 1), table=table, page_size=2,
                           shift=0)
    assert lists(found) == [[0, 0, 0], [-1, -1, -1], [], [], []]


@SETS
def test_forced_path_is_in_force_and_our_own_is_still_returned(ops: Ops) -> None:
    """Drafts 1, 2, 3 against picks 1, 2, 7, 4: two are right, and 7 is the bonus."""
    window, picks = ints(9, 1, 2, 3), ints(1, 2, 7, 4)
    expected = {  # forced (correct, bonus) -> what is in force: correct, bonus, tokens
        (-1, -1): (2, 7, [1, 2, 7, 0]),
        (0, -1): (0, 1, [1, 0, 0, 0]),
        (0, 5): (0, 5, [5, 0, 0, 0]),
        (3, -1): (3, 4, [1, 2, 3, 4]),
        (3, 0): (3, 0, [1, 2, 3, 0]),
        (-1, 8): (2, 8, [1, 2, 8, 0]),
        (9, -1): (3, 4, [1, 2, 3, 4]),  # clamped
    }
    requests = len(expected)
    forced = ints(*(number for pair in expected for number in pair)).view(-1, 2)
    found = ops.accept(
        window=window.expand(requests, 4), picks=picks.expand(requests, 4), count=ints(*[4] * requests),
        forced_last=forced[:, 0], forced_bonus=forced[:, 1],
    )
    assert found.num_correct_drafts.tolist() == [correct for correct, _, _ in expected.values()]
    assert found.last_correct_step_indices.tolist() == found.num_correct_drafts.tolist()
    assert found.accept_lens.tolist() == [correct + 1 for correct, _, _ in expected.values()]
    assert found.bonus.tolist() == [bonus for _, bonus, _ in expected.values()]
    assert found.tokens.tolist() == [tokens for _, _, tokens in expected.values()]
    assert found.accept_index.tolist() == [
        [t if t <= correct else -1 for t in range(4)] for correct, _, _ in expected.values()
    ]
    assert set(found.own_num_correct_drafts.tolist()) == {2} and set(found.own_bonus.tolist()) == {7}


@SETS
def test_an_idle_window_accepts_nothing_whatever_is_forced(ops: Ops) -> None:
    found = ops.accept(window=ints(1, 2).view(1, 2), picks=ints(2, 3).view(1, 2), count=ints(0),
                       forced_last=ints(1), forced_bonus=ints(6))
    assert lists(found) == [[0], [0], [[-1, -1]], [0], [0], [0], [0], [[0, 0]]]


@SETS
def test_forced_choice_replaces_the_own_one_and_lengths_grow(ops: Ops) -> None:
    assert ops.choose(own=ints(3, 4, 5), forced=ints(-1, 0, 8)).tolist() == [3, 0, 8]
    pool = torch.full((4, 3), 5, device=HERE)
    ops.advance(length=pool[:, 1], slots=ints(2, -1, 1), by=ints(4, 9, 1))
    assert pool.tolist() == [[5, 5, 5], [5, 6, 5], [5, 9, 5], [5, 5, 5]]


@SETS
def test_tokens_shift_by_one_and_the_following_one_is_appended(ops: Ops) -> None:
    draw = Random(8)
    for _ in range(12):
        count = [draw.choice((0, 1, 2, 5)) for _ in range(draw.randint(0, 5))]
        begin = [sum(count[:b]) + b for b in range(len(count))]  # an unowned row after each request
        tokens, behind = ([draw.randint(1, 99) for _ in range(n)] for n in (sum(count) + len(count) + 2, len(count)))
        wanted = [0] * len(tokens)
        for first, many, token in zip(begin, count, behind, strict=True):
            if many:
                wanted[first : first + many] = [*tokens[first + 1 : first + many], token]
        found = ops.shift(tokens=ints(*tokens), begin=ints(*begin), count=ints(*count), behind=ints(*behind))
        assert found.tolist() == wanted and found.dtype == torch.int64


@SETS
def test_tree_plan_matches_a_walk_to_the_root(ops: Ops) -> None:
    draw = Random(9)
    for width in (1, 2, 6, 63):
        trees = [drawn(draw, draw.randint(1, width)) for _ in range(5)] + [chain(width), chain(width)]
        slots = [*range(7, 1, -1), -1]  # the last request is idle
        table = [[*tree, *[55] * (width - len(tree))] for tree in trees]
        parents, count = torch.tensor(table, device=HERE), ints(*map(len, trees))
        found = ops.plan_tree(parents=parents, slots=ints(*slots), count=count)
        wanted: dict[str, list[list[int]]] = {"ancestors": [], "depth": [], "inner": [], "before": []}
        for tree, slot in zip(trees, slots, strict=True):
            there = range(len(tree) if slot >= 0 else 0)
            pad = [-1] * (width - len(there))
            paths = [path(tree, node) for node in there]
            wanted["ancestors"].append([sum(1 << n for n in nodes) for nodes in paths] + [0] * len(pad))
            wanted["depth"].append([len(nodes) - 1 for nodes in paths] + [0] * len(pad))
            wanted["inner"].append([slot if node in tree else -1 for node in there] + pad)
            wanted["before"].append([tree[node] for node in there] + pad)
        assert {name: tensor.tolist() for name, tensor in found._asdict().items()} == wanted
        assert all(tensor.dtype == torch.int64 for tensor in found)


@SETS
def test_node_has_a_separate_entry_and_the_position_of_its_depth(ops: Ops) -> None:
    """Window of slot 2 at length 6: nodes at 6, 7, 8 of depths 0, 1, 1; then the head's row of node 2, at 6 + 1."""
    table = torch.arange(1, 13, device=HERE).view(3, 4)
    given: dict[str, Any] = {"length": ints(0, 0, 6), "table": table, "page_size": 2}
    target = ops.place_rows(slots=ints(2, -1), begin=ints(1, 5), count=ints(3, 1), rows=6, shift=0, lead=0,
                            depth=ints(9, 0, 1, 1, 9, 9), **given)
    assert lists(target) == [[0, 6, 7, 7, 0, 0], [-1, 24, 25, -1, -1, -1], [6, 0], [3, 0], [3, -1]]
    head = ops.place_rows(slots=ints(2), begin=ints(0), count=ints(1), rows=1, shift=1, lead=1, depth=ints(1), **given)
    assert lists(head) == [[6], [25], [5], [1], [0]]


@SETS
def test_own_and_forced_paths_of_chains_and_trees_end_at_their_caps(ops: Ops) -> None:
    """A path goes to the lowest child with the pick. Without caps the bonus may be forced, too."""
    draw, cut = Random(12), 0
    for trees, capped in ([(True, False)] * 20 + [(True, True), (False, True)] * 24):
        width = draw.randint(1, 8)
        shapes = [(drawn if trees else lambda _, count: chain(count))(draw, draw.randint(1, width)) for _ in range(6)]
        window, picks = ([[draw.randint(0, 2 - capped) for _ in range(width)] for _ in shapes] for _ in range(2))
        count = [*(len(shape) for shape in shapes[:-1]), 0]
        last = [draw.choice((-1, draw.randrange(max(1, many)))) for many in count]
        caps = [draw.randint(-1, max(many, 1) - 1) if capped else -1 for many in count]
        bonus = [-1 if capped else draw.choice((-1, 9)) for _ in count]
        table = [[*tree, *[44] * (width - len(tree))] for tree in shapes]
        strided = torch.tensor([[cap, 9] for cap in caps], device=HERE)
        found = ops.accept(
            window=torch.tensor(window, device=HERE), picks=torch.tensor(picks, device=HERE), count=ints(*count),
            forced_last=ints(*last), forced_bonus=ints(*bonus), **({"caps": strided[:, 0]} if capped else {}),
            **({"parents": torch.tensor(table, device=HERE)} if trees else {}),
        )  # fmt: skip
        for b, (tree, tokens, said) in enumerate(zip(shapes, window, picks, strict=True)):
            answer = [tensor[b].tolist() for tensor in found]
            if not count[b]:
                assert answer == [0, 0, [-1] * width, 0, 0, 0, 0, [0] * width]
                continue
            limit = None if caps[b] < 0 else caps[b]
            own = greedy(tokens[: len(tree)], tree, said, limit)
            whole = path(tree, last[b]) if last[b] >= 0 else [0, *greedy(tokens[: len(tree)], tree, said).nodes]
            nodes = whole if limit is None else whole[: 1 + limit]
            cut += len(nodes) < len(whole)
            after = said[nodes[-1]] if bonus[b] < 0 else bonus[b]
            pad = width - len(nodes)
            assert answer == [
                len(nodes) - 1, len(nodes), nodes + [-1] * pad, nodes[-1], after, len(own.nodes), own.bonus,
                [*(tokens[node] for node in nodes[1:]), after, *[0] * pad],
            ]
    assert cut > 12


@SETS
def test_entries_of_a_path_become_contiguous(ops: Ops) -> None:
    draw = Random(11)
    for paged in (True, False):
        trees = [drawn(draw, 6), drawn(draw, 4), chain(6), drawn(draw, 6)]
        slots, before, size = [3, 1, 2, -1], [5, 9, 3, 0], 4 if paged else 7
        nodes = [path(tree, draw.randrange(len(tree))) for tree in trees]
        table = torch.tensor([[99] * 4, [2, 7, 12, 1], [4, 9, 3, 8], [11, 5, 6, 10]], device=HERE) if paged else None
        plan = ops.plan_path(
            accept_index=torch.tensor([[*path_, *[-1] * (6 - len(path_))] for path_ in nodes], device=HERE),
            slots=ints(*slots), before=ints(*before), size=size, table=table,
        )
        pool = torch.arange(13 * size * 2, device=HERE).view(13, size, 2)
        wanted = pool.clone()

        def spot(slot: int, place: int, table: torch.Tensor | None = table, size: int = size) -> tuple[int, int]:
            return (slot if table is None else int(table[slot, place // size])), place % size

        for slot, length, taken in list(zip(slots, before, nodes, strict=True))[:3]:
            for j, node in enumerate(taken):
                wanted[spot(slot, length + j)] = pool[spot(slot, length + node)]
        assert bool((plan.source[2:] == -1).all()), "a chain moves nothing"
        ops.move_rows(pool=pool, source=plan.source, target=plan.target)
        assert torch.equal(pool, wanted)


class NoHostRead(TorchDispatchMode):
    """Fails on every ATen call whose answer the host must wait for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.__name__.split(".")[0] not in ("_local_scalar_dense", "nonzero", "masked_select"), str(func)
        if func.__name__.startswith("index"):
            indices = args[1] if isinstance(args[1], list | tuple) else ()
            assert not any(index is not None and index.dtype == torch.bool for index in indices), "a mask is read"
        return func(*args, **(kwargs or {}))


def test_plain_integer_ops_do_not_wait_for_the_host() -> None:
    cases = [case for case in INDEX if case.op in ("place_rows", "choose", "advance", "shift")]
    for case in cases:
        call = case.build(HERE)
        with NoHostRead():
            getattr(PLAIN, case.op)(**call.inputs)
    window, count, tree = ints(9, 1, 2, 3).view(2, 2), ints(2, 0), ints(-1, 0, -1, 0).view(2, 2)
    with NoHostRead():
        PLAIN.accept(window=window, picks=window, count=count, forced_last=count, forced_bonus=count)
        PLAIN.select(x=window, index=count - 1)
        PLAIN.accept(window=window, picks=window, count=count, forced_last=count, forced_bonus=count, parents=tree)
        plan = PLAIN.plan_tree(parents=tree, slots=count, count=count)
        PLAIN.plan_path(accept_index=window, slots=count, before=count, size=2)
        PLAIN.place_rows(**GIVEN["place_rows"], depth=plan.depth.flatten()[:3])
    with pytest.raises(AssertionError, match="a mask is read"), NoHostRead():
        window[window > 1]


def test_an_idle_advance_changes_no_byte() -> None:
    idle = next(case for case in INDEX if str(case) == "advance-idle")
    for ops in (PLAIN, TRITON):
        outcome = serve(ops, idle, HERE)
        assert torch.equal(outcome.pools["length"].raw, outcome.before["length"])


GIVEN: dict[str, dict[str, Any]] = {
    "place_rows": {"slots": ints(1, 3), "begin": ints(0, 2), "count": ints(2, 1), "rows": 3, "length": ints(0, 4, 0, 2),
                   "table": ints(*range(8)).view(4, 2), "page_size": 4, "shift": -1},
    "advance": {"length": ints(0, 4, 0, 2), "slots": ints(1, -1), "by": ints(2, -1)},
    "choose": {"own": ints(1, 2), "forced": ints(-1, 2)},
    "shift": {"tokens": ints(4, 5, 6), "begin": ints(0, 2), "count": ints(2, 1), "behind": ints(7, 8)},
    "accept": {"window": ints(1, 2, 3, 4).view(2, 2), "picks": ints(1, 2, 3, 4).view(2, 2), "count": ints(2, 0),
               "forced_last": ints(1, -1), "forced_bonus": ints(5, -1), "parents": ints(-1, 0, 7, 8).view(2, 2)},
    "plan_tree": {"parents": ints(-1, 0, 0, -1, 7, 7).view(2, 3), "slots": ints(3, 1), "count": ints(3, 1)},
    "plan_path": {"accept_index": ints(0, 2, 3, 0, -1, -1).view(2, 3), "slots": ints(3, 1), "before": ints(5, 6),
                  "size": 4},
    "move_rows": {"pool": ints(*range(20)).view(5, 4), "source": ints(9, 10, 13, -1).view(2, 2),
                  "target": ints(8, 9, 12, -1).view(2, 2)},
}
NODES = {"depth": ints(0, 1, 0), "lead": 1, "shift": 0}


@pytest.mark.parametrize("op", sorted(GIVEN))
def test_sound_call_is_not_reported(op: str) -> None:
    assert _broken(op) == []


@pytest.mark.parametrize(("op", "change", "sentence"), [
    ("place_rows", {"slots": ints(1, 4)}, "slots run from 1 to 4, there are 4"),
    ("place_rows", {"slots": ints(0, 3)}, "slots name slot 0, which is reserved"),
    ("place_rows", {"slots": ints(3, 3)}, "slots: two requests would write the same place"),
    ("place_rows", {"begin": ints(0, 1)}, "two requests share a row"),
    ("place_rows", {"rows": 2}, "rows 0 to 2 of 2 are named"),
    ("place_rows", {"shift": -5}, "a row would be at position -3"),
    ("place_rows", {"begin": ints(0, 2).int()}, "begin are torch.int32, not int64"),
    ("place_rows", NODES | {"length": ints(0, 0, 0, 2)}, "a row would be at position -1"),
    ("place_rows", NODES | {"depth": ints(0, 1)}, "depth is (2,), (3,) fits"),
    ("place_rows", NODES | {"depth": ints(0, -1, 0)}, "depth run from -1 to 0"),
    ("advance", {"by": ints(-2, 1)}, "a length would shrink by 2"),
    ("advance", {"slots": ints(1, 1)}, "slots: two requests would write the same place"),
    ("choose", {"forced": ints(1)}, "own is (2,), forced is (1,)"),
    ("choose", {"own": ints(1, 2).int()}, "own are torch.int32, not int64"),
    ("shift", {"begin": ints(0, 1)}, "two requests share a row"),
    ("shift", {"count": ints(2, 2)}, "rows 0 to 3 of 3 are named"),
    ("shift", {"behind": ints(7)}, "1 tokens follow 2 requests"),
    ("shift", {"tokens": ints(4, 5, 6).int()}, "tokens are torch.int32, not int64"),
    ("accept", {"count": ints(3, 0)}, "count run from 0 to 3, there are 3"),
    ("accept", {"caps": ints(2, -1)}, "a cap is above the number of drafts of its window"),
    ("accept", {"caps": ints(1, -1).int()}, "caps are torch.int32, not int64"),
    ("accept", {"forced_last": ints(2, -1)}, "a node is forced that the window does not have"),
    ("accept", {"forced_bonus": ints(2, -1).int()}, "forced_bonus are torch.int32, not int64"),
    ("accept", {"parents": ints(-1, 1, 0, 0).view(2, 2)}, "node 1 continues 1, which is no node before it"),
    ("accept", {"parents": ints(-1, 0).view(2, 1)}, "parents is (2, 1), (2, 2) fits"),
    ("plan_tree", {"parents": ints(-1, 0, -1, -1, 7, 7).view(2, 3)}, "node 2 continues -1"),
    ("plan_tree", {"parents": ints(*range(-1, 127)).view(2, 64)}, "a window has 64 nodes, at most 63 have a bit"),
    ("plan_tree", {"parents": ints(-1, 0, 0, -1, 7, 7).int().view(2, 3)}, "parents are torch.int32, not int64"),
    ("plan_tree", {"count": ints(4, 1)}, "count run from 1 to 4, there are 4"),
    ("plan_tree", {"slots": ints(3, 3)}, "slots: two requests would write the same place"),
    ("plan_path", {"accept_index": ints(0, 2, 1, 0, -1, -1).view(2, 3)}, "a path does not rise from the root"),
    ("plan_path", {"accept_index": ints(1, 2, 3, 0, -1, -1).view(2, 3)}, "a path does not rise from the root"),
    ("plan_path", {"before": ints(5, 6).int()}, "before are torch.int32, not int64"),
    ("plan_path", {"slots": ints(0, 1)}, "slots name slot 0, which is reserved"),
    ("move_rows", {"target": ints(10, 9, 12, -1).view(2, 2)}, "an entry is written over before it is read"),
    ("move_rows", {"target": ints(8, 12, 12, -1).view(2, 2)}, "target: two requests would write the same place"),
    ("move_rows", {"target": ints(8, 9, 3, -1).view(2, 2)}, "a target lies in unit 0, which is reserved"),
    ("move_rows", {"target": ints(8, 9, 12, 14).view(2, 2)}, "an entry has one end alone"),
    ("move_rows", {"source": ints(9, 10, 20, -1).view(2, 2)}, "source run from -1 to 20, there are 20"),
    ("move_rows", {"target": ints(8, 9).view(2, 1)}, "target is (2, 1), (2, 2) fits"),
])  # fmt: skip
def test_broken_contract_is_named(op: str, change: dict[str, Any], sentence: str) -> None:
    assert any(line.startswith(f"{op}: ") and sentence in line for line in _broken(op, **change))


def test_a_result_of_the_wrong_length_is_named() -> None:
    found: list[str] = []
    sound = PLAIN.place_rows(**GIVEN["place_rows"])
    lazy = replace(PLAIN, place_rows=lambda **given: sound._replace(count=sound.positions[:1].clone()))
    around(lazy, unseen, contracts(found.append)).place_rows(**GIVEN["place_rows"])
    assert found == ["place_rows: rows that came back: 1; due: 2"]


def _broken(op: str, **change: Any) -> list[str]:
    """The report about a call; a sound call runs instead of a broken one."""
    found: list[str] = []
    silent: dict[str, Any] = {op: lambda **given: getattr(PLAIN, op)(**GIVEN[op])}
    getattr(around(replace(PLAIN, **silent), unseen, contracts(found.append)), op)(**GIVEN[op] | change)
    return found

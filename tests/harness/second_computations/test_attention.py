"""Explanations of attention, of its positions, and of fitted numbers, each computed again from its definition.

Leaves out: norms of queries and keys (`test_norms.py`), and whole runs (`test_mistakes.py`).
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.diagnose.mistakes import fitted_constants, rotary_and_visible_positions
from instep.oracle.single_layer_run import LayerWork
from instep_reference.attention import AttentionMemory
from instep_reference.contract.declared_rounding import Blocked
from instep_reference.gdn import GdnMemory
from instep_reference.weights import LatentWeights
from support.inputs.small_cases import NONE, SmallCase, changed_mixer, drawn, layer, same, value, yields

T = 3  # rows
THETAS = (1e4, 1e5, 5e5, 1e6, 1e7)


def turned(x: torch.Tensor, by: list[int], width: int, theta: float, begin: int = 0) -> torch.Tensor:
    """Pairs of channels (i, i + width / 2) from `begin` on, as complex numbers that turn by theta^(-2i / width)."""
    found, half = x.clone(), width // 2
    for row, position in enumerate(by):
        for i in range(half):
            one, other = begin + i, begin + i + half
            angle = torch.tensor(position * theta ** (-2 * i / width), dtype=torch.float64)
            at = torch.complex(x[row, :, one], x[row, :, other]) * torch.polar(torch.ones_like(angle), angle)
            found[row, :, one], found[row, :, other] = at.real, at.imag
    return found


@pytest.mark.parametrize("component", ["query", "key"])
@pytest.mark.parametrize(("latent", "rotary"), [(0, 4), (0, 8), (8, 4), (8, 6)])
@pytest.mark.parametrize("parents", [None, (-1, 0, 0)])
def test_queries_and_keys_are_at_other_positions(component: str, latent: int, rotary: int, parents: Any) -> None:
    """Rows from position 5 on, two heads of 8 channels; with latents the last channels turn. Row 2 may be a node."""
    right, projected, theta = drawn(T, 2, 8), drawn(T, 2, 9), 1e5
    config = value(rotary_dim=rotary, rope_theta=theta, latent=latent, head_dim=8)
    case = SmallCase(component, config, rows={"projected": projected}, right=right)
    case.piece = SimpleNamespace(work=LayerWork("trunk", 0, right, 5, parents=parents))
    begin, at = (8 - rotary if latent else 0), [5, 6, 6 if parents else 7]

    def moved(*by: int) -> torch.Tensor:
        return turned(right, [*by], rotary, theta, begin)

    due: list[Any] = [("is placed 1 position too late", moved(1, 1, 1)),
                      ("is placed 1 position too early", moved(-1, -1, -1)),
                      ("is placed 2 positions too late", moved(2, 2, 2)),
                      ("is placed 2 positions too early", moved(-2, -2, -2)),
                      ("is not rotated: every row is at position 0", moved(*(-x for x in at))),
                      ("all rows are at the position of the first", moved(*(5 - x for x in at))),
                      ("positions begin at 0 again", moved(-5, -5, -5)),
                      ("is rotated backwards", moved(*(-2 * x for x in at)))]  # fmt: skip

    def with_config(says: str, **changed: Any) -> Any:
        return says, {"changes": None, "weights": replace(case.weights, config=replace(config, **changed))}

    due += [with_config(f"is rotated with a theta of {other:g}; it is 100000", rope_theta=other)
            for other in THETAS if other != theta]  # fmt: skip
    if latent and component == "query":
        due += [("turns at its first channels, not at its last", turned(projected[..., :8], at, rotary, theta))]
    for width in {(0, 4): (8, 2), (0, 8): (4, 2), (8, 4): (2,), (8, 6): ()}[latent, rotary]:
        due += [with_config(f"rotates {width} channels, not {rotary}", rotary_dim=width)]
    assert yields(rotary_and_visible_positions.positions(case), due)
    one = [("is rotated by the number of its node, not by its depth", moved(0, 0, 1))]
    assert yields(rotary_and_visible_positions.trees(case), one if parents else ())
    case.rows = {}
    left = [each for each in due if "first channels" not in each[0]]
    assert yields(rotary_and_visible_positions.positions(case), left)
    for name, other in (("config", replace(config, rotary_dim=0)), ("piece", None), ("component", "value")):
        before = getattr(case, name)
        setattr(case, name, other)
        assert yields(rotary_and_visible_positions.positions(case), ())
        assert name == "config" or yields(rotary_and_visible_positions.trees(case), ())
        setattr(case, name, before)


def test_rows_of_a_tree_continue_from_their_parent() -> None:
    for component in ("mixed", "core", "update", "attended", "q"):
        case = SmallCase(component)
        case.piece = SimpleNamespace(work=LayerWork("trunk", 0, drawn(T, 2), 5, parents=(-1, 0, 0)))
        assert yields(rotary_and_visible_positions.trees(case), [
            ("continues from the row before, not from its parent: the tree is taken for a chain",
             {"changes": None, "weights": None, "parents": None})] if component != "q" else [])  # fmt: skip


def test_channels_of_latents_that_turn_are_stored_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 heads of 6 channels and a gate; the last 4 channels turn, as the last 4 rows of `down` after 3 latents do."""
    monkeypatch.setattr(rotary_and_visible_positions, "with_mixer", changed_mixer)
    query, down = drawn(14, 2), drawn(7, 2)
    config = SimpleNamespace(heads=2, head_dim=6, rotary_dim=4, latent=3)
    layers = [layer(LatentWeights(query, down, NONE, NONE, NONE))]
    one = [0, 1, 2, 4, 3, 5, 6]
    due = [("has the channels that turn in their stored order, in pairs",
            {"query": query[one + [7 + number for number in one]], "down": down[[0, 1, 2, 3, 5, 4, 6]]})]  # fmt: skip
    for component in ("projected", "key_raw"):
        case = SmallCase(component, config, layers)
        case.piece = SimpleNamespace(work=LayerWork("trunk", 0, drawn(T, 2), 0))
        assert yields(rotary_and_visible_positions.positions(case), due)
        case.layers = [layer()]
        assert yields(rotary_and_visible_positions.positions(case), ())
        case.layers, case.config = layers, SimpleNamespace(**vars(config) | {"latent": 0})
        assert yields(rotary_and_visible_positions.positions(case), ())


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_attention_sees_other_positions_or_requests(length: int) -> None:
    """Request "b" has two positions, "c" none, and "d" keeps nothing in this layer."""
    keys, values = drawn(length, 1, 2), drawn(length, 1, 3) + 1
    theirs = drawn(2, 1, 2) + 5, drawn(2, 1, 3) + 6
    case = SmallCase("attended")
    case.piece = SimpleNamespace(work=LayerWork("trunk", 0, drawn(1, 2), length, AttentionMemory(keys, values)))
    case.context.subject.before = {name: SimpleNamespace(keys=k, values=v, block_keys={}) for name, k, v in (
        ("a", {0: keys}, {0: values}), ("b", {0: theirs[0]}, {0: theirs[1]}), ("c", {0: keys[:0]}, {0: values[:0]}),
        ("d", {}, {}))}  # fmt: skip
    every = list(range(length))
    due: list[tuple[str, Any, Any]] = [("sees nothing from before these rows", keys[[]], values[[]])]
    for few, words in ((1, "position"), (2, "2 positions")):
        if few < length:
            for says, at in ((f"does not see the last {words} before these rows", every[:-few]),
                             (f"does not see the first {words}", every[few:])):  # fmt: skip
                due += [(says, keys[at], values[at])]
    late, empty = every[1:] + every[:1], [torch.cat((x, 0 * x[:1])) for x in (keys, values)]
    if length:
        due += [("sees the last position before these rows twice", keys[[*every, -1]], values[[*every, -1]]),
                ("sees one position more, which is empty", empty[0], empty[1])]
    other = [torch.stack([(its if at < 2 else own)[at] for at in every]) if length else own
             for its, own in zip(theirs, (keys, values), strict=True)]  # fmt: skip
    due += [('reads the keys and values of request "b"', other[0], other[1]),
            ('reads the values of request "b" under its own keys', keys, other[1]),
            ("reads keys and values one position too late", keys[late], values[late]),
            ("reads values one position too late, with the right keys", keys, values[late])]  # fmt: skip
    found = [*rotary_and_visible_positions.positions(case)]
    if not length:
        assert not found
        return
    assert [one.sentence for one in found] == [says for says, *_ in due]
    for one, (says, k, v) in zip(found, due, strict=True):
        memory: Any = one.wrong["memory"]  # type: ignore[call-overload]
        assert same(memory.keys, k) and same(memory.values, v), says
    case.piece = SimpleNamespace(work=LayerWork("trunk", 0, drawn(1, 2), 0, None))
    assert yields(rotary_and_visible_positions.positions(case), ())


# -- fitted numbers --------------------------------------------------------------------------------------------


EPS, CORE_EPS = 1e-3, 0.02
UNNORMED: Any = SimpleNamespace(recurrence=SimpleNamespace(inputs="selective"), latent=0)


@pytest.mark.parametrize(("component", "eps", "axes"), [
    ("normed", EPS, (2,)), ("gated", CORE_EPS, (2,)), ("value", 1e-6, (2,)), ("q", 1e-6, (2,)), ("k", 1e-6, (2,)),
    ("query", EPS, (1, 2)), ("key", EPS, (1, 2)), ("query", EPS, (2,))])  # fmt: skip
def test_the_eps_of_a_norm_is_fitted(component: str, eps: float, axes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other sizes, with an eps of 0.5; a row that is twice as large as due would need a negative one."""
    x = drawn(T, 2, 4) * torch.tensor([1.0, 0.1, 3.0])[:, None, None]
    total = x.pow(2).sum(axes, keepdim=True)
    mean = total if component in ("q", "k") else total / (4 if axes == (2,) else 8)
    config = SimpleNamespace(eps=EPS, core_eps=CORE_EPS, row_norms=axes == (1, 2))
    monkeypatch.setattr(fitted_constants, "norm_input", lambda case: x)
    right, found = (x / (mean + each).sqrt() * 3 for each in (eps, 0.5))
    case = SmallCase(component, config, right=right, found=found, granted=torch.full((2, 1), 1e3))
    due = [(f"is normed with an eps of 0.5; it is {eps:.2g}", found, 1e6)]
    assert yields(fitted_constants.fitted(case), due)
    noise = found * (1 + 0.1 * drawn(T, 2, 4))
    case.found, factor = noise, (noise * right).sum(axes, keepdim=True) / right.pow(2).sum(axes, keepdim=True)
    weights = 1 / (mean + eps).pow(2)
    other = float((((mean + eps) / factor**2 - mean) * weights).sum() / weights.sum())
    says = f"is normed with an eps of {other:.2g}; it is {eps:.2g}"
    assert yields(fitted_constants.fitted(case), [(says, right * ((mean + eps) / (mean + other)).sqrt(), 1e6)])
    case.found = right * 2
    assert yields(fitted_constants.fitted(case), ())
    case.found = 0.9999 * x / mean.sqrt() * 3  # a little more than 0
    assert len([*fitted_constants.fitted(case)]) == 1
    for name in ("granted", "piece"):
        case = SmallCase(component, config, right=right, found=found, granted=torch.full((2, 1), 1e3))
        setattr(case, name, None)
        assert yields(fitted_constants.fitted(case), ())


def test_the_scale_of_scores_is_fitted() -> None:
    """Results that are no linear function of the query. A single key leaves nothing to fit."""
    query = drawn(T, 2)
    case = SmallCase("attended", UNNORMED, rows={"query": query}, granted=torch.full((2, 1), 1e9))
    case.again = lambda changes: torch.tanh(changes["query"])
    case.right, case.found = torch.tanh(query), torch.tanh(1.25 * query)
    (one,) = fitted_constants.fitted(case)
    assert one.sentence == "its scores are 1.25 times the right ones, as with 1.8034 for log2(e)" and one.tries == 1e6
    assert torch.allclose(one.wrong, case.found, rtol=1e-6)
    case.found = torch.tanh(1.25 * query) + 0.01 * drawn(T, 2)
    fits = [float((torch.tanh(by * query) - case.found).pow(2).sum()) for by in (1.2, 1.25, 1.3)]
    (one,) = fitted_constants.fitted(case)
    assert float((one.wrong - case.found).pow(2).sum()) <= min(fits)
    case.again = lambda changes: torch.ones(T, 2)
    assert yields(fitted_constants.fitted(case), ())
    case.component = "mixer"
    assert yields(fitted_constants.fitted(case), ())


def test_a_factor_is_fitted_to_the_wrong_blocks_alone() -> None:
    """5 rows of 8: right, off by 3 times the allowance or a little more, twice the right value, and zeros."""
    right = torch.tensor([[4.0] * 8, [2.0] * 8, [1.0] * 8, [0.5, 0.25] * 4, [0.0] * 8], dtype=torch.float64) / 4
    found = right * torch.tensor([1, 1 + 3e-3 - 1e-9, 1 + 3e-3 + 1e-9, 2, 1], dtype=torch.float64)[:, None]
    granted = torch.tensor([[1e-3, 1e-4], [9, 9]], dtype=torch.float64)
    case = SmallCase("hidden", right=right, found=found, granted=granted)
    factor = (8 * (1 + 3e-3 + 1e-9) + 2 * 1.25) / (8 + 1.25)
    assert yields(fitted_constants._factor(case), [(f"is {factor:.8g} times the right value", factor * right, 1e6)])
    case.found = right * (1 + 1e-4)
    assert yields(fitted_constants._factor(case), ())
    case.found = torch.cat((right[:4], right[4:] + 1))
    assert yields(fitted_constants._factor(case), ()), "nothing is a multiple of 0"


@pytest.mark.parametrize("tile", [(4, 3), (None, 3), (4, None)])
def test_tiles_of_a_state_have_other_scales(tile: Any) -> None:
    """Two heads of 6 x 4; tiles are 4 x 3 or the whole of an axis, the last may be smaller, and one has zeros."""
    right, by = drawn(2, 6, 4), torch.ones(2, 6, 4).double()
    rows, columns = tile[0] or 6, tile[1] or 4
    right[1, :rows, :columns] = 0
    by[0, :rows, :columns], by[0, rows:, :columns] = 2, 1.001
    by[1, :rows, columns:] = by[1, rows:, columns:] = 0.5
    by[1, rows:, :columns] = 1.002
    stored = Blocked(torch.float8_e4m3fn, tile)
    case = SmallCase("state", UNNORMED, right=right, found=by * right, granted=torch.full((2, 1), 1e9))
    case.oracle = SimpleNamespace(rounds={"state": stored})
    shown = torch.where((by - 1).abs() > 1e-3, by, 1.0)
    scales = {(head, i // rows, j // columns): float(shown[head, i, j]) for head in range(2) for i in range(6)
              for j in range(4) if right[head, i, j] != 0}  # fmt: skip
    wrong = [each for each in scales.values() if each != 1]
    says = "is read with other scales: the numbers of each tile are {:.3g} to {:.3g} times the right ones"
    due = [(says.format(min(wrong), max(wrong)), shown * right, 10 ** (6 * len(wrong)))]
    assert yields(fitted_constants.fitted(case), due)
    for found in (right, -by * right, torch.where(by == 2, -by, by) * right, torch.where(by == 2, 0, by) * right):
        case.found = found
        assert yields(fitted_constants.fitted(case), ())
    case.found = by * right
    for name, other in (("component", "core"), ("component", "update"), ("oracle", None), (
            "oracle", SimpleNamespace(rounds={})), ("oracle", SimpleNamespace(rounds={"state": torch.float16})),
            ("oracle", SimpleNamespace(rounds={"state": Blocked(torch.float16, None)}))):  # fmt: skip
        before = getattr(case, name)
        setattr(case, name, other)
        assert yields(fitted_constants.fitted(case), ())
        setattr(case, name, before)
    case.right = drawn(40, 1, 1) + 9
    case.found = case.right * (1 + torch.arange(40.0)[:, None, None])
    (one,) = fitted_constants.fitted(case)
    assert one.tries == 10 ** (6 * 39) and torch.allclose(one.wrong, case.found)


@pytest.mark.parametrize(("tall", "explained"), [(3, False), (4, True), (8, True), (None, True)])
def test_read_outs_have_the_scale_of_their_column_of_tiles(tall: int | None, explained: bool) -> None:
    """3 rows of 2 heads with 6 columns, of states [2, 4, 6]; in 4 rows or more a column of a state has one scale."""
    rest, given = drawn(T, 2, 6), drawn(T, 2, 6) + 3
    found = given.clone()
    found[:, 0, 4:] *= 2
    case = SmallCase("core", UNNORMED, right=rest + given, found=rest + found, granted=torch.full((2, 1), 1e9))
    memory = GdnMemory(torch.zeros(1, 1), drawn(2, 4, 6))
    case.piece = SimpleNamespace(work=LayerWork("trunk", 0, drawn(T, 2), 0, memory))
    case.oracle = SimpleNamespace(rounds={"state": Blocked(torch.float8_e4m3fn, (tall, 4))})
    case.again = lambda changes, memory: rest if not memory.state.any() and memory.window.shape == (1, 1) else found
    says = "is read with other scales: the numbers of each tile are 2 to 2 times the right ones"
    assert yields(fitted_constants.fitted(case), [(says, rest + found, 1e6)] if explained else [])


@pytest.mark.parametrize("width", [7, 8])
def test_entries_with_other_scales_are_multiples_of_the_right_ones(width: int) -> None:
    """Each entry has its own factor. Numbers that differ otherwise, or in too few numbers, are no sign of scales."""
    right, narrow = drawn(T, 2, width), Blocked(torch.float8_e4m3fn, (1, None))
    right[..., 3] = 0
    scaled = right.clone()
    scaled[1] *= torch.tensor([0.5, 1.25])[:, None]
    slight = scaled.clone()  # a number is off by as much as may be, for the largest of its entry
    slight[1, 0, 3] += 0.99e-5 * right[1, 0].abs().max()
    noise, less = slight.clone(), scaled.clone()
    noise[1, 0, 3] += 0.02e-5 * right[1, 0].abs().max()
    less[1, 1] = 0
    says = "is read with other scales: the numbers of each entry are {} to {} times the right ones"
    for found, least, most in ((scaled, 0.5, 1.25), (slight, 0.5, 1.25), (noise, 0, 0), (-scaled, 0, 0), (less, 0, 0),
                               (scaled * torch.tensor([1, -1])[:, None], 0, 0)):  # fmt: skip
        for component in ("keys", "values"):
            case = SmallCase(component, right=right, found=found, oracle=SimpleNamespace(rounds={component: narrow}))
            assert yields(fitted_constants.scales_of_entries(case), [
                (says.format(least, most), found)] if least and width == 8 else [])  # fmt: skip
    for given in ({"component": "state"}, {"granted": 1}, {"oracle": None},
                  {"oracle": SimpleNamespace(rounds={"keys": torch.float16})}):  # fmt: skip
        case = SmallCase(**{"component": "keys", "right": right, "found": scaled, "oracle": SimpleNamespace(
            rounds={"keys": narrow, "state": narrow}), **given})  # type: ignore[arg-type]  # fmt: skip
        assert yields(fitted_constants.scales_of_entries(case), ())

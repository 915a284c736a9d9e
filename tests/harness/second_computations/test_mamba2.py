"""All explanations of layers of Mamba2 and of one block, each computed again from the definition of its op.

Leaves out: the recurrence itself (`test_wrong_states.py`), and whole runs (`test_mistakes.py`).
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.diagnose.mistakes import selective_states
from instep.diagnose.mistakes.finding_case import Explanation
from instep.oracle.single_layer_run import LayerWork
from instep_reference.weights import MlpWeights, NopeWeights, ShortConvWeights
from support.inputs.small_cases import (
    NONE,
    SmallCase,
    config_of,
    drawn,
    gdn,
    layer,
    near,
    sigmoid,
    silu,
    softplus,
    yields,
)

T = 3  # rows


def mamba2(component: str, right: Any, rows: dict[str, torch.Tensor], mixer: Any, **given: Any) -> SmallCase:
    config = config_of("selective", conv=("v", "k", "q"), layers=[("mamba2", "mlp")], **given)
    return SmallCase(component, config, [layer(mixer)], rows, right)


def test_only_layers_of_mamba2_have_these_mistakes() -> None:
    case = mamba2("write", drawn(T, 3), {"a": drawn(T, 3)}, gdn(dt_bias=drawn(3)))
    assert len([*selective_states.selective(case)]) == 6
    for name, other in (("piece", None), ("stage", "extend"), ("layers", []), ("component", "core"),
                        ("layers", [layer(ShortConvWeights(NONE, NONE, NONE))])):  # fmt: skip
        before = getattr(case, name)
        setattr(case, name, other)
        assert yields(selective_states.selective(case), ())
        setattr(case, name, before)
    case.config.recurrence.inputs = "normed"
    assert yields(selective_states.selective(case), ())


@pytest.mark.parametrize("component", ["q", "k", "v"])
def test_parts_of_a_group_are_taken_from_other_channels(component: str) -> None:
    """After the conv: x of three heads with 4 channels, then B and C of three groups with 4, K."""
    mixed = drawn(T, 36)
    x, b, c = mixed[:, :12], mixed[:, 12:24], mixed[:, 24:]
    right, names = {"v": x, "k": b, "q": c}[component].reshape(T, 3, 4), {"v": "x", "k": "B", "q": "C"}
    case = mamba2(component, right, {"mixed": mixed}, gdn(), segments=[(3, 4)] * 3)
    due = [(f"is taken from channels in the order {', '.join(order)}",
            mixed[:, 12 * order.index(names[component]) :][:, :12].reshape(T, 3, 4))
           for order in (("B", "C", "x"), ("C", "B", "x"), ("x", "C", "B"))]  # fmt: skip
    if component != "v":
        mine, other, theirs = ("B", "C", c) if component == "k" else ("C", "B", b)
        length = (right * right).sum(2, keepdim=True)
        due = [*((f"has {mine} of the group {word}", wrong) for word, wrong in near(right, 1)),
               (f"is {other}, not {mine}", theirs.reshape(T, 3, 4)),
               ("is normed to length 1, as by the delta rule", right / (length + 1e-6).sqrt()),
               ("has the scale K^-1/2, which the delta rule has", right / 2), *due]  # fmt: skip
    assert yields(selective_states.selective(case), due)
    case.rows = {}
    assert yields(selective_states.selective(case), ())


def test_parts_of_other_widths_follow_each_other() -> None:
    """x has three heads with 5 channels; B and C have two groups with 4."""
    mixed = drawn(T, 31)
    for component, right, begins in (("v", mixed[:, :15].reshape(T, 3, 5), (16, 16, 0)),
                                     ("k", mixed[:, 15:23].reshape(T, 2, 4), (0, 8, 23)),
                                     ("q", mixed[:, 23:].reshape(T, 2, 4), (8, 0, 15))):  # fmt: skip
        case = mamba2(component, right, {"mixed": mixed}, gdn(), segments=[(3, 5), (2, 4), (2, 4)])
        *others, one, two, three = selective_states.selective(case)
        assert len(others) == (0 if component == "v" else 5)
        if component != "v":
            begin = 23 if component == "k" else 15
            assert torch.equal(others[2].wrong, mixed[:, begin : begin + 8].reshape(T, 2, 4))
        for found, begin in zip((one, two, three), begins, strict=True):
            assert torch.equal(found.wrong, mixed[:, begin : begin + right[0].numel()].reshape(right.shape))


def test_steps_and_decays_are_those_of_other_heads_or_gates() -> None:
    """Two rows of three heads, one of whose steps is below the clamp."""
    a, stored, bias = drawn(2, 3), drawn(3), drawn(3) + 1
    a[1, 2] = -9
    rate, step = stored.exp(), softplus(a + bias)
    mixer, clamped = gdn(A_log=stored, dt_bias=bias), torch.where(step < 1e-3, 1e-3, step)
    assert (clamped != step).any()
    due = [("is made without the step: a head forgets at one rate", torch.stack([-rate, -rate])),
           ("is made with steps of at least 0.001", -rate * clamped),
           ("is made with the magnitude of A_log, not with its exponential", -stored.abs() * step)]  # fmt: skip
    for (word, other), (_, others_rate) in zip(near(step, 1), near(rate, 0), strict=True):
        due += [(f"is made with the step of the head {word}", -rate * other),
                (f"is made with A_log of the head {word}", -others_rate * step)]  # fmt: skip
    case = mamba2("log_decay", -rate * step, {"a": a}, mixer)
    assert yields(selective_states.selective(case), due)
    gates = mamba2("write", step, {"a": a}, mixer)
    assert yields(selective_states.selective(gates), [
        ("is 1 for all tokens: values are written without the step", torch.ones(2, 3)),
        ("is made with a sigmoid, not with a softplus", sigmoid(a + bias)), ("is made without dt_bias", softplus(a)),
        ("is at least 0.001", clamped),
        *((f"is the step of the head {word}", other) for word, other in near(step, 1))])  # fmt: skip
    for one in (case, gates):
        one.rows = {}
        assert yields(selective_states.selective(one), ())


def test_a_conv_lacks_its_bias_or_has_a_moved_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bias, right = drawn(4), drawn(T, 4)
    case = mamba2("mixed", right, {}, gdn(conv_bias=bias))
    monkeypatch.setattr(selective_states, "with_mixer", lambda case, says, conv_bias: [
        Explanation(says, right if conv_bias is None else conv_bias)])  # fmt: skip
    assert yields(selective_states.selective(case), [
        ("is convolved without bias", right),
        *((f"is convolved with the bias of the channel {word}", other) for word, other in near(bias, 0)),
        ("has its bias added after silu", right + bias)])  # fmt: skip
    case.layers = [layer(gdn())]
    assert yields(selective_states.selective(case), ())


def test_read_outs_get_other_parts_of_values_and_other_gates() -> None:
    """Two rows of four heads with three channels, in two groups."""
    x, z, norm, eps = drawn(2, 4, 3), drawn(2, 4, 3) + 1, drawn(12), 0.1
    opened = x * silu(z)

    def normed(rows: torch.Tensor, groups: int, eps: float = eps) -> torch.Tensor:
        each = rows.reshape(2, groups, 12 // groups)
        return (each / (each.pow(2).sum(2, keepdim=True) * groups / 12 + eps).sqrt()).reshape(2, 12) * norm

    each = opened.reshape(2, 2, 6)
    due = [("is normed before its gate, not after it", normed(x, 2) * silu(z).reshape(2, 12)),
           ("is normed over all groups together", normed(opened, 1)),
           ("is normed head by head, not group by group", normed(opened, 4)),
           ("is normed by the sum of a group's squares over the channels of one head, not over those of the group",
            (each / (each.pow(2).sum(2, keepdim=True) / 3 + eps).sqrt()).reshape(2, 12) * norm),
           ("is gated by a sigmoid of z, not by silu", normed(x * sigmoid(z), 2)), ("is not gated by z", normed(x, 2)),
           ("is normed without eps", normed(opened, 2, 0)),
           ("is gated, and not normed", opened.reshape(2, 12) * norm)]  # fmt: skip
    case = mamba2("gated", None, {"skip": x, "z": z}, gdn(norm=norm), core_eps=eps, key_heads=2, value_heads=4)
    assert yields(selective_states.selective(case), [(says, wrong.reshape(2, 4, 3)) for says, wrong in due])
    for name in ("skip", "z"):
        case.rows = {name: x}
        assert yields(selective_states.selective(case), ())
    core, v, gate, skip = drawn(2, 4, 3), drawn(2, 4, 3) + 1, drawn(2, 4), drawn(4) + 1
    rows, by = {"core": core, "v": v, "write": gate}, skip[None, :, None]
    due = [("lacks D v", core), ("adds v, not D v", core + v), ("has D v of the opposite sign", core - by * v),
           *((f"has the D of the head {word}", core + other[None, :, None] * v) for word, other in near(skip, 0)),
           ("adds D dt v, not D v", core + by * gate.reshape(2, 4, 1) * v)]  # fmt: skip
    case = mamba2("skip", None, rows, gdn(skip=skip))
    assert yields(selective_states.selective(case), due)
    case.rows = {"core": core, "v": v}
    assert yields(selective_states.selective(case), due[:-1])
    for own, weight in (({"core": core}, skip), ({"v": v}, skip), (rows, None)):
        case.rows, case.layers = own, [layer(gdn(skip=weight))]
        assert yields(selective_states.selective(case), ())


@pytest.mark.parametrize("component", ["z", "qkv", "a"])
def test_parts_of_a_projection_are_cut_in_another_order(component: str) -> None:
    """The stored projection has 4 rows of z, then 5 of x B C, then 2 of dt."""
    z, qkv, a, normed = drawn(4, 3), drawn(5, 3), drawn(2, 3), drawn(T, 3)
    stored, size = torch.cat((z, qkv, a)), {"z": 4, "qkv": 5, "a": 2}[component]
    begins = {"x B C, z, dt": {"qkv": 0, "z": 5, "a": 9}, "dt, z, x B C": {"a": 0, "z": 2, "qkv": 6},
              "z, dt, x B C": {"z": 0, "a": 4, "qkv": 6}}  # fmt: skip
    shape = (T, 2, 2) if component == "z" else (T, size)
    case = mamba2(component, torch.zeros(shape), {"normed": normed}, gdn(z=z, qkv=qkv, a=a))
    assert yields(selective_states.selective(case), [
        (f"is made with rows of the projection as if its order was {order}",
         torch.stack([normed @ stored[begin[component] + row] for row in range(size)], 1).reshape(shape))
        for order, begin in begins.items()])  # fmt: skip
    case.rows = {}
    assert yields(selective_states.selective(case), ())


def test_projections_of_attention_are_confused_where_their_shapes_agree() -> None:
    normed = drawn(T, 3)
    mixer = NopeWeights(drawn(4, 3), drawn(2, 3), drawn(2, 3) + 1, NONE)
    for component, other in (("query", None), ("key", "value"), ("value", "key"), ("mixed", None)):
        right = torch.zeros(T, 2, 2 if component == "query" else 1)
        case = SmallCase(component, config_of(layers=[(1, 2)]), [layer(mixer)], {"normed": normed}, right)
        assert yields(selective_states.selective(case), [] if other is None else [
            (f"is made with the matrix of the {other}", (normed @ getattr(mixer, other).T).reshape(T, 2, 1))])
        case.rows = {}
        assert yields(selective_states.selective(case), ())


def test_a_block_alone_has_another_activation_or_no_residual() -> None:
    """A squared ReLU of four channels. A layer with two blocks has nothing of this."""
    x, rows, made = drawn(T, 3), drawn(T, 3) + 1, drawn(T, 3) + 2
    up, down, gate = drawn(4, 3), drawn(3, 4), drawn(4, 3) + 1
    config = config_of(layers=[("mlp",)])
    case = SmallCase("mlp", config, [layer(mlp=MlpWeights(None, up, down))], {"post_normed": x})
    case.piece = SimpleNamespace(work=LayerWork("trunk", 0, rows, 0))
    inner, plain = x @ up.T, rows @ up.T
    due = [("has a ReLU that is not squared", torch.where(inner > 0, inner, 0) @ down.T),
           ("is squared before its ReLU", inner.pow(2) @ down.T),
           ("has a silu, not a squared ReLU", silu(inner) @ down.T),
           ("reads the rows without their norm", torch.where(plain > 0, plain, 0).pow(2) @ down.T)]  # fmt: skip
    assert yields(selective_states.selective(case), due)
    config.layers = [("gdn", "mlp")]
    assert yields(selective_states.selective(case), ())
    config.layers, case.rows = [("mlp",)], {}
    assert yields(selective_states.selective(case), ())
    case.rows = {"post_normed": x}
    for mlp in (MlpWeights(gate, up, down), None):
        case.layers = [layer(mlp=mlp)]
        assert yields(selective_states.selective(case), ())
    case.layers = [layer(mlp=MlpWeights(None, up, down))]
    for component in ("core", "hidden"):
        for name, norm in (("mixer", "normed"), ("mlp", "post_normed")):
            case.component, case.rows = component, {name: made, norm: x}
            assert yields(selective_states.selective(case), [
                (f"adds {name} to the normed rows", x + made), ("lacks the residual", made),
                ("lacks what the layer adds", rows)] if component == "hidden" else [])  # fmt: skip
            for only in (name, norm):
                case.rows = {only: made}
                assert yields(selective_states.selective(case), ())
    case.rows, case.piece = {"mlp": made, "post_normed": x}, SimpleNamespace(work=None)
    assert yields(selective_states.selective(case), ())

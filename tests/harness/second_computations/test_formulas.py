"""All explanations of formulas that are almost right, each computed again from the definition of its op.

Leaves out: norms (`test_norms.py`), Mamba2 (`test_mamba2.py`), and whole runs (`test_mistakes.py`).
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.diagnose.mistakes import constants
from instep.oracle.single_layer_run import LayerWork
from instep_reference.weights import LatentWeights, LightningWeights, ShortConvWeights
from support.inputs.small_cases import (
    NONE,
    SmallCase,
    changed_mixer,
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
LOG2E = 1.4426950408889634


@pytest.fixture(autouse=True)
def _changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "with_mixer", changed_mixer)


# -- a recurrence ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("component", "mine", "scales"), [
    ("q", 0, {"lacks the scale K^-1/2": 3.0, "has the scale K^-1/2 twice": 1 / 3}),
    ("k", 1, {"has the scale K^-1/2, which is q's": 1 / 3}), ("v", 2, {})])  # fmt: skip
def test_segments_of_the_conv_have_other_scales_and_places(component: str, mine: int, scales: Any) -> None:
    """Two heads: q and k with 3 channels each, and v with 2. K is 9 for the scale alone."""
    mixed, right, names = drawn(T, 16), drawn(T, 2, 3), ("q", "k", "v")
    config = config_of(segments=[(2, 3), (2, 3), (2, 2)], key_dim=9)
    case = SmallCase(component, config, [layer()], {"mixed": mixed}, right)
    begins, width = (0, 6, 12), (3, 3, 2)[mine]
    by = {f"at the segment of {name} in": begins[other] - begins[mine] for other, name in enumerate(names)
          if other != mine}  # fmt: skip
    by |= {"one channel too early in": -1, "one channel too late in": 1}
    by |= {"one head too early in": -width, "one head too late in": width}
    due: list[Any] = [(says, right * scale) for says, scale in scales.items()]
    due += [(f"is read {says} the conv's channels", {"changes": {"mixed": torch.stack(
        [mixed[:, (at + step) % 16] for at in range(16)], 1)}, "weights": None}) for says, step in by.items()]
    assert yields(constants.constants(case), due)
    case.config.recurrence.inputs = "selective"
    assert yields(constants.constants(case), due if component == "v" else ()), "`selective_states.py` has these"
    case.config.recurrence.inputs, case.rows = "normed", {}
    assert yields(constants.constants(case), due[: len(scales)])
    case.piece = None
    assert yields(constants.constants(case), ())
    case.piece, case.component, case.rows = object(), "core", {"mixed": mixed}
    assert yields(constants.constants(case), ())


@pytest.mark.parametrize("component", ["q", "k", "v"])
def test_rows_of_lightning_attention_pass_a_silu(component: str) -> None:
    """Two heads with 4 channels of q, then of k, then of v."""
    qkv, right, others = drawn(T, 2, 12), drawn(T, 2, 4), [name for name in "qkv" if name != component]
    case = SmallCase(component, config_of("projected", key_dim=4, conv=()), [layer()], {"qkv": qkv}, right)
    begin = {"q": 0, "k": 4, "v": 8}
    flat, at = qkv.reshape(T, 24), begin[component]
    mine = qkv[..., at : at + 4]
    assert yields(constants.constants(case), [
        ("has the scale K^-1/2, as in other attention", right / 2), ("passes no silu", mine),
        ("passes a sigmoid, not a silu", sigmoid(mine)),
        *((f"is made of the part of {name}", silu(qkv[..., begin[name] : begin[name] + 4])) for name in others),
        ("is read as if the parts of all heads lay together",
         silu(torch.stack([flat[:, 2 * at : 2 * at + 4], flat[:, 2 * at + 4 : 2 * at + 8]], 1)))])  # fmt: skip
    case.rows = {}
    assert yields(constants.constants(case), ())


@pytest.mark.parametrize("channels", [0, 4])
@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("safe", [None, -5.0, -0.25])
def test_decays_are_made_with_other_gates(channels: int, bound: Any, safe: Any) -> None:
    """Three heads, with a decay each, or one of each of four channels."""
    shape = (T, 3, channels) if channels else (T, 3)
    a, stored, bias = drawn(*shape), drawn(3), drawn(3 * max(channels, 1)) + 1
    by_head = stored[:, None] if channels else stored
    rate, at = by_head.exp(), bias.reshape(shape[1:])
    x = a + at

    def gate(rate: Any, x: torch.Tensor, bound: Any = bound) -> torch.Tensor:
        return -rate * softplus(x) if bound is None else bound * sigmoid(rate * x)

    case = SmallCase("log_decay", config_of(decay_bound=bound, safe=safe, layers=[1]),
                     [layer(gdn(A_log=stored, dt_bias=bias))], {"a": a}, gate(rate, x))  # fmt: skip
    due = [("is made without dt_bias", gate(rate, a)), ("is made without A_log", gate(1.0, x)),
           ("is made with A_log itself, not with its exponential", gate(by_head, x)),
           *((f"is made with A_log of the head {word}", gate(other, x)) for word, other in near(rate, 0)),
           ("is made with A_log of the heads in the opposite order", gate(rate[[2, 1, 0]], x)),
           ("is the decay itself, not its logarithm", case.right.exp()),
           ("is in powers of 2, not of e", case.right * LOG2E)]  # fmt: skip
    if bound is None:
        due += [("is made with a sigmoid, not with a softplus", -rate * sigmoid(x)),
                ("is made without softplus", -rate * x)]  # fmt: skip
    else:
        usual = gate(rate, x, None)
        due += [("is made without the bound of the safe gate, with a softplus", usual),
                ("is cut off at -5, the bound of the safe gate", torch.where(usual < -5, -5.0, usual)),
                ("lacks the bound of the safe gate as a factor", -sigmoid(rate * x)),
                ("has the bound of the safe gate twice", -25 * sigmoid(rate * x)),
                ("has exp(A_log) outside of the safe gate's sigmoid", -5 * rate * sigmoid(x)),
                ("has -exp(A_log) in the safe gate's sigmoid", -5 * sigmoid(-rate * x))]  # fmt: skip
    if channels:
        right = case.right
        due += [(f"is that of the key channel {word}", other) for word, other in near(right, 2)]
        due += [("is that of the head's first key channel", right[..., [0] * 4]),
                ("is the mean of the head's key channels", right.sum(-1, keepdim=True).expand(shape) / 4)]  # fmt: skip
        if safe is not None and safe != bound:
            due += [(f"is at least {safe:g}, the bound of safe gates", torch.where(right < safe, safe, right)),
                    (f"is made with the safe gate, whose bound is {safe:g}", gate(rate, x, safe))]  # fmt: skip
        due += [("is made with dt_bias of the head's first key channel", gate(rate, a + at[:, [0] * 4])),
                ("is made with dt_bias as [channels, heads]", gate(rate, a + bias.view(4, 3).T))]  # fmt: skip
    assert yields(constants.constants(case), due)
    for layers, rows in (([layer(gdn(A_log=stored, dt_bias=bias))], {}), ([], {"a": a}), ([layer()], {"a": a})):
        case.layers, case.rows = layers, rows
        assert yields(constants.constants(case), ())


def test_fixed_decays_are_those_of_other_heads_and_layers() -> None:
    """Three heads, in layer 1 of 4: the slopes of heads fall with the number of the layer."""
    slopes = torch.tensor([2 ** (-8 / 3), 2 ** (-16 / 3), 2**-8], dtype=torch.float64)

    def of(layer: int, layers: int = 4) -> torch.Tensor:
        return (-slopes * (1 - layer / (layers - 1 + 1e-5) + 1e-5)).expand(2, 3)

    mixer = LightningWeights(NONE, NONE, NONE, NONE, NONE)
    case = SmallCase("log_decay", config_of("projected", layers=[1] * 4, conv=()), [layer(mixer)] * 4, layer=1)
    case.right = right = of(1)
    assert yields(constants.constants(case), [
        *((f"is that of the head {word}", other) for word, other in near(right, 1)),
        ("is that of the heads in the opposite order", right[:, [2, 1, 0]]),
        ("is the decay itself, not its logarithm", right.exp()), ("has the opposite sign", -right),
        ("is in powers of 2, not of e", right / LOG2E), ("is the same in every layer", -slopes.expand(2, 3)),
        *((f"is that of layer {number}", of(number)) for number in (0, 2, 3)),
        ("falls as if the layers were one more", of(1, 5))])  # fmt: skip


@pytest.mark.parametrize(("widths", "shapes"), [((2, 2, 3), {}), ((2, 4, 3), {}), ((2, 2, 3), {"b": 1, "a_low": 1})])
def test_projections_have_other_matrices(widths: Any, shapes: Any) -> None:
    """z has as many rows as v, b as many as a; a layer may have low ranks."""
    rows = {"z": 3, "b": 2, "a": 2} | shapes
    made = {name: drawn(count, 5) + number for number, (name, count) in enumerate(rows.items())}
    qkv = drawn(sum(widths), 5) + 7
    q, k, v = torch.split(qkv, widths)
    config = config_of(segments=[(1, width) for width in widths], conv=(), key_heads=1)
    confused = {"z": "v"} | ({"b": "a_low", "a_low": "b"} if shapes else {"b": "a", "a": "b"})
    for component in ("qkv", *made):
        due: list[Any] = [(f"is made with the matrix of {confused[component]}", {component: (made | {"v": v})[
            confused[component]]})] if component in confused else []  # fmt: skip
        if component == "qkv" and widths[0] == widths[1]:
            due += [("has the keys in the place of the queries, and the queries in that of the keys",
                     {"qkv": torch.cat((k, q, v))})]  # fmt: skip
        if not shapes:  # one head has nothing to be packed with
            due += [(PACKED[component], {component: (made | {"qkv": qkv})[component]})]
        case = SmallCase(component, config, [layer(gdn(qkv=qkv, **made))])
        assert yields(constants.constants(case), due), component
        case.layers = [layer()]
        assert yields(constants.constants(case), ())


PACKED = dict.fromkeys(
    ("qkv", "z"), "is cut out of q, k, v and z, which lie packed per head, as if all of q came first",
) | dict.fromkeys(("b", "a"), "is cut out of b and a, which lie packed per head, as if all of b came first")


def test_packed_projections_are_cut_as_blocks() -> None:
    """Two key heads, each with two value heads of one row: the rows of head 0 lie before those of head 1."""
    q, k, v, z, b, a = drawn(2, 5), drawn(2, 5), drawn(4, 5), drawn(4, 5), drawn(4, 5), drawn(4, 5)
    config = config_of(segments=[(2, 1), (2, 1), (4, 1)], conv=(), key_heads=2)
    qkv = torch.stack((q[0], k[0], v[0], v[1], z[0], z[1], q[1], k[1]))
    cut = {"qkv": qkv, "z": torch.stack((v[2], v[3], z[2], z[3])), "b": torch.cat((b[:2], a[:2])),
           "a": torch.cat((b[2:], a[2:]))}  # fmt: skip
    mixer = gdn(qkv=torch.cat((q, k, v)), z=z, b=b, a=a)
    for component, wrong in cut.items():
        tried = constants.constants(SmallCase(component, config, [layer(mixer)]))
        made: Any = next(one.wrong for one in tried if one.sentence == PACKED[component])
        assert torch.equal(made[component], wrong), component


@pytest.mark.parametrize("bound", [1.0, 2.0])
def test_write_strengths_are_made_otherwise(bound: float) -> None:
    b = drawn(T, 2)
    right = bound * sigmoid(b)
    case = SmallCase("beta", config_of(beta_bound=bound), [], {"b": b}, right)
    due = [("is a sigmoid, without the bound of 2 before it", right / 2),
           ("is at most 1, and not at most its bound", torch.where(right > 1, 1.0, right)),
           ("has the bound of 2 inside its sigmoid", sigmoid(2 * b)),
           ("has the bound of 2 twice", right * 2)] if bound != 1 else []  # fmt: skip
    due += [("is made with a softplus, not with a sigmoid", softplus(b)), ("is b itself, without its sigmoid", b),
            ("is 1 for all tokens", torch.ones(T, 2)), ("is the square of the right value", right * right),
            ("is 1 - beta", 1 - right)]  # fmt: skip
    assert yields(constants.constants(case), due)
    case.rows = {}
    assert yields(constants.constants(case), ())


@pytest.mark.parametrize(("mixer", "widths"), [
    ("gdn", (2, 2, 3)), ("gdn", (1, 2, 4)), ("gdn", (2, 1, 4)), ("short", (7,)), ("none", (7,))])  # fmt: skip
def test_taps_of_a_conv_are_others(mixer: str, widths: Any) -> None:
    """7 channels with two taps."""
    conv, right = drawn(7, 2), drawn(T, 7)
    weights: Any = {"gdn": gdn(conv=conv), "short": ShortConvWeights(NONE, conv, NONE), "none": None}[mixer]
    case = SmallCase("mixed", config_of(segments=[(1, width) for width in widths], conv=()), [layer(weights)],
                     right=right)  # fmt: skip
    taps = [("in the opposite order", conv[:, [1, 0]]),
            *((f"of the channel {word}", other) for word, other in near(conv, 0))]  # fmt: skip
    if widths[:2] == (2, 2):
        taps += [("of k for q, and of q for k", conv[[2, 3, 0, 1, 4, 5, 6]])]
    due: list[Any] = [("passes a silu, which no short convolution has", silu(right))] if mixer == "short" else []
    due += [(f"is convolved with the taps {says}", {"conv": other}) for says, other in taps]
    due += [(f"is convolved without tap {tap}", {"conv": conv * torch.tensor(keeps)})
            for tap, keeps in enumerate(([0, 1], [1, 0]))]  # fmt: skip
    assert yields(constants.constants(case), due if weights is not None else ())


@pytest.mark.parametrize(("gate", "other"), [("silu", "a sigmoid"), ("sigmoid", "silu")])
@pytest.mark.parametrize("flat", [True, False])
def test_gates_of_a_read_out_are_opened_otherwise(gate: str, other: str, flat: bool) -> None:
    z, bare = drawn(T, 2, 4), drawn(T, 2, 4) + 2
    z[0, 1, 2], forms = 0, {"silu": silu, "sigmoid": sigmoid, "a sigmoid": sigmoid}
    right = bare * forms[gate](z)
    without = bare.clone()
    if gate == "silu":
        without[0, 1, 2] = 0  # nothing is left of what the gate closes
    shape = (T, 8) if flat else (T, 2, 4)
    case = SmallCase("gated", config_of(output_gate=gate, conv=()), [], {"z": z}, right.reshape(shape))
    due = [("is not gated by z", without),
           (f"is gated by {other} of z, not by {'silu' if gate == 'silu' else 'a sigmoid'}", without * forms[other](z)),
           ("is gated by z itself", without * z), ("is gated twice", right * forms[gate](z))]  # fmt: skip
    assert yields(constants.constants(case), [(says, wrong.reshape(shape)) for says, wrong in due])
    case.config.recurrence.inputs = "selective"
    assert yields(constants.constants(case), ())


# -- a short convolution, attention, sums ----------------------------------------------------------------------


def multiplied(name: str, gate: torch.Tensor, x: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return [(f"is not multiplied by {name}", x), (f"is multiplied by {name} twice", gate * gate * x),
            (f"is multiplied by a sigmoid of {name}, not by {name} itself", sigmoid(gate) * x),
            (f"is multiplied by silu of {name}, not by {name} itself", silu(gate) * x)]  # fmt: skip


def test_a_short_convolution_has_other_gates_and_thirds() -> None:
    """Four channels."""
    parts, normed, names = drawn(12, 4), drawn(T, 4), ("in_gate", "out_gate", "x")
    short = layer(ShortConvWeights(parts, NONE, NONE))
    for mine, component in enumerate(names):
        case = SmallCase(component, config_of(conv=("x",), segments=[(1, 4)]), [short], {"normed": normed})
        due = [(f"is made with the matrix of {name}", normed @ parts[4 * at : 4 * at + 4].T)
               for at, name in enumerate(names) if at != mine]  # fmt: skip
        due += [("is made as if the three matrices were stored channel by channel in turn",
                 torch.stack([normed @ parts[row] for row in range(mine, 12, 3)], 1))]  # fmt: skip
        assert yields(constants.constants(case), due)
        for layers, rows in (([short], {}), ([layer()], {"normed": normed})):
            case.layers, case.rows = layers, rows
            assert yields(constants.constants(case), ())
    gate, x = drawn(T, 3) + 1, drawn(T, 3) + 2
    for component, says, other in (("qkv", "in_gate", "x"), ("gated", "out_gate", "mixed")):
        rows = {says: gate, other: x}
        case = SmallCase(component, config_of(conv=(), segments=[], output_gate=None), [short], rows)
        assert yields(constants.constants(case), multiplied(says, gate, x))
        for name in rows:
            case.rows = {name: rows[name]}
            assert yields(constants.constants(case), ())


def test_blocks_that_norm_results_read_normed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of layer 1 norms its results, and the recurrence of layer 0 does not."""
    monkeypatch.setattr(constants.trunk, "read", lambda config, norm, rows: (rows * norm, None))
    hidden, residual, first, second = drawn(T, 2), drawn(T, 2) + 1, drawn(2), drawn(2) + 1
    work = SimpleNamespace(work=LayerWork("trunk", 1, hidden, 0))
    config = config_of(mixers=["gdn", "attention"], norm_after=("attention",), conv=())
    says = "is computed from normed rows, as in a layer that norms what it reads"

    def case_of(component: str, **given: Any) -> SmallCase:
        return SmallCase(component, config, **{"layers": [layer(first=first, second=second)] * 2, "layer": 1,
                                               "piece": work, "rows": {"residual": residual}, **given})  # fmt: skip

    for component in ("projected", "key_raw", "value"):
        due: list[Any] = [(says, {"changes": None, "weights": None, "hidden": hidden * first})]
        assert yields(constants.constants(case_of(component)), due)
        for given in ({"layer": 0}, {"stage": "extend"}, {"layers": [layer(second=second)] * 2}, {"layers": []},
                      {"piece": SimpleNamespace(work=None)}):  # fmt: skip
            assert yields(constants.constants(case_of(component, **given)), ())
    due = [(says, {"changes": {"residual": residual * second}, "weights": None}),
           ("is computed from the rows before the mixer", {"changes": {"residual": hidden}, "weights": None})]
    assert yields(constants.constants(case_of("mlp")), due)
    assert yields(constants.constants(case_of("mlp", piece=SimpleNamespace(work=None))), due[:1])
    for given in ({"layer": 0}, {"layers": [layer(first=first)] * 2}, {"layers": []}, {"rows": {}}):
        assert yields(constants.constants(case_of("mlp", **given)), ())


def test_attention_without_a_gate_is_gated_by_queries() -> None:
    projected, query, attended = drawn(T, 2, 2, 3), drawn(T, 2, 3), drawn(T, 2, 3) + 1
    for own, queries in (({"query": query}, [projected[:, :, 0], query]), ({}, [projected[:, :, 0]])):
        rows = {"attended": attended, "projected": projected, **own}
        case = SmallCase("mixer", config_of(attention_gate=False, conv=()), rows=rows)
        assert yields(constants.constants(case), [
            ("is gated by the queries, and attention of this type has no gate",
             {"changes": {"attended": attended * sigmoid(each)}, "weights": None}) for each in queries])  # fmt: skip
        case.config.attention_gate = True
        assert yields(constants.constants(case), ())
        for name in ("attended", "projected"):
            case.config.attention_gate, case.rows = False, {name: rows[name]}
            assert yields(constants.constants(case), ())


@pytest.mark.parametrize("latent", [True, False])
def test_scores_are_scaled_or_expanded_otherwise(latent: bool) -> None:
    """Two heads of 4 channels. With latents one of them is shared, and values have 3 channels, of 5 latents."""
    query, up = drawn(T, 2, 4), drawn(12, 5)
    mixer = LatentWeights(NONE, NONE, NONE, up, NONE) if latent else None
    case = SmallCase("attended", config_of(head_dim=4, shared_key=1, heads=2, value_width=3, conv=()), [layer(mixer)],
                     {"query": query})  # fmt: skip
    scales = {"the scores are not scaled by head_dim^-1/2": 2.0, "the scores are scaled twice": 0.5,
              "the softmax is in powers of 2, not of e": 1 / LOG2E, "the softmax takes log2(e) twice": LOG2E}
    due: list[Any] = [(says, query * by) for says, by in scales.items()]
    if latent:
        due += [("the scores lack the shared part of the keys", query * torch.tensor([1, 1, 1, 0])),
                ("the shared part of a key comes first", query[..., [1, 2, 3, 0]]),
                ("the scores are scaled by the width of the head's own key", query * (4 / 3) ** 0.5)]  # fmt: skip
    due = [(says, {"changes": {"query": wrong}, "weights": None}) for says, wrong in due]
    if latent:
        due += [("latents are expanded as if all keys came before all values",
                 {"up": up[[0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11]]}),
                ("latents are expanded by the matrix of the head after",
                 {"up": up[[*range(6, 12), *range(6)]]})]  # fmt: skip
    assert yields(constants.constants(case), due)
    case.rows = {}
    assert yields(constants.constants(case), ())


@pytest.mark.parametrize("latent", [5, 0])
def test_results_of_attention_are_opened_by_other_gates(latent: int) -> None:
    """Three heads of two channels. With latents a head has one gate, after its query."""
    attended, right = drawn(T, 3, 2), drawn(T, 3, 2) + 1
    projected = drawn(T, 3, 3) if latent else drawn(T, 3, 2, 2)
    gate = projected[..., [2]] if latent else projected[:, :, 1]
    case = SmallCase("opened", config_of(latent=latent, conv=()), [], {"attended": attended, "projected": projected},
                     right)  # fmt: skip
    due = [("is not gated", attended)]
    if latent:
        due += [(f"is gated by the gate of the head {word}", attended * sigmoid(by)) for word, by in near(gate, 1)]
    else:
        due += [("is gated by the query's half of the projection", attended * sigmoid(projected[:, :, 0]))]
    due += [("is gated by silu of the gate, not by a sigmoid", attended * silu(gate)),
            ("is gated by the gate itself", attended * gate), ("is gated twice", right * sigmoid(gate))]  # fmt: skip
    assert yields(constants.constants(case), due)
    for name in ("attended", "projected"):
        case.rows = {name: projected}
        assert yields(constants.constants(case), ())


def test_halves_are_joined_in_the_other_order() -> None:
    right = drawn(T, 6)
    case = SmallCase("joined", config_of(conv=()), right=right)
    assert yields(constants.constants(case), [("is joined with the hidden row first", right[:, [3, 4, 5, 0, 1, 2]])])


@pytest.mark.parametrize("component", ["residual", "hidden"])
def test_sums_lack_a_part_a_norm_or_factors(component: str) -> None:
    """The factors of the mixer of layer 1 are 2 and 3, those of its MLP 7 and 11; a dense MLP has none."""
    name, other = ("mixer", "mlp") if component == "residual" else ("mlp", "mixer")
    before, added, normed, x = drawn(T, 2), drawn(T, 2) + 1, drawn(T, 2) + 2, drawn(T, 2) + 3
    none = drawn(T, 2) + 9
    config = config_of(residual_factors=(), conv=())
    case = SmallCase(component, config, [], {name: added, other: none}, before + added)
    assert yields(constants.constants(case), [("lacks the residual", added), ("lacks what the layer adds", before)])
    case.rows, case.right = {name: added, f"{name}_normed": normed, f"{other}_normed": none}, before + normed
    assert yields(constants.constants(case), [
        (f"adds {name} without its norm", before + added), ("lacks the residual", normed),
        ("lacks what the layer adds", before)])  # fmt: skip
    case.rows, case.right = {name: added}, drawn(T, 4)
    assert yields(constants.constants(case), ()), "of two streams"
    factors: dict[str, Any] = {"gdn": (2, 3), "moe": (7, 11), "attention": (5, 4), "other": (1, 2)}
    config = config_of(residual_factors=factors, factors=factors.get, mixers=["attention", "gdn", "none"], conv=(),
                       layers=[("attention", "other"), ("gdn", "moe")])  # fmt: skip
    case = SmallCase(component, config, [], {name: added, "residual": before, "normed" if name == "mixer" else
                                             "post_normed": x}, layer=1)  # fmt: skip
    a, b = factors["gdn" if name == "mixer" else "moe"]
    due = [("lacks alpha", x + b * added), ("lacks beta", a * x + added), ("lacks both factors", x + added),
           ("has alpha for beta, and beta for alpha", b * x + a * added)]  # fmt: skip
    due += [("continues from the rows before their norm", a * before + b * added)] if name == "mlp" else []
    theirs = [(5, 4), (7, 11)] if name == "mixer" else [(2, 3), (5, 4)]
    others = [("has the factors of another block", one * x + two * added) for one, two in theirs]
    assert yields(constants.constants(case), due + others)
    rows = case.rows
    case.rows = {key: value for key, value in rows.items() if key != "residual"}
    assert yields(constants.constants(case), due[:4] + others)
    case.rows = {key: value for key, value in rows.items() if "normed" not in key}
    assert yields(constants.constants(case), ())
    case.rows = rows
    factors["gdn" if name == "mixer" else "moe"] = None
    assert yields(constants.constants(case), ())
    case.rows = {}
    assert yields(constants.constants(case), ())

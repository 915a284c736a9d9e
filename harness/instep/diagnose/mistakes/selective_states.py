"""Mistakes in a layer of Mamba2, or in a layer of one block, around the recurrence: known wrong tensors of each place.

Leaves out: mistakes in the recurrence itself (`delta_rule.py`) and in its states (`checks/wrong_state_bank.py`).
"""

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

from instep_reference.mlp import dense
from instep_reference.norms import L2_EPS, gated_group_norm
from instep_reference.weights import GdnWeights, MlpWeights, NopeWeights

from .experts import NOT_SQUARED
from .finding_case import Case, Explanation
from .wrong_weights import layer_of, with_mixer

CLAMP = 1e-3  # `time_step_min`, at which some implementations clamp the steps of a prompt
AROUND = ((1, "before"), (-1, "after"))


def selective(case: Case) -> Iterator[Explanation]:
    if case.piece is None or case.finding.place.stage != "trunk" or (layer := layer_of(case)) is None:
        return
    config = case.weights.config
    if config.recurrence.inputs == "selective" and isinstance(layer.mixer, GdnWeights) and case.component in MAMBA2:
        yield from MAMBA2[case.component](case, layer.mixer)
    if isinstance(layer.mixer, NopeWeights):
        yield from _projected(case, layer.mixer)
    if len(config.layers[case.finding.place.layer]) == 1:
        yield from _of_one_block(case)


def _segments(case: Case) -> dict[str, torch.Tensor]:
    """The channels after the conv: v is x, k is B, q is C."""
    mixed, config = case.own("mixed"), case.weights.config
    if mixed is None:
        return {}
    parts = torch.split(mixed, [heads * width for heads, width in config.segments], -1)
    return dict(zip(config.recurrence.conv, parts, strict=True))


def _group_rows(case: Case, mixer: GdnWeights) -> Iterator[Explanation]:
    """B or C, by groups."""
    parts, mine, shape = _segments(case), case.component, case.right.shape
    name, other = ("C", "k") if mine == "q" else ("B", "q")
    if not parts:
        return
    for step, word in AROUND:
        yield Explanation(f"has {name} of the group {word}", case.right.roll(step, 1))
    yield Explanation(f"is {'B' if mine == 'q' else 'C'}, not {name}", parts[other].reshape(shape))
    norm = torch.rsqrt(case.right.square().sum(-1, keepdim=True) + L2_EPS)
    yield Explanation("is normed to length 1, as by the delta rule", case.right * norm)
    yield Explanation("has the scale K^-1/2, which the delta rule has", case.right * shape[-1] ** -0.5)
    yield from _laid_out(case, mixer)


def _laid_out(case: Case, mixer: GdnWeights) -> Iterator[Explanation]:
    """q, k or v from channels in another order of x, B and C."""
    mixed, config = case.own("mixed"), case.weights.config
    if mixed is None:
        return
    width = {name: heads * wide for name, (heads, wide) in zip(config.recurrence.conv, config.segments, strict=True)}
    for order, says in ((("k", "q", "v"), "B, C, x"), (("q", "k", "v"), "C, B, x"), (("v", "q", "k"), "x, C, B")):
        parts = dict(zip(order, torch.split(mixed, [width[name] for name in order], -1), strict=True))
        made = parts[case.component].reshape(case.right.shape)
        yield Explanation(f"is taken from channels in the order {says}", made)


def _log_decay(case: Case, mixer: GdnWeights) -> Iterator[Explanation]:
    """-exp(A_log) dt. That of a step alone is tried in `constants.py`."""
    a = case.own("a")
    if a is None:
        return
    rate, step = mixer.A_log.exp(), F.softplus(a + mixer.dt_bias)
    yield Explanation("is made without the step: a head forgets at one rate", -rate.expand_as(step))
    yield Explanation(f"is made with steps of at least {CLAMP:g}", -rate * step.clamp(min=CLAMP))
    yield Explanation("is made with the magnitude of A_log, not with its exponential", -mixer.A_log.abs() * step)
    for by, word in AROUND:
        yield Explanation(f"is made with the step of the head {word}", -rate * step.roll(by, 1))
        yield Explanation(f"is made with A_log of the head {word}", -rate.roll(by) * step)


def _write(case: Case, mixer: GdnWeights) -> Iterator[Explanation]:
    a = case.own("a")
    if a is None:
        return
    yield Explanation("is 1 for all tokens: values are written without the step", torch.ones_like(case.right))
    yield Explanation("is made with a sigmoid, not with a softplus", torch.sigmoid(a + mixer.dt_bias))
    yield Explanation("is made without dt_bias", F.softplus(a))
    yield Explanation(f"is at least {CLAMP:g}", case.right.clamp(min=CLAMP))
    for by, word in AROUND:
        yield Explanation(f"is the step of the head {word}", case.right.roll(by, 1))


def _mixed(case: Case, mixer: GdnWeights) -> Iterator[Explanation]:
    bias = mixer.conv_bias
    if bias is None:
        return
    yield from with_mixer(case, "is convolved without bias", conv_bias=None)
    for by, word in AROUND:
        yield from with_mixer(case, f"is convolved with the bias of the channel {word}", conv_bias=bias.roll(by))
    for one in with_mixer(case, "has its bias added after silu", conv_bias=None):
        yield one._replace(wrong=one.wrong + bias)


def _skip(case: Case, mixer: GdnWeights) -> Iterator[Explanation]:
    core, v, gate = case.own("core"), case.own("v"), case.own("write")
    if core is None or v is None or mixer.skip is None:
        return
    weight = mixer.skip[:, None]
    yield Explanation("lacks D v", core)
    yield Explanation("adds v, not D v", core + v)
    yield Explanation("has D v of the opposite sign", core - weight * v)
    for by, word in AROUND:
        yield Explanation(f"has the D of the head {word}", core + weight.roll(by, 0) * v)
    if gate is not None:
        yield Explanation("adds D dt v, not D v", core + weight * gate[..., None] * v)


def _gated(case: Case, mixer: GdnWeights) -> Iterator[Explanation]:
    x, z, config = case.own("skip"), case.own("z"), case.weights.config
    if x is None or z is None:
        return
    eps, groups, heads = config.core_eps, config.key_heads, config.value_heads
    opening = F.silu(z)

    def normed(y: torch.Tensor, groups: int = groups, eps: float = eps) -> torch.Tensor:
        rows = y.reshape(len(y), groups, -1)
        right = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
        return (right.flatten(1) * mixer.norm).reshape(y.shape)

    yield Explanation("is normed before its gate, not after it", normed(x) * opening)
    yield Explanation("is normed over all groups together", gated_group_norm(x, z, mixer.norm, eps, 1))
    yield Explanation("is normed head by head, not group by group", gated_group_norm(x, z, mixer.norm, eps, heads))
    sums = (x * opening).reshape(len(x), groups, -1).square().sum(-1, keepdim=True)
    yield Explanation(
        "is normed by the sum of a group's squares over the channels of one head, not over those of the group",
        ((x * opening).reshape(len(x), groups, -1) * torch.rsqrt(sums / x.shape[-1] + eps)).flatten(1).mul(
            mixer.norm).reshape(x.shape))  # fmt: skip
    yield Explanation("is gated by a sigmoid of z, not by silu", normed(x * torch.sigmoid(z)))
    yield Explanation("is not gated by z", normed(x))
    yield Explanation("is normed without eps", normed(x * opening, eps=0.0))
    yield Explanation("is gated, and not normed", (x * opening).flatten(1).mul(mixer.norm).reshape(x.shape))


def _input(case: Case, mixer: GdnWeights) -> Iterator[Explanation]:
    """The parts of one stored projection, z then qkv then a, cut in another order."""
    normed, sizes = case.own("normed"), {name: len(getattr(mixer, name)) for name in ("z", "qkv", "a")}
    if normed is None:
        return
    stored = torch.cat([mixer.z, mixer.qkv, mixer.a])
    for order in (("qkv", "z", "a"), ("a", "z", "qkv"), ("z", "a", "qkv")):
        begin = sum(sizes[name] for name in order[: order.index(case.component)])
        rows = stored[begin : begin + sizes[case.component]]
        spoken = ", ".join({"qkv": "x B C", "a": "dt"}.get(name, name) for name in order)
        yield Explanation(f"is made with rows of the projection as if its order was {spoken}",
                          (normed @ rows.T).reshape(case.right.shape))  # fmt: skip


def _projected(case: Case, mixer: NopeWeights) -> Iterator[Explanation]:
    """Queries, keys and values with each other's matrices."""
    normed = case.own("normed")
    if normed is None or case.component not in ("query", "key", "value"):
        return
    for other in ("query", "key", "value"):
        matrix = getattr(mixer, other)
        if other != case.component and matrix.shape == getattr(mixer, case.component).shape:
            yield Explanation(f"is made with the matrix of the {other}", (normed @ matrix.T).reshape(case.right.shape))


def _of_one_block(case: Case) -> Iterator[Explanation]:
    """A layer that is a mixer or an MLP alone."""
    layer, x, rows = layer_of(case), case.own("post_normed"), case.hidden
    if layer is None or rows is None:
        return
    if case.component == "mlp" and x is not None and isinstance(layer.mlp, MlpWeights) and layer.mlp.gate is None:
        up, down = x @ layer.mlp.up.T, layer.mlp.down.T
        for says, opened in NOT_SQUARED:
            yield Explanation(says, opened(up) @ down)
        yield Explanation("reads the rows without their norm", dense(layer.mlp, rows))
    if case.component == "hidden":
        for name in ("mixer", "mlp"):
            made, normed = case.own(name), case.own("normed" if name == "mixer" else "post_normed")
            if made is not None and normed is not None:
                yield Explanation(f"adds {name} to the normed rows", normed + made)
                yield Explanation("lacks the residual", made)
                yield Explanation("lacks what the layer adds", rows)


MAMBA2: dict[str, Callable[[Case, GdnWeights], Iterator[Explanation]]] = {
    "qkv": _input, "z": _input, "a": _input, "mixed": _mixed, "q": _group_rows, "k": _group_rows, "v": _laid_out,
    "log_decay": _log_decay, "write": _write, "skip": _skip, "gated": _gated,
}

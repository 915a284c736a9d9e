"""Formulas that are almost right: another eps, w instead of 1 + w, a scale or gate missing or applied twice.

Most of these change the right result by a factor that follows from the op's inputs; the others are other weights or
another configuration in the reference's op. Leaves out: changed inputs (`wrong_inputs.py`), positions
(`rotary_and_visible_positions.py`).
"""

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

from instep_reference import trunk
from instep_reference.weights import (
    GdnWeights,
    LatentWeights,
    LightningWeights,
    ShortConvWeights,
    fixed_decay,
)

from .finding_case import Case, Explanation
from .wrong_weights import layer_of, mixer_of, with_mixer

LOG2E = 1.4426950408889634


def constants(case: Case) -> Iterator[Explanation]:
    if case.piece is None:
        return
    family = FORMULAS.get(case.component)
    if case.weights.config.recurrence.inputs == "selective" and case.component in ("q", "k", "gated"):
        return  # `selective_states.py` has these
    if family is not None:
        yield from family(case)
    yield from _segment(case)


def _segment(case: Case) -> Iterator[Explanation]:
    """A segment of the conv's channels that is read at the place of another one, or a channel or a head off."""
    mixed, config = case.own("mixed"), case.weights.config
    names = config.recurrence.conv
    if mixed is None or case.component not in names:
        return
    widths = [heads * width for heads, width in config.segments]
    mine = names.index(case.component)
    for other, name in enumerate(names):
        if other != mine:
            shifted = mixed.roll(sum(widths[:mine]) - sum(widths[:other]), 1)
            yield from case.made(f"is read at the segment of {name} in the conv's channels", {"mixed": shifted})
    for by, what in ((1, "channel"), (config.segments[mine][1], "head")):
        for sign, word in ((1, "early"), (-1, "late")):
            yield from case.made(f"is read one {what} too {word} in the conv's channels",
                                 {"mixed": mixed.roll(sign * by, 1)})  # fmt: skip


def _qkv(case: Case) -> Iterator[Explanation]:
    scale = case.weights.config.key_dim**-0.5
    if case.weights.config.recurrence.inputs == "projected":
        yield from _through_silu(case)
    elif case.component == "q":
        yield Explanation("lacks the scale K^-1/2", case.right / scale)
        yield Explanation("has the scale K^-1/2 twice", case.right * scale)
    elif case.component == "k":
        yield Explanation("has the scale K^-1/2, which is q's", case.right * scale)


def _through_silu(case: Case) -> Iterator[Explanation]:
    """q, k or v of lightning attention: a third of each head's projection, through a silu."""
    qkv, config = case.own("qkv"), case.weights.config
    if qkv is None:
        return
    parts = dict(zip("qkv", qkv.chunk(3, -1), strict=True))
    mine = parts[case.component]
    yield Explanation("has the scale K^-1/2, as in other attention", case.right * config.key_dim**-0.5)
    yield Explanation("passes no silu", mine)
    yield Explanation("passes a sigmoid, not a silu", torch.sigmoid(mine))
    for name, other in parts.items():
        if name != case.component:
            yield Explanation(f"is made of the part of {name}", F.silu(other))
    blocks = qkv.reshape(len(qkv), 3, *mine.shape[1:])  # if all q came before all k and all v
    yield Explanation("is read as if the parts of all heads lay together",
                      F.silu(blocks[:, "qkv".index(case.component)]))  # fmt: skip


def _log_decay(case: Case) -> Iterator[Explanation]:
    a, mixer = case.own("a"), mixer_of(case)
    if isinstance(mixer, LightningWeights):
        yield from _fixed(case, len(case.weights.config.layers))
    if a is None or not isinstance(mixer, GdnWeights):
        return
    stored = mixer.A_log.reshape(-1, *(1,) * (a.ndim - 2))  # of each head, also if there are channels
    rate, x, config = stored.exp(), a + mixer.dt_bias.reshape(a.shape[1:]), case.weights.config
    for says, by, opened in (
        ("without dt_bias", rate, a), ("without A_log", torch.ones_like(rate), x),
        ("with A_log itself, not with its exponential", stored, x),
    ):
        yield Explanation(f"is made {says}", _gate(by, opened, config.decay_bound))
    others = [("A_log of the head before", rate.roll(1, 0)), ("A_log of the head after", rate.roll(-1, 0)),
              ("A_log of the heads in the opposite order", rate.flip(0))]  # fmt: skip
    for says, by in others:
        yield Explanation(f"is made with {says}", _gate(by, x, config.decay_bound))
    yield Explanation("is the decay itself, not its logarithm", case.right.exp())
    yield Explanation("is in powers of 2, not of e", case.right * LOG2E)
    if config.decay_bound is None:
        yield Explanation("is made with a sigmoid, not with a softplus", -rate * torch.sigmoid(x))
        yield Explanation("is made without softplus", -rate * x)
    else:
        yield from _of_bound(config.decay_bound, rate, x)
    if a.ndim > 2:
        yield from _of_channels(case, a, rate, mixer.dt_bias)


def _gate(rate: torch.Tensor, opened: torch.Tensor, bound: float | None) -> torch.Tensor:
    """A log decay from exp(A_log) and a + dt_bias."""
    return -rate * F.softplus(opened) if bound is None else bound * torch.sigmoid(rate * opened)


def _fixed(case: Case, layers: int) -> Iterator[Explanation]:
    """Decays that the numbers of head and layer decide: those of other heads, and of other layers."""
    right, heads, own = case.right, case.right.shape[-1], case.finding.place.layer
    for step, word in ((1, "before"), (-1, "after")):
        yield Explanation(f"is that of the head {word}", right.roll(step, -1))
    yield Explanation("is that of the heads in the opposite order", right.flip(-1))
    yield Explanation("is the decay itself, not its logarithm", right.exp())
    yield Explanation("has the opposite sign", -right)
    yield Explanation("is in powers of 2, not of e", right / LOG2E)
    usual = right.new_tensor(fixed_decay(heads, 0, layers)) / (1 + 1e-5)
    yield Explanation("is the same in every layer", usual.expand_as(right))
    for layer in range(layers):
        if layer != own:
            yield Explanation(f"is that of layer {layer}", right.new_tensor(
                fixed_decay(heads, layer, layers)).expand_as(right))  # fmt: skip
    yield Explanation("falls as if the layers were one more", right.new_tensor(
        fixed_decay(heads, own, layers + 1)).expand_as(right))  # fmt: skip


def _of_bound(bound: float, rate: torch.Tensor, opened: torch.Tensor) -> Iterator[Explanation]:
    """Mistakes in a safe gate."""
    softplus = _gate(rate, opened, None)
    yield Explanation("is made without the bound of the safe gate, with a softplus", softplus)
    yield Explanation(f"is cut off at {bound:g}, the bound of the safe gate", softplus.clamp(min=bound))
    yield Explanation("lacks the bound of the safe gate as a factor", -torch.sigmoid(rate * opened))
    yield Explanation("has the bound of the safe gate twice", -bound * bound * torch.sigmoid(rate * opened))
    yield Explanation("has exp(A_log) outside of the safe gate's sigmoid", bound * rate * torch.sigmoid(opened))
    yield Explanation("has -exp(A_log) in the safe gate's sigmoid", bound * torch.sigmoid(-rate * opened))


def _of_channels(case: Case, a: torch.Tensor, rate: torch.Tensor, bias: torch.Tensor) -> Iterator[Explanation]:
    """Decays of key channels [n, HV, K] that are those of other channels, or bounded as those of other models."""
    right, config = case.right, case.weights.config
    heads, channels = right.shape[1:]
    for step, word in ((1, "before"), (-1, "after")):
        yield Explanation(f"is that of the key channel {word}", right.roll(step, -1))
    yield Explanation("is that of the head's first key channel", right[..., :1].expand_as(right))
    yield Explanation("is the mean of the head's key channels", right.mean(-1, keepdim=True).expand_as(right))
    safe = config.recurrence.bound
    if safe is not None and safe != config.decay_bound:
        yield Explanation(f"is at least {safe:g}, the bound of safe gates", right.clamp(min=safe))
        yield Explanation(f"is made with the safe gate, whose bound is {safe:g}",
                          _gate(rate, a + bias.view(heads, channels), safe))  # fmt: skip
    for says, other in (
        ("is made with dt_bias of the head's first key channel", bias.view(heads, channels)[:, :1]),
        ("is made with dt_bias as [channels, heads]", bias.view(channels, heads).T),
    ):
        yield Explanation(says, _gate(rate, a + other, config.decay_bound))


def _matrix(case: Case) -> Iterator[Explanation]:
    """A projection of a row with the matrix of another one of the layer."""
    mixer, name = mixer_of(case), case.component
    if isinstance(mixer, ShortConvWeights):
        yield from _given(case)
    if not isinstance(mixer, GdnWeights):
        return
    mine, config = getattr(mixer, name), case.weights.config
    q, k, v = torch.split(mixer.qkv, [heads * width for heads, width in config.segments])
    others = {"v": v} | {other: getattr(mixer, other) for other in ("z", "b", "a", "z_low", "a_low")}
    for other, theirs in others.items():
        if theirs is not None and other != name and theirs.shape == mine.shape:
            yield from with_mixer(case, f"is made with the matrix of {other}", **{name: theirs})
    if name == "qkv" and q.shape == k.shape:
        yield from with_mixer(case, "has the keys in the place of the queries, and the queries in that of the keys",
                              qkv=torch.cat((k, q, v)))  # fmt: skip
    if mixer.b is not None and mixer.b.shape == mixer.a.shape:
        *qkv, z = _cut_as_blocks(config.key_heads, q, k, v, mixer.z)
        b, a = _cut_as_blocks(config.key_heads, mixer.b, mixer.a)
        wrong = {"qkv": torch.cat(qkv), "z": z, "b": b, "a": a}
        packed, first = ("q, k, v and z", "q") if name in ("qkv", "z") else ("b and a", "b")
        yield from with_mixer(case, f"is cut out of {packed}, which lie packed per head, as if all of {first} came "
                                    f"first", **{name: wrong[name]})  # fmt: skip


def _cut_as_blocks(heads: int, *matrices: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Matrices whose rows lie together per key head, as Qwen3-Next packs them, cut as if each of them were whole."""
    packed = torch.cat([matrix.view(heads, -1, matrix.shape[1]) for matrix in matrices], 1).flatten(0, 1)
    return torch.split(packed, [len(matrix) for matrix in matrices])


def _read(case: Case) -> Iterator[Explanation]:
    """A projection in a layer that norms results: of rows that are normed nevertheless."""
    layer, hidden = layer_of(case), case.hidden
    if layer is not None and layer.input_norm is not None and hidden is not None and _norms_results(case):
        rows, _ = trunk.read(case.weights.config, layer.input_norm, hidden)
        yield from case.made("is computed from normed rows, as in a layer that norms what it reads", hidden=rows)


def _mlp(case: Case) -> Iterator[Explanation]:
    layer, residual = layer_of(case), case.own("residual")
    if layer is not None and layer.post_norm is not None and residual is not None and _norms_results(case):
        rows, _ = trunk.read(case.weights.config, layer.post_norm, residual)
        yield from case.made("is computed from normed rows, as in a layer that norms what it reads", {"residual": rows})
        if (before := case.hidden) is not None:
            yield from case.made("is computed from the rows before the mixer", {"residual": before})


def _norms_results(case: Case) -> bool:
    config, place = case.weights.config, case.finding.place
    return place.stage == "trunk" and config.mixers[place.layer] in config.norm_after


def _mixer(case: Case) -> Iterator[Explanation]:
    attended, projected = case.own("attended"), case.own("projected")
    if attended is not None and projected is not None and not case.weights.config.attention_gate:
        for queries in (projected[:, :, 0], case.own("query")):
            if queries is not None:
                yield from case.made("is gated by the queries, and attention of this type has no gate",
                                     {"attended": attended * torch.sigmoid(queries)})  # fmt: skip


GATES_OF_CONVS = ("in_gate", "out_gate", "x")  # the thirds of the projection of a short convolution, in order


def _third(case: Case) -> Iterator[Explanation]:
    """A third of the projection of a short convolution, made with other rows of its matrix."""
    mixer, normed = mixer_of(case), case.own("normed")
    if normed is None or not isinstance(mixer, ShortConvWeights):
        return
    mine, inputs = GATES_OF_CONVS.index(case.component), mixer.inputs
    for third, name in enumerate(GATES_OF_CONVS):
        if third != mine:
            yield Explanation(f"is made with the matrix of {name}", normed @ inputs.chunk(3)[third].T)
    yield Explanation("is made as if the three matrices were stored channel by channel in turn",
                      normed @ inputs[mine::3].T)  # fmt: skip


def _multiplied(name: str, gate: torch.Tensor, x: torch.Tensor) -> Iterator[Explanation]:
    """Rows x that a gate multiplies."""
    yield Explanation(f"is not multiplied by {name}", x)
    yield Explanation(f"is multiplied by {name} twice", x * gate * gate)
    yield Explanation(f"is multiplied by a sigmoid of {name}, not by {name} itself", x * torch.sigmoid(gate))
    yield Explanation(f"is multiplied by silu of {name}, not by {name} itself", x * F.silu(gate))


def _given(case: Case) -> Iterator[Explanation]:
    """The input B * x of a short convolution."""
    gate, x = case.own("in_gate"), case.own("x")
    if gate is not None and x is not None:
        yield from _multiplied("in_gate", gate, x)


def _beta(case: Case) -> Iterator[Explanation]:
    b = case.own("b")
    if b is None:
        return
    bound = case.weights.config.beta_bound
    if bound != 1.0:
        yield Explanation(f"is a sigmoid, without the bound of {bound:g} before it", case.right / bound)
        yield Explanation("is at most 1, and not at most its bound", case.right.clamp(max=1.0))
        yield Explanation(f"has the bound of {bound:g} inside its sigmoid", torch.sigmoid(bound * b))
        yield Explanation(f"has the bound of {bound:g} twice", case.right * bound)
    yield Explanation("is made with a softplus, not with a sigmoid", F.softplus(b))
    yield Explanation("is b itself, without its sigmoid", b)
    yield Explanation("is 1 for all tokens", torch.ones_like(b))
    yield Explanation("is the square of the right value", case.right.square())
    yield Explanation("is 1 - beta", 1 - case.right)


def _mixed(case: Case) -> Iterator[Explanation]:
    mixer = mixer_of(case)
    if not isinstance(mixer, GdnWeights | ShortConvWeights):
        return
    conv = mixer.conv
    if isinstance(mixer, ShortConvWeights):
        yield Explanation("passes a silu, which no short convolution has", F.silu(case.right))
    yield from with_mixer(case, "is convolved with the taps in the opposite order", conv=conv.flip(1))
    yield from with_mixer(case, "is convolved with the taps of the channel before", conv=conv.roll(1, 0))
    yield from with_mixer(case, "is convolved with the taps of the channel after", conv=conv.roll(-1, 0))
    first, *others = torch.split(conv, [heads * width for heads, width in case.weights.config.segments])
    if others and len(first) == len(others[0]):
        yield from with_mixer(case, "is convolved with the taps of k for q, and of q for k",
                              conv=torch.cat((others[0], first, *others[1:])))  # fmt: skip
    for tap in range(conv.shape[1]):
        without = conv.clone()
        without[:, tap] = 0
        yield from with_mixer(case, f"is convolved without tap {tap}", conv=without)


def _gated(case: Case) -> Iterator[Explanation]:
    z, silu = case.own("z"), case.weights.config.output_gate == "silu"
    gate, mixed = case.own("out_gate"), case.own("mixed")
    if gate is not None and mixed is not None:
        yield from _multiplied("out_gate", gate, mixed)
    if z is None:
        return
    z = z.reshape(case.right.shape)
    opening = F.silu(z) if silu else torch.sigmoid(z)
    bare = torch.where(opening == 0, 0.0, case.right / opening)
    other = torch.sigmoid(z) if silu else F.silu(z)
    yield Explanation("is not gated by z", bare)
    yield Explanation(f"is gated by {'a sigmoid' if silu else 'silu'} of z, not by "
                      f"{'silu' if silu else 'a sigmoid'}", bare * other)  # fmt: skip
    yield Explanation("is gated by z itself", bare * z)
    yield Explanation("is gated twice", case.right * opening)


def _attended(case: Case) -> Iterator[Explanation]:
    query, width = case.own("query"), case.weights.config.head_dim
    if query is None:
        return
    for says, factor in (
        ("the scores are not scaled by head_dim^-1/2", width**0.5), ("the scores are scaled twice", width**-0.5),
        ("the softmax is in powers of 2, not of e", 1 / LOG2E), ("the softmax takes log2(e) twice", LOG2E),
    ):
        yield from case.made(says, {"query": factor * query})
    if isinstance(mixer := mixer_of(case), LatentWeights):
        yield from _of_latents(case, mixer.up, query)


def _of_latents(case: Case, up: torch.Tensor, query: torch.Tensor) -> Iterator[Explanation]:
    """A key is [of the head | shared]; up [heads * (own + value_width), R] has each head's key, then its value."""
    config = case.weights.config
    own, shared = config.head_dim - config.shared_key, config.shared_key
    without, wide = query.clone(), (config.head_dim / own) ** 0.5
    without[..., own:] = 0
    yield from case.made("the scores lack the shared part of the keys", {"query": without})
    yield from case.made("the shared part of a key comes first", {
        "query": torch.cat((query[..., shared:], query[..., :shared]), -1)})
    yield from case.made("the scores are scaled by the width of the head's own key", {"query": query * wide})
    keys, values = torch.split(up, [config.heads * own, config.heads * config.value_width])
    each = torch.cat((keys.view(config.heads, own, -1), values.view(config.heads, config.value_width, -1)), 1)
    yield from with_mixer(case, "latents are expanded as if all keys came before all values",
                          up=each.reshape(up.shape))  # fmt: skip
    per_head = up.view(config.heads, -1, up.shape[1])
    yield from with_mixer(case, "latents are expanded by the matrix of the head after",
                          up=per_head.roll(-1, 0).reshape(up.shape))  # fmt: skip


def _opened(case: Case) -> Iterator[Explanation]:
    attended, projected = case.own("attended"), case.own("projected")
    if attended is None or projected is None:
        return
    yield Explanation("is not gated", attended)
    if case.weights.config.latent:
        gate = projected[..., -1:]  # of each head
        for step, word in ((1, "before"), (-1, "after")):
            yield Explanation(f"is gated by the gate of the head {word}", attended * torch.sigmoid(gate.roll(step, 1)))
    else:
        queries, gate = projected.unbind(2)
        yield Explanation("is gated by the query's half of the projection", attended * torch.sigmoid(queries))
    yield Explanation("is gated by silu of the gate, not by a sigmoid", attended * F.silu(gate))
    yield Explanation("is gated by the gate itself", attended * gate)
    yield Explanation("is gated twice", case.right * torch.sigmoid(gate))


def _joined(case: Case) -> Iterator[Explanation]:
    yield Explanation("is joined with the hidden row first", case.right.roll(case.right.shape[-1] // 2, -1))


def _with_factors(case: Case, added: torch.Tensor) -> Iterator[Explanation]:
    """A residual stream that continues from normed rows: alpha x + beta y."""
    config = case.weights.config
    mixer, last = case.component == "residual", config.layers[case.finding.place.layer][-1]
    factors = config.factors(config.mixers[case.finding.place.layer] if mixer else last)
    x, bare = case.own("normed" if mixer else "post_normed"), None if mixer else case.own("residual")
    if factors is None or x is None:
        return
    alpha, beta = factors
    for says, wrong in (
        ("lacks alpha", x + beta * added), ("lacks beta", alpha * x + added), ("lacks both factors", x + added),
        ("has alpha for beta, and beta for alpha", beta * x + alpha * added),
    ):
        yield Explanation(says, wrong)
    if bare is not None:
        yield Explanation("continues from the rows before their norm", alpha * bare + beta * added)
    others = {config.factors(block) for block in (*config.mixers, last)} - {factors}
    for a, b in sorted(filter(None, others)):
        yield Explanation("has the factors of another block", a * x + b * added)


def _sum(case: Case) -> Iterator[Explanation]:
    """residual = hidden + mixer, hidden = residual + mlp: without the first, or with the second twice."""
    name = "mixer" if case.component == "residual" else "mlp"
    normed, added = case.own(f"{name}_normed"), case.own(name)
    if added is None:
        return
    if case.weights.config.residual_factors:
        yield from _with_factors(case, added)
        return
    if normed is not None:
        yield Explanation(f"adds {name} without its norm", case.right - normed + added)
        added = normed
    if added.shape == case.right.shape:  # not with streams
        yield Explanation("lacks the residual", added)
        yield Explanation("lacks what the layer adds", case.right - added)


FORMULAS: dict[str, Callable[[Case], Iterator[Explanation]]] = {
    **dict.fromkeys(GATES_OF_CONVS, _third), **dict.fromkeys(("qkv", "z", "b", "a", "z_low", "a_low"), _matrix),
    **dict.fromkeys(("projected", "key_raw", "value"), _read), "mlp": _mlp, "mixer": _mixer,
    "q": _qkv, "k": _qkv, "v": _qkv, "log_decay": _log_decay, "beta": _beta, "mixed": _mixed, "gated": _gated,
    "attended": _attended, "opened": _opened, "joined": _joined, "residual": _sum, "hidden": _sum,
}  # fmt: skip

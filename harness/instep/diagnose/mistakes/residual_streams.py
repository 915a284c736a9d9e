"""Mistakes in residual streams and embeddings of n-grams (Qwen4-Exp): known wrong tensors of each place.

Leaves out: mistakes in their memory that any component may have (`wrong_memory.py`).
"""

from collections.abc import Callable, Iterator
from itertools import accumulate

import torch
from torch.nn import functional as F

from instep_reference import per_layer_embedding as ple
from instep_reference.contract.qwen4_config import PleShape
from instep_reference.norms import over_rms
from instep_reference.per_layer_embedding import PleMemory
from instep_reference.weights import PleWeights, StreamWeights

from ...oracle.single_layer_run import LayerWork
from .finding_case import Case, Explanation
from .wrong_weights import layer_of


def residual_streams(case: Case) -> Iterator[Explanation]:
    if case.piece is None or case.weights.config.streams == 1 or case.finding.place.stage != "trunk":
        return
    if case.component in OF_STREAMS:
        yield from OF_STREAMS[case.component](case)
    layer, work = layer_of(case), case.work
    if layer is not None and layer.ple is not None and work is not None and case.component in OF_PLE:
        shape = case.weights.config.ple_before(case.finding.place.layer)
        yield from OF_PLE[case.component](case, shape, layer.ple, work)


# ---- streams


def _read_by(case: Case) -> tuple[torch.Tensor, StreamWeights] | None:
    """The streams that a block reads, and its weights."""
    layer = layer_of(case)
    if case.component.startswith("post_"):
        rows, norm = case.own("residual"), None if layer is None else layer.post_norm
    else:
        rows, norm = _before_mixer(case), None if layer is None else layer.input_norm
    return (rows, norm) if rows is not None and isinstance(norm, StreamWeights) else None


def _before_mixer(case: Case) -> torch.Tensor | None:
    """The streams before the mixer: with the embedding of n-grams, if the layer has one."""
    rows = case.own("ple")
    return case.hidden if rows is None else rows


def _normed(case: Case) -> Iterator[Explanation]:
    if (read := _read_by(case)) is None:
        return
    (x, weights), eps, streams = read, case.weights.config.eps, case.weights.config.streams
    y = ple.norm_streams(x, weights.norm, streams, eps)  # [T, S, D]
    together = (over_rms(x, eps) * (1 + weights.norm)).reshape(y.shape)

    def mixed(y: torch.Tensor, by: float, act: Callable[[torch.Tensor], torch.Tensor] = F.silu) -> torch.Tensor:
        share = torch.sigmoid(act(y.flatten(1) @ weights.down.T / by) @ weights.up.T).reshape(y.shape)
        return (share * y).mean(1)

    yield Explanation("is the sum over the streams, not their mean", mixed(y, streams) * streams)
    yield Explanation("is mixed from streams that are normed all together", mixed(together, streams))
    yield Explanation("is mixed by shares that are not divided by the number of streams", mixed(y, 1.0))
    yield Explanation("is mixed by shares without silu", mixed(y, streams, lambda inner: inner))
    yield Explanation("is the mean of the streams: nothing mixes them", y.mean(1))
    for stream in range(streams):
        yield Explanation(f"is the normed stream {stream} alone", y[:, stream])


def _strength(case: Case) -> Iterator[Explanation]:
    if (read := _read_by(case)) is None or read[1].inject is None:
        return
    (x, weights), eps, streams = read, case.weights.config.eps, case.weights.config.streams
    inner = ple.norm_streams(x, weights.norm, streams, eps).flatten(1) @ read[1].inject.T
    yield Explanation("lacks the factor 2", torch.sigmoid(inner / streams))
    yield Explanation("is not divided by the number of streams inside", 2 * torch.sigmoid(inner))
    yield Explanation("is that of the stream before", case.right.roll(1, -1))
    yield Explanation("is made of streams that are not normed", 2 * torch.sigmoid(x @ read[1].inject.T / streams))


def _added(case: Case) -> Iterator[Explanation]:
    mlp = case.component == "hidden"
    made, strength = case.own("mlp" if mlp else "mixer"), case.own("post_strength" if mlp else "strength")
    x, other = case.own("residual") if mlp else _before_mixer(case), case.own("strength")
    if x is None or made is None or strength is None:
        return
    yield Explanation("has the result added to every stream as it is", ple.add_to_streams(x, made, strength**0))
    yield Explanation("has the result added with the strength of the stream before",
                      ple.add_to_streams(x, made, strength.roll(1, -1)))  # fmt: skip
    if mlp and other is not None:
        yield Explanation("has the MLP's result added with the strengths of the mixer",
                          ple.add_to_streams(x, made, other))  # fmt: skip


OF_STREAMS: dict[str, Callable[[Case], Iterator[Explanation]]] = {
    "normed": _normed, "post_normed": _normed, "strength": _strength, "post_strength": _strength,
    "residual": _added, "hidden": _added,
}

# ---- embeddings of n-grams


def _is_tree(work: LayerWork) -> bool:
    return work.parents is not None and work.parents != tuple(range(-1, len(work.parents) - 1))


def _ngrams(case: Case, shape: PleShape, weights: PleWeights, work: LayerWork) -> Iterator[Explanation]:
    memory = work.memory if work.start else None
    kept = memory.ngram.tolist() if isinstance(memory, PleMemory) else [0] * (shape.ngram - 1)
    before = tuple(number - 1 if number else shape.eos for number in kept)
    if _is_tree(work):
        return  # its rows have other tokens before them
    line, right = (*before, *work.tokens), ple.multipliers(shape)
    first = len(before)

    def rows(
        back: Callable[[int], list[int]], by: tuple[int, ...] = right, begins: tuple[int, ...] | None = None
    ) -> torch.Tensor:
        found, starts = [], (0, *accumulate(shape.sizes)) if begins is None else begins
        for at in range(first, len(line)):
            mixed, hashed, gram = 0, [], back(at)
            for token, multiplier in zip(gram, by, strict=True):
                mixed ^= token * multiplier
                hashed.append(mixed)
            found.append([starts[head] + hashed[1 + head // shape.heads] % size
                          for head, size in enumerate(shape.sizes)])  # fmt: skip
        return weights.table[torch.tensor(found)].flatten(1)

    def usual(at: int, cut: int = 0, eos: int = shape.eos, line: tuple[int, ...] = line) -> list[int]:
        """cut: where the tokens that may end a text begin"""
        return [line[at], *(eos if shape.eos in line[at - step : at + cut] else line[at - step]
                            for step in range(1, shape.ngram))]  # fmt: skip

    def alone(at: int) -> list[int]:
        return [line[at - step] for step in range(shape.ngram)]

    yield Explanation("is that of n-grams that reach beyond the end of a text", rows(alone))
    yield Explanation("is that of n-grams that also begin again after their own token", rows(lambda at: usual(at, 1)))
    yield Explanation("is that of n-grams with 0 in the place of the end of a text", rows(lambda at: usual(at, eos=0)))
    yield Explanation("is that of n-grams read backwards", rows(lambda at: usual(at)[::-1]))
    no_context = (*(shape.eos,) * first, *work.tokens)
    yield Explanation("is that of n-grams without the tokens before this step",
                      rows(lambda at: usual(at, line=no_context)))  # fmt: skip
    with_zero = tuple(number - 1 if number else 0 for number in kept) + work.tokens
    yield Explanation("is that of n-grams with token 0 before the first one",
                      rows(lambda at: usual(at, line=with_zero)))  # fmt: skip
    late = (shape.eos, *line)
    yield Explanation("is that of n-grams one token late", rows(lambda at: usual(at, line=late)))
    for other in case.weights.config.ple:
        if other.index != shape.index:
            yield Explanation(f"is hashed with the multipliers of layer {other.layer}",
                              rows(usual, ple.multipliers(other)))  # fmt: skip
    yield Explanation("is hashed with the multipliers in the opposite order", rows(usual, right[::-1]))
    yield Explanation("is read from the first table by every head", rows(usual, begins=(0,) * len(shape.sizes)))
    for name, state in case.context.subject.before.items():
        theirs = state.ngram.get(case.finding.place.layer)
        if name != case.finding.request and theirs is not None:
            swapped = (*(number - 1 if number else shape.eos for number in theirs.tolist()), *work.tokens)
            yield Explanation(f'is that of n-grams that begin with the tokens of request "{name}"',
                              rows(lambda at, swapped=swapped: usual(at, line=swapped)))  # type: ignore[misc]


def _written(case: Case, shape: PleShape, weights: PleWeights, work: LayerWork) -> Iterator[Explanation]:
    key, value, eps, S = case.own("ple_key"), case.own("ple_value"), case.weights.config.eps, shape.streams
    if key is None or value is None:
        return
    hidden = work.hidden.to("cpu", torch.float64)
    k, q = (ple.norm_streams(x, w, S, eps) for x, w in ((key, weights.key_norm), (hidden, weights.query_norm)))
    width = value.shape[-1]

    def gated(score: torch.Tensor, opening: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return (torch.sigmoid(opening(score))[..., None] * value[:, None]).flatten(1)

    def root(score: torch.Tensor) -> torch.Tensor:
        return score.sign() * score.abs().clamp(min=ple.LEAST_SCORE).sqrt()

    score = (k * q).sum(-1) / width**0.5
    yield Explanation("is gated by a score without its sign", gated(score, lambda x: root(x).abs()))
    yield Explanation("is gated by the score itself, not by its root", gated(score, lambda x: x))
    yield Explanation("is gated by a score that is not divided by the root of D", gated(score * width**0.5, root))
    yield Explanation("is gated by the key of the stream before", gated((k.roll(1, 1) * q).sum(-1) / width**0.5, root))
    yield Explanation("is gated by rows that are not normed",
                      gated((key.reshape(k.shape) * hidden.reshape(q.shape)).sum(-1) / width**0.5, root))  # fmt: skip
    together = (over_rms(x, eps) * (1 + w) for x, w in ((key, weights.key_norm), (hidden, weights.query_norm)))
    k, q = (each.reshape(k.shape) for each in together)
    yield Explanation("is gated by rows that are normed over all streams together",
                      gated((k * q).sum(-1) / width**0.5, root))  # fmt: skip
    yield Explanation("is not gated", value.repeat(1, S))


def _ple_normed(case: Case, shape: PleShape, weights: PleWeights, work: LayerWork) -> Iterator[Explanation]:
    written = case.own("ple_written")
    if written is None:
        return
    eps = case.weights.config.eps
    yield Explanation("is not normed", written)
    yield Explanation("is normed over all streams together", over_rms(written, eps) * (1 + weights.conv_norm))
    for name, other in (("keys", weights.key_norm), ("streams", weights.query_norm)):
        yield Explanation(f"is normed with the weight of the norm of {name}",
                          ple.norm_streams(written, other, shape.streams, eps).flatten(1))  # fmt: skip


def _ple_mixed(case: Case, shape: PleShape, weights: PleWeights, work: LayerWork) -> Iterator[Explanation]:
    x, memory = case.own("ple_normed"), work.memory
    if x is None or _is_tree(work):
        return
    window = x.new_zeros(x.shape[1], shape.reach)
    if work.start and isinstance(memory, PleMemory):
        window = memory.ple_conv.to(x)
    right = ple.dilated_conv(x, weights.conv, window, shape.ngram)
    near = window[:, window.shape[1] - shape.taps + 1 :]
    yield Explanation("passes no silu after its conv", right)
    yield Explanation("is convolved with neighbouring taps, without the distance",
                      F.silu(ple.dilated_conv(x, weights.conv, near, 1)))  # fmt: skip
    yield Explanation("is convolved with its taps in the opposite order",
                      F.silu(ple.dilated_conv(x, weights.conv.flip(1), window, shape.ngram)))  # fmt: skip
    yield Explanation("is convolved without the rows before this step",
                      F.silu(ple.dilated_conv(x, weights.conv, window * 0, shape.ngram)))  # fmt: skip
    for off, word in ((1, "later"), (-1, "earlier")):
        yield Explanation(f"is convolved with a window of one row {word}",
                          F.silu(ple.dilated_conv(x, weights.conv, window.roll(-off, 1), shape.ngram)))  # fmt: skip
    for name, state in case.context.subject.before.items():
        theirs = state.ple_conv.get(case.finding.place.layer)
        if name != case.finding.request and theirs is not None:
            yield Explanation(f'is convolved with the window of request "{name}"',
                              F.silu(ple.dilated_conv(x, weights.conv, theirs.to(x), shape.ngram)))  # fmt: skip


def _sums(case: Case, shape: PleShape, weights: PleWeights, work: LayerWork) -> Iterator[Explanation]:
    written, mixed, made = case.own("ple_written"), case.own("ple_mixed"), case.own("ple_made")
    if case.component == "ple_made" and written is not None and mixed is not None:
        yield Explanation("lacks what the conv adds", written)
        yield Explanation("is what the conv adds alone", mixed)
    elif made is not None:
        yield Explanation("lacks the streams themselves", made)
        yield Explanation("lacks the embedding of n-grams", work.hidden.to("cpu", torch.float64))


OF_PLE: dict[str, Callable[[Case, PleShape, PleWeights, LayerWork], Iterator[Explanation]]] = {
    "ngrams": _ngrams, "ple_written": _written, "ple_normed": _ple_normed, "ple_mixed": _ple_mixed,
    "ple_made": _sums, "ple": _sums,
}

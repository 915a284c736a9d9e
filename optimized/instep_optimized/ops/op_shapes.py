"""The shapes that an op must be given, and those that it must give back: `op_protocols.py`'s docstrings as code.

Leaves out: indices and memory (`check_op_calls.py`), and dtypes, which an op set declares by place.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from instep_reference.contract.recurrences import RECURRENCES, Recurrence

from ..memory_addresses import Inputs, SplitUpdates

Given = dict[str, Any]
Shape = tuple[int, ...]


def misfits(name: str, given: Given) -> Iterator[str]:
    """Find arguments that do not fit each other."""
    for what, found, right in FITS.get(name, _nothing)(given):
        if found != right:
            yield f"{what} is {found}, {right} fits"


def shapes(name: str, given: Given) -> tuple[Shape, ...] | None:
    """Return the shape of every result, in order; None if this op is not checked."""
    return GIVES[name](given) if name in GIVES else None


Fit = tuple[str, object, object]  # what, as it is, as it should be


def _nothing(given: Given) -> Iterator[Fit]:
    return iter(())


def _linear(given: Given) -> Iterator[Fit]:
    weight = tuple(given["weight"].shape)
    yield "weight", weight, (math.prod(given["shape"]), math.prod(given["x"].shape[1:]))


def _linears(given: Given) -> Iterator[Fit]:
    outs = sum(map(math.prod, given["shapes"]))
    yield "weight", tuple(given["weight"].shape), (outs, math.prod(given["x"].shape[1:]))


def _same(given: Given) -> Iterator[Fit]:
    yield "y", tuple(given["y"].shape), tuple(given["x"].shape)


def _norm(given: Given) -> Iterator[Fit]:
    axes = given["weight"].dim()
    yield "weight", tuple(given["weight"].shape), tuple(given["x"].shape[max(given["x"].dim() - axes, 1) :])


def _add_norm(given: Given) -> Iterator[Fit]:
    yield from _same(given)
    yield from _norm(given)


def _draft_inputs(given: Given) -> Iterator[Fit]:
    rows, width = given["hidden"].shape
    yield "tokens", tuple(given["tokens"].shape), (rows,)
    yield "table", given["table"].shape[1], width
    for weight in given["weights"]:
        yield "a weight", tuple(weight.shape), (width,)


def _conv(given: Given) -> Iterator[Fit]:
    channels, width = given["weight"].shape
    yield "x", given["x"].shape[1], channels
    for part in given["parts"]:
        for name, address in (("read", part.read), ("store", part.store), ("per_row", part.per_row)):
            if address is not None:
                yield f"a window of {name}", tuple(address.pool.shape[-2:]), (channels, width - 1)
    yield from _parents(given, given["x"].shape[0])


def _dilated_conv(given: Given) -> Iterator[Fit]:
    channels, taps = given["weight"].shape
    line = torch.empty(channels, (taps - 1) * given["distance"] + 1, device="meta")
    yield from _conv({**given, "weight": line})


def _streams(given: Given) -> Iterator[Fit]:
    streams = given["streams"] if "weight" in given else given["weights"].streams
    yield "channels of x, by streams,", given["x"].shape[1] % streams, 0
    if "weight" in given:
        yield "weight", tuple(given["weight"].shape), tuple(given["x"].shape[1:])
    else:
        yield "norm", tuple(given["weights"].norm.shape), tuple(given["x"].shape[1:])


def _add_streams(given: Given) -> Iterator[Fit]:
    rows, streams = given["strength"].shape
    yield "y", tuple(given["y"].shape), (rows, given["x"].shape[1] // streams)
    yield "x", tuple(given["x"].shape), (rows, given["y"].shape[1] * streams)


def _gate_streams(given: Given) -> Iterator[Fit]:
    yield "key", tuple(given["key"].shape), tuple(given["x"].shape)
    yield "channels of x, by those of value,", given["x"].shape[1] % given["value"].shape[1], 0
    for name in ("key_norm", "query_norm"):
        yield name, tuple(given[name].shape), tuple(given["x"].shape[1:])


def _ngrams(given: Given) -> Iterator[Fit]:
    before, rows = len(given["hashes"].multipliers) - 1, len(given["tokens"])
    yield "heads of all orders", len(given["hashes"].sizes), before * given["hashes"].heads
    yield "tables", min(len(given["tables"]), sum(given["hashes"].sizes)), sum(given["hashes"].sizes)
    for part in given["parts"]:
        for name in ("read", "store", "per_row"):
            if (address := getattr(part, name)) is not None:
                yield f"tokens of {name}", (tuple(address.pool.shape[-1:]), address.pool.dtype), (
                    (before,), torch.int64)  # fmt: skip
    yield from _parents(given, rows)


def _biased_conv(given: Given) -> Iterator[Fit]:
    yield from _conv(given)
    yield "bias", tuple(given["bias"].shape), tuple(given["weight"].shape[:1])


def _parents(given: Given, rows: int) -> Iterator[Fit]:
    for part in given["parts"]:
        if part.parents is not None:
            yield "parents", tuple(part.parents.shape), (rows,)


def _gdn_inputs(given: Given) -> Iterator[Fit]:
    heads, keys = given["A_log"].shape[0], given["key_heads"] * given["key_dim"]
    yield "channels after the keys, by value heads,", (given["mixed"].shape[1] - 2 * keys) % heads, 0
    rows, gate = given["mixed"].shape[0], (heads, given["key_dim"])[: given["dt_bias"].dim()]
    yield "a", tuple(given["a"].shape), (rows, *gate)
    yield "b", tuple(given["b"].shape), (rows, heads)
    yield "dt_bias", tuple(given["dt_bias"].shape), gate


def _selective_inputs(given: Given) -> Iterator[Fit]:
    heads = given["A_log"].shape[0]
    yield "channels before the keys, by value heads,", _values_of(given) % heads, 0
    yield "a", tuple(given["a"].shape), (given["mixed"].shape[0], heads)
    yield "dt_bias", tuple(given["dt_bias"].shape), (heads,)


def _values_of(given: Given) -> int:
    """The channels of x: those before B and C."""
    channels: int = given["mixed"].shape[1] - 2 * given["key_heads"] * given["key_dim"]
    return channels


def _of_groups(given: Given) -> tuple[Shape, ...]:
    rows, heads, keys = given["mixed"].shape[0], given["A_log"].shape[0], (given["key_heads"], given["key_dim"])
    return (rows, *keys), (rows, *keys), (rows, heads, _values_of(given) // heads), (rows, heads), (rows, heads)


def _add_skip(given: Given) -> Iterator[Fit]:
    yield "v", tuple(given["v"].shape), tuple(given["core"].shape)
    yield "weight", tuple(given["weight"].shape), (given["core"].shape[1],)


def _gated_group_norm(given: Given) -> Iterator[Fit]:
    yield "z", tuple(given["z"].shape), tuple(given["core"].shape)
    yield "weight", tuple(given["weight"].shape), (math.prod(given["core"].shape[1:]),)
    yield "heads, by groups,", given["core"].shape[1] % given["groups"], 0


def _squared_mlp(given: Given) -> Iterator[Fit]:
    hidden, inner = given["down"].shape
    yield "up", tuple(given["up"].shape), (inner, given["x"].shape[1])
    yield "down", hidden, given["x"].shape[1]


def _conv_inputs(given: Given) -> Iterator[Fit]:
    yield from _conv(given)
    yield from _gdn_inputs({**given, "mixed": given["x"]})


def _recurrence(row: Recurrence, given: Given) -> Iterator[Fit]:
    q, k, v, log_decay, beta = given["inputs"]
    state = (v.shape[-2], k.shape[-1], v.shape[-1])
    yield "q", tuple(q.shape), tuple(k.shape)
    yield "log_decay", tuple(log_decay.shape), (len(v), *state[: len(row.gate)])
    yield "beta", tuple(beta.shape), tuple(v.shape[:-1])
    yield from _states(given, state)
    yield from _parents(given, len(q))
    yield from _kept(given, q, k, v, log_decay, beta)


def _kept(given: Given, *consumed: torch.Tensor) -> Iterator[Fit]:
    """Entries of rings, in addition to the inputs of the delta rule."""
    _, k, v, log_decay, beta = consumed
    for part in given["parts"]:
        if part.ring is not None:
            like = {"k": k, "v": v, "update": v, "decay": log_decay, "log_decay": log_decay, "beta": beta,
                    "k_low": k, "update_low": v}
            for name, pool in part.ring.kept._asdict().items():
                # Inputs have the dtype in which they are consumed; an update is at least as wide. The parts of a split
                # ring have the dtype of its high parts.
                dtype = like[name].dtype
                wide = dtype if isinstance(part.ring.kept, Inputs) else torch.promote_types(dtype, pool.dtype)
                if isinstance(part.ring.kept, SplitUpdates) and name != "decay":
                    wide = part.ring.kept.k.dtype
                yield f"an entry of ring {name}", (tuple(pool.shape[2:]), pool.dtype), (
                    tuple(like[name].shape[1:]), wide)  # fmt: skip


def _fused_gdn(given: Given) -> Iterator[Fit]:
    yield from _gdn_inputs(given)
    heads, width = _heads(given)[2][1:]
    yield from _states(given, (heads, given["key_dim"], width))
    yield from _parents(given, given["mixed"].shape[0])


def _window_gdn(given: Given) -> Iterator[Fit]:
    yield from _fused_gdn(given)
    yield from _kept(given, *(torch.empty(shape, device="meta") for shape in _heads(given)))  # in fp32, as computed


def _prefill_gdn(given: Given) -> Iterator[Fit]:
    yield from _conv({**given, "parts": given["windows"]})
    yield from _fused_gdn({**given, "mixed": given["x"]})


def _verify_gdn(given: Given) -> Iterator[Fit]:
    yield from _conv({**given, "parts": given["windows"]})
    yield from _window_gdn({**given, "mixed": given["x"]})


def _states(given: Given, state: Shape) -> Iterator[Fit]:
    for part in given["parts"]:
        for name in ("read", "store", "per_row", "settled"):
            if (address := getattr(part, name)) is not None:
                yield f"a state of {name}", tuple(address.pool.shape[-3:]), state
                yield from _scales(name, address.pool, address.scales)


def _gated_norm(given: Given) -> Iterator[Fit]:
    yield "z", tuple(given["z"].shape), tuple(given["core"].shape)
    yield "weight", tuple(given["weight"].shape), tuple(given["core"].shape[-1:])


def _attention_inputs(given: Given) -> Iterator[Fit]:
    rows, _, two, width = given["projected"].shape
    yield "projected, query and gate,", two, min(two, 2) or 1
    yield "key_raw", (given["key_raw"].shape[0], given["key_raw"].shape[2]), (rows, width)
    yield "positions", tuple(given["positions"].shape), (rows,)
    for name in ("q_norm", "k_norm"):
        if given[name].numel():
            yield name, tuple(given[name].shape), (width,)


def _key_inputs(given: Given) -> Iterator[Fit]:
    yield "positions", tuple(given["positions"].shape), given["key_raw"].shape[:1]
    yield "k_norm", tuple(given["k_norm"].shape), given["key_raw"].shape[2:]


def _store_rows(given: Given) -> Iterator[Fit]:
    rows, pool, scales = given["rows"], given["pool"], given.get("scales")
    dtype = pool.dtype if scales is None else rows.dtype  # in tiles they are rounded here
    yield "a row", (tuple(rows.shape[1:]), rows.dtype), (tuple(pool.shape[2:]), dtype)
    yield from _scales("pool", pool, scales)


def _kv_inputs(given: Given) -> Iterator[Fit]:
    yield from _attention_inputs(given)
    for rows, pool in zip((given["key_raw"], given["value"]), given["pools"], strict=True):
        yield from _store_rows({"rows": rows, "pool": pool})


def _attend(given: Given) -> Iterator[Fit]:
    pages, heads = given["pages"], given["query"].shape[1]
    yield "values", tuple(pages.values.shape), tuple(pages.keys.shape)
    yield "head_dim", given["query"].shape[2], pages.keys.shape[3]
    yield "query heads, by KV heads,", heads % pages.keys.shape[2], 0
    yield from _rest_of_pages(given)


def _attend_latents(given: Given) -> Iterator[Fit]:
    pages, heads, up = given["pages"], given["query"].shape[1], given["up"]
    yield "values", tuple(pages.values.shape[:-1]), tuple(pages.keys.shape[:-1])
    yield "KV heads", pages.keys.shape[2], 1
    yield "up", (up.shape[0] % heads, up.shape[1]), (0, pages.values.shape[-1])
    yield from _rest_of_pages(given)


def _latent_inputs(given: Given) -> Iterator[Fit]:
    rows, width = given["projected"].shape[0], given["norm"].shape[0] + given["rotary_dim"]
    yield "positions", tuple(given["positions"].shape), (rows,)
    yield "key_raw", tuple(given["key_raw"].shape), (rows, 1, width)
    yield "rotary_dim", min(given["rotary_dim"], given["projected"].shape[2] - 1), given["rotary_dim"]


def _rest_of_pages(given: Given) -> Iterator[Fit]:
    pages = given["pages"]
    if pages.ancestors is not None:
        yield "ancestors", tuple(pages.ancestors.shape), (given["query"].shape[0],)
    yield from _scales("keys", pages.keys, pages.key_scales)
    yield from _scales("values", pages.values, pages.value_scales)


def _output_gate(given: Given) -> Iterator[Fit]:
    rows, heads, width = given["attended"].shape
    found = tuple(given["projected"].shape)
    if len(found) > 3:  # else a gate per head, after a query of any width
        yield "projected", found, (rows, heads, 2, width)
    else:
        yield "projected", found[:2], (rows, heads)


def _gated_attend(given: Given) -> Iterator[Fit]:
    yield from _attend(given)
    yield from _output_gate({**given, "attended": given["query"]})


def _mlp(given: Given) -> Iterator[Fit]:
    hidden, inner = given["down"].shape
    yield "gate_up", tuple(given["gate_up"].shape), (2 * inner, given["x"].shape[1])
    yield "down", hidden, given["x"].shape[1]


def _scales(name: str, pool: torch.Tensor, scales: torch.Tensor | None) -> Iterator[Fit]:
    """Numbers of 8 bits have scales, with the same units and positions; wider numbers have none."""
    yield f"whether {name} has scales", scales is not None, pool.element_size() == 1
    if scales is not None:
        yield f"leading axes of the scales of {name}", tuple(scales.shape[:-2]), tuple(pool.shape[:-2])


def _move(given: Given) -> Iterator[Fit]:
    source, target = given["source"], given["target"]
    positions = (int(source.column is not None), int(target.column is not None))
    yield "a unit", (tuple(source.pool.shape[1 + positions[0] :]), source.pool.dtype), (
        tuple(target.pool.shape[1 + positions[1] :]), target.pool.dtype)  # fmt: skip
    for name, address in (("source", source), ("target", target)):
        yield from _scales(name, address.pool, address.scales)


def _moves(given: Given) -> Iterator[Fit]:
    for pair in given["pairs"]:
        yield from _move(pair._asdict())


def _move_rows(given: Given) -> Iterator[Fit]:
    yield "target", tuple(given["target"].shape), tuple(given["source"].shape)


def _of_trees(*names: str) -> Callable[[Given], Iterator[Fit]]:
    """Tables [B, T] of one shape: `names`, of which the first is always given."""
    first = names[0]

    def fits(given: Given) -> Iterator[Fit]:
        for name in names[1:]:
            if given.get(name) is not None:
                yield name, tuple(given[name].shape), tuple(given[first].shape)
        for requests in ("slots", "count"):
            if requests in given:
                yield requests, len(given[requests]), len(given[first])
                break

    return fits


def _select_beams(given: Given) -> Iterator[Fit]:
    yield "log_probs", tuple(given["log_probs"].shape), tuple(given["tokens"].shape)
    if given["before"] is not None:
        yield "beams", len(given["before"].beams), len(given["before"].tokens) * given["tokens"].shape[1]


def _place_rows(given: Given) -> Iterator[Fit]:
    if given.get("depth") is not None:
        yield "depth", tuple(given["depth"].shape), (given["rows"],)


def _draw(given: Given) -> Iterator[Fit]:
    requests, width = given["window"].shape
    right = {"parents": (requests, width), "uniforms": (requests, width), "sampling": (requests, 3)}
    for name in ("parents", "begin", "count", "sampling", "uniforms", "final"):
        if given[name] is not None:
            yield name, tuple(given[name].shape), right.get(name, (requests,))


FITS: dict[str, Callable[[Given], Iterator[Fit]]] = {
    "accept": _of_trees("window", "picks", "parents"), "plan_tree": _of_trees("parents"), "move_rows": _move_rows,
    "plan_path": _of_trees("accept_index"), "place_rows": _place_rows,
    "linear": _linear, "add": _same, "multiply": _same, "scaled_add": _same, "norm": _norm,
    "conv": _conv, "short_conv": _conv, "gdn_inputs": _gdn_inputs,
    **{row.name: partial(_recurrence, row) for row in RECURRENCES.values()},
    "gated_norm": _gated_norm, "attention_inputs": _attention_inputs, "store_rows": _store_rows, "attend": _attend,
    "attend_latents": _attend_latents, "latent_inputs": _latent_inputs,
    "key_inputs": _key_inputs,
    "output_gate": _output_gate, "mlp": _mlp, "move": _move, "fused_gdn": _fused_gdn,
    "add_norm": _add_norm, "conv_inputs": _conv_inputs, "linears": _linears, "kv_inputs": _kv_inputs,
    "gated_attend": _gated_attend, "draft_inputs": _draft_inputs, "moves": _moves, "prefill_gdn": _prefill_gdn,
    "verify_gdn": _verify_gdn, "window_gdn": _window_gdn, "selective_inputs": _selective_inputs,
    "biased_conv": _biased_conv, "dilated_conv": _dilated_conv, "ngrams": _ngrams, "norm_streams": _streams,
    "read_streams": _streams, "add_streams": _add_streams, "gate_streams": _gate_streams,
    "add_skip": _add_skip, "gated_group_norm": _gated_group_norm, "squared_mlp": _squared_mlp,
    "draw": _draw, "select_beams": _select_beams, "build_tree": _of_trees("tokens", "parents", "scores"),
}  # fmt: skip


def _like(name: str) -> Callable[[Given], tuple[Shape, ...]]:
    return lambda given: (tuple(given[name].shape),)


def _heads(given: Given) -> tuple[Shape, ...]:
    rows, keys = given["mixed"].shape[0], (given["key_heads"], given["key_dim"])
    values = given["A_log"].shape[0]
    width = (given["mixed"].shape[1] - 2 * math.prod(keys)) // values
    return ((rows, *keys), (rows, *keys), (rows, values, width), (rows, *given["dt_bias"].shape), (rows, values))


def _of_latents(given: Given) -> tuple[Shape, ...]:
    rows, heads, width = given["projected"].shape
    return (rows, heads, width - 1), (rows, 1, given["rotary_dim"]), (rows, 1, given["norm"].shape[0])


def _projected(given: Given) -> tuple[Shape, ...]:
    (rows, heads, width), keys = given["qkv"].shape, given["key_dim"]
    return (rows, heads, keys), (rows, heads, keys), (rows, heads, width - 2 * keys), (rows, heads), (rows, heads)


def _candidates(given: Given) -> Shape:
    topk, before = given["tokens"].shape[1], given["before"]
    requests = len(given["tokens"] if before is None else before.tokens)
    return requests, topk + (given["num_steps"] - 1) * topk**2


GIVES: dict[str, Callable[[Given], tuple[Shape, ...]]] = {
    "embed": lambda g: ((g["tokens"].shape[0], g["table"].shape[1]),),
    "embed_streams": lambda g: ((g["tokens"].shape[0], g["streams"] * g["table"].shape[1]),),
    "read_streams": lambda g: tuple((len(g["x"]), width) for _, width in zip(
        g["to"], (g["x"].shape[1] // g["weights"].streams, g["weights"].streams), strict=False)),
    "ngrams": lambda g: ((len(g["tokens"]), len(g["hashes"].sizes) * g["tables"].shape[1]),),
    **dict.fromkeys(("add_streams", "norm_streams", "gate_streams", "dilated_conv"), _like("x")),
    **dict.fromkeys(("norm", "add", "multiply", "scaled_add", "conv", "short_conv", "mlp", "moe"), _like("x")),
    "linear": lambda g: ((g["x"].shape[0], *g["shape"]),),
    "concat": lambda g: ((g["x"].shape[0], g["x"].shape[1] + g["y"].shape[1]),),
    "select": lambda g: ((g["index"].shape[0], *g["x"].shape[1:]),),
    "lightning_inputs": _projected,
    "gdn_inputs": _heads, "gated_norm": _like("core"), "selective_inputs": _of_groups, "add_skip": _like("core"),
    "gated_group_norm": _like("core"), "squared_mlp": _like("x"), "biased_conv": _like("x"),
    **dict.fromkeys(RECURRENCES, lambda g: (tuple(g["inputs"].v.shape),)),
    "fused_gdn": lambda g: _heads(g)[2:3], "conv_inputs": lambda g: _heads({**g, "mixed": g["x"]}),
    "window_gdn": lambda g: _heads(g)[2:3], "prefill_gdn": lambda g: _heads({**g, "mixed": g["x"]})[2:3],
    "verify_gdn": lambda g: _heads({**g, "mixed": g["x"]})[2:3],
    "add_norm": lambda g: (tuple(g["x"].shape),) * 2,
    "linears": lambda g: tuple((g["x"].shape[0], *shape) for shape in g["shapes"]),
    "attention_inputs": lambda g: (
        (g["projected"].shape[0], g["projected"].shape[1], g["projected"].shape[3]), tuple(g["key_raw"].shape)),
    "key_inputs": _like("key_raw"), "latent_inputs": _of_latents,
    "draft_inputs": lambda g: ((g["hidden"].shape[0], 2 * g["hidden"].shape[1]),),
    "kv_inputs": lambda g: GIVES["attention_inputs"](g)[:1],
    "attend": _like("query"), "attend_latents": lambda g: (g["pages"].expanded(g["query"], g["up"]),),
    "gated_attend": _like("query"), "output_gate": _like("attended"), "choose": _like("own"),
    "plan_tree": lambda g: (tuple(g["parents"].shape),) * 4,
    "plan_path": lambda g: (tuple(g["accept_index"].shape),) * 2,
    "head_pick": lambda g: ((g["x"].shape[0],),),
    "lm_head": lambda g: ((g["x"].shape[0], g["weight"].shape[0]),), "pick": lambda g: ((g["logits"].shape[0],),),
    "draw": lambda g: ((g["logits"].shape[0],),),
    "topk_tokens": lambda g: ((g["logits"].shape[0], g["topk"]),) * 2,
    "select_beams": lambda g: (_candidates(g),) * 3,
    "build_tree": lambda g: ((len(g["tokens"]), g["nodes"] - 1), (len(g["tokens"]), g["nodes"])),
}  # fmt: skip

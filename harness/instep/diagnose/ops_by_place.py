"""The ops that produce each place and write each component of memory.

Leaves out: the order of findings, which the contract has (`Place.order`, `Comparison.order`).
"""

from collections.abc import Collection

from instep_reference.contract.config import ModelConfig
from instep_reference.contract.place_names import Place
from instep_reference.contract.recurrences import RECURRENCES, SHORT_CONV

# The products of a layer's normed rows.
OF_NORMED = ("in_gate", "out_gate", "x", "qkv", "z", "b", "a", "z_low", "a_low", "projected", "key_raw")
OF_NGRAMS = ("ple_key", "ple_value")
# Op -> the components that it returns. `linear` returns one at a time.
RESULTS: dict[str, tuple[str, ...]] = {
    "embed": ("embedding",), "embed_streams": ("embedding",),
    "read_streams": ("normed", "strength", "post_normed", "post_strength", "final"),
    "add_streams": ("residual", "hidden"), "ngrams": ("ngrams",), "gate_streams": ("ple_written",),
    "norm_streams": ("ple_normed",), "dilated_conv": ("ple_mixed",),
    "concat": ("joined", "features"),
    "norm": ("normed", "post_normed", "final", "context", "mixer_normed", "mlp_normed"),
    "linears": (*OF_NORMED, "value", *OF_NGRAMS),
    "linear": ("fused", *OF_NORMED, "value", "mixer", *OF_NGRAMS),
    "multiply": ("qkv", "gated"),
    "scaled_add": ("residual", "hidden"),
    "lightning_inputs": ("q", "k", "v", "log_decay", "write"),
    "conv": ("mixed",),
    SHORT_CONV.name: ("mixed",),
    "biased_conv": ("mixed",),
    "gdn_inputs": ("q", "k", "v", "log_decay", "beta"),
    "selective_inputs": ("q", "k", "v", "log_decay", "write"),
    **dict.fromkeys(RECURRENCES, ("core", "update")),
    "fused_gdn": ("core",),
    "add_skip": ("skip",),
    "gated_norm": ("gated",),
    "gated_group_norm": ("gated",),
    "attention_inputs": ("query", "key"),
    "key_inputs": ("key",),
    "latent_inputs": ("query", "key", "value"),
    "attend": ("attended",),
    "attend_latents": ("attended",),
    "output_gate": ("opened",),
    "add": ("residual", "hidden", "ple_made", "ple"),
    "mlp": ("mlp",),
    "squared_mlp": ("mlp",),
    "moe": ("mlp",),
    "lm_head": ("logits",),
    "pick": ("pick",),
    "draw": ("pick",),
}
# The same of layers that store latents, and the ops of attention that only the other layers use.
OF_LATENTS = {"query": ("latent_inputs", "linears", "linear"), "key": ("latent_inputs", "linears", "linear"),
              "value": ("latent_inputs", "norm")}  # fmt: skip
OF_ROTATED = frozenset({"attention_inputs", "key_inputs", "attend"})
# The same of layers that norm all heads of a row together.
OF_ROWS = {"query": ("norm",), "key": ("norm",)}
OF_HEADS = frozenset({"attention_inputs", "key_inputs", "output_gate", "attend_latents", "latent_inputs"})
# The ops of layers with a short convolution, and those that only other layers with a conv use.
OF_SHORT_CONV = frozenset({SHORT_CONV.name, "multiply"})
OF_STATES = frozenset({*RECURRENCES, "conv", "gdn_inputs", "gated_norm", "fused_gdn", "plan_ring"})
# The ops of models with residual streams alone, and those that their layers do not use.
OF_STREAMS = frozenset({"embed_streams", "read_streams", "add_streams", "ngrams", "gate_streams", "norm_streams",
                        "dilated_conv"})  # fmt: skip
NOT_OF_STREAMS = frozenset({"embed", "norm"})
# The ops of MiniMax alone, and those that its layers do not use.
OF_MINIMAX = frozenset({"scaled_add", "lightning_inputs"})
NOT_OF_MINIMAX = frozenset({"conv", "gdn_inputs", "add", "output_gate"})
# The same of layers without norms, gates and positions of queries and keys, and of Mamba2.
OF_PROJECTED = {name: ("linears", "linear") for name in ("query", "key", "value")}
OF_GATES = frozenset({
    "attention_inputs", "key_inputs", "output_gate", "attend_latents", "latent_inputs", "gdn_inputs", "gated_norm"})
OF_MAMBA2 = frozenset({"biased_conv", "selective_inputs", "add_skip", "gated_group_norm", "squared_mlp"})
# Ops whose results come from one call.
TOGETHER = ("gdn_inputs", "selective_inputs", "lightning_inputs", *RECURRENCES, "attention_inputs", "latent_inputs")

READERS = ("ngrams", "ple_mixed", "mixed", "core", "update", "attended")  # results that depend on reads from memory

# Component of memory -> the ops that write it or compute its address, the nearest first.
WRITERS: dict[str, tuple[str, ...]] = {
    "conv": ("conv", "biased_conv", SHORT_CONV.name, "move"),
    "state": (*RECURRENCES, "fused_gdn", "move", "plan_ring"),
    "ngram": ("ngrams", "move"),
    "ple_conv": ("dilated_conv", "move"),
    "keys": ("store_rows", "place_rows"),
    "values": ("store_rows", "place_rows"),
    "length": ("advance", "accept"),
    "root": ("choose", "accept", "store_rows"),
    "tail": ("store_rows", "place_rows"),
}

# Component of memory -> its name in sentences, where the two differ.
NAMES = {"conv": "conv windows", "state": "states", "ngram": "tokens of n-grams", "ple_conv": "windows of n-grams"}


def ops_of(place: Place, others: Collection[str] = ()) -> tuple[str, ...]:
    """The ops that may have produced this place, the likeliest first. others: ops that the model does not use."""
    made = tuple(op for op, components in RESULTS.items() if place.component in components)
    for unused, others_make in ((OF_ROTATED, OF_LATENTS), (OF_HEADS, OF_ROWS), (OF_GATES, OF_PROJECTED)):
        if {*others} >= unused:
            made = others_make.get(place.component, made)
    made = WRITERS.get(place.component, (*made, "accept", "choose") if place.component == "pick" else made)
    return tuple(op for op in made if op not in others)


def unused_by(config: ModelConfig) -> frozenset[str]:
    """The ops of recurrences and attention that a model does not use."""
    if config.latent:
        attention = OF_ROTATED | (set() if config.rotary_dim else {"output_gate", "latent_inputs"})
    else:
        attention = OF_HEADS if config.row_norms else frozenset({"attend_latents", "latent_inputs"})
    recurrent = OF_SHORT_CONV if config.recurrence.has_state else OF_STATES
    recurrent |= OF_STREAMS if config.streams == 1 else NOT_OF_STREAMS
    if config.recurrence.inputs == "selective":
        return OF_GATES | OF_SHORT_CONV | OF_MINIMAX | OF_STREAMS | (RECURRENCES.keys() - {config.recurrence.name})
    recurrent |= OF_MAMBA2 | (NOT_OF_MINIMAX if config.residual_factors else OF_MINIMAX)
    return attention | recurrent | (RECURRENCES.keys() - {config.recurrence.name})


def siblings(place: Place) -> tuple[Place, ...]:
    """All results of the op call that produced this place."""
    together = next((RESULTS[op] for op in TOGETHER if place.component in RESULTS[op]), (place.component,))
    return tuple(place._replace(component=component) for component in together)


def also_writes(place: Place, memory: Place) -> bool:
    """Whether an op that produces `place` also writes this memory, in the same layer."""
    same = (place.stage, place.layer) == (memory.stage, memory.layer)
    return same and bool(set(WRITERS.get(memory.component, ())) & set(ops_of(place)))


def memory_name(place: Place) -> str:
    """conv windows, states, keys, draft keys"""
    name = NAMES.get(place.component, place.component)
    return name if place.stage == "trunk" else f"draft {name}"

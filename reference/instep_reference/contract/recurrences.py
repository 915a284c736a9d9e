"""The table of gated linear recurrences: what a layer of each kind computes, shows and keeps.

All are one recurrence with other gates. A value head keeps a state S [K, V], and for every token

    S <- exp(log_decay) S;   u <- w v - S^T (e k);   S <- S + k u^T;   o <- S^T q

With the delta rule w = e = beta. An outer product recalls nothing: e = 0. A gated short convolution is a row too: it
has a conv window and no state. Both sides and the harness read a row of this table, and name no kind. Leaves out: the
weights, whose form depends on the model type (`checkpoint_tensor_shapes.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

# Letters: H, HV, K, V and D as in `ModelConfig`; C: channels of the conv; W-1: its earlier inputs; QKV: q, k and v of a
# head; HVV: values of all heads; S: residual streams; SD: all of them; E: an embedding of n-grams; N-1: earlier tokens
# that it reads; R: earlier inputs of its conv.
Axes = tuple[str, ...]


@dataclass(frozen=True)
class Recurrence:
    """One kind.

    name   of the kind, and of its op: in op sets, `instep op` and the kit
    decay  "head": a state forgets at one rate; "channel": at one rate per key channel; "fixed": at one rate per head
           that no token changes; "none": there is no state
    types  model types whose "linear_attention" it is
    update "delta": a token writes what its key does not already recall; "outer": it writes its whole value
    gates  projections of a row from which the decay and the gates follow
    inputs "normed": q and k are normed, and the gates are sigmoids; "selective": q and k are as they leave the conv,
           and decay and write gate follow from one step; "projected": q, k and v are a silu of one projection
    skip   whether a token's value is added to its read-out, times a weight of the head
    norm   of the read-out: "head": of each head, then gated; "group": gated, then of all heads that read one key head;
           "row": of all heads together, then gated
    low_rank  those of `types` in which z and a follow from z_low and a_low, which are results too
    bound  nats: the least log_decay of the safe gates of released models (`ModelConfig.decay_bound`); None: no released
           model has such a gate. A safe gate is bound sigmoid(exp(A_log) (a + dt_bias)), and the other one
           -exp(A_log) softplus(a + dt_bias), which has no bound
    conv   the segments of the conv's channels, in order: components that the conv's output is split into
    memory  what such a layer keeps of a request: fields of `RequestState`, in the order in which the layer writes them
    state  axes of a state in the canonical layout
    """

    name: str
    decay: Literal["head", "channel", "fixed", "none"]
    types: tuple[str, ...]
    update: Literal["delta", "outer"] = "delta"
    gates: tuple[str, ...] = ("b", "a")
    inputs: Literal["normed", "selective", "projected"] = "normed"
    skip: bool = False
    norm: Literal["head", "group", "row"] = "head"
    low_rank: tuple[str, ...] = ()
    bound: float | None = None
    conv: tuple[str, ...] = ("q", "k", "v")
    memory: tuple[str, ...] = ("conv", "state")
    state: Axes = ("HV", "K", "V")

    @property
    def forms(self) -> tuple[str, str]:
        """The forms of its op, in declarations of products: token by token, and over a prefill chunk."""
        return f"{self.name}.window", f"{self.name}.chunk"

    @property
    def gate(self) -> Axes:
        """The axes of a token's decay, and of its input."""
        return ("HV", "K") if self.decay == "channel" else ("HV",)

    @property
    def has_state(self) -> bool:
        return "state" in self.memory

    @property
    def write(self) -> str:
        """The component that is the write gate w. Only with the delta rule it also erases, and then it is beta."""
        return "beta" if self.update == "delta" else "write"

    @cached_property
    def places(self) -> Mapping[str, Axes]:
        """The axes of every result of such a layer alone, per row, by component, in the order of the data flow."""
        if not self.has_state:
            return {"in_gate": ("D",), "out_gate": ("D",), "x": ("D",), "qkv": ("C",), "mixed": ("C",), "gated": ("D",)}
        if self.inputs == "projected":
            head, key = ("HV", "V"), ("H", "K")
            return {"qkv": ("H", "QKV"), "z": head, "q": key, "k": key, "v": head, "log_decay": self.gate,
                    self.write: ("HV",), "core": head, "update": head, "gated": ("HVV",)}  # fmt: skip
        head, low = ("HV", "V"), {"z_low": ("V",), "a_low": ("K",)} if self.low_rank else {}
        gates = {name: {"b": ("HV",), "a": self.gate}[name] for name in self.gates}
        return low | {
            "qkv": ("C",), "z": head, **gates, "mixed": ("C",), "q": ("H", "K"), "k": ("H", "K"),
            "v": head, "log_decay": self.gate, self.write: ("HV",), "core": head, "update": head,
            **({"skip": head} if self.skip else {}), "gated": head,
        }


# Gated DeltaNet (arXiv:2412.06464). Only code that serves this kind alone may name it: its fused kernels, their shapes.
GDN = Recurrence("gdn", "head", types=("qwen3_5", "qwen3_next", "qwen3_5_moe", "olmo_hybrid", "qwen4_exp"))
RECURRENCES: Mapping[str, Recurrence] = {row.name: row for row in (
    GDN,
    # Kimi Delta Attention (arXiv:2510.26692)
    Recurrence("kda", "channel", types=("kimi_linear", "bailing_hybrid"), low_rank=("kimi_linear",), bound=-5.0),
    # Mamba2 (arXiv:2405.21060): k is B, q is C, both of a group of heads; v is x, and w the step dt
    Recurrence("mamba2", "head", types=("nemotron_h",), update="outer", gates=("a",), inputs="selective", skip=True,
               norm="group", conv=("v", "k", "q")),
    # Lightning attention (arXiv:2401.04658): q, k and v come from one projection through a silu, without a conv
    Recurrence("lightning", "fixed", types=("minimax",), update="outer", gates=(), inputs="projected", norm="row",
               conv=(), memory=("state",)),
)}  # fmt: skip
# A gated short convolution (LFM2): out <- C * conv(B * x), with B and C from the row itself. Its layers have no state.
SHORT_CONV = Recurrence("short_conv", "none", types=("lfm2",), conv=("x",), memory=("conv",))
# Every mixer with a fixed memory: a conv window, a state, or both.
WITH_FIXED_MEMORY: Mapping[str, Recurrence] = {**RECURRENCES, SHORT_CONV.name: SHORT_CONV}
# The block before a mixer that adds embeddings of n-grams (Qwen4-Exp). It keeps a dilated conv's window and tokens.
PLE = "ple"
PLE_PLACES: Mapping[str, Axes] = {  # the axes of its results, per row, in the order of the data flow
    "ngrams": ("E",), "ple_key": ("SD",), "ple_value": ("D",), "ple_written": ("SD",), "ple_normed": ("SD",),
    "ple_mixed": ("SD",), "ple_made": ("SD",), "ple": ("SD",),
}
# Results of a model with several residual streams that have another shape than its other rows.
STREAM_PLACES: Mapping[str, Axes] = {
    "embedding": ("SD",), "strength": ("S",), "residual": ("SD",), "post_strength": ("S",), "hidden": ("SD",),
}
KEPT_BY: Mapping[str, tuple[str, ...]] = {  # what each block keeps of a request: fields of `RequestState`
    PLE: ("ngram", "ple_conv"), **{name: row.memory for name, row in WITH_FIXED_MEMORY.items()},
}

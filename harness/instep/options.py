"""The options that set up the engine under test, with their help texts, for every command and the plugin.

This file does not import torch, because pytest reads it in every session. Leaves out: what the options do
(`instep.setting`).
"""

from collections.abc import Collection, Iterable, Mapping

from instep_reference.contract.errors import BadInput

# Help texts for commands without a trace, and for commands that accept a proposer.
DRAFTER = "How drafts are made: eagle, vanilla, or external (supplied from outside)."
PROPOSED = "How drafts are made: eagle, vanilla, ngram (looked up in the text), or a callable, module:attribute."

# Field of `instep.setting.Setting` -> its type and its help text.
OPTIONS: Mapping[str, tuple[type[str] | type[bool] | type[int], str]] = {
    "ops": (str, "Op set, engine or module:attribute."),
    "engine": (str, "Your own engine, driven through callbacks: module:attribute (docs/your-engine.md)."),
    "device": (str, "cpu, cuda, or a certain card, as in cuda:1."),
    "dtype": (str, "Activations: float32, bfloat16, float16 or float64."),
    "state_dtype": (str, "How states are stored: float32, bfloat16, float16, or float8_e4m3fn with scales."),
    "state_rounding": (str, "How states are rounded to 16 or 8 bits: nearest, or stochastic:SEED, as in stochastic:7."),
    "kv_dtype": (str, "How KV is stored: like activations by default, or float8_e4m3fn with scales."),
    "kept_dtype": (str, "How tracked prefixes store states: like the pool by default, or int8 with scales."),
    "chunk_dtype": (str, "States that a prompt's chunk leaves to a prefix: like the pool, or bfloat16 or float16."),
    "ring_dtype": (str, "Keys and updates in a ring: one part in fp32, or a high and a low part in this dtype."),
    "layout": (str, "Physical order of a state: VK or KV."),
    "snapshot_layout": (str, "Physical order in the pool of snapshots; by default that of --layout."),
    "strategy": (str, "How states are committed: snapshot, columns, rerun, lazy_rerun, or yours."),
    "conv": (str, "How conv windows are committed: windows, widened, or yours."),
    "drafter": (str, "How drafts are made: eagle, vanilla, block, or external (supplied); by default as in the trace."),
    "graphs": (bool, "Capture rounds in graphs: CUDA graphs, or an emulator of them on a CPU."),
    "prompt_graphs": (str, "Capture forwards with prompts too, for these numbers of tokens: 16,64. Needs --graphs."),
    "overlap": (bool, "Launch a round before the counts of the round before are known."),
    "guarded": (bool, "Put red zones between the units of every pool."),
    "ranks": (int, "Tensor-parallel ranks of the engine, in lock step in this process (docs/ranks.md)."),
    "experts": (str, "Routed experts of a rank: columns of each, or whole ones."),
    "comm": (str, "How ranks or stages exchange data: lockstep, or gloo or nccl, each in a process."),
    "stages": (int, "Pipeline stages of the engine, in lock step in this process (docs/stages.md)."),
    "micro_batches": (int, "Parts of a batch that are in flight over the stages at a time. Needs --stages."),
    "dp": (int, "Replicas of a data-parallel group, in lock step in this process (docs/stages.md)."),
    "stress": (str, "Stress that lets races on a GPU show: some of jitter,squeeze,poison,neighbour (docs/ci.md)."),
}

# Options with a closed list of values. A dash may be typed for an underscore.
IN_TURNS = "lockstep"
WIDTHS = ("float64", "float32", "bfloat16", "float16")
LAYOUTS = ("VK", "KV")
FP8, INT8 = "float8_e4m3fn", "int8"
STRESSES = ("jitter", "squeeze", "poison", "neighbour")
CHOICES: Mapping[str, tuple[str, ...]] = {
    "dtype": WIDTHS, "state_dtype": (*WIDTHS, FP8), "kv_dtype": (FP8,), "kept_dtype": (INT8,),
    "chunk_dtype": ("bfloat16", "float16"), "ring_dtype": ("bfloat16", "float16"), "layout": LAYOUTS,
    "snapshot_layout": LAYOUTS, "comm": (IN_TURNS, "gloo", "nccl"), "experts": ("columns", "whole"),
}
TIERS = ("T0", "T1", "T2", "T2d", "T3", "T4")
# Values that a shell completes, for options that accept others as well.
USUAL: Mapping[str, tuple[str, ...]] = {
    "ops": ("plain", "ledger", "triton", "precise", "invariant", "fla"), "device": ("cpu", "cuda"),
    "strategy": ("rerun", "snapshot", "columns", "lazy_rerun"), "conv": ("windows", "widened"),
    "drafter": ("eagle", "vanilla", "block", "external"), "stress": STRESSES,
}

# Options that only some commands have.
SOMETIMES = ("engine", "ranks", "experts", "comm", "stages", "micro_batches", "dp", "stress")


def known(name: str, value: str) -> str:
    """Normalise the value of an option; refuse a value that is not in its closed list."""
    spelled, values = value.replace("-", "_"), CHOICES.get(name)
    if values is None:
        return value
    if spelled not in values:
        raise BadInput(f"--{name.replace('_', '-')}", found=value, expected=either(values))
    return spelled


def either(values: Collection[str]) -> str:
    """The values as an error lists them."""
    return " or ".join(values) if len(values) == 2 else f"one of {', '.join(values)}"


def tiers_named(words: Iterable[str]) -> list[str]:
    """Split the values of --tiers, as in T0,T2d; refuse a word that names no tier."""
    names = [name.strip() for word in words for name in word.split(",")]
    for name in names:
        if name not in TIERS:
            raise BadInput("--tiers", found=repr(name), expected=f"some of {', '.join(TIERS)}, with commas between")
    return names

"""The options that say how a subject is set up, by name, with a sentence each: for every command and the plugin.

Leaves out: what they mean (`instep.replay.setting`), and torch: pytest reads this file in every session.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

# Of commands without a trace to say it, and of those in which somebody may propose.
DRAFTER = "How drafts are made: eagle, vanilla, or external, handed in."
PROPOSED = "How drafts are made: eagle, vanilla, ngram (looked up in the text), or a callable, module:attribute."

# Field of `instep.replay.setting.Setting` -> its type, and what `--help` says of it.
OPTIONS: Mapping[str, tuple[type[str] | type[bool], str]] = {
    "ops": (str, "Op set, engine or module:attribute."),
    "engine": (str, "An engine of your own, led by verbs: module:attribute (docs/your-engine.md)."),
    "device": (str, "cpu or cuda; another card than the first: cuda:1."),
    "dtype": (str, "Activations: float32, bfloat16, float16 or float64."),
    "state_dtype": (str, "How states are stored: float32, bfloat16, float16, or float8_e4m3fn with scales."),
    "state_rounding": (str, "How they are rounded to 16 bits or 8: nearest, or by chance, as stochastic:7 of seed 7."),
    "kv_dtype": (str, "How KV is stored: as activations if left out, or float8_e4m3fn with scales."),
    "layout": (str, "Physical order of a state: VK or KV."),
    "snapshot_layout": (str, "The same in the pool of snapshots; left out: as --layout."),
    "strategy": (str, "How states are committed: snapshot, columns, rerun, lazy_rerun, or yours."),
    "conv": (str, "How conv windows are committed: windows, widened, or yours."),
    "drafter": (str, "How drafts are made: eagle, vanilla, or external, handed in; left out: as the trace says."),
    "graphs": (bool, "Hold rounds in graphs: CUDA's, or an emulator's."),
    "overlap": (bool, "Launch a round before the counts of the round before are known."),
    "guarded": (bool, "Put red zones between the units of every pool."),
}

# Of options that have a closed list of values; a dash is as good as an underline.
WIDTHS = ("float64", "float32", "bfloat16", "float16")
LAYOUTS = ("VK", "KV")
FP8 = "float8_e4m3fn"
CHOICES: Mapping[str, tuple[str, ...]] = {
    "dtype": WIDTHS, "state_dtype": (*WIDTHS, FP8), "kv_dtype": (FP8,), "layout": LAYOUTS, "snapshot_layout": LAYOUTS,
}
TIERS = ("T0", "T1", "T2", "T2d", "T3", "T4")
# Values that a shell completes, of options that take others, too.
USUAL: Mapping[str, tuple[str, ...]] = {
    "ops": ("plain", "ledger", "triton", "precise", "invariant", "fla"), "device": ("cpu", "cuda"),
    "strategy": ("rerun", "snapshot", "columns", "lazy_rerun"), "conv": ("windows", "widened"),
    "drafter": ("eagle", "vanilla", "external"),
}

SOMETIMES = ("engine",)  # options that only some commands have


def known(name: str, value: str) -> str:
    """The value of an option as it is spelled here; one that is not in its closed list is refused."""
    spelled, values = value.replace("-", "_"), CHOICES.get(name)
    if values is None:
        return value
    if spelled not in values:
        from instep_reference.contract.errors import BadInput

        raise BadInput(f"--{name.replace('_', '-')}", found=value, expected=either(values))
    return spelled


def either(values: Collection[str]) -> str:
    """The values as an error lists them."""
    return " or ".join(values) if len(values) == 2 else f"one of {', '.join(values)}"


def tiers_named(words: Iterable[str]) -> list[str]:
    """Tiers as they may be typed, T0,T2d, as often as wanted; what is none is refused."""
    names = [name.strip() for word in words for name in word.split(",")]
    for name in names:
        if name not in TIERS:
            from instep_reference.contract.errors import BadInput

            raise BadInput("--tiers", found=repr(name), expected=f"some of {', '.join(TIERS)}, with commas between")
    return names

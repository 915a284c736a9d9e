"""The options that say how a subject is set up, by name, with a sentence each: for every command and the plugin.

Leaves out: what they mean (`instep.replay.setting`), and torch: pytest reads this file in every session.
"""

from __future__ import annotations

from collections.abc import Mapping

# Of commands without a trace to say it, and of those in which somebody may propose.
DRAFTER = "How drafts are made: eagle, vanilla, or external, handed in."
PROPOSED = "How drafts are made: eagle, vanilla, ngram (looked up in the text), or a callable, module:attribute."

# Field of `instep.replay.setting.Setting` -> its type, and what `--help` says of it.
OPTIONS: Mapping[str, tuple[type[str] | type[bool], str]] = {
    "ops": (str, "Op set, engine or module:attribute."),
    "engine": (str, "An engine of your own, led by verbs: module:attribute (docs/your-engine.md)."),
    "device": (str, "cpu or cuda."),
    "dtype": (str, "Activations: float32, bfloat16, float16 or float64."),
    "state_dtype": (str, "How states are stored: float32, bfloat16, float16, or float8_e4m3fn with scales."),
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

SOMETIMES = ("engine",)  # options that only some commands have

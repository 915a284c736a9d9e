"""The catalogue of planted faults: one file per family, each a tuple FAULTS, and one line per family in FILES.

Leaves out: what a fault is (`instep_proof/faults/catalogue/fault.py`), and classes of faults in features that do not
exist.
"""

from collections.abc import Mapping
from importlib import import_module

from .fault import TRACES as TRACES
from .fault import Fault

FILES = {
    "rollback": "rollback",
    "rings": "rings",
    "parts": "split_rings",
    "dispatch": "wrong_dispatch",
    "graph": "graph",
    "prompts": "prompt_graphs",
    "slots": "slots",
    "chunks": "chunks",
    "scheduling": "scheduling",
    "draft": "draft",
    "drafters": "drafters",
    "numerics": "numerics",
    "norms": "norms",
    "paths": "one_path_differs",
    "storage": "storage",
    "neighbours": "taken_from_neighbours",
    "answers": "changed_answers",
    "readings": "late_reads",
    "sampling": "sampling",
    "prefixes": "prefixes",
    "crossings": "crossings",
    "rounded": "rounded_prefixes",
    "tiers": "offloaded_prefixes",
    "trees": "trees",
    "widths": "widths",
    "caps": "caps",
    "blocks": "blocks",
    "experts": "experts",
    "kimi": "kimi_linear",
    "lfm2": "lfm2",
    "nemotron": "nemotron",
    "ling": "ling",
    "olmo": "olmo_hybrid",
    "minimax": "minimax",
    "qwen4": "qwen4",
    "ranks": "ranks",
    "transfers": "transfers",
    "stages": "stages",
    "groups": "groups",
    "others": "miscellaneous",
}
FAMILIES: Mapping[str, tuple[Fault, ...]] = {
    family: import_module(f".{file}", __name__).FAULTS for family, file in FILES.items()
}
FAMILY_OF = {fault.id: family for family, faults in FAMILIES.items() for fault in faults}


def by_id() -> dict[str, Fault]:
    """Map every fault's name to the fault."""
    return {fault.id: fault for faults in FAMILIES.values() for fault in faults}

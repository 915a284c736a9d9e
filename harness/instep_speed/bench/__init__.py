"""The benchmark: check every answer before and after timing, and time it next to the kernels of other packages.

    kinds/     one file per kind of work: its grid, its arms, and how an answer is checked; `KINDS` is their table
    peers/     kernels of other packages as further arms, if they are installed or unpacked
    bench_types.py    the types of kinds, cells and arms, and the machine that they run on
    interleaved_timing.py   interleaved times of captured graphs, or of calls on a CPU; the measured rates of the
    machine
    answer_check.py   whether an answer is right
    measure_arms.py    the arms of a cell: judged, timed, judged again
    run.py     the cells in order, within the time limit
    resume.py  the schema of a result file, resuming a grid from it, and joining the results of several calls
    result_document.py  tables and plots of a result

Leaves out: comparing two versions of a source (`instep gate`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .bench_types import Kind

KINDS: dict[str, str] = {
    "strategies": "verify and commit under every commit strategy",
    "decode": "the recurrence of one token",
    "channel_decay": "the recurrence with a decay per key channel (KDA): decodes, re-runs, prompts",
    "mixer": "conv, norms, gates and recurrence of one token",
    "conv": "the causal conv of windows and prompts",
    "attend": "attention over paged KV",
    "pick": "the argmax over the vocabulary",
    "products": "linear layers, MLP, experts and head",
    "rounds": "whole rounds of a model: draft, verify, commit",
    "prompts": "whole rounds with a prompt in each, eagerly and in graphs",
    "decoding": "whole texts, by step count and with the controller",
    "prefill": "the recurrence of prompts",  # last, because self-tuning peers may take more than their share
}


def kind(name: str) -> Kind:
    """The kind with this name."""
    found: Kind = import_module(f".kinds.{name}", __name__).KIND
    return found

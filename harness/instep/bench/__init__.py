"""The benchmark: every kind of work in a table, each answer checked before and behind the timing, peers beside.

    kinds/     one file per kind of work: its grid, its arms, and how an answer is checked; `KINDS` below is their table
    peers/     kernels of other packages as further arms, where they are installed or unpacked
    base.py    what kinds and arms are, and the ground that they run on
    clock.py   interleaved times of captured graphs, or of calls on a CPU; the measured rates of the machine
    right.py   whether an answer is right
    arms.py    the arms of a cell: judged, timed, judged again
    run.py     cells in their order, within the minutes
    schema.py  what a file of the benchmark must look like
    kept.py    a grid that goes on where its file stands; results of several calls that become one
    render.py, plots.py  tables, the result file, SVG

Leaves out: comparing two versions of a source (`instep gate`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Kind

KINDS: dict[str, str] = {
    "strategies": "verify and commit under every commit strategy",
    "decode": "the recurrence of one token",
    "mixer": "conv, norms, gates and recurrence of one token",
    "conv": "the causal conv of windows and prompts",
    "attend": "attention over paged KV",
    "pick": "the argmax over the vocabulary",
    "products": "linear layers, MLP, experts and head",
    "rounds": "whole rounds of a model: draft, verify, commit",
    "decoding": "whole texts, by step count and with the controller",
    "prefill": "the recurrence of prompts",  # last: peers that tune themselves may take more than their share
}


def kind(name: str) -> Kind:
    """The kind of that name."""
    found: Kind = import_module(f".kinds.{name}", __name__).KIND
    return found

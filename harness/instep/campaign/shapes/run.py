"""Runs a model in the shape of a real one, with random weights, through a course, with every check that can run.

The reference cannot hold such a model as a whole, so checks that need a whole reference are not among them.

Leaves out: the checks (`run/large_model.py`) and the course itself (`forced_trace.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from ...diagnose import explain_outcome
from ...run.large_model import outcome
from ...run.replay import Outcome, must_have, must_reach
from ...setting import Setting
from . import shape
from .forced_trace import course
from .random_weights import random_checkpoint

LAYERS = 4  # three GDN layers and one attention layer, plus the draft head


def shaped(
    name: str, setting: Setting, *, layers: int = LAYERS, vocab: int | None = None, until: int | None = None,
    judged: Collection[int] | None = None,
) -> Outcome:
    """Check one shape. layers, vocab: how much of the model is kept; judged: the layers to compare (None: all)."""
    config = shape(name, layers=layers, vocab=vocab)
    must_have(judged or (), config)
    checkpoint = random_checkpoint(config, device=setting.device)
    named = f"{name}, {layers} layers"
    trace = replace(course(checkpoint, named, ops=setting.ops), path=Path(name))  # the name in the command
    must_reach(until, trace)
    size = ("--layers", str(layers), *(() if vocab is None else ("--vocab", str(vocab))))
    return explain_outcome(outcome(
        trace, checkpoint, setting, until=until, layers=judged, kept=judged, again=("instep", "shapes", *size)
    ))  # fmt: skip

"""A model in the shape of a real one, its weights drawn, through a course: every check that needs no whole reference.

Leaves out: the checks (`replay/large_model.py`) and the course itself (`course.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from ..replay.large_model import outcome
from ..replay.replay import Outcome, must_have
from ..replay.setting import Setting
from . import shape
from .course import course
from .random_weights import random_checkpoint

LAYERS = 4  # three of GDN and one of attention; the draft head comes to them


def shaped(
    name: str, setting: Setting, *, layers: int = LAYERS, vocab: int | None = None, until: int | None = None,
    judged: Collection[int] | None = None,
) -> Outcome:
    """One shape. layers, vocab: how much of the model is kept; judged: the layers that are looked at, None: all."""
    config = shape(name, layers=layers, vocab=vocab)
    must_have(judged or (), config)
    checkpoint = random_checkpoint(config, device=setting.device)
    named = f"{name}, {layers} layers"
    trace = replace(course(checkpoint, named, ops=setting.ops), path=Path(name))  # what stands there in the command
    size = ("--layers", str(layers), *(() if vocab is None else ("--vocab", str(vocab))))
    return outcome(
        trace, checkpoint, setting, until=until, layers=judged, kept=judged, again=("instep", "shapes", *size)
    )

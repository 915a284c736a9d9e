"""Usage errors of the pytest plugin: an unknown tier, op set, setting or model.

Functions import torch when they are called, not earlier. Leaves out: the options, and what the session collects
(`plugin.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from .options import tiers_named

PLAN = "plan"  # name of the item that runs the setting from the trace's header


def must_be_there(named: Iterable[str], engine: str | None, typed: dict[str, Any], checkpoint: Path | None) -> None:
    """Raise one usage error for an unknown op set, setting or model, before anything runs.

    named: names of the op sets and engines, as in test items
    engine: the one of them that is driven through callbacks
    typed: the setting that all items share
    """
    from instep_optimized.ops.interpreter import wanted_on
    from instep_reference.contract.checkpoint import OnDisk
    from instep_reference.contract.errors import InstepError

    from .adapters import find
    from .setting import Setting
    from .subject.engines.verbs import find as find_engine

    wanted_on(typed.get("device", "cpu"))  # as the command does, before a module of the user imports Triton
    option = "ops"
    try:
        for name in dict.fromkeys(named):
            given, option = dict(typed), "engine" if name == engine else "ops"
            if name == PLAN:  # the strategies of its op sets are not known yet
                given = {field: value for field, value in typed.items() if field not in ("strategy", "conv")}
            else:
                (find_engine if name == engine else find)(name)
                given[option] = name
            if not missing(given.get("device", "cpu")):
                Setting.of(**given)
        option = "checkpoint"
        if checkpoint is not None:
            OnDisk.open(checkpoint)
    except InstepError as error:
        said = " ".join(str(error).split())
        said = f"--instep-{said.removeprefix('--')}" if said.startswith("--") else f"--instep-{option}: {said}"
        raise pytest.UsageError(said) from None


def must_be_tiers(words: list[str]) -> None:
    from instep_reference.contract.errors import BadInput

    try:
        tiers_named(words)
    except BadInput as error:
        raise pytest.UsageError(f"--instep-tiers: found {error.found}, expected {error.expected}") from None


def missing(device: str) -> str:
    """Why this machine lacks the device; empty if it is there, or if the name is no device."""
    import torch

    kind, _, number = device.partition(":")
    if kind != "cuda" or (number and not number.isdecimal()):
        return ""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return "" if int(number or 0) < there else f"this machine has no CUDA device {number or 0}: it has {there}"

"""Usage errors of the pytest plugin: a tier, an op set, a setting or a model that there is not.

Leaves out: which options there are, and what the session collects (`plugin.py`). Loads torch only when it is asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from .options import tiers_named

PLAN = "plan"  # name of the item that runs what the trace's own header plans


def must_be_there(named: Iterable[str], engine: str | None, typed: dict[str, Any], checkpoint: Path | None) -> None:
    """An op set, a setting or a model that there is not is one usage error, before anything runs.

    named: who serves, as items are called; engine: the one of them that is led by verbs; typed: what all items share
    """
    from instep_reference.contract.checkpoint import OnDisk
    from instep_reference.contract.errors import InstepError

    from .adapters import find
    from .engines.verbs import find as find_engine
    from .replay.setting import Setting

    option = "ops"
    try:
        for name in dict.fromkeys(named):
            given, option = dict(typed), "engine" if name == engine else "ops"
            if name == PLAN:  # which strategies its op sets bring is not known before
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
    """Why this device cannot be had on this machine; a name that is none is another matter."""
    import torch

    kind, _, number = device.partition(":")
    if kind != "cuda" or (number and not number.isdecimal()):
        return ""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return "" if int(number or 0) < there else f"no CUDA device {number or 0} is here: there are {there}"

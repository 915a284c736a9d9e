"""Decode the same prompts in several arms: with a step controller, and with each fixed count.

Leaves out: timing (`replayed_acceptance.py` plays the arms on a model of real size).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from instep.generate.decode import Ask, Decoded, decode
from instep_reference.contract.engine import Commit

ADAPTIVE = "adaptive"
# Kinds of prompts that the fixture lacks: text that every draft head follows, and text that none can.
REPEATED = (b"spam, eggs, ", b"    pass\n", b"0, 1, 2, 3, ")
REPEATS, NOISE_BYTES, NOISES = 8, 48, 3


def arms(ask: Ask, adaptive: dict[str, Any], fixed: tuple[int, ...]) -> dict[str, Decoded]:
    """Map each arm to its decoding: `adaptive`, and the number of drafts for each of `fixed`."""
    asked = {ADAPTIVE: dataclasses.replace(ask, adaptive=adaptive)}
    asked |= {str(steps): dataclasses.replace(ask, adaptive=None, num_steps=steps) for steps in fixed}
    return {name: decode(one) for name, one in asked.items()}


def parted(decoded: Mapping[str, Decoded]) -> list[str]:
    """The requests whose tokens differ between some arm and the first one."""
    first, *others = decoded.values()
    return [name for name in first.ask.prompts if any(other.said(name) != first.said(name) for other in others)]


def hardest_first(ask: Ask) -> Ask:
    """Sort the requests by the number of accepted drafts per round, so that the difficulty of the load drifts.

    A batch with easy and hard requests side by side looks the same to a controller all the time.
    """
    accepted: dict[str, list[int]] = {name: [] for name in ask.prompts}
    for event in decode(ask).events:
        if isinstance(event, Commit) and event.accepted is not None:
            for name, path in zip(event.requests, event.accepted, strict=True):
                accepted[name].append(len(path.nodes))
    order = sorted(accepted, key=lambda name: sum(accepted[name]) / max(1, len(accepted[name])))
    return dataclasses.replace(ask, prompts={name: ask.prompts[name] for name in order})


def mixed(prompts: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, tuple[int, ...]]:
    """Prompts of bytes that alternate with repeated text and with noise: easy, ordinary, hard."""
    generator = torch.Generator().manual_seed(seed)
    easy = {f"repeated {number}": tuple(text * REPEATS) for number, text in enumerate(REPEATED)}
    hard = {
        f"noise {number}": tuple(torch.randint(32, 127, (NOISE_BYTES,), generator=generator).tolist())
        for number in range(NOISES)
    }
    extra = [pair for both in zip(easy.items(), hard.items(), strict=True) for pair in both]
    found: dict[str, tuple[int, ...]] = {}
    every = max(1, len(prompts) // len(extra))
    for number, (name, prompt) in enumerate(prompts.items()):
        if number % every == 0 and extra:
            found.update([extra.pop(0)])
        found[name] = prompt
    return found | dict(extra)

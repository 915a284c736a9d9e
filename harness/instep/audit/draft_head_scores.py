"""The model's own draft head over recorded texts: a row for every recorded draft, which scores that draft.

The head runs over a whole text, as draft extend does after every commit: row p combines the target's final row of
position p with the token at p + 1. A window at length L begins with row L - 1, and each further draft is scored after
the recorded draft before it, with the head's own row of the step before. So one draft that is not the head's own hides
no later one. Leaves out: several MTP layers, and drafters without a head, whose drafts are another choice by design.
"""

from collections.abc import Sequence
from typing import cast

import torch

from instep_reference import trunk
from instep_reference.attention import AttentionMemory
from instep_reference.contract.checkpoint import OnDisk
from instep_reference.contract.place_names import See
from instep_reference.draft import head
from instep_reference.weights import DraftWeights, Weights, layer_of, norm_of

from ..checks.error_measurement import relative_error
from .layerwise_reference import ROWS, Pass, Read, embedding_of
from .token_origins import Text, Window

HEADS = 1  # of the MTP layers, in an eagle chain
Steps = dict[int, tuple[torch.Tensor, AttentionMemory]]  # node of a window -> the head's row there, its cache


def drafted(disk: OnDisk, read: Read, texts: Sequence[Text]) -> Read:
    """The rows from which every recorded draft is scored, in the order of texts, windows and drafts.

    read: the final rows of all positions
    """
    final, noise = dict[int | None, torch.Tensor](), dict[int, torch.Tensor]()
    for draw, each in read.passes.items():
        final[draw] = _of_pass(disk, each, read.final[draw], texts)
    counts = [len(text.run) for text in texts]
    for draw, errors in read.noise.items():
        off = relative_error(final[draw].to(torch.float64), final[None]).amax(0)
        fed = [one[window.at - 1] for one, text in zip(torch.split(errors, counts), texts, strict=True)
               for window in text.windows for _ in window.picks]  # fmt: skip
        noise[draw] = torch.maximum(torch.stack(fed), off)
    return Read(read.passes, final, noise)


def _of_pass(disk: OnDisk, each: Pass, final: torch.Tensor, texts: Sequence[Text]) -> torch.Tensor:
    """The head's rows of one reading of the texts."""
    spoken = {token for text in texts for token in (*text.prompt, *text.said)}
    rows, number = embedding_of(disk, spoken | {pick for text in texts for one in text.windows for pick in one.picks})
    stored = disk.read(name for name in disk.stored if name.startswith("mtp."))

    def get(name: str) -> torch.Tensor:
        return stored[name].to(each.width)

    config, embedding = disk.config, rows.to(each.width)
    draft = DraftWeights(
        get("mtp.fc.weight"), norm_of(config, "mtp.pre_fc_norm_embedding", get),
        norm_of(config, "mtp.pre_fc_norm_hidden", get), norm_of(config, "mtp.norm", get),
        (layer_of(config.drafter(), "mtp.layers.0", 0, stored, get),),
    )
    weights = Weights(config, embedding, (), draft.norm, embedding, draft)
    found = []
    with each.begin(weights, False):
        for text, hidden in zip(texts, torch.split(final, [len(text.run) for text in texts]), strict=True):
            if text.windows:
                tokens = [number[token] for token in (*text.prompt, *text.said)]
                y, cache = _extended(weights, tokens[1:], hidden, each.see)
                for window in text.windows:
                    found += _chained(weights, window, [number[token] for token in window.picks], y, cache, each.see)
    return torch.stack(found)


def _extended(
    weights: Weights, following: Sequence[int], hidden: torch.Tensor, see: See
) -> tuple[torch.Tensor, AttentionMemory]:
    """All rows of a text, and the head's cache after them."""
    done, drafter = [], weights.config.drafter()
    cache = cast(AttentionMemory, trunk.empty_memory(drafter, drafter.mixers[0], hidden.dtype, hidden.device))
    for begin in range(0, len(hidden), ROWS):
        rows = hidden[begin : begin + ROWS]
        y, cache = head.rows(weights, 0, following[begin : begin + len(rows)], rows, cache, begin, "extend", see)
        done.append(y)
    return torch.cat(done), cache


def _chained(
    weights: Weights, window: Window, picks: Sequence[int], y: torch.Tensor, cache: AttentionMemory, see: See
) -> list[torch.Tensor]:
    """The row that scores each draft of a window: that of its parent. picks: its drafts, as rows of the embedding."""
    before = AttentionMemory(cache.keys[: window.at], cache.values[: window.at])
    steps: Steps = {0: (y[window.at - 1 : window.at], before)}
    depths, rows = {0: 0}, []
    for node, parent in enumerate(window.parents, 1):
        if parent not in steps:
            grandparent = window.parents[parent - 1]
            row, before = steps[grandparent]
            at = window.at + depths[grandparent]
            steps[parent] = head.rows(weights, 0, (picks[parent - 1],), row, before, at, f"chain.{parent}", see)
        depths[node] = depths[parent] + 1
        rows.append(steps[parent][0][0])
    return rows

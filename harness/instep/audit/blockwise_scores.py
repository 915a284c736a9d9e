"""Scores from the logits of many rows, without storing all logits: the output matrix is read in blocks of tokens.

Leaves out: the rows (`layerwise_reference.py`), and the judgement from these scores (`tokens.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from instep_reference.contract.checkpoint import OnDisk
from instep_reference.contract.place_names import AFTER_LAYERS, Place
from instep_reference.weights import Weights

from ..tier_allowances import SCALE_FLOOR
from .layerwise_reference import EMBEDDING, Read

HEAD = "lm_head.weight"
TOKENS = 8192  # of the vocabulary, at once
LOGITS = Place("trunk", AFTER_LAYERS, "logits")


MOST = 1 << 28  # maximum size of whole rows of logits at a time, in bytes


def whole_rows(disk: OnDisk, final: torch.Tensor) -> Iterator[torch.Tensor]:
    """The truth's logits [vocab] of each of these final rows, for decisions that need all of them."""
    at_once = max(1, MOST // (8 * disk.config.vocab))
    for begin in range(0, len(final), at_once):
        rows = final[begin : begin + at_once]
        yield from torch.cat([rows @ stored.to(torch.float64).T for _, stored in _matrix(disk)], 1)


def _matrix(disk: OnDisk) -> Iterator[tuple[slice, torch.Tensor]]:
    """The output matrix in blocks of tokens."""
    vocab = disk.config.vocab
    spans = [slice(begin, min(begin + TOKENS, vocab)) for begin in range(0, vocab, TOKENS)]
    yield from zip(spans, disk.rows(EMBEDDING if disk.config.tied else HEAD, spans), strict=True)


@dataclass
class Scores:
    """The truth's scores of each row [rows], and the errors of draws.

    best, second   its two largest logits; pick: the token of the largest, the lowest one on a tie
    own            its logit of the engine's token;  largest: its largest logit by size
    noise          the largest relative error of any draw, of hidden rows or logits
    """

    best: torch.Tensor
    second: torch.Tensor
    pick: torch.Tensor
    own: torch.Tensor
    largest: torch.Tensor
    noise: torch.Tensor


def scored(disk: OnDisk, read: Read, said: torch.Tensor) -> Scores:
    """Score the rows. said [rows]: the token that the engine chose after each row."""
    config, final = disk.config, read.final
    rows = len(said)
    top, tokens = torch.full((rows, 2), -torch.inf, dtype=torch.float64), torch.zeros(rows, 2, dtype=torch.int64)
    own, size = (torch.zeros(rows, dtype=torch.float64) for _ in range(2))
    off = {draw: torch.zeros(2, rows, dtype=torch.float64) for draw in read.noise}  # sum of squares, largest
    squares = torch.zeros(rows, dtype=torch.float64)
    for span, stored in _matrix(disk):
        right = final[None] @ stored.to(torch.float64).T
        for draw, errors in off.items():
            each, weight = read.passes[draw], stored.to(read.passes[draw].width)
            with each.begin(Weights(config, weight, (), weight, weight, None), False):
                drawn = each.see(LOGITS, final[draw] @ weight.T).to(torch.float64)
            errors[0] += (drawn - right).square().sum(1)
            errors[1] = torch.maximum(errors[1], (drawn - right).abs().amax(1))
        squares += right.square().sum(1)
        size = torch.maximum(size, right.abs().amax(1))
        here = (said >= span.start) & (said < span.stop)
        own[here] = right[here].gather(1, (said[here] - span.start)[:, None])[:, 0]
        most = right.topk(min(2, right.shape[1]), dim=1)
        # Earlier blocks come first, so that the lower token stays on a tie.
        top, order = torch.cat([top, most.values], 1).sort(dim=1, descending=True, stable=True)
        top, tokens = top[:, :2], torch.cat([tokens, most.indices + span.start], 1).gather(1, order)[:, :2]
    scales = torch.stack([squares.sqrt(), size]).clamp_min(SCALE_FLOOR)
    noise = torch.stack([
        torch.maximum(read.noise[draw], torch.stack([errors[0].sqrt(), errors[1]]).div(scales).amax(0))
        for draw, errors in off.items()
    ]).amax(0)  # fmt: skip
    return Scores(top[:, 0], top[:, 1], tokens[:, 0], own, size, noise)

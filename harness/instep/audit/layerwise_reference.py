"""Run the reference over whole texts, layer by layer: read a layer, run it over all positions of all texts, free it.

So a checkpoint may be larger than memory, which holds only one layer in fp64 and the hidden rows of the texts.
The truth is fp64. A draw is the reference in the declared width, rounded as declared and summed in another order, as in
a replay (`run/build_compared_engines.py`). Only the errors of draws against the truth are kept, row by row: each
position counts as a separate event, like a decode step.

The model's own draft head has a row for every recorded draft, which scores that draft. The head runs over a whole text,
as draft extend does after every commit: row p combines the target's final row of position p with the token at p + 1. A
window at length L begins with row L - 1, and each further draft is scored after the recorded draft before it, with the
head's own row of the step before. So one draft that is not the head's own hides no later one. Leaves out: several MTP
layers, drafters without a head, whose drafts are another choice by design, and the output matrix (`tokens.py`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from instep_reference import trunk
from instep_reference.attention import AttentionMemory
from instep_reference.chunked_delta_rule import At, Inverse, merged, recur_by_products
from instep_reference.contract.checkpoint import OnDisk
from instep_reference.contract.checkpoint_tensor_shapes import norm_name
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.place_names import AFTER_LAYERS, Place, See
from instep_reference.draft import head
from instep_reference.gdn import GdnMemory, Recurred, Rule, recur
from instep_reference.weights import DraftWeights, Get, LayerWeights, Norm, Weights, layer_of, norm_of, read_of

from ..checks.error_measurement import relative_error
from ..oracle.declared_product_rounding import Operands
from ..oracle.reordered_arithmetic import Reordered, stored
from ..run.build_compared_engines import rounding
from ..subject.declared_rounding import Declared
from ..tier_allowances import TRUTH_ERROR
from .token_origins import Text, Window

BLOCK = 64  # tokens per block of the delta rule if no block is declared
ROWS = 512  # positions per call of a layer: attention weights are [heads, ROWS, positions so far]
EMBEDDING = "model.embed_tokens.weight"
Advance = Callable[[str, int, int | None], None]  # name of the work, how much is done, of how much


def silent(what: str, done: int, of: int | None) -> None:
    """Show no progress."""


@dataclass(frozen=True)
class Precision:
    """How the recorded engine computes.

    activation: of hidden rows; width: of computation on values that are stored narrower; declared: the roundings
    """

    activation: torch.dtype
    width: torch.dtype
    declared: Declared


class Pass:
    """One reading of the texts: the truth (draw None), or a draw."""

    def __init__(self, config: ModelConfig, precision: Precision, draw: int | None) -> None:
        self.config, self.draw, self.precision = config, draw, precision
        self.width = torch.float64 if draw is None else precision.width
        self.generator = torch.Generator().manual_seed(draw or 0)
        self.chance = self.generator if draw else None  # for draws after the first (`rounded_participant`)
        self.operands: Operands | None = None

    def begin(self, weights: Weights, chunk: bool) -> AbstractContextManager[Any]:
        """The arithmetic of some rows. chunk: whether they are a prompt's, for which other products may be declared."""
        if self.draw is None:
            return nullcontext()
        self.operands = Operands(self.precision.declared.products, weights, chunk=chunk, chance=self.chance)
        self.operands.begin(cut=True, by_substitution=self.draw % 2 == 0)
        return Reordered(self.generator, self.operands)

    def see(self, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        if self.operands is None:
            return tensor
        tensor = self.operands.added_up(place, tensor)
        tensor = rounding(self.precision.declared.rounds, self.chance)(place, tensor)
        self.operands.seen(place)
        return tensor

    def layer(self, weights: LayerWeights, index: int, hidden: torch.Tensor, text: Text) -> torch.Tensor:
        """All rows of one text."""
        tokens = torch.tensor(text.run)
        lean = Weights(self.config, hidden, (weights,), hidden, hidden, None)
        memory = trunk.layer_memory(self.config, index, self.width)
        done = []
        for rows, chunk in pieces(len(hidden), len(text.prompt)):
            with self.begin(lean, chunk):
                positions, rule = torch.arange(rows.start, rows.stop), self._rule(chunk)
                out, memory = trunk.layer(
                    self.config, weights, index, "trunk", hidden[rows], memory, positions, self.see,
                    {self.config.mixers[index]: {"rule": rule}} if index in self.config.recurrent else {}, tokens[rows],
                )
            done.append(out)
            if isinstance(memory, GdnMemory) and self.draw is not None:
                memory = replace(memory, state=self._stored(memory.state))
        return torch.cat(done)

    def final(self, norm: Norm, hidden: torch.Tensor) -> torch.Tensor:
        with self.begin(Weights(self.config, hidden, (), hidden, hidden, None), False):
            return self.see(Place("trunk", AFTER_LAYERS, "final"), trunk.read(self.config, norm, hidden)[0])

    def _rule(self, chunk: bool) -> Rule:
        declared, (window, block) = self.precision.declared.products, self.config.recurrence.forms
        if self.operands is None:
            return in_blocks(BLOCK, unrounded)
        if chunk and (product := declared.get(block)) is not None:
            return in_blocks(product.block or BLOCK, self.operands.kept, product.residual, self.operands.inverse)
        if not chunk and self._narrow():
            return self._token_by_token
        return recur if not chunk and window in declared else in_blocks(BLOCK, unrounded)

    def _narrow(self) -> bool:
        return self.precision.declared.rounds.get("state", self.width) != self.width

    def _stored(self, state: torch.Tensor) -> torch.Tensor:
        return stored(state, self.precision.declared.rounds.get("state", self.width), self.chance)

    def _token_by_token(self, *, state: torch.Tensor, **rows: torch.Tensor) -> Recurred:
        """Store a narrow state after every token, as no engine stores it more often."""
        steps = []
        for token in range(rows["v"].shape[1]):
            step = recur(**{name: row[:, token : token + 1] for name, row in rows.items()}, state=state)
            state = self._stored(step.state)
            steps.append(step)
        out, update = (torch.cat(parts, 1) for parts in zip(*((step.out, step.update) for step in steps), strict=True))
        return Recurred(out, update, state)


def unrounded(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def in_blocks(block: int, keep: At, residual: bool = False, inverse: Inverse = merged) -> Rule:
    """The delta rule in its published block form, as a rule of `gdn.mix`. keep: rounds the values that it stores."""

    def rule(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, erase: torch.Tensor,
        write: torch.Tensor, state: torch.Tensor,
    ) -> Recurred:
        updates: list[torch.Tensor] = []

        def at(name: str, tensor: torch.Tensor) -> torch.Tensor:
            kept = keep(name, tensor)
            if name in ("v_new", "update"):
                updates.append(kept.transpose(1, 2))
            return kept

        out, left = recur_by_products(q, k, v, log_decay, erase, write, state, block, at, residual, inverse)
        return Recurred(out, torch.cat(updates, 1), left)

    return rule


def pieces(length: int, prompt: int) -> Iterator[tuple[slice, bool]]:
    """Rows of one call, and whether they are the prompt's: at most ROWS, and never some of both kinds."""
    for begin, end, chunk in ((0, min(prompt, length), True), (prompt, length, False)):
        for start in range(begin, end, ROWS):
            yield slice(start, min(start + ROWS, end)), chunk


@dataclass
class Read:
    """The result of the walk.

    final  by draw, final rows [rows, D] of all texts, each text's in order
    noise  by draw without the truth, the largest relative error of each of these rows in any layer
    """

    passes: Mapping[int | None, Pass]
    final: dict[int | None, torch.Tensor]
    noise: dict[int, torch.Tensor]

    def said(self, texts: Sequence[Text]) -> "Read":
        """Select the rows that have a generated token after them."""
        begin, rows = 0, list[int]()
        for text in texts:
            rows += range(begin + len(text.prompt) - 1, begin + len(text.run))
            begin += len(text.run)
        return Read(self.passes, {draw: one[rows] for draw, one in self.final.items()},
                    {draw: one[rows] for draw, one in self.noise.items()})  # fmt: skip


def walk(
    disk: OnDisk, precision: Precision, texts: Sequence[Text], draws: Sequence[int],
    progress: Advance = silent, *, whole: bool = False,
) -> Read:
    """Read the texts once: the truth, and these draws.

    whole: return the rows of all positions; or else only those that have a generated token after them
    """
    config, names = disk.config, tuple(disk.stored)
    passes = {draw: Pass(config, precision, draw) for draw in (None, *draws)}
    rows = embedded(disk, texts)
    hidden = {draw: [one.to(each.width) for one in rows] for draw, each in passes.items()}
    noise = {draw: [torch.full((len(one),), TRUTH_ERROR, dtype=torch.float64) for one in rows] for draw in draws}
    for index in range(len(config.layers)):
        at = f"model.layers.{index}"
        stored = disk.read(name for name in names if name.startswith(f"{at}."))
        for width in dict.fromkeys(each.width for each in passes.values()):
            cast = {name: tensor.to(width) for name, tensor in stored.items()}
            weights = layer_of(config, at, index, stored, cast.__getitem__)
            for draw, each in passes.items():
                if each.width == width:
                    hidden[draw] = [
                        each.layer(weights, index, one, text)
                        for one, text in zip(hidden[draw], texts, strict=True)
                    ]
            del cast, weights
        _add(noise, hidden)
        progress("layers", index + 1, len(config.layers))
    norms = disk.read(final_norm(disk))
    behind = [slice(0 if whole else len(text.prompt) - 1, None) for text in texts]
    final = {
        draw: [
            each.final(read_of(config, "model.norm", _in(norms, each.width), last=True), one[rows])
            for one, rows in zip(hidden[draw], behind, strict=True)
        ]
        for draw, each in passes.items()
    }
    kept = {draw: [one[rows] for one, rows in zip(noise[draw], behind, strict=True)] for draw in draws}
    _add(kept, final)
    return Read(
        passes, {draw: torch.cat(rows) for draw, rows in final.items()},
        {draw: torch.cat(rows) for draw, rows in kept.items()},
    )


def final_norm(disk: OnDisk) -> list[str]:
    """The names of the tensors of the final norm, or of those that mix streams in its place."""
    return [name for name in disk.stored if name.startswith(norm_name(disk.config, "model.norm") + ".")]


def _in(tensors: Mapping[str, torch.Tensor], width: torch.dtype) -> Get:
    return lambda name: tensors[name].to(width)


def embedded(disk: OnDisk, texts: Sequence[Text]) -> list[torch.Tensor]:
    """The embedding rows of every text, as stored."""
    rows, where = embedding_of(disk, {token for text in texts for token in text.run})
    return [rows[[where[token] for token in text.run]].repeat(1, disk.config.streams) for text in texts]


def embedding_of(disk: OnDisk, tokens: Collection[int]) -> tuple[torch.Tensor, dict[int, int]]:
    """The embedding rows of these tokens, each read once, and token -> its row."""
    known = sorted(set(tokens))
    rows = torch.cat(list(disk.rows(EMBEDDING, (slice(token, token + 1) for token in known))))
    return rows, {token: number for number, token in enumerate(known)}


def _add(noise: dict[int, list[torch.Tensor]], rows: Mapping[int | None, list[torch.Tensor]]) -> None:
    """Every row's error is the largest that its draw had on the way."""
    for draw, before in noise.items():
        for number, (drawn, right) in enumerate(zip(rows[draw], rows[None], strict=True)):
            off = relative_error(drawn.to(torch.float64), right).amax(0)
            before[number] = torch.maximum(before[number], off)


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

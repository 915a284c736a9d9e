"""An engine's answers to events, and the logical state of a request.

Leaves out: the events (`engine.py`), and how exact an answer must be.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

import torch

from .place_names import Place, memory_place
from .recurrences import Axes


@dataclass(frozen=True)
class Drafted:
    """drafts [B, n] int64: the tokens in use; own [B, n] int64: the head's argmax at each place.

    own is the head's argmax after the drafts in use, not after its own; -1 without a head. Trees of one batch may
    differ in size: then n is the largest, and shorter rows end in -1.
    own_parents [B, m] int64: if the drafter grows trees, the parent of each draft of its tree. own [B, m] then has the
    tokens of that tree, also if another window is given.
    """

    drafts: torch.Tensor
    own: torch.Tensor
    own_parents: torch.Tensor | None = None


@dataclass(frozen=True)
class Forwarded:
    """The target's results.

    roots  request -> the root in force after a decode row or a last prefill chunk. A look-up may wait for the device
    own    request -> int64 [rows]: the target's own choice. One per node of a verified window, one for a decode row and
           for a last prefill chunk; a request with an unfinished prompt has no entry
    tracked  request -> the number of tokens of its tracked prefix
    inner    name -> the number of tokens of a prefix that was tracked inside a row (`Row.inner`)
    """

    roots: Mapping[str, int]
    own: Mapping[str, torch.Tensor]
    tracked: Mapping[str, int] = field(default_factory=dict)
    inner: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Committed:
    """The result of acceptance, under the field's usual names; all int64 on the engine's device.

    num_correct_drafts [B]         accepted drafts, bonus excluded
    accept_lens [B]                num_correct_drafts + 1
    accept_index [B, width]        nodes on the accepted path, root first, -1 padded; width = the longest window
    last_correct_step_indices [B]  the node whose state is committed
    bonus [B]                      the next root
    own_num_correct_drafts [B], own_bonus [B]   the engine's own acceptance, also if the event gave paths
    tracked                        as in `Forwarded`; a request that reached no multiple of the interval has no entry
    steps_to_track [B]             if prefixes are tracked: the node of the window whose memory the tracked prefix has,
                                   that is `accept_index` at depth multiple - length before - 1; -1: nothing is tracked
                                   of the request. None: no prefixes are tracked, or the engine does not show it
    """

    num_correct_drafts: torch.Tensor
    accept_lens: torch.Tensor
    accept_index: torch.Tensor
    last_correct_step_indices: torch.Tensor
    bonus: torch.Tensor
    own_num_correct_drafts: torch.Tensor
    own_bonus: torch.Tensor
    tracked: Mapping[str, int] = field(default_factory=dict)
    steps_to_track: torch.Tensor | None = None


Answer = Drafted | Forwarded | Committed


@dataclass(frozen=True)
class ComponentFacts:
    """The form in which a request has one component of memory, in each of its layers.

    form  "block": one tensor, after the last token. The layer's mixer determines which blocks there are
          (`Recurrence.memory`);  "rows": a row per token of an attention layer;  "last": rows of the last tokens
    axes  of a block, in the alphabet of `ModelConfig.lengths`. Ranks share the first axis, if it has heads or channels
    whole whether it has numbers of tokens, int64, whatever the dtypes of an engine
    """

    form: Literal["block", "rows", "last"]
    axes: Axes = ()
    whole: bool = False

    @property
    def dimensions(self) -> int:
        """Return the number of axes of its tensor in a `RequestState`."""
        return {"block": len(self.axes), "rows": 3, "last": 2}[self.form]

    @property
    def of_field(self) -> "dict[str, ComponentFacts]":
        """Return the metadata of the component's field in `RequestState`."""
        return {FACTS: self}


FACTS, _ROWS = "component", ComponentFacts("rows")


@dataclass(frozen=True)
class RequestState:
    """The logical state of a request, in the canonical layout; a copy, never a view. It has no drafts and no window.

    Between a verify and its commit everything is as before the verify, except `conv` and `state`. These two belong to
    no request then: an engine may hold anything there, and they are not compared.
    length      committed tokens, L
    root        the root token, or None while the prompt is unfinished
    proposal    draft 1 as draft extend proposes it (argmax), or None while there is no root, or no draft head in use
    proposal_hidden [D]  the head's row y from which the proposal was picked
    ngram       layer with an embedding of n-grams -> [N-1] int64: the last tokens, oldest first, each plus one; 0 is
                none, before the first token. Canonical, so an engine may hold them in any form
    ple_conv    the same layer -> [SD, R], inputs of its conv, oldest first (zeros before the first token)
    conv        GDN layer -> [C, W-1], oldest first (zeros before the first token)
    state       GDN layer -> [HV, K, V]
    keys, values              attention layer -> [L, kv_heads, head_dim]
    draft_keys, draft_values  MTP layer -> [L, kv_heads, head_dim]: after every event as long as the target's
    block_keys, block_values  layer of the block drafter -> [L, its kv_heads, its head_dim]: the rows of its context,
                one for each committed token. A row depends on no later token, so a prefix of L tokens has L of them
    tail        if prefixes are tracked, and m > 1 MTP layers are in use: AFTER_LAYERS -> [min(L, m - 1), D], the
                target's final hidden rows of the last tokens. Else, and before the first token, there is none
    final [D]   only for a tracked prefix: the target's final hidden row of its last token. In a prefix, draft_keys and
                draft_values of MTP layer i have L - 1 - i rows, `tail` has the rows before the final one, and there is
                no root and no proposal
    """

    length: int
    root: int | None
    proposal: int | None
    proposal_hidden: torch.Tensor | None
    conv: dict[int, torch.Tensor] = field(metadata=ComponentFacts("block", ("C", "W-1")).of_field)
    state: dict[int, torch.Tensor] = field(metadata=ComponentFacts("block", ("HV", "K", "V")).of_field)
    keys: dict[int, torch.Tensor] = field(metadata=_ROWS.of_field)
    values: dict[int, torch.Tensor] = field(metadata=_ROWS.of_field)
    draft_keys: dict[int, torch.Tensor] = field(default_factory=dict, metadata=_ROWS.of_field)
    draft_values: dict[int, torch.Tensor] = field(default_factory=dict, metadata=_ROWS.of_field)
    block_keys: dict[int, torch.Tensor] = field(default_factory=dict, metadata=_ROWS.of_field)
    block_values: dict[int, torch.Tensor] = field(default_factory=dict, metadata=_ROWS.of_field)
    tail: dict[int, torch.Tensor] = field(default_factory=dict, metadata=ComponentFacts("last").of_field)
    ngram: dict[int, torch.Tensor] = field(
        default_factory=dict, metadata=ComponentFacts("block", ("N-1",), whole=True).of_field)
    ple_conv: dict[int, torch.Tensor] = field(
        default_factory=dict, metadata=ComponentFacts("block", ("SD", "R")).of_field)
    final: torch.Tensor | None = field(default=None, kw_only=True)

    def parts(self) -> Iterator[tuple[Place, torch.Tensor]]:
        """List every tensor that belongs to a layer, with the place where an event writes it; nothing is copied.

        By field in the order above, then by layer.
        """
        for name in MEMORY:
            for layer, tensor in getattr(self, name).items():
                yield memory_place(name, layer), tensor


# A request's memory in its layers, by field: the one list of components that saving, restoring, checks and reports use.
MEMORY_FACTS: Mapping[str, ComponentFacts] = {
    each.name: each.metadata[FACTS] for each in fields(RequestState) if str(each.type).startswith("dict[")
}
MEMORY = tuple(MEMORY_FACTS)
BLOCKS = tuple(name for name, facts in MEMORY_FACTS.items() if facts.form == "block")

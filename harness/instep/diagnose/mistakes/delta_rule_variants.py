"""Forms of a mistake in the delta rule: the inputs of a call changed, or its recurrence.

A function here makes the forms for a call; the table of mistakes is in `delta_rule.py`.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Concatenate, NamedTuple, ParamSpec

import torch

from ...checks.wrong_state_inputs import add, fade, read, write
from ...oracle.storage_rounding import rounded as as_stored
from .delta_rule_with_hooks import ROWS, Call, Row, Rows, Token, Walk, Walked, right, spread, walk
from .finding_case import in_16_bits, rounded

Tensor = torch.Tensor
FAR = 4  # rows or heads by which an index is off, at most
BLOCKS = (4, 8, 16, 32, 64)  # tokens that a kernel takes at once
SUMMED = (16, 32, 64, 128, 256)  # tokens after which the running sums of a kernel restart


class Variant(NamedTuple):
    """One form of a mistake. detail: fills the {} of the sentence; call: the changed inputs; walk: the recurrence."""

    detail: str
    call: Call
    walk: Walk = walk

    def nudged(self, most: float, generator: torch.Generator) -> Walked:
        """The result on inputs that are each moved by a draw, at most by this part of themselves."""
        inputs: Any = {
            name: x * (1 + most * (2 * torch.rand(x.shape, generator=generator, dtype=x.dtype) - 1))
            for name, x in ((name, getattr(self.call, name)) for name in (*ROWS, "state"))
        }
        return self.walk(replace(self.call, **inputs))


Forms = Callable[[Call], Iterator[Variant]]
P = ParamSpec("P")


def forms(make: Callable[Concatenate[Call, P], Iterator[Variant]]) -> Callable[P, Forms]:
    """Let the function be called with all arguments but the call, which its result takes."""
    return lambda *given, **named: lambda call: make(call, *given, **named)


# -- mistakes in one row of the recurrence -------------------------------------------------------------


def decay_last(state: Tensor, row: Row, decays_read: bool) -> tuple[Tensor, Tensor, Tensor]:
    update = row.update(state)
    written = write(state, row.k, update)
    after = fade(written, row.log_decay)
    return read(after if decays_read else written, row.q), update, after


def recall_undecayed(state: Tensor, row: Row) -> tuple[Tensor, Tensor, Tensor]:
    update = row.update(state)
    after = write(fade(state, row.log_decay), row.k, update)
    return read(after, row.q), update, after


def recall_missing(state: Tensor, row: Row) -> tuple[Tensor, Tensor, Tensor]:
    update = row.beta[..., None] * row.v
    after = write(fade(state, row.log_decay), row.k, update)
    return read(after, row.q), update, after


@forms
def beta_in_part(call: Call, erases: bool) -> Iterator[Variant]:
    """Beta, where it may exceed 1, is limited to 1 for what a token erases, or for what it writes."""
    def token(state: Tensor, row: Row) -> tuple[Tensor, Tensor, Tensor]:
        faded, limited = fade(state, row.log_decay), row.beta.clamp(max=1)
        erased, written = (limited, row.beta) if erases else (row.beta, limited)
        update = written[..., None] * row.v - erased[..., None] * read(faded, row.k)
        after = write(faded, row.k, update)
        return read(after, row.q), update, after

    if call.recalls and bool((call.beta > 1).any()):
        yield Variant("", call, partial(walk, token=token))


@forms
def recall_added(call: Call) -> Iterator[Variant]:
    """Recall, where the recurrence has no delta rule."""
    if not call.recalls:
        yield Variant("", call, lambda given: walk(replace(given, recalls=True)))


@forms
def decays_of_values(call: Call) -> Iterator[Variant]:
    """Decays along the wrong axis, where they are of channels, and keys are as wide as values."""
    if call.log_decay.ndim == call.v.ndim and call.log_decay.shape[-1] == call.v.shape[-1]:
        yield Variant("", call, partial(walk, token=_decaying_values))


def _decaying_values(state: Tensor, row: Row) -> tuple[Tensor, Tensor, Tensor]:
    faded = fade(state.mT, row.log_decay).mT
    update = row.update(faded)
    after = write(faded, row.k, update)
    return read(after, row.q), update, after


@forms
def skip_in_state(call: Call) -> Iterator[Variant]:
    """The state gets D v of each token, which belongs to the read-out."""
    if call.skip is not None:
        yield Variant("", replace(call, beta=call.beta + call.skip))


def read_first(state: Tensor, row: Row) -> tuple[Tensor, Tensor, Tensor]:
    _, update, after = right(state, row)
    return read(state, row.q), update, after


def rounding_state(state: Tensor, row: Row, dtype: torch.dtype, rounds_read: bool) -> tuple[Tensor, Tensor, Tensor]:
    out, update, after = right(state, row)
    narrow = rounded(after, dtype)
    return read(narrow, row.q) if rounds_read else out, update, narrow


@forms
def storing_states(call: Call) -> Iterator[Variant]:
    """The state is stored in its tiles after each row, before or after the row is read."""
    def token(state: Tensor, row: Row, rounds_read: bool) -> tuple[Tensor, Tensor, Tensor]:
        assert call.stored is not None, "asked below"
        out, update, after = right(state, row)
        narrow = as_stored(after, call.stored)
        return read(narrow, row.q) if rounds_read else out, update, narrow

    for rounds_read in (False, True) if call.stored is not None else ():
        yield Variant("", call, partial(walk, token=partial(token, rounds_read=rounds_read)))


def rounding_read(state: Tensor, row: Row, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    _, update, after = right(state, row)
    return read(rounded(after, dtype), row.q), update, after


def rounding_update(state: Tensor, row: Row, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    faded = fade(state, row.log_decay)
    update = rounded(row.update(faded), dtype)
    after = write(faded, row.k, update)
    return read(after, row.q), update, after


@forms
def rounding_states(call: Call, dtype: torch.dtype) -> Iterator[Variant]:
    """The state is rounded after each row, before or after the row is read, or where kept updates are run again."""
    for rounds_read in (False, True):
        yield Variant("", call, partial(walk, token=partial(rounding_state, dtype=dtype, rounds_read=rounds_read)))
    if not call.parents:
        yield Variant("", call, partial(_rounding_run_again, dtype=dtype))


def _rounding_run_again(call: Call, dtype: torch.dtype) -> Walked:
    """With the updates that the right recurrence makes."""
    call = spread(call)
    done, states = walk(call), [call.state]
    for t in range(len(call.v)):
        states.append(rounded(add(states[-1], call.k[t], call.log_decay[t], done.update[t]), dtype))
    core = [read(state, q) for state, q in zip(states[1:], call.q, strict=True)]
    return Walked(torch.stack(core), done.update, torch.stack(states))


@forms
def rounding_stored(call: Call, dtype: torch.dtype) -> Iterator[Variant]:
    """The state is rounded where it leaves the call, and not on its way through the rows."""
    yield Variant("", call, partial(_stored, dtype=dtype))


def _stored(call: Call, dtype: torch.dtype) -> Walked:
    done = walk(call)
    return done._replace(states=torch.cat((done.states[:1], rounded(done.states[1:], dtype))))


@forms
def by_row(call: Call, *tokens: Token) -> Iterator[Variant]:
    yield from (Variant("", call, partial(walk, token=token)) for token in tokens)


# -- mistakes over several rows ------------------------------------------------------------------------

Edge = Callable[[Tensor, Tensor, Tensor], Tensor]  # before a block, after it, sum of its log decays -> next state


def last_row_skipped(call: Call) -> Iterator[Variant]:
    """The memory of its read-out may have been zero, or never written."""
    for there in (0.0, math.nan) if not call.parents else ():
        yield Variant("", call, partial(_without_last, there=there))
    if call.launched_before:  # each row is the last one of its launch
        yield from nothing_done(call)


def nothing_done(call: Call) -> Iterator[Variant]:
    yield Variant("", replace(call, v=torch.zeros_like(call.v)), _idle)


def _idle(call: Call) -> Walked:
    return Walked(call.v, call.v, call.state.expand(len(call.v) + 1, *call.state.shape))


def _without_last(call: Call, there: float) -> Walked:
    done, last = walk(call, count=len(call.v) - 1), torch.full_like(call.v[:1], there)
    core, update, states = (torch.cat(pair) for pair in zip(done, (last, last, done.states[-1:]), strict=True))
    return Walked(core, update, states)


def _in_blocks(call: Call, size: int, edge: Edge) -> Walked:
    """The right rows, but `edge` changes the state after each full block of rows."""
    state, parts = call.state, list[Walked]()
    for rows in zip(*(getattr(call, name).split(size) for name in ROWS), strict=True):
        block = replace(call, **dict(zip(ROWS, rows, strict=True)), state=state)
        done = walk(block)
        if len(block.v) == size:
            state = edge(state, done.states[-1], block.log_decay.sum(0))
            done = done._replace(states=torch.cat((done.states[:-1], state[None])))
        parts.append(done)
    return Walked(torch.cat([part.core for part in parts]), torch.cat([part.update for part in parts]),
                  torch.cat([call.state[None], *(part.states[1:] for part in parts)]))  # fmt: skip


@forms
def at_edges(call: Call, edge: Edge) -> Iterator[Variant]:
    for size in BLOCKS if not call.parents else ():
        if size < len(call.v):
            yield Variant(str(size), call, partial(_in_blocks, size=size, edge=edge))


def last_decays_dropped(call: Call) -> Iterator[Variant]:
    """The decays of a last block that is not full. Without those of all tokens there is no decay at all."""
    count = len(call.v)
    for last in dict.fromkeys(count % size for size in BLOCKS):
        if 0 < last < count:
            decay = call.log_decay.clone()
            decay[count - last :] = 0
            yield Variant("last token" if last == 1 else f"last {last} tokens", replace(call, log_decay=decay))


def of_running_sums(call: Call) -> Iterator[Variant]:
    count = len(call.v)
    for size in (*[size for size in SUMMED if size < count], count):
        parts = []
        for begin in range(0, count, size):
            sums = call.log_decay[begin : begin + size].float().cumsum(0)
            decay = sums.exp() * (-torch.cat((torch.zeros_like(sums[:1]), sums[:-1]))).exp()
            parts.append(decay.to(call.log_decay).log())
        yield Variant(f" of {size} tokens each" * (size < count), replace(call, log_decay=torch.cat(parts)))


# -- mistakes in the inputs ----------------------------------------------------------------------------


def _put(call: Call, detail: str = "", **rows: Any) -> Variant:
    return Variant(detail, replace(call, **rows))


@forms
def rows_off(call: Call, by: int, *names: str) -> Iterator[Variant]:
    """Row t takes row t - by. If there is none, it takes row 0 or the last, zeros, or a row of another sequence."""
    own, earlier, far = {name: getattr(call, name) for name in names}, by > 0, abs(by)
    near, launched = (call.before, call.launched_before) if earlier else (call.after, call.launched_after)
    edges: list[Rows] = []
    if far < len(call.v):
        edges += [{name: x[:1] if earlier else x[-1:] for name, x in own.items()},
                  {name: torch.zeros_like(x[:1]) for name, x in own.items()}]  # fmt: skip
        if earlier:  # an index below 0 is one from the end
            edges.append({name: x[-far:] for name, x in own.items()})
    if far == 1:
        edges += near
        yield from (_put(call, "", **{name: each[name] for name in names}) for each in launched)
        if launched and earlier:
            yield _put(call, "", **{name: torch.zeros_like(x) for name, x in own.items()})
    for edge in edges:
        ends = {name: edge[name].expand_as(x[:far]) for name, x in own.items()}
        yield _put(call, "", **{name: torch.cat((ends[name], x[:-far]) if earlier else (x[far:], ends[name]))
                            for name, x in own.items()})  # fmt: skip


@forms
def rows_far_off(call: Call, name: str) -> Iterator[Variant]:
    for by in range(2, min(len(call.v) // 2, FAR) + 1):
        for sign, step in (("-", by), ("+", -by)):
            yield from (one._replace(detail=f"{sign} {by}") for one in rows_off(step, name)(call))


@forms
def heads_off(call: Call, name: str) -> Iterator[Variant]:
    own: Tensor = getattr(call, name)
    for by in range(1, min(own.shape[1], FAR + 1)):
        yield _put(call, f"(h - {by}) % {own.shape[1]}", **{name: own.roll(by, 1)})


@forms
def by_key_head(call: Call, name: str, modulo: bool) -> Iterator[Variant]:
    """Gates with another map of heads: value head h takes the number of another value head."""
    own, keys = getattr(call, name), call.k.shape[1]
    heads = torch.arange(own.shape[1])
    if keys < len(heads):
        yield _put(call, "", **{name: own[:, heads % keys if modulo else heads // (len(heads) // keys)]})


@forms
def keys_modulo(call: Call, *names: str) -> Iterator[Variant]:
    keys, heads = call.k.shape[1], call.v.shape[1]
    if keys < heads:
        yield _put(call, f"{keys}, not h // {heads // keys}",
                   **{name: getattr(call, name).repeat(1, heads // keys, 1) for name in names})


@forms
def of_others(call: Call, name: str) -> Iterator[Variant]:
    for whose, rows in call.others:
        theirs = rows[name]
        yield _put(call, whose, **{name: theirs[torch.arange(len(call.v)).clamp(max=len(theirs) - 1)]})


@forms
def replaced(call: Call, name: str, change: Callable[[Tensor], Tensor]) -> Iterator[Variant]:
    yield _put(call, "", **{name: change(getattr(call, name))})


@forms
def narrow_rows(call: Call, name: str) -> Iterator[Variant]:
    """An input in 16 bits, where it does not have such numbers in any case."""
    for said, narrow in in_16_bits(getattr(call, name)):
        yield _put(call, said, **{name: narrow})


@forms
def not_normalised(call: Call, *names: str) -> Iterator[Variant]:
    """The scale of q is applied nevertheless."""
    if call.raw:
        scale = {"q": call.q.shape[-1] ** -0.5, "k": 1.0}
        yield _put(call, "", **{name: call.raw[name] * scale[name] for name in names})


@forms
def other_state(call: Call, change: Callable[[Tensor], Iterable[tuple[str, Tensor]]]) -> Iterator[Variant]:
    for detail, state in change(call.state) if call.state.any() else ():
        yield Variant(detail, replace(call, state=state))


def of_another_head(state: Tensor) -> Iterator[tuple[str, Tensor]]:
    for by in range(1, min(len(state), FAR + 1)):
        yield f"(h - {by}) % {len(state)}", state.roll(by, 0)

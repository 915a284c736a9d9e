"""Wrong positions: rotary embeddings, attention that sees too much or too little, trees that are treated as chains.

Leaves out: swapped rows (`wrong_rows.py`), and states of other nodes, which T2d recognises
(`checks/wrong_state_bank.py`).
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from instep_reference.attention import AttentionMemory, rotate
from instep_reference.weights import LatentWeights

from ...checks.check_interface import at_end, counted
from ...oracle.single_layer_run import LayerWork
from ...trace.tree_shape import depths
from ...watch.rows_by_request import field_of
from .finding_case import Case, Explanation
from .wrong_weights import mixer_of, with_mixer

THETAS = (1e4, 1e5, 5e5, 1e6, 1e7)
OFF = (1, -1, 2, -2)


def positions(case: Case) -> Iterator[Explanation]:
    if (work := case.work) is None:
        return
    if case.component in ("query", "key") and case.weights.config.rotary_dim:
        yield from _turned(case, work)
    elif case.component in ("projected", "key_raw") and case.weights.config.latent:
        yield from _of_pairs(case)
    elif case.component == "attended":
        yield from _seen(case, work)


def _turned(case: Case, work: LayerWork) -> Iterator[Explanation]:
    config, rows = case.weights.config, len(case.right)
    after = torch.tensor(depths(range(-1, rows - 1) if work.parents is None else work.parents))
    at = work.start + after
    for by in OFF:
        yield _moved(case, f"is placed {counted(abs(by), 'position')} too {'late' if by > 0 else 'early'}",
                     torch.full((rows,), by))  # fmt: skip
    yield _moved(case, "is not rotated: every row is at position 0", -at)
    yield _moved(case, "all rows are at the position of the first", -after)
    yield _moved(case, "positions begin at 0 again", torch.full((rows,), -work.start))
    yield _moved(case, "is rotated backwards", -2 * at)
    for theta in THETAS:
        if theta != config.rope_theta:
            yield from case.made(f"is rotated with a theta of {theta:g}; it is {config.rope_theta:g}",
                                 weights=replace(case.weights, config=replace(config, rope_theta=theta)))
    projected = case.own("projected") if config.latent and case.component == "query" else None
    if projected is not None:
        yield Explanation("turns at its first channels, not at its last",
                          rotate(projected[..., :-1].to("cpu", torch.float64), at, config))  # fmt: skip
    halves = config.rotary_dim // 2, config.rotary_dim // 4
    for width in halves if config.latent else (config.head_dim, *halves):
        if width != config.rotary_dim and width and width % 2 == 0:
            yield from case.made(f"rotates {width} channels, not {config.rotary_dim}",
                                 weights=replace(case.weights, config=replace(config, rotary_dim=width)))


def _moved(case: Case, says: str, by: torch.Tensor) -> Explanation:
    """The right rows, each at a position that is later by this."""
    config, right = case.weights.config, case.right.to("cpu", torch.float64)
    own = right.shape[-1] - config.rotary_dim if config.latent else 0  # channels of latents that turn are the last
    return Explanation(says, torch.cat([right[..., :own], rotate(right[..., own:], by, config)], -1))


def _of_pairs(case: Case) -> Iterator[Explanation]:
    """Rows of latents are stored in pairs of channels that turn together."""
    mixer, config = mixer_of(case), case.weights.config
    if not isinstance(mixer, LatentWeights):
        return
    half = config.rotary_dim // 2
    order = torch.arange(config.rotary_dim).view(2, half).T.flatten()  # of each stored channel, its place here

    def stored(rows: torch.Tensor, begin: int) -> torch.Tensor:
        turning = rows[..., begin : begin + config.rotary_dim, :][..., order, :]
        return torch.cat([rows[..., :begin, :], turning, rows[..., begin + config.rotary_dim :, :]], -2)

    query = stored(mixer.query.view(config.heads, config.head_dim + 1, -1), config.head_dim - config.rotary_dim)
    down = stored(mixer.down, config.latent)
    yield from with_mixer(case, "has the channels that turn in their stored order, in pairs",
                          query=query.flatten(0, 1), down=down)  # fmt: skip


def _seen(case: Case, work: LayerWork) -> Iterator[Explanation]:
    """Attention with other keys and values before the rows of this event."""
    memory = work.memory
    if not isinstance(memory, AttentionMemory) or not len(memory.keys):
        return
    length = len(memory.keys)

    def with_memory(says: str, keys: torch.Tensor, values: torch.Tensor) -> Iterator[Explanation]:
        yield from case.made(says, memory=AttentionMemory(keys, values))

    keys, values = memory.keys, memory.values
    yield from with_memory("sees nothing from before these rows", keys[:0], values[:0])
    for few in (n for n in (1, 2) if n < length):
        last, first = (at_end(few, "position", end) for end in ("last", "first"))
        yield from with_memory(f"does not see the {last} before these rows", keys[:-few], values[:-few])
        yield from with_memory(f"does not see the {first}", keys[few:], values[few:])
    yield from with_memory("sees the last position before these rows twice", torch.cat((keys, keys[-1:])),
                           torch.cat((values, values[-1:])))  # fmt: skip
    yield from with_memory("sees one position more, which is empty", *(
        torch.cat((x, torch.zeros_like(x[:1]))) for x in (keys, values)))  # fmt: skip
    place = case.finding.place
    for other, state in case.context.subject.before.items():
        fields = [field_of(place._replace(component=name), state) for name in ("keys", "values")]
        k, v = (getattr(state, field).get(place.layer) for field in fields)
        if other != case.finding.request and k is not None and v is not None and len(k):
            k, v = (torch.cat((x[:length], own[len(x):])) for x, own in ((k, keys), (v, values)))
            yield from with_memory(f'reads the keys and values of request "{other}"', k, v)
            yield from with_memory(f'reads the values of request "{other}" under its own keys', keys, v)
    yield from with_memory("reads keys and values one position too late", keys.roll(-1, 0), values.roll(-1, 0))
    yield from with_memory("reads values one position too late, with the right keys", keys, values.roll(-1, 0))


BACKWARDS = ("mixed", "core", "update", "attended")


def trees(case: Case) -> Iterator[Explanation]:
    if (work := case.work) is None or work.parents is None:
        return
    if case.component in BACKWARDS:
        says = "continues from the row before, not from its parent: the tree is taken for a chain"
        yield from case.made(says, parents=None)
    elif case.component in ("query", "key"):
        by = torch.arange(len(work.parents)) - torch.tensor(depths(work.parents))
        yield _moved(case, "is rotated by the number of its node, not by its depth", by)

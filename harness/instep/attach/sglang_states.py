"""Recurrent states of a running SGLang: copied on the device, and read as one state per request and layer.

With a ring the state in the pool lags by the last tokens, which the ring holds; they are folded here.
Leaves out: moving copies to the host (`device_states.py`), and when states are copied and written (`recorder.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .device_states import States
from .sglang_names import Names, Ring

SQUARES = 1e-6  # added to the sum of a key's squares by the l2 norm of the gated delta rule


@dataclass
class RingStates(States):
    """Copies of states.  ring: its entries [layers, rows, ..] and cursors [rows], empty without one.  names: theirs."""

    ring: dict[str, torch.Tensor] = field(default_factory=dict)
    names: Ring | None = None

    def of(self, layer: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The conv window [C, W-1] and the state [HV, V, K], with the tokens of the ring."""
        window, state = super().of(layer, row)
        if self.ring and self.names is not None:
            ring = {name: part[layer, row] if part.dim() > 1 else part[row] for name, part in self.ring.items()}
            state = folded(state, ring, self.names)
        return window, state


def copied(
    pool: Any, names: Names, layers: Mapping[int, int], rows: torch.Tensor, slots: torch.Tensor
) -> RingStates:
    """Copy states in the current stream. layers: layer -> its index in the pool; rows, slots: of the requests."""
    def chosen(tensor: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        found = tensor.new_empty(len(layers), len(at), *tensor.shape[2:])
        for place, index in enumerate(layers.values()):
            torch.index_select(tensor[index], 0, at, out=found[place])
        return found

    cache, ring = pool.mamba_cache, ring_in(pool, names)
    conv = [chosen(part, slots) for part in cache.conv]
    taken = RingStates(conv[0] if len(conv) == 1 else torch.cat(conv, dim=-2), chosen(cache.temporal, slots))
    if ring is not None:
        taken.names = ring
        at = rows if ring.by_row else slots
        entries = {name: getattr(cache, name, None) for name in (*ring.entries, ring.gate)}
        taken.ring = {name: chosen(part, at) for name, part in entries.items() if part is not None}
        taken.ring |= {name: getattr(pool, name).index_select(0, at) for name in (ring.position, ring.base)}
    return taken


def ring_in(pool: Any, names: Names) -> Ring | None:
    """The ring of a pool, if it has one for speculation."""
    ring = names.ring
    if ring is None or getattr(pool, ring.base, None) is None or getattr(pool, ring.other_rule, False):
        return None
    return ring


def folded(state: torch.Tensor, ring: dict[str, torch.Tensor], names: Ring) -> torch.Tensor:
    """The state after the tokens of a ring, by the gated delta rule token by token, in fp32.

        S <- exp(g) S;  S <- S + d k^T      with d = beta (v - S k) if the entries are raw

    Shapes: state [HV, V, K]; ring: values or updates [HV, L, V], keys [H, L, K], g and beta [HV, L].
    Differs from SGLang: it folds all tokens at once with cumulated gates. The index is taken modulo L, as there.
    """
    parts = {name: part.float() for name, part in ring.items()}
    count, base = (int(parts[name]) for name in (names.position, names.base))
    if names.raw:
        values, keys, beta = (parts[name] for name in names.entries)
        keys = keys / (keys.square().sum(-1, keepdim=True) + SQUARES).sqrt()
    else:
        values, keys = (parts[high] + parts.get(low, 0) for high, low in
                        zip(names.entries[:2], names.entries[2:], strict=True))
    gate, length, now = parts[names.gate], values.shape[1], state.float()
    keys = keys.repeat_interleave(len(values) // len(keys), 0)
    for token in range(base, base + count):
        at = token % length
        now = now * gate[:, at].exp()[:, None, None]
        update = values[:, at]
        if names.raw:
            update = beta[:, at, None] * (update - torch.einsum("hvk,hk->hv", now, keys[:, at]))
        now = now + update[:, :, None] * keys[:, at, None, :]
    return now

"""Recurrent states of a running SGLang: copied on the device, and read as one state per request and layer.

With a ring the state in the pool lags by the last tokens, which the ring holds; they are folded here. A thread brings
the copies to the host and writes them, so that the engine waits for neither the device nor the disk.
Leaves out: when states are copied and written (`sglang.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from .sglang_names import Names, Ring

SQUARES = 1e-6  # added to the sum of a key's squares by the l2 norm of the gated delta rule
MOST_WAITING = 2  # writes whose states are still on the device


@dataclass
class States:
    """Copies of states: [layers, rows, ..].  ring: entries [layers, rows, ..], cursors [rows]."""

    conv: torch.Tensor
    state: torch.Tensor
    ring: dict[str, torch.Tensor] = field(default_factory=dict)

    def on_host(self) -> States:
        """The same states on the host, after their event on the device. A stream of its own copies them."""
        if not self.state.is_cuda:
            return self
        with torch.cuda.device(self.state.device):
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                ring = {name: to_host(one) for name, one in self.ring.items()}
                moved = States(to_host(self.conv), to_host(self.state), ring)
            stream.synchronize()
        return moved

    def of(self, layer: int, row: int, names: Names) -> tuple[torch.Tensor, torch.Tensor]:
        """The conv window [C, W-1], oldest first, and the state [HV, V, K]. layer, row: places in the copies."""
        window, state = self.conv[layer, row], self.state[layer, row]
        if self.ring and names.ring is not None:
            ring = {name: part[layer, row] if part.dim() > 1 else part[row] for name, part in self.ring.items()}
            state = folded(state, ring, names.ring)
        return window if window.shape[0] >= window.shape[1] else window.mT, state


def copied(pool: Any, names: Names, layers: Mapping[int, int], rows: torch.Tensor, slots: torch.Tensor) -> States:
    """Copy states in the current stream. layers: layer -> its index in the pool; rows, slots: of the requests."""
    def chosen(tensor: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        found = tensor.new_empty(len(layers), len(at), *tensor.shape[2:])
        for place, index in enumerate(layers.values()):
            torch.index_select(tensor[index], 0, at, out=found[place])
        return found

    cache, ring = pool.mamba_cache, ring_in(pool, names)
    conv = [chosen(part, slots) for part in cache.conv]
    taken = States(conv[0] if len(conv) == 1 else torch.cat(conv, dim=-2), chosen(cache.temporal, slots))
    if ring is not None:
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


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host that does not wait for the device: read it after an event or a synchronisation."""
    if not tensor.is_cuda:
        return tensor.detach().clone()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor.detach(), non_blocking=True)


def to_device(numbers: list[int], device: torch.device) -> torch.Tensor:
    """Indices on the device, without waiting for it."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class Writer:
    """A thread that writes, so that the engine does not wait for the disk. A failed write raises at the next call."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "instep-attach")
        self.waiting: deque[Future[None]] = deque()

    def submit(self, write: Callable[..., None], *given: Any) -> None:
        """Write later, and wait now if too much is waiting."""
        while self.waiting and (len(self.waiting) >= MOST_WAITING or self.waiting[0].done()):
            self.waiting.popleft().result()
        self.waiting.append(self.thread.submit(write, *given))

    def finish(self) -> None:
        """Wait until everything is written."""
        while self.waiting:
            self.waiting.popleft().result()

"""Launches of the kernels of `chunk64.py` with explicit layouts, if they fit. They give the same bits.

With few requests, few programs carry states. Then the second kernel runs at the same time as the first one, from the
first block on, on multiprocessors that the first one leaves to it. If equally long requests fill all multiprocessors,
one kernel does both. With a decay per key channel, only the kernel that carries states has explicit layouts.

Leaves out: the kernels (`chunk64_prepare_gluon.py`, `chunk64_carry_gluon.py`, `chunk64_fused_gluon.py`).
"""

from __future__ import annotations

import torch
from triton.experimental.gluon import language as gl

from ...memory_addresses import Part
from ...ops.op_protocols import GdnInputs
from ..device.gluon_helpers import TensorDescriptor
from ..device.pool_address import PackedRows, Rows, Spans, States, given
from ..runtime import ceil_div, hopper, launch, multiprocessors, power_of_2
from .chunk64 import WIDE_FROM, prepared_channels
from .chunk64_carry_gluon import COLUMNS, carry_staged
from .chunk64_fused_gluon import WIDE, fused_staged
from .chunk64_prepare_gluon import SIGNALS, TOKENS, WIDTH, prepare_staged
from .signals_between_launches import PLACES, clear

MOST_OF_GROUP = 4  # maximum number of value heads of a key head: a program has all of them, one after the other
PROGRAMS = 3  # programs that prepare blocks on a multiprocessor at a time
LONG = 1536  # minimum rows of a request for which it pays to carry states while blocks are still being prepared
PREPARE = {"warps": 4, "registers": 168}
# The fused kernel runs if its rounds of items are filled to this degree (one round, two, more), if requests have on
# average this share of the longest one's rows, and if the longest has at least this many rows (LOG.md).
FILLED, EQUAL, ROWS = (0.7, 0.6, 0.9), 0.9, 512
FUSED = {"CARRY_REGISTERS": 192, "COPY_REGISTERS": 24, "warps": 4}
CARRY = {"LAST": 2, "CARRY_REGISTERS": 224, "COPY_REGISTERS": 56, "warps": 4}


def fits(inputs: GdnInputs, part: Part, core: torch.Tensor) -> bool:
    """Return whether these kernels can run this call."""
    if not core.is_cuda or not hopper(core.device) or core.element_size() != 2:
        return False
    if inputs.k.shape[2] != WIDTH.value or core.shape[2] % COLUMNS.value:
        return False
    if inputs.log_decay.dim() == 2 and core.shape[1] > MOST_OF_GROUP * inputs.k.shape[1]:
        return False
    if any(one is not None and (one.scales is not None or one.chance is not None) for one in (part.read, part.store)):
        return False
    return _boxed(inputs.v) and _boxed(core)


def _boxed(x: torch.Tensor) -> bool:
    """Return whether rows [N, heads, width] can be copied as boxes."""
    near = x.stride(2) == 1 and x.stride(1) == x.shape[2]
    return near and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0


def _boxes(x: torch.Tensor, columns: int) -> TensorDescriptor:
    """Descriptor with which a GPU copies boxes of TOKENS rows of a matrix."""
    tile = gl.NVMMASharedLayout(128, 8 * x.element_size(), rank=2)
    return TensorDescriptor.from_tensor(x, [TOKENS.value, columns], tile)


def _matrix(x: torch.Tensor) -> torch.Tensor:
    """View rows [N, heads, width] as [N, heads * width]."""
    return x.as_strided((x.shape[0], x.shape[1] * x.shape[2]), (x.stride(0), 1))


def _narrow(inputs: GdnInputs) -> bool:
    """Return whether keys and queries can be copied as they are."""
    return all(x.dtype == torch.bfloat16 and _boxed(x) for x in (inputs.q, inputs.k))


def _fuses(inputs: GdnInputs, part: Part, core: torch.Tensor) -> bool:
    """Return whether the fused kernel fits and is faster: all items have similar lengths, and they fill the rounds."""
    requests = part.begin.numel()
    if not _narrow(inputs) or inputs.v.element_size() != 2 or core.shape[2] % WIDE.value or part.most < ROWS:
        return False
    there, items = multiprocessors(core.device), _items(part, core)
    rounds = max(1, ceil_div(items, there))
    filled = items >= FILLED[min(rounds, len(FILLED)) - 1] * there * rounds
    return filled and len(core) >= EQUAL * requests * part.most


def _items(part: Part, core: torch.Tensor) -> int:
    """Number of items of the fused kernel."""
    wide: int = WIDE.value
    return part.begin.numel() * core.shape[1] * (core.shape[2] // wide)


def _fused(inputs: GdnInputs, part: Part, core: torch.Tensor, look: int) -> None:
    """Run `blocks_staged` as the fused kernel."""
    heads, values = core.shape[1:]
    launch(
        fused_staged, (min(_items(part, core), multiprocessors(core.device)),),
        *(_boxes(_matrix(x), WIDTH.value) for x in (inputs.q, inputs.k)), _boxes(_matrix(inputs.v), WIDE.value),
        *map(Rows.of, inputs[3:]), _boxes(_matrix(core), WIDE.value), Rows.of(core), look, Spans.of(part),
        States.of(part.read, part.read), States.of(part.store, part.read), given(part.store),
        part.begin.numel(), heads, heads // inputs.k.shape[1], values, **FUSED,
    )  # fmt: skip


def _channels(inputs: GdnInputs, part: Part, core: torch.Tensor, look: int) -> None:
    """Run `blocks_staged` with a decay per key channel, whose blocks `chunk64.py` prepares."""
    heads, values, C = core.shape[1], core.shape[2], TOKENS.value
    x, of_requests = PackedRows.of(inputs, core), Spans.of(part)
    q16, k16, left16, solved, mixed, gates = prepared_channels(x, of_requests, inputs, part, core)
    of_keys = [_boxes(one.view(-1, WIDTH.value), WIDTH.value) for one in (q16, k16, left16)]
    of_pairs = [_boxes(one.view(-1, C), C) for one in (solved, mixed)]
    launch(
        carry_staged, (values // COLUMNS.value, heads, part.begin.numel()),
        *of_keys, _boxes(_matrix(inputs.v), COLUMNS.value), *of_pairs, gates, core.new_empty(0, dtype=torch.int32),
        _boxes(_matrix(core), COLUMNS.value), x.core, look, of_requests,
        States.of(part.read, part.read), States.of(part.store, part.read), given(part.store), 1, values, False,
        STAGES=3 if inputs.v.element_size() == 2 else 2, CHAINS=1, BESIDE=False, **CARRY,
    )  # fmt: skip


def blocks_staged(
    inputs: GdnInputs, part: Part, core: torch.Tensor, look: int = 0, chains: int | None = None,
    beside: bool | None = None, fused: bool | None = None,
) -> None:  # fmt: skip
    """Run `blocks` with explicit layouts; the call must fit (`fits`). look: as in `blocks`

    chains: groups of warps that carry states in a program; None: the fastest number
    beside: whether states are carried while blocks are still being prepared; None: if that is faster
    fused: whether one kernel does both; None: if it fits and is faster, and `chains` and `beside` are None
    """
    assert part.per_row is None, "a prefill chunk keeps no state per position"
    if not part.most or not len(core) or not part.begin.numel():
        return
    if inputs.log_decay.dim() == 3:
        _channels(inputs, part, core, look)
        return
    if fused is None:
        fused = chains is None and beside is None and _fuses(inputs, part, core)
    if fused:
        _fused(inputs, part, core, look)
        return
    heads, values = core.shape[1:]
    requests, key_heads, C = part.begin.numel(), inputs.k.shape[1], TOKENS.value
    room = core.shape[0] // C + requests  # blocks of all requests: each has at most one that is not full

    def scratch(*shape: int) -> torch.Tensor:
        return core.new_empty(room * C, *shape, dtype=torch.bfloat16)

    # Rows that are already bf16 are copied as they are. Others are rounded into rows of whole blocks.
    narrow = _narrow(inputs)
    q16, k16 = (x if narrow else scratch(key_heads, WIDTH.value) for x in (inputs.q, inputs.k))
    of_keys = tuple(_boxes(_matrix(x), WIDTH.value) for x in (q16, k16))
    of_pairs = tuple(_boxes(scratch(heads, C).view(-1, C), C) for _ in range(2))
    gates = core.new_empty(room, heads, 3, C, dtype=torch.float32)
    group, x, of_requests = heads // key_heads, PackedRows.of(inputs, core), Spans.of(part)
    if chains is None:  # this may depend on the batch, because no bit depends on it
        wide = values % (2 * COLUMNS.value) == 0
        chains = 2 if wide and requests * heads * (values // (2 * COLUMNS.value)) >= WIDE_FROM else 1
    tiles, there = values // (COLUMNS.value * chains), multiprocessors(core.device)
    carriers = tiles * heads * max(requests, 1)
    if beside is None:
        beside = 2 * carriers <= there and part.most >= LONG
    apart = max(2, there // carriers)  # one multiprocessor in `apart` carries
    signals = core.new_empty(SIGNALS.value + room * key_heads if beside else 0, dtype=torch.int32)
    preparers = max(1, there - ceil_div(there, apart)) if beside else there
    programs = min(key_heads * room, PROGRAMS * preparers)
    if beside:
        launch(clear, (ceil_div(len(signals), PLACES.value),), signals, len(signals), warps=4)
    launch(
        prepare_staged, (PROGRAMS * there if beside else programs,),
        x, q16, k16, *of_keys, *of_pairs, gates, of_requests, requests, key_heads, signals, apart, programs,
        GROUP=group, MEMBERS=power_of_2(group), NARROW=narrow, BESIDE=beside, **PREPARE,
    )  # fmt: skip
    launch(
        carry_staged, (tiles, heads, requests),
        *of_keys, None, _boxes(_matrix(inputs.v), COLUMNS.value), *of_pairs, gates, signals,
        _boxes(_matrix(core), COLUMNS.value), x.core, look, of_requests,
        States.of(part.read, part.read), States.of(part.store, part.read), given(part.store), group, values, narrow,
        STAGES=3 if chains == 1 or inputs.v.element_size() == 2 else 2, CHAINS=chains, BESIDE=beside, **CARRY,
    )  # fmt: skip

"""Rows for the delta rule and parts of a batch, which several kinds draw alike.

Decays are those of a model (`campaign/shapes/random_weights.py`): from a few tokens of memory to thousands. Leaves out:
the use of the rows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch

from instep.campaign.shapes.random_weights import _dt_bias
from instep.oracle.declared_product_rounding import Operands, in_chunks
from instep.oracle.reordered_arithmetic import Reordered
from instep_optimized.memory_addresses import Address, Part
from instep_optimized.ops.fused import serves_prompts, stored, window_gdn
from instep_optimized.ops.op_protocols import GdnInputs, Ops
from instep_optimized.ops.plain import PLAIN
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.declared_rounding import Product
from instep_reference.contract.recurrences import GDN, RECURRENCES, Recurrence

from .answer_check import first, off
from .bench_types import SEED, TO, Ground

WIDE = torch.float64
CONV_WIDTH = 4  # taps of the causal conv
STATE = 0.1  # scale of a state's numbers


@dataclass(frozen=True)
class Rows:
    """Outputs of a GDN layer's conv and linear maps, mixed [N, C], a, b [N, HV], and its A_log, dt_bias [HV]."""

    mixed: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    A_log: torch.Tensor
    dt_bias: torch.Tensor
    config: ModelConfig

    @classmethod
    def drawn(cls, ground: Ground, config: ModelConfig, count: int) -> "Rows":
        heads, channels = config.value_heads, channels_of(config)
        a_log, bias = ground.drawn(heads, dtype=torch.float32) * 0.5, _dt_bias(heads).to(ground.device)
        return cls(ground.drawn(count, channels), ground.drawn(count, heads), ground.drawn(count, heads), a_log, bias,
                   config)  # fmt: skip

    def inputs(self, ops: Ops, wide: bool = False) -> GdnInputs:
        """The inputs that an op set makes of these rows; wide: of the same numbers in fp64."""
        named = {name: getattr(self, name) for name in ("mixed", "a", "b", "A_log", "dt_bias")}
        given: dict[str, Any] = {name: x.to(WIDE) for name, x in named.items()} if wide else named
        return ops.gdn_inputs(**given, key_heads=self.config.key_heads, key_dim=self.config.key_dim, to=(TO,) * 5)

    def core(self, ops: Ops, parts: tuple[Part, ...], dtype: torch.dtype) -> torch.Tensor:
        """The read-outs of windows, with norms and gates computed inside the kernel if the op set has such a kernel."""
        named = {name: getattr(self, name) for name in ("mixed", "a", "b", "A_log", "dt_bias")}
        return window_gdn(ops, **named, key_heads=self.config.key_heads, key_dim=self.config.key_dim, parts=parts,
                          dtype=dtype, to=(TO,) * 6)  # fmt: skip

    @property
    def split(self) -> dict[str, torch.Tensor]:
        """q, k [N, H, K], v [N, HV, V] as they come from the conv."""
        config, count = self.config, len(self.mixed)
        keys = config.key_heads * config.key_dim
        q, k, v = torch.split(self.mixed, [keys, keys, config.value_heads * config.value_dim], dim=1)
        heads = (count, config.key_heads, config.key_dim)
        return {"q": q.reshape(heads), "k": k.reshape(heads), "v": v.reshape(count, config.value_heads, -1)}


def channels_of(config: ModelConfig) -> int:
    return 2 * config.key_heads * config.key_dim + config.value_heads * config.value_dim


def widened(inputs: GdnInputs) -> GdnInputs:
    return GdnInputs(*(x.to(WIDE) for x in inputs))


def handed_over(ops: Ops, inputs: GdnInputs, parts: tuple[Part, ...], dtype: torch.dtype) -> GdnInputs:
    """The rows in the bits that a model passes to `gdn`; inside a `prefill_gdn` they have fewer."""
    if ops.prefill_gdn is None or not serves_prompts(ops, parts, dtype):
        return inputs
    return GdnInputs(*(x.to(narrow) for x, narrow in zip(inputs, stored(dtype), strict=True)))


def states(ground: Ground, config: ModelConfig, units: int, dtype: torch.dtype) -> torch.Tensor:
    """A pool [units, HV, K, V] in the order VK: it stores [HV, V, K]."""
    shape = units, config.value_heads, config.value_dim, config.key_dim
    return ground.drawn(*shape, dtype=torch.float32).mul_(STATE).to(dtype).transpose(2, 3)


def redrawn(*pools: torch.Tensor, std: float = STATE, seed: int = SEED) -> None:
    """Return a function that refills the pools with the same numbers at each call. std: their original scale.

    Pools of two calls with one seed are equal.
    """
    generator = torch.Generator(pools[0].device).manual_seed(seed)
    for pool in pools:
        pool.normal_(std=std, generator=generator)


def part(
    ground: Ground, form: Literal["chunk", "window"], slots: list[int], count: int, pool: torch.Tensor,
    fresh: bool = False,
) -> Part:
    """Equal requests one after the other, each in its own slot."""
    here, each = Address(pool, ground.ints(slots)), len(slots)
    begin, counts = ground.ints(number * count for number in range(each)), ground.ints([count] * each)
    new = torch.full((each,), fresh, dtype=torch.bool, device=ground.device)
    return Part(form, begin, counts, count, here, new, here)


def off_from_plain(
    run: Callable[[torch.Tensor], torch.Tensor], inputs: GdnInputs, form: Part, *,
    truth: GdnInputs | None = None, row: Recurrence = GDN,
) -> str:
    """Describe what is wrong with a launch of the delta rule over a pool of states.

    run    launches on a pool, changes it in place and returns core
    form   the part, with the pool that the new one is drawn from
    truth  the inputs in fp64; by default `inputs` widened
    """
    pool = form.read.pool
    own, wide, twin = (like(pool, dtype) for dtype in (pool.dtype, WIDE, pool.dtype))
    core = run(own)
    dtype = core.dtype
    op = PLAIN.recurrence(row)
    o = op(inputs=truth or widened(inputs), parts=(on(form, wide),), dtype=WIDE, to=TO)
    r = op(inputs=inputs, parts=(on(form, twin),), dtype=dtype, to=TO)
    return first(off("read-out", core, o, r, 1), off("state", own, wide, twin, 1))


def on(form: Part, pool: torch.Tensor) -> Part:
    """The same part over another pool."""
    here = Address(pool, form.read.units)
    return Part(form.form, form.begin, form.count, form.most, here, form.fresh, here)


def like(pool: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy in the same order, with this dtype."""
    return torch.empty_like(pool.mT, dtype=dtype).mT.copy_(pool)


Blocks = tuple[torch.Tensor, torch.Tensor]  # read-outs [N, HV, V], states [n, HV, K, V]
IEEE = Product("ieee", block=64)


def true_rows(inputs: GdnInputs, form: Part, pool: torch.Tensor, row: Recurrence = GDN) -> Blocks:
    """Read-outs and states of equal sequences in fp64, in blocks, which is as exact as token by token."""
    return _in_blocks(_operands(IEEE, row), widened(inputs), form, pool.to(WIDE))


def in_blocks(
    inputs: GdnInputs, form: Part, pool: torch.Tensor, product: Product | None, dtype: torch.dtype,
    row: Recurrence = GDN,
) -> Blocks:  # fmt: skip
    """The yardstick in fp32: sums in any order, operands rounded as declared (None: not at all)."""
    operands = _operands(product or IEEE, row)
    with Reordered(torch.Generator(pool.device).manual_seed(SEED), operands):
        core, state = _in_blocks(operands, inputs, form, pool.float())
    return core.to(dtype), state.to(pool.dtype)


def alone(form: str, products: Mapping[str, Product]) -> Operands:
    """The operand rounding of one form, without a model around it."""
    row = next((row for row in RECURRENCES.values() if form in row.forms), None)
    weights = cast(Any, SimpleNamespace(config=SimpleNamespace(recurrence=row or GDN), layers=(), draft=None))
    operands = Operands(products, weights, chunk=True)
    operands.form = form
    return operands


def _operands(product: Product, row: Recurrence) -> Operands:
    return alone(row.forms[1], {row.forms[1]: product})


def _in_blocks(operands: Operands, inputs: GdnInputs, form: Part, pool: torch.Tensor) -> Blocks:
    each = zip(*(x.view(len(form.count), -1, *x.shape[1:]) for x in inputs), strict=True)
    found = [in_chunks(operands, rows, base) for rows, base in zip(each, pool[form.read.units], strict=True)]
    return torch.cat([core for core, _ in found]), torch.stack([state for _, state in found])

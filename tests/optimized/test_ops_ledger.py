"""The ledger ops: the algebra of labels in Python integers, and that a wrong byte of memory shows in an answer.

Leaves out: the label of every place, which engines compare with the reference's ledger (`test_engine_reference.py`,
`test_strategies.py`).
"""

from dataclasses import replace

import pytest
import torch

from instep.kit.cases import CONV, RECURRENT
from instep.kit.cases.case import Case, serve
from instep.kit.cases.guarded_pools import Pool, guarded, same_bits
from instep_optimized.memory_addresses import Address, Part
from instep_optimized.ops.ledger_label_ops import LEDGER, code, expand, mix, read
from instep_optimized.ops.op_protocols import GdnInputs
from instep_optimized.ops.plain import PLAIN
from instep_reference.contract.place_names import COMPONENTS, Place
from support.independent.integer_labels import (
    BIG,
    SPREAD,
    WORD,
    block,
    folded,
    here,
    ints,
    labels_of,
    mixed,
    rows,
    stamp,
)

Tensor = torch.Tensor
HV, K, V = 2, 3, 5


def test_mix_expand_and_read_match_the_integer_versions() -> None:
    x, y = rows(BIG, 1)[:, 0], rows(BIG[::-1], 1)[:, 0]
    wanted = [mixed(a, b) for a, b in zip(BIG, BIG[::-1], strict=True)]
    assert torch.equal(mix(x, y), rows(wanted, 1)[:, 0])
    assert torch.equal(mix(x, 5), rows([mixed(a, 5) for a in BIG], 1)[:, 0])
    assert torch.equal(expand(x, 3, 4), rows(BIG, 3, 4))
    assert torch.equal(read(rows(BIG, 3, 4)), x)


def test_row_with_misplaced_elements_reads_as_in_the_contract() -> None:
    broken = block(BIG[0], 6)
    broken[[2, 4]] = broken[[4, 2]]
    flat = [int(n) % WORD for n in broken]
    wanted = (flat[0] + sum((n - (flat[0] + j * SPREAD)) * (2 * j + 1) for j, n in enumerate(flat))) % WORD
    assert int(read(broken[None])[0]) % WORD == wanted != BIG[0]


def test_mix_is_order_sensitive_and_zero_is_empty() -> None:
    assert int(mix(ints(3), ints(4))) != int(mix(ints(4), ints(3)))
    assert not expand(ints(0), 5).any()
    assert int(read(torch.zeros(1, 5, dtype=torch.int64))[0]) == 0


def test_the_draft_stages_share_a_family() -> None:
    assert code(Place("trunk", 3, "core")) == stamp("core", 3)
    assert code(Place("extend", 3, "core")) == code(Place("chain.2", 3, "core")) == stamp("core", 3, "draft")


def test_everything_is_declared_to_be_labels() -> None:
    assert {*LEDGER.types(torch.bfloat16, torch.float32)} == {torch.int64, None}, "no ring is split"
    assert set(LEDGER.rounds(torch.bfloat16, torch.float32)) == set(COMPONENTS)
    assert same_bits(LEDGER.select(x=rows(BIG, 4), index=ints(2, -1)), torch.stack([block(BIG[2], 4), block(0, 4)]))


def pool_of(leading: tuple[int, ...], shape: tuple[int, ...], swap: bool = True) -> Pool:
    pool = guarded(leading, shape, torch.int64, swap=swap)
    pool.raw.fill_(-77)
    return pool


def gdn_row(seed: int, count: int) -> tuple[GdnInputs, list[tuple[int, ...]]]:
    """Inputs of `count` rows, and their five labels (q, k, v, log_decay, beta)."""
    labels = [tuple(labels_of(seed + j, 5)) for j in range(count)]
    q, k, v, g, beta = ([row[i] for row in labels] for i in range(5))
    return GdnInputs(rows(q, 1, K), rows(k, 1, K), rows(v, HV, V), rows(g, HV), rows(beta, HV)), labels


def chain_of(chain: int, labels: list[tuple[int, ...]]) -> list[int]:
    chains = []
    for _, k, v, log_decay, beta in labels:
        _, chain = folded(chain, k, v, log_decay, beta)
        chains.append(chain)
    return chains


def decode_core(pool: Pool) -> Tensor:
    """One token for unit 1."""
    own = Address(pool.view, ints(1))
    part = Part("window", ints(0), ints(1), 1, own, torch.tensor([False]))
    return LEDGER.gdn(inputs=gdn_row(30, 1)[0], parts=(part,), dtype=torch.int64, to=here("core"))


def test_one_wrong_element_of_a_state_changes_the_answer() -> None:
    pool = pool_of((2,), (HV, K, V))
    pool.view[1] = block(BIG[0], HV, K, V)
    right = decode_core(pool)
    for at in ((0, 0, 0), (0, 1, 0), (1, 2, 4)):
        kept = pool.view[1][at].clone()
        pool.view[1][at] = kept + 1
        assert not torch.equal(decode_core(pool), right)
        pool.view[1][at] = kept
    assert torch.equal(decode_core(pool), right)


def test_a_transposed_swapped_or_half_stale_state_changes_the_answer() -> None:
    fresh = block(BIG[0], HV, 4, 4)
    wrong = [fresh.transpose(1, 2), fresh.flip(0), torch.cat([fresh[..., :2], block(BIG[1], HV, 4, 4)[..., 2:]], -1)]
    labels = [int(read(x[None])[0]) for x in (fresh, *wrong)]
    assert len(set(labels)) == 4
    assert labels[0] % WORD == BIG[0]


def test_the_order_of_tokens_shows_in_the_chain() -> None:
    _, labels = gdn_row(40, 2)
    assert chain_of(0, labels)[-1] != chain_of(0, labels[::-1])[-1]


def test_memory_moves_through_the_exact_ops_of_the_plain_set() -> None:
    for name in ("select", "store_rows", "pick", "accept", "move"):
        assert getattr(LEDGER, name) is getattr(PLAIN, name)


@pytest.mark.parametrize("case", [*CONV, *RECURRENT], ids=str)
def test_the_ledger_writes_the_same_units_as_plain(case: Case) -> None:
    """The shared cases with labels in the pools: what changes is what `plain` may change, and no more."""
    call = case.build("cpu")
    pools = {name: relabelled(pool) for name, pool in call.pools.items()}
    before = {name: pool.raw.clone() for name, pool in pools.items()}
    views = {id(call.pools[name].view): pools[name].view for name in pools}
    inputs = {name: labels_for(value, views) for name, value in call.inputs.items()}
    result = getattr(LEDGER, case.op)(**inputs)
    plain = serve(PLAIN, case).results["result"]
    assert result.shape == plain.shape
    assert torch.equal((result != 0).flatten(1).any(1), (plain != 0).flatten(1).any(1))
    for name, pool in pools.items():
        assert torch.equal(pool.raw != before[name], pool.writable)


def relabelled(pool: Pool) -> Pool:
    """The same geometry in int64, filled with a number that no block holds."""
    raw = torch.full(pool.raw.shape, -77, dtype=torch.int64)
    view = raw.as_strided(pool.view.shape, pool.view.stride(), pool.view.storage_offset())
    return Pool(raw, view, pool.numbers, pool.writable)


def labels_for(value: object, views: dict[int, Tensor]) -> object:
    """Inputs as labels: tensors by row, addresses to the int64 pools."""
    if isinstance(value, Address):
        return Address(views[id(value.pool)], value.units, value.column)
    if isinstance(value, Part):
        fields = {name: labels_for(getattr(value, name), views) for name in ("read", "store", "per_row")}
        return replace(value, **fields)  # type: ignore[arg-type]
    if isinstance(value, GdnInputs):
        return GdnInputs(*(labels_for(x, views) for x in value))  # type: ignore[arg-type]
    if isinstance(value, tuple) and not isinstance(value, Place):
        return tuple(labels_for(x, views) for x in value)
    if isinstance(value, Tensor):
        return rows(labels_of(90, value.shape[0]), *value.shape[1:])
    return value
